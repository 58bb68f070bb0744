"""Build a job's model, optimizer and schedule on this rank from megatron-core's own classes, and run one step of
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config

from production.errors import PackproofError
from production.model.model import build_model, reason_of
from production.online.bins import Padding
from production.online.padded_batch import PaddedBatch
from production.parallel.multi_token_feed import TOKEN_SUMS
from production.parallel.sizes import RankCoordinates
from production.rows.batch import Batch
from production.training.config import (
    Job,
    ddp_options,
    model_settings,
    multi_token_depths,
    optimizer_options,
    sizes,
)
from production.training.distributed.heartbeat import is_of_a_collective
from production.training.metrics.router_losses import clear_router_losses, take_router_losses
from production.training.metrics.timers import Event, clock_here
from production.training.step import StepReport, StepSettings, forward_backward, wrap


@dataclass(frozen=True, kw_only=True, eq=False)
class Stepped:
    """Holds one step's numbers on this rank, still on the device."""

    report: StepReport
    """Losses of its microbatches."""
    gradient_norm: torch.Tensor | float | None
    """Gradient norm before clipping, the same on all ranks; None where the optimizer computes none."""
    learning_rate: float
    """Learning rate of the step."""
    mtp_loss_sums: torch.Tensor | None
    """[D] float32: megatron-core's losses of this rank's microbatches, summed; None except on the last stage."""
    mtp_token_sums: torch.Tensor | None
    """[3, D] float32: sums of token losses, targets, and shares without targets (`DepthFeed.token_sums`); None where
    not known.
    """
    mtp_accepted: torch.Tensor | None
    """[2, D] float32: of each depth, positions whose best guess is the label, and positions that count; None but on the last stage."""
    router_losses: Mapping[str, torch.Tensor]
    """Router losses by megatron-core's name, scalars, correct on the last stage (`router_losses`)."""
    microbatches: int
    """Microbatches of this data-parallel rank."""
    first_wait: Event
    """Time at which this rank first waited for other replicas, after its forward and backward passes."""


class Engine:
    """Holds and steps the model, the optimizer and the schedule."""

    padding: Padding | None = None
    """Padding of the next step's rows on the online path."""

    def __init__(
        self,
        job: Job,
        place: RankCoordinates,
        *,
        vocab_size: int,
        prepare: Callable[[torch.nn.Module], None] | None = None,
        run_steps: int | None = None,
    ) -> None:
        """Build everything; `prepare` may set the model's weights before the optimizer copies them. Needs the
        parallel state.

        `run_steps` are those of the whole run, over which a weight decay grows; None: `sft.max_num_steps`. Raises
        PackproofError where the weight decay grows and neither number is set.
        """
        self.place = place
        self.settings = StepSettings(
            normalization=job.loss.normalization,
            depths=multi_token_depths(job),
            mtp_weights=job.loss.mtp_weights,
        )
        self.model_settings = model_settings(job, vocab_size)
        with _in_our_words("the model", "model"):
            built = build_model(self.model_settings, sizes(job))
        if prepare is not None:
            prepare(built)
        with _in_our_words("data parallelism", "policy.megatron_cfg.distributed_data_parallel_config"):
            self.model = wrap(built, self.settings, DistributedDataParallelConfig(**ddp_options(job)))
        self.config = get_model_config(self.model)
        optimizer_config = OptimizerConfig(**optimizer_options(job))
        self.optimizer = _optimizer(optimizer_config, self.model)
        self.scheduler = _scheduler(job, self.optimizer, optimizer_config, run_steps or job.sft.max_num_steps)
        self.config.finalize_model_grads_func = self._finalize
        if self.model.ddp_config.overlap_param_gather:
            self.config.param_sync_func = self.model.start_param_sync
        self.clock = clock_here()
        self._first_wait: Event = None
        self._rows_per_step = job.policy.train_global_batch_size
        MTPLossLoggingHelper.tracker.clear()  # of a job before in this process
        clear_router_losses()

    def step(self, batches: Sequence[Batch | PaddedBatch]) -> Stepped:
        """Run one optimizer step over this data-parallel rank's microbatches. Collective over the world."""
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        report = forward_backward(self.model, batches, self._settings_now(), self.place)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        _, gradient_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=self._rows_per_step)
        depths, by_token, accepted = self._take_multi_token()
        return Stepped(
            report=report,
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            mtp_loss_sums=depths,
            mtp_token_sums=by_token,
            mtp_accepted=accepted,
            router_losses=take_router_losses(
                self.config,
                microbatches=len(batches),
                hybrid_layer_pattern=self.model_settings.hybrid_layer_pattern,
                device=next(self.model.parameters()).device,
            ),
            microbatches=len(batches),
            first_wait=self._first_wait,
        )

    def evaluate(self, batches: Sequence[Batch | PaddedBatch]) -> StepReport:
        """Return losses without gradients. Collective over the world.

        A model that does not train adds nothing to what megatron-core tracks of depths and routers.
        """
        self.model.eval()
        try:
            with torch.no_grad(), self.settled():
                return forward_backward(self.model, batches, self._settings_now(), self.place, forward_only=True)
        finally:
            self.model.train()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Hold parameters at those of the last step: an overlapped gather of parameters has ended, and none begins."""
        is_overlapped = self.model.ddp_config.overlap_param_gather
        if is_overlapped:
            self.model.disable_forward_pre_hook()
            self.config.param_sync_func = None
        try:
            yield
        finally:
            if is_overlapped:
                self.model.enable_forward_pre_hook()
                self.config.param_sync_func = self.model.start_param_sync

    def _settings_now(self) -> StepSettings:
        return dataclasses.replace(self.settings, padding=self.padding)

    def _take_multi_token(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Read and reset megatron-core's tracker of the depths: loss sums [D], sums by token [3, D], and right
        guesses and all guesses [2, D].

        Returns nothing except on the last stage.
        """
        tracker = MTPLossLoggingHelper.tracker
        by_token = tracker.pop(TOKEN_SUMS, None)
        if not self.settings.depths or "loss_values" not in tracker:
            return None, None, None
        sums = tracker["loss_values"].clone()
        accepted = torch.stack([tracker["correct_values"], tracker["total_values"]])
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        return (sums, by_token, accepted) if self.place.is_last_stage else (None, None, None)

    def _finalize(self, *args: Any, **options: Any) -> None:
        self._first_wait = self.clock.mark()
        finalize_model_grads(*args, **options)


def _optimizer(config: OptimizerConfig, model: torch.nn.Module) -> Any:
    with _in_our_words("the optimizer", "policy.megatron_cfg.optimizer"):
        return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


_OF_BUILDING = (
    AssertionError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError, RuntimeError, MemoryError,
)  # fmt: skip
"""Exceptions of megatron-core and torch for a model that cannot be built."""


@contextlib.contextmanager
def _in_our_words(part: str, key: str) -> Iterator[None]:
    """Raise an error that names the part that megatron-core could not build, and why."""
    try:
        yield
    except PackproofError:
        raise
    except _OF_BUILDING as error:
        if isinstance(error, RuntimeError) and is_of_a_collective(error):
            raise  # of another rank, which will be named
        raise PackproofError(
            what=f"megatron-core cannot build {part}: {reason_of(error) or type(error).__name__}",
            where=key,
            fix="change the option that the message names, or the sizes of the model",
        ) from error


def _scheduler(job: Job, optimizer: Any, config: OptimizerConfig, run_steps: int | None) -> OptimizerParamScheduler:
    """In rows, as Megatron-LM counts it: under inverse-square-root that shows in the last place (R-TRAIN-2).

    Where nothing decays its length has no meaning, and megatron-core wants one above the warm-up. The weight decay grows over
    the steps of the run, whatever the rate does (R-TRAIN-3), and has no length where it is constant.
    """
    if run_steps is None and job.megatron.scheduler.weight_decay_incr_style != "constant":
        raise PackproofError(
            what="must be constant where the length of the run is not known",
            where="policy.megatron_cfg.scheduler.weight_decay_incr_style",
            fix="set sft.max_num_steps, or set weight_decay_incr_style to constant",
        )
    schedule, rows = job.megatron.scheduler, job.policy.train_global_batch_size
    decay = schedule.lr_decay_iters or max(job.sft.max_num_steps or 0, schedule.lr_warmup_iters + 1)
    first, last = schedule.start_weight_decay, schedule.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr if config.min_lr is not None else 0.0,
        lr_warmup_steps=schedule.lr_warmup_iters * rows,
        lr_decay_steps=decay * rows,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=config.weight_decay if first is None else first,
        end_wd=config.weight_decay if last is None else last,
        wd_incr_steps=(run_steps or decay) * rows,
        wd_incr_style=schedule.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=True,
        wsd_decay_steps=None if schedule.lr_wsd_decay_iters is None else schedule.lr_wsd_decay_iters * rows,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
