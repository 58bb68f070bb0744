"""Shift a row's tensors within its segments for each depth of multi-token prediction (docs/SPEC.md#multi-token-prediction)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FILL = 0
"""Value, in every tensor, at positions whose shifted position lies beyond their segment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Depth:
    """A row's tensors at one depth, each `[P]` and of the dtype of what it was shifted from."""

    input_ids: torch.Tensor
    target_ids: torch.Tensor
    token_mask: torch.Tensor
    """The mask of the shifted *target*: not and-ed with the mask at the position itself."""
    position_ids: torch.Tensor | None
    """None on the online path, whose model is given none (R-ONLINE-7)."""


def shift(tensor: torch.Tensor, cu_seqlens: Sequence[int], depth: int) -> torch.Tensor:
    """Return `x[i + depth]` where `i + depth` lies in the segment of `i`, else 0, for a tensor `[P]`. R-MTP-1."""
    shifted = torch.full_like(tensor, FILL)
    for start, end in itertools.pairwise(cu_seqlens):
        last = max(start, end - depth)
        shifted[start:last] = tensor[start + depth : end]
    return shifted


def depths(
    input_ids: torch.Tensor,
    target_ids: torch.Tensor,
    token_mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    cu_seqlens: Sequence[int],
    count: int,
) -> list[Depth]:
    """Return depths 1 to `count` of a row's tensors `[P]`, each shifted from the row itself. R-MTP-1, R-MTP-2."""
    return [
        Depth(
            input_ids=shift(input_ids, cu_seqlens, depth),
            target_ids=shift(target_ids, cu_seqlens, depth),
            token_mask=shift(token_mask, cu_seqlens, depth),
            position_ids=None if position_ids is None else shift(position_ids, cu_seqlens, depth),
        )
        for depth in range(1, count + 1)
    ]
