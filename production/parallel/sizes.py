"""Define the ranks of each dimension, and enter megatron-core's parallel state for them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from torch import distributed

from production.errors import PackproofError


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Holds the ranks of each dimension; the data-parallel size is what the world leaves."""

    tensor: int = 1
    """tp; with more than one, sequence parallelism is on (megatron-core's experts need it too)."""
    context: int = 1
    """cp: ranks that share a row."""
    pipeline: int = 1
    """pp."""
    expert: int = 1
    """ep: ranks that share the experts of a layer; they lie within tp·cp·dp."""
    expert_tensor: int = 1
    """etp."""

    def __post_init__(self) -> None:
        """Refuse a size below 1: raises PackproofError."""
        for field in dataclasses.fields(self):
            if (size := getattr(self, field.name)) < 1:
                raise PackproofError(
                    what=f"the {field.name} parallel size must be at least 1, got {size}",
                    where="layout",
                    fix="give at least 1",
                )

    @property
    def of_a_replica(self) -> int:
        """Return the ranks of one replica of the model and its row: tp·cp·pp."""
        return self.tensor * self.context * self.pipeline

    def data(self, world_size: int) -> int:
        """Return dp, the replicas in a world. Raises PackproofError where the world is not made of whole replicas."""
        if world_size % self.of_a_replica:
            raise PackproofError(
                what=f"the number of ranks must be a multiple of tp {self.tensor} · cp {self.context} · pp {self.pipeline}, got {world_size}",
                where="layout",
                fix=f"start a multiple of {self.of_a_replica} ranks, or make a dimension smaller",
            )
        experts = self.expert * self.expert_tensor * self.pipeline
        if world_size % experts:
            raise PackproofError(
                what=f"the number of ranks must be a multiple of ep {self.expert} · etp {self.expert_tensor} · pp {self.pipeline}, got {world_size}",
                where="layout",
                fix=f"start a multiple of {experts} ranks, or make a dimension smaller",
            )
        return world_size // self.of_a_replica


@dataclass(frozen=True, kw_only=True)
class RankCoordinates:
    """Holds this rank's coordinates in each dimension."""

    rank: int
    """Rank in the world."""
    world_size: int
    """Ranks of the world."""
    tensor_rank: int
    """Rank among those that share each layer's weights."""
    context_rank: int
    """Rank among those that share a row."""
    context_size: int
    """cp."""
    data_rank: int
    """Number of the model's replica, which decides the rows."""
    data_size: int
    """dp."""
    pipeline_rank: int
    """Number of the pipeline stage."""
    pipeline_size: int
    """pp."""

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank embeds tokens."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank computes losses."""
        return self.pipeline_rank == self.pipeline_size - 1


@contextlib.contextmanager
def parallel(sizes: ParallelSizes, *, timeout_seconds: float | None = None) -> Iterator[RankCoordinates]:
    """megatron-core's parallel state over the default process group, taken down on exit; enter it once in a process.

    `timeout_seconds` is that of its groups' collectives; None: megatron-core's 30 minutes. Ranks count tp fastest, then cp, then dp, pp slowest, as megatron-core's own order has it. Taking it down leaks
    groups and threads of megatron-core 0.19.2, so a new layout wants new processes. Raises PackproofError as
    `ParallelSizes.data`, and where the parallel state is there already.
    """
    from megatron.core import parallel_state  # noqa: PLC0415 - heavy, and needed only by those who enter

    world_size = distributed.get_world_size()
    sizes.data(world_size)
    if parallel_state.model_parallel_is_initialized():
        raise PackproofError(
            what="megatron-core's parallel state must not exist yet, and it does",
            where="parallel",
            fix="enter `parallel` once in a process, and start new processes for another layout",
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        context_parallel_size=sizes.context,
        pipeline_model_parallel_size=sizes.pipeline,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        create_gloo_process_groups=False,
        **({} if timeout_seconds is None else {"distributed_timeout_minutes": timeout_seconds / 60}),
    )
    try:
        yield place()
    finally:
        parallel_state.destroy_model_parallel()


def place() -> RankCoordinates:
    """Return this rank's coordinates in megatron-core's parallel state."""
    from megatron.core import parallel_state  # noqa: PLC0415

    return RankCoordinates(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
