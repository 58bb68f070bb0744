"""Places and positions: which runs of each segment the rank owns, and one position followed through all steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tools.diff_row.rank.steps import TENSORS, RankFindings, Refused, Step
from tools.diff_row.row.layout import boundaries

Value = int | float


@dataclass(frozen=True, kw_only=True)
class OwnedSegment:
    """Segment of the row, with the parts that the rank owns."""

    number: int
    start: int
    end: int
    runs: tuple[tuple[int, int], ...]
    """[start, end) in positions of the row, in the order in which the rank holds them."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """One position of the row at one step."""

    step: Step
    place: int | None
    """Index in the tensors of the step; None if this rank does not have the position."""
    values: Mapping[str, Mapping[str, Value]]
    """Side to tensor to value there."""


def owned_runs(findings: RankFindings) -> list[OwnedSegment]:
    """Return the runs by the first side's share; empty without a share."""
    share = findings.share
    if share is None or share.origin is None or not findings.row.built:
        return []
    origin = share.origin
    breaks = (origin.diff() != 1).nonzero().reshape(-1) + 1
    starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(origin)]
    runs = [(int(origin[a]), int(origin[b - 1]) + 1) for a, b in zip(starts, ends, strict=True) if b > a]
    edges = boundaries(findings.row.built[0].row)
    found = []
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        inside = [(max(a, start), min(b, end)) for a, b in runs if a < end and b > start]
        found.append(OwnedSegment(number=number, start=start, end=end, runs=tuple(inside)))
    return found


def follow(findings: RankFindings) -> list[Followed]:
    """Return the position `findings.at` at every step that has places; empty if none is followed."""
    if findings.at is None:
        return []
    found = []
    for step in findings.steps:
        if step.origin is None:
            continue
        places = (step.origin == findings.at).nonzero().reshape(-1)
        place = int(places[0]) if len(places) else None
        values = {} if place is None else {side: _at(has, place) for side, has in step.sides.items()}
        found.append(Followed(step=step, place=place, values=values))
    return found


def value_at(tensor: torch.Tensor, place: int) -> Value | None:
    """Return a value of a flat tensor, whole where it is whole; None beyond its end."""
    flat = tensor.reshape(-1)
    if place >= len(flat):
        return None
    value = flat[place].item()
    return int(value) if float(value).is_integer() else float(value)


def _at(has: Mapping[str, torch.Tensor] | Refused, place: int) -> Mapping[str, Value]:
    if isinstance(has, Refused):
        return {}
    by_place = [name for name in has if name not in ("cu_seqlens", "max_seqlen")]
    values = {name: value_at(has[name], place) for name in sorted(by_place, key=_order)}
    return {name: value for name, value in values.items() if value is not None}


def _order(name: str) -> int:
    return TENSORS.index(name) if name in TENSORS else len(TENSORS)
