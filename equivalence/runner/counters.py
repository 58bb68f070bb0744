"""Count what a run did: workers fill plain counters, the parent adds them up, and differences are kept beside them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.kinds import named
from equivalence.checks.registry import names

Kind = tuple[str, str, str, str, str]
"""Kind of a difference: check, left, right, tensor, class."""
MODEL_CHECKS = names("step")
"""Checks of training steps, whose cases are `equivalence.cases.step.ModelCase`."""


@dataclass(frozen=True, kw_only=True)
class Differing:
    """One difference, small enough to cross a process and to stand in a report."""

    check: str
    prompt_format: str
    left: str
    right: str
    first: dict[str, Any]
    """The first difference: tensor, position, left, right, class."""
    count: int
    """Differing values in all."""
    classes: dict[str, int]
    """How many of each class."""
    where: str
    """The unit, file or saved case it comes from."""
    case: str | None = None
    """The (shrunk) case as JSON; None where a file's row is at fault and says it itself."""
    command: str = ""
    """Shows it."""
    path: str | None = None
    """Where the case was saved."""
    together: str = ""
    """Draws the case again with those before it."""
    alone: str = ""
    """Of the saved case, replayed alone in a process that ran nothing before: `different`, `equal`, why it did not end, or "" if not asked."""

    @property
    def kind(self) -> Kind:
        """Return what differences of one kind share."""
        return kind_of(self.check, self.left, self.right, str(self.first["tensor"]), str(self.first["class"]))


def kind_of(check: str, left: str, right: str, tensor: str, named_as: str) -> Kind:
    """Return the kind of a difference. Ranks, rows and depths in the name of a tensor make no other kind."""
    return check, left, right, re.sub(r"\d+", "N", tensor), named_as


@dataclass(kw_only=True)
class Tally:
    """Counters of one job, or of many added up. Keys are tuples that end with the prompt format."""

    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Cases by (check, format)."""
    equal: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of the equal ones, those that all sides refused alike."""
    differing: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by (kind, format)."""
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Generated rows by (class, format)."""
    aimed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Generated rows that were aimed at (class, format)."""
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Divergences that showed, by (entry, format)."""
    witnessed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows that each subject built or refused, by (subject, format)."""
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Cases by (subject, check) whose settings the subject does not take."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time in each subject; under `generated` all that drawing, building and comparing generated rows took, of the clock,
    and under `generated_cpu` of the processor."""
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the processor by check: of workers, for drawing, all sides and comparing, and of the ranks that they started."""
    messages: int = 0
    """In generated rows."""
    layers: list[dict[str, Any]] = field(default_factory=list)
    """File layers: name, diverges (whether the readers are meant to differ), equal (as registered), why."""
    layouts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By layout of models: how many cases, checks, ties, cases with the third witness, cases that the layout changes; and seconds."""
    features: Counter[str] = field(default_factory=Counter)
    """What cases of models had, by the names in `generators.models.FEATURES`."""
    differences: list[Differing] = field(default_factory=list)
    alike: Counter[Kind] = field(default_factory=Counter)
    """Further differences of a subject of one's own by kind, beside those that are shown."""
    errors: list[str] = field(default_factory=list)
    """A side that could not run, with where."""

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for name in (
            "rows",
            "equal",
            "refused",
            "differing",
            "refusals",
            "hits",
            "aimed",
            "fired",
            "witnessed",
            "left_out",
            "features",
            "alike",
        ):
            getattr(self, name).update(getattr(other, name))
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds
        for name, seconds in other.spent.items():
            self.spent[name] += seconds
        for layout, counts in other.layouts.items():
            self.layouts[layout].update(counts)
            self.layouts[layout]["ranks"] = counts["ranks"]  # a size, which does not add up
        self.messages += other.messages
        self.layers += other.layers
        self.differences += other.differences
        self.errors += other.errors

    def count(self, result: CheckResult, prompt_format: str) -> None:
        """Count one check of one case."""
        for subject in result.left_out:
            self.left_out[subject, result.check] += 1
        if result.sides < 2:
            return  # nothing was compared
        key = result.check, prompt_format
        self.rows[key] += 1
        if not result.equal:
            self.differing[key] += 1
        elif result.refused is not None:
            self.refused[key] += 1
            self.refusals[result.refused, prompt_format] += 1
        else:
            self.equal[key] += 1
        for subject, seconds in result.seconds.items():
            self.seconds[subject] += seconds
        for subject in result.rows:
            self.witnessed[subject, prompt_format] += 1
        for entry, fired in result.fired.items():
            self.fired[entry, prompt_format] += fired


def differing(
    result: CheckResult, *, prompt_format: str, where: str, case: str | None = None, command: str = ""
) -> list[Differing]:
    """Return the findings of a check in the report's terms."""
    return [
        Differing(
            check=result.check,
            prompt_format=prompt_format,
            left=finding.left,
            right=finding.right,
            first=described(first_difference(finding), result.check),
            count=len(finding.differences),
            classes=dict(Counter(named_class(difference, result.check) for difference in finding.differences)),
            where=where,
            case=case,
            command=command,
        )
        for finding in result.findings
    ]


def first_difference(finding: Finding) -> Difference:
    """Return the first position that differs, of the first tensor that does."""
    return finding.differences[0]


def described(difference: Difference, check: str) -> dict[str, Any]:
    """Return a difference of a check as JSON."""
    return {
        "tensor": difference.tensor,
        "position": list(difference.position) if isinstance(difference.position, Sequence) else difference.position,
        "left": _plain(difference.left),
        "right": _plain(difference.right),
        "class": named_class(difference, check),
    }


def named_class(difference: Difference, check: str) -> str:
    """Return the class of a difference of a check."""
    return named(difference.kind, check=check, tensor=difference.tensor)


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
