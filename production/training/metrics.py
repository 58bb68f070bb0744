"""What a step measures: device tensors until the reporting boundary, then one all-reduce and one transfer to the host.

A microbatch costs two small device operations and no synchronisation; a report sends 4·(37 + 2·D + 4·R) bytes for D depths and R dp × cp ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import distributed

from production.errors import PackproofError
from production.training.counts import SENT, RowCounts
from production.training.step_numbers import Losses, StepNumbers

__all__ = ["FlopsOf", "Group", "Losses", "StepMetrics", "StepNumbers", "Timing", "memory_mebibytes"]

MEBIBYTE = 1 << 20

FlopsOf = Callable[[int, int], float]
"""(tokens, Σ L² over segments) to the floating-point operations of forward and backward pass, all devices together."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one step on this rank."""

    step_seconds: float
    """From the end of the step before to the end of this one."""
    own_seconds: float
    """Of them, those until the rank first waits for others: its own share, by which the slowest rank is found."""
    data_wait_seconds: float
    """Of them, those in which it waited for rows."""


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
        )

    @property
    def size(self) -> int:
        """R, the ranks of dp × cp."""
        return 1 if self.data is None else distributed.get_world_size(self.data)

    @property
    def rank(self) -> int:
        """Where this rank stands among them."""
        return 0 if self.data is None else distributed.get_rank(self.data)


class StepMetrics:
    """Gathers one step after another on this rank; every rank makes the same calls.

    Losses are summed as Megatron-LM sums them (R-LOSS-7: microbatches in order, then ranks, in float32), so that equal
    inputs give an equal loss, to the bit where each step is reported alone. No call but a report waits for the device.
    """

    def __init__(self, *, group: Group, depths: int = 0, device: torch.device | str = "cpu") -> None:
        """`depths` is D; `device` is where losses live and where the all-reduce runs."""
        self._group = group
        self._depths = depths
        self._device = torch.device(device)
        self._ended: list[_Ended] = []
        self._begin()

    def add_loss(self, loss_sum: torch.Tensor, mask_sum: torch.Tensor) -> None:
        """Σ loss·mask and Σ mask of one microbatch on this rank's share of it: scalars on the device, last stage only."""
        self._losses.append(_pair(loss_sum, mask_sum))

    def add_multi_token(self, loss_sums: torch.Tensor, mask_sums: torch.Tensor) -> None:
        """Both `[D]`, of one microbatch: Σ loss·mask and Σ mask of each depth.

        For Megatron-LM's own number, a mean of means (R-LOSS-10), give the `loss_values` of its tracker after the last
        microbatch, and the number of microbatches for each depth. Raises PackproofError for another number of depths.
        """
        if loss_sums.shape != (self._depths,) or mask_sums.shape != (self._depths,):
            raise PackproofError(
                what=f"sums of shape {tuple(loss_sums.shape)} and {tuple(mask_sums.shape)} for {self._depths} depths",
                where="metrics of multi-token prediction",
                mend="give one sum a depth, and StepMetrics the model's number of depths",
            )
        self._depth_losses.append(_pair(loss_sums, mask_sums))

    def add_rows(self, counts: RowCounts) -> None:
        """Rows that this rank feeds, from the host. Every rank may call it: one of each context-parallel group counts."""
        if self._group.counts_rows:
            self._counts += counts

    def end_step(
        self,
        *,
        step: int,
        learning_rate: float,
        gradient_norm: torch.Tensor | float | None,
        consumed_samples: int,
        timing: Timing,
    ) -> None:
        """What was added since the last call is this step, its gradient norm a scalar. It stays on the device until `report`.

        Raises PackproofError where losses are missing on the last stage, or there on another.
        """
        payload = torch.cat([self._loss_payload(), self._host_payload(timing)])
        if isinstance(gradient_norm, torch.Tensor):
            gradient_norm = gradient_norm.detach().to(self._device, torch.float32).reshape(1)
        self._ended.append(
            _Ended(
                step=step,
                learning_rate=learning_rate,
                gradient_norm=gradient_norm,
                consumed_samples=consumed_samples,
                step_seconds=timing.step_seconds,
                payload=payload,
            )
        )
        self._begin()

    def report(self, *, flops_of: FlopsOf | None = None, peak_tflops: float | None = None) -> list[StepNumbers]:
        """The numbers of every step that has ended since the last report: one all-reduce, one wait for the device.

        `flops_of` gives the model's floating-point operations for (tokens, square sum) without padding; `peak_tflops`
        is one device's. Collective: every rank calls it after the same steps.
        """
        ended, self._ended = self._ended, []
        if not ended:
            return []
        payload = self._reduced(torch.cat([each.payload for each in ended])).view(len(ended), -1)
        losses = self._divided(payload)
        norms = [each.gradient_norm for each in ended if isinstance(each.gradient_norm, torch.Tensor)]
        numbers: list[float] = torch.cat([losses.flatten(), payload[:, losses.shape[1] :].flatten(), *norms]).tolist()
        width, rest = losses.shape[1], payload.shape[1] - losses.shape[1]
        read = iter(numbers[len(ended) * (width + rest) :])
        return [
            self._numbers(
                each,
                numbers[at * width : (at + 1) * width],
                numbers[len(ended) * width + at * rest : len(ended) * width + (at + 1) * rest],
                next(read) if isinstance(each.gradient_norm, torch.Tensor) else each.gradient_norm,
                flops_of,
                peak_tflops,
            )
            for at, each in enumerate(ended)
        ]

    def report_losses(self) -> Losses:
        """The losses added since the last step: for validation, where they weigh tokens and so do not depend on dp or cp.

        Collective, as `report`.
        """
        payload = self._reduced(self._loss_payload()).view(1, -1)
        self._begin()
        return self._losses_of(self._divided(payload).flatten().tolist())

    def _numbers(
        self,
        ended: _Ended,
        losses: Sequence[float],
        numbers: Sequence[float],
        norm: float | None,
        flops_of: FlopsOf | None,
        peak_tflops: float | None,
    ) -> StepNumbers:
        found = self._losses_of(losses)
        counts = RowCounts.of_limbs(numbers[:SENT])
        ranks, own, waits, memory = itertools.batched(numbers[SENT:], self._group.size)
        slowest = max(range(len(own)), key=own.__getitem__)
        tflops = None
        if flops_of is not None:
            devices = 1 if self._group.data is None else distributed.get_world_size()
            operations = flops_of(counts.tokens - counts.padding_tokens, counts.square_sum)
            tflops = operations / ended.step_seconds / 1e12 / devices
        return StepNumbers(
            step=ended.step,
            loss=found.loss,
            all_masked=found.all_masked,
            mtp_losses=found.mtp_losses,
            gradient_norm=norm,
            learning_rate=ended.learning_rate,
            consumed_samples=ended.consumed_samples,
            step_seconds=ended.step_seconds,
            data_wait_seconds=max(waits),
            tokens_per_second=counts.tokens / ended.step_seconds,
            trained_tokens=counts.trained_tokens,
            tokens=counts.tokens,
            padding_share=counts.padding_tokens / max(counts.tokens, 1),
            rows_truncated=counts.truncated_rows,
            conversations_dropped=counts.dropped_conversations,
            slowest_rank=int(ranks[slowest]),
            slowest_rank_behind_seconds=own[slowest] - sum(own) / len(own),
            memory_mebibytes=max(memory),
            tflops_per_second=tflops,
            mfu=None if tflops is None or peak_tflops is None else tflops / peak_tflops,
        )

    def _begin(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._depth_losses: list[torch.Tensor] = []
        self._counts = RowCounts()

    def _loss_payload(self) -> torch.Tensor:
        """[2 + 2·D]: Σ loss·mask, Σ mask, then those of the depths; the sum over ranks makes them the batch's."""
        if self._group.has_loss != bool(self._losses):
            raise PackproofError(
                what="no microbatch's loss was added"
                if self._group.has_loss
                else "a loss on a stage that computes none",
                where="metrics of a step",
                mend="call add_loss once a microbatch, on the last pipeline stage",
            )
        depths = self._summed(self._depth_losses, (2, self._depths))
        # The loss stands first: a small message of another length is then still reduced in the order of Megatron-LM's.
        return torch.cat([self._summed(self._losses, (2,)), depths.flatten()])

    def _host_payload(self, timing: Timing) -> torch.Tensor:
        """[limbs + 4·R]: the rows' counts, then a slot for each rank in which only it writes, so that a sum gathers them."""
        host = self._counts.limbs()
        world_rank = 0 if self._group.data is None else distributed.get_rank()
        for value in (world_rank, timing.own_seconds, timing.data_wait_seconds, memory_mebibytes(self._device)):
            host += [value if place == self._group.rank else 0.0 for place in range(self._group.size)]
        return torch.tensor(host, dtype=torch.float32).to(self._device, non_blocking=True)

    def _summed(self, pairs: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.stack(list(pairs)).sum(dim=0) if pairs else torch.zeros(shape, device=self._device)

    def _reduced(self, payload: torch.Tensor) -> torch.Tensor:
        """Summed over dp × cp, and the last stage's on every stage."""
        group = self._group
        if group.data is not None:
            distributed.all_reduce(payload, group=group.data)
        if group.pipeline is not None:
            last = distributed.get_world_size(group.pipeline) - 1
            distributed.broadcast(payload, src=distributed.get_global_rank(group.pipeline, last), group=group.pipeline)
        return payload

    def _divided(self, payload: torch.Tensor) -> torch.Tensor:
        """[S, 2 + 2·D] of the payloads [S, …] of S steps: loss, count, then losses and counts of the depths."""
        pairs = payload[:, : 2 + 2 * self._depths]
        loss, count = pairs[:, :1], pairs[:, 1:2]
        sums, counts = pairs[:, 2 : 2 + self._depths], pairs[:, 2 + self._depths :]
        # As Megatron-LM rounds it: the ranks' mean, then times what one rank's count divides by.
        means = sums / self._group.size * (counts.where(counts > 0, 1) / self._group.size).reciprocal()
        return torch.cat([loss / count.where(count > 0, 1), means, count, counts], dim=1)

    def _losses_of(self, numbers: Sequence[float]) -> Losses:
        loss, *depth_losses = numbers[: 1 + self._depths]
        return Losses(loss=loss, all_masked=numbers[1 + self._depths] == 0, mtp_losses=tuple(depth_losses))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ended:
    """A step that has ended and was not reported yet."""

    step: int
    learning_rate: float
    gradient_norm: torch.Tensor | float | None
    consumed_samples: int
    step_seconds: float
    payload: torch.Tensor


def memory_mebibytes(device: torch.device | str) -> float:
    """MiB in use: the largest allocation so far on CUDA, the resident set of this process on CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MEBIBYTE
    return float(psutil.Process().memory_info().rss) / MEBIBYTE


def _pair(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.stack([sums.detach().float(), counts.detach().to(sums.device).float()])
