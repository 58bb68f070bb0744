"""Puts conversations into rows of a given capacity: exact first-fit-decreasing in O(n log n), or greedily in order."""

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of indices: the longest first (ties: the larger index), each into the first bin that has room.

    `[4,1,3,2,1,3,4,5]`, capacity 8 → `[[7,5],[6,0],[2,3,4,1]]`. Raises ValueError for a length above the capacity.
    """
    _check(lengths, capacity)
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i), reverse=True)
    # A tree over the bins holds the largest room below each node, so the first bin with room is one way down.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for item in order:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < lengths[item]:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        room[node] -= lengths[item]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def sequential(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of indices in order: a new bin starts where the next length does not fit.

    `[4,1,3,2,1,3,4,5]`, capacity 8 → `[[0,1,2],[3,4,5],[6],[7]]`. Raises ValueError for a length above the capacity.
    """
    _check(lengths, capacity)
    bins: list[list[int]] = []
    room = -1
    for item, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(item)
        room -= length
    return bins


def _check(lengths: Sequence[int], capacity: int) -> None:
    for item, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(f"item {item} has length {length}, outside 0 to {capacity}, the capacity of a bin.")
