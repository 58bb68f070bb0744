"""Refuse faulty batches on the host before any copy to a device, in whole-batch operations.

A guard that needs a device would stop its stream for every batch, so rows that lie on a device are refused too.

Reference: `reference/guards.py`, R-GUARD-1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from production.errors import BatchRefused, PackproofError
from production.rows.builder import Row
from production.tokens.turn_tokens import IGNORE_INDEX

Sample = Mapping[str, Any]

TOKEN_FIELDS = {
    "input_ids": torch.int64,
    "target_ids": torch.int64,
    "token_mask": torch.float32,
    "position_ids": torch.int64,
}
"""Tensors of [P], and their dtypes."""
FIELDS = (*TOKEN_FIELDS, "cu_seqlens", "max_seqlen", "context_parallel_size")
"""Fields that a row must have."""
OPTIONAL_FIELDS = ("report",)
"""Fields that a row may have besides."""
_PACKED_FIELDS = ("cu_seqlens", "max_seqlen")
"""Fields that only a packed row has."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Holds what the job that takes a batch expects of the batch."""

    context_parallel_size: int
    """cp of the job; segments must be multiples of 2·cp where it exceeds 1."""
    data_parallel_size: int
    """dp: must divide the number of rows, unless a validation batch is padded afterwards."""
    global_batch_size: int | None
    """Rows of a global batch; None where any number may come, as in validation, whose last batch is padded
    afterwards.
    """
    multi_token_prediction: bool = False
    """Whether the mask is rolled with the targets and so must be theirs."""
    pad_token_id: int | None = None
    """Needed with multi_token_prediction: a target that is not trained must be this or -100."""

    def __post_init__(self) -> None:
        """Refuse settings that no batch could satisfy."""
        for name in ("context_parallel_size", "data_parallel_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackproofError(what=f"must be at least 1, got {value}", where=name, fix="give at least 1")
        if self.multi_token_prediction and self.pad_token_id is None:
            raise PackproofError(
                what="must be given: the guard compares the mask with the targets by it",
                where="pad_token_id",
                fix="give the pad id that the rows were built with",
            )


def as_fields(row: Row | Sample) -> dict[str, Any]:
    """Return the fields of a row by name."""
    if isinstance(row, Row):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return dict(row)


def check_rows(rows: Sequence[Row | Sample], settings: BatchSettings) -> None:
    """Refuse rows that cannot be a batch of this job: BatchRefused with kind, row, what and fix, in the order of R-GUARD-1."""
    if not rows:
        raise _refused("global_batch_size", None, "a batch must have at least one row, got 0", "give at least one row")
    fields = [as_fields(row) for row in rows]
    _check_presence(fields)
    _check_shapes(fields)
    _check_dtypes(fields)
    lengths = [len(row["input_ids"]) for row in fields]
    if (other := _first(torch.tensor(lengths) != lengths[0])) is not None:
        what = f"{lengths[other]} tokens where row 0 has {lengths[0]}"
        raise _refused("unequal_lengths", other, what, "build all rows for one pack_length")
    _check_boundaries(fields, lengths[0])
    _check_context_parallel(fields, settings.context_parallel_size)
    _check_counts(len(rows), settings)
    if settings.multi_token_prediction:
        _check_target_mask(fields, settings.pad_token_id)


def _check_presence(fields: list[dict[str, Any]]) -> None:
    packed = [any(name in row for name in _PACKED_FIELDS) for row in fields]
    if any(packed) and not all(packed):
        other = next(index for index, is_packed in enumerate(packed) if is_packed != packed[0])
        what = f"row 0 is {'packed' if packed[0] else 'not packed'} and this one is{' not' if packed[0] else ''}"
        raise _refused("mixed_rows", other, what, "keep packed and other rows in batches of their own")
    for index, row in enumerate(fields):
        for name in FIELDS:
            if name not in row:
                raise _refused(
                    "missing_field",
                    index,
                    f"a row must have the field {name}",
                    "give every field that production.rows.builder.Row has",
                )


def _check_shapes(fields: list[dict[str, Any]]) -> None:
    for index, row in enumerate(fields):
        if unknown := sorted(set(row) - {*FIELDS, *OPTIONAL_FIELDS}):
            raise _refused(
                "field_shape",
                index,
                f"a row must have no other field than production.rows.builder.Row, got {', '.join(unknown)}",
                "leave them out",
            )
        for name in (*TOKEN_FIELDS, "cu_seqlens"):
            tensor = row[name]
            if not isinstance(tensor, torch.Tensor):
                what = f"{name} is a {type(tensor).__name__}, not a tensor"
                raise _refused("field_dtype", index, what, "give tensors, as production.rows.builder builds them")
            if tensor.device.type != "cpu":
                fix = "collate on the host and copy the batch afterwards"
                raise _refused("field_shape", index, f"{name} must be on the host, got {tensor.device}", fix)
            if tensor.ndim != 1 or not len(tensor) or (name in TOKEN_FIELDS and len(tensor) != len(row["input_ids"])):
                what = f"{name} has the shape {list(tensor.shape)}"
                raise _refused("field_shape", index, what, "give one value per token, and at least one")
        if isinstance(row["max_seqlen"], torch.Tensor) and row["max_seqlen"].numel() != 1:
            what = f"max_seqlen has the shape {list(row['max_seqlen'].shape)}"
            raise _refused("field_shape", index, what, "give one number")


def _check_dtypes(fields: list[dict[str, Any]]) -> None:
    expected = {**TOKEN_FIELDS, "cu_seqlens": torch.int32}
    for index, row in enumerate(fields):
        for name, dtype in expected.items():
            if row[name].dtype != dtype:
                raise _refused(
                    "field_dtype", index, f"{name} must be {dtype}, got {row[name].dtype}", f"give it as {dtype}"
                )
        for name in ("max_seqlen", "context_parallel_size"):
            if not _is_integer(row[name]):
                what = f"{name} is a {type(row[name]).__name__}"
                raise _refused("field_dtype", index, what, "give it as an integer")


def _check_boundaries(fields: list[dict[str, Any]], length: int) -> None:
    """Check cu_start, cu_order, cu_end and max_seqlen over the boundaries of all rows at once."""
    counts = torch.tensor([len(row["cu_seqlens"]) for row in fields])
    entries = torch.cat([row["cu_seqlens"] for row in fields]).long()
    owner = torch.repeat_interleave(torch.arange(len(fields)), counts)
    last = counts.cumsum(0) - 1
    first = last - counts + 1
    if (row := _first(entries[first] != 0)) is not None:
        what = f"cu_seqlens begins with {entries[first[row]]}"
        raise _refused("cu_start", row, what, "begin it with 0")
    segments = entries.diff()
    within = owner[1:] == owner[:-1]
    if (at := _first(within & (segments <= 0))) is not None:
        what = f"cu_seqlens goes from {entries[at]} to {entries[at + 1]}"
        fix = "leave empty conversations out of the row (semantics empty_conversation=refuse finds them)"
        raise _refused("cu_order", int(owner[at]), what, fix)
    if (row := _first(entries[last] != length)) is not None:
        what = f"cu_seqlens ends with {entries[last[row]]} in a row of {length} tokens"
        raise _refused("cu_end", row, what, "end it with the length of the row")
    longest = torch.zeros(len(fields), dtype=torch.int64)
    longest.scatter_reduce_(0, owner[1:][within], segments[within], "amax")
    stated = torch.tensor([int(row["max_seqlen"]) for row in fields])
    if (row := _first(stated != longest)) is not None:
        what = f"max_seqlen is {stated[row]} and the longest segment {longest[row]}"
        raise _refused("max_seqlen", row, what, "build the row again: its boundaries were changed after it was built")


def _check_context_parallel(fields: list[dict[str, Any]], size: int) -> None:
    built_for = torch.tensor([int(row["context_parallel_size"]) for row in fields])
    if (row := _first(built_for != size)) is not None:
        what = f"built for a context parallel size of {built_for[row]} in a job of {size}"
        raise _refused("context_parallel_size", row, what, "build the rows with the job's context_parallel_size")
    if size == 1:
        return
    for index, fields_of_row in enumerate(fields):
        segments = fields_of_row["cu_seqlens"].diff()
        if (segment := _first(segments % (2 * size) != 0)) is not None:
            what = f"segment {segment} has {segments[segment]} tokens, no multiple of 2·cp = {2 * size}"
            fix = "make pack_length a multiple of 2·cp, or build with semantics indivisible_segment=refuse to find such rows"
            raise _refused("indivisible_segment", index, what, fix)


def _check_counts(count: int, settings: BatchSettings) -> None:
    if settings.global_batch_size is None:
        return
    if count != settings.global_batch_size:
        what = f"{count} rows in a global batch of {settings.global_batch_size}"
        raise _refused("global_batch_size", None, what, "give exactly one global batch")
    if count % settings.data_parallel_size:
        what = f"{count} rows over {settings.data_parallel_size} data-parallel ranks"
        raise _refused("data_parallel_size", None, what, "make the global batch size a multiple of data_parallel_size")


def _check_target_mask(fields: list[dict[str, Any]], pad: int | None) -> None:
    """Check that the mask is 1 only where there is a target, and 0 only at padding or without a target, so that no
    other row's mask passes.
    """
    for index, row in enumerate(fields):
        mask, targets = row["token_mask"], row["target_ids"]
        untrained = targets == IGNORE_INDEX
        wrong = torch.where(mask == 1, untrained, (mask != 0) | ~(untrained | (targets == pad)))
        if (at := _first(wrong)) is not None:
            what = f"token_mask is {mask[at]:g} at position {at}, whose target is {targets[at]}"
            fix = "give the mask of the targets, not of the tokens: target_ids and token_mask are both already shifted"
            raise _refused("target_mask", index, what, fix)


def _is_integer(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return isinstance(value, int) and not isinstance(value, bool)


def _first(is_wrong: torch.Tensor) -> int | None:
    """Return the first True; the usual answer, None, costs one pass."""
    return int(is_wrong.nonzero()[0, 0]) if is_wrong.any() else None


def _refused(kind: str, row: int | None, what: str, fix: str) -> BatchRefused:
    return BatchRefused(kind=kind, what=what, where="batch" if row is None else f"batch, row {row}", fix=fix, row=row)
