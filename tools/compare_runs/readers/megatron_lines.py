"""Parse the lines of a Megatron-LM log: separate whole lines from broken lines, and restarts from copies by other processes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from equivalence.errors import InputError
from tools.compare_runs.run import to_number

ITERATION = re.compile(r"(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d+)?\]\s+)?\biteration\s+(\d+)/\s*\d+ \|(.*)")
VALIDATION = re.compile(r"\bvalidation loss at iteration (\d+)(?: on (\w+) set)? \|(.*)")
VALIDATED = re.compile(r" lm loss value: (\S+) \|")
BEGINS = re.compile(r"(?:^|[\s:\]])training \.\.\.\s*$")
"""Line that the driver prints before the first iteration of a process."""
SKIPPED, SECONDS = "number of skipped iterations", "elapsed time per iteration (ms)"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of an iteration."""

    step: int
    at: datetime | None
    """When it was printed; None in logs without a time."""
    keeps_sums: bool
    """Whether the driver that printed it goes on summing after a run's first line: those since 0.16 do, whose times have fractions of a second."""
    text: str
    """Text behind the iteration's number."""
    fields: Mapping[str, str]
    """By name, as they were written. Empty where the line is broken."""

    @property
    def is_whole(self) -> bool:
        """Return whether the line is complete."""
        return bool(self.fields)


@dataclass(kw_only=True)
class Session:
    """Lines of one start of the driver."""

    lines: list[Line] = field(default_factory=list)
    """Rising by step."""
    validations: list[tuple[int, str]] = field(default_factory=list)
    """(iteration, loss as written)."""


@dataclass(kw_only=True)
class Log:
    """Lines of a file by start."""

    sessions: list[Session] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    """Iterations, and those of validations, of which a line is not whole."""
    copies: int = 0
    """Lines that another process printed too, with the same numbers."""


def read_lines_of(path: Path) -> tuple[list[Line], list[tuple[int, int, str | None]], list[int]]:
    """Return the lines of iterations, validations as (lines before it, iteration, loss), and before which lines the driver began."""
    lines: list[Line] = []
    validations: list[tuple[int, int, str | None]] = []
    begins: list[int] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            if match := ITERATION.search(text):
                lines.append(_line(match))
            elif (match := VALIDATION.search(text)) and match[2] != "test":
                value = VALIDATED.match(match[3])
                written = value[1] if value and to_number(value[1]) is not None else None
                validations.append((len(lines), int(match[1]), written))
            elif BEGINS.search(text):
                begins.append(len(lines))
    return lines, validations, begins


def _line(match: re.Match[str]) -> Line:
    at = None if match[1] is None else datetime.fromisoformat(match[1] + (match[2] or ""))
    return Line(step=int(match[3]), at=at, keeps_sums=match[2] is not None, text=match[4], fields=_fields(match[4]))


def _fields(text: str) -> dict[str, str]:
    parts = (part.rpartition(":") for part in text.split("|"))
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def whole(lines: Sequence[Line], used: Collection[str]) -> list[Line]:
    """Return the lines, except lines with a truncated field and lines into which another process printed.

    `used` names the compared values. A line must end with a bar after the field that ends the lines of this log, and each compared name must
    appear alone, once, with a number.
    """
    counts = Counter(name for line in lines for name in line.fields)
    usual = {name for name, count in counts.items() if count > 1 or len(lines) < 3}
    ends = Counter(list(line.fields)[-1] for line in lines if line.fields and line.text.rstrip().endswith("|"))
    end = ends.most_common(1)[0][0] if ends else ""
    return [
        line
        if _is_whole(line, used={*used} & usual, usual=usual, end=end)
        else Line(step=line.step, at=line.at, keeps_sums=line.keeps_sums, text=line.text, fields={})
        for line in lines
    ]


def _is_whole(line: Line, *, used: set[str], usual: set[str], end: str) -> bool:
    text = line.text.rstrip()
    if not text.endswith("|") or not line.fields or list(line.fields)[-1] != end or ITERATION.search(text):
        return False
    named = [part.rpartition(":")[0].strip() for part in text.split("|")[:-1]]
    foreign = [part for part, name in zip(text.split("|")[:-1], named, strict=True) if name not in usual]
    for name in used:
        if any(name in part for part in foreign) or named.count(name) > 1:
            return False
        if name in line.fields:
            if to_number(line.fields[name]) is None:
                return False
        elif foreign:
            return False
    return True


def sessions(
    path: Path, lines: Sequence[Line], validations: Sequence[tuple[int, int, str | None]], begins: Collection[int]
) -> Log:
    """Return what each start of the driver printed, once.

    Raises InputError where several processes printed other numbers of the same iteration.
    """
    log = Log(sessions=[Session()])
    have: dict[int, Line] = {}
    back = 0
    for at, line in enumerate(lines):
        _validations(log, at, validations)
        session, before = log.sessions[-1], max(have, default=0)
        if at in begins:
            is_new = bool(have)
        elif line.step in have and _is_copy(have[line.step], line):
            _same(path, have[line.step], line)
            log.copies += 1
            continue
        else:
            is_new = line.step <= before
            back += is_new
        if is_new:
            session = Session()
            log.sessions.append(session)
            have = {}
        have[line.step] = line
        session.lines.append(line)
        if not line.is_whole:
            log.broken.append(line.step)
    _validations(log, len(lines), validations)
    if back > 2 and 4 * back > len(lines):
        raise _several(path, f"the iteration number falls {back} times in {len(lines)} lines")
    return log


def _validations(log: Log, at: int, validations: Sequence[tuple[int, int, str | None]]) -> None:
    for before, step, value in validations:
        if before == at:
            if value is None:
                log.broken.append(step)
            else:
                log.sessions[-1].validations.append((step, value))


def _is_copy(first: Line, second: Line) -> bool:
    """Return whether two lines of one iteration are too close in time for the iteration to have been run again."""
    if first.at is None or second.at is None:
        return first.step == second.step and first.is_whole and first.fields == second.fields
    took = (to_number(second.fields.get(SECONDS)) or 0.0) / 1000
    return abs((second.at - first.at).total_seconds()) <= max(took, 1.0)


def _same(path: Path, first: Line, second: Line) -> None:
    """Raise InputError if two lines have different numbers; times may differ, and an incomplete line is ignored."""
    if not (first.is_whole and second.is_whole):
        return
    for name in {**first.fields, **second.fields}:
        values = first.fields.get(name), second.fields.get(name)
        if name != SECONDS and values[0] != values[1]:
            raise _several(
                path, f"of iteration {first.step}, {name} is {values[0]} in one line and {values[1]} in another"
            )


def _several(path: Path, what: str) -> InputError:
    return InputError(
        f"{path}: several processes printed into this log: {what}. To fix it: give the lines of one process (Megatron-LM "
        "prints from its last rank alone; a launcher's prefix tells whose line each is)"
    )
