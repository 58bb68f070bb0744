"""Remember which kinds of differences of a subject of one's own were shown, so that a run counts further ones and goes on.

A path that differs by design differs in every row. Without this module such a run would shrink and save the same difference until it
stopped, and would compare nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from equivalence.cases.result import CheckResult, Finding
from equivalence.runner.counters import Kind, Tally, first_difference, kind_of, named_class
from equivalence.subjects import BUILT_IN

MOST_SHOWN = 10
"""Differences of one kind that are shown of a subject of one's own; further ones are counted."""
_SHOWN: Counter[Kind] | None = None
"""How many of each kind this process has shown in the run at hand; None where nothing is left out."""


def begin() -> None:
    """Begin a run: nothing was shown yet. Workers that are forked from here on each keep their own list."""
    global _SHOWN  # noqa: PLW0603 - one run at a time, in this process and in each worker
    _SHOWN = Counter()


def end() -> None:
    """End a run: from here on every difference is shown."""
    global _SHOWN  # noqa: PLW0603
    _SHOWN = None


def unseen(result: CheckResult, tally: Tally | None, names: Iterable[str]) -> CheckResult:
    """Return the result without the findings whose kind was shown often enough, and count those findings. `names` are the subjects' own names."""
    if _SHOWN is None or result.equal:
        return result
    own = own_names(names)
    kept = []
    for finding in result.findings:
        kind = _kind(result, finding)
        if _SHOWN[kind] >= MOST_SHOWN and own & {finding.left, finding.right}:
            if tally is not None:
                tally.alike[kind] += 1
        else:
            kept.append(finding)
    return replace(result, findings=kept)


def show(result: CheckResult) -> None:
    """Note the kinds of a result that the run shows."""
    if _SHOWN is not None:
        _SHOWN.update(_kind(result, finding) for finding in result.findings)


def own_names(names: Iterable[str]) -> set[str]:
    """Return the names of subjects that are not built in."""
    return {name for name in names if name not in BUILT_IN}


def _kind(result: CheckResult, finding: Finding) -> Kind:
    first = first_difference(finding)
    return kind_of(result.check, finding.left, finding.right, first.tensor, named_class(first, result.check))
