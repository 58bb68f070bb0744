"""Run one Hypothesis search: draw cases, count them, and shrink the first that differs to the smallest that still
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hypothesis.strategies import SearchStrategy

from equivalence.cases.result import CheckResult
from equivalence.checks.blame import told
from equivalence.generators.draws import each_drawn
from equivalence.runner.counters import Tally

SHRINK_SECONDS = 20.0
"""Of this process's own time, so that a busy machine finds the same; then no unseen smaller case is tried any more."""

Check = Callable[[Any, Tally | None], tuple[CheckResult, Any]]
"""Checks what was drawn, counting into the tally unless there is none; gives the result and the case to keep."""


class Differs(Exception):  # noqa: N818 - a finding, not an error
    """Carries what differed out of Hypothesis; the last one raised is the smallest."""

    def __init__(self, result: CheckResult, case: Any) -> None:
        super().__init__(result.check)
        self.result = result
        self.case = case


class CouldNotRun(Exception):  # noqa: N818
    """A witness or the suite itself raised on a case; an exception of production or of a subject is a difference."""

    def __init__(self, case: Any, text: str) -> None:
        super().__init__(text)
        self.case = case


def search(
    strategy: SearchStrategy[Any], check: Check, tally: Tally, *, number: int, examples: int, shrink: bool = True
) -> Differs | CouldNotRun | None:
    """Draw `examples` cases from the seed `number`; returns the smallest that differs or makes a witness raise, if any does.

    After the first one nothing is counted any more.
    """
    known: dict[Any, Exception | None] = {}
    shrinking: list[float] = []

    def example(drawn: Any) -> None:
        if not shrinking:
            error = _checked(check, drawn, tally)
            if error is not None:
                shrinking.append(time.process_time())
                known[repr(drawn)] = error
        else:
            key = repr(drawn)
            if key not in known:
                if time.process_time() - shrinking[0] > SHRINK_SECONDS:
                    return
                known[key] = _checked(check, drawn, None)
            error = known[key]
        if error is not None:
            raise error

    try:
        each_drawn(strategy, example, number=number, examples=examples, shrink=shrink)
    except (Differs, CouldNotRun) as found:
        return found
    return None


def _checked(check: Check, drawn: Any, tally: Tally | None) -> Exception | None:
    try:
        result, case = check(drawn, tally)
    except Exception as error:  # noqa: BLE001 - its text and place are kept
        case = drawn[0] if isinstance(drawn, tuple) else drawn
        return CouldNotRun(case, told(error))
    return None if result.equal else Differs(result, case)
