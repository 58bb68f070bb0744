"""Draw batches that the job must refuse, and some that it must take: sound rows with up to three faults put in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from equivalence.generators.choices import Choices

PAD_ID = 3
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class GuardCase:
    """Rows as a dataset may hold them, and the job that takes them."""

    rows: list[Row]
    context_parallel_size: int
    data_parallel_size: int
    global_batch_size: int | None
    multi_token_prediction: bool


def draw_guards(choices: Choices) -> GuardCase:
    """Draw one to five rows of one to six segments at cp 1 to 4; one batch in four is sound."""
    size = choices.one_of((1, 2, 3, 4))
    unit = 1 if size == 1 else 2 * size
    pieces, count = choices.integer(1, 8), choices.integer(1, 5)
    rows = [_row(choices, unit, pieces, size) for _ in range(count)]
    data = choices.integer(1, 3)
    if choices.integer(0, 9) == 9:
        for row in rows:
            _one_token_more(row)
    for _ in range(choices.integer(0, 3)):
        _put_in(choices, rows)
    return GuardCase(
        rows=rows if choices.integer(0, 60) < 60 else [],
        context_parallel_size=size,
        data_parallel_size=data,
        global_batch_size=choices.one_of((count, count, None, count + 1)),
        multi_token_prediction=choices.one_of((True, False)),
    )


def _row(choices: Choices, unit: int, pieces: int, size: int) -> Row:
    cuts = sorted(set(choices.integers(1, max(pieces - 1, 1), fewest=0, longest=5)) - {pieces})
    boundaries = [unit * cut for cut in (0, *cuts, pieces)]
    length = unit * pieces
    made = torch.Generator().manual_seed(choices.integer(0, 1000))
    mask = torch.randint(0, 2, (length,), generator=made).float()
    untrained = torch.where(torch.randint(0, 2, (length,), generator=made) == 1, -100, PAD_ID)
    return {
        "input_ids": torch.randint(0, 1000, (length,), generator=made),
        "target_ids": torch.where(mask == 1, torch.randint(0, 1000, (length,), generator=made), untrained),
        "token_mask": mask,
        "position_ids": torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(boundaries)]),
        "cu_seqlens": torch.tensor(boundaries, dtype=torch.int32),
        "max_seqlen": max(end - start for start, end in itertools.pairwise(boundaries)),
        "context_parallel_size": size,
    }


def _one_token_more(row: Row) -> None:
    """Add a token, so that 2·cp divides every segment but the last."""
    for name in _TENSORS[:4]:
        row[name] = torch.cat([row[name], row[name][-1:]])
    boundaries = row["cu_seqlens"].clone()
    boundaries[-1] += 1
    row |= {"cu_seqlens": boundaries, "max_seqlen": int(boundaries.diff().max())}


def _put_in(choices: Choices, rows: list[Row]) -> None:
    """Put a fault into a row, most often the last."""
    row = rows[choices.one_of((-1, choices.integer(0, len(rows) - 1)))]
    name = choices.one_of((*FAULTS, "target_mask", "target_mask"))
    if name in ("missing_field", "unpacked") or all(isinstance(row.get(field), torch.Tensor) for field in _TENSORS):
        FAULTS[name](row, choices)


_TENSORS = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens")


def _drop(row: Row, choices: Choices) -> None:
    row.pop(choices.one_of((*_TENSORS, "context_parallel_size")), None)


def _unpack(row: Row, _: Choices) -> None:
    for name in ("cu_seqlens", "max_seqlen"):
        row.pop(name, None)


def _misshape(row: Row, choices: Choices) -> None:
    name = choices.one_of(_TENSORS)
    row[name] = choices.one_of((row[name][None], row[name][:0], torch.cat([row[name], row[name]])))


def _retype(row: Row, choices: Choices) -> None:
    name = choices.one_of(_TENSORS)
    row[name] = row[name].to(torch.float64 if name == "token_mask" else torch.int16)


def _lengthen(row: Row, _: Choices) -> None:
    for name in _TENSORS[:4]:
        row[name] = torch.cat([row[name], row[name]])


def _boundary(row: Row, choices: Choices) -> None:
    """Change an entry of the boundaries, most often the first or the last."""
    cu = row["cu_seqlens"]
    if cu.ndim == 1 and len(cu):
        cu = cu.clone()
        place = choices.one_of((0, -1, choices.integer(0, len(cu) - 1)))
        cu[place] = int(cu[place]) + choices.one_of((1, -1, 2))
        row["cu_seqlens"] = cu


def _empty_segment(row: Row, choices: Choices) -> None:
    cu = row["cu_seqlens"]
    if cu.ndim == 1 and len(cu):
        place = choices.one_of((0, len(cu) - 1, choices.integer(0, len(cu) - 1)))
        row["cu_seqlens"] = torch.cat([cu[: place + 1], cu[place:]])


def _longest(row: Row, choices: Choices) -> None:
    row["max_seqlen"] = row.get("max_seqlen", 1) + choices.one_of((1, -1))


def _other_size(row: Row, choices: Choices) -> None:
    row["context_parallel_size"] = row.get("context_parallel_size", 1) + choices.one_of((1, 2))


def _ragged(row: Row, _: Choices) -> None:
    """Move a token from one segment to the segment before."""
    cu = row["cu_seqlens"]
    if cu.ndim == 1 and len(cu) > 2:
        moved = cu.clone()
        moved[-2] += 1
        row["cu_seqlens"] = moved
        row["max_seqlen"] = int(moved.diff().max())


def _other_mask(row: Row, choices: Choices) -> None:
    """Set the mask of the tokens instead of the targets, or change one value of the mask."""
    mask = row["token_mask"]
    if mask.ndim == 1 and len(mask):
        place = choices.one_of((0, len(mask) - 1, choices.integer(0, len(mask) - 1)))
        changed = mask.clone()
        changed[place] = choices.one_of((1.0 - float(mask[place]), 0.5))
        row["token_mask"] = choices.one_of((changed, mask.roll(-1)))


def _unknown(row: Row, _: Choices) -> None:
    row["attention_mask"] = row["token_mask"]


FAULTS: dict[str, Callable[[Row, Choices], None]] = {
    "target_mask": _other_mask,
    "boundary": _boundary,
    "empty_segment": _empty_segment,
    "max_seqlen": _longest,
    "ragged": _ragged,
    "context_parallel_size": _other_size,
    "lengths": _lengthen,
    "dtype": _retype,
    "shape": _misshape,
    "unknown_field": _unknown,
    "missing_field": _drop,
    "unpacked": _unpack,
}
"""Faults of a row, by name."""
