"""Pack the sequences of the online path into bins: the four packers and the rule of the number of bins.

Bins are found by a tree over free room, or for a whole run of equal lengths at once, and sequences by bisection, so that
a million sequences take seconds where trying each bin in turn takes hours.

Reference: `reference/packing.py`, R-PACK-1 to 6, docs/SPEC.md#packing.
"""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from production.errors import PackproofError

Ids = NDArray[np.int64]
_RUNS_PAY = 2_000
"""Bins looked at for each sequence, up to which placing runs of equal lengths is faster than the tree."""
Bins = list[list[int]]
"""Indices of sequences, in the order in which they were put in."""


def pack(
    lengths: Sequence[int], capacity: int, *, algorithm: str, multiple_of: int = 1, seed: int | None = None
) -> Bins:
    """Return bins of at most `capacity` tokens by the packer of this name, their number raised to a multiple
    (R-PACK-5).

    `lengths` are tokens per sequence; `multiple_of` is the data-parallel size. `first_fit_shuffle` needs a `seed`, and
    the others take none. Raises PackproofError naming the sequence that is too long or has no token.
    """
    if algorithm not in PACKERS and algorithm != "first_fit_shuffle":
        raise PackproofError(
            what=f"must be one of {', '.join(PACKERS)}, first_fit_shuffle, got {algorithm!r}",
            where="packing algorithm",
            fix=f"choose one of {', '.join(PACKERS)}, first_fit_shuffle",
        )
    if (algorithm == "first_fit_shuffle") != (seed is not None):
        why = "needs a seed" if seed is None else "takes no seed"
        raise PackproofError(
            what=f"{algorithm} {why}", where="packing seed", fix="give a seed to first_fit_shuffle only"
        )
    if seed is not None:
        bins = first_fit(lengths, capacity, order=shuffled(len(lengths), seed=seed))
    else:
        bins = PACKERS[algorithm](lengths, capacity)
    return raise_bin_count(bins, multiple_of)


def concatenative(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack in order; open a new bin when the next sequence does not fit (R-PACK-1)."""
    check_lengths(lengths, capacity)
    bins: Bins = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return bins


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack from the longest, of equal lengths the larger index first, each into the first bin with room (R-PACK-2)."""
    check_lengths(lengths, capacity)
    array = np.asarray(lengths, dtype=np.int64)
    order = decreasing_order(array)
    return bins_of(assign_decreasing(array, capacity), order)


def decreasing_order(lengths: Ids) -> Ids:
    """Return the order of R-PACK-2: the longest first, of equal lengths the larger index."""
    order: Ids = np.lexsort((np.arange(len(lengths)), lengths))[::-1]
    return order


def assign_decreasing(lengths: Ids, capacity: int) -> Ids:
    """Return the bin of each sequence by R-PACK-2, in 16 bytes a sequence; lengths are from 1 to `capacity`.

    Sequences of one length fill the first bin with room as far as it goes, then the next one: a whole run of equal
    lengths is placed at once. Where lengths repeat too seldom for that, the tree over free room finds each bin.
    """
    order = decreasing_order(lengths)
    ordered = lengths[order]
    result = np.empty(len(lengths), dtype=np.int64)
    cuts = np.flatnonzero(np.diff(ordered)) + 1
    if len(cuts) * (int(lengths.sum()) // capacity + 1) > _RUNS_PAY * len(lengths):
        rooms = _Rooms(_most_bins(lengths, capacity), capacity)
        for index, length in zip(order.tolist(), ordered.tolist(), strict=True):
            result[index] = rooms.take(length)
        return result
    least = int(ordered[-1]) if len(ordered) else 0
    numbers, room = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    opened = 0
    for first, last in itertools.pairwise([0, *cuts.tolist(), len(ordered)] if len(ordered) else []):
        length, count = int(ordered[first]), last - first
        there = np.flatnonzero(room >= length)
        fits = room[there] // length
        before = fits.cumsum() - fits
        taken = np.clip(count - before, 0, fits)
        places = numbers[there].repeat(taken)
        room[there] -= taken * length
        if (left := count - len(places)) > 0:
            each = capacity // length
            fresh = np.arange(opened, opened + -(-left // each))
            held = np.full(len(fresh), each)
            held[-1] = left - each * (len(fresh) - 1)
            places = np.concatenate([places, fresh.repeat(held)])
            opened += len(fresh)
            numbers, room = np.concatenate([numbers, fresh]), np.concatenate([room, capacity - held * length])
        result[order[first:last]] = places
        is_open = room >= least
        if 2 * np.count_nonzero(is_open) < len(room):
            numbers, room = numbers[is_open], room[is_open]
    return result


def bins_of(assigned: Ids, order: Ids) -> Bins:
    """Return the sequences of each bin, in the order in which they were put in; every bin up to the last has some."""
    if not len(order):
        return []
    by_bin = order[np.argsort(assigned[order], kind="stable")]
    cuts = np.flatnonzero(np.diff(assigned[by_bin])) + 1
    return [part.tolist() for part in np.split(by_bin, cuts)]


def first_fit(lengths: Sequence[int], capacity: int, *, order: Iterable[int]) -> Bins:
    """Pack in the order given, each into the first bin with room: with `shuffled`, R-PACK-3.

    Raises PackproofError for an order that is not a permutation.
    """
    check_lengths(lengths, capacity)
    order = list(order)
    if len(order) != len(lengths) or set(order) != set(range(len(lengths))):
        raise PackproofError(
            what=f"must hold each index of the {len(lengths)} sequences once, got {len(order)} other indices",
            where="packing order",
            fix="give a permutation, such as packing.shuffled",
        )
    bins: Bins = []
    rooms = _Rooms(_most_bins(lengths, capacity), capacity)
    for index in order:
        number = rooms.take(lengths[index])
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
    return bins


def shuffled(count: int, *, seed: int) -> list[int]:
    """Return the order of `first_fit_shuffle`: for one seed always the same, on every rank and machine."""
    order = list(range(count))
    random.Random(seed).shuffle(order)  # noqa: S311 - not for secrets
    return order


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack large sequences first, each with what fills its bin best (R-PACK-4)."""
    check_lengths(lengths, capacity)
    large, medium, small, tiny = _classes(lengths, capacity)
    bins: Bins = [[index] for index in large]
    rooms = [capacity - lengths[index] for index in large]

    longest = _Longest(lengths, medium)
    for number in range(len(bins)):
        _put(bins, rooms, lengths, number, longest.take(rooms[number]))
    pairs = _Pairs(lengths, small)
    for number in reversed(range(len(bins))):
        # Beside a large and a medium one less than C / 6 is left: no small one fits, and no pair is found.
        if pair := pairs.take(rooms[number]):
            for index in pair:
                _put(bins, rooms, lengths, number, index)

    rest = [*longest.left(), *pairs.left(), *tiny]
    longest = _Longest(lengths, sorted(rest, key=lambda index: -lengths[index]))  # stable
    for number in range(len(bins)):
        while _put(bins, rooms, lengths, number, longest.take(rooms[number])):
            pass
    return bins + _least_filled(lengths, capacity, longest.left())


PACKERS: dict[str, Callable[[Sequence[int], int], Bins]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}
"""The packers that need no more than lengths and capacity; `first_fit_shuffle` is the fourth, with a seed."""


def raise_bin_count(bins: Bins, multiple_of: int) -> Bins:
    """Return the bins, and as many more as make their number a multiple (R-PACK-5); the given bins are not changed.

    The given bin with the most sequences gives its last ones away, one to each new bin, until it has one left; then the next
    fullest does. Raises PackproofError for fewer sequences than bins.
    """
    if multiple_of < 1:
        raise PackproofError(
            what=f"multiple_of must be at least 1, got {multiple_of}",
            where="number of bins",
            fix="give at least 1",
        )
    missing = -len(bins) % multiple_of
    sequences = sum(map(len, bins))
    if sequences < len(bins) + missing:
        raise PackproofError(
            what=f"there must be at least {len(bins) + missing} sequences, one for each bin of a multiple of {multiple_of}, got {sequences}",
            where="number of bins",
            fix="give at least one sequence per data-parallel rank: a larger batch, or fewer ranks",
        )
    raised = [list(each) for each in bins]
    by_size = sorted(((len(each), number) for number, each in enumerate(bins)), reverse=True)
    # There are enough sequences, so the spare ones of all given bins never run out before the new bins are filled.
    spare = (number for count, number in by_size for _ in range(count - 1))
    return raised + [[raised[number].pop()] for number in itertools.islice(spare, missing)]


def take_rank(bins: Bins, *, rank: int, size: int) -> Bins:
    """Return the bins of data-parallel rank `rank` of `size`: `rank, rank + size, …` (R-PACK-6).

    Raises PackproofError where `size` does not divide them.
    """
    if not 0 <= rank < size:
        raise PackproofError(
            what=f"must be from 0 to {size - 1}, got {rank}",
            where="data-parallel rank",
            fix=f"give a rank from 0 to {size - 1}",
        )
    if len(bins) % size:
        raise PackproofError(
            what=f"must be a multiple of the {size} data-parallel ranks, got {len(bins)}",
            where="number of bins",
            fix="raise the number of bins first (raise_bin_count)",
        )
    return bins[rank::size]


def check_lengths(lengths: Sequence[int], capacity: int) -> None:
    """Refuse a sequence that no bin can hold, or that has no token: PackproofError naming the first by index."""
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            why = f"more than a bin's {capacity}" if length > capacity else "and a bin holds sequences of at least one"
            raise PackproofError(
                what=f"{length} tokens, {why}",
                where=f"sequence {index}",
                fix="cut or leave it out, or raise the capacity" if length > capacity else "leave it out",
            )


def _classes(lengths: Sequence[int], capacity: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return large, medium, small and tiny sequences, the first two from the longest, the others from the shortest."""
    found: tuple[list[int], ...] = ([], [], [], [])
    for index, length in enumerate(lengths):
        found[0 if 2 * length > capacity else 1 if 3 * length > capacity else 2 if 6 * length > capacity else 3].append(
            index
        )
    for each, sign in zip(found, (-1, -1, 1, 1), strict=True):  # stable: the smaller index stays first among equals
        each.sort(key=lambda index, sign=sign: sign * lengths[index])  # type: ignore[misc]
    return found[0], found[1], found[2], found[3]


def _put(bins: Bins, rooms: list[int], lengths: Sequence[int], number: int, index: int | None) -> bool:
    """Put a sequence into bin `number`, if there is one."""
    if index is None:
        return False
    bins[number].append(index)
    rooms[number] -= lengths[index]
    return True


def _least_filled(lengths: Sequence[int], capacity: int, leftovers: Iterable[int]) -> Bins:
    """Put each sequence into the least-filled bin if it fits there, else into a new one; return bins from the least
    to the most filled.
    """
    # A stamp of the last change orders equally filled bins.
    filled: list[tuple[int, int, list[int]]] = []
    for stamp, index in enumerate(leftovers):
        if filled and filled[0][0] + lengths[index] <= capacity:
            fill, _, each = heapq.heappop(filled)
            each.append(index)
        else:
            fill, each = 0, [index]
        heapq.heappush(filled, (fill + lengths[index], stamp, each))
    return [each for _, _, each in sorted(filled, key=lambda entry: entry[:2])]


def _most_bins(lengths: Sequence[int] | Ids, capacity: int) -> int:
    """Return how many bins first fit may open: the contents of any two neighbours are more than one bin holds."""
    return min(len(lengths), 2 * int(sum(lengths)) // capacity + 2)


class _Rooms:
    """Tracks the free room of `count` bins, all open from the start: the empty bins are found last, in their order."""

    def __init__(self, count: int, capacity: int) -> None:
        self._leaves = 1 << max(count - 1, 0).bit_length()
        # [node]: the largest room of a bin below it; node 1 is the root.
        self._most = [capacity] * (2 * self._leaves)

    def take(self, length: int) -> int:
        """Return the first bin with this much room, and take the room from it."""
        most, node = self._most, 1
        while node < self._leaves:
            node *= 2
            if most[node] < length:
                node += 1
        number = node - self._leaves
        most[node] -= length
        while node > 1:
            node //= 2
            larger = max(most[2 * node], most[2 * node + 1])
            if most[node] == larger:
                break
            most[node] = larger
        return number


class _Longest:
    """Holds sequences from the longest to the shortest, of which the first that fits is taken."""

    def __init__(self, lengths: Sequence[int], order: list[int]) -> None:
        self._order = order
        self._keys = [-lengths[index] for index in order]
        # The next place that is not taken, itself included: paths are halved while they are walked.
        self._next = list(range(len(order) + 1))

    def take(self, room: int) -> int | None:
        """Return the first sequence of at most `room` tokens."""
        place = _walk(self._next, bisect_left(self._keys, -room))
        if place == len(self._order):
            return None
        self._next[place] = place + 1
        return self._order[place]

    def left(self) -> list[int]:
        """Return the sequences that were not taken, in order."""
        return [index for place, index in enumerate(self._order) if self._next[place] == place]


class _Pairs:
    """Holds sequences from the shortest to the longest, taken two at a time: the shortest, and the longest that then
    fits.
    """

    def __init__(self, lengths: Sequence[int], order: list[int]) -> None:
        self._order = order
        self._keys = [lengths[index] for index in order]
        # The nearest place that is not taken, itself included; before, shifted by one: entry 0 stands for none.
        self._before = list(range(len(order) + 1))
        self._after = list(range(len(order) + 1))

    def take(self, room: int) -> tuple[int, int] | None:
        """Return a pair, if the two shortest fit together."""
        first = _walk(self._after, 0)
        second = _walk(self._after, min(first + 1, len(self._order)))
        if second == len(self._order) or self._keys[first] + self._keys[second] > room:
            return None
        self._remove(first)
        # The second shortest fits, so there is one.
        place = _walk(self._before, bisect_right(self._keys, room - self._keys[first])) - 1
        self._remove(place)
        return self._order[first], self._order[place]

    def left(self) -> list[int]:
        """Return the sequences that were not taken, in order."""
        return [index for place, index in enumerate(self._order) if self._after[place] == place]

    def _remove(self, place: int) -> None:
        self._before[place + 1] = place
        self._after[place] = place + 1


def _walk(links: list[int], place: int) -> int:
    while links[place] != place:
        links[place] = links[links[place]]
        place = links[place]
    return place
