"""Shares: which rows of a global batch each data-parallel rank takes, how a validation batch is filled up, what the loss is divided by (R-BATCH-3 to 5).

Two sides: Megatron-LM's sampler is held against the stride by `order`, and it drops what fills no batch instead of padding it.
"""

from __future__ import annotations

import dataclasses

import torch

from equivalence.cases.dp_sharding import SharesCase
from equivalence.cases.result import CheckResult
from equivalence.checks.cuts.pairs import Side, compare_sides
from production.online.padded_batch import PaddedBatch
from production.rows import batch as production
from production.rows.batch import Batch
from production.training.data.order import ValidationOrder
from reference import batches as reference

_NAMES = ("input_ids", "target_ids", "token_mask", "position_ids", "packed_cu_seqlens", "packed_max_seqlen")


def check_shares(case: SharesCase) -> CheckResult:
    """Compare every rank's rows, tensors and weights in every global batch of the validation, and the divisors, on both sides."""
    sides: dict[str, Side] = {"reference": _reference(case), "production": _production(case)}
    return compare_sides("dp_sharding", sides)


def _reference(case: SharesCase) -> Side:
    whole, size = case.batch(), case.data_parallel_size
    found: dict[str, torch.Tensor] = {}
    for first in range(0, len(case.rows), case.global_batch_size):
        numbers = range(first, min(first + case.global_batch_size, len(case.rows)))
        rows, sample_mask = reference.pad_validation(numbers, size)
        weights = torch.tensor(sample_mask)
        found[f"divisor from row {first}"] = _float64(reference.valid_tokens(whole.token_mask[rows], weights))
        if case.long:
            count = _float64(case.long * reference.valid_tokens(whole.token_mask[rows, :1], weights))
            found |= {f"{path} divisor of long rows from row {first}": count for path in ("direct", "online")}
        for rank in range(size):
            places = reference.rows_of_rank(range(len(rows)), rank, size)
            own = [rows[place] for place in places]
            where = f"from row {first} of rank {rank}"
            found |= {f"{name} {where}": getattr(whole, name)[own] for name in _NAMES}
            found[f"rows {where}"], found[f"sample_mask {where}"] = torch.tensor(own), weights[places]
            found[f"counted {where}"] = _float64(reference.valid_tokens(whole.token_mask[own], weights[places]))
    return found


def _production(case: SharesCase) -> Side:
    whole, size = case.batch(), case.data_parallel_size
    order = ValidationOrder(
        rows=len(case.rows), global_batch_size=case.global_batch_size, data_parallel_size=case.data_parallel_size
    )
    found: dict[str, torch.Tensor] = {}
    consumed = 0
    while (taken := order.batch_at(consumed)) is not None:
        first, consumed = consumed, taken.consumed_samples
        names = (*_NAMES, "packed_cu_seqlens_lengths", "input_lengths", "sample_mask")
        fields = {name: getattr(whole, name)[first:consumed] for name in names}
        padded = production.pad_validation(Batch(**fields), size=size)
        found[f"divisor from row {first}"] = production.count_trained(padded)
        if case.long:
            long = dataclasses.replace(padded, token_mask=padded.token_mask[:, :1].expand(-1, case.long))
            found[f"direct divisor of long rows from row {first}"] = production.count_trained(long)
            found[f"online divisor of long rows from row {first}"] = _padded_batch(padded, case.long).valid_tokens()
        for rank in range(size):
            own = production.take_rank(padded, rank=rank, size=size)
            samples, weights = taken.of_rank(rank, size)
            where = f"from row {first} of rank {rank}"
            found |= {f"{name} {where}": getattr(own, name) for name in (*_NAMES, "sample_mask")}
            found[f"rows {where}"] = torch.tensor([sample.row for sample in samples])
            found[f"counted {where}"] = production.count_trained(own)
            if weights != tuple(own.sample_mask.tolist()):
                found[f"rows {where}"] = torch.tensor(weights)  # the order weighs them otherwise than the batch does
    return found


def _padded_batch(batch: Batch, count: int) -> PaddedBatch:
    """Return a padded batch with the first token's mask repeated once more than its length, because the first token of a conversation is not a target."""
    return PaddedBatch(
        input_ids=batch.input_ids,
        token_mask=batch.token_mask[:, :1].expand(-1, count + 1),
        input_lengths=batch.input_lengths,
        sample_mask=batch.sample_mask,
    )


def _float64(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
