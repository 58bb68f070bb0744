"""Divergences: between two presets a row differs exactly where the registry says, and nowhere else, on every side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from equivalence.cases.difference import compare_rows
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.rows.rows import build, covers
from equivalence.divergences.registry import REGISTRY, Divergence, Step, expected, steps_between
from equivalence.subjects.protocol import Messages, RowSettings, Subject, overridden


def check_divergences(
    messages: Messages, tokenizer: Any, settings: RowSettings, subjects: Sequence[Subject], *, presets: tuple[str, str]
) -> CheckResult:
    """Walk from one preset to the other by single fields; hold every subject to each step's prediction."""
    findings: list[Finding] = []
    fired: Counter[str] = Counter()
    steps = list(steps_between(*presets))
    for step in steps:
        found, shows = check_step(step, messages, tokenizer, settings, subjects)
        findings += found
        fired[label(step.entry)] += shows
    return _result(findings, dict(fired), _left_out(steps, settings, subjects), subjects)


def check_smallest(
    entry: Divergence,
    tokenizer: Any,
    subjects: Sequence[Subject],
    *,
    messages: Messages | None = None,
    settings: RowSettings | None = None,
) -> CheckResult:
    """Hold every subject to an entry's smallest row, which must show it; or to another row of the same entry."""
    settings = settings or entry.settings
    base = settings.semantics
    step = Step(
        entry=entry,
        permissive=overridden(base, **{entry.field: entry.permissive}),
        strict=overridden(base, **{entry.field: entry.strict}),
    )
    if messages is None:
        messages = [{"role": role, "content": content} for role, content in entry.smallest]
    findings, shows = check_step(step, messages, tokenizer, settings, subjects)
    return _result(findings, {label(entry): int(shows)}, _left_out([step], settings, subjects), subjects)


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
                built = build(subject, messages, tokenizer, asked)
                if built is None:
                    continue
                if isinstance(built, Finding):
                    findings.append(built)
                elif differences := compare_rows(wanted, built):
                    expectation = f"{label(step.entry)} under {name}"
                    findings.append(Finding(left=expectation, right=subject.name, differences=differences))
    return findings, bool(compare_rows(permissive, strict))


def _result(
    findings: list[Finding], fired: dict[str, int], left_out: tuple[str, ...], subjects: Sequence[Subject]
) -> CheckResult:
    sides = 1 + len(subjects) - len(left_out)  # the prediction is one
    return CheckResult(check="divergences", findings=findings, fired=fired, sides=sides, left_out=left_out)


def _left_out(steps: Sequence[Step], settings: RowSettings, subjects: Sequence[Subject]) -> tuple[str, ...]:
    """Subjects that take neither end of any step."""
    asked = [settings.replace(semantics=name) for step in steps for name in (step.permissive, step.strict)]
    return tuple(each.name for each in subjects if not any(covers(each, settings) for settings in asked))


def label(entry: Divergence) -> str:
    """An entry's name in counts and reports."""
    return f"{entry.field}: {entry.permissive}/{entry.strict}"


LABELS = tuple(label(entry) for entry in REGISTRY)
