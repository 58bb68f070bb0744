"""The steps of the way of a row to a rank, as values: what each side has at a step, and what differs there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tools.diff_row.rank.coordinates import RankPlace
from tools.diff_row.row.findings import Findings
from tools.diff_row.row.layout import boundaries

STOPS = ("row", "batch", "microbatch", "depth", "share", "slice", "weights")
"""Steps at which `--stop-at` can stop, in order."""
TENSORS = ("input_ids", "target_ids", "token_mask", "position_ids")
"""Tensors that are cut, shifted and shared."""
ABOUT = {
    "row": ("conversations laid out, labels shifted", "R-LAYOUT, R-SHIFT-1, R-MASK-1, R-CU-1"),
    "batch": ("collated, ragged boundaries filled with -1", "R-BATCH-1"),
    "microbatch": ("one sequence, mask times sample mask", "R-BATCH-2, R-MEET-1"),
    "depth": ("x[i + k] inside the segment of i, else 0", "R-MTP-1"),
    "share": ("what this cp rank owns, all tensors cut alike", "R-CP-1, R-CP-2, R-MTP-2"),
    "slice": ("what this tp rank holds after embedding", "megatron-core's scatter"),
    "weights": ("what each token's loss weighs in the gradient of the step", "R-LOSS-2 to R-LOSS-4"),
}
"""Description of each step, and its rules in SPEC."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A side that refuses at a step, or one that has nothing there."""

    kind: str | None
    """SPEC's kind; None if the side is no witness of the step or ends before it."""
    message: str
    """Fault, place and fix; or the reason for which the side has no value."""


Has = Mapping[str, torch.Tensor] | Refused
Value = int | float
Verdict = Literal["none", "refused", "different", "equal"]


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """A tensor that two sides do not share at a step."""

    left: str
    right: str
    tensor: str
    count: int
    """Places that differ; 1 for a tensor that differs as a whole."""
    place: int | None
    """The first of them, in the tensor of this step."""
    position: int | None
    """Position of that place in the whole row, on the left side; None for a value without a place in the row."""
    right_position: int | None
    """The same as the right side says, where it says so and says otherwise."""
    left_value: object
    right_value: object
    cause: str
    """Identity of the right side's values, if known; else the class of the difference."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step of the way, on all sides."""

    name: str
    """One of STOPS."""
    depth: int
    """k; 0 where nothing is shifted."""
    sides: Mapping[str, Has]
    origin: torch.Tensor | None
    """[n] int64: the position in the row of each place; None where a tensor has another shape (batch)."""
    differences: tuple[StepDifference, ...]
    """Of each side with the first, by tensor; the first of them is where to look."""
    view: Findings | None
    """The four tensors of the sides at this step in the terms of the row's findings, by place; None where it has not four."""
    note: str = ""
    """Note for reading the step."""

    @property
    def label(self) -> str:
        """Name of the step on the screen."""
        if self.name == "depth":
            return f"depth {self.depth}"
        return f"{self.name}, depth {self.depth}" if self.depth else self.name

    @property
    def shape(self) -> str:
        """Shape of the tensors that the step is about, such as `[24]`; `–` if no side has any."""
        has = next((has for has in self.sides.values() if not isinstance(has, Refused)), None)
        if has is None:
            return "–"
        tensor = has.get("input_ids", next(iter(has.values())))
        return "[" + ", ".join(f"{size:,}" for size in tensor.shape) + "]"

    def verdict(self, side: str) -> tuple[Verdict, int]:
        """Return how a side compares with the first one, and how many of its values differ."""
        has = self.sides.get(side)
        if has is None or isinstance(has, Refused):
            return ("none" if has is None or has.kind is None else "refused"), 0
        count = sum(each.count for each in self.differences if each.right == side)
        return ("different" if count else "equal"), count


@dataclass(frozen=True, kw_only=True, eq=False)
class RankFindings:
    """The way of one row to one rank."""

    place: RankPlace
    row: Findings
    """Findings on the row itself: its sides, conversations and texts."""
    layout: str
    """Cut of a row among cp ranks."""
    depths: int
    """K: depths that were taken."""
    ways: Mapping[str, str]
    """Side to who makes its microbatch and share."""
    steps: tuple[Step, ...]
    at: int | None
    """The position of the row that is followed through the steps."""
    notes: tuple[str, ...] = ()
    """Notes on the row on this rank."""

    @property
    def first(self) -> Step | None:
        """First step at which sides differ."""
        return next((step for step in self.steps if step.differences), None)

    @property
    def equal(self) -> bool:
        """True if all sides agree at every step."""
        return self.first is None

    @property
    def without(self) -> Mapping[str, tuple[str, ...]]:
        """By side, the labels of steps without values, which are not compared; only sides with such steps."""
        found = {
            side.name: tuple(step.label for step in self.steps if not isinstance(step.sides.get(side.name), Mapping))
            for side in self.row.sides
        }
        return {side: labels for side, labels in found.items() if labels}

    @property
    def owned(self) -> str:
        """Number of positions that the rank owns, and which of each segment; empty without a share."""
        if self.share is None or self.share.origin is None:
            return ""
        text, cp, rank = (
            f"{len(self.share.origin):,} of {self.row.length:,} positions",
            self.place.cp,
            self.place.context_rank,
        )
        if cp == 1:
            return text
        if self.layout != "zigzag":
            return f"{text}: one run of the row ({self.layout})"
        return f"{text}: chunks {rank} and {2 * cp - 1 - rank} of the {2 * cp} of each segment"

    @property
    def share(self) -> Step | None:
        """Step that holds the positions of this rank; None if the trace ended before."""
        return next((step for step in self.steps if step.name == "share" and step.origin is not None), None)


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
