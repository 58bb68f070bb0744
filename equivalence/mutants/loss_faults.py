"""Faults of dividing: what a loss is divided by and multiplied with, what multi-token losses weigh, what is reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import distributed

from equivalence.mutants.deal_faults import DP2
from equivalence.mutants.layout_mutant import CP4, LayoutMutant


def _without_context(sound: Any) -> Any:
    return lambda loss, settings: sound(loss, dataclasses.replace(settings, context_parallel_size=1))


def _without_microbatches(sound: Any) -> Any:
    return lambda loss, settings: sound(loss, dataclasses.replace(settings, num_microbatches=1))


def _unclamped(sound: Any) -> Any:
    def direct_loss(token_losses: torch.Tensor, *, global_valid_tokens: torch.Tensor | None = None, **how: Any) -> Any:
        loss, *rest = sound(token_losses, global_valid_tokens=global_valid_tokens, **how)
        if how["settings"].normalization == "global_valid_tokens" and global_valid_tokens is not None:
            loss = torch.where(global_valid_tokens == 0, loss / global_valid_tokens, loss)
        return loss, *rest

    return direct_loss


def _as_validation(sound: Any) -> Any:
    def summed(self: Any, pairs: Any, shape: tuple[int, ...]) -> torch.Tensor:
        total: torch.Tensor = sound(self, pairs, shape)
        if shape != (2,):
            return total
        each = torch.stack(list(pairs))
        return torch.stack([(each[:, 0] / each[:, 1].clamp(min=1)).mean() * total[1], total[1]])

    return summed


def _without_their_number(sound: Any) -> Any:
    def add_multi_token(self: Any, loss_sums: torch.Tensor, mask_sums: torch.Tensor, *more: Any) -> None:
        sound(self, loss_sums, torch.ones_like(mask_sums), *more)

    return add_multi_token


def _of_this_rank(sound: Any) -> Any:
    del sound
    return lambda _self, payload: payload


def _share_only(sound: Any) -> Any:
    def online_loss(share: torch.Tensor, whole: torch.Tensor, **how: Any) -> Any:
        del whole
        return sound(share, share, **how | {"row_mask": how["target_mask"]})

    return online_loss


def _ignored_cost_nothing(sound: Any) -> Any:
    def token_log_probabilities(logits: torch.Tensor, target_ids: torch.Tensor, **groups: Any) -> torch.Tensor:
        found: torch.Tensor = sound(logits, target_ids, **groups)
        return found.masked_fill(target_ids == -100, 0)

    return token_log_probabilities


def _unshifted_counts(sound: Any) -> Any:
    def depth_tables(*args: Any, **options: Any) -> Any:
        tables = sound(*args, **options)
        return dataclasses.replace(tables, rank_counts=tables.rank_counts[:1].expand_as(tables.rank_counts))

    return depth_tables


def _no_count(sound: Any) -> Any:
    def answer(self: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        table, count = sound(self, *args, **options)
        return table, torch.zeros_like(count)

    return answer


def _count_of_all_ranks(sound: Any) -> Any:
    def counting_mask(self: Any) -> torch.Tensor:
        mask: torch.Tensor = sound.fget(self)
        # Only the feed that weighs by rows makes a mask of its own.
        return mask if self._scale == 1 else mask * self._scale

    return property(counting_mask)


def _by_rank(sound: Any) -> Any:
    def gather_context(share: torch.Tensor, row: Any, settings: Any, *, group: Any = None) -> torch.Tensor:
        whole: torch.Tensor = sound(share, row, settings, group=group)
        if settings.context_parallel_size == 1:
            return whole
        parts = [torch.empty_like(share) for _ in range(settings.context_parallel_size)]
        distributed.all_gather(parts, share.detach().contiguous(), group=group)
        parts[distributed.get_rank(group)] = share
        return torch.cat(parts, dim=1)

    return gather_context


def _summed(sound: Any) -> Any:
    return lambda *args, **options: sound(*args, **options | {"gradient": "sum"})


LOSS_MUTANTS = (
    LayoutMutant(
        name="context_scale_missing",
        story="what the schedule multiplies by cp is not taken out, so gradients are cp times too large",
        target="production.loss:_undo_averaging",
        wrong=_without_context,
        first="loss",
    ),
    LayoutMutant(
        name="microbatch_scale_missing",
        story="a loss that is divided by the global batch's tokens is averaged over microbatches as well",
        target="production.loss:_undo_averaging",
        wrong=_without_microbatches,
        first="loss",
    ),
    LayoutMutant(
        name="divisor_zero",
        story="a global batch in which nothing is trained gives NaN",
        target="production.loss:direct_loss",
        wrong=_unclamped,
        first="loss",
    ),
    LayoutMutant(
        name="averaged_by_data_parallelism",
        story="calculate_per_token_loss is not set, so gradients are averaged over ranks",
        target="production.loss:calculates_per_token",
        wrong=lambda _: lambda normalization: normalization == "per_token",
        first="loss",
    ),
    LayoutMutant(
        name="reported_as_validation",
        story="the reported loss is a mean of means, which a short microbatch weighs as much in as a long one",
        target="production.training.metrics.step_metrics:StepMetrics._summed",
        wrong=_as_validation,
        first="loss",
    ),
    LayoutMutant(
        name="depths_reported_without_microbatches",
        story="a depth's reported loss is the sum over microbatches, not their mean",
        target="production.training.metrics.step_metrics:StepMetrics.add_multi_token",
        wrong=_without_their_number,
        first="models",
        layout=DP2,
    ),
    LayoutMutant(
        name="reported_by_one_rank",
        story="the reported loss is that of a rank's own tokens",
        target="production.training.metrics.step_metrics:StepMetrics._reduced",
        wrong=_of_this_rank,
        first="models",
        layout=DP2,
    ),
    LayoutMutant(
        name="mtp_scale_missing",
        story="with global_valid_tokens nothing divides the gradient of multi-token losses",
        target="production.loss:auxiliary_scale",
        wrong=lambda _: lambda _normalization, _valid: None,
        first="loss",
    ),
    LayoutMutant(
        name="mtp_divisor_zero",
        story="a depth's count of tokens is 0, which megatron-core takes for 1",
        target="production.parallel.multi_token_feed:DepthFeed.answer",
        wrong=_no_count,
        first="loss",
    ),
    LayoutMutant(
        name="mtp_divisor_not_shifted",
        story="every depth is divided by the count of the next token",
        target="production.parallel.multi_token:depth_tables",
        wrong=_unshifted_counts,
        first="loss",
    ),
    LayoutMutant(
        name="rows_weights_without_context_scale",
        story="weights by rows count all ranks' tokens on each rank",
        target="production.parallel.multi_token_feed:DepthFeed._counting_mask",
        wrong=_count_of_all_ranks,
        first="loss",
    ),
    LayoutMutant(
        name="online_epsilon_missing",
        story="the online divisor is 0 where nothing is trained",
        target="production.loss:ONLINE_EPSILON",
        wrong=lambda epsilon: epsilon * 0,
        first="online_loss",
    ),
    LayoutMutant(
        name="online_loss_of_the_share",
        story="the online loss is that of a rank's own tokens, whose gradients are then divided by cp",
        target="production.loss:online_loss",
        wrong=_share_only,
        first="online_loss",
    ),
    LayoutMutant(
        name="ignored_targets_cost_nothing",
        story="a label of -100 has no cross entropy, which is another kernel's behavior",
        target="production.loss:token_log_probabilities",
        wrong=_ignored_cost_nothing,
        first="cross_entropy",
    ),
    LayoutMutant(
        name="log_probabilities_by_rank",
        story="the online path's log-probabilities are put together in order of ranks, and masked in order of tokens",
        target="production.loss:gather_context",
        wrong=_by_rank,
        first="paths",
        layout=CP4,
    ),
    LayoutMutant(
        name="online_gradient_summed",
        story="all ranks compute the same loss, and their gradients are added up as if each had a part of it",
        target="production.parallel.gather:gather_ranks",
        wrong=_summed,
        first="paths",
        layout=CP4,
    ),
)
"""Faults of losses. Checks on data alone find them, except faults that name a check of training steps, which need ranks."""
