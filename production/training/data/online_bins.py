"""Pack the conversations of a global batch into the bins of each rank, on the online path of a job (docs/SPEC.md#online-path).

Every rank packs the whole global batch, so that nothing is sent between ranks; each rank tokenizes all conversations
in return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from production.online.bins import Padding, Precision, choose_padding
from production.online.packing import take_rank
from production.online.padded_batch import (
    PAD_TOKEN_ID,
    PaddedBatch,
    build_padded_batch,
    fill_bins,
    longest_bin,
    round_up,
    take_sequences,
)
from production.training.config import Job, sizes
from production.training.data.dataset import ConversationBatch
from production.training.metrics.token_counts import RowCounts


@dataclass(frozen=True, kw_only=True)
class BinSettings:
    """Holds everything that decides the bins of a global batch and their padding."""

    make_sequence_length_divisible_by: int
    """Multiple to which each conversation is padded."""
    capacity: int
    """Tokens of a bin."""
    algorithm: str
    """Packer: decides which sequences share a bin (`packing.pack`)."""
    seed: int | None
    """Seed of `first_fit_shuffle`; None for other packers."""
    data_parallel_size: int
    """Ranks to which the bins are dealt."""
    context_parallel_size: int
    """Ranks that share a row."""
    tensor_parallel_size: int
    """Tensor-parallel size; above 1 with sequence parallelism."""
    pipeline_parallel_size: int
    """Pipeline stages; above 1, all rows of a data-parallel rank have one length."""
    precision: Precision
    """Precision, by which kernels constrain a row's length."""
    hybrid_expert_parallel: bool
    """Whether the flex dispatcher runs with the HybridEP backend."""
    pad_token_id: int = PAD_TOKEN_ID
    """Token that pads the padded batch (R-ONLINE-2)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBins:
    """Holds the bins that a data-parallel rank feeds of a global batch."""

    padded_batches: list[PaddedBatch]
    """The rank's bins, in order."""
    padding: Padding
    """Padding of the bins."""
    counts: RowCounts
    """Token counts of the squeezed bins."""


def bin_settings(job: Job, data_parallel_size: int, *, tokenizer: Any) -> BinSettings:
    """Return the job's bin settings."""
    layout, packing = sizes(job), job.policy.sequence_packing
    return BinSettings(
        make_sequence_length_divisible_by=job.policy.make_sequence_length_divisible_by or 1,
        capacity=packing.train_mb_tokens or job.policy.max_total_sequence_length,
        algorithm=packing.algorithm,
        seed=job.data.seed if packing.algorithm == "first_fit_shuffle" else None,
        data_parallel_size=data_parallel_size,
        context_parallel_size=layout.context,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        precision=_precision(job),
        hybrid_expert_parallel=job.megatron.transformer.get("moe_flex_dispatcher_backend") == "hybridep",
        pad_token_id=pad_token_id(tokenizer),
    )


def pad_token_id(tokenizer: Any) -> int:
    """Return the tokenizer's pad token, else its eos token (which NeMo-RL makes its pad token), else 0."""
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id, PAD_TOKEN_ID)
    return int(next(each for each in found if each is not None))


def pack_bins(batch: ConversationBatch, settings: BinSettings, *, data_rank: int) -> RankBins:
    """Return this rank's bins of the global batch (R-ONLINE-3) and their padding (R-ONLINE-4, R-ONLINE-5).

    Raises PackproofError as `padded_batch.fill_bins` and `bins.choose_padding`.
    """
    multiple = settings.make_sequence_length_divisible_by
    padded_batch = build_padded_batch(
        batch.conversations, make_sequence_length_divisible_by=multiple, pad_token_id=settings.pad_token_id
    )
    padded_batch = dataclasses.replace(padded_batch, sample_mask=padded_batch.sample_mask * batch.sample_mask)
    bins = fill_bins(
        padded_batch,
        settings.capacity,
        algorithm=settings.algorithm,
        make_sequence_length_divisible_by=multiple,
        data_parallel_size=settings.data_parallel_size,
        seed=settings.seed,
    )
    own = take_rank(bins, rank=data_rank, size=settings.data_parallel_size)
    padding = choose_padding(
        make_sequence_length_divisible_by=multiple,
        context_parallel_size=settings.context_parallel_size,
        tensor_parallel_size=settings.tensor_parallel_size,
        sequence_parallel=settings.tensor_parallel_size > 1,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        precision=settings.precision,
        hybrid_expert_parallel=settings.hybrid_expert_parallel,
        longest_bin=longest_bin(padded_batch, own, make_sequence_length_divisible_by=multiple),
    )
    padded_batches = [take_sequences(padded_batch, members) for members in own]
    members = [member for each in own for member in each]
    masked_out = sum(not batch.conversations[member].weight for member in members if batch.sample_mask[member])
    counts = count_bins(padded_batches, padding) + RowCounts(masked_out_conversations=masked_out)
    return RankBins(padded_batches=padded_batches, padding=padding, counts=counts)


def count_bins(bins: Sequence[PaddedBatch], padding: Padding) -> RowCounts:
    """Return the token counts of these bins once they are squeezed."""
    counts = RowCounts()
    for each in bins:
        lengths: list[int] = each.input_lengths.tolist()
        filled = sum(round_up(length, padding.sequence_multiple) for length in lengths)
        total = padding.row_length or round_up(filled, padding.row_multiple)
        counts += RowCounts(
            rows=len(lengths),
            tokens=total,
            padding_tokens=total - sum(lengths),
            trained_tokens=int(each.valid_tokens()),
            square_sum=sum(length * length for length in lengths),
        )
    return counts


def _precision(job: Job) -> Precision:
    """Return the precision as the padding of a row names it."""
    if not job.megatron.fp8_cfg.enabled:
        return "unquantized"
    recipes: dict[str, Precision] = {"blockwise": "fp8_blockwise", "mxfp8": "fp8_mxfp8"}
    return recipes.get(job.megatron.fp8_cfg.fp8_recipe, "fp8_other")
