"""Rows: every side that is a witness of the semantics builds the row, and all are equal to the bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from equivalence.checks.result import CheckResult, Finding
from equivalence.compare import compare_rows
from equivalence.subjects.protocol import Messages, Row, RowSettings, Subject


def covers(subject: Subject, settings: RowSettings) -> bool:
    """Whether a subject is a witness of these semantics; one that does not say is."""
    asked = getattr(subject, "covers", None)
    return True if asked is None else bool(asked(settings))


def check_row(messages: Messages, tokenizer: Any, settings: RowSettings, subjects: Sequence[Subject]) -> CheckResult:
    """Build the row with every subject that covers the settings, and compare all pairs."""
    rows: dict[str, Row] = {}
    seconds: dict[str, float] = {}
    for subject in subjects:
        if covers(subject, settings):
            began = time.perf_counter()
            rows[subject.name] = subject.build_row(messages, tokenizer, settings)
            seconds[subject.name] = time.perf_counter() - began
    return compare_all("rows", rows, seconds)


def compare_all(check: str, rows: Mapping[str, Row], seconds: Mapping[str, float] | None = None) -> CheckResult:
    """Compare every pair: a side may count what another does not, so equality with one is not equality with all."""
    findings = []
    for left, right in itertools.combinations(rows, 2):
        if differences := compare_rows(rows[left], rows[right]):
            findings.append(Finding(left=left, right=right, differences=differences))
    kinds = {row.refusal.kind if row.refusal else None for row in rows.values()}
    return CheckResult(
        check=check,
        findings=findings,
        refused=kinds.pop() if len(kinds) == 1 else None,
        seconds=dict(seconds or {}),
        rows=dict(rows),
    )
