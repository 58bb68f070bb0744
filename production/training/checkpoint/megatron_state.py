"""Build a job's state for megatron-core's dist_checkpointing, with what version 0.19.2 needs to restore the state bit
for bit.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import distributed

from production.model.weights import unwrap
from production.training.checkpoint.manifest import RESHARDABLE
from production.training.checkpoint.resharding import with_padded_buckets
from production.training.engine import Engine


def sharded_state(engine: Engine, *, with_optimizer: bool, sharding_type: str, loading: bool) -> dict[str, Any]:
    """Return the state that megatron-core saves or fills: model, random states and, where asked for, optimizer and
    schedule.
    """
    model = unwrap(engine.model).sharded_state_dict(metadata=metadata(sharding_type))
    state: dict[str, Any] = {"model": model, "random": _random()}
    if with_optimizer:
        for each in single_optimizers(engine.optimizer):
            if hasattr(each, "data_parallel_group_gloo") and distributed.get_backend() == "gloo":
                each.data_parallel_group_gloo = each.data_parallel_group
        padded = with_padded_buckets(single_optimizers(engine.optimizer)) if sharding_type == RESHARDABLE else None
        with padded or contextlib.nullcontext():
            state["optimizer"] = engine.optimizer.sharded_state_dict(
                model, is_loading=loading, metadata=metadata(sharding_type)
            )
        state["scheduler"] = engine.scheduler.state_dict()
    return state


@contextlib.contextmanager
def results_in_this_process() -> Iterator[list[Exception]]:
    """Use a plain queue in place of megatron-core's server process, whose imports take 6 s and which serves a writer
    in another process.

    Saving is synchronous here: the writer is this process. Write errors are raised with their message; megatron-core
    0.19.2 passes on only the class.
    """
    errors: list[Exception] = []
    writer = filesystem_async.FileSystemWriterAsync
    before, write = filesystem_async._results_queue, writer.write_preloaded_data  # noqa: SLF001 - the one place where it can be given

    @functools.wraps(write)
    def noted(*given: Any, **options: Any) -> Any:
        found = write(*given, **options)
        if isinstance(found[1], Exception):
            errors.append(found[1])
        return found

    filesystem_async._results_queue = queue.Queue()  # noqa: SLF001
    writer.write_preloaded_data = staticmethod(noted)
    try:
        yield errors
    finally:
        filesystem_async._results_queue = before  # noqa: SLF001
        writer.write_preloaded_data = staticmethod(write)


def not_finite(engine: Engine) -> str | None:
    """Name the first weight, buffer or optimizer state on this rank that holds NaN or infinity; None where all are
    finite.

    The check takes one pass over the tensors on the device and one synchronization.
    """
    named = [(f"weight {name}", each) for name, each in unwrap(engine.model).named_parameters()]
    named += [(f"buffer {name}", each) for name, each in unwrap(engine.model).named_buffers()]
    named += [(f"the optimizer's {name}", each) for name, each in _states(engine.optimizer)]
    named = [(name, each.detach()) for name, each in named if each.is_floating_point() and each.numel()]
    with torch.no_grad():
        flags = [torch.linalg.vector_norm(each, ord=torch.inf, dtype=_wide(each)).isfinite() for _, each in named]
    if not flags or bool(torch.stack(flags).all()):
        return None
    return next(f"{name} is not finite" for (name, _), flag in zip(named, flags, strict=True) if not flag)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _states(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors that the optimizer keeps: main weights and moments."""
    for each in single_optimizers(optimizer):
        for group in each.optimizer.param_groups:
            yield from ((f"weight {number}", parameter) for number, parameter in enumerate(group["params"]))
        for number, state in enumerate(each.optimizer.state.values()):
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name != "step":
                    yield f"{name} of weight {number}", value


def set_steps(optimizer: Any) -> None:
    """Restore each parameter's own step count: with torch's Adam, megatron-core 0.19.2 leaves the count wrong.

    megatron-core loads one tensor for all parameters, which torch then increments once for each parameter, and not at
    all where the state was allocated before (`dp_reshardable`). The saved count is in the parameter groups.
    """
    for each in single_optimizers(optimizer):
        for group in each.optimizer.param_groups:
            saved = group.pop("step", None)
            for parameter in group["params"]:
                state = each.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone() if saved is None else torch.tensor(float(saved))


def single_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain; megatron-core has one for dense and one for expert parameters."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def allocate(optimizer: Any) -> None:
    """Allocate the state of a distributed optimizer that has not stepped: torch's Adam has no state to load into
    before that.
    """
    for each in single_optimizers(optimizer):
        if hasattr(each, "_init_optimizer_states_with_dummy_values") and not each.optimizer.state:
            each._init_optimizer_states_with_dummy_values()  # noqa: SLF001 - what megatron-core itself calls for other formats


def metadata(sharding_type: str) -> dict[str, Any]:
    """Return megatron-core's description of the state's layout in files."""
    return {
        "distrib_optim_sharding_type": sharding_type,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        # NCCL's way gathers the shares of an optimizer through CUDA tensors; gloo gathers them where they are.
        "distrib_optim_fully_reshardable_mem_efficient": distributed.get_backend() == "gloo",
    }


def _random() -> ShardedObject:
    """Return the random states of this rank, under the rank's number."""
    states = {
        "torch": torch.get_rng_state(),
        "tracked": dict(get_cuda_rng_tracker().get_states()),
        "cuda": torch.cuda.get_rng_state(),
    }
    return ShardedObject("random", states, (distributed.get_world_size(),), (distributed.get_rank(),))


def set_random(states: Mapping[str, Any]) -> None:
    """Restore this rank's random states."""
    get_cuda_rng_tracker().set_states(states["tracked"])
    torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
