"""Rows: every side that is a witness of the semantics builds the row, and all are equal to the bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equivalence.cases.difference import compare_rows
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.blame import raised
from equivalence.subjects.protocol import Messages, NotComparable, Row, RowSettings, Subject, row_of

_SAYS = ("prompt_formats", "prompt_format"), ("context_parallel_sizes", "context_parallel_size"), ("semantics",) * 2
"""Fields in which a subject may say what it takes, and the setting of each field."""


def covers(subject: Subject, settings: RowSettings) -> bool:
    """Return whether a subject takes these settings; a subject that says nothing takes all."""
    for name, setting in _SAYS:
        taken = getattr(subject, name, None)
        if taken is not None and getattr(settings, setting) not in ((taken,) if isinstance(taken, str) else taken):
            return False
    asked = getattr(subject, "covers", None)
    return True if asked is None else bool(asked(settings))


def attempt[Value](
    subject: Subject, call: Callable[[], Value], *, expected: str = "a row or a refusal"
) -> Value | Finding:
    """Call a subject's method; return its result, or its exception as a difference.

    A witness's exception goes through: it could not run. So does NotComparable, which is no fault.
    """
    try:
        return call()
    except NotComparable:
        raise
    except Exception as error:
        if getattr(subject, "is_witness", False):
            raise
        return raised(subject.name, error, expected=expected)


def build(subject: Subject, messages: Messages, tokenizer: Any, settings: RowSettings) -> Row | Finding | None:
    """Return a subject's row, or the difference that its exception is; None where the row cannot be compared with others."""
    try:
        return attempt(subject, lambda: row_of(subject.build_row(messages, tokenizer, settings)))
    except NotComparable:
        return None


def check_row(messages: Messages, tokenizer: Any, settings: RowSettings, subjects: Sequence[Subject]) -> CheckResult:
    """Build the row with every subject that covers the settings, and compare all pairs."""
    built: dict[str, Row | Finding] = {}
    seconds: dict[str, float] = {}
    for subject in subjects:
        if covers(subject, settings):
            began = time.perf_counter()
            made = build(subject, messages, tokenizer, settings)
            if made is not None:
                built[subject.name] = made
                seconds[subject.name] = time.perf_counter() - began
    return compare_all("rows", built, seconds, left_out=[each.name for each in subjects if each.name not in built])


def compare_all(
    check: str,
    built: Mapping[str, Row | Finding],
    seconds: Mapping[str, float] | None = None,
    *,
    left_out: Sequence[str] = (),
) -> CheckResult:
    """Compare every pair: a side may count what another does not, so equality with one is not equality with all."""
    findings = [each for each in built.values() if isinstance(each, Finding)]
    rows = {name: each for name, each in built.items() if isinstance(each, Row)}
    for left, right in itertools.combinations(rows, 2):
        if differences := compare_rows(rows[left], rows[right]):
            findings.append(Finding(left=left, right=right, differences=differences))
    kinds = {row.refusal.kind if row.refusal else None for row in rows.values()}
    return CheckResult(
        check=check,
        findings=findings,
        refused=kinds.pop() if len(kinds) == 1 else None,
        seconds=dict(seconds or {}),
        rows=rows,
        sides=len(built),
        left_out=tuple(left_out),
    )
