"""Define the result of a check, in one shape for all checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from equivalence.cases.difference import Difference
from equivalence.subjects.protocol import Row


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Difference of two sides."""

    left: str
    """A subject's name, or what was expected."""
    right: str
    differences: list[Difference]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One check of one case."""

    check: str
    """One of `equivalence.checks.registry.CHECKS`."""
    findings: list[Finding] = field(default_factory=list)
    """Empty if all sides are equal."""
    refused: str | None = None
    """The kind that all sides refused the row with."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time in each subject."""
    rows: dict[str, Row] = field(default_factory=dict)
    """Each subject's row, for checks that go on from it."""
    sides: int = 2
    """Number of compared sides, including a prediction; fewer than two compare nothing."""
    left_out: tuple[str, ...] = ()
    """Subjects that do not take these settings."""
    fired: dict[str, int] = field(default_factory=dict)
    """Divergences that showed in this case, by `field: permissive/strict`."""

    @property
    def equal(self) -> bool:
        """Return whether the sides are equal."""
        return not self.findings
