"""Give a context-parallel rank its part of attention as strided views: its chunk of each segment and the keys before
it; no mask, no copies.

A chunk's own block of scores is causal and that of the earlier keys is whole; two kernel calls, merged by log-sum-exp, are
exact for both. Segments of one length that follow each other share a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from production.model.device.attention_kernels import Kernel, kernel_for, merge
from production.parallel.context_parallel import LAYOUTS
from production.parallel.gather import Exchange


@dataclass(frozen=True, kw_only=True)
class Run:
    """Groups consecutive segments of one length: one call of a kernel for all of them."""

    start: int
    """Start of the first position in the whole row, in tokens."""
    length: int
    """Tokens of each segment."""
    count: int
    """Number of segments."""


@dataclass(frozen=True, kw_only=True)
class OwnedChunk:
    """Locates one owned chunk of each segment of a run, and the keys that the chunk sees."""

    run: Run
    """The run that the chunk's segments are of."""
    owned: tuple[int, int]
    """Number of chunks of a segment that the rank owns, and the number of this chunk."""
    chunk: int
    """Tokens of the chunk."""
    local_start: int
    """Start of the run in the rank's tokens."""
    before: int
    """Tokens of the segment before the chunk."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the chunk's part of what the rank holds: [t, h, ...] to [count, h, chunk, ...]."""
        owned, this = self.owned
        return self._blocks(tensor, self.local_start + this * self.chunk, owned * self.chunk, self.chunk)

    def whole(self, tensor: torch.Tensor, *, earlier: bool) -> torch.Tensor:
        """Return the chunk's own keys, or all earlier ones, of the whole row: [T, h, ...] to [count, h, n, ...]."""
        start, length = (0, self.before) if earlier else (self.before, self.chunk)
        return self._blocks(tensor, self.run.start + start, self.run.length, length)

    def _blocks(self, tensor: torch.Tensor, start: int, step: int, length: int) -> torch.Tensor:
        """Return a block of `length` tokens of each segment, from `start` and then every `step` tokens."""
        # One call: with a thousand short segments in a row, a chain of views took as long as the kernel.
        tokens, heads, *rest = tensor.stride()
        return tensor.as_strided(
            (self.run.count, tensor.shape[1], length, *tensor.shape[2:]),
            (step * tokens, heads, tokens, *rest),
            tensor.storage_offset() + start * tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Share:
    """Holds the part of a row's attention that a rank computes."""

    runs: Sequence[Run]
    """All segments of the row, in order."""
    exchange: Exchange | None
    """None where the rank holds the whole row."""
    rank: int
    """This rank among those that share the row."""
    size: int
    """Number of ranks that share the row."""

    def places(self) -> Iterator[OwnedChunk]:
        """Return each run's owned chunks, in the order in which the rank holds them."""
        zigzag = LAYOUTS["zigzag"]
        pieces, owned = (1, (0,)) if self.size == 1 else (zigzag.pieces(self.size), zigzag.owned(self.rank, self.size))
        for run in self.runs:
            chunk = run.length // pieces
            for order, piece in enumerate(owned):
                yield OwnedChunk(
                    run=run,
                    owned=(len(owned), order),
                    chunk=chunk,
                    local_start=run.start // self.size,
                    before=piece * chunk,
                )


def runs_of(boundaries: Sequence[int]) -> list[Run]:
    """Return segments without the empty ones, with consecutive segments of one length taken together."""
    lengths = [end - start for start, end in itertools.pairwise(boundaries) if end > start]
    runs, start = [], boundaries[0]
    for length, group in itertools.groupby(lengths):
        count = sum(1 for _ in group)
        runs.append(Run(start=start, length=length, count=count))
        start += length * count
    return runs


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: Share, *, scale: float) -> torch.Tensor:
    """Compute causal attention within segments, differentiable once: query [t, h, d], key and value [t, h_kv, d] to
    [t, h, d].

    `scale` multiplies the scores. With an exchange all its ranks must call this, and backward too; what is kept for
    backward is this rank's share, and keys and values are gathered again.
    """
    output: torch.Tensor = _Attend.apply(query, key, value, share, scale)
    return output


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: Share, scale: float
    ) -> torch.Tensor:
        ctx.share, ctx.scale, ctx.kernel = share, scale, kernel_for(query.device)
        query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
        keys, values = _gathered(share, key, value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        log_sum = query.new_empty(query.shape[:2], dtype=_wide(query.dtype))
        for place in share.places():
            found = _forward(ctx.kernel, place, query, keys, values, scale)
            place.local(output).copy_(found[0])
            place.local(log_sum).copy_(found[1])
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        share: Share = ctx.share
        kernel: Kernel = ctx.kernel
        gradient = gradient.contiguous()
        keys, values = _gathered(share, key, value)
        wide = _wide(query.dtype) if share.size > 1 else query.dtype
        queries_gradient = torch.empty_like(gradient)
        # Two chunks and their prefixes meet at a key; at one rank each key is met once.
        keys_gradient, values_gradient = (
            torch.zeros(each.shape, dtype=wide, device=each.device) for each in (keys, values)
        )
        for place in share.places():
            upper, own, out, total = (place.local(each) for each in (gradient, query, output, log_sum))
            parts = []
            for earlier in (False, True) if place.before else (False,):
                there = [place.whole(each, earlier=earlier) for each in (keys, values)]
                part, *others = kernel.backward(upper, own, *there, out, total, causal=not earlier, scale=ctx.scale)
                parts.append(part)
                for whole, other in zip((keys_gradient, values_gradient), others, strict=True):
                    place.whole(whole, earlier=earlier).add_(other)
            place.local(queries_gradient).copy_(parts[0] if len(parts) == 1 else parts[0].to(wide) + parts[1])
        if share.exchange is not None:
            both = share.exchange.summed(torch.cat([keys_gradient, values_gradient], dim=-1)).to(key.dtype)
            keys_gradient, values_gradient = both[..., : keys.shape[-1]], both[..., keys.shape[-1] :]
        return queries_gradient, keys_gradient, values_gradient, None, None


def _forward(
    kernel: Kernel, place: OwnedChunk, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of one chunk: its own block of scores, which is causal, and that of the keys
    before it.
    """
    own = place.local(query)
    found = kernel.forward(
        own, *(place.whole(each, earlier=False) for each in (keys, values)), causal=True, scale=scale
    )
    if not place.before:
        return found
    before = kernel.forward(
        own, *(place.whole(each, earlier=True) for each in (keys, values)), causal=False, scale=scale
    )
    return merge(found, before)


def _gathered(share: Share, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of the whole row: [t, h_kv, d] to [T, h_kv, d], both in one message."""
    if share.exchange is None:
        return key, value
    both = share.exchange.gather(torch.cat([key, value], dim=-1))
    return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
