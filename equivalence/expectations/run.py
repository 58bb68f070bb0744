"""Compute the reference's whole run of the training job: the rows of each rank, their counts, the training of the model.

Files are read with Python's own JSON, rows are the reference's, and counts are sums over rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from equivalence.generators import tokenizers
from equivalence.subjects.reference import adapt
from equivalence.trainers.whole_run import (
    BALANCE,
    BIN_TOKENS,
    DEPTHS,
    LAYERS,
    MULTIPLE,
    PACK_LENGTH,
    PACKER,
    PROMPT_FORMAT,
    TOKENIZER,
    VALIDATION_BATCH,
    VALIDATION_PERIOD,
    WEIGHTS,
    RunCase,
)
from reference import batches, chat, microbatches, multi_token, order, rows
from reference.batches import Batch
from reference.model import Shape
from reference.prompts import Prompt
from reference.semantics import semantics
from reference.trainer_bounds import Trained, train

SEMANTICS = "megatron-lm-0.19"
"""A job's default."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of a global batch, as a job reports them."""

    tokens: int
    trained_tokens: int
    padding_tokens: int
    rows_truncated: int
    conversations_dropped: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch:
    """One global batch, as the reference makes it."""

    rows: list[Batch]
    """One row each, online one squeezed bin, in order; rank r of dp has r, r + dp, …"""
    tokens: list[list[int]]
    """The ids of each, online without padding."""
    counts: Counts

    def of_rank(self, rank: int, size: int) -> list[list[int]]:
        """Return the ids of a data-parallel rank's rows."""
        return [self.tokens[place] for place in batches.rows_of_rank(range(len(self.tokens)), rank, size)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpectedRun:
    """The reference's run."""

    steps: list[GlobalBatch]
    validation: list[GlobalBatch]
    """Of each validation."""
    trained: Trained


def expect_run(case: RunCase, folder: Path, weights: Mapping[str, torch.Tensor]) -> ExpectedRun:
    """Compute the run from these weights by name, over the files that the case wrote into the folder."""
    sources = [_read(path) for path in case.training_files(folder)]
    if case.is_direct:
        samples = order.blend([*map(len, sources)], WEIGHTS, kind="shuffle", seed=case.seed)
    else:
        samples = order.one_source(
            len(sources[0]),
            kind="shuffle",
            seed=case.seed,
            global_batch_size=case.global_batch_size,
            last_batch="drop",
        )
    taken = itertools.islice(order.global_batches(samples, case.global_batch_size, 0), case.steps)
    steps = [_made(case, [sources[source][row] for source, row, _ in batch]) for batch in taken]
    validation = []
    for some in itertools.batched(_read(case.validation_file(folder)), VALIDATION_BATCH):
        numbers, mask = batches.pad_validation(range(len(some)), case.data_size)
        validation.append(_made(case, [some[number] for number in numbers], mask))
    wanted = {step: [each.rows for each in validation] for step in range(0, case.steps + 1, VALIDATION_PERIOD)}
    rows_of_steps = [each.rows for each in steps]
    trained = train(shape(), weights, case.reference_settings(), rows_of_steps, dtype=case.dtype, validations=wanted)
    return ExpectedRun(steps=steps, validation=validation, trained=trained)


def shape() -> Shape:
    """Return the shape of the model that `RunCase.settings` describes."""
    return Shape(
        num_layers=LAYERS,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=4,
        activation="silu",
        gated_linear_unit=True,
        mtp_num_layers=DEPTHS,
        mtp_use_repeated_layer=True,
        moe_router_topk=2,
        moe_aux_loss_coeff=BALANCE,
    )


def _read(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").split("\n") if line]


def _made(case: RunCase, messages: Sequence[list[dict[str, str]]], mask: Sequence[float] | None = None) -> GlobalBatch:
    weights = [1.0] * len(messages) if mask is None else list(mask)
    return _direct(case, messages, weights) if case.is_direct else _online(case, messages, weights)


def _direct(case: RunCase, messages: Sequence[list[dict[str, str]]], weights: Sequence[float]) -> GlobalBatch:
    settings = rows.RowSettings(
        prompt=Prompt(format=PROMPT_FORMAT),
        pack_length=PACK_LENGTH,
        context_parallel_size=case.sizes.context,
        semantics=semantics(SEMANTICS),
    )
    built = [rows.build_row(each, adapt(tokenizers.load(TOKENIZER)), settings) for each in messages]
    counted = [row.report for row, weight in zip(built, weights, strict=True) if weight]
    return GlobalBatch(
        rows=[
            dataclasses.replace(batches.collate([row]), sample_mask=torch.tensor([weight]))
            for row, weight in zip(built, weights, strict=True)
        ],
        tokens=[row.input_ids.tolist() for row in built],
        counts=Counts(
            tokens=PACK_LENGTH * len(counted),
            trained_tokens=sum(int(row.token_mask.sum()) for row, weight in zip(built, weights, strict=True) if weight),
            padding_tokens=sum(report["padding_tokens"] or 0 for report in counted),
            rows_truncated=sum((report["truncated"] or 0) > 0 for report in counted),
            conversations_dropped=sum(report["dropped"] or 0 for report in counted),
        ),
    )


def _online(case: RunCase, messages: Sequence[list[dict[str, str]]], weights: Sequence[float]) -> GlobalBatch:
    made = tokenizers.load(TOKENIZER)
    tokenizer, prompt = adapt(made), Prompt(format=PROMPT_FORMAT)
    settings = chat.ChatSettings(bos_token=made.bos_token, eos_token=made.eos_token)
    found = [chat.weighted(chat.tokenize_messages(each, prompt, tokenizer, settings), PACK_LENGTH) for each in messages]
    whole = microbatches.padded_batch([(tokens, mask) for tokens, mask, _ in found], MULTIPLE, made.pad_token_id)
    counted = [weight * own for weight, (_, _, own) in zip(weights, found, strict=True)]
    whole = dataclasses.replace(whole, sample_mask=torch.tensor(counted))
    bins = microbatches.bins(whole.input_lengths, MULTIPLE, BIN_TOKENS, PACKER, case.data_size)
    lengths = [microbatches.round_up(length, MULTIPLE) for length in whole.input_lengths]
    how = microbatches.padding(
        multiple=MULTIPLE,
        context_parallel_size=case.sizes.context,
        tensor_parallel_size=case.sizes.tensor,
        sequence_parallel=case.sizes.tensor > 1,
        pipeline_parallel_size=case.sizes.pipeline,
        precision="unquantized",
        hybrid_expert_parallel=False,
        longest_bin=max(sum(lengths[member] for member in members) for members in bins),
    )
    taken = [microbatches.take(whole, members) for members in bins]
    squeezed = [microbatches.squeeze(each, how) for each in taken]
    total = sum(len(row.input_ids) for row in squeezed)
    return GlobalBatch(
        rows=[_as_row(row) for row in squeezed],
        tokens=[
            [
                token
                for ids, length in zip(each.input_ids, each.input_lengths, strict=True)
                for token in ids[:length].tolist()
            ]
            for each in taken
        ],
        counts=Counts(
            tokens=total,
            trained_tokens=sum(int(row.target_mask.sum()) for row in squeezed),
            padding_tokens=total - sum(whole.input_lengths),
            rows_truncated=0,
            conversations_dropped=0,
        ),
    )


def _as_row(row: microbatches.Squeezed) -> Batch:
    """Return the bin as a batch of one row, with the labels and masks that are shifted to depths (R-ONLINE-7)."""
    boundaries = row.cu_seqlens_padded
    return Batch(
        input_ids=row.input_ids[None],
        target_ids=multi_token.shift(row.input_ids, boundaries, 1)[None],
        token_mask=multi_token.shift(row.token_mask, boundaries, 1)[None],
        position_ids=row.position_ids[None],
        packed_cu_seqlens=torch.tensor([boundaries], dtype=torch.int32),
        packed_cu_seqlens_lengths=torch.tensor([len(boundaries)]),
        packed_max_seqlen=torch.tensor([microbatches.longest(boundaries)]),
        input_lengths=torch.tensor([len(row.input_ids)]),
        sample_mask=torch.ones(1),
    )
