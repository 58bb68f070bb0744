"""Compare NeMo-RL's losses and their gradients: the direct path's to the bit, the online path's up to the rounding of another order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.cuts.pairs import compare_sides
from equivalence.checks.cuts.schedule import loss_settings
from equivalence.generators.online import LossCase, OnlineCase
from equivalence.witnesses.nemo_rl.checkout import NAME
from equivalence.witnesses.nemo_rl.sides import OnlineSide
from equivalence.witnesses.nemo_rl.stand_ins import CheckoutModules
from equivalence.witnesses.nemo_rl.world import one_rank, rank_of
from production import loss as production
from production.online import bins as squeeze
from production.online import packing, padded_batch
from production.parallel import microbatches
from reference import loss as reference

ONLINE_BOUND = 1e-5
"""Largest relative difference of online losses and gradients: sums of float32 in another order."""
VOCABULARY = 23
"""Width of drawn logits; a prime, so that no power of two hides a rounding."""
_NORMALIZATION: production.Normalization = "global_valid_tokens"


class LossSide:
    """NeMo-RL's loss function and what it does around it."""

    def __init__(self, modules: CheckoutModules) -> None:
        self._post = modules.get("nemo_rl.models.megatron.train", "LossPostProcessor")
        self._loss = modules.get("nemo_rl.algorithms.loss.loss_functions", "NLLLossFn")

    def direct(
        self, losses: torch.Tensor, mask: torch.Tensor, *, microbatches: int, valid: torch.Tensor
    ) -> torch.Tensor:
        """Return what a microbatch of packed rows returns to the schedule, from losses and mask [1, n]."""
        made = self._post(self._loss(), {}, num_microbatches=microbatches)
        loss: torch.Tensor = made({}, global_valid_toks=valid, prepacked_loss_mask=mask)(losses)[0]
        return loss

    def online(self, logits: torch.Tensor, row: Any, *, microbatches: int, valid: torch.Tensor) -> torch.Tensor:
        """Return what a microbatch of the online path returns to the schedule, from logits [1, T, V]."""
        config = {"sequence_packing": {"enabled": True}}
        made = self._post(self._loss(), config, num_microbatches=microbatches)
        of_row = made(row.data_dict, packed_seq_params=row.packed_seq_params, global_valid_toks=valid)
        loss: torch.Tensor = of_row(logits)[0]
        return loss


def check_direct_loss(case: LossCase, side: LossSide) -> CheckResult:
    """Compare every rank's and microbatch's result and gradient; the losses are float32, as megatron-core's are."""
    settings = loss_settings(case, _NORMALIZATION)
    count = settings.num_microbatches
    valid = torch.stack([mask.sum() for mask in itertools.chain(*case.masks)]).sum()
    sides: dict[str, dict[str, torch.Tensor]] = {"reference": {}, "production": {}, NAME: {}}
    for rank, number in itertools.product(range(len(case.losses)), range(count)):
        losses, mask = case.losses[rank][number].float()[None], case.masks[rank][number][None]
        leaves = {name: losses.clone().requires_grad_() for name in sides}
        of_reference, _ = reference.returned(
            _NORMALIZATION,
            leaves["reference"],
            mask,
            microbatches=count,
            context_parallel_size=case.size,
            valid_tokens=valid,
        )
        of_production = production.direct_loss(
            leaves["production"], target_mask=mask, settings=settings, global_valid_tokens=valid
        )[0]
        with rank_of(case.size, rank % case.size):
            of_nemo_rl = side.direct(leaves[NAME], mask, microbatches=count, valid=valid)
        for name, loss in (("reference", of_reference), ("production", of_production), (NAME, of_nemo_rl)):
            loss.backward()  # type: ignore[no-untyped-call]
            sides[name] |= {
                f"returned by rank {rank}, microbatch {number}": loss.detach(),
                f"gradient of rank {rank}, microbatch {number}": _gradient(leaves[name]),
            }
    return compare_sides("loss", sides)


def check_online_loss(case: OnlineCase, rows: OnlineSide, side: LossSide) -> CheckResult:
    """Compare the result and the gradient of each microbatch of one context-parallel rank, from drawn logits."""
    whole = rows.padded_batch(case)
    valid = rows.divisor(whole)
    ours = padded_batch.build_padded_batch(
        [
            padded_batch.Conversation(token_ids=torch.tensor(ids), token_mask=torch.tensor(mask, dtype=torch.float32))
            for ids, mask in case.conversations
        ],
        make_sequence_length_divisible_by=case.multiple,
    )
    ours.sample_mask[case.uncounted] = 0
    bins = padded_batch.fill_bins(
        ours,
        case.capacity,
        algorithm=case.packer,
        make_sequence_length_divisible_by=case.multiple,
        data_parallel_size=case.data_parallel_size,
    )
    findings = _close({"divisor": valid.double()}, {"divisor": ours.valid_tokens()}, "production")
    for data_rank, shard in enumerate(rows.shards(case, whole)):
        own = packing.take_rank(bins, rank=data_rank, size=case.data_parallel_size)
        made = list(rows.rows(case, shard, 0))
        for number, (members, row) in enumerate(zip(own, made, strict=True)):
            place = f"data rank {data_rank}, microbatch {number}"
            findings += _online_findings(
                case, place, padded_batch.take_sequences(ours, members), row, side, valid, len(own)
            )
    return CheckResult(check="online_loss", findings=findings, sides=3)


def _online_findings(
    case: OnlineCase,
    place: str,
    batch: padded_batch.PaddedBatch,
    row: Any,
    side: LossSide,
    valid: torch.Tensor,
    count: int,
) -> list[Finding]:
    padding = squeeze.choose_padding(
        make_sequence_length_divisible_by=case.multiple,
        context_parallel_size=1,
        tensor_parallel_size=case.tensor_parallel_size,
        sequence_parallel=case.sequence_parallel,
        pipeline_parallel_size=case.pipeline_parallel_size,
        precision=case.precision,  # type: ignore[arg-type] # one of them
        hybrid_expert_parallel=case.hybrid_expert_parallel,
        longest_bin=row.input_ids.shape[1],
    )
    settings = microbatches.MicrobatchSettings(context_parallel_rank=0, context_parallel_size=1, padding=padding)
    own = microbatches.process_microbatch(batch, settings)
    assert own.row is not None
    made = torch.Generator().manual_seed(row.input_ids.numel())
    logits = torch.randn(1, row.input_ids.shape[1], VOCABULARY, generator=made) * 3
    leaves = {name: logits.clone().requires_grad_() for name in ("reference", "production", NAME)}
    loss_settings_ = production.LossSettings(
        normalization=_NORMALIZATION, num_microbatches=count, context_parallel_size=1
    )
    with one_rank():
        of_nemo_rl = side.online(leaves[NAME], row, microbatches=count, valid=valid)
        loss_function = production.loss_function(
            own, loss_settings_, global_valid_tokens=valid, tensor_group=distributed.group.WORLD
        )
        # The function works in place, so that it gets a copy of the leaf.
        of_production = loss_function(leaves["production"] * 1)[0]
    log_probabilities = -reference.cross_entropy(leaves["reference"][0], own.row.target_ids[0])
    of_reference = reference.returned_online(
        log_probabilities,
        own.row.target_mask[0],
        microbatches=count,
        context_parallel_size=1,
        valid_tokens=valid,
    )
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, loss in (("reference", of_reference), ("production", of_production), (NAME, of_nemo_rl)):
        loss.backward()  # type: ignore[no-untyped-call]
        found[name] = {f"returned by {place}": loss.detach(), f"gradient of {place}": _gradient(leaves[name])}
    return [finding for name in ("reference", "production") for finding in _close(found[NAME], found[name], name)]


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _close(theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor], name: str) -> list[Finding]:
    """Return the differences beyond ONLINE_BOUND of the largest value of a tensor."""
    differences = []
    for key, value in theirs.items():
        left, right = value.double(), ours[key].double()
        bound = ONLINE_BOUND * max(float(left.abs().max()), float(right.abs().max()))
        if left.shape != right.shape or not bool(((left - right).abs() <= bound).all()):
            largest = float((left - right).abs().max()) if left.shape == right.shape else None
            differences.append(Difference(tensor=key, position=None, left=largest, right=bound, kind="other"))
    return [Finding(left=NAME, right=name, differences=differences)] if differences else []
