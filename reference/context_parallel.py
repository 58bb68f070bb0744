"""Cut a row among context-parallel ranks and gather it again, with loops over segments and chunks (docs/SPEC.md#context-parallelism)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from reference.refusals import RowRefused

LAYOUTS = ("zigzag", "contiguous")
"""`zigzag` is Megatron-LM's per-document one; `contiguous` has no installed witness."""


def owned_positions(
    cu_seqlens: Sequence[int], rank: int, context_parallel_size: int, layout: str = "zigzag"
) -> list[int]:
    """Return the positions of a row that a rank owns, in the order of the rank's share. R-CP-1, R-CP-3, R-CP-4.

    `cu_seqlens` runs from 0 to P. Raises RowRefused (`indivisible_segment`), ValueError for an unknown layout or rank.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"no layout is called {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if not 0 <= rank < context_parallel_size:
        raise ValueError(f"rank must be 0 to {context_parallel_size - 1}, got {rank}")
    if layout == "contiguous":
        return contiguous_positions(cu_seqlens, rank, context_parallel_size)
    positions: list[int] = []
    for segment, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        chunks = 2 * context_parallel_size
        if context_parallel_size > 1 and (end - start) % chunks != 0:
            why = f"segment {segment} has {end - start} tokens, which {chunks} does not divide; pad segments to multiples of it"
            raise RowRefused("indivisible_segment", why, conversation=segment)
        if context_parallel_size == 1:
            positions += range(start, end)
            continue
        length = (end - start) // chunks
        for chunk in (rank, chunks - 1 - rank):
            positions += range(start + chunk * length, start + (chunk + 1) * length)
    return positions


def contiguous_positions(cu_seqlens: Sequence[int], rank: int, context_parallel_size: int) -> list[int]:
    """Return equal consecutive ranges of the row, one for each rank, whatever the segments are. R-CP-4."""
    pack_length = cu_seqlens[-1]
    if pack_length % context_parallel_size != 0:
        why = f"the row has {pack_length} tokens, which {context_parallel_size} does not divide; fix pack_length"
        raise RowRefused("indivisible_segment", why)
    share = pack_length // context_parallel_size
    return list(range(rank * share, (rank + 1) * share))


def shard(
    tensor: torch.Tensor, cu_seqlens: Sequence[int], rank: int, context_parallel_size: int, layout: str = "zigzag"
) -> torch.Tensor:
    """Return a rank's share `[…, P / cp]` of a tensor `[…, P]`, cut with the same index for every tensor of the row. R-CP-2."""
    return tensor[..., owned_positions(cu_seqlens, rank, context_parallel_size, layout)]


def gather(shards: Sequence[torch.Tensor], cu_seqlens: Sequence[int], layout: str = "zigzag") -> torch.Tensor:
    """Assemble the whole tensor `[…, P]` from the shares of all ranks, given in rank order. R-CP-5."""
    whole = torch.empty(*shards[0].shape[:-1], cu_seqlens[-1], dtype=shards[0].dtype)
    for rank, part in enumerate(shards):
        whole[..., owned_positions(cu_seqlens, rank, len(shards), layout)] = part
    return whole
