"""A training step in one layout, as a world of workers runs it, and what each rank ends up with."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from equivalence.cases.step import ModelCase, ModelShape
from equivalence.workers.worker import Worker
from production.online.padded_batch import PaddedBatch
from production.parallel.sizes import ParallelSizes, RankCoordinates
from production.rows.batch import Batch
from production.training.metrics.step_numbers import StepNumbers

__all__ = ["ModelCase", "ModelShape", "ParallelSizes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenRows(ModelCase):
    """A case whose microbatches are given instead of drawn; its `rows` need not tell their segments."""

    given: tuple[Batch, ...]
    """The global batch in order, one row each."""
    poisoned: int | None = None
    """An id whose embedding is NaN."""

    def rows_of_rank(self, rank: int) -> list[Batch]:
        """Return the rows of a data-parallel rank (R-BATCH-3)."""
        return list(self.given[rank :: self.data_size])

    def batch(self) -> Batch:
        """Return all rows as one batch, if they have one length and as many segments as `rows` says."""
        names = [each.name for each in dataclasses.fields(Batch) if each.name not in _OF_SEGMENTS]
        joined = {name: torch.cat([getattr(row, name) for row in self.given]) for name in names}
        return dataclasses.replace(super().batch(), **joined)

    def weights(self) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
        """Return the case's weights, with the poison."""
        draw = super().weights()

        def poison(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            weight = draw(name, shape)
            if self.poisoned is not None and name == "embedding.word_embeddings.weight":
                weight[self.poisoned] = torch.nan
            return weight

        return poison


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenPaddedBatches(ModelCase):
    """A case of the online path."""

    padded_batches: tuple[PaddedBatch, ...]
    """The bins of the global batch in order, one for each microbatch."""
    padding: Any
    """Padding of the online path (`production.online.bins.Padding`)."""


_OF_SEGMENTS = ("packed_cu_seqlens", "packed_cu_seqlens_lengths", "packed_max_seqlen")


def given(case: ModelCase, rows: Sequence[Batch], *, poisoned: int | None = None) -> GivenRows:
    """Return the case with these microbatches."""
    fields = {each.name: getattr(case, each.name) for each in dataclasses.fields(ModelCase)}
    return GivenRows(**fields, given=tuple(rows), poisoned=poisoned)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some values of one gradient of the whole model."""

    name: str
    shape: tuple[int, ...]
    part: tuple[tuple[int, int], ...]
    """From and to, in each dimension."""
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RankOutcome:
    """Results of one rank."""

    place: RankCoordinates
    token_losses: list[list[torch.Tensor]] = field(default_factory=list)
    """For each microbatch its cross entropies [n] at depths 0 to D; empty but on the last stage."""
    reports: list[torch.Tensor] = field(default_factory=list)
    """For each microbatch [sum, trained tokens]; empty but on the last stage."""
    reported: float | None = None
    """The step's loss as the job reports it on every rank (R-LOSS-7); Megatron-LM's on the last stage alone."""
    mtp_losses: torch.Tensor | None = None
    """[D] float64: reported losses of the depths (R-LOSS-10)."""
    shared: Mapping[str, float] | None = None
    """Numbers that the job's metrics made of what each rank put in (`put_in`), by name; None for steps that are not the job's."""
    valid_tokens: float
    gradients: list[Part] = field(default_factory=list)
    """Of the parts that count on this rank."""
    gradient_norm: float = 0.0
    """megatron-core's own, the same on all ranks."""


MEASURED = 0.75
"""Router loss of the last pipeline stage, the same on all of its ranks, as megatron-core reduces it."""
COUNTED = 70_001
"""Positions of each microbatch that a rank puts in, more than 16 bits hold."""
GUESSED = (1.0, 4.0)
"""Right guesses and all guesses of a depth that each rank of the last stage puts in."""


@contextlib.contextmanager
def layout(sizes: ParallelSizes, worker: Worker) -> Iterator[RankCoordinates]:
    """Context manager that a world enters before its first case: the CPU shim, the parallel state, rolls from tables, no compiler.

    A step on CPU would compile only a function of megatron-core's router that does nothing without an expert bias, at half a second
    for every rank.
    """
    del worker
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415 - megatron-core

    from production.model.device.shim import cpu_shim  # noqa: PLC0415
    from production.parallel.multi_token_feed import rolls_from_tables  # noqa: PLC0415
    from production.parallel.sizes import parallel  # noqa: PLC0415

    with cpu_shim(), parallel(sizes) as place, rolls_from_tables(), torch.compiler.set_stance("force_eager"):
        model_parallel_cuda_manual_seed(1)
        yield place


@contextlib.contextmanager
def baseline_layout(sizes: ParallelSizes, worker: Worker) -> Iterator[RankCoordinates]:
    """Context manager as `layout`, for a world that runs Megatron-LM's half alone: without production's tables, which another version cannot take."""
    del worker
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415 - megatron-core

    from production.model.device.shim import cpu_shim  # noqa: PLC0415
    from production.parallel.sizes import parallel  # noqa: PLC0415

    with cpu_shim(), parallel(sizes) as place, torch.compiler.set_stance("force_eager"):
        model_parallel_cuda_manual_seed(1)
        yield place


def run(case: ModelCase, worker: Worker) -> RankOutcome:
    """Run a step of production on this rank of a world that entered `layout` with the case's sizes."""
    from megatron.core.utils import get_model_config  # noqa: PLC0415 - megatron-core

    from production.training.step import count_valid, forward_backward, wrap  # noqa: PLC0415

    place: RankCoordinates = worker.entered
    settings = _step_settings(case)
    model = wrap(_built(case), settings)
    model.zero_grad_buffer()
    rows = case.rows_of_rank(place.data_rank)
    if len({each.input_ids.shape[1] for each in rows}) > 1:
        get_model_config(model).variable_seq_lengths = True  # stages then tell each other how much they send
    with _token_losses(model) as token_losses:
        report = forward_backward(model, rows, settings, place)
    valid = report.global_valid_tokens
    if valid is None:  # nothing was divided by it
        valid = count_valid(rows, torch.device("cpu"))
    numbers = job_reports(case, report.losses, len(rows))
    return outcome(
        model,
        place,
        token_losses=token_losses,
        reports=report.losses,
        valid_tokens=float(valid),
        reported=(known(numbers.loss), torch.tensor([known(each) for each in numbers.mtp_losses], dtype=torch.float64)),
        shared=shared_numbers(numbers),
    )


def run_online(case: GivenPaddedBatches, worker: Worker) -> RankOutcome:
    """Run a step of production's online path. Labels stay outside of the model, so token losses are derived from the logits behind its loss."""
    from megatron.core import parallel_state  # noqa: PLC0415 - megatron-core

    from production.loss import token_log_probabilities  # noqa: PLC0415
    from production.training.step import forward_backward, wrap  # noqa: PLC0415

    place: RankCoordinates = worker.entered
    settings = dataclasses.replace(_step_settings(case), padding=case.padding)
    model = wrap(_built(case), settings)
    model.zero_grad_buffer()
    bins = list(case.padded_batches[place.data_rank :: place.data_size])
    losses: list[list[torch.Tensor]] = []

    def observe(_number: int, microbatch: Any, logits: torch.Tensor) -> None:
        group = parallel_state.get_tensor_model_parallel_group()
        found = token_log_probabilities(logits.detach().clone(), microbatch.target_ids, tensor_group=group)
        losses.append([-found.reshape(-1), *deeper])
        deeper.clear()

    with _cross_entropies(model) as deeper:  # the model itself computes those of depths 1 to D only
        report = forward_backward(model, bins, settings, place, observe=observe)
    assert report.global_valid_tokens is not None  # online losses are divided by it
    numbers = job_reports(case, report.losses, len(bins))
    return outcome(
        model,
        place,
        token_losses=losses,
        reports=report.losses,
        valid_tokens=float(report.global_valid_tokens),
        reported=(known(numbers.loss), torch.tensor([known(each) for each in numbers.mtp_losses], dtype=torch.float64)),
        shared=shared_numbers(numbers),
    )


def run_baseline(case: ModelCase, worker: Worker) -> RankOutcome:
    """Run a step of Megatron-LM's own pieces on this rank, with a model of the same weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: PLC0415
    from megatron.core.utils import get_model_config  # noqa: PLC0415

    from equivalence.trainers import megatron_step  # noqa: PLC0415

    place: RankCoordinates = worker.entered
    built = _built(case)
    get_model_config(built).calculate_per_token_loss = case.normalization == "per_token"
    model = DistributedDataParallel(get_model_config(built), DistributedDataParallelConfig(), built)
    model.zero_grad_buffer()
    rows = baseline_rows(case)[place.data_rank :: place.data_size]
    with _token_losses(model) as token_losses:
        reports = megatron_step.forward_backward(model, rows, per_token=case.normalization == "per_token")
    valid = sum(float(row["loss_mask"].sum()) for row in baseline_rows(case))
    return outcome(
        model,
        place,
        token_losses=token_losses,
        reports=reports,
        valid_tokens=valid,
        reported=megatron_step.reported(reports, len(rows)),
    )


def baseline_rows(case: ModelCase) -> list[dict[str, torch.Tensor]]:
    """Return the global batch as the version's SFTDataset and its collation give it, one row for each microbatch."""
    from equivalence.trainers.megatron_step import fills_boundaries  # noqa: PLC0415 - megatron-core

    batch, is_filled = case.batch(), fills_boundaries()
    rows = []
    for row, lengths in enumerate(case.rows):
        boundaries = case.boundaries[row]
        filling = [case.pack_length] * (case.pack_length + 1 - len(boundaries)) if is_filled else []
        rows.append(
            {
                "tokens": batch.input_ids[row : row + 1],
                "labels": batch.target_ids[row : row + 1],
                "loss_mask": batch.token_mask[row : row + 1],
                "position_ids": batch.position_ids[row : row + 1],
                "cu_seqlens": torch.tensor([boundaries + filling], dtype=torch.int32),
                "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32),
            }
        )
    return rows


def outcome(
    model: torch.nn.Module,
    place: RankCoordinates,
    *,
    token_losses: Sequence[list[torch.Tensor]],
    reports: Sequence[torch.Tensor],
    valid_tokens: float,
    reported: tuple[float | None, torch.Tensor | None],
    shared: Mapping[str, float] | None = None,
) -> RankOutcome:
    """Collect what a finished step left on this rank. Collective over the world: the norm is reduced."""
    from production.model.weights import shards  # noqa: PLC0415 - megatron-core

    parts = [
        Part(
            name=shard.name,
            shape=shard.shape,
            part=tuple((each.start, each.stop) for each in shard.part),
            values=shard.values.clone(),
        )
        for shard in shards(model, of=operator.attrgetter("main_grad"))
        if shard.is_main
    ]
    return RankOutcome(
        place=place,
        token_losses=list(token_losses),
        reports=list(reports),
        reported=reported[0],
        mtp_losses=reported[1],
        shared=shared,
        valid_tokens=valid_tokens,
        gradients=parts,
        gradient_norm=gradient_norm(model),
    )


def job_reports(case: ModelCase, reports: Sequence[torch.Tensor], microbatches: int) -> StepNumbers:
    """Report the step through the metrics of the training job, the same numbers on every rank.

    Beside its losses each rank puts in numbers that only its place decides, whose sum over the right ranks is known: a router
    loss and guesses, which count on the last stage alone, and positions, which context-parallel, tensor-parallel and pipeline ranks
    share. Collective over the world.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: PLC0415 - megatron-core

    from production.training.metrics.step_metrics import Group, StepMetrics, Timing  # noqa: PLC0415
    from production.training.metrics.token_counts import RowCounts  # noqa: PLC0415

    group = Group.of_parallel_state()
    metrics = StepMetrics(group=group, depths=case.shape.depths, router_losses=("router_loss",))
    for pair in reports:
        metrics.add_loss(pair[0], pair[1])
    if case.shape.depths and group.has_loss:
        sums = MTPLossLoggingHelper.tracker["loss_values"]
        metrics.add_multi_token(sums, torch.full_like(sums, microbatches))
        metrics.add_accepted(torch.tensor(GUESSED)[:, None].repeat(1, case.shape.depths))
    metrics.add_rows(RowCounts(tokens=COUNTED * microbatches))
    metrics.end_step(
        step=1,
        learning_rate=0.0,
        gradient_norm=None,
        consumed_samples=len(case.rows),
        timing=Timing(step_seconds=1.0, own_seconds=1.0, data_wait_seconds=0.0),
        router_losses={"router_loss": torch.tensor(MEASURED if group.has_loss else -1.0)},
    )
    (numbers,) = metrics.report()
    return numbers


def shared_numbers(numbers: StepNumbers) -> dict[str, float]:
    """Return the reported numbers of what `job_reports` puts in."""
    rates = {f"acceptance_rate of depth {depth}": rate for depth, rate in enumerate(numbers.mtp_acceptance_rates, 1)}
    return {**numbers.router_losses, "tokens": numbers.tokens, **rates}


def known(reported: float | None) -> float:
    """Return a reported loss, and 0 for one of nothing (R-LOSS-7)."""
    return 0.0 if reported is None else reported


def gradient_norm(model: torch.nn.Module) -> float:
    """Return megatron-core's norm of the finished gradients over all ranks, as its optimizers compute the norm before clipping."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415 - megatron-core

    config = OptimizerConfig(optimizer="sgd", lr=0.0, params_dtype=torch.float64)
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def gradients(outcomes: Sequence[RankOutcome]) -> dict[str, torch.Tensor]:
    """Assemble the whole model's gradients by name from the parts of all ranks."""
    from production.model.weights import assemble  # noqa: PLC0415 - megatron-core

    parts: dict[str, list[Any]] = {}
    for each in outcomes:
        for part in each.gradients:
            place = tuple(slice(*bounds) for bounds in part.part)
            parts.setdefault(part.name, []).append((part.shape, place, part.values))
    return assemble(parts)


def _step_settings(case: ModelCase) -> Any:
    from production.training.step import StepSettings  # noqa: PLC0415 - megatron-core

    return StepSettings(
        normalization=case.normalization,  # type: ignore[arg-type] # checked there
        depths=case.shape.depths,
        mtp_weights=case.mtp_weights,  # type: ignore[arg-type]
        mtp=case.mtp,
        verify=True,
    )


def _built(case: ModelCase) -> torch.nn.Module:
    from production.model.model import build_model  # noqa: PLC0415 - megatron-core
    from production.model.weights import fill  # noqa: PLC0415

    forget_other_models()
    model = build_model(case.shape.settings(case.sizes, case.pack_length), case.sizes)
    fill(model, case.weights())
    return model


def forget_other_models() -> None:
    """Clear megatron-core's multi-token losses and scales of inner losses, which live in the process in the shape of its first model."""
    from megatron.core.transformer import multi_token_prediction  # noqa: PLC0415 - megatron-core
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # noqa: PLC0415

    multi_token_prediction.MTPLossLoggingHelper.tracker.clear()
    multi_token_prediction.MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


@contextlib.contextmanager
def _token_losses(model: torch.nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """Collects the cross entropies of every microbatch, depth by depth: the model computes those of depths 1 to D first."""
    from production.model.weights import unwrap  # noqa: PLC0415 - megatron-core

    depths = unwrap(model).config.mtp_num_layers or 0
    found: list[list[torch.Tensor]] = []
    with _cross_entropies(model) as calls:
        yield found
    found += [[each[-1], *each[:-1]] for each in itertools.batched(calls, depths + 1)]


@contextlib.contextmanager
def _cross_entropies(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collects all that the model itself computes, in order."""
    from production.model.weights import unwrap  # noqa: PLC0415 - megatron-core

    inner = unwrap(model)
    upstream = inner.compute_language_model_loss
    calls: list[torch.Tensor] = []

    def compute(*args: Any, **options: Any) -> torch.Tensor:
        losses: torch.Tensor = upstream(*args, **options)
        calls.append(losses.detach().reshape(-1).clone())
        return losses

    inner.compute_language_model_loss = compute
    try:
        yield calls
    finally:
        del inner.compute_language_model_loss
