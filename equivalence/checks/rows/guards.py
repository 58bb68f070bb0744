"""Guards: both sides refuse the same batches, by the same kind and row, and collate the others (R-GUARD-1). No third witness has such guards."""

from __future__ import annotations

import torch

from equivalence.cases.result import CheckResult
from equivalence.checks.cuts.pairs import Side, compare_sides
from equivalence.generators.guards import PAD_ID, GuardCase
from production.errors import BatchRefused
from production.rows.batch import BatchSettings, collate_checked
from reference.guards import first_fault


def check_guards(case: GuardCase) -> CheckResult:
    """Refuse or collate the rows, through what the job's datasets call."""
    sides: dict[str, Side] = {"reference": _reference(case), "production": _production(case)}
    return compare_sides("guards", sides)


def _reference(case: GuardCase) -> Side:
    found = first_fault(
        case.rows,
        context_parallel_size=case.context_parallel_size,
        data_parallel_size=case.data_parallel_size,
        global_batch_size=case.global_batch_size,
        pad_id=PAD_ID if case.multi_token_prediction else None,
    )
    return _taken(case) if found is None else _refused(*found)


def _production(case: GuardCase) -> Side:
    settings = BatchSettings(
        context_parallel_size=case.context_parallel_size,
        data_parallel_size=case.data_parallel_size,
        global_batch_size=case.global_batch_size,
        multi_token_prediction=case.multi_token_prediction,
        pad_token_id=PAD_ID if case.multi_token_prediction else None,
    )
    try:
        batch = collate_checked(case.rows, settings)
    except BatchRefused as refused:
        return _refused(refused.kind, refused.row)
    return {"refused": torch.tensor(0), "rows": batch.input_ids, "masks": batch.token_mask}


def _taken(case: GuardCase) -> Side:
    stacked = {name: torch.stack([row[name] for row in case.rows]) for name in ("input_ids", "token_mask")}
    return {"refused": torch.tensor(0), "rows": stacked["input_ids"], "masks": stacked["token_mask"]}


def _refused(kind: str, row: int | None) -> str:
    """Return the refusal as a word that includes its row."""
    return kind if row is None else f"{kind} of row {row}"
