"""The online path's four packers, as a person would write them: which sequences share a bin (docs/SPEC.md#packing)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Bins = list[list[int]]
"""Indices of sequences, bin by bin, in the order in which they lie in it."""


class PackingError(ValueError):
    """Error for sequences that cannot be packed as configured; names the sequences, the reason and the fix."""


def concatenative(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack in order; open a new bin when the next sequence does not fit. R-PACK-1."""
    check_lengths(lengths, capacity)
    bins: Bins = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room or not bins:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return bins


def first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> Bins:
    """Put each sequence, in the given order, into the first bin that has room."""
    check_lengths(lengths, capacity)
    bins: Bins = []
    for index in order:
        for members in bins:
            if sum(lengths[member] for member in members) + lengths[index] <= capacity:
                members.append(index)
                break
        else:
            bins.append([index])
    return bins


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack by first fit from the longest sequence to the shortest; of equal lengths the larger index goes first. R-PACK-2."""
    return first_fit(descending(range(len(lengths)), lengths), lengths, capacity)


def first_fit_shuffle(lengths: Sequence[int], capacity: int, seed: int) -> Bins:
    """Pack by first fit over a seeded shuffle. R-PACK-3."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)  # noqa: S311 - reproducible, not secret
    return first_fit(order, lengths, capacity)


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Pack by Johnson and Garey's variant: large items open bins, medium and small items fill them. R-PACK-4."""
    check_lengths(lengths, capacity)

    def between(low: float, high: float) -> list[int]:
        """Return the sequences with a length in (low, high], from the longest to the shortest; of equal lengths the smaller index first."""
        found = [index for index, length in enumerate(lengths) if low < length <= high]
        return sorted(found, key=lambda index: -lengths[index])

    def room(members: list[int]) -> int:
        return capacity - sum(lengths[member] for member in members)

    bins = [[index] for index in between(capacity / 2, capacity)]
    medium = between(capacity / 3, capacity / 2)
    small = sorted(between(capacity / 6, capacity / 3), key=lambda index: (lengths[index], index))  # the smallest first
    tiny = sorted(between(0, capacity / 6), key=lambda index: (lengths[index], index))

    for members in bins:
        if fits := [index for index in medium if lengths[index] <= room(members)]:
            members.append(fits[0])
            medium.remove(fits[0])
    for members in reversed(bins):
        alone = len(members) == 1
        if alone and len(small) >= 2 and lengths[small[0]] + lengths[small[1]] <= room(members):
            members.append(small.pop(0))
            largest = [index for index in small if lengths[index] <= room(members)][-1]
            members.append(largest)
            small.remove(largest)

    leftovers = sorted(
        [*medium, *small, *tiny], key=lambda index: -lengths[index]
    )  # stable: equal lengths stay in class order
    for members in bins:
        while fits := [index for index in leftovers if lengths[index] <= room(members)]:
            members.append(fits[0])
            leftovers.remove(fits[0])
    opened: Bins = []
    for index in leftovers:
        members = opened.pop(0) if opened and lengths[index] <= room(opened[0]) else []
        members.append(index)
        # Kept from the least filled to the fullest; among equally full ones the latest comes last.
        place = sum(room(other) >= room(members) for other in opened)
        opened.insert(place, members)
    return bins + opened


def raise_bin_count(bins: Bins, multiple: int) -> Bins:
    """Raise the number of bins to a multiple of dp: the fullest given bins give their last items away, one to each new bin. R-PACK-5."""
    bins = [list(members) for members in bins]
    missing = -len(bins) % multiple
    have = sum(len(members) for members in bins)
    if have < len(bins) + missing:
        raise PackingError(
            f"there must be at least {len(bins) + missing} sequences, one for each bin, got {have}; give more sequences, or fewer data-parallel ranks"
        )
    # The order of the donors is settled before any of them gives, and a new bin is never one.
    donors = sorted(range(len(bins)), key=lambda number: (len(bins[number]), number), reverse=True)
    added: Bins = []
    for donor in donors:
        while len(bins[donor]) > 1 and len(added) < missing:
            added.append([bins[donor].pop()])
    return bins + added


def bins_of_rank(bins: Bins, rank: int, data_parallel_size: int) -> Bins:
    """Return the bins of a data-parallel rank: `bins[r::dp]`. R-PACK-6."""
    return [members for number, members in enumerate(bins) if number % data_parallel_size == rank]


def descending(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the indices from the longest sequence to the shortest; of equal lengths the larger index first."""
    return sorted(indices, key=lambda index: (lengths[index], index), reverse=True)


def check_lengths(lengths: Sequence[int], capacity: int) -> None:
    """Refuse a sequence that no bin can hold."""
    for index, length in enumerate(lengths):
        if length < 1:
            raise PackingError(f"sequence {index} must have at least one token, got {length}; leave it out")
        if length > capacity:
            raise PackingError(
                f"sequence {index} must have at most the {capacity} tokens of a bin, got {length}; raise the capacity or cut the sequence"
            )


PACKERS: dict[str, Callable[[Sequence[int], int], Bins]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}
"""The packers that need no seed, by name."""
