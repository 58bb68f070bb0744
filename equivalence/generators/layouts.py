"""Draw what is cut and packed: rows of segments at a context parallel size, and sequences for bins."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from equivalence.generators.choices import Choices, drawn

MANY = 1024
"""A row of more segments, or a list of more sequences, is drawn now and then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutRow:
    """A row of random values and how many ranks share it."""

    cu_seqlens: list[int]
    """From 0 to P; segments may be empty, and some rows have one that 2·cp does not divide."""
    size: int
    """cp."""
    tensors: dict[str, torch.Tensor]
    """[P]: ids, labels and positions int64, mask float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutCase:
    """A row and how it is cut."""

    row: CutRow
    layout: str


@dataclass(frozen=True, kw_only=True, eq=False)
class DepthCase:
    """Holds a row and the number of depths to which its tensors are shifted."""

    row: CutRow
    depths: int


@dataclass(frozen=True, kw_only=True)
class BinsCase:
    """Sequences to pack."""

    lengths: list[int]
    capacity: int
    order: list[int]
    """Sort key of first fit."""
    data_parallel_size: int


def draw_cut(choices: Choices) -> CutCase:
    """Draw a row and a layout."""
    return CutCase(row=draw_cut_row(choices), layout=choices.one_of(("zigzag", "contiguous")))


def draw_depths(choices: Choices) -> DepthCase:
    """Draw a row and a number of depths."""
    return DepthCase(row=draw_cut_row(choices), depths=choices.integer(0, 3))


def draw_bins(choices: Choices) -> BinsCase:
    """Draw sequences, an order of them and the number of ranks."""
    lengths, capacity = draw_sequences(choices)
    order = choices.order(range(len(lengths)))
    return BinsCase(lengths=lengths, capacity=capacity, order=order, data_parallel_size=choices.integer(1, 5))


def draw_cut_row(choices: Choices) -> CutRow:
    """Draw a row of one to eight segments, now and then one of more than 1,024, at cp 1 to 8; some are not to be cut."""
    size = choices.one_of((1, 2, 3, 4, 8))
    granularity = 1 if size == 1 else 2 * size
    is_long = choices.rarely(100)
    pieces = choices.integers(
        0, 1 if is_long else 4, fewest=2 * MANY + 200 if is_long else 1, longest=2 * MANY + 200 if is_long else 8
    )
    if not any(pieces):
        pieces.append(1)
    lengths = [granularity * each for each in pieces]
    torn = choices.one_of(("", "", "row", "segments"))
    if torn and granularity > 1:
        places, more = choices.order(range(len(lengths))), choices.integer(1, granularity - 1)
        lengths[places[0]] += more
        if torn == "segments" and len(places) > 1:  # a row that divides, of segments that do not
            lengths[places[1]] += granularity - more
    total = sum(lengths)
    made = torch.Generator().manual_seed(choices.integer(0, 1000))
    return CutRow(
        cu_seqlens=[0, *itertools.accumulate(lengths)],
        size=size,
        tensors={
            "input_ids": torch.randint(-100, 1000, (total,), generator=made),
            "target_ids": torch.randint(-100, 1000, (total,), generator=made),
            "token_mask": torch.randint(0, 2, (total,), generator=made).float(),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        },
    )


def draw_sequences(choices: Choices) -> tuple[list[int], int]:
    """Draw lengths and a capacity: many equal lengths, many at the borders of the classes, some lists with one too long."""
    capacity = choices.integer(1, 60)
    parts = [capacity // part + more for part in (2, 3, 6) for more in (0, 1)]
    borders = [each for each in (1, capacity, *parts) if 1 <= each <= capacity]
    # A number beyond the capacity stands for a border.
    fewest, longest = (2 * MANY, 2 * MANY + 200) if choices.rarely(400) else (0, 60)  # of many some thousand bins
    found = choices.integers(1, capacity + len(borders), fewest=fewest, longest=longest)
    lengths = [each if each <= capacity else borders[each - capacity - 1] for each in found]
    if lengths and choices.integer(0, 5) == 5:
        lengths[choices.integer(0, len(lengths) - 1)] = choices.one_of((0, capacity + 1))
    return lengths, capacity


def cut_rows() -> st.SearchStrategy[CutRow]:
    """Return `draw_cut_row` as a Hypothesis strategy."""
    return drawn(draw_cut_row)


def sequences() -> st.SearchStrategy[tuple[list[int], int]]:
    """Return `draw_sequences` as a Hypothesis strategy."""
    return drawn(draw_sequences)
