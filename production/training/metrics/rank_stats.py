"""Collect timing and memory from all ranks. Each report issues one all-reduce of 16 bytes per rank per step, plus 4
bytes per rank.

512 ranks reduce 10 KiB for a step. All ranks of every pipeline stage take part; nothing is sent between reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from production.training.metrics.timers import Seconds, read

FIELDS = 4
"""Numbers per rank and step: step seconds, own seconds, seconds of waiting for rows, memory."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Holds the ranks that share a reported number; without process groups, this process alone."""

    data: Any = None
    """Process group of dp × cp; None outside torch.distributed."""
    counts_rows: bool = True
    """Whether this rank's rows count: one rank of each context-parallel group does, since all of them build the same rows."""
    pipeline: Any = None
    """Process group of the pipeline stages; None where there is one stage."""
    has_loss: bool = True
    """Whether this rank holds the last stage, which computes losses."""
    dimensions: tuple[int, int, int, int] = (1, 1, 1, 1)
    """Ranks of tp, cp, dp and pp, from which the coordinates of a rank are computed."""

    @classmethod
    def of_parallel_state(cls) -> Group:
        """Return this rank's groups in megatron-core's parallel state."""
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
        """Return R, the number of ranks of dp × cp."""
        return 1 if self.data is None else distributed.get_world_size(self.data)

    @property
    def world_size(self) -> int:
        """Return W, the number of all ranks."""
        return 1 if self.data is None else distributed.get_world_size()

    @property
    def world_rank(self) -> int:
        """Return this rank's number in the world."""
        return 0 if self.data is None else distributed.get_rank()

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """Return the coordinates of a rank in tp, cp, dp and pp: tp counts fastest, pp slowest (megatron-core's own
        order).
        """
        found = []
        for size in self.dimensions:
            rank, place = divmod(rank, size)
            found.append(place)
        return (found[0], found[1], found[2], found[3])


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Holds the seconds of one step on this rank."""

    step_seconds: Seconds
    """Seconds from the end of the previous step to the end of this one."""
    own_seconds: Seconds
    """Seconds of the step until the rank first waits for other replicas, by which the slowest rank is found."""
    data_wait_seconds: float
    """Seconds in which the host waited for rows."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Holds one step's times and memory of all ranks; indices of the lists are ranks of the world."""

    step_seconds: Sequence[float]
    """`Timing.step_seconds` of each rank."""
    own_seconds: Sequence[float]
    """`Timing.own_seconds` of each rank."""
    data_wait_seconds: Sequence[float]
    """`Timing.data_wait_seconds` of each rank."""
    memory_mebibytes: Sequence[float]
    """Memory in use on each rank."""

    @property
    def slowest(self) -> int:
        """Return the rank with the longest own seconds."""
        return _most(self.own_seconds)

    @property
    def behind_seconds(self) -> float:
        """Return the slowest rank's seconds above the mean of all ranks."""
        return self.own_seconds[self.slowest] - sum(self.own_seconds) / len(self.own_seconds)

    @property
    def longest_wait(self) -> int:
        """Return the rank that waited longest for rows."""
        return _most(self.data_wait_seconds)

    @property
    def fullest(self) -> int:
        """Return the rank that uses the most memory."""
        return _most(self.memory_mebibytes)


def row_of(
    timings: Sequence[tuple[Timing, float]], *, stop_vote: int, rank: int, size: int, device: torch.device
) -> torch.Tensor:
    """Return [W, 4·S + 1] float32 on the device: this rank's S steps' (timing, MiB), then its stop vote, in its row,
    and zeros elsewhere.

    Each rank writes only its own row, so that a sum collects all rows: a true gather copies every rank's part by
    itself over NCCL. On CUDA the call waits until the device has ended the last of the steps.
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
    """Return the numbers of each step, and the largest stop vote, from the all-reduced sum in which every rank filled its own `row_of`."""
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
