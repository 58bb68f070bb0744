"""Check a saved row case: its sides against each other, in a batch, between presets, or against the registry's
prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from equivalence.cases.result import CheckResult, Finding
from equivalence.cases.row import RowCase, differs_from_expected
from equivalence.checks.rows.batches import check_batch
from equivalence.checks.rows.divergences import check_divergences, check_smallest, label
from equivalence.checks.rows.rows import check_row
from equivalence.divergences import registry
from equivalence.errors import CaseError
from equivalence.generators import tokenizers
from equivalence.subjects.protocol import Subject

PRESET_PAIRS = (
    ("megatron-lm-0.19", "strict"),
    ("megatron-lm-main", "nemo-rl-direct"),
    ("megatron-lm-0.19", "megatron-lm-0.19,lost_conversations=refuse"),
    ("nemo-rl-direct", "strict"),
)
"""Between which semantics rows walk by single fields; together they pass every entry of the registry."""


def check_saved(case: RowCase, sides: Sequence[Subject]) -> list[CheckResult]:
    """Return `check_case` in the store's terms."""
    return [check_case(case, sides)]


def check_case(case: RowCase, sides: Sequence[Subject]) -> CheckResult:
    """Compare all sides of a case with each other in the check for which it was saved, and with its expected values."""
    if case.check == "batches":
        return check_rows_of_batch([case, *(case.with_(messages=each) for each in case.others)], sides)
    if case.check == "divergences":
        found = [walk(case, sides, pair) for pair in PRESET_PAIRS]
        return next((each for each in found if not each.equal), found[0])
    if case.check == "smallest":
        return check_smallest(
            entry_of(case), tokenizers.load(case.tokenizer), sides, messages=case.messages, settings=case.settings
        )
    result = check_row(case.messages, tokenizers.load(case.tokenizer), case.settings, sides)
    if case.expected is not None:
        for name, row in result.rows.items():
            if wrong := differs_from_expected(row, case.expected):
                result.findings.append(Finding(left="expected", right=name, differences=wrong))
    return result


def check_rows_of_batch(cases: Sequence[RowCase], sides: Sequence[Subject]) -> CheckResult:
    """Collate the rows that no side refuses; whether the rows are equal is the row check's, but a side that raises is told here."""
    settings, tokenizer = cases[0].settings, tokenizers.load(cases[0].tokenizer)
    each = [check_row(case.messages, tokenizer, settings, sides) for case in cases]
    raised = [finding for result in each for finding in result.findings if finding.left == "expected"]
    if raised:
        return CheckResult(check="batches", findings=raised)
    kept = [result.rows for result in each if all(row.refusal is None for row in result.rows.values())]
    return check_batch(kept, settings, sides) if kept else CheckResult(check="batches", refused=each[0].refused)


def walk(case: RowCase, sides: Sequence[Subject], pair: tuple[str, str]) -> CheckResult:
    """Return a case between two presets, field by field."""
    return check_divergences(case.messages, tokenizers.load(case.tokenizer), case.settings, sides, presets=pair)


def smallest_case(entry: registry.Divergence) -> RowCase:
    """Return an entry's smallest row as a case."""
    messages: tuple[Any, ...] = tuple({"role": role, "content": content} for role, content in entry.smallest)
    return RowCase(
        messages=messages,
        settings=entry.settings,
        tokenizer=entry.tokenizer,
        labels=(label(entry),),
        origin=f"the smallest row of {label(entry)}",
        check="smallest",
    )


def entry_of(case: RowCase) -> registry.Divergence:
    """Return the entry of the registry that a case of `smallest` holds sides to. CaseError where there is none."""
    for entry in registry.REGISTRY:
        if label(entry) in case.labels:
            return entry
    raise CaseError(f"{case.origin or 'the case'}: the registry has no entry {', '.join(case.labels)}; save it again")
