"""Compare every side with recorded outcomes of other people's unmodified code on the same input.

Recorded outcomes are the third side where nothing can be installed: NeMo-RL's packers and rows, Transformer Engine's cut, Megatron-LM's main branch.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from equivalence.cases.difference import compare_rows
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.cuts.pairs import Side, compare_sides
from equivalence.checks.rows.rows import build, covers
from equivalence.recorded.outcomes import (
    CONVERSATION_MULTIPLE,
    CONVERSATION_PAD,
    Packing,
    Partition,
    RecordedBatch,
    RecordedConversation,
    RecordedRow,
)
from equivalence.subjects import load
from equivalence.subjects.protocol import Refusal, Row, Subject
from equivalence.subjects.reference import TransformersTokenizer
from production.errors import PackproofError
from production.online import chat as production_chat
from production.online import packing as production_packing
from production.online.padded_batch import build_padded_batch
from production.parallel import context_parallel as production_cut
from production.parallel.multi_token import depth_tables
from production.rows import batch as production_batches
from production.rows.batch import FlatBatch
from production.rows.builder import Row as ProductionRow
from reference import batches as reference_batches
from reference import chat as reference_chat
from reference import context_parallel as reference_cut
from reference import microbatches as reference_microbatches
from reference import packing as reference_packing
from reference.prompts import Prompt

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
"""Exceptions of Megatron-LM for SPEC's kinds of refusal, as `subjects.megatron_lm.refusal_kind` reads them."""

_Bins = Sequence[Sequence[int]]


def check_recorded(value: Packing | Partition | RecordedBatch | RecordedConversation | RecordedRow) -> CheckResult:
    """Check one outcome of any kind, as a saved case holds it; rows with both sides of this project."""
    if isinstance(value, RecordedRow):
        return check_recorded_row(value, [load("reference"), load("production")])
    if isinstance(value, Packing):
        return check_recorded_packing(value)
    if isinstance(value, RecordedConversation):
        return check_recorded_conversation(value)
    return check_recorded_partition(value) if isinstance(value, Partition) else check_recorded_batch(value)


def check_recorded_packing(packing: Packing) -> CheckResult:
    """Compare both sides' bins and refusals with those of NeMo-RL's packer (R-PACK-1 to R-PACK-5)."""
    sides: dict[str, Side] = {
        RECORDED: "refused" if packing.bins is None else _bins(packing.bins),
        "reference": _or_refused(lambda: _packed_by_reference(packing)),
        "production": _or_refused(lambda: _packed_by_production(packing)),
    }
    return compare_sides(CHECK, sides)


def check_recorded_partition(partition: Partition) -> CheckResult:
    """Compare every implementation of the zigzag with the positions that Transformer Engine's kernel gives a rank (R-CP-1)."""
    # megatron-core and Megatron-LM's training code take seconds to import, and the other outcomes need neither.
    from equivalence.checks.cuts.context_parallel import rotary_index  # noqa: PLC0415
    from equivalence.trainers.megatron_step import partitioned_indices  # noqa: PLC0415

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
    """Compare both sides' batch, and its padding for a last validation batch, with NeMo-RL's (R-BATCH-1, R-BATCH-4)."""
    sides: dict[str, Side] = {
        RECORDED: _before_and_after(recorded.batch, recorded.padded),
        "reference": _collated_by_reference(recorded),
        "production": _collated_by_production(recorded),
    }
    return compare_sides(CHECK, sides)


def check_recorded_conversation(recorded: RecordedConversation) -> CheckResult:
    """Both sides make of a conversation the padded sequence, mask and weight that NeMo-RL made (R-ONLINE-1, 2, 8 and 10)."""
    from equivalence.generators import tokenizers  # noqa: PLC0415 - the other checks here need none

    tokenizer = copy.deepcopy(tokenizers.load("word"))
    tokenizer.chat_template = recorded.template
    if recorded.without_bos_token:
        tokenizer.bos_token = None
    sides: dict[str, Side] = {
        RECORDED: "no token"
        if not recorded.input_length
        else _sequence(recorded.input_ids, recorded.token_mask, recorded.input_length, recorded.weight),
        "reference": _tokenized_by_reference(recorded, tokenizer),
        "production": _tokenized_by_production(recorded, tokenizer),
    }
    return compare_sides(CHECK, sides)


def check_recorded_row(recorded: RecordedRow, subjects: Sequence[Subject]) -> CheckResult:
    """Compare every subject that covers the semantics with the recorded row or refusal."""
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
    """Return the recorded outcome; if only the exception's class is known, any kind of refusal for that class passes."""
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


def _tokenized_by_reference(recorded: RecordedConversation, tokenizer: Any) -> Side:
    settings = reference_chat.ChatSettings(
        bos_token=tokenizer.bos_token if recorded.add_bos else None,
        eos_token=tokenizer.eos_token if recorded.add_eos else None,
        add_generation_prompt=recorded.add_generation_prompt,
        on_unjoined_pieces="allow",
    )
    adapted = TransformersTokenizer(tokenizer)
    pieces = reference_chat.tokenize_messages(
        list(recorded.messages), Prompt(format="default"), adapted, settings, recorded.tools
    )
    tokens, mask, weight = reference_chat.weighted(pieces, recorded.max_length)
    if not tokens:
        return "no token"
    whole = reference_microbatches.padded_batch([(tokens, mask)], CONVERSATION_MULTIPLE, CONVERSATION_PAD)
    return _sequence(whole.input_ids[0].tolist(), whole.token_mask[0].tolist(), whole.input_lengths[0], weight)


def _tokenized_by_production(recorded: RecordedConversation, tokenizer: Any) -> Side:
    settings = production_chat.ChatSettings(
        add_bos=recorded.add_bos,
        add_eos=recorded.add_eos,
        add_generation_prompt=recorded.add_generation_prompt,
        on_unjoined_pieces="allow",
        max_length=recorded.max_length,
    )
    line = production_chat.Chat(messages=list(recorded.messages), tools=recorded.tools)
    (made,) = production_chat.ChatTokenizer(tokenizer=tokenizer, settings=settings).tokenize([line])
    if not len(made.token_ids):
        return "no token"
    whole = build_padded_batch(
        [made], make_sequence_length_divisible_by=CONVERSATION_MULTIPLE, pad_token_id=CONVERSATION_PAD
    )
    return _sequence(
        whole.input_ids[0].tolist(),
        whole.token_mask[0].tolist(),
        int(whole.input_lengths[0]),
        float(whole.sample_mask[0]),
    )


def _sequence(ids: Sequence[int], mask: Sequence[float], length: int, weight: float) -> dict[str, torch.Tensor]:
    """Return a padded sequence of the online path."""
    return {
        "input_ids": torch.tensor(ids),
        "token_mask": torch.tensor(mask, dtype=torch.float32),
        "input_length": torch.tensor(int(length)),
        "sample_mask": torch.tensor(float(weight)),
    }


def _before_and_after(batch: Mapping[str, Any], padded: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of both batches by name."""
    both = [(name, value) for name, value in batch.items()]
    both += [(f"{name}, padded", value) for name, value in padded.items()]
    return {name: value for name, value in both if isinstance(value, torch.Tensor)}


def _or_refused(pack: Callable[[], _Bins]) -> Side:
    try:
        return _bins(pack())
    except (PackproofError, reference_packing.PackingError):
        return "refused"


def _bins(bins: _Bins) -> dict[str, torch.Tensor]:
    """Return the bins one after the other as a tensor, with -1 behind each bin."""
    return {"bins": torch.tensor([index for each in bins for index in (*each, -1)], dtype=torch.int64)}


def _rolled(boundaries: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the positions of a rank's share, from a row whose ids are its positions: the input of the model and of the simulator."""
    ids = torch.arange(int(boundaries[-1]))[None]
    whole: dict[str, Any] = {"input_ids": ids, "target_ids": ids, "token_mask": ids.float(), "position_ids": ids}
    row = FlatBatch(**whole, cu_seqlens=boundaries, max_seqlen=int(boundaries.diff().max()))
    return depth_tables(row, 0, rank=rank, size=size).input_ids[0, 0]
