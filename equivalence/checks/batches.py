"""Batches: collate and flatten of every side are equal. The stride and the validation padding are held by tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from equivalence.checks.result import CheckResult, Finding
from equivalence.checks.rows import covers
from equivalence.compare import compare_batches
from equivalence.subjects.protocol import Batch, Row, RowSettings, Subject


def check_batch(rows: Sequence[Mapping[str, Row]], settings: RowSettings, subjects: Sequence[Subject]) -> CheckResult:
    """Collate rows that every subject built, each its own, and compare all pairs. Refused rows are left out before."""
    batches: dict[str, Batch] = {}
    for subject in subjects:
        if covers(subject, settings):
            batches[subject.name] = subject.collate([row[subject.name] for row in rows], settings)
    findings = []
    for left, right in itertools.combinations(batches, 2):
        if differences := compare_batches(batches[left], batches[right]):
            findings.append(Finding(left=left, right=right, differences=differences))
    return CheckResult(check="batches", findings=findings)
