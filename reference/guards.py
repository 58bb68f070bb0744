"""Check by plain reading that rows may form a batch of the job (docs/SPEC.md#batch, R-GUARD-1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

TENSORS = {
    "input_ids": torch.int64,
    "target_ids": torch.int64,
    "token_mask": torch.float32,
    "position_ids": torch.int64,
    "cu_seqlens": torch.int32,
}
NUMBERS = ("max_seqlen", "context_parallel_size")
FIELDS = (*TENSORS, *NUMBERS)
IGNORE_INDEX = -100

Row = Mapping[str, Any]


def first_fault(
    rows: Sequence[Row],
    *,
    context_parallel_size: int,
    data_parallel_size: int,
    global_batch_size: int | None,
    pad_id: int | None,
) -> tuple[str, int | None] | None:
    """Return kind and row of the first fault, checking all rows for one kind before the next kind; None for rows that form a batch. R-GUARD-1.

    `pad_id` is given where multi-token prediction rolls the mask along with the targets.
    """
    if not rows:
        return "global_batch_size", None
    packed = ["cu_seqlens" in row or "max_seqlen" in row for row in rows]
    if len(set(packed)) == 2:
        return "mixed_rows", packed.index(not packed[0])
    length = len(rows[0].get("input_ids", ()))
    checks: list[tuple[str, Callable[[Row], bool]]] = [
        ("missing_field", lambda row: any(name not in row for name in FIELDS)),
        ("field_shape", lambda row: bool(row.keys() - {*FIELDS, "report"}) or any(map(_is_misshapen(row), TENSORS))),
        ("field_dtype", lambda row: any(row[name].dtype != dtype for name, dtype in TENSORS.items())),
        ("unequal_lengths", lambda row: len(row["input_ids"]) != length),
        ("cu_start", lambda row: row["cu_seqlens"][0] != 0),
        ("cu_order", lambda row: any(segment <= 0 for segment in _segments(row))),
        ("cu_end", lambda row: row["cu_seqlens"][-1] != length),
        ("max_seqlen", lambda row: int(row["max_seqlen"]) != max(_segments(row))),
        ("context_parallel_size", lambda row: int(row["context_parallel_size"]) != context_parallel_size),
        ("indivisible_segment", lambda row: _is_ragged(row, context_parallel_size)),
    ]
    for kind, is_wrong in checks:
        for number, row in enumerate(rows):
            if is_wrong(row):
                return kind, number
    if global_batch_size is not None:
        if len(rows) != global_batch_size:
            return "global_batch_size", None
        if len(rows) % data_parallel_size != 0:
            return "data_parallel_size", None
    if pad_id is not None:
        for number, row in enumerate(rows):
            if any(not _fits(*pair, pad_id) for pair in zip(*_mask_and_targets(row), strict=True)):
                return "target_mask", number
    return None


def _is_misshapen(row: Row) -> Callable[[str], bool]:
    """Return a predicate: is a tensor's shape other than one value for each token (for boundaries: other than one dimension)?"""

    def is_misshapen(name: str) -> bool:
        shape = tuple(row[name].shape)
        return len(shape) != 1 or shape[0] == 0 or (name != "cu_seqlens" and shape != tuple(row["input_ids"].shape))

    return is_misshapen


def _segments(row: Row) -> list[int]:
    return [end - start for start, end in itertools.pairwise(row["cu_seqlens"].tolist())] or [0]


def _is_ragged(row: Row, size: int) -> bool:
    return size > 1 and any(segment % (2 * size) != 0 for segment in _segments(row))


def _mask_and_targets(row: Row) -> tuple[list[float], list[int]]:
    return row["token_mask"].tolist(), row["target_ids"].tolist()


def _fits(mask: float, target: int, pad_id: int) -> bool:
    """Return whether the mask fits the target: a target that counts is a token, and one that does not count is ignored or padding."""
    return (mask == 1 and target != IGNORE_INDEX) or (mask == 0 and target in (IGNORE_INDEX, pad_id))
