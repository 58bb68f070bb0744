"""What differs between two rows or two batches, to the bit, each difference with its class.

A refusal is compared by its kind; the report only where both sides count (Megatron-LM does not).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from equivalence.subjects.protocol import BATCH_TENSORS, ROW_TENSORS, Batch, Row

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that two sides do not share."""

    tensor: str
    """A field of Row or Batch, `report.NAME`, or `refusal`."""
    position: int | tuple[int, ...] | None
    """Where in the tensor; None for a whole field."""
    left: object
    right: object
    klass: str
    """boundary_label, padding, role_mask, shift, token, position, boundary, max_seqlen, report, refusal, dtype_or_shape, other."""


def compare_rows(left: Row, right: Row) -> list[Difference]:
    """All differences of two rows; empty if they are equal."""
    if left.refusal or right.refusal:
        kinds = [side.refusal.kind if side.refusal else None for side in (left, right)]
        if kinds[0] == kinds[1]:
            return []
        return [Difference(tensor="refusal", position=None, left=kinds[0], right=kinds[1], klass="refusal")]
    found: list[Difference] = []
    for name in ROW_TENSORS:
        found += _compare_tensors(name, getattr(left, name), getattr(right, name))
    if left.max_seqlen != right.max_seqlen:
        found.append(
            Difference(
                tensor="max_seqlen", position=None, left=left.max_seqlen, right=right.max_seqlen, klass="max_seqlen"
            )
        )
    if left.report is not None and right.report is not None:
        found += _compare_reports(left.report, right.report)
    return [_classified(difference, left, right) for difference in found]


def compare_batches(left: Batch, right: Batch) -> list[Difference]:
    """All differences of two batches in the fields that both have."""
    found: list[Difference] = []
    for name in BATCH_TENSORS:
        values = getattr(left, name), getattr(right, name)
        if all(value is not None for value in values):
            found += _compare_tensors(name, *(torch.as_tensor(value) for value in values))
    return found


def _compare_tensors(name: str, left: torch.Tensor | None, right: torch.Tensor | None) -> Iterator[Difference]:
    if left is None or right is None:
        if left is not right:
            shapes = [None if side is None else tuple(side.shape) for side in (left, right)]
            yield Difference(tensor=name, position=None, left=shapes[0], right=shapes[1], klass="dtype_or_shape")
        return
    if left.dtype != right.dtype or left.shape != right.shape:
        described = [f"{side.dtype} {tuple(side.shape)}" for side in (left, right)]
        yield Difference(tensor=name, position=None, left=described[0], right=described[1], klass="dtype_or_shape")
    if left.shape != right.shape or torch.equal(left, right):
        return
    # A NaN equals nothing, itself included: it must show.
    for place in (left != right).nonzero().tolist():
        position = tuple(place)
        yield Difference(
            tensor=name,
            position=position[0] if len(position) == 1 else position or None,
            left=left[position].item(),
            right=right[position].item(),
            klass="other",
        )


def _compare_reports(left: Mapping[str, int | None], right: Mapping[str, int | None]) -> Iterator[Difference]:
    for name in sorted(left.keys() | right.keys()):
        values = left.get(name, "absent"), right.get(name, "absent")
        if values[0] != values[1]:
            yield Difference(tensor=f"report.{name}", position=None, left=values[0], right=values[1], klass="report")


def _classified(difference: Difference, left: Row, right: Row) -> Difference:
    if difference.klass != "other" or not isinstance(difference.position, int):
        return difference
    return Difference(
        tensor=difference.tensor,
        position=difference.position,
        left=difference.left,
        right=difference.right,
        klass=_class_of(difference, left, right),
    )


def _class_of(difference: Difference, left: Row, right: Row) -> str:
    """The class of a differing position: what a person would look for first."""
    fixed = {"input_ids": "token", "position_ids": "position", "cu_seqlens": "boundary"}
    if difference.tensor in fixed:
        return fixed[difference.tensor]
    position = difference.position
    assert isinstance(position, int)
    assert left.cu_seqlens is not None
    assert right.cu_seqlens is not None
    assert left.target_ids is not None
    assert right.target_ids is not None
    boundaries = [*left.cu_seqlens.tolist(), *right.cu_seqlens.tolist()]
    inner = {int(boundary) for boundary in boundaries if 0 < boundary < len(left.target_ids)}
    if position + 1 in inner:
        return "boundary_label"
    targets = int(left.target_ids[position]), int(right.target_ids[position])
    if _in_tail(left, position) or _in_tail(right, position):
        return "padding"
    if difference.tensor == "token_mask":
        return "role_mask" if IGNORE_INDEX in targets or targets[0] != targets[1] else "padding"
    if IGNORE_INDEX in targets:
        return "role_mask"
    neighbours = [
        int(side.target_ids[place])
        for side, other in ((left, targets[1]), (right, targets[0]))
        if side.target_ids is not None
        for place in (position - 1, position + 1)
        if 0 <= place < len(side.target_ids) and int(side.target_ids[place]) == other
    ]
    return "shift" if neighbours else "other"


def _in_tail(row: Row, position: int) -> bool:
    """Whether a position lies in the run of equal tokens that ends the row: padding, in all likelihood."""
    assert row.input_ids is not None
    return position + 1 >= len(row.input_ids) or bool((row.input_ids[position + 1 :] == row.input_ids[-1]).all())
