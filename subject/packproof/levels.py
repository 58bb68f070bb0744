"""Conformance levels L1 to L10: each is a property of the rows that a packing function returns for one case.

A level that needs a field which the rows lack is not shown; it is never taken for passed. docs/conformance.md says what each level
means on a function that returns less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from packproof import call_levels, row_levels
from packproof.cases import Case
from packproof.placement import place
from packproof.rows import MalformedPackError, read_packs
from packproof.verdict import Conventions, Judged, Miss, Refused, Verdict


@dataclass(frozen=True)
class Level:
    """One level."""

    name: str
    title: str
    rules: str
    """Its rules of SPEC."""
    judge: Callable[[Judged], None]


def judge(case: Case, outcome: Any, conventions: Conventions, preset: str) -> Verdict:
    """Judge one case on every level. `outcome` is what `pack` returned, or a Refused; `conventions` are all of them, declared."""
    verdict = Verdict()
    try:
        rows = [] if isinstance(outcome, Refused) else read_packs(outcome, conventions["shift"])
    except MalformedPackError as error:
        verdict.exercised.append("L1")
        verdict.misses["L1"] = Miss("L1", str(error))
        return verdict
    placed = place(rows, case.conversations, conventions, case.pad_id)
    for level in LEVELS:
        judged = Judged(case, placed, conventions, preset, level.name, verdict)
        if isinstance(outcome, Refused):
            _judge_refusal(judged, outcome)
        else:
            level.judge(judged)
    return verdict


def _judge_refusal(judged: Judged, outcome: Refused) -> None:
    if judged.level == "L1" and judged.case.must_be_built and not _may_refuse(judged):
        judged.miss(f"the call was refused, though every conversation can be packed: {outcome.reason}")
    if judged.level == "L10" and judged.case.expected:
        judged.exercise()
        if "refusal" not in judged.case.expected[judged.preset]:
            judged.miss(f"the call was refused ({outcome.reason}), and the preset {judged.preset} builds a row")


def _may_refuse(judged: Judged) -> bool:
    """Return whether a declared convention leaves the call without a row, or allows its refusal."""
    sizes = range(len(judged.case.conversations))
    inputs = [number for number in sizes if judged.inputs(number)]
    overlong = [judged.is_overlong(number) for number in inputs]
    declared = judged.conventions["overlong"]
    nothing_left = all(overlong) if declared == "drop" else not inputs
    return nothing_left or (declared == "refuse" and any(overlong))


LEVELS: tuple[Level, ...] = (
    Level("L1", "tokens and whole conversations", "R-LAYOUT-1, R-LAYOUT-3", row_levels.judge_tokens),
    Level(
        "L2", "the same trained pairs inside a conversation", "R-TARGET-1, R-SHIFT-1, R-MASK-1", row_levels.judge_pairs
    ),
    Level("L3", "nothing trains across a boundary", "R-BOUNDARY-1", row_levels.judge_boundary_labels),
    Level("L4", "positions restart", "R-LAYOUT-1", row_levels.judge_positions),
    Level("L5", "boundaries complete, none empty", "R-LAYOUT-2, R-EMPTY-1, R-CU-1", row_levels.judge_boundaries),
    Level("L6", "padding never trains", "R-MASK-1", row_levels.judge_padding),
    Level("L7", "nothing is lost unseen", "R-LAYOUT-7, R-REPORT-1", call_levels.judge_losses),
    Level("L8", "segments divide by 2·cp", "R-CP-3, R-LAYOUT-7", call_levels.judge_divisibility),
    Level("L9", "shards own every token once, with its own label", "R-CP-1, R-CP-2", call_levels.judge_shards),
    Level("L10", "to the bit", "R-SHIFT-1, R-CU-1", call_levels.judge_bits),
)
"""All levels, from the first to the strictest."""
NAMES = tuple(level.name for level in LEVELS)


def level_named(name: str) -> Level:
    """Return a level by its name. ValueError lists the names."""
    for level in LEVELS:
        if level.name == str(name).upper():
            return level
    raise ValueError("no level is called {!r}; choose one of {}".format(name, ", ".join(NAMES)))
