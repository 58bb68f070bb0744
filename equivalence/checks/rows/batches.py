"""Batches: collate and flatten of every side are equal. The stride and the validation padding are held by tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from equivalence.cases.difference import compare_batches
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.rows.rows import attempt, covers
from equivalence.subjects.protocol import Batch, Row, RowSettings, Subject, batch_of


def check_batch(rows: Sequence[Mapping[str, Row]], settings: RowSettings, subjects: Sequence[Subject]) -> CheckResult:
    """Collate rows that every subject built, each its own, and compare all pairs. Refused rows are left out before."""
    batches: dict[str, Batch] = {}
    findings: list[Finding] = []
    left_out: list[str] = []
    for subject in subjects:
        if not callable(getattr(subject, "collate", None)) or not covers(subject, settings):
            left_out.append(subject.name)
            continue
        batch = _collate(subject, [row[subject.name] for row in rows], settings)
        if isinstance(batch, Finding):
            findings.append(batch)
        else:
            batches[subject.name] = batch
    for left, right in itertools.combinations(batches, 2):
        if differences := compare_batches(batches[left], batches[right]):
            findings.append(Finding(left=left, right=right, differences=differences))
    sides = len(subjects) - len(left_out)
    return CheckResult(check="batches", findings=findings, sides=sides, left_out=tuple(left_out))


def _collate(subject: Subject, rows: Sequence[Row], settings: RowSettings) -> Batch | Finding:
    return attempt(subject, lambda: batch_of(subject.collate(rows, settings)), expected="a batch")
