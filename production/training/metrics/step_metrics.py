"""Measure steps: numbers stay device tensors until a report, which takes one or two small collectives and one
transfer to the host.

A microbatch costs two small device operations and no synchronisation. A report all-reduces 4·(47 + 7·D) bytes a step
for D depths and 4·A for A losses of routers over dp × cp, and 16 bytes a step and 4 more for each rank of the world
over all of them (`rank_stats`): in one message where the two groups are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import distributed

from production.errors import PackproofError
from production.training.metrics.rank_stats import Group, Measured, Timing, measured, row_of
from production.training.metrics.step_numbers import Losses, StepNumbers
from production.training.metrics.token_counts import RowCounts

__all__ = ["FlopsOf", "Group", "Losses", "StepMetrics", "StepNumbers", "Timing", "memory_mebibytes"]

MEBIBYTE = 1 << 20

FlopsOf = Callable[[int, int], float]
"""Function from (tokens, Σ L² over segments) to the floating-point operations of forward and backward pass, all
devices together.
"""


class StepMetrics:
    """Collects the numbers of one step after another on this rank; every rank makes the same calls.

    Losses are summed as Megatron-LM sums them (R-LOSS-7: microbatches in order, then ranks, in float32), so that
    equal inputs give an equal loss, to the bit where each step is reported alone. No call but a report waits for the
    device.
    """

    stop_vote: int = 0
    """Largest vote that a rank gave the last report (`shutdown`)."""

    def __init__(
        self,
        *,
        group: Group,
        depths: int = 0,
        router_losses: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Start without steps; `depths` is D, `router_losses` the names of the routers' losses, `device` the device
        of losses and of the all-reduce.
        """
        self._group = group
        self._depths = depths
        self._router_losses = tuple(router_losses)
        self._device = torch.device(device)
        self._ended: list[_Ended] = []
        self._begin()

    def add_loss(self, loss_sum: torch.Tensor, mask_sum: torch.Tensor) -> None:
        """Add Σ loss·mask and Σ mask of one microbatch on this rank's share: scalars on the device, last stage only."""
        self._losses.append(_pair(loss_sum, mask_sum))

    def add_multi_token(
        self, loss_sums: torch.Tensor, mask_sums: torch.Tensor, token_sums: torch.Tensor | None = None
    ) -> None:
        """Add Σ loss·mask and Σ mask of each depth of one microbatch, both `[D]`.

        For Megatron-LM's own number, a mean of means (R-LOSS-10), give the `loss_values` of its tracker after the
        last microbatch, and the number of microbatches for each depth. `token_sums` `[3, D]` are then the sums by
        token, the targets and the shares without targets (`DepthFeed.token_sums`). Raises PackproofError for another
        number of depths.
        """
        if loss_sums.shape != (self._depths,) or mask_sums.shape != (self._depths,):
            raise PackproofError(
                what=f"the sums must have one value for each of the {self._depths} depths, got shapes {tuple(loss_sums.shape)} and {tuple(mask_sums.shape)}",
                where="metrics of multi-token prediction",
                fix="give one sum for each depth, and give StepMetrics the model's number of depths",
            )
        self._depth_losses.append(_pair(loss_sums, mask_sums))
        if token_sums is not None:
            self._token_losses.append(token_sums.detach().float())

    def add_accepted(self, accepted: torch.Tensor) -> None:
        """Add `[2, D]` on the last stage: positions at which a depth's best guess is its label, and positions that
        count.
        """
        self._accepted = accepted.detach().flatten().to(self._device, torch.float32)

    def add_rows(self, counts: RowCounts) -> None:
        """Add rows that this rank feeds, from the host.

        Every rank may call it: one of each context-parallel group counts.
        """
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
        router_losses: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """End the step, which holds everything added since the last call; its gradient norm is a scalar.

        The step stays on the device until `report`. Raises PackproofError where losses are missing on the last stage,
        or present on another.
        """
        counts = torch.tensor(self._counts.limbs(), dtype=torch.float32).to(self._device, non_blocking=True)
        payload = torch.cat([self._loss_payload(), *self._beside_losses(router_losses or {}), counts])
        if isinstance(gradient_norm, torch.Tensor):
            gradient_norm = gradient_norm.detach().to(self._device, torch.float32).reshape(1)
        self._ended.append(
            _Ended(
                step=step,
                learning_rate=learning_rate,
                gradient_norm=gradient_norm,
                consumed_samples=consumed_samples,
                timing=timing,
                memory_mebibytes=memory_mebibytes(self._device),
                payload=payload,
            )
        )
        self._begin()

    def report(
        self, *, flops_of: FlopsOf | None = None, peak_tflops: float | None = None, stop_vote: int = 0
    ) -> list[StepNumbers]:
        """Return the numbers of every step that has ended since the last report.

        A report takes an all-reduce over dp × cp, another over the world where the world is larger, and one transfer
        to the host; on CUDA the numbers are sent when the events of the last step have passed. `flops_of` gives the
        model's floating-point operations for (tokens, square sum) without padding; `peak_tflops` is one device's;
        `stop_vote` is this rank's vote to stop. Collective: every rank of the world calls it after the same steps,
        stages without a loss too.
        """
        ended, self._ended = self._ended, []
        if not ended:
            return []
        rows = row_of(
            [(each.timing, each.memory_mebibytes) for each in ended],
            stop_vote=stop_vote,
            rank=self._group.world_rank,
            size=self._group.world_size,
            device=self._device,
        )
        payload, everyone = self._together(torch.cat([each.payload for each in ended]), rows)
        payload = payload.view(len(ended), -1)
        losses = self._divided(payload)
        beside = self._read_beside(payload[:, losses.shape[1] :])
        counts = payload[:, losses.shape[1] + 2 * self._depths + len(self._router_losses) :]
        norms = [each.gradient_norm for each in ended if isinstance(each.gradient_norm, torch.Tensor)]
        parts = (losses, beside, counts, *norms, everyone)
        read = iter(torch.cat([each.flatten() for each in parts]).tolist())
        losses_read, beside_read, counts_read = (
            [list(itertools.islice(read, each.shape[1])) for _ in ended] for each in (losses, beside, counts)
        )
        norms_read = [
            next(read) if isinstance(each.gradient_norm, torch.Tensor) else each.gradient_norm for each in ended
        ]
        of_ranks, self.stop_vote = measured(list(read), steps=len(ended))
        each_step = zip(ended, losses_read, beside_read, counts_read, norms_read, of_ranks, strict=True)
        return [
            self._numbers(step, loss, more, limbs, norm, ranks, flops_of, peak_tflops)
            for step, loss, more, limbs, norm, ranks in each_step
        ]

    def report_losses(self) -> Losses:
        """Return the losses added since the last step: for validation, where they weigh tokens and so do not depend
        on dp or cp.

        Collective, as `report`.
        """
        payload = self._reduced(self._loss_payload()).view(1, -1)
        self._begin()
        return self._losses_of(self._divided(payload).flatten().tolist())

    def _numbers(
        self,
        ended: _Ended,
        losses: Sequence[float],
        beside: Sequence[float],
        limbs: Sequence[float],
        norm: float | None,
        ranks: Measured,
        flops_of: FlopsOf | None,
        peak_tflops: float | None,
    ) -> StepNumbers:
        found = self._losses_of(losses)
        counts = RowCounts.of_limbs(limbs)
        seconds = max(ranks.step_seconds)
        tflops = None
        if flops_of is not None:
            operations = flops_of(counts.tokens - counts.padding_tokens, counts.square_sum)
            tflops = operations / seconds / 1e12 / len(ranks.step_seconds)
        return StepNumbers(
            step=ended.step,
            loss=found.loss,
            all_masked=found.all_masked,
            mtp_losses=found.mtp_losses,
            mtp_token_losses=found.mtp_token_losses,
            mtp_empty_shares=found.mtp_empty_shares,
            mtp_acceptance_rates=tuple(beside[: self._depths]),
            router_losses=dict(zip(self._router_losses, beside[self._depths :], strict=True)),
            gradient_norm=norm,
            learning_rate=ended.learning_rate,
            consumed_samples=ended.consumed_samples,
            step_seconds=seconds,
            data_wait_seconds=max(ranks.data_wait_seconds),
            data_wait_rank=ranks.longest_wait,
            tokens_per_second=counts.tokens / seconds,
            trained_tokens=counts.trained_tokens,
            tokens=counts.tokens,
            padding_share=counts.padding_tokens / max(counts.tokens, 1),
            rows_truncated=counts.truncated_rows,
            conversations_dropped=counts.dropped_conversations,
            conversations_masked_out=counts.masked_out_conversations,
            control_tokens=counts.control_tokens,
            labels_masked_as_padding=counts.labels_masked_as_padding,
            prompt_messages_trained=counts.prompt_messages_trained,
            slowest_rank=ranks.slowest,
            slowest_rank_place=self._group.place(ranks.slowest),
            slowest_rank_behind_seconds=ranks.behind_seconds,
            memory_mebibytes=max(ranks.memory_mebibytes),
            memory_rank=ranks.fullest,
            tflops_per_second=tflops,
            mfu=None if tflops is None or peak_tflops is None else tflops / peak_tflops,
        )

    def _begin(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._depth_losses: list[torch.Tensor] = []
        self._token_losses: list[torch.Tensor] = []
        self._accepted = torch.zeros(2 * self._depths, device=self._device)
        self._counts = RowCounts()

    def _loss_payload(self) -> torch.Tensor:
        """Return [2 + 5·D]: Σ loss·mask, Σ mask, then those of the depths, then their sums by token; the sum over
        ranks makes them the batch's.
        """
        if self._group.has_loss != bool(self._losses):
            raise PackproofError(
                what="no microbatch's loss was added"
                if self._group.has_loss
                else "a loss was added on a stage that computes no loss",
                where="metrics of a step",
                fix="call add_loss once a microbatch, on the last pipeline stage",
            )
        depths = self._summed(self._depth_losses, (2, self._depths)).flatten()
        tokens = self._summed(self._token_losses, (3, self._depths)).flatten()
        # The loss stands first: a small message of another length is then still reduced in the order of Megatron-LM's.
        return torch.cat([self._summed(self._losses, (2,)), depths, tokens])

    def _beside_losses(self, router_losses: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return [2·D] guesses of depths and [A] losses of routers, which one rank of dp × cp sends, since all have
        the same.
        """
        sends = self._group.data is None or distributed.get_rank(self._group.data) == 0
        zero = torch.zeros((), device=self._device)
        routed = [
            router_losses[name].detach().to(self._device, torch.float32) if sends else zero
            for name in self._router_losses
        ]
        return [self._accepted, *([torch.stack(routed)] if routed else [])]

    def _read_beside(self, payload: torch.Tensor) -> torch.Tensor:
        """Return [S, D + A]: acceptance rates in percent, divided as in Megatron-LM (NaN for 0 / 0), then the
        routers' losses.
        """
        right, every = payload[:, : self._depths], payload[:, self._depths : 2 * self._depths]
        rates = (right / every.clamp(min=1) * 100.0).where(every > 0, torch.nan)
        return torch.cat([rates, payload[:, 2 * self._depths :][:, : len(self._router_losses)]], dim=1)

    def _summed(self, pairs: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.stack(list(pairs)).sum(dim=0) if pairs else torch.zeros(shape, device=self._device)

    def _reduced(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload summed over dp × cp, with the last stage's values on every stage."""
        group = self._group
        if group.data is not None:
            distributed.all_reduce(payload, group=group.data)
        if group.pipeline is not None:
            last = distributed.get_world_size(group.pipeline) - 1
            distributed.broadcast(payload, src=distributed.get_global_rank(group.pipeline, last), group=group.pipeline)
        return payload

    def _together(self, payload: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the payload as `_reduced`, and the rows summed over the world: in one message where dp × cp is the
        world.
        """
        if self._group.size == self._group.world_size:
            # The losses stand first, as they do alone.
            sent = self._reduced(torch.cat([payload, rows.flatten()]))
            return sent[: len(payload)], sent[len(payload) :]
        payload = self._reduced(payload)
        distributed.all_reduce(rows)
        return payload, rows

    def _divided(self, payload: torch.Tensor) -> torch.Tensor:
        """Return [S, 2 + 5·D] of the payloads [S, …] of S steps: loss, losses of depths, those by token, then the counts of the three and the
        shares without a target.
        """
        depths = self._depths
        loss, count = payload[:, :1], payload[:, 1:2]
        sums, counts, token_sums, token_counts, empty = (
            payload[:, 2 + each * depths : 2 + (each + 1) * depths] for each in range(5)
        )
        # As Megatron-LM rounds it: the ranks' mean, then times what one rank's count divides by.
        means = sums / self._group.size * (counts.where(counts > 0, 1) / self._group.size).reciprocal()
        by_token = token_sums / token_counts.where(token_counts > 0, 1)
        return torch.cat([loss / count.where(count > 0, 1), means, by_token, count, counts, token_counts, empty], dim=1)

    def _losses_of(self, numbers: Sequence[float]) -> Losses:
        depths = self._depths
        read = iter(numbers)
        loss, *means = itertools.islice(read, 1 + depths)
        by_token = [*itertools.islice(read, depths)]
        count = next(read)
        counts, token_counts, empty = ([*itertools.islice(read, depths)] for _ in range(3))
        # Nothing trained is no measurement: a 0 would be the best loss of all.
        is_known = [targets > 0 or without > 0 for targets, without in zip(token_counts, empty, strict=True)]
        has_target = [
            count > 0 and (targets > 0 or not known) for targets, known in zip(token_counts, is_known, strict=True)
        ]
        return Losses(
            loss=loss if count > 0 else None,
            all_masked=count == 0,
            mtp_losses=tuple(mean if has else None for mean, has in zip(means, has_target, strict=True)),
            mtp_token_losses=tuple(
                value if targets > 0 else None for value, targets in zip(by_token, token_counts, strict=True)
            ),
            mtp_empty_shares=tuple(
                without / shares if known and shares else None
                for without, shares, known in zip(empty, counts, is_known, strict=True)
            ),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ended:
    """Holds a step that has ended and was not reported yet."""

    step: int
    learning_rate: float
    gradient_norm: torch.Tensor | float | None
    consumed_samples: int
    timing: Timing
    memory_mebibytes: float
    payload: torch.Tensor


def memory_mebibytes(device: torch.device | str) -> float:
    """Return MiB in use: the largest allocation so far on CUDA, the resident set of this process on CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MEBIBYTE
    return float(psutil.Process().memory_info().rss) / MEBIBYTE


def _pair(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.stack([sums.detach().float(), counts.detach().to(sums.device).float()])
