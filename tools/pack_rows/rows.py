"""Decide which conversations share a row, with the packers of the online path (docs/SPEC.md#packing), and in which order rows stand."""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from production.online.packing import assign_decreasing, pack

Algorithm = Literal[
    "first_fit_decreasing", "concatenative", "modified_first_fit_decreasing", "first_fit_shuffle",
    "first-fit-decreasing", "sequential",
]  # fmt: skip
"""The packers of docs/SPEC.md#packing; the last two are older names of the first two."""
OLDER_NAMES = {"first-fit-decreasing": "first_fit_decreasing", "sequential": "concatenative"}

Ids = NDArray[np.int64]


def rows_of(lengths: Ids, capacity: int, *, algorithm: Algorithm, seed: int | None) -> tuple[Ids, Ids]:
    """Return the conversations row after row [N], and where each row begins [R + 1].

    Longest first would train long rows first: within a row and among rows the order is the input's, or the one that
    `seed` draws. `concatenative` packs in that order.
    """
    rank = ranks(len(lengths), seed)
    name = OLDER_NAMES.get(algorithm, algorithm)
    if not len(lengths):
        return np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    if name == "concatenative":
        order = np.argsort(rank)
        return order, _cut_in_order(lengths[order], capacity)
    if name == "first_fit_decreasing":
        assigned = assign_decreasing(lengths, capacity)
    else:
        bins = pack(lengths.tolist(), capacity, algorithm=name, seed=seed if name == "first_fit_shuffle" else None)
        assigned = np.empty(len(lengths), dtype=np.int64)
        for number, members in enumerate(bins):
            assigned[members] = number
    first = np.full(int(assigned.max()) + 1, len(lengths), dtype=np.int64)
    np.minimum.at(first, assigned, rank)
    row = np.argsort(np.argsort(first))[assigned]
    order = np.lexsort((rank, row))
    return order, np.concatenate([[0], np.bincount(row).cumsum()])


def ranks(count: int, seed: int | None) -> Ids:
    """Return the place of each conversation in the order of the input, or in the one that the seed draws.

    By a hash and not by random.shuffle, whose order no Python version has promised.
    """
    if seed is None:
        return np.arange(count)
    keys = b"".join(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=16).digest() for index in range(count))
    halves = np.frombuffer(keys, dtype=">u8").reshape(count, 2)
    return np.argsort(np.lexsort((halves[:, 1], halves[:, 0])))


def _cut_in_order(lengths: Ids, capacity: int) -> Ids:
    """Return where rows begin if a new one begins at each conversation that does not fit (R-PACK-1)."""
    ends = lengths.cumsum()
    starts = [0]
    while starts[-1] < len(lengths):
        before = int(ends[starts[-1] - 1]) if starts[-1] else 0
        starts.append(int(np.searchsorted(ends, before + capacity, side="right")))
    return np.array(starts, dtype=np.int64)
