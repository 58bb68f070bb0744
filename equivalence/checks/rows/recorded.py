"""Recorded outcomes: what other people's unmodified code made of the same input, which every side must make too.

They are the third side where nothing installed is one: NeMo-RL's packers and rows, Transformer Engine's cut, Megatron-LM as of main.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from equivalence.cases.difference import compare_rows
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.cuts.context_parallel import rotary_index
from equivalence.checks.cuts.pairs import Side, compare_sides
from equivalence.checks.rows.rows import build, covers
from equivalence.recorded.outcomes import Packing, Partition, RecordedBatch, RecordedRow
from equivalence.subjects.protocol import Refusal, Row, Subject
from production.errors import PackproofError
from production.online import packing as production_packing
from production.parallel import context_parallel as production_cut
from production.parallel.multi_token import depth_tables
from production.rows import batch as production_batches
from production.rows.batch import FlatBatch
from production.rows.builder import Row as ProductionRow
from reference import batches as reference_batches
from reference import context_parallel as reference_cut
from reference import packing as reference_packing

CHECK = "recorded"
RECORDED = "recorded"
"""Name of the recorded side in a finding."""
EXCEPTIONS = {
    "bad_message": ("AttributeError", "KeyError", "TypeError"),
    "bad_content": ("KeyError", "TypeError", "UndefinedError"),
    "bad_text": ("TypeError", "UnicodeEncodeError"),
    "template_error": ("TemplateError", "TypeError", "UndefinedError"),
    "no_chat_template": ("ValueError",),
    "no_pad_token": ("TypeError",),
    "empty_row": ("IndexError",),
    "empty_assistant": ("ValueError",),
    "role_order": ("AssertionError",),
    "unknown_role": ("ValueError",),
    "turn_mismatch": ("AssertionError", "ValueError"),
    "too_many_boundaries": ("RuntimeError",),
}
"""What Megatron-LM raises where SPEC has a kind of refusal, as `subjects.megatron_lm.refusal_kind` reads it."""

_Bins = Sequence[Sequence[int]]


def check_recorded_packing(packing: Packing) -> CheckResult:
    """Both sides fill the bins that NeMo-RL's packer filled, and refuse what it refused (R-PACK-1 to R-PACK-5)."""
    sides: dict[str, Side] = {
        RECORDED: "refused" if packing.bins is None else _bins(packing.bins),
        "reference": _or_refused(lambda: _packed_by_reference(packing)),
        "production": _or_refused(lambda: _packed_by_production(packing)),
    }
    return compare_sides(CHECK, sides)


def check_recorded_partition(partition: Partition) -> CheckResult:
    """Every implementation of the zigzag gives a rank the positions that Transformer Engine's kernel gives it (R-CP-1)."""
    from equivalence.trainers.megatron_step import partitioned_indices  # noqa: PLC0415 - Megatron-LM's training code takes seconds

    cu, rank, size = list(partition.cu_seqlens), partition.rank, partition.size
    boundaries = torch.tensor(cu, dtype=torch.int32)
    indices = {
        RECORDED: torch.tensor(partition.index),
        "reference": torch.tensor(reference_cut.owned_positions(cu, rank, size)),
        "production": production_cut.shard_index(boundaries, rank, size),
        "production, for megatron-core": production_cut.partitioned_indices(boundaries, cu[-1], size, rank).long(),
        "production, multi-token": _rolled(boundaries, rank, size),
        "stand-in": partitioned_indices(boundaries, cu[-1], size, rank),
        "megatron_lm": rotary_index(cu, rank, size),
    }
    return compare_sides(CHECK, {name: {"index": index} for name, index in indices.items()})


def check_recorded_batch(recorded: RecordedBatch) -> CheckResult:
    """Both sides collate the rows to the batch that NeMo-RL made, and pad it for a last validation batch alike (R-BATCH-1, R-BATCH-4)."""
    sides: dict[str, Side] = {
        RECORDED: _before_and_after(recorded.batch, recorded.padded),
        "reference": _collated_by_reference(recorded),
        "production": _collated_by_production(recorded),
    }
    return compare_sides(CHECK, sides)


def check_recorded_row(recorded: RecordedRow, subjects: Sequence[Subject]) -> CheckResult:
    """Every subject that covers the semantics builds the row that was recorded, or refuses it alike."""
    from equivalence.generators import tokenizers  # noqa: PLC0415 - the other checks here need none

    case = recorded.case
    tokenizer = tokenizers.load(case.tokenizer)
    found: dict[str, Row] = {}
    seconds: dict[str, float] = {}
    findings = []
    left_out = []
    for subject in subjects:
        if not covers(subject, case.settings):
            continue
        began = time.perf_counter()
        row = build(subject, case.messages, tokenizer, case.settings)
        if row is None:
            left_out.append(subject.name)
            continue
        seconds[subject.name] = time.perf_counter() - began
        if isinstance(row, Finding):
            findings.append(row)
            continue
        found[subject.name] = row
        # The recorded code counted nothing, so reports are not compared.
        if differences := compare_rows(_expected(recorded, row), dataclasses.replace(row, report=None)):
            findings.append(Finding(left=RECORDED, right=subject.name, differences=differences))
    kinds = {row.refusal.kind if row.refusal else None for row in found.values()}
    refused = kinds.pop() if len(kinds) == 1 else None
    return CheckResult(
        check=CHECK,
        findings=findings,
        refused=refused,
        seconds=seconds,
        rows=found,
        sides=1 + len(seconds),
        left_out=tuple(left_out),
    )


def _expected(recorded: RecordedRow, row: Row) -> Row:
    """The recorded outcome; where only the exception's class is known, any kind that it stands for will do."""
    if recorded.outcome is not None:
        return recorded.outcome
    kind = row.refusal.kind if row.refusal else None
    if kind is not None and recorded.error in EXCEPTIONS.get(kind, ()):
        return Row(refusal=Refusal(kind=kind))
    return Row(refusal=Refusal(kind=f"one that Megatron-LM raises {recorded.error} for"))


def _packed_by_reference(packing: Packing) -> _Bins:
    lengths, capacity = packing.lengths, packing.capacity
    if packing.order is not None:
        bins = reference_packing.first_fit(packing.order, lengths, capacity)
    else:
        bins = reference_packing.PACKERS[packing.algorithm](lengths, capacity)
    return reference_packing.raise_bin_count(bins, packing.multiple_of)


def _packed_by_production(packing: Packing) -> _Bins:
    lengths, capacity, multiple_of = packing.lengths, packing.capacity, packing.multiple_of
    if packing.order is None:
        return production_packing.pack(lengths, capacity, algorithm=packing.algorithm, multiple_of=multiple_of)
    bins = production_packing.first_fit(lengths, capacity, order=packing.order)
    return production_packing.raise_bin_count(bins, multiple_of)


def _collated_by_reference(recorded: RecordedBatch) -> Side:
    rows: Sequence[Any] = recorded.rows  # the five fields are those of its own row
    places, sample_mask = reference_batches.pad_validation(range(len(rows)), recorded.data_parallel_size)
    padded = reference_batches.collate([rows[place] for place in places])
    padded = dataclasses.replace(padded, sample_mask=torch.tensor(sample_mask, dtype=torch.float32))
    return _before_and_after(vars(reference_batches.collate(rows)), vars(padded))


def _collated_by_production(recorded: RecordedBatch) -> Side:
    rows = []
    for row in recorded.rows:
        fields: dict[str, Any] = {field.name: getattr(row, field.name) for field in dataclasses.fields(Row)}
        own = {name: value for name, value in fields.items() if name not in ("report", "refusal")}
        rows.append(ProductionRow(**own, context_parallel_size=recorded.context_parallel_size, report={}))
    batch = production_batches.collate(rows)
    padded = production_batches.pad_validation(batch, size=recorded.data_parallel_size)
    return _before_and_after(vars(batch), vars(padded))


def _before_and_after(batch: Mapping[str, Any], padded: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of both, by name."""
    both = [(name, value) for name, value in batch.items()]
    both += [(f"{name}, padded", value) for name, value in padded.items()]
    return {name: value for name, value in both if isinstance(value, torch.Tensor)}


def _or_refused(pack: Callable[[], _Bins]) -> Side:
    try:
        return _bins(pack())
    except (PackproofError, reference_packing.PackingError):
        return "refused"


def _bins(bins: _Bins) -> dict[str, torch.Tensor]:
    """The bins one after the other, each closed by -1."""
    return {"bins": torch.tensor([index for each in bins for index in (*each, -1)], dtype=torch.int64)}


def _rolled(boundaries: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The positions of a rank's share, read off a row whose ids are its positions: what the model and the simulator are given."""
    ids = torch.arange(int(boundaries[-1]))[None]
    whole: dict[str, Any] = {"input_ids": ids, "target_ids": ids, "token_mask": ids.float(), "position_ids": ids}
    row = FlatBatch(**whole, cu_seqlens=boundaries, max_seqlen=int(boundaries.diff().max()))
    return depth_tables(row, 0, rank=rank, size=size).input_ids[0, 0]
