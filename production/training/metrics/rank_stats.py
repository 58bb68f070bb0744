"""What every rank of the world measured, brought together at a report by one all-reduce: 16 bytes a rank and step, and 4 a rank.

512 ranks reduce 10 KiB for a step. All take part, of every pipeline stage and every tensor-parallel rank; nothing is sent between reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from production.training.metrics.timers import Seconds, read

FIELDS = 4
"""Numbers of a rank and step: of the step, its own, its wait for rows, its memory."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that share a reported number. Without process groups: this process alone."""

    data: Any = None
    """Process group of dp × cp; None outside torch.distributed."""
    counts_rows: bool = True
    """Whether this rank's rows count: one rank of each context-parallel group does, since all of them build the same rows."""
    pipeline: Any = None
    """Process group of the pipeline stages; None where there is one stage."""
    has_loss: bool = True
    """Whether this rank holds the last stage, which computes losses."""
    dimensions: tuple[int, int, int, int] = (1, 1, 1, 1)
    """Ranks of tp, cp, dp and pp, by which a rank of the world is told where it stands."""

    @classmethod
    def of_parallel_state(cls) -> Group:
        """The groups of this rank in megatron-core's parallel state."""
        from megatron.core import parallel_state  # noqa: PLC0415 - heavy, and needed only where it was initialised

        stages = parallel_state.get_pipeline_model_parallel_world_size()
        return cls(
            data=parallel_state.get_data_parallel_group(with_context_parallel=True),
            counts_rows=parallel_state.get_context_parallel_rank() == 0,
            pipeline=parallel_state.get_pipeline_model_parallel_group() if stages > 1 else None,
            has_loss=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            dimensions=(
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_context_parallel_world_size(),
                parallel_state.get_data_parallel_world_size(),
                stages,
            ),
        )

    @property
    def size(self) -> int:
        """R, the ranks of dp × cp."""
        return 1 if self.data is None else distributed.get_world_size(self.data)

    @property
    def world_size(self) -> int:
        """W, all ranks."""
        return 1 if self.data is None else distributed.get_world_size()

    @property
    def world_rank(self) -> int:
        """Where this rank stands among them."""
        return 0 if self.data is None else distributed.get_rank()

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """Where a rank of the world stands in tp, cp, dp and pp: tp counts fastest, pp slowest (megatron-core's own order)."""
        found = []
        for size in self.dimensions:
            rank, place = divmod(rank, size)
            found.append(place)
        return (found[0], found[1], found[2], found[3])


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one step on this rank."""

    step_seconds: Seconds
    """From the end of the step before to the end of this one."""
    own_seconds: Seconds
    """Of them, those until the rank first waits for other replicas: its own share, by which the slowest rank is found."""
    data_wait_seconds: float
    """Those in which the host waited for rows."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One step's times and memory of all ranks; places in the lists are ranks of the world."""

    step_seconds: Sequence[float]
    """`Timing.step_seconds` of each."""
    own_seconds: Sequence[float]
    """`Timing.own_seconds` of each."""
    data_wait_seconds: Sequence[float]
    """`Timing.data_wait_seconds` of each."""
    memory_mebibytes: Sequence[float]
    """What each uses."""

    @property
    def slowest(self) -> int:
        """The rank with the longest own share."""
        return _most(self.own_seconds)

    @property
    def behind_seconds(self) -> float:
        """How much longer than the mean of all ranks it took."""
        return self.own_seconds[self.slowest] - sum(self.own_seconds) / len(self.own_seconds)

    @property
    def longest_wait(self) -> int:
        """The rank that waited longest for rows."""
        return _most(self.data_wait_seconds)

    @property
    def fullest(self) -> int:
        """The rank that uses the most memory."""
        return _most(self.memory_mebibytes)


def row_of(
    timings: Sequence[tuple[Timing, float]], *, stop_vote: int, rank: int, size: int, device: torch.device
) -> torch.Tensor:
    """[W, 4·S + 1] float32 on the device: this rank's S steps' (timing, MiB), then its vote to stop, in its row, and zeros in the others'.

    Each rank writes in its own row alone, so that a sum brings all together: a gather proper copies every rank's part by itself
    over NCCL. On CUDA it waits until the device has ended the last of the steps.
    """
    numbers = [
        value
        for timing, memory in timings
        for value in (read(timing.step_seconds), read(timing.own_seconds), timing.data_wait_seconds, memory)
    ]
    rows = torch.zeros((size, len(numbers) + 1), dtype=torch.float32)
    rows[rank] = torch.tensor([*numbers, float(stop_vote)], dtype=torch.float32)
    return rows.to(device, non_blocking=True)


def measured(numbers: Sequence[float], *, steps: int) -> tuple[list[Measured], int]:
    """Of each step, and the largest vote to stop; from the flat sum of all ranks' `row_of`."""
    width = FIELDS * steps + 1
    ranks = [numbers[at : at + width] for at in range(0, len(numbers), width)]
    found = [
        Measured(
            step_seconds=[rank[FIELDS * step] for rank in ranks],
            own_seconds=[rank[FIELDS * step + 1] for rank in ranks],
            data_wait_seconds=[rank[FIELDS * step + 2] for rank in ranks],
            memory_mebibytes=[rank[FIELDS * step + 3] for rank in ranks],
        )
        for step in range(steps)
    ]
    return found, int(max(rank[-1] for rank in ranks))


def _most(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
