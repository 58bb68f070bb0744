"""Check that a row is consistent in itself: labels are shifted ids, boundaries restart positions, the mask fits the labels.

The check needs no messages and no other side; it covers what all presets have in common (docs/SPEC.md#tensors, #row and #batch).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from equivalence.subjects import Row
from tools.diff_row.row.layout import boundaries

DTYPES = {
    "input_ids": torch.int64,
    "target_ids": torch.int64,
    "token_mask": torch.float32,
    "position_ids": torch.int64,
    "cu_seqlens": torch.int32,
}
IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """Something that no row may have, or (a note) that a job should know of."""

    what: str
    """In one sentence."""
    rule: str
    """The rule of SPEC that it goes against, or that a note rests on; empty where no rule has a say."""
    count: int
    """Number of positions or entries."""
    position: int | None
    """The first one."""
    note: bool = False
    """True for what may be meant: it does not make the row inconsistent."""

    @property
    def times(self) -> str:
        """Return how often the flaw was found, as `, 3 times, first at position `; a single one has no count."""
        count = "" if self.count == 1 else f", {self.count:,} times"
        if self.position is None:
            return count
        return f"{count}, {'' if self.count == 1 else 'first '}at position "


def inspect(row: Row, context_parallel_size: int | None = None) -> list[Flaw]:
    """Return all flaws of a built row, causes before consequences; empty for a refused row."""
    tensors = {name: getattr(row, name) for name in DTYPES}
    if any(tensor is None for tensor in tensors.values()):
        return []
    flaws = [
        Flaw(what=f"{name} is {_kind(tensor)}, not {_kind(DTYPES[name])}", rule="#tensors", count=1, position=None)
        for name, tensor in tensors.items()
        if tensor.dtype != DTYPES[name]
    ]
    lengths = {name: tensor.numel() for name, tensor in tensors.items() if name != "cu_seqlens"}
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in lengths.items())
        return [*flaws, Flaw(what=f"lengths differ: {sizes}", rule="R-GUARD-1", count=1, position=None)]
    ids, targets, mask, positions = (tensors[name].reshape(-1) for name in list(DTYPES)[:4])
    return [
        *flaws,
        *_boundaries(tensors["cu_seqlens"].reshape(-1), len(ids), row.max_seqlen, context_parallel_size),
        *_positions(positions, boundaries(row)),
        *_labels(ids, targets),
        *_mask(targets, mask, boundaries(row)),
    ]


def _boundaries(cu: torch.Tensor, length: int, longest: int | None, cp: int | None) -> list[Flaw]:
    values = cu.tolist()
    flaws = []
    if not values or values[0] != 0:
        flaws.append(Flaw(what="cu_seqlens does not start at 0", rule="R-CU-1", count=1, position=None))
    if not values or values[-1] != length:
        flaws.append(Flaw(what=f"cu_seqlens does not end at {length}", rule="R-CU-1", count=1, position=None))
    sizes = [end - start for start, end in itertools.pairwise(values)]
    if backward := [end for size, end in zip(sizes, values[1:], strict=True) if size < 0]:
        flaws.append(Flaw(what="cu_seqlens goes back", rule="R-CU-1", count=len(backward), position=backward[0]))
    if empty := [end for size, end in zip(sizes, values[1:], strict=True) if size == 0]:
        what = "empty segments: the direct path cannot take them"
        flaws.append(Flaw(what=what, rule="R-GUARD-1", count=len(empty), position=empty[0], note=True))
    if sizes and longest != max(sizes):
        what = f"max_seqlen is {longest}, the longest segment {max(sizes)}"
        flaws.append(Flaw(what=what, rule="R-CU-1", count=1, position=None))
    odd = [end for size, end in zip(sizes, values[1:], strict=True) if cp is not None and cp > 1 and size % (2 * cp)]
    if odd and cp is not None:
        what = f"segments that 2·cp = {2 * cp} does not divide"
        flaws.append(Flaw(what=what, rule="R-GUARD-1", count=len(odd), position=odd[0], note=True))
    return flaws


def _positions(positions: torch.Tensor, ends: list[int]) -> list[Flaw]:
    expected = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(ends)])
    wrong = (positions != expected).nonzero().reshape(-1)
    if not len(wrong):
        return []
    if bool((positions == torch.arange(len(positions))).all()):
        what = "position_ids count through the whole row and never restart at a boundary"
    else:
        what = "position_ids do not count from 0 in each segment"
    return [Flaw(what=what, rule="R-LAYOUT-1", count=len(wrong), position=int(wrong[0]))]


def _labels(ids: torch.Tensor, targets: torch.Tensor) -> list[Flaw]:
    """Check that a label that is not ignored is the next token; the last label of a row is padding, which cannot be checked."""
    labelled = (targets != IGNORE_INDEX).nonzero().reshape(-1)
    labelled = labelled[labelled < len(ids) - 1]
    wrong = labelled[targets[labelled] != ids[labelled + 1]]
    if not len(wrong):
        return []
    inner = labelled[labelled < len(ids) - 2]
    if bool((targets[labelled] == ids[labelled]).all()):
        what = "labels are the tokens themselves, not shifted (of a model that shifts them: --labels unshifted)"
    elif len(inner) and bool((targets[inner] == ids[inner + 2]).all()):
        what = "labels are shifted by two"
    else:
        what = "labels are not the next token"
    return [Flaw(what=what, rule="R-SHIFT-1", count=len(wrong), position=int(wrong[0]))]


def _mask(targets: torch.Tensor, mask: torch.Tensor, ends: list[int]) -> list[Flaw]:
    """Check that the mask is 0 or 1, 0 on -100, and elsewhere 0 only on padding, whose label is the last label of the row."""
    ignored, pad = targets == IGNORE_INDEX, targets[-1] if len(targets) else 0
    cases = [
        ((mask != 0) & (mask != 1), "token_mask is neither 0 nor 1"),
        ((mask != 0) & ignored, "token_mask counts labels of -100"),
        ((mask == 0) & ~ignored & (targets != pad), "token_mask leaves out labels that are neither -100 nor padding"),
    ]
    flaws = []
    for wrong, what in cases:
        places = wrong.nonzero().reshape(-1)
        if len(places):
            flaws.append(Flaw(what=what, rule="R-MASK-1", count=len(places), position=int(places[0])))
    inner = sorted({end for end in ends if 0 < end < len(targets)})
    if across := [end - 1 for end in inner if mask[end - 1] != 0]:
        what = "trained labels at a boundary, which reach into the next conversation"
        flaws.append(Flaw(what=what, rule="R-BOUNDARY-1", count=len(across), position=across[0], note=True))
    return flaws


def _kind(what: torch.Tensor | torch.dtype) -> str:
    return str(what.dtype if isinstance(what, torch.Tensor) else what).removeprefix("torch.")
