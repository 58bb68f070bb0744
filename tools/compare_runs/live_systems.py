"""Define the two systems that `compare_runs live` runs: packproof, and Megatron-LM assembled from the installed package's pieces.

Both have one interface, so that one loop feeds, times and reads them. They share a process, and therefore megatron-core's state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config
from torch import distributed

from equivalence.subjects.megatron_lm import training_dataset
from equivalence.subjects.protocol import RowSettings
from equivalence.trainers import megatron_step
from equivalence.trainers.megatron_log import Written, router_losses
from production.errors import PackproofError
from production.library_warnings import quiet_libraries
from production.model.model import build_model
from production.parallel.multi_token_feed import rolls_from_tables
from production.parallel.sizes import RankCoordinates
from production.training.config import Job, ddp_options, multi_token_depths, optimizer_options, sizes
from production.training.data.batch_stream import BatchStream, StepBatch
from production.training.data.tokenizer import vocabulary_size
from production.training.engine import Engine, Stepped
from production.training.metrics.router_losses import router_loss_names
from production.training.metrics.step_metrics import Group, StepMetrics, Timing
from production.training.resume import build

Numbers = dict[str, float]
"""Of one step, under the names of `Run.series`; a stage that computes no loss leaves it out."""

MEGATRON_LM, PACKPROOF = "Megatron-LM", "packproof"
"""The systems' names, the one that is held against first."""


class System(Protocol):
    """Interface of a system to the loop; every rank makes the same calls in the same order."""

    model: Any
    """In megatron-core's DDP."""

    def fetch(self) -> None:
        """Have the next step's rows ready."""

    def step(self) -> None:
        """Take it: what is timed."""

    def numbers(self, step: int) -> Numbers:
        """Return the reported numbers of the last step. Collective."""


class Ours:
    """production.training's feed and engine, as a job's loop drives them."""

    def __init__(self, job: Job, place: RankCoordinates, *, device: torch.device) -> None:
        """Build it; the model keeps the weights that the job starts from."""
        self.feed = BatchStream(job, place)
        vocabulary = vocabulary_size(job, self.feed.tokenizer)
        self.engine = build(job, place, vocab_size=vocabulary, found=None)
        self.model: Any = self.engine.model
        self._metrics = StepMetrics(
            group=Group.of_parallel_state(),
            depths=multi_token_depths(job),
            router_losses=router_loss_names(self.engine.config),
            device=device,
        )
        self._steps = self.feed.steps()
        self._fed: StepBatch
        self._stepped: Stepped

    def fetch(self) -> None:
        """Fetch the next global batch from the feed."""
        self._fed = next(self._steps)

    def step(self) -> None:
        """Take one step of the engine."""
        self.engine.padding = self._fed.padding
        with rolls_from_tables():
            self._stepped = self.engine.step(self._fed.microbatches)

    def numbers(self, step: int) -> Numbers:
        """Return the numbers as the job reports them."""
        stepped, fed = self._stepped, self._fed
        for pair in stepped.report.losses:
            self._metrics.add_loss(pair[0], pair[1])
        if stepped.mtp_loss_sums is not None:
            counts = torch.full_like(stepped.mtp_loss_sums, stepped.microbatches)
            self._metrics.add_multi_token(stepped.mtp_loss_sums, counts, stepped.mtp_token_sums)
        if stepped.mtp_accepted is not None:
            self._metrics.add_accepted(stepped.mtp_accepted)
        self._metrics.add_rows(fed.counts)
        self._metrics.end_step(
            step=step,
            learning_rate=stepped.learning_rate,
            gradient_norm=stepped.gradient_norm,
            consumed_samples=fed.consumed_samples,
            timing=Timing(step_seconds=1.0, own_seconds=1.0, data_wait_seconds=fed.wait_seconds),
            router_losses=stepped.router_losses,
        )
        (found,) = self._metrics.report()
        wanted = ("loss", "gradient_norm", "learning_rate", "consumed_samples", "trained_tokens")
        recorded = {*wanted, *found.router_losses}
        values = {name: float(value) for name, value in found.values().items() if name in recorded}
        values |= {f"mtp_{depth}_loss": loss for depth, loss in enumerate(found.mtp_losses, 1) if loss is not None}
        # Of no position that counts Megatron-LM writes a rate of 0, where our records have none.
        rates = (0.0 if math.isnan(rate) else rate for rate in found.mtp_acceptance_rates)
        return values | {f"mtp_{depth}_acceptance_rate": rate for depth, rate in enumerate(rates, 1)}


class Baseline:
    """Megatron-LM's `SFTDataset`, sampler and collation, `equivalence.trainers.megatron_step`'s step, its DDP, optimizer and schedule."""

    def __init__(self, job: Job, place: RankCoordinates, *, like: Engine, tokenizer: Any) -> None:
        """Build it with the weights of `like`."""
        self._place, self._is_per_token = place, job.loss.normalization != "mean_of_means"
        self._rows = self._read(job, tokenizer)
        self._global_batch_size = job.policy.train_global_batch_size
        self._microbatches = self._global_batch_size // place.data_size
        built = build_model(like.model_settings, sizes(job))
        copy_weights(like.model, built)
        config = get_model_config(built)
        config.calculate_per_token_loss = self._is_per_token
        ddp = DistributedDataParallelConfig(**ddp_options(job))
        self.model: Any = DistributedDataParallel(config, ddp, built)
        given = OptimizerConfig(**optimizer_options(job))
        self.optimizer = get_megatron_optimizer(given, [self.model], use_gloo_process_groups=False)
        self.scheduler = _scheduler(job, self.optimizer, given)
        # As megatron.training.training.train sets them.
        config.grad_scale_func = self.optimizer.scale_loss
        if ddp.overlap_grad_reduce:
            config.no_sync_func = self.model.no_sync
            if ddp.align_param_gather:
                config.grad_sync_func = self.model.start_grad_sync
        if ddp.overlap_param_gather and ddp.align_param_gather:
            config.param_sync_func = self.model.start_param_sync
        self._hybrid_layer_pattern = like.model_settings.hybrid_layer_pattern
        self._consumed = 0

    def fetch(self) -> None:
        """Fetch from torch's DataLoader, one microbatch at a time."""
        self._fed = [next(self._rows) for _ in range(self._microbatches)]

    def step(self) -> None:
        """Take one step as megatron.training.training.train_step does."""
        rows = [{name: tensor.cuda(non_blocking=True) for name, tensor in row.items()} for row in self._fed]
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._reports = megatron_step.forward_backward(self.model, rows, per_token=self._is_per_token)
        self._learning_rate = float(self.optimizer.param_groups[0]["lr"])
        was_updated, self._gradient_norm, _ = self.optimizer.step()
        if was_updated:
            self.scheduler.step(increment=self._global_batch_size)

    def numbers(self, step: int) -> Numbers:
        """Return the numbers as train_step and training_log reduce them."""
        self._consumed += self._global_batch_size
        found: Numbers = {"learning_rate": self._learning_rate, "consumed_samples": self._consumed}
        routers = router_losses(
            get_model_config(self.model),
            microbatches=self._microbatches,
            hybrid_layer_pattern=self._hybrid_layer_pattern,
        )
        if self._gradient_norm is not None:
            found["gradient_norm"] = float(self._gradient_norm)
        if self._place.is_last_stage:
            total = torch.vstack([report.view(-1) for report in self._reports]).sum(dim=0)
            distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            found["loss"] = float(total[0] / total[1])
            found["trained_tokens"] = float(total[1])
            depths: dict[str, torch.Tensor] = {}
            writer = Written()
            MTPLossLoggingHelper.track_mtp_metrics(1 / self._microbatches, step, writer, total_loss_dict=depths)
            found |= {f"mtp_{depth}_loss": float(loss) for depth, loss in enumerate(depths.values(), 1)}
            rates = {name for name in writer.scalars if name.endswith("_acceptance_rate") and "cumulative" not in name}
            found |= {name: writer.scalars[name] for name in rates} | routers
        return found

    def _read(self, job: Job, tokenizer: Any) -> Iterator[dict[str, torch.Tensor]]:
        with quiet_libraries():
            from megatron.training.datasets.data_samplers import MegatronPretrainingSampler  # noqa: PLC0415 - seconds
        path, settings = baseline_rows(job)
        assert job.sft.max_num_steps is not None
        samples = job.sft.max_num_steps * job.policy.train_global_batch_size
        dataset = training_dataset(path, tokenizer, settings, samples=samples)
        sampler = MegatronPretrainingSampler(
            total_samples=len(dataset),
            consumed_samples=0,
            micro_batch_size=1,
            data_parallel_rank=self._place.data_rank,
            data_parallel_size=self._place.data_size,
        )
        workers = job.data.num_workers
        loader: Any = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            pin_memory=job.cluster.device != "cpu" and torch.cuda.is_available(),
            persistent_workers=workers > 0,
        )
        return iter(loader)


def baseline_rows(job: Job) -> tuple[Path, RowSettings]:
    """Return the file and the settings of rows as Megatron-LM takes them. Raises PackproofError for options that Megatron-LM lacks."""
    dataset = job.data.train[0]
    lacks = {
        "data.train": "several files, or weights" if _has_several(job) else "",
        "data.order": f"the order {job.data.order}" if job.data.order != "sequential" else "",
        "data.train.chat_key": f"the key {dataset.chat_key}" if dataset.chat_key != "messages" else "",
        "data.train.on_bad_row": "rows that are left out" if dataset.on_bad_row != "error" else "",
        "policy.tokenizer.chat_template": "a chat template of the job's own"
        if job.policy.tokenizer.chat_template not in {None, "default"}
        else "",
        "policy.sequence_packing": "rows that are packed as they come" if not job.is_packed else "",
    }
    for key, what in lacks.items():
        if what:
            raise PackproofError(
                what=f"{what}: the installed Megatron-LM, as it is assembled here, does not have this",
                where=job.where(key),
                fix="leave it out to compare the two systems",
            )
    return Path(dataset.data_path[0].path), RowSettings(
        pack_length=job.policy.max_total_sequence_length,
        prompt_format=dataset.megatron_sft_prompt_format or "default",
        context_parallel_size=dataset.megatron_sft_context_parallel_size,
        semantics=dataset.semantics,
        pad_token=dataset.megatron_sft_pad_token,
        assistant_prefix_len=dataset.megatron_sft_assistant_prefix_len,
    )


@contextlib.contextmanager
def both(job: Job, place: RankCoordinates, *, device: torch.device) -> Iterator[dict[str, System]]:
    """Yield the two systems by name, with equal weights."""
    ours = Ours(job, place, device=device)
    with ours.feed:
        yield {
            MEGATRON_LM: Baseline(job, place, like=ours.engine, tokenizer=job.policy.tokenizer.name),
            PACKPROOF: ours,
        }


def copy_weights(source: Any, target: torch.nn.Module) -> None:
    """Copy parameters and buffers of one model to another model of the same build; `source` is wrapped in DDP."""
    with torch.no_grad():
        for mine, theirs in zip(_tensors(source.module), _tensors(target), strict=True):
            theirs.copy_(mine)


def unequal_weights(first: torch.nn.Module, second: torch.nn.Module) -> list[str]:
    """Return the names of tensors whose values differ between the two models on this rank."""
    pairs = zip(_named_tensors(first), _tensors(second), strict=True)
    return [name for (name, mine), theirs in pairs if not torch.equal(mine, theirs)]


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor for _, tensor in _named_tensors(model)]


def _has_several(job: Job) -> bool:
    files = [file for dataset in job.data.train for file in dataset.data_path]
    return len(files) > 1 or any(file.weight is not None for file in files)


def _scheduler(job: Job, optimizer: Any, config: OptimizerConfig) -> OptimizerParamScheduler:
    """Build the scheduler, counted in samples, as megatron.training.training.get_optimizer_param_scheduler does from iterations."""
    schedule, size = job.megatron.scheduler, job.policy.train_global_batch_size
    assert job.sft.max_num_steps is not None
    decay = schedule.lr_decay_iters or job.sft.max_num_steps
    first, last = schedule.start_weight_decay, schedule.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters * size,
        lr_decay_steps=decay * size,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=config.weight_decay if first is None else first,
        end_wd=config.weight_decay if last is None else last,
        wd_incr_steps=job.sft.max_num_steps * size,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=None if schedule.lr_wsd_decay_iters is None else schedule.lr_wsd_decay_iters * size,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
