"""Diagnose a side's wrong values at a step: another rank's chunk, another depth, a shift across segments.

Each cause is tried on the side's own row, so that a fault of the row is not mistaken for a fault of the cut; the first match is reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from reference import context_parallel
from reference.refusals import RowRefused
from tools.diff_row.rank.backends import Cut

MOST_RANKS = 64
"""Other cp ranks that are tried."""

Guess = tuple[str, Callable[[], torch.Tensor | None]]


def cause(
    tensor: str, found: torch.Tensor, *, whole: Mapping[str, torch.Tensor], depth: int, cut: Cut, is_share: bool
) -> str | None:
    """Return the fault that gives `found` from the row's tensors `whole` [P] at this depth; None if no known fault does.

    `tensor` is one of TENSORS, or `positions`, the index of a share.
    """
    if "cu_seqlens" not in whole or (tensor != "positions" and tensor not in whole):
        return None
    cu = [int(value) for value in whole["cu_seqlens"].tolist()]
    for told, make in _guesses(tensor, whole, cu, depth, cut, is_share=is_share):
        made = make()
        if made is not None and made.shape == found.shape and torch.equal(made.to(found.dtype), found):
            return told
    return None


def _guesses(
    tensor: str, whole: Mapping[str, torch.Tensor], cu: Sequence[int], depth: int, cut: Cut, *, is_share: bool
) -> Iterator[Guess]:
    if tensor == "positions":
        yield from _index_guesses(cu, cut)
        return
    own = (lambda value: _take(value, cu, cut)) if is_share else (lambda value: value)
    value = whole[tensor]
    for other in (each for each in range(cut.depths + 3) if each != depth):
        told = f"that of depth {other}" if other else "that of depth 0: not shifted"
        yield told, partial(_owned_of, value, cu, other, cut, is_share=is_share)
    if depth:
        yield "shifted across the ends of segments", lambda: own(torch.roll(value, -depth))
        yield "shifted across the ends of segments", lambda: own(shifted(value, [0, len(value)], depth))
    if depth and is_share:
        yield "shifted after the cut, inside the share", lambda: _late(value, cu, depth, cut)
    if tensor == "token_mask" and depth:
        both = shifted(value, cu, depth) * value
        yield "and-ed with the mask at the position itself", lambda: own(both)
    if is_share:
        at_depth = shifted(value, cu, depth)
        for told, index in _index_guesses(cu, cut):
            yield told, partial(_selected_by, at_depth, index)


def _index_guesses(cu: Sequence[int], cut: Cut) -> Iterator[Guess]:
    """Yield indices of faulty cuts: chunks in another order, chunks of another rank, another layout, no segments."""
    yield "this rank's two chunks in the other order", lambda: _swapped(cu, cut)
    for rank in range(min(cut.size, MOST_RANKS)):
        if rank != cut.rank:
            yield f"what cp rank {rank} owns", partial(_owned, cu, rank, cut.size, cut.layout)
    for layout in context_parallel.LAYOUTS:
        if layout != cut.layout:
            told = f"this rank's part of the layout {layout!r}"
            yield told, partial(_owned, cu, cut.rank, cut.size, layout)
    yield "cut as if the row were one segment", lambda: _owned([0, cu[-1]], cut.rank, cut.size, cut.layout)
    for chunk in range(2 * cut.size if cut.size <= MOST_RANKS else 0):
        for place, own in enumerate((cut.rank, 2 * cut.size - 1 - cut.rank)):
            if chunk != own:
                pair = (chunk, 2 * cut.size - 1 - cut.rank) if place == 0 else (cut.rank, chunk)
                told = f"chunk {chunk} in place of its chunk {own}"
                yield told, partial(_chunks, cu, pair, cut)


def _owned_of(value: torch.Tensor, cu: Sequence[int], depth: int, cut: Cut, *, is_share: bool) -> torch.Tensor | None:
    made = shifted(value, cu, depth)
    return _take(made, cu, cut) if is_share else made


def shifted(value: torch.Tensor, cu: Sequence[int], depth: int) -> torch.Tensor:
    """Return `x[i + depth]` inside the segment of `i`, else 0, without a loop, because it is tried often."""
    ends = torch.repeat_interleave(torch.tensor(cu[1:]), torch.tensor(cu).diff())
    source = torch.arange(len(value)) + depth
    return value[source.clamp(max=len(value) - 1)].masked_fill(source >= ends, 0)


def _take(value: torch.Tensor, cu: Sequence[int], cut: Cut) -> torch.Tensor | None:
    return _selected(value, _owned(cu, cut.rank, cut.size, cut.layout))


def _late(value: torch.Tensor, cu: Sequence[int], depth: int, cut: Cut) -> torch.Tensor | None:
    share = _take(value, cu, cut)
    return None if share is None else shifted(share, [boundary // cut.size for boundary in cu], depth)


def _selected(value: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor | None:
    return None if index is None else value[index]


def _selected_by(value: torch.Tensor, make: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    return _selected(value, make())


def _owned(cu: Sequence[int], rank: int, size: int, layout: str) -> torch.Tensor | None:
    try:
        return torch.tensor(context_parallel.owned_positions(cu, rank, size, layout))
    except RowRefused:
        return None


def _swapped(cu: Sequence[int], cut: Cut) -> torch.Tensor | None:
    return None if cut.size == 1 else _chunks(cu, (2 * cut.size - 1 - cut.rank, cut.rank), cut)


def _chunks(cu: Sequence[int], pair: tuple[int, int], cut: Cut) -> torch.Tensor | None:
    """Return the positions of two chunks of each segment, in that order."""
    chunks = 2 * cut.size
    if cut.layout != "zigzag" or any((end - start) % chunks for start, end in itertools.pairwise(cu)):
        return None
    parts = [
        torch.arange(start + chunk * ((end - start) // chunks), start + (chunk + 1) * ((end - start) // chunks))
        for start, end in itertools.pairwise(cu)
        for chunk in pair
    ]
    return torch.cat(parts)
