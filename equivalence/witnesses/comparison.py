"""Hold a witness's rows to every Megatron preset: equal, or which fields of a row differ in how many rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from equivalence.cases.row import RowCase
from equivalence.generators import tokenizers
from equivalence.recorded import outcomes
from equivalence.subjects.protocol import ROW_TENSORS, Row, Subject

PRESETS = tuple(outcomes.MEGATRON_VERSIONS)
"""Presets that are some version of Megatron-LM."""
_LARGE = "nemotron-like"
"""Tokenizer of the recorded rows that takes seconds to load, and adds no layout that the others lack."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One witness against one preset."""

    witness: str
    preset: str
    rows: int
    """Rows that were compared."""
    equal: int
    """Rows that were equal in every field, refusals included."""
    fields: dict[str, int] = field(default_factory=dict)
    """Field of a row, or `refused as …`, to the rows in which it differs."""

    @property
    def text(self) -> str:
        """Return the verdict as one line."""
        told = ", ".join(f"{name} ({count})" for name, count in self.fields.items())
        return f"{self.witness:<24}{self.preset:<20}{self.equal:>5,} of {self.rows:,} equal" + (
            f"; differ: {told}" if told else ""
        )


def recorded_cases() -> list[RowCase]:
    """Return the rows whose outcomes were recorded of six versions."""
    recorded = outcomes.rows(PRESETS[0])
    return [each.case for each in recorded if each.case.tokenizer != _LARGE]


def compare(
    witness: Subject, own_preset: str, reference: Subject, *, cases: Iterable[RowCase], presets: Sequence[str] = PRESETS
) -> list[Verdict]:
    """Compare the witness's rows, each built once and as the version builds it, with the reference's under each preset."""
    built = [(case, _row(witness, case, own_preset)) for case in cases]
    return [_verdict(witness.name, preset, built, reference) for preset in presets]


def _row(subject: Subject, case: RowCase, preset: str) -> Row:
    settings = case.settings.replace(semantics=preset)
    return subject.build_row(list(case.messages), tokenizers.load(case.tokenizer), settings)


def _verdict(name: str, preset: str, built: Sequence[tuple[RowCase, Row]], reference: Subject) -> Verdict:
    found: Counter[str] = Counter()
    equal = 0
    for case, row in built:
        differing = differing_fields(row, _row(reference, case, preset))
        equal += not differing
        found.update(differing)
    return Verdict(witness=name, preset=preset, rows=len(built), equal=equal, fields=dict(found.most_common()))


def differing_fields(row: Row, other: Row) -> list[str]:
    """Return the fields in which two rows differ; of a refusal its kind, where only one side has it or the kinds differ."""
    if row.refusal is not None or other.refusal is not None:
        kinds = [each.refusal.kind if each.refusal is not None else "" for each in (row, other)]
        if kinds[0] == kinds[1]:
            return []
        if all(kinds):
            return [f"refused as {kinds[0]}, not as {kinds[1]}"]
        return [
            f"refused as {kinds[0]} by the witness alone" if kinds[0] else f"refused as {kinds[1]} by the preset alone"
        ]
    return [name for name in ROW_TENSORS if not _equal(getattr(row, name), getattr(other, name))]


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
