"""Faults of a whole run: what a resume loses, which rows a loader and a validation give, what is counted and reported. Only runs of the training job show these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from equivalence.mutants.deal_faults import DP2
from equivalence.mutants.layout_mutant import CP2, LayoutMutant
from equivalence.mutants.rank_faults import ONE

WHOLE_RUN = "whole_run"
"""The check that finds them."""


def _restored(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Return a fault that changes the engine after a resume."""

    def wrong(sound: Any) -> Any:
        def restore(path: Any, engine: Any, manifest: Any) -> None:
            sound(path, engine, manifest)
            change(engine)

        return restore

    return wrong


def _begins_anew(engine: Any) -> None:
    engine.scheduler.num_steps = 0


def _stays(engine: Any) -> None:
    engine.scheduler.start_wd = engine.scheduler.end_wd = engine.scheduler.get_wd()
    engine.scheduler.wd_incr_style = "constant"


def _without_moments(engine: Any) -> None:
    for each in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for state in each.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()


def _counts_left(_sound: Any) -> Any:
    def set_steps(optimizer: Any) -> None:
        """Leave the counts as megatron-core loads them."""

    return set_steps


def _divided_by_its_own(_sound: Any) -> Any:
    def token_sums(feed: Any, loss: torch.Tensor, depth: int) -> torch.Tensor:
        own = feed.tables.rank_counts[depth]
        return torch.stack([loss.float() * own, own, (own == 0).to(torch.float32)])

    return token_sums


def _training_on(sound: Any) -> Any:
    def evaluate(engine: Any, batches: Any) -> Any:
        engine.model.eval = engine.model.train
        try:
            return sound(engine, batches)
        finally:
            del engine.model.eval

    return evaluate


def _a_step_back(sound: Any) -> Any:
    def __init__(self: Any, recipe: Any, order: Any, *, consumed_samples: int = 0, **how: Any) -> None:  # noqa: N807 - what it replaces
        if consumed_samples:
            consumed_samples -= order.settings.global_batch_size
        sound(self, recipe, order, consumed_samples=consumed_samples, **how)

    return __init__


def _a_step_on(sound: Any) -> Any:
    def __init__(self: Any, recipe: Any, order: Any, *, consumed_samples: int = 0, **how: Any) -> None:  # noqa: N807 - as above
        if consumed_samples:
            consumed_samples += order.settings.global_batch_size
        sound(self, recipe, order, consumed_samples=consumed_samples, **how)

    return __init__


def _blend_from_nothing(sound: Any) -> Any:
    def take(self: Any, start: int, count: int) -> Any:
        self._next = max(self._next, start)  # without what was taken of each source before
        return sound(self, start, count)

    return take


def _as_they_come(sound: Any) -> Any:
    return lambda self, planned, wired: sound(self, planned, list(wired)[::-1])


def _without_the_last(sound: Any) -> Any:
    def batch_at(self: Any, consumed_samples: int) -> Any:
        found = sound(self, consumed_samples)
        return None if found is not None and found.consumed_samples - consumed_samples < self._size else found

    return batch_at


def _all_positions(sound: Any) -> Any:
    def of_row(cls: Any, row: Any) -> Any:
        counts = sound.__func__(cls, row)
        return dataclasses.replace(counts, trained_tokens=counts.tokens - counts.padding_tokens)

    return classmethod(of_row)


def _rounded_as_one(sound: Any) -> Any:
    def count_bins(bins: Any, padding: Any) -> Any:
        from production.training.metrics.token_counts import RowCounts  # noqa: PLC0415 - of this fault alone

        counts = RowCounts()
        for each in bins:
            length = sum(each.input_lengths.tolist())
            tokens = -(-length // padding.sequence_multiple) * padding.sequence_multiple
            counts += dataclasses.replace(sound([each], padding), tokens=tokens, padding_tokens=tokens - length)
        return counts

    return count_bins


def _with_first_tokens(sound: Any) -> Any:
    def count_bins(bins: Any, padding: Any) -> Any:
        return dataclasses.replace(
            sound(bins, padding), trained_tokens=int(sum(float(each.token_mask.sum()) for each in bins))
        )

    return count_bins


def _all_weigh(sound: Any) -> Any:
    def batch_at(self: Any, consumed_samples: int) -> Any:
        found = sound(self, consumed_samples)
        return None if found is None else dataclasses.replace(found, weights=(1.0,) * len(found.weights))

    return batch_at


def _turned_round(sound: Any) -> Any:
    def add_multi_token(self: Any, loss_sums: torch.Tensor, *more: Any) -> None:
        sound(self, loss_sums.flip(0), *more)

    return add_multi_token


def _of_the_next_step(sound: Any) -> Any:
    def step(self: Any, batches: Any) -> Any:
        return dataclasses.replace(sound(self, batches), learning_rate=float(self.optimizer.param_groups[0]["lr"]))

    return step


def _unscaled_balance(sound: Any) -> Any:
    def wrap(*given: Any, **options: Any) -> Any:
        from megatron.core.utils import get_model_config  # noqa: PLC0415 - megatron-core

        model = sound(*given, **options)
        config = get_model_config(model)
        unset = property(lambda _self: None, lambda _self, _value: None)
        config.__class__ = type("Unscaled", (type(config),), {"moe_grad_scale_func": unset})
        return model

    return wrap


def _with_coefficient(sound: Any) -> Any:
    def take_router_losses(config: Any, **how: Any) -> Any:
        return {name: loss * config.moe_aux_loss_coeff for name, loss in sound(config, **how).items()}

    return take_router_losses


RUN_MUTANTS = (
    LayoutMutant(
        name="schedule_lost_at_a_resume",
        story="a resumed run begins its warm-up again",
        target="production.training.checkpoint.manager:restore",
        wrong=_restored(_begins_anew),
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="weight_decay_stays_after_a_resume",
        story="a weight decay that grew stays where it was when the run was stopped",
        target="production.training.checkpoint.manager:restore",
        wrong=_restored(_stays),
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="moments_lost_at_a_resume",
        story="a resumed run has the weights, and a new optimizer",
        target="production.training.checkpoint.manager:restore",
        wrong=_restored(_without_moments),
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="step_repeated_at_a_resume",
        story="the loader gives the last step's rows again",
        target="production.training.data.loader:Loader.__init__",
        wrong=_a_step_back,
        first=WHOLE_RUN,
        layout=ONE,
        path="online",
    ),
    LayoutMutant(
        name="step_skipped_at_a_resume",
        story="what was prepared ahead before the stop counts as consumed",
        target="production.training.data.loader:Loader.__init__",
        wrong=_a_step_on,
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="blend_begun_anew_at_a_resume",
        story="a resumed blend does not know what it took of each source",
        target="production.training.data.order:_Blend.take",
        wrong=_blend_from_nothing,
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="rows_as_workers_end",
        story="rows of loader workers are collated in the order in which they come",
        target="production.training.data.loader:_Steps.assemble",
        wrong=_as_they_come,
        first=WHOLE_RUN,
        layout=DP2,
    ),
    LayoutMutant(
        name="validation_without_its_last_rows",
        story="a validation drops what fills no global batch",
        target="production.training.data.order:ValidationOrder.batch_at",
        wrong=_without_the_last,
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="trained_tokens_of_all_turns",
        story="every token that is no padding is told as trained",
        target="production.training.metrics.token_counts:RowCounts.of_row",
        wrong=_all_positions,
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="trained_tokens_with_first_ones",
        story="the online path tells a conversation's first token as a trained target",
        target="production.training.data.online_bins:count_bins",
        wrong=_with_first_tokens,
        first=WHOLE_RUN,
        layout=ONE,
        path="online",
    ),
    LayoutMutant(
        name="bin_rounded_as_one",
        story="a bin's sequences are counted as if they were padded together, not each",
        target="production.training.data.online_bins:count_bins",
        wrong=_rounded_as_one,
        first=WHOLE_RUN,
        layout=ONE,
        path="online",
    ),
    LayoutMutant(
        name="validation_weighs_its_filler",
        story="the row that fills a validation's last batch up counts in its loss",
        target="production.training.data.order:ValidationOrder.batch_at",
        wrong=_all_weigh,
        first=WHOLE_RUN,
        layout=DP2,
    ),
    LayoutMutant(
        name="depths_told_in_another_order",
        story="each depth is reported under another one's name",
        target="production.training.metrics.step_metrics:StepMetrics.add_multi_token",
        wrong=_turned_round,
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="balancing_loss_told_with_its_coefficient",
        story="the routers' balancing loss is reported as it is added, not as Megatron-LM logs it",
        target="production.training.metrics.router_losses:take_router_losses",
        wrong=_with_coefficient,
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="rate_of_the_next_step",
        story="the learning rate is read when the schedule has gone on",
        target="production.training.engine:Engine.step",
        wrong=_of_the_next_step,
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="adams_steps_as_loaded",
        story="after a resume with the distributed optimizer Adam's own count of steps is what megatron-core loads",
        target="production.training.checkpoint.manager:set_steps",
        wrong=_counts_left,
        first=WHOLE_RUN,
        layout=DP2,
        is_distributed=True,
    ),
    LayoutMutant(
        name="depths_by_token_divided_by_the_rank",
        story="with depths weighed by rows the losses by token are counted as if each rank divided by its own targets",
        target="production.parallel.multi_token_feed:DepthFeed.token_sums",
        wrong=_divided_by_its_own,
        first=WHOLE_RUN,
        layout=CP2,
        is_distributed=True,
    ),
    LayoutMutant(
        name="validation_counts_as_training",
        story="a validation leaves the model training, and the losses of its depths are counted into the next step",
        target="production.training.engine:Engine.evaluate",
        wrong=_training_on,
        first=WHOLE_RUN,
        layout=ONE,
    ),
    LayoutMutant(
        name="balancing_loss_not_scaled",
        story="with global_valid_tokens nothing divides the gradient of the experts' balancing loss",
        target="production.training.step:wrap",
        wrong=_unscaled_balance,
        first=WHOLE_RUN,
        layout=ONE,
        path="online",
    ),
)
"""Each shows in a run of four steps, stopped after the second."""
