"""A training job on one rank: start or go on, step, report, validate, save, end; one driver for both paths.

Metrics leave the device at reporting boundaries alone, and everything that ends a run early is decided there by all ranks together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import distributed

from production.errors import PackproofError
from production.loss import Normalization
from production.multi_token_feed import rolls_from_tables
from production.training.checkpoint import Checkpoints, Manifest, load_weights, restore, verify
from production.training.config import Job, device_here, sizes, validate
from production.training.config.sections import Mlflow
from production.training.dumps import dump
from production.training.engine import Engine, Stepped
from production.training.feed import Fed, Feed, vocabulary_size
from production.training.flops import peak_tflops, work_of
from production.training.identity import check_resume
from production.training.launch import Launched, launched, world_size
from production.training.loggers import Loggers, LoggerSettings, MlflowSettings, Record, WandbSettings, open_loggers
from production.training.metrics import FlopsOf, Group, StepMetrics, Timing
from production.training.progress import RunProgress
from production.training.step_numbers import StepNumbers
from production.training.summary import close_run

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a job to save and end: torchrun and Slurm send the first, Slurm's `--signal` may send the second."""


class NotFinite(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A loss or a gradient norm is no number; the batches since the last report were dumped."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, the same on all ranks."""

    step: int
    """Steps taken since the beginning of the job."""
    consumed_samples: int
    reason: str
    """`finished`, `signal`, or `time limit`."""
    numbers: tuple[StepNumbers, ...]
    """Of this run's steps."""


def run(job: Job) -> Outcome:
    """Train as the job says, in the world that torchrun started. Raises PackproofError, before any model is built, for what is refused."""
    validate(job, world_size(), device=device_here(job))
    layout = sizes(job)
    with (
        launched(
            layout,
            device=job.cluster.device,
            timeout_seconds=job.cluster.timeout_seconds,
            seed=job.sft.seed,
            deterministic=job.cluster.deterministic,
        ) as rank,
        rolls_from_tables(),
    ):
        return _Run(job, rank).run()


class _Run:
    def __init__(self, job: Job, rank: Launched) -> None:
        self._job, self._rank, self._place = job, rank, rank.place
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._checkpoints = Checkpoints(
            folder=Path(job.checkpointing.checkpoint_dir),
            keep=job.checkpointing.keep_top_k,
            metric=job.checkpointing.metric_name,
            higher_is_better=job.checkpointing.higher_is_better,
            with_optimizer=job.checkpointing.save_optimizer,
            sharding_type=job.checkpointing.optimizer_format,
        )
        self._step = 0
        self._consumed = 0
        self._saved_step = -1
        self._measured: dict[str, float] = {}
        self._numbers: list[StepNumbers] = []
        self._pending: list[tuple[int, Fed]] = []

    def run(self) -> Outcome:
        job = self._job
        found = self._found()
        self._consumed = 0 if found is None else found[1].consumed_samples
        with Feed(job, self._place, consumed_samples=self._consumed) as feed, _asked_to_end() as asked:
            self._feed = feed
            self._identity = {**feed.identity(), "world_size": self._place.world_size}
            self._check_same()
            if found is not None:
                check_resume(found[1].fingerprint, self._identity)
            self._engine = self._build(feed, found)
            self._metrics = StepMetrics(
                group=Group.of_parallel_state(), depths=self._engine.settings.depths, device=self._rank.device
            )
            with self._loggers() as self._log, self._bar() as self._progress:
                if found is not None:
                    self._progress.say(f"going on from {found[0]} (step {self._step})")
                reason = self._train(asked)
                self._log.log(Record(kind="end", step=self._step, values={"reason": reason}))
        if self._place.rank == 0:
            close_run(Path(job.logger.log_dir), self._console)
        return Outcome(step=self._step, consumed_samples=self._consumed, reason=reason, numbers=tuple(self._numbers))

    def _train(self, asked: list[str]) -> str:
        job, total = self._job, self._total_steps()
        if job.sft.val_at_start and self._step == 0:
            self._validate()
        reason = "finished"
        steps = self._feed.steps()
        ended = time.perf_counter()
        while total is None or self._step < total:
            fed = next(steps, None)
            if fed is None:
                break
            ended, is_reported = self._take(fed, ended)
            if is_reported and (why := self._why_end(asked)):
                reason = why
                break
            if job.sft.val_period and self._step % job.sft.val_period == 0:
                self._validate()
                ended = time.perf_counter()
            if job.checkpointing.enabled and self._step % job.checkpointing.save_period == 0:
                self._save()
                ended = time.perf_counter()
        if reason == "finished" and job.sft.val_at_end and not self._validated_now():
            self._validate()
        if job.checkpointing.enabled and self._saved_step != self._step and self._step:
            self._save()
        return reason

    def _take(self, fed: Fed, before: float) -> tuple[float, bool]:
        """One step; gives when it ended, and whether it was reported."""
        step = self._step + 1
        if step in self._job.logger.dump_batch_steps:
            self._dump(step, fed)
        self._pending.append((step, fed))
        self._engine.padding = fed.padding
        stepped = self._engine.step(fed.microbatches)
        self._step, self._consumed = step, fed.consumed_samples
        is_reported = step % self._job.logger.report_period == 0 or step == self._total_steps()
        if is_reported and self._rank.device.type == "cuda":
            torch.cuda.synchronize()  # so that the kernels of the steps since the last report are in their time
        ended = time.perf_counter()
        self._add(stepped, fed, seconds=ended - before)
        if is_reported:
            self._report()
        return ended, is_reported

    def _add(self, stepped: Stepped, fed: Fed, *, seconds: float) -> None:
        for pair in stepped.report.losses:
            self._metrics.add_loss(pair[0], pair[1])
        if stepped.mtp_loss_sums is not None:
            self._metrics.add_multi_token(
                stepped.mtp_loss_sums, torch.full_like(stepped.mtp_loss_sums, stepped.microbatches)
            )
        self._metrics.add_rows(fed.counts)
        own = stepped.own_seconds + fed.wait_seconds
        self._metrics.end_step(
            step=self._step,
            learning_rate=stepped.learning_rate,
            gradient_norm=stepped.gradient_norm,
            consumed_samples=self._consumed,
            timing=Timing(step_seconds=seconds, own_seconds=own, data_wait_seconds=fed.wait_seconds),
        )

    def _report(self) -> None:
        peak = self._job.logger.peak_teraflops or peak_tflops(self._rank.device)
        for numbers in self._metrics.report(flops_of=self._flops(), peak_tflops=peak):
            self._measured["train:loss"] = numbers.loss
            self._numbers.append(numbers)
            self._log.log(Record(kind="step", step=numbers.step, values=numbers.values()))
            self._progress.step(numbers)
            if not numbers.finite:
                self._stop_not_finite(numbers)
        self._pending.clear()

    def _stop_not_finite(self, numbers: StepNumbers) -> None:
        folder = next(self._dump(step, fed) for step, fed in self._pending if step == numbers.step)
        raise NotFinite(
            what=f"loss {numbers.loss}, gradient norm {numbers.gradient_norm}",
            where=f"step {numbers.step}, of which what each rank fed lies in {folder}",
            mend="look at the rows that rank_R.rows.json there names (packproof-diff-row FILE --row N), lower the learning rate, or "
            "leave the rows out; the newest checkpoint is of before",
        )

    def _validate(self) -> None:
        metrics = StepMetrics(group=Group.of_parallel_state(), device=self._rank.device)
        batches = 0
        for fed in self._feed.validation():
            self._engine.padding = fed.padding
            for pair in self._engine.evaluate(fed.microbatches).losses:
                metrics.add_loss(pair[0], pair[1])
            batches += 1
        losses = metrics.report_losses()
        self._measured["val:val_loss"] = losses.loss
        self._validated_step = self._step
        values = {"validation_loss": losses.loss, "validation_batches": batches}
        self._log.log(Record(kind="validation", step=self._step, values=values))
        self._progress.say(f"validation after step {self._step}: loss {losses.loss:.4f}")

    def _save(self) -> None:
        began = time.perf_counter()
        path = self._checkpoints.save(
            self._engine,
            step=self._step,
            consumed_samples=self._consumed,
            fingerprint=self._identity,
            config=self._job.describe(),
            metrics=self._measured,
        )
        self._saved_step = self._step
        self._progress.say(f"saved {path} ({time.perf_counter() - began:.1f} s)")

    def _why_end(self, asked: list[str]) -> str | None:
        """Agreed on by all ranks: a signal reaches them at different steps."""
        limit = self._job.checkpointing.checkpoint_must_save_by
        is_late = limit is not None and time.monotonic() - self._started > _seconds(limit)
        wish = torch.tensor([2 if asked else 1 if is_late else 0], device=self._rank.device)
        distributed.all_reduce(wish, op=distributed.ReduceOp.MAX)
        return {0: None, 1: "time limit", 2: "signal"}[int(wish)]

    def _dump(self, step: int, fed: Fed) -> Path:
        return dump(
            Path(self._job.logger.log_dir) / "dumps" / f"step_{step:08d}",
            fed,
            place=self._place,
            settings=self._engine.settings,
            locations=[self._feed.locate(sample) for sample in fed.samples],
        )

    def _build(self, feed: Feed, found: tuple[Path, Manifest] | None) -> Engine:
        job = self._job
        vocabulary = vocabulary_size(job, feed.tokenizer)
        if found is None and job.model.initial != "scratch":
            return Engine(job, self._place, vocab_size=vocabulary, prepare=self._initial_weights)
        engine = Engine(job, self._place, vocab_size=vocabulary)
        if found is not None:
            restore(found[0], engine, found[1])
            self._step = self._saved_step = found[1].step
        return engine

    def _initial_weights(self, model: torch.nn.Module) -> None:
        job = self._job
        if job.model.initial == "huggingface":
            from production.training.bridge import load_huggingface  # noqa: PLC0415 - an extra

            load_huggingface(model, job.model.initial_path or job.policy.model_name or "")
            return
        assert job.model.initial_path is not None
        path = Path(job.model.initial_path)
        verify(path)
        load_weights(path, model)

    def _found(self) -> tuple[Path, Manifest] | None:
        """The checkpoint to go on from, every byte of it verified."""
        if not (self._job.checkpointing.enabled and self._job.checkpointing.resume):
            return None
        path = self._checkpoints.newest()
        return None if path is None else (path, verify(path))

    def _check_same(self) -> None:
        """All ranks must read the same rows: nothing is broadcast later. One exchange, before the model is built."""
        everyone: list[Mapping[str, Any] | None] = [None] * self._place.world_size
        distributed.all_gather_object(everyone, self._identity)
        for rank, other in enumerate(everyone):
            differing = [key for key in self._identity if other is not None and other[key] != self._identity[key]]
            if differing:
                raise PackproofError(
                    what=f"ranks do not read the same data: {', '.join(differing)} differ",
                    where=f"rank {self._place.rank} and rank {rank}",
                    mend="give all ranks the same files and the same tokenizer (a shared folder, or equal copies)",
                )

    def _total_steps(self) -> int | None:
        limits = [each for each in (self._job.sft.max_num_steps, self._feed.total_steps) if each is not None]
        return min(limits, default=None)

    def _validated_now(self) -> bool:
        return getattr(self, "_validated_step", -1) == self._step

    def _flops(self) -> FlopsOf | None:
        try:
            return work_of(
                self._engine.config,
                vocab_size=self._engine.model_settings.vocab_size,
                hybrid_layer_pattern=self._engine.model_settings.hybrid_layer_pattern,
            )
        except PackproofError:
            return None  # a model that the formula does not cover: reported without TFLOP/s

    def _loggers(self) -> Loggers:
        given = self._job.logger
        settings = LoggerSettings(
            folder=Path(given.log_dir),
            tensorboard=given.tensorboard.log_dir if given.tensorboard_enabled else None,
            wandb=WandbSettings(**dataclasses.asdict(given.wandb)) if given.wandb_enabled else None,
            mlflow=_mlflow(given.mlflow) if given.mlflow_enabled else None,
        )
        normalization: Normalization = self._job.loss.normalization
        facts = {
            "world_size": self._place.world_size,
            "data_parallel_size": self._place.data_size,
            "device": str(self._rank.device),
            "normalization": normalization,
            **{f"{name}_parallel_size": size for name, size in dataclasses.asdict(sizes(self._job)).items()},
        }
        return open_loggers(settings, rank=self._place.rank, run=facts, finished_steps=self._step)

    def _bar(self) -> RunProgress:
        return RunProgress(
            total_steps=self._total_steps() or 0,
            finished_steps=self._step,
            rank=self._place.rank if self._job.logger.progress else 1,
            console=self._console,
        )


@contextlib.contextmanager
def _asked_to_end() -> Iterator[list[str]]:
    """Collects the signals that ask for an end, instead of ending at once; the former handlers come back on exit."""
    asked: list[str] = []
    former = {
        each: signal.signal(each, lambda number, _frame: asked.append(signal.Signals(number).name)) for each in SIGNALS
    }
    try:
        yield asked
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _mlflow(given: Mlflow) -> MlflowSettings:
    return MlflowSettings(experiment=given.experiment_name, run_name=given.run_name, tracking_uri=given.tracking_uri)


def _seconds(duration: str) -> int:
    """`days:hours:minutes:seconds`, as validated."""
    days, hours, minutes, seconds = map(int, duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
