"""Divergences: between two presets a row differs exactly where the registry says, and nowhere else, on every side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from equivalence.checks.result import CheckResult, Finding
from equivalence.checks.rows import covers
from equivalence.compare import compare_rows
from equivalence.divergences import REGISTRY, Divergence, Step, expected, steps_between
from equivalence.subjects.protocol import Messages, RowSettings, Subject, overridden


def check_divergences(
    messages: Messages, tokenizer: Any, settings: RowSettings, subjects: Sequence[Subject], *, presets: tuple[str, str]
) -> CheckResult:
    """Walk from one preset to the other by single fields; hold every subject to each step's prediction."""
    findings: list[Finding] = []
    fired: Counter[str] = Counter()
    for step in steps_between(*presets):
        found, shows = check_step(step, messages, tokenizer, settings, subjects)
        findings += found
        fired[label(step.entry)] += shows
    return CheckResult(check="divergences", findings=findings, fired=dict(fired))


def check_smallest(entry: Divergence, tokenizer: Any, subjects: Sequence[Subject]) -> CheckResult:
    """Hold every subject to an entry's smallest row, which must show it."""
    base = entry.settings.semantics
    step = Step(
        entry=entry,
        permissive=overridden(base, **{entry.field: entry.permissive}),
        strict=overridden(base, **{entry.field: entry.strict}),
    )
    messages = [{"role": role, "content": content} for role, content in entry.smallest]
    findings, shows = check_step(step, messages, tokenizer, entry.settings, subjects)
    return CheckResult(check="divergences", findings=findings, fired={label(entry): int(shows)})


def check_step(
    step: Step, messages: Messages, tokenizer: Any, settings: RowSettings, subjects: Sequence[Subject]
) -> tuple[list[Finding], bool]:
    """Findings of one step, and whether it shows in this row."""
    permissive, strict = expected(step, messages, tokenizer, settings)
    findings = []
    for subject in subjects:
        for name, wanted in ((step.permissive, permissive), (step.strict, strict)):
            asked = settings.replace(semantics=name)
            if covers(subject, asked):
                built = subject.build_row(messages, tokenizer, asked)
                if differences := compare_rows(wanted, built):
                    expectation = f"{label(step.entry)} under {name}"
                    findings.append(Finding(left=expectation, right=subject.name, differences=differences))
    return findings, bool(compare_rows(permissive, strict))


def label(entry: Divergence) -> str:
    """An entry's name in counts and reports."""
    return f"{entry.field}: {entry.permissive}/{entry.strict}"


LABELS = tuple(label(entry) for entry in REGISTRY)
