"""Check context parallelism: positions, tensors and refusals are equal on every rank (R-CP), and gathering restores the row.

The third witness of the zigzag is megatron-core's rotary embedding, which cuts in pure torch. `contiguous` has no third witness.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from megatron.core.models.common.embeddings import rope_utils

from equivalence.cases.result import CheckResult
from equivalence.checks.cuts.pairs import Side, compare_sides
from production.errors import BatchRefused
from production.parallel import context_parallel as production
from reference import context_parallel as reference
from reference.refusals import RowRefused

_GATHERED = ("input_ids", "token_mask")
"""One tensor of each dtype: a gather takes as long as all cuts together."""


def check_context_parallel(
    tensors: Mapping[str, torch.Tensor], cu_seqlens: Sequence[int], size: int, *, layout: str = "zigzag"
) -> CheckResult:
    """Cut a row's tensors [P] for every rank of `size` on each side, and gather them again."""
    sides: dict[str, Side] = {
        "reference": _reference(tensors, cu_seqlens, size, layout),
        "production": _production(tensors, cu_seqlens, size, layout),
    }
    if layout == "zigzag" and not isinstance(sides["reference"], str):
        # The rotary embedding cuts what does not divide too, and wrongly: it is a witness of what is cut, not of refusals.
        sides["megatron_lm"] = {f"index of rank {r}": rotary_index(cu_seqlens, r, size) for r in range(size)}
    return compare_sides("context_parallel", sides)


def rotary_index(cu_seqlens: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """Return positions [P / size] int64 in the order in which megatron-core's rotary embedding takes its frequencies for a rank."""
    positions = torch.arange(cu_seqlens[-1])
    parts = [
        rope_utils._get_thd_freqs_on_this_cp_rank(  # noqa: SLF001 - the witness
            rank, size, torch.empty((end - start) // size), positions[start:end]
        )
        for start, end in itertools.pairwise(cu_seqlens)
    ]
    return torch.cat(parts)


def _reference(tensors: Mapping[str, torch.Tensor], cu_seqlens: Sequence[int], size: int, layout: str) -> Side:
    found: dict[str, torch.Tensor] = {}
    try:
        for rank in range(size):
            index = reference.owned_positions(cu_seqlens, rank, size, layout)
            found[f"index of rank {rank}"] = torch.tensor(index, dtype=torch.int64)
            for name, tensor in tensors.items():
                found[f"{name} of rank {rank}"] = reference.shard(tensor, cu_seqlens, rank, size, layout)
        for name in _GATHERED:
            shards = [found[f"{name} of rank {rank}"] for rank in range(size)]
            found[f"{name} gathered"] = reference.gather(shards, cu_seqlens, layout)
    except RowRefused as refused:
        return refused.kind
    return found


def _production(tensors: Mapping[str, torch.Tensor], cu_seqlens: Sequence[int], size: int, layout: str) -> Side:
    found: dict[str, torch.Tensor] = {}
    boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
    try:
        for rank in range(size):
            found[f"index of rank {rank}"] = production.shard_index(boundaries, rank, size, layout=layout)
            cut = production.shard_tensors(tensors, boundaries, rank, size, layout=layout)
            found |= {f"{name} of rank {rank}": tensor for name, tensor in cut.items()}
        for name in _GATHERED:
            shards = [found[f"{name} of rank {rank}"] for rank in range(size)]
            found[f"{name} gathered"] = production.gather(shards, boundaries, layout=layout)
    except BatchRefused as refused:
        return refused.kind
    return found
