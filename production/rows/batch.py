"""Collate rows into batches: collate, flatten, the data-parallel stride, validation padding and the loss's divisor.

`collate_checked` is for training: its guards run on the host, before any copy to a device (0.3 ms a row of 262,144
tokens and 1,024 segments, next to 4 ms for stacking it). `collate` alone takes what Megatron-LM takes, empty segments
too.

Reference: `reference/batches.py`, R-BATCH-1 to 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from production.rows.builder import Row
from production.rows.guards import BatchSettings, Sample, as_fields, check_rows

__all__ = [
    "Batch",
    "BatchSettings",
    "FlatBatch",
    "collate",
    "collate_checked",
    "count_trained",
    "flatten",
    "pad_validation",
    "take_rank",
]

CU_SEQLENS_FILL = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Holds `B` rows of one length (R-BATCH-1), on the host."""

    input_ids: torch.Tensor
    """[B, P] int64."""
    target_ids: torch.Tensor
    """[B, P] int64."""
    token_mask: torch.Tensor
    """[B, P] float32."""
    position_ids: torch.Tensor
    """[B, P] int64."""
    packed_cu_seqlens: torch.Tensor
    """[B, K] int32, right-padded with -1 to the longest."""
    packed_cu_seqlens_lengths: torch.Tensor
    """[B] int64: entries of each row's boundaries."""
    packed_max_seqlen: torch.Tensor
    """[B] int64: each row's longest segment."""
    input_lengths: torch.Tensor
    """[B] int64: all P."""
    sample_mask: torch.Tensor
    """[B] float32: 0 for a row that only fills a validation batch up."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatBatch:
    """Holds the rows of a batch as one THD sequence of B·P tokens (R-BATCH-2)."""

    input_ids: torch.Tensor
    """[1, B·P] int64."""
    target_ids: torch.Tensor
    """[1, B·P] int64."""
    token_mask: torch.Tensor
    """[1, B·P] float32."""
    position_ids: torch.Tensor
    """[1, B·P] int64."""
    cu_seqlens: torch.Tensor
    """[N] int32, from 0 to B·P."""
    max_seqlen: int
    """The longest segment."""


def collate_checked(rows: Sequence[Row | Sample], settings: BatchSettings) -> Batch:
    """Return the batch of these rows, for a job of these settings. Raises BatchRefused (R-GUARD-1) before anything is copied.

    A row is a `Row`, or a mapping with a field for each of `guards.FIELDS`, as a dataset or a cache holds them.
    """
    check_rows(rows, settings)
    return collate(rows)


def collate(rows: Sequence[Row | Sample]) -> Batch:
    """Return the batch of these rows as they are (R-BATCH-1), without any guard: for comparing, not for training."""
    fields = [as_fields(row) for row in rows]
    stacked = {
        name: torch.stack([row[name] for row in fields])
        for name in ("input_ids", "target_ids", "token_mask", "position_ids")
    }
    boundaries = [row["cu_seqlens"] for row in fields]
    count, length = stacked["input_ids"].shape
    return Batch(
        **stacked,
        packed_cu_seqlens=torch.nn.utils.rnn.pad_sequence(boundaries, batch_first=True, padding_value=CU_SEQLENS_FILL),
        packed_cu_seqlens_lengths=torch.tensor([len(entries) for entries in boundaries], dtype=torch.int64),
        packed_max_seqlen=torch.tensor([int(row["max_seqlen"]) for row in fields], dtype=torch.int64),
        input_lengths=torch.full((count,), length, dtype=torch.int64),
        sample_mask=torch.ones(count, dtype=torch.float32),
    )


def flatten(batch: Batch) -> FlatBatch:
    """Return the batch as one sequence (R-BATCH-2): rows keep their boundaries and never merge.

    Raises ValueError where boundaries exceed int32.
    """
    count, length = batch.input_ids.shape
    entries = torch.arange(batch.packed_cu_seqlens.shape[1])
    is_own = entries < batch.packed_cu_seqlens_lengths[:, None]
    is_own[1:, 0] = False  # the seam stands at the end of the row before
    shifted = batch.packed_cu_seqlens.long() + torch.arange(count)[:, None] * length
    if count * length > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"boundaries must fit int32, got {count} rows of {length} tokens: flatten fewer rows at a time"
        )
    return FlatBatch(
        input_ids=batch.input_ids.reshape(1, -1),
        target_ids=batch.target_ids.reshape(1, -1),
        token_mask=batch.token_mask.reshape(1, -1),
        position_ids=batch.position_ids.reshape(1, -1),
        cu_seqlens=shifted[is_own].int(),
        max_seqlen=int(batch.packed_max_seqlen.max()),
    )


def take_rank(batch: Batch, *, rank: int, size: int) -> Batch:
    """Return the rows of data-parallel rank `rank` of `size`: `rank, rank + size, …` (R-BATCH-3), as views.

    Raises ValueError where `size` does not divide them.
    """
    if not 0 <= rank < size:
        raise ValueError(f"the data-parallel rank must be from 0 to {size - 1}, got {rank}")
    count = len(batch.sample_mask)
    if count % size:
        raise ValueError(
            f"the number of rows must be a multiple of the {size} data-parallel ranks, got {count}: pad a validation batch first (pad_validation)"
        )
    return dataclasses.replace(batch, **{name: tensor[rank::size] for name, tensor in _tensors(batch).items()})


def pad_validation(batch: Batch, *, size: int) -> Batch:
    """Return the batch with its last row repeated, at sample_mask 0, to a multiple of `size` ranks (R-BATCH-4).

    Call it before sharding.
    """
    missing = -len(batch.sample_mask) % size
    if not missing:
        return batch
    repeated = {
        name: torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
        for name, tensor in _tensors(batch).items()
    }
    return dataclasses.replace(batch, **repeated | {"sample_mask": functional.pad(batch.sample_mask, (0, missing))})


def count_trained(batch: Batch) -> torch.Tensor:
    """Return the loss's divisor (R-BATCH-5): Σ token_mask · sample_mask of the global batch, a scalar float64.

    float64, because float32 counts exactly only up to 16,777,216: a global batch of 64 rows of 262,144 tokens.
    """
    return (batch.token_mask.sum(dim=1, dtype=torch.float64) * batch.sample_mask).sum()


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
