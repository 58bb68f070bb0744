"""Define the result of one part of a check, and the verdict of all parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tools.counted import counted

Status = Literal["equal", "differs", "stops", "loses", "refused", "not run", "cached", "not cached"]
"""`equal`: nothing that was compared differs. `differs`: two sides do not agree. `stops`: a run would stop at rows of the
file. `loses`: data are lost, and the configuration does not allow it. `refused`: bad input. `not run`: nothing was compared. `cached`: the row
cache holds every row; `not cached`: it does not hold some."""
PARTS = {
    "config": "Configuration",
    "file": "Every row of every file",
    "rows": "Rows against the witnesses",
    "layout": "Layout and training steps",
    "order": "Order of rows",
}
"""Parts of a check by the name that `--only` takes, in the order in which they run."""
CACHE = "cache"
TITLES = {**PARTS, CACHE: "Row cache"}
"""Titles of the parts, and of the row cache, which `--cache` builds and which compares nothing."""
Verdict = Literal["proven", "partial", "differs", "refused"]
EXIT = {"proven": 0, "partial": 0, "differs": 1, "refused": 2}
"""Exit status of each verdict. A part that was asked for and could not run makes a verdict `differs`, never `partial`."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault: what is wrong, where, and how to fix it."""

    what: str
    where: str = ""
    fix: str = ""
    command: str = ""
    """A command that shows the fault; empty where there is none."""

    def text(self) -> str:
        """Return the fault on one line."""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}" + (f". To fix it: {self.fix}" if self.fix else "")


@dataclass(kw_only=True)
class PartResult:
    """Result of one part: its comparisons and its findings."""

    name: str
    """One of TITLES."""
    status: Status = "not run"
    compared: int = 0
    """Rows (config: checks; order: steps) that were compared; a part that compared none proves nothing."""
    summary: str = ""
    """The outcome in one sentence."""
    witnesses: Sequence[str] = ()
    """Sides that were compared, with versions."""
    findings: list[Finding] = field(default_factory=list)
    """Faults for which the verdict is not good."""
    notes: list[str] = field(default_factory=list)
    """Facts that change no verdict."""
    not_shown: list[str] = field(default_factory=list)
    """What this part leaves unproven: shrunk, sampled, absent here."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Counts for the certificate, as plain JSON."""
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """Return the part's title for people."""
        return TITLES[self.name]


def absent_parts(results: Mapping[str, PartResult], asked: Sequence[str]) -> dict[str, str]:
    """Return each part without a result, with the reason: it was left out, or a refused configuration kept it from running."""
    config = results.get("config")
    refused = config is not None and config.status == "refused"
    first = config.findings[0] if refused and config else Finding(what="")
    why = (
        f"not run because the job is refused ({first.where}{': ' if first.where else ''}{first.what})"
        if refused
        else ""
    )
    return {name: why if why and name in asked else "left out" for name in PARTS if name not in results}


def verdict_of(results: Iterable[PartResult], asked: Sequence[str]) -> Verdict:
    """Return the verdict: `proven` only where every part of PARTS compared something and found nothing.

    `asked` are the parts that were to run; one of them that compared nothing makes the verdict `differs`.
    """
    found = {each.name: each for each in results}
    if any(each.status == "refused" for each in found.values()):
        return "refused"
    if any(each.status in ("differs", "stops", "loses", "not cached") for each in found.values()):
        return "differs"
    if any(name not in found or found[name].status != "equal" or found[name].compared < 1 for name in asked):
        return "differs"
    return "proven" if set(PARTS) <= set(found) else "partial"


def summary_of(verdict: Verdict, results: Mapping[str, PartResult]) -> str:
    """Return the verdict as one sentence."""
    faults = sum(len(each.findings) for each in results.values())
    run = ", ".join(results)
    if verdict == "proven":
        return "proven: nothing differs in what was compared; the list of what was not shown says the rest"
    if verdict == "partial":
        return f"no fault in what was asked for ({run}); the other parts were left out, so nothing is proven of them"
    if verdict == "refused":
        return f"refused: the job cannot start as it stands ({counted(faults, 'fault')})"
    silent = [each.name for each in results.values() if each.status == "not run"]
    if silent and not faults:
        return f"not proven: {', '.join(silent)} could not be compared"
    return f"not proven: {counted(faults, 'fault')}"
