"""From rows to a batch: collate, flatten for THD, the data-parallel stride, validation padding, the loss's divisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reference.rows import Row

NO_BOUNDARY = -1
"""Filling of the ragged rows of `packed_cu_seqlens`; never a boundary."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """B rows of one pack length P (R-BATCH-1)."""

    input_ids: torch.Tensor
    """[B, P] int64."""
    target_ids: torch.Tensor
    """[B, P] int64."""
    token_mask: torch.Tensor
    """[B, P] float32."""
    position_ids: torch.Tensor
    """[B, P] int64."""
    packed_cu_seqlens: torch.Tensor
    """[B, K] int32, right-padded with -1."""
    packed_cu_seqlens_lengths: torch.Tensor
    """[B] int64: how many entries of each row are boundaries."""
    packed_max_seqlen: torch.Tensor
    """[B] int64."""
    input_lengths: torch.Tensor
    """[B] int64, all P."""
    sample_mask: torch.Tensor
    """[B] float32: 0 for a row that only fills a validation batch."""


def collate(rows: Sequence[Row]) -> Batch:
    """Stack rows of one pack length. R-BATCH-1."""
    widest = max(len(row.cu_seqlens) for row in rows)
    boundaries = torch.full((len(rows), widest), NO_BOUNDARY, dtype=torch.int32)
    for number, row in enumerate(rows):
        for place, boundary in enumerate(row.cu_seqlens.tolist()):
            boundaries[number, place] = boundary
    return Batch(
        input_ids=torch.stack([row.input_ids for row in rows]),
        target_ids=torch.stack([row.target_ids for row in rows]),
        token_mask=torch.stack([row.token_mask for row in rows]),
        position_ids=torch.stack([row.position_ids for row in rows]),
        packed_cu_seqlens=boundaries,
        packed_cu_seqlens_lengths=torch.tensor([len(row.cu_seqlens) for row in rows], dtype=torch.int64),
        packed_max_seqlen=torch.tensor([row.max_seqlen for row in rows], dtype=torch.int64),
        input_lengths=torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int64),
        sample_mask=torch.ones(len(rows), dtype=torch.float32),
    )


def flatten_boundaries(batch: Batch) -> tuple[torch.Tensor, int]:
    """Return the boundaries `[N]` int32 of the batch as one sequence of B·P tokens, and the length of the longest segment. R-BATCH-2."""
    pack_length = batch.input_ids.shape[1]
    flat = [0]
    for number, count in enumerate(batch.packed_cu_seqlens_lengths.tolist()):
        for boundary in batch.packed_cu_seqlens[number, 1:count].tolist():
            flat.append(boundary + number * pack_length)  # noqa: PERF401 - reads as the rule does
    return torch.tensor(flat, dtype=torch.int32), int(batch.packed_max_seqlen.max())


def rows_of_rank(global_batch: Sequence[int], rank: int, data_parallel_size: int) -> list[int]:
    """Return the rows that a data-parallel rank takes, one microbatch each. R-BATCH-3."""
    return [row for place, row in enumerate(global_batch) if place % data_parallel_size == rank]


def pad_validation(rows: Sequence[int], data_parallel_size: int) -> tuple[list[int], list[float]]:
    """Fill the last validation batch to a multiple of dp with its last row; return the rows and their sample mask. R-BATCH-4."""
    padded, sample_mask = list(rows), [1.0] * len(rows)
    while len(padded) % data_parallel_size != 0:
        padded.append(padded[-1])
        sample_mask.append(0.0)
    return padded, sample_mask


def valid_tokens(token_mask: torch.Tensor, sample_mask: torch.Tensor) -> float:
    """Return the divisor of the loss, from `token_mask` [B, P] and `sample_mask` [B] of a global batch. R-BATCH-5."""
    return sum(float(row.sum()) * float(weight) for row, weight in zip(token_mask, sample_mask, strict=True))
