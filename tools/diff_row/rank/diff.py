"""Compare the sides at a step to the bit; report each differing tensor with its first place and the value there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tools.diff_row.rank.backends import Cut
from tools.diff_row.rank.diagnose import cause
from tools.diff_row.rank.steps import TENSORS, Has, Refused, StepDifference

ORDER = ("positions", *TENSORS, "cu_seqlens", "max_seqlen")
"""Of tensors at a step: what explains the others first."""


def differences_of(
    name: str,
    depth: int,
    sides: Mapping[str, Has],
    *,
    origin: torch.Tensor | None = None,
    wholes: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    cut: Cut | None = None,
) -> tuple[StepDifference, ...]:
    """Return the differences of each side from the first side, in the tensors that both have."""
    found: list[StepDifference] = []
    (base, left), *others = sides.items()
    for side, right in others:
        if isinstance(left, Refused) or isinstance(right, Refused):
            found += _refusals(base, left, side, right)
            continue
        own = _positions(right)
        both = [tensor for tensor in left if tensor in right]  # in the order of the left side, not of a set
        for tensor in sorted(both, key=_order):
            different = _compared(base, left[tensor], side, right[tensor], tensor, origin, own)
            if different is None:
                continue
            whole = (wholes or {}).get(side)
            if cut is not None and whole is not None and tensor in ("positions", *TENSORS):
                is_share = name in ("share", "slice")
                told = cause(tensor, right[tensor], whole=whole, depth=depth, cut=cut, is_share=is_share)
                different = dataclasses.replace(different, cause=told or different.cause)
            found.append(different)
    return tuple(sorted(found, key=first_place))


def first_place(found: StepDifference) -> tuple[float, int]:
    """Return the sort key of a step's differences: a refusal first, then the index of the share, which explains the rest, then the place."""
    if found.tensor in ("refusal", "positions"):
        return (-1.0, 0)
    return (float("inf") if found.place is None else found.place, _order(found.tensor))


def _order(tensor: str) -> int:
    return ORDER.index(tensor) if tensor in ORDER else len(ORDER)


def _refusals(base: str, left: Has, side: str, right: Has) -> list[StepDifference]:
    kinds = [has.kind if isinstance(has, Refused) else "built" for has in (left, right)]
    if None in kinds or kinds[0] == kinds[1]:  # no witness of this step, or refused alike
        return []
    values = [None if kind == "built" else kind for kind in kinds]
    return [
        StepDifference(
            left=base,
            right=side,
            tensor="refusal",
            count=1,
            place=None,
            position=None,
            right_position=None,
            left_value=values[0],
            right_value=values[1],
            cause="one side refuses",
        )
    ]


def _compared(
    base: str,
    left: torch.Tensor,
    side: str,
    right: torch.Tensor,
    tensor: str,
    origin: torch.Tensor | None,
    own: torch.Tensor | None,
) -> StepDifference | None:
    """Compare to the bit, dtype and shape included; NaN equals nothing."""
    known: dict[str, Any] = {"left": base, "right": side, "tensor": tensor}
    if left.shape != right.shape or left.dtype != right.dtype:
        shapes = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (left, right)]
        return StepDifference(
            **known,
            count=1,
            place=None,
            position=None,
            right_position=None,
            left_value=shapes[0],
            right_value=shapes[1],
            cause="another shape or dtype",
        )
    differ = (left != right).reshape(-1)
    if not bool(differ.any()):
        return None
    first = int(differ.nonzero()[0])
    on_tokens = origin is not None and left.numel() == len(origin)
    position = int(origin[first]) if origin is not None and on_tokens else None
    theirs = int(own[first]) if own is not None and on_tokens and first < len(own) else None
    return StepDifference(
        **known,
        count=int(differ.sum()),
        place=first,
        position=position,
        right_position=theirs if theirs != position else None,
        left_value=left.reshape(-1)[first].item(),
        right_value=right.reshape(-1)[first].item(),
        cause="differs",
    )


def _positions(has: Has) -> torch.Tensor | None:
    return None if isinstance(has, Refused) else has.get("positions")
