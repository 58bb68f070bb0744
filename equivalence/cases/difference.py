"""Find and classify the differences of two rows or two batches, to the bit.

Refusals are compared by kind, and reports only if both sides count (Megatron-LM does not).
"""

from __future__ import annotations

from collections import Counter
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
    """Place in the tensor; None for a whole field."""
    left: object
    right: object
    kind: str
    """Of a row: boundary_label, padding, role_mask, mask, shift, row_end, label, token, position, boundary, max_seqlen, report, refusal,
    dtype_or_shape. Checks of other things than rows name their own, or other."""


def compare_rows(left: Row, right: Row) -> list[Difference]:
    """Return all differences of two rows; empty if they are equal."""
    if left.refusal or right.refusal:
        kinds = [side.refusal.kind if side.refusal else None for side in (left, right)]
        if kinds[0] == kinds[1]:
            return []
        return [Difference(tensor="refusal", position=None, left=kinds[0], right=kinds[1], kind="refusal")]
    found: list[Difference] = []
    for name in ROW_TENSORS:
        values = getattr(left, name), getattr(right, name)
        found += _compare_boundaries(*values) if _lost_boundary(name, *values) else _compare_tensors(name, *values)
    if left.max_seqlen != right.max_seqlen:
        found.append(
            Difference(
                tensor="max_seqlen", position=None, left=left.max_seqlen, right=right.max_seqlen, kind="max_seqlen"
            )
        )
    if left.report is not None and right.report is not None:
        found += _compare_reports(left.report, right.report)
    facts = _PairFacts(left, right) if found else None
    return [_classified(difference, facts) for difference in found]


def compare_batches(left: Batch, right: Batch) -> list[Difference]:
    """Return all differences of two batches in the fields that both have."""
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
            yield Difference(tensor=name, position=None, left=shapes[0], right=shapes[1], kind="dtype_or_shape")
        return
    if left.dtype != right.dtype or left.shape != right.shape:
        described = [f"{side.dtype} {tuple(side.shape)}" for side in (left, right)]
        yield Difference(tensor=name, position=None, left=described[0], right=described[1], kind="dtype_or_shape")
    if left.shape != right.shape or torch.equal(left, right):
        return
    # A NaN equals nothing, itself included: it must show.
    differ = left != right
    for place, *values in zip(differ.nonzero().tolist(), left[differ].tolist(), right[differ].tolist(), strict=True):
        yield Difference(
            tensor=name,
            position=place[0] if len(place) == 1 else tuple(place) or None,
            left=values[0],
            right=values[1],
            kind="other",
        )


def _lost_boundary(name: str, left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Return whether two sides have different numbers of boundaries, which means a missing boundary and not a wrong shape."""
    if name != "cu_seqlens" or left is None or right is None:
        return False
    return left.dtype == right.dtype and left.dim() == right.dim() == 1 and left.shape != right.shape


def _compare_boundaries(left: torch.Tensor, right: torch.Tensor) -> Iterator[Difference]:
    """Yield each boundary that only one side has as a difference; an empty segment has its boundary twice."""
    counts = [Counter(side.tolist()) for side in (left, right)]
    for has, lacks, is_left in ((counts[0], counts[1], True), (counts[1], counts[0], False)):
        for value in (has - lacks).elements():
            sides = (value, None) if is_left else (None, value)
            yield Difference(tensor="cu_seqlens", position=None, left=sides[0], right=sides[1], kind="boundary")


def _compare_reports(left: Mapping[str, int | None], right: Mapping[str, int | None]) -> Iterator[Difference]:
    for name in sorted(left.keys() | right.keys()):
        values = left.get(name, "absent"), right.get(name, "absent")
        if values[0] != values[1]:
            yield Difference(tensor=f"report.{name}", position=None, left=values[0], right=values[1], kind="report")


class _PairFacts:
    """Facts about a pair of rows that all classes need, gathered once because a row may differ at every position."""

    def __init__(self, left: Row, right: Row) -> None:
        self.targets = [_as_list(side.target_ids) for side in (left, right)]
        length = min(map(len, self.targets))
        self.inner = {int(b) for side in (left, right) for b in _as_list(side.cu_seqlens)[1:] if b < length}
        self.tail = min(_tail_start(side) for side in (left, right))
        self.length = length
        ids = _as_list(left.input_ids)
        self.pad = ids[-1] if self.tail < length - 1 and ids else None
        masks = [None if side.token_mask is None else side.token_mask.reshape(-1) for side in (left, right)]
        self.is_mask_shifted = any(
            one is not None and other is not None and len(one) == len(other) > 1 and torch.equal(one[1:], other[:-1])
            for one, other in (masks, masks[::-1])
        )


def _classified(difference: Difference, facts: _PairFacts | None) -> Difference:
    if difference.kind != "other" or not isinstance(difference.position, int):
        return difference
    assert facts is not None
    return Difference(
        tensor=difference.tensor,
        position=difference.position,
        left=difference.left,
        right=difference.right,
        kind=_class_of(difference.tensor, difference.position, facts),
    )


def _class_of(tensor: str, position: int, facts: _PairFacts) -> str:
    """Return the class of a differing position: the most likely cause, to look at first."""
    fixed = {"input_ids": "token", "position_ids": "position", "cu_seqlens": "boundary"}
    if tensor in fixed:
        return fixed[tensor]
    if position + 1 in facts.inner:
        return "boundary_label"
    if position >= min(map(len, facts.targets)):
        return "other"
    targets = [side[position] for side in facts.targets]
    if position + 1 >= facts.tail:
        # A row without padding at its end was cut there: its last label is the first token behind the cut, or a pad.
        return "row_end" if facts.pad is None else "padding"
    if _is_shifted(facts, position, targets):
        return "shift"
    if tensor == "token_mask":
        return _class_of_mask(targets, facts)
    return "role_mask" if IGNORE_INDEX in targets else "label"


def _class_of_mask(targets: list[int], facts: _PairFacts) -> str:
    """Return the class of a differing mask that no boundary and no padding at the row's end explains."""
    if IGNORE_INDEX in targets or targets[0] != targets[1]:
        return "role_mask"
    if facts.is_mask_shifted:
        return "shift"
    return "padding" if targets[0] == facts.pad else "mask"


def _is_shifted(facts: _PairFacts, position: int, targets: list[int]) -> bool:
    """Return whether one side's label is the other side's next or previous label; -100 has too many equal neighbours to tell."""
    return any(
        0 <= place < len(side) and side[place] == other != IGNORE_INDEX
        for side, other in zip(facts.targets, reversed(targets), strict=True)
        for place in (position - 1, position + 1)
        if targets[0] != targets[1]
    )


def _tail_start(row: Row) -> int:
    """Return the start of the run of equal tokens that ends the row, which is most likely padding."""
    ids = _as_list(row.input_ids)
    start = len(ids)
    while start and ids[start - 1] == ids[-1]:
        start -= 1
    return start


def _as_list(tensor: torch.Tensor | None) -> list[int]:
    return [] if tensor is None else [int(value) for value in tensor.reshape(-1).tolist()]
