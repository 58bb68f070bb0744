"""Hypothesis strategies for what is cut and packed: rows of segments at a context parallel size, and sequences for bins."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True, eq=False)
class CutRow:
    """A row of random values and how many ranks share it."""

    cu_seqlens: list[int]
    """From 0 to P; segments may be empty, and some rows have one that 2·cp does not divide."""
    size: int
    """cp."""
    tensors: dict[str, torch.Tensor]
    """[P]: ids, labels and positions int64, mask float32."""


@st.composite
def cut_rows(draw: st.DrawFn) -> CutRow:
    """Rows of one to eight segments at cp 1 to 8, some of them not to be cut."""
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    granularity = 1 if size == 1 else 2 * size
    pieces = draw(st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any))
    lengths = [granularity * each for each in pieces]
    torn = draw(st.sampled_from(["", "", "row", "segments"]))
    if torn and granularity > 1:
        places, more = draw(st.permutations(range(len(lengths)))), draw(st.integers(1, granularity - 1))
        lengths[places[0]] += more
        if torn == "segments" and len(places) > 1:  # a row that divides, of segments that do not
            lengths[places[1]] += granularity - more
    total = sum(lengths)
    made = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids = torch.randint(-100, 1000, (total,), generator=made)
    return CutRow(
        cu_seqlens=[0, *itertools.accumulate(lengths)],
        size=size,
        tensors={
            "input_ids": ids,
            "target_ids": torch.randint(-100, 1000, (total,), generator=made),
            "token_mask": torch.randint(0, 2, (total,), generator=made).float(),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        },
    )


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths and a capacity: many equal lengths, many at the borders of the classes, some lists with one too long."""
    capacity = draw(st.integers(1, 60))
    parts = [capacity // part + more for part in (2, 3, 6) for more in (0, 1)]
    borders = st.sampled_from([each for each in (1, capacity, *parts) if 1 <= each <= capacity])
    lengths = draw(st.lists(borders | st.integers(1, capacity), max_size=60))
    if lengths and draw(st.integers(0, 5)) == 5:
        lengths[draw(st.integers(0, len(lengths) - 1))] = draw(st.sampled_from([0, capacity + 1]))
    return lengths, capacity
