"""Run a rank of `compare_runs live`: both systems step by step in one process, alternating which goes first.

The timed part goes from the cleared gradients to the updated weights. Rows are fetched before it, and numbers are read after it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import distributed

from equivalence.errors import SuiteError
from equivalence.trainers import megatron_step
from equivalence.workers import Worker
from production.model.device.shim import cpu_shim
from production.parallel.sizes import RankCoordinates, parallel
from production.training.config import Job, device_here, sizes
from tools.compare_runs.live_systems import MEGATRON_LM, PACKPROOF, System, both, unequal_weights

Series = dict[str, dict[int, float]]
STAND_INS = megatron_step.STAND_INS
UPSTREAM = (
    "SFTDataset",
    "MegatronPretrainingSampler",
    *megatron_step.UPSTREAM,
    "get_megatron_optimizer",
    "OptimizerParamScheduler",
)
"""Parts of the assembled Megatron-LM that are its own."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one rank, or of all ranks together."""

    series: Mapping[str, Series]
    """By system: those of `Run.series`, and `data_seconds`, what fetching the step's rows took."""
    unequal_weights: Sequence[str]
    """Tensors of which the two systems' values differ after the last step."""
    stand_ins: Mapping[str, str] = field(default_factory=lambda: STAND_INS)
    """What stands in for a part of Megatron-LM's side, by the part."""
    upstream: Sequence[str] = UPSTREAM
    """Parts of Megatron-LM's side that are its own."""
    is_interleaved: bool = True
    """Whether the two systems took turns step by step, so that their times can be compared."""


@contextlib.contextmanager
def entered(job: Job, worker: Worker) -> Iterator[RankCoordinates]:
    """The layout of a job, as `production.training.distributed.launch` enters it: shim, deterministic kernels, parallel state."""
    del worker
    is_cuda = device_here(job) == "cuda"
    with contextlib.ExitStack() as undo:
        if not is_cuda:
            undo.enter_context(cpu_shim())
        if job.cluster.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(mode=True, warn_only=is_cuda)
            undo.callback(torch.use_deterministic_algorithms, False)  # noqa: FBT003
        yield undo.enter_context(parallel(sizes(job)))


def run_both(job: Job, worker: Worker) -> Measured:
    """Train both systems over the job's steps; every rank of a world that entered a job of this layout."""
    place: RankCoordinates = worker.entered
    _begin(job, place)
    is_cuda = device_here(job) == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    series: dict[str, Series] = {MEGATRON_LM: {}, PACKPROOF: {}}
    with both(job, place, device=device) as systems:
        states = dict.fromkeys(systems, _RandomState.now())
        names = list(systems)
        gc.collect()
        for step in range(1, (job.sft.max_num_steps or 0) + 1):
            found: dict[str, dict[str, float]] = {name: {} for name in names}
            for name in names:
                began = time.perf_counter()
                systems[name].fetch()
                found[name]["data_seconds"] = time.perf_counter() - began
            for name in names:
                states[name].restore()
                found[name]["step_seconds"] = _timed(systems[name], is_cuda=is_cuda)
                # Read at once: what megatron-core gathers of multi-token losses belongs to the process.
                found[name] |= systems[name].numbers(step)
                states[name] = _RandomState.now()
            for name, numbers in found.items():
                for key, value in numbers.items():
                    series[name].setdefault(key, {})[step] = value
            names.reverse()
        differing = unequal_weights(*(each.model for each in systems.values()))
    return Measured(series=series, unequal_weights=differing)


def together(measured: Sequence[Measured]) -> Measured:
    """Combine the measurements of all ranks: the slowest rank's seconds, and numbers on which all ranks agree. Raises SuiteError if they disagree."""
    merged = {system: agreed(system, [each.series[system] for each in measured]) for system in measured[0].series}
    names = sorted({name for each in measured for name in each.unequal_weights})
    return Measured(series=merged, unequal_weights=names)


def agreed(system: str, ranks: Sequence[Series]) -> Series:
    """Return one system's series of all ranks as one: of seconds the longest. Raises SuiteError for other numbers that differ."""
    series: Series = {}
    for rank, each in enumerate(ranks):
        for name, values in each.items():
            known = series.setdefault(name, {})
            for step, value in values.items():
                if name.endswith("_seconds"):
                    known[step] = max(value, known.get(step, 0.0))
                elif known.setdefault(step, value) != value and value == value:  # noqa: PLR0124 - NaN is no disagreement
                    raise SuiteError(f"{system}, step {step}: rank {rank} has {name} {value}, another {known[step]}")
    return series


def _timed(system: System, *, is_cuda: bool) -> float:
    """Return the seconds of one step that all ranks begin together."""
    if is_cuda:
        torch.cuda.synchronize()
    distributed.barrier()
    began = time.perf_counter()
    system.step()
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _begin(job: Job, place: RankCoordinates) -> None:
    """Seed as a job does, and clear the state of a model that ran in this process before."""
    seed = job.sft.seed + 100 * place.pipeline_rank
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)  # on the CPU the tracker has moved the one generator there is
    multi_token_prediction.MTPLossLoggingHelper.tracker.clear()
    multi_token_prediction.MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    get_moe_metrics_tracker().metrics.clear()


@dataclass(frozen=True, kw_only=True, eq=False)
class _RandomState:
    """State of the random generators of dropout. Each system continues its own state, so that both drop the same."""

    host: torch.Tensor
    device: torch.Tensor
    tracked: Mapping[str, Any]

    @classmethod
    def now(cls) -> _RandomState:
        """Return the process's current state."""
        return cls(
            host=torch.get_rng_state(),
            device=torch.cuda.get_rng_state(),
            tracked=dict(get_cuda_rng_tracker().get_states()),
        )

    def restore(self) -> None:
        """Make it the process's."""
        torch.cuda.set_rng_state(self.device)
        torch.set_rng_state(self.host)
        get_cuda_rng_tracker().set_states(dict(self.tracked))
