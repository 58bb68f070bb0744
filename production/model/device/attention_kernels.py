"""Attend one block of queries to one block of keys, with the log-sum-exp that lets blocks be merged, and compute the
gradient.

Two kernels: torch's fused one on the CPU, and one in plain torch for any other device, which is exact and keeps tiles of
512 × 512 scores; it has been run on the CPU only, where it takes 2 to 4 times as long. Neither keeps scores for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_TILE = 512

type Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
type Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Both directions of attention over batches of blocks of equal size.

    Shapes: query [b, h, m, d], key and value [b, h_kv, n, d], where `h_kv` divides h, output [b, h, m, d] in the query's
    dtype, log-sum-exp [b, h, m] in float32, for float64 in float64.
    """

    forward: Forward
    """(query, key, value, *, causal, scale) to (output, log-sum-exp); `causal` needs m = n."""
    backward: Backward
    """(gradient, query, key, value, output, log-sum-exp, *, causal, scale) to the gradients of query, key, value.

    Output and log-sum-exp may be those of the queries over more keys than are given: then the gradients are these
    keys' part.
    """


def kernel_for(device: torch.device) -> Kernel:
    """Return the kernel for tensors on this device."""
    return FUSED_CPU if device.type == "cpu" else TILED


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [..., n, d] and log-sum-exp [..., n] of the same queries over both blocks of keys; outputs come
    in any dtype, and leave wide.
    """
    total = torch.logaddexp(first[1], second[1])
    shares = [(each - total).exp_().unsqueeze(-1) for each in (first[1], second[1])]
    return first[0] * shares[0] + second[0] * shares[1], total


def _fused_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - no public one returns the log-sum-exp
        query, key, value, 0.0, causal, scale=scale
    )
    return output, log_sum


def _fused_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001 - as above
            gradient, query, key, value, output, log_sum, 0.0, causal, scale=scale
        )
    )
    return gradients


def _tiled_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    grouped, key, value = _wide(query, key, value)
    output = torch.zeros_like(grouped)
    log_sum = grouped.new_full(grouped.shape[:-1], -torch.inf)
    for rows, keys, is_diagonal in _tiles(query, key, causal=causal):
        scores = _scores(grouped[rows], key[keys], scale, is_diagonal=is_diagonal)
        before = log_sum[rows]
        after = torch.logaddexp(before, scores.logsumexp(-1))
        weights = (scores - after.unsqueeze(-1)).exp_()
        output[rows] = output[rows] * (before - after).exp_().unsqueeze(-1) + weights @ value[keys]
        log_sum[rows] = after
    return output.flatten(1, 2).to(query.dtype), log_sum.flatten(1, 2)


def _tiled_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    grouped, wide_key, wide_value = _wide(query, key, value)
    upper = _unflatten(gradient, groups).to(grouped.dtype)
    log_sum = _unflatten(log_sum, groups)
    # What the softmax's own gradient takes away: the mean of its inputs' gradients under the weights.
    mean = (upper * _unflatten(output, groups)).sum(-1, keepdim=True)
    queries, keys_, values = (torch.zeros_like(each) for each in (grouped, wide_key, wide_value))
    for rows, keys, is_diagonal in _tiles(query, key, causal=causal):
        scores = _scores(grouped[rows], wide_key[keys], scale, is_diagonal=is_diagonal)
        weights = (scores - log_sum[rows].unsqueeze(-1)).exp_()
        values[keys] += (weights.mT @ upper[rows]).sum(2, keepdim=True)
        inner = weights * (upper[rows] @ wide_value[keys].mT - mean[rows]) * scale
        queries[rows] += inner @ wide_key[keys]
        keys_[keys] += (inner.mT @ grouped[rows]).sum(2, keepdim=True)
    return (
        queries.flatten(1, 2).to(query.dtype),
        keys_.flatten(1, 2).to(key.dtype),
        values.flatten(1, 2).to(value.dtype),
    )


def _wide(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query as [b, h_kv, h / h_kv, m, d], key and value as [b, h_kv, 1, n, d], half precision in float32."""
    dtype = query.dtype if query.dtype == torch.float64 else torch.float32
    grouped = _unflatten(query, (key.shape[1], query.shape[1] // key.shape[1]))
    return grouped.to(dtype), key.unsqueeze(2).to(dtype), value.unsqueeze(2).to(dtype)


def _unflatten(heads: torch.Tensor, groups: tuple[int, int]) -> torch.Tensor:
    """Return [b, h, ...] to [b, h_kv, h / h_kv, ...]."""
    return heads.reshape(heads.shape[0], *groups, *heads.shape[2:])


type _Place = tuple[slice, slice, slice, slice]


def _tiles(query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> Iterator[tuple[_Place, _Place, bool]]:
    """Return the places of all tiles with a score that counts, and whether the diagonal runs through them."""
    (batch, _, rows, _), columns = query.shape, key.shape[-2]
    together = max(1, _TILE**2 // (min(rows, _TILE) * min(columns, _TILE)))
    everything = slice(None)
    for first in range(0, batch, together):
        some = slice(first, first + together)
        for row in range(0, rows, _TILE):
            for column in range(0, row + 1 if causal else columns, _TILE):
                yield (
                    (some, everything, everything, slice(row, row + _TILE)),
                    (some, everything, everything, slice(column, column + _TILE)),
                    causal and row == column,
                )


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, *, is_diagonal: bool) -> torch.Tensor:
    scores = (query @ key.mT) * scale
    if is_diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


FUSED_CPU = Kernel(forward=_fused_forward, backward=_fused_backward)
TILED = Kernel(forward=_tiled_forward, backward=_tiled_backward)
