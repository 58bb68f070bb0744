"""Compute causal attention within the segments of packed rows (thd), also under context parallelism, without
Transformer Engine.

No mask is built, and memory is linear in the row. Under context parallelism every rank holds the whole row's keys and values
while a layer runs, and gathers them once more for the backward pass, so that what a layer keeps is its rank's share alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from production.errors import PackproofError
from production.model.device.attention_share import Share, attend, runs_of
from production.parallel.gather import exchange

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CAUSAL = ("causal", "padding_causal")


class SegmentAttention(torch.nn.Module):
    """megatron-core's `core_attention` for packed rows: each token sees its segment up to itself, and nothing else.

    Segments are those of `cu_seqlens_q_padded`, else of `cu_seqlens_q`; padding within a segment counts as its tokens.
    Under context parallelism a rank holds its zigzag share (R-CP-1) of queries, keys and values. The softmax is in the
    queries' dtype, of half precision in float32. `cp_comm_type` is not looked at: keys and values are always
    gathered. The same inputs give bitwise the same outputs and gradients on the CPU. On CUDA the boundaries are read on the host once a
    layer, and that has not been run.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,  # noqa: ARG002 - as megatron-core calls it
        pg_collection: Any = None,
        k_channels: int | None = None,  # noqa: ARG002 - multi latent attention says what the tensors' shapes say
        v_channels: int | None = None,  # noqa: ARG002 - as above
    ) -> None:
        """As megatron-core builds it from a layer spec; `softmax_scale` defaults to 1 / sqrt(d).

        The ranks are those of `pg_collection.cp`, without a collection megatron-core's own where the config's
        `context_parallel_size` is more than 1. Raises PackproofError for what it does not do: attention dropout, a sliding window,
        a softmax with a sink, clipped or logged scores, cross attention, masks other than causal.
        """
        super().__init__()
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        wanted = {
            "attention_dropout": (dropout, 0),
            "window_size": (config.window_size, None),
            "softmax_type": (config.softmax_type, "vanilla"),
            "apply_query_key_layer_scaling": (config.apply_query_key_layer_scaling, False),
            "qk_clip": (config.qk_clip, False),
            "log_max_attention_logit": (config.log_max_attention_logit, False),
            "attention_type": (attention_type, "self"),
        }
        for name, (found, only) in wanted.items():
            if found != only:
                raise self._refused(f"{name} must be {only!r}, got {found!r}", f"set {name} to {only!r}")
        self._check_mask(attn_mask_type)
        self.group = _context_group(config, pg_collection)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend: map query [t, h, d], key [t, h_kv, d], value [t, h_kv, d_v] to [t, h · d_v], in the query's dtype.

        t is the rank's share of the row, `h_kv` divides h, and `packed_seq_params` is a PackedSeqParams with the boundaries of the whole row.
        Raises PackproofError for rows that are not packed, a mask, a bias, boundaries of keys that are not those of
        queries, shapes or dtypes that do not fit; BatchRefused for boundaries as `context_parallel.shard_index` (R-CP-3).
        """
        if attn_mask_type is not None:
            self._check_mask(attn_mask_type)
        for name, found in (("attention_mask", attention_mask), ("attention_bias", attention_bias)):
            if found is not None:
                raise self._refused(
                    f"{name} must be None", "leave it out: the boundaries decide which tokens see each other"
                )
        self._check_tensors(query, key, value)
        cu_seqlens = self._boundaries(packed_seq_params)
        heads, width, value_width = query.shape[1], query.shape[2], value.shape[2]
        scale = width**-0.5 if self.softmax_scale is None else self.softmax_scale
        # The fused kernel wants one width; zeros change neither scores nor the columns that are kept.
        query, key, value = (_padded(each, max(width, value_width)) for each in (query, key, value))
        output = attend(query, key, value, self._share(cu_seqlens, query), scale=scale)
        return output[..., :value_width].reshape(-1, heads * value_width)

    def _share(self, cu_seqlens: torch.Tensor, query: torch.Tensor) -> Share:
        boundaries = cu_seqlens.tolist()
        if self.group is not None:
            total = distributed.get_world_size(self.group) * len(query)
            how = exchange(cu_seqlens, total, self.group, device=query.device)
            return Share(runs=runs_of(boundaries), exchange=how, rank=how.rank, size=how.size)
        ends = (boundaries[0], boundaries[-1]) if boundaries else None
        if ends != (0, len(query)) or any(start > end for start, end in itertools.pairwise(boundaries)):
            raise self._refused(
                f"cu_seqlens must go from 0 to {len(query)}, the number of tokens, and never fall, got {_shortened(boundaries)}",
                "give the boundaries of these tokens",
            )
        return Share(runs=runs_of(boundaries), exchange=None, rank=0, size=1)

    def _boundaries(self, params: Any) -> torch.Tensor:
        if params is None or params.qkv_format != "thd":
            found = "no packed_seq_params" if params is None else f"qkv_format {params.qkv_format!r}"
            raise self._refused(
                f"{found}, where this attention takes packed rows (thd) only", "give PackedSeqParams of a packed row"
            )
        if params.local_cp_size is not None or params.cp_group is not None:
            raise self._refused(
                "local_cp_size and cp_group must not be set: a row has the context parallel group of the job",
                "leave local_cp_size and cp_group out",
            )
        padded = params.cu_seqlens_q_padded is not None
        queries, keys = (
            (params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded)
            if padded
            else (params.cu_seqlens_q, params.cu_seqlens_kv)
        )
        if queries is None:
            raise self._refused("cu_seqlens_q must be given", "give the boundaries of the row's segments")
        if keys is not None and keys is not queries and not torch.equal(keys, queries):
            raise self._refused("cu_seqlens_kv must equal cu_seqlens_q", "give the same boundaries to both")
        boundaries: torch.Tensor = queries
        return boundaries

    def _check_mask(self, mask_type: Any) -> None:
        name = getattr(mask_type, "name", mask_type)
        if name not in _CAUSAL:
            raise self._refused(f"attn_mask_type must be causal, got {name}", "set it to causal")

    def _check_tensors(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        fits = (
            query.ndim == key.ndim == value.ndim == 3
            and len(query) == len(key) == len(value)
            and key.shape[1] == value.shape[1]
            and query.shape[2] == key.shape[2]
            and query.shape[1] % key.shape[1] == 0
        )
        if not fits:
            raise self._refused(
                f"shapes must fit together, got {shapes}",
                "give [t, h, d], [t, h_kv, d], [t, h_kv, d_v] where h_kv divides h",
            )
        if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
            found = ", ".join(str(each.dtype) for each in (query, key, value))
            raise self._refused(
                f"query, key and value must have one floating dtype of at least 16 bits, got {found}",
                "give one floating dtype of at least 16 bits",
            )

    def _refused(self, what: str, fix: str) -> PackproofError:
        return PackproofError(what=what, where=f"attention of layer {self.layer_number}", fix=fix)


def _context_group(config: Any, collection: Any) -> distributed.ProcessGroup | None:
    """Return the ranks that share a row; None where there is one."""
    if collection is not None:
        group: distributed.ProcessGroup | None = collection.cp
    elif config.context_parallel_size > 1:
        from megatron.core import parallel_state  # noqa: PLC0415 - heavy, and only here

        group = parallel_state.get_context_parallel_group()
    else:
        return None
    return group if group is not None and distributed.get_world_size(group) > 1 else None


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _shortened(boundaries: Sequence[int]) -> str:
    shown = [*boundaries[:4], "…", *boundaries[-2:]] if len(boundaries) > 7 else boundaries
    return " ".join(map(str, shown))
