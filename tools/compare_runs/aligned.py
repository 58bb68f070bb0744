"""Pair values of two runs that cover the same steps: a log's mean over several steps with the mean of the other run's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tools.compare_runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One value of each run, over the same steps."""

    first: float
    second: float
    allowed: float
    """Largest difference that rounding explains."""
    width: int = 1
    """Steps that both are a mean of."""

    @property
    def gap(self) -> float:
        """The absolute difference."""
        return abs(self.second - self.first)


def paired_values(first: Run, second: Run, name: str) -> dict[int, Pair]:
    """Return the pairs of one series, by the last step of each, rising.

    Where one run's value is a mean over several steps, the other side is the mean of its own values over these; steps at which
    the values do not cover the same steps have no pair.
    """
    found = {}
    for step in sorted(first.steps(name) & second.steps(name)):
        pair = _pair(first, second, name, step)
        if pair is not None:
            found[step] = pair
    return found


@dataclass(kw_only=True)
class _Sum:
    """Values of one run, added up backwards from a step."""

    run: Run
    name: str
    before: int
    """The step before the earliest that is in the sum."""
    steps: int = 0
    value: float = 0.0
    rounding: float = 0.0

    def take(self) -> bool:
        """Add the value whose steps end where the sum's steps begin; return False if there is no such value."""
        value = self.run.series[self.name].get(self.before)
        if value is None:
            return False
        width = self.run.width(self.name, self.before)
        # One value alone is kept as it is: no sum rounds it.
        self.value = value if not self.steps else self._mean_with(value, width)
        rounding = self.run.rounding(self.name, self.before)
        self.rounding = (self.rounding * self.steps + rounding * width) / (self.steps + width)
        self.steps += width
        self.before -= width
        return True

    def _mean_with(self, value: float, width: int) -> float:
        return math.fsum((self.value * self.steps, value * width)) / (self.steps + width)


def _pair(first: Run, second: Run, name: str, step: int) -> Pair | None:
    ours, theirs = (_Sum(run=run, name=name, before=step) for run in (first, second))
    if not (ours.take() and theirs.take()):
        return None
    while ours.steps != theirs.steps:
        if not (ours if ours.steps < theirs.steps else theirs).take():
            return None
    # The sum of two rounded halves is itself rounded once.
    allowed = (ours.rounding + theirs.rounding) * (1 + 1e-9)
    return Pair(first=ours.value, second=theirs.value, allowed=allowed, width=ours.steps)
