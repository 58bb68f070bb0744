"""Data order: both sides and Megatron-LM's own samplers give each rank the same rows at each step (R-ORDER)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from equivalence.cases.order import OrderCase
from equivalence.cases.result import CheckResult
from equivalence.checks.cuts.pairs import Side, compare_sides
from production.errors import PackproofError
from production.library_warnings import quiet_libraries
from production.training.data.order import Order, Sample
from production.training.order_settings import OrderSettings
from reference import batches, order


def check_order(case: OrderCase) -> CheckResult:
    """Compare source and row of every rank at every step on both sides, and with what the installed samplers draw where they have such an order."""
    sides: dict[str, Side] = {"production": _of_production(case), "reference": _of_reference(case)}
    if (drawn := _drawn_by_megatron(case)) is not None:
        sides["megatron_lm"] = drawn
    return compare_sides("order", sides)


def _of_production(case: OrderCase) -> Side:
    try:
        settings = OrderSettings(
            kind=case.kind,
            last_batch=case.last_batch,
            global_batch_size=case.global_batch_size,
            data_parallel_size=case.data_parallel_size,
            seed=case.seed,
            max_epochs=case.max_epochs,
            weights=case.weights,
            run_steps=case.run_steps,
        )
        ours = Order(case.rows, settings)
    except PackproofError:
        return "order"
    taken: list[list[Sample]] = [[] for _ in range(case.data_parallel_size)]
    consumed = case.consumed_samples
    for _ in range(case.steps):
        if (batch := ours.batch_at(consumed)) is None:
            break
        consumed = batch.consumed_samples
        for rank, samples in enumerate(taken):
            samples.extend(batch.of_rank(rank, case.data_parallel_size)[0])
    found = _tensors([[(sample.source, sample.row, sample.epoch) for sample in samples] for samples in taken])
    return found | _in_all(ours.total_steps)


def _of_reference(case: OrderCase) -> Side:
    try:
        if case.run_steps is not None:
            samples = order.cyclic(
                case.rows[0],
                run_samples=case.run_steps * case.global_batch_size,
                data_parallel_size=case.data_parallel_size,
                is_sharded=case.kind == "megatron-cyclic-sharded",
            )
        elif case.weights is not None:
            samples = order.blend(case.rows, case.weights, kind=case.kind, seed=case.seed)
        else:
            samples = _one_source(case)
        found = order.global_batches(samples, case.global_batch_size, case.consumed_samples)
        whole = list(itertools.islice(found, case.steps))
    except order.OrderError:
        return "order"
    size = case.data_parallel_size
    taken = [
        [batch[place] for batch in whole for place in batches.rows_of_rank(range(len(batch)), rank, size)]
        for rank in range(size)
    ]
    return _tensors(taken) | _in_all(_steps_of_reference(case))


def _one_source(case: OrderCase) -> Iterator[order.Sample]:
    """Yield the reference's samples of a case of one source."""
    return order.one_source(
        case.rows[0],
        kind=case.kind,
        seed=case.seed,
        global_batch_size=case.global_batch_size,
        last_batch=case.last_batch,
        max_epochs=case.max_epochs,
    )


def _steps_of_reference(case: OrderCase) -> int | None:
    """Count the global batches of a whole job one by one; return None for an order without an end."""
    if case.run_steps is not None:
        return case.run_steps
    ends = case.max_epochs is not None or (case.last_batch == "stop" and case.rows[0] % case.global_batch_size)
    if case.weights is not None or not ends:
        return None
    samples = _one_source(case)
    return sum(1 for _ in order.global_batches(samples, case.global_batch_size, 0))


def _in_all(steps: int | None) -> dict[str, torch.Tensor]:
    """Return the steps after which a job ends by itself; -1 for a job that does not."""
    return {"steps in all": torch.tensor(-1 if steps is None else steps)}


def _drawn_by_megatron(case: OrderCase) -> Side | None:
    """Draw with the installed samplers; None for an order that they do not have.

    Source and row, no epoch: they do not know it.
    """
    if case.seed is not None or (case.max_epochs is not None and case.last_batch == "wrap"):
        return None
    ranks = range(case.data_parallel_size)
    if case.run_steps is not None:
        return _rows_only([_cyclic(case, rank) for rank in ranks])
    if case.last_batch != "wrap":
        # One epoch, of which the sampler of whole global batches drops the rest.
        has_a_batch = (
            case.rows[0] >= case.global_batch_size
        )  # the sampler draws nothing otherwise, where both sides refuse
        return _rows_only([_one_epoch(case, rank) for rank in ranks]) if case.max_epochs == 1 and has_a_batch else None
    end = case.consumed_samples + case.steps * case.global_batch_size
    numbers = [_sequential(case, rank, end) for rank in ranks]
    if case.weights is None:
        return _rows_only([[(0, number % case.rows[0]) for number in of_rank] for of_rank in numbers])
    sources, within = _blended(case.weights, end)
    return _rows_only(
        [
            [(int(sources[number]), int(within[number]) % case.rows[int(sources[number])]) for number in of_rank]
            for of_rank in numbers
        ]
    )


def _sequential(case: OrderCase, rank: int, end: int) -> list[int]:
    """Return the sampler's order over a dataset of `end` samples, which a job makes as long as its steps need."""
    sampler = _samplers().MegatronPretrainingSampler(
        total_samples=end,
        consumed_samples=case.consumed_samples,
        micro_batch_size=1,
        data_parallel_rank=rank,
        data_parallel_size=case.data_parallel_size,
    )
    return list(itertools.chain(*sampler))


def _one_epoch(case: OrderCase, rank: int) -> list[tuple[int, int]]:
    sampler = _samplers().HybridCPMegatronPretrainingSampler(
        total_samples=case.rows[0],
        consumed_samples=case.consumed_samples,
        micro_batch_size=1,
        global_batch_size=case.global_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=case.data_parallel_size,
    )
    return [(0, row) for batch in itertools.islice(sampler, case.steps) for row in batch]


def _cyclic(case: OrderCase, rank: int) -> list[tuple[int, int]]:
    """Return the sampler's order, given the dataset's length as the driver gives it: the run's number of samples (`train_iters · global_batch_size`)."""
    assert case.run_steps is not None
    sampler = _samplers().MegatronPretrainingRandomSampler(
        None,
        total_samples=case.run_steps * case.global_batch_size,
        consumed_samples=case.consumed_samples,
        micro_batch_size=1,
        data_parallel_rank=rank,
        data_parallel_size=case.data_parallel_size,
        data_sharding=case.kind == "megatron-cyclic-sharded",
    )
    own = case.steps * case.global_batch_size // case.data_parallel_size
    numbers = itertools.islice(itertools.chain(*sampler), own)
    return [(0, number % case.rows[0]) for number in numbers]  # as SFTDataset, which has the rows in `indices`


def _blended(weights: Sequence[float], count: int) -> tuple[Any, Any]:
    """Return source and number within the source of the first samples, by the compiled helper that BlendedDataset calls."""
    from megatron.core.datasets import helpers  # noqa: PLC0415 - see _samplers
    from megatron.core.datasets.utils import normalize  # noqa: PLC0415

    sources, within = np.zeros(count, dtype=np.int16), np.zeros(count, dtype=np.int64)
    helpers.build_blending_indices(sources, within, normalize(list(weights)), len(weights), count, False)  # noqa: FBT003 - its signature
    return sources, within


def _samplers() -> Any:
    with quiet_libraries():
        from megatron.training.datasets import data_samplers  # noqa: PLC0415 - seconds, and only this witness needs it

    return data_samplers


def _tensors(taken: Sequence[Sequence[tuple[int, int, int]]]) -> dict[str, torch.Tensor]:
    """Return the rows of each rank, and separately the epochs, which not every side knows."""
    found = _rows_only([[sample[:2] for sample in samples] for samples in taken])
    for rank, samples in enumerate(taken):
        found[f"epochs of rank {rank}"] = torch.tensor([epoch for _, _, epoch in samples], dtype=torch.int64)
    return found


def _rows_only(taken: Sequence[Sequence[tuple[int, int]]]) -> dict[str, torch.Tensor]:
    return {
        f"rows of rank {rank}": torch.tensor(samples, dtype=torch.int64).reshape(-1, 2)
        for rank, samples in enumerate(taken)
    }
