"""Check losses: a rank's result, the schedule's loss, the weight of a token in the gradient, the reported number (R-LOSS).

The third witness is megatron-core: its schedule and multi-token prediction (`schedule`), and its vocabulary-parallel cross entropy.
A rank's result is equal to the bit. Gradients and sums over ranks are equal up to the rounding of operations in another order,
which `_close` counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.cuts.pairs import compare_sides
from equivalence.checks.cuts.schedule import (
    SCALING_FACTOR,
    finalized,
    gradient_of,
    loss_settings,
    multi_token_gradients,
    schedule,
)
from equivalence.generators.online import LossCase
from equivalence.trainers.production_step import known
from production import loss as production
from production.parallel.context_parallel import gather
from production.training.metrics.step_metrics import Group, StepMetrics, Timing
from reference import context_parallel, multi_token
from reference import loss as reference

_ROUNDINGS = 16
"""Operations on a token's weight that may round on either side; the longest chain has nine."""


def check_loss(case: LossCase) -> CheckResult:
    """Compare the direct path's loss on every rank and microbatch, through megatron-core's schedule and data parallelism."""
    valid = sum(mask.sum() for mask in itertools.chain(*case.masks)) + torch.zeros((), dtype=torch.float64)
    theirs, ours = _returned(case, valid)
    findings = list(compare_sides("loss", {"reference": theirs, "production, megatron_lm": ours}).findings)
    weights = reference.token_weights(
        case.normalization, case.masks, context_parallel_size=case.size, valid_tokens=valid
    )
    findings += _close("weight of a token", _named(weights), _named(_gradients(case, valid)), dtype=_weight_dtype(case))
    for name in ("rank", "rows"):
        expected = _multi_token_weights(case, valid, rows=name == "rows")
        # megatron-core's scale of multi-token losses is float32 in every mode.
        found = multi_token_gradients(case, valid, weights=name)
        findings += _close(f"weight at a depth, {name}", expected, found, dtype=torch.float32)
    findings += _reports(case, valid)
    return CheckResult(check="loss", findings=findings)


def check_online_loss(case: LossCase) -> CheckResult:
    """Compare the online path's loss, from log-probabilities gathered over cp, also with the direct path's loss of the same shares (R-MEET-2)."""
    valid = sum(mask.sum() for mask in itertools.chain(*case.masks)) + torch.zeros((), dtype=torch.float64)
    settings = loss_settings(case, "global_valid_tokens")
    theirs: dict[str, torch.Tensor] = {}
    ours: dict[str, torch.Tensor] = {}
    gradients: list[list[torch.Tensor]] = [[] for _ in case.losses]
    boundaries = torch.tensor(case.boundaries, dtype=torch.int32)
    for first in range(0, len(case.losses), case.size):
        ranks = range(first, first + case.size)
        for number in range(len(case.losses[0])):
            shares = [(-case.losses[rank][number])[None].requires_grad_() for rank in ranks]
            masks = [case.masks[rank][number][None] for rank in ranks]
            row_mask = gather(masks, boundaries)
            row = context_parallel.gather([share[0].detach() for share in shares], case.boundaries)
            for rank in ranks:
                # Own shares carry gradients, the others' do not: what the gather over processes does.
                own = [share if ranks[place] == rank else share.detach() for place, share in enumerate(shares)]
                returned = production.online_loss(
                    shares[rank - first],
                    gather(own, boundaries),
                    target_mask=masks[rank - first],
                    row_mask=row_mask,
                    settings=settings,
                    global_valid_tokens=valid,
                )
                name = f"rank {rank}, microbatch {number}"
                ours[f"returned by {name}"] = returned[0].detach().clone()
                theirs[f"returned by {name}"] = reference.returned_online(
                    row,
                    row_mask[0],
                    microbatches=settings.num_microbatches,
                    context_parallel_size=case.size,
                    valid_tokens=valid,
                )
                torch.autograd.backward(schedule(returned, case, "global_valid_tokens", None))
            gradients[first : first + case.size] = [
                [*before, -gradient_of(share)] for before, share in zip(gradients[first:], shares, strict=False)
            ]
    findings = list(compare_sides("online_loss", {"reference": theirs, "production": ours}).findings)
    weights = reference.online_weights(case.masks, valid)
    findings += _close("weight of a token", _named(weights), _named(gradients), dtype=case.losses[0][0].dtype)
    return CheckResult(check="online_loss", findings=findings)


def check_cross_entropy(logits: torch.Tensor, target_ids: torch.Tensor) -> CheckResult:
    """Compare log-probabilities of targets [n] from logits [n, V] with megatron-core's cross entropy in a world of one rank."""
    with world_of_one() as group:
        found = production.token_log_probabilities(logits.clone()[None], target_ids[None], tensor_group=group)[0]
    return compare_sides(
        "cross_entropy",
        {
            "reference": {"loss": reference.cross_entropy(logits, target_ids)},
            "production, megatron_lm": {"loss": -found},
        },
    )


@contextlib.contextmanager
def world_of_one() -> Iterator[Any]:
    """Context manager for a process group of this process alone, in memory, without a port or a file."""
    if distributed.is_initialized():
        yield distributed.group.WORLD
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks what this machine's name resolves to
    store = distributed.HashStore()  # type: ignore[attr-defined] # not among the names that torch declares
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def _returned(case: LossCase, valid: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what every rank returns, and what is left after the schedule: the reference's, and production's in
    megatron-core's.
    """
    settings = loss_settings(case, case.normalization)
    theirs: dict[str, torch.Tensor] = {}
    ours: dict[str, torch.Tensor] = {}
    for rank, number in itertools.product(range(len(case.losses)), range(settings.num_microbatches)):
        losses, mask = case.losses[rank][number], case.masks[rank][number]
        sizes = {"microbatches": settings.num_microbatches, "context_parallel_size": case.size}
        loss, count = reference.returned(case.normalization, losses, mask, **sizes, valid_tokens=valid)
        returned = production.direct_loss(
            losses[None].clone(), target_mask=mask[None], settings=settings, global_valid_tokens=valid
        )
        name = f"rank {rank}, microbatch {number}"
        theirs |= {
            f"returned by {name}": loss,
            f"count of {name}": torch.zeros(0) if count is None else count,
            f"reported by {name}": torch.stack([reference.masked_sum(losses, mask), mask.sum().to(losses.dtype)]),
            f"scheduled of {name}": reference.scheduled(case.normalization, loss, count, **sizes),
        }
        ours |= {
            f"returned by {name}": returned[0].clone(),
            f"count of {name}": returned[1] if len(returned) == 3 else torch.zeros(0),
            f"reported by {name}": returned[-1][production.REPORT],
        }
        ours[f"scheduled of {name}"] = schedule(returned, case, case.normalization, None)
    return theirs, ours


def _gradients(case: LossCase, valid: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return gradients of production's losses through megatron-core's schedule, after DDP and the division by the count of tokens."""
    settings = loss_settings(case, case.normalization)
    count = torch.zeros((), dtype=torch.int32)
    found: list[list[torch.Tensor]] = []
    for of_losses, of_masks in zip(case.losses, case.masks, strict=True):
        found.append([])
        for losses, mask in zip(of_losses, of_masks, strict=True):
            leaf = losses[None].clone().requires_grad_()
            returned = production.direct_loss(
                leaf, target_mask=mask[None], settings=settings, global_valid_tokens=valid
            )
            torch.autograd.backward(schedule(returned, case, case.normalization, count))
            found[-1].append(gradient_of(leaf))
    return finalized(found, case, count)


def _multi_token_weights(case: LossCase, valid: torch.Tensor, *, rows: bool) -> dict[str, torch.Tensor]:
    """Return the reference's weights at each depth, from masks that the reference shifts and cuts itself."""
    masks: list[list[list[torch.Tensor]]] = [[] for _ in case.masks]
    for first in range(0, len(case.masks), case.size):
        for number in range(len(case.masks[0])):
            shares = [case.masks[first + rank][number] for rank in range(case.size)]
            row = context_parallel.gather(shares, case.boundaries)
            whole = [row, *(multi_token.shift(row, case.boundaries, depth) for depth in range(1, case.depths + 1))]
            for rank in range(case.size):
                masks[first + rank].append(
                    [context_parallel.shard(mask, case.boundaries, rank, case.size) for mask in whole]
                )
    weights = reference.multi_token_weights(
        case.normalization,
        masks,
        scaling_factor=SCALING_FACTOR,
        context_parallel_size=case.size,
        rows=rows,
        valid_tokens=valid,
    )
    return {
        f"depth {depth} of rank {rank}, microbatch {number}": weight
        for rank, of_rank in enumerate(weights)
        for number, of_depths in enumerate(of_rank)
        for depth, weight in enumerate(of_depths, 1)
    }


def _reports(case: LossCase, valid: torch.Tensor) -> list[Finding]:
    """Compare the numbers that the training job reports for a step and a validation, from all ranks' microbatches one after the other.

    Checks of training steps and runs (`models`, `trainer`, `whole_run`) cover the job's messages between ranks.
    """
    settings = loss_settings(case, case.normalization)
    step, validation = StepMetrics(group=Group()), StepMetrics(group=Group())
    pairs = [
        production.direct_loss(losses[None], target_mask=mask[None], settings=settings, global_valid_tokens=valid)[-1][
            production.REPORT
        ]
        for losses, mask in zip(itertools.chain(*case.losses), itertools.chain(*case.masks), strict=True)
    ]
    for pair in pairs:
        step.add_loss(pair[0], pair[1])
        validation.add_loss(pair[0], pair[1])
    timing = Timing(step_seconds=1.0, own_seconds=1.0, data_wait_seconds=0.0)
    step.end_step(step=1, learning_rate=0.0, gradient_norm=None, consumed_samples=0, timing=timing)
    (numbers,) = step.report()
    ours = {"training": numbers.loss, "validation": validation.report_losses().loss}
    ours |= dict.fromkeys(("direct", "online"), numbers.loss)  # R-LOSS-9: but for rounding the same
    training = reference.training_loss(case.losses, case.masks)
    theirs = {
        "training": training,
        "validation": training,
        "direct": reference.valid_tokens_loss(case.losses, case.masks, valid, online=False),
        "online": reference.valid_tokens_loss(case.losses, case.masks, valid, online=True),
    }
    found = {name: torch.tensor(known(value)) for name, value in ours.items()}
    findings = _close("reported", theirs, found, dtype=torch.float32, terms=len(pairs))
    if numbers.all_masked != (float(valid) == 0):
        wrong = Difference(
            tensor="all masked", position=None, left=float(valid) == 0, right=numbers.all_masked, kind="other"
        )
        findings.append(Finding(left="reference", right="production", differences=[wrong]))
    return findings


def _close(
    name: str,
    left: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    terms: int = 0,
) -> list[Finding]:
    """Return differences beyond rounding: a unit of `dtype` for each operation and each of `terms` that are added,
    all positive.
    """
    found = []
    if left.keys() != right.keys():
        found.append(Difference(tensor=name, position=None, left=[*left], right=[*right], kind="other"))
    for key in left.keys() & right.keys():
        ours, theirs = left[key].double().reshape(-1), right[key].double().reshape(-1)
        bound = (_ROUNDINGS + terms) * torch.finfo(dtype).eps * ours.abs()
        for place in (~((ours - theirs).abs() <= bound)).nonzero().flatten().tolist():
            values = ours[place].item(), theirs[place].item()
            found.append(
                Difference(tensor=f"{name}: {key}", position=place, left=values[0], right=values[1], kind="other")
            )
    return [Finding(left="reference", right="production", differences=found[:20])] if found else []


def _weight_dtype(case: LossCase) -> torch.dtype:
    """Return the dtype of the losses; float32 where gradients are divided by the count of tokens, whose inverse is float32."""
    return torch.float32 if case.normalization == "per_token" else case.losses[0][0].dtype


def _named(values: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"rank {rank}, microbatch {number}": value
        for rank, of_rank in enumerate(values)
        for number, value in enumerate(of_rank)
    }
