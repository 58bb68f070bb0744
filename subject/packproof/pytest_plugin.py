"""Pytest plugin: a function that `packproof.conformance` decorates becomes one test for each level and case.

A function is called once a case and process, and its rows are judged on every level from then on. The tests of a level are named
`pack[L3-v1-0012]`, so that `-k L3` runs one level; their order and names are the same in every worker of pytest-xdist.
"""

from __future__ import annotations

from typing import Any, Iterator

import pytest

from packproof.cases import Case
from packproof.conventions import declare
from packproof.declared import Declared
from packproof.judging import PASSED, LevelResult, call, conformance_of, judge_outcomes
from packproof.levels import Level, judge
from packproof.report import smallest
from packproof.verdict import Verdict


class ConformanceMissed(AssertionError):  # noqa: N818 - a failure of a test, not an error of ours
    """A case misses a level; the text is what a person sees."""


class Function(pytest.Collector):
    """A decorated function, with its tests."""

    declared: Declared
    function: Any

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the tests of each level, and the test that the level was shown at all."""
        cases = self.declared.cases()
        outcomes: dict[str, tuple[Any, Verdict]] = {}
        for level in self.declared.levels():
            for case in cases:
                item = LevelOfCase.from_parent(self, name=f"{self.name}[{level.name}-{case.id}]")
                item.set_up(level, case, outcomes)
                yield item
            whole = LevelShown.from_parent(self, name=f"{self.name}[{level.name}-shown]")
            whole.set_up(level, cases, outcomes)
            yield whole

    def verdict(self, case: Case, outcomes: dict[str, tuple[Any, Verdict]]) -> Verdict:
        """Return what a case says about all levels, calling the function the first time."""
        if case.id not in outcomes:
            outcome = call(self.function, case)
            outcomes[case.id] = outcome, judge(case, outcome, declare(self.declared.conventions), self.declared.preset)
        return outcomes[case.id][1]

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return where the function stands."""
        return self.path, getattr(getattr(self.function, "__code__", None), "co_firstlineno", 1) - 1, self.name


class _Test(pytest.Item):
    level: Level
    outcomes: dict[str, tuple[Any, Verdict]]

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Return the screen of a miss without a traceback."""
        if isinstance(excinfo.value, ConformanceMissed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return where the function stands."""
        path, line, _ = self._function().reportinfo()
        return path, line, self.name

    def _function(self) -> Function:
        assert isinstance(self.parent, Function)
        return self.parent


class LevelOfCase(_Test):
    """One level of one case."""

    case: Case

    def set_up(self, level: Level, case: Case, outcomes: dict[str, tuple[Any, Verdict]]) -> None:
        """Say what is tested."""
        self.level, self.case, self.outcomes = level, case, outcomes

    def runtest(self) -> None:
        """Fail on a miss, with its smallest row."""
        parent = self._function()
        if self.level.name not in parent.verdict(self.case, self.outcomes).misses:
            return
        declared = parent.declared
        report = conformance_of(
            parent.function, [self.case], subject=parent.name, conventions=declared.conventions, preset=declared.preset
        )
        result = next(each for each in report.levels if each.level is self.level)
        raise ConformanceMissed(_told(result))


class LevelShown(_Test):
    """Tests that the rows have the fields that a level needs, so that a level that no case shows never passes silently."""

    cases: list[Case]

    def set_up(self, level: Level, cases: list[Case], outcomes: dict[str, tuple[Any, Verdict]]) -> None:
        """Say what is tested."""
        self.level, self.cases, self.outcomes = level, cases, outcomes

    def runtest(self) -> None:
        """Fail where no case shows the level; skip it where the function declares that."""
        parent = self._function()
        for case in self.cases:
            parent.verdict(case, self.outcomes)
        declared = parent.declared
        found = [(case, self.outcomes[case.id][0]) for case in self.cases]
        report = judge_outcomes(found, subject=parent.name, conventions=declared.conventions, preset=declared.preset)
        result = next(each for each in report.levels if each.level is self.level)
        if result.status == "not shown":
            told = f"{self.level.name} ({self.level.title}) is not shown: {result.note}"
            if self.level.name in declared.not_shown:
                pytest.skip(told)
            raise ConformanceMissed(f'{told}. Return the field, or declare not_shown=("{self.level.name}",).')
        if result.status != PASSED:
            raise ConformanceMissed(
                "%s is missed in %d of %d %s. %s"
                % (
                    self.level.name,
                    result.missed,
                    result.cases,
                    "case" if result.cases == 1 else "cases",
                    _told(result),
                )
            )


def _told(result: LevelResult) -> str:
    head = f"{result.status}: {result.note}. " if result.note else ""
    return head + "\n".join(smallest(result)) if result.miss is not None else head + result.status


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> pytest.Collector | None:
    """Collect a decorated function, whatever its name."""
    declared = getattr(obj, "packproof_conformance", None)
    if not isinstance(declared, Declared):
        return None
    function = Function.from_parent(collector, name=name)
    function.declared, function.function = declared, obj
    return function
