"""Run a training job on one rank, on both paths: start or resume, step, report, validate, save, end.

Metrics leave the device only at reports, where all ranks together also decide whether a run ends early.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from production.errors import PackproofError
from production.parallel.multi_token_feed import rolls_from_tables
from production.tokens.fingerprint import fingerprint_tokenizer
from production.training.admission import reasons_against
from production.training.certificate import check_certificate
from production.training.checkpoint.folders import HeldFolders, held_folders
from production.training.checkpoint.manifest import Manifest
from production.training.config import Job, multi_token_depths, sizes
from production.training.config.checks.run import METRICS
from production.training.data.batch_dump import dump
from production.training.data.batch_stream import BatchStream, StepBatch
from production.training.data.tokenizer import vocabulary_size
from production.training.distributed.launch import Launched, launched, world_size
from production.training.distributed.orphan import LAUNCHER_GONE, outliving_no_launcher
from production.training.engine import Stepped
from production.training.layout_change import check_going_on
from production.training.metrics.flops import peak_tflops, work_of
from production.training.metrics.loggers import Loggers, Record, Value
from production.training.metrics.progress import RunProgress
from production.training.metrics.router_losses import router_loss_names
from production.training.metrics.step_metrics import FlopsOf, Group, StepMetrics, Timing
from production.training.metrics.step_numbers import StepNumbers
from production.training.metrics.summary import close_run
from production.training.metrics.timers import Event
from production.training.resume import build, check_same, checkpoints_of, found_checkpoint
from production.training.run_identity import identity
from production.training.run_record import open_run_loggers, run_name
from production.training.shutdown import Reason, Shutdown, graceful_shutdown, length_reached, nothing_left, stop_reason
from production.training.verdicts import left_out, not_finite, nothing_trained

TRAINING, VALIDATION = METRICS
KEPT = 1000
"""Steps whose numbers stay in memory."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run, the same on all ranks."""

    step: int
    """Steps taken since the beginning of the job."""
    consumed_samples: int
    """Rows consumed by all of those steps."""
    reason: Reason
    """Reason of the end; a loss that is not finite raises NotFinite instead."""
    numbers: tuple[StepNumbers, ...]
    """Numbers of this run's last steps, KEPT at most; the run's records hold all steps."""


def run(job: Job) -> Outcome:
    """Train as the job says, in the world that torchrun started.

    Raises PackproofError, before any model is built, for a refused job.
    """
    for reason in reasons_against(job, world_size()):
        raise reason
    layout = sizes(job)
    with (
        # Outermost: torchrun sends SIGTERM to the ranks that are left while they find out which one is gone.
        graceful_shutdown() as asked,
        outliving_no_launcher(asked, timeout_seconds=job.cluster.timeout_seconds),
        launched(
            layout,
            device=job.cluster.device,
            timeout_seconds=job.cluster.timeout_seconds,
            seed=job.sft.seed,
            deterministic=job.cluster.deterministic,
        ) as rank,
        rolls_from_tables(),
        held_folders(job) as held,
    ):
        return _Run(job, rank, asked, held).run()


class _Run:
    def __init__(self, job: Job, rank: Launched, asked: list[str], held: HeldFolders) -> None:
        self._asked, self._held = asked, held
        self._job, self._rank, self._place = job, rank, rank.place
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._checkpoints = checkpoints_of(job)
        self._step = 0
        self._consumed = 0
        self._trained_tokens = 0
        self._skipped_in_validation = 0
        self._measured: dict[str, float] = {}
        self._numbers: deque[StepNumbers] = deque(maxlen=KEPT)
        self._pending: dict[int, int] = {}  # steps that are not reported yet, with what was consumed before

    def run(self) -> Outcome:
        job, found = self._job, found_checkpoint(self._job, self._checkpoints)
        if found is not None:
            self._step, self._consumed = found[1].step, found[1].consumed_samples
            self._measured = {name: value for name, value in found[1].metrics.items() if value is not None}
            # Of a checkpoint that does not say it, a token was trained: its run went on for long without this rule.
            self._trained_tokens = 1 if found[1].trained_tokens is None else found[1].trained_tokens
        self._name = run_name(None if found is None else found[1])
        self._held.name_run(self._name)
        with BatchStream(job, self._place, consumed_samples=self._consumed) as feed:
            self._stream = feed
            check_certificate(job, feed.tokenizer, self._place.world_size)
            vocabulary = vocabulary_size(job, feed.tokenizer)
            self._identity = identity(
                job,
                feed.identity(),
                world_size=self._place.world_size,
                vocab_size=vocabulary,
                run_steps=self._total_steps(),
            )
            check_same(self._identity, self._place)
            self._tokenizer = fingerprint_tokenizer(feed.tokenizer)
            is_resharded = found is not None and check_going_on(job, found[1], self._identity, self._tokenizer)
            self._shutdown = Shutdown(
                asked=self._asked,
                must_save_by=job.checkpointing.checkpoint_must_save_by,
                started=self._started,
            )
            # Before the model: a logger that cannot log in ends the job without having built one.
            with self._loggers() as self._log:
                self._engine = build(
                    job,
                    self._place,
                    vocab_size=vocabulary,
                    found=found,
                    run_steps=self._total_steps(),
                    is_resharded=is_resharded,
                )
                self._metrics = StepMetrics(
                    group=Group.of_parallel_state(),
                    depths=self._engine.settings.depths,
                    router_losses=router_loss_names(self._engine.config),
                    device=self._rank.device,
                )
                with self._bar() as self._progress:
                    self._say_where(found)
                    reason = self._train()
                    self._end(reason, self._why(reason))
        if self._place.rank == 0:
            close_run(Path(job.logger.log_dir), self._console)
        return Outcome(step=self._step, consumed_samples=self._consumed, reason=reason, numbers=tuple(self._numbers))

    def _say_where(self, found: tuple[Path, Manifest] | None) -> None:
        """Print which rows are passed over, and where the run continues."""
        for note in self._stream.token_notes:
            self._progress.say(f"note: {note.text}")
        for path in self._checkpoints.incomplete():
            self._progress.say(f"passed over {path}: it was not written to its end")
        if skipped := self._stream.skipped:
            self._progress.say(left_out("train", skipped))
        for told in self._stream.notes:
            self._progress.say(f"note: {told}")
        if found is None:
            if self._job.checkpointing.enabled:
                self._progress.say(
                    f"no checkpoint in {self._checkpoints.folder}: beginning at step 0 (run {self._name})"
                )
            return
        self._progress.say(f"going on from {found[0]} (step {self._step}, run {self._name})")
        if (total := self._total_steps()) is not None and self._step >= total:
            reason = self._reason_at_end()
            self._progress.say(nothing_left(self._step, total, reason=reason, why=self._why(reason)))

    def _train(self) -> Reason:
        sft, saving, total = self._job.sft, self._job.checkpointing, self._total_steps()
        if self._step == 0:
            owed = sft.val_at_start
        else:  # a signal may have ended the run before a validation that was due
            owed = _is_due(self._step, sft.val_period) or (self._step == total and sft.val_at_end)
        if owed and VALIDATION not in self._measured:
            self._validate()
        steps = self._stream.steps()
        self._ended = self._engine.clock.mark()
        while total is None or self._step < total:
            began = self._engine.clock.mark()
            fed = next(steps, None)
            if fed is None:
                break
            is_last = self._step + 1 == total
            validates = _is_due(self._step + 1, sft.val_period) or (is_last and sft.val_at_end)
            saves = saving.enabled and (is_last or _is_due(self._step + 1, saving.save_period))
            # A checkpoint of a loss that is not a number must not be written: what is pending is reported first.
            is_reported = validates or saves or is_last or _is_due(self._step + 1, self._job.logger.report_period)
            self._take(fed, began)
            why = self._report() if is_reported else None
            if is_last and not self._trained_tokens:
                refused = nothing_trained(self._job, self._step, self._consumed)
                self._end("nothing trained", refused.what)
                raise refused
            if validates and why is None:
                self._validate()
            if saves or (why and saving.enabled):
                self._save()
            if why is not None:
                return why
        return self._reason_at_end()

    def _reason_at_end(self) -> Reason:
        """Return the reason of a run that nothing ended early."""
        is_cut = self._stream.left_over > 0 and self._step == self._stream.total_steps != self._job.sft.max_num_steps
        return "data ended" if is_cut else "finished"

    def _why(self, reason: Reason) -> str:
        """Return what ended the run, for its last record and its summary."""
        size = self._job.policy.train_global_batch_size
        if reason == "data ended":
            return (
                f"the epoch's last {self._stream.left_over} rows fill no global batch of {size} (data.last_batch: stop)"
            )
        if reason == "finished":
            return length_reached(self._step, self._job.sft)
        limit = f"checkpointing.checkpoint_must_save_by: {self._job.checkpointing.checkpoint_must_save_by}"
        if LAUNCHER_GONE in self._asked:
            return "torchrun, which started this rank, is gone"
        return limit if reason == "time limit" else "a signal asked for it"

    def _end(self, reason: str, why: str) -> None:
        values: dict[str, Value] = {"reason": reason, "why": why, "consumed_samples": self._consumed}
        self._log.log(Record(kind="end", step=self._step, values=values))

    def _take(self, fed: StepBatch, began: Event) -> None:
        step = self._step + 1
        if step in self._job.logger.dump_batch_steps:
            folder = self._dump(step, fed)
            self._progress.say(f"dumped what each rank feeds in step {step}: {folder} (packproof-diff-row --fed)")
        self._pending[step] = self._consumed
        self._engine.padding = fed.padding
        stepped = self._engine.step(fed.microbatches)
        self._measured.pop(VALIDATION, None)  # it was of the weights before
        self._step, self._consumed = step, fed.consumed_samples
        clock = self._engine.clock
        before, self._ended = self._ended, clock.mark()
        timing = Timing(
            step_seconds=clock.between(before, self._ended),
            own_seconds=clock.between(began, stepped.first_wait),
            data_wait_seconds=fed.wait_seconds,
        )
        self._add(stepped, fed, timing)

    def _add(self, stepped: Stepped, fed: StepBatch, timing: Timing) -> None:
        for pair in stepped.report.losses:
            self._metrics.add_loss(pair[0], pair[1])
        if stepped.mtp_loss_sums is not None:
            self._metrics.add_multi_token(
                stepped.mtp_loss_sums,
                torch.full_like(stepped.mtp_loss_sums, stepped.microbatches),
                stepped.mtp_token_sums,
            )
        if stepped.mtp_accepted is not None:
            self._metrics.add_accepted(stepped.mtp_accepted)
        self._metrics.add_rows(fed.counts)
        self._metrics.end_step(
            step=self._step,
            learning_rate=stepped.learning_rate,
            gradient_norm=stepped.gradient_norm,
            consumed_samples=self._consumed,
            timing=timing,
            router_losses=stepped.router_losses,
        )

    def _report(self) -> Reason | None:
        """Report the steps since the last report; return why the run ends now, if it does. Collective over the world."""
        peak = self._job.logger.peak_teraflops or peak_tflops(self._rank.device)
        reported = self._metrics.report(flops_of=self._flops(), peak_tflops=peak, stop_vote=self._shutdown.stop_vote())
        for numbers in reported:
            self._measure(TRAINING, numbers.loss)
            self._trained_tokens += numbers.trained_tokens
            self._numbers.append(numbers)
            self._log.log(Record(kind="step", step=numbers.step, values=numbers.values()))
            self._progress.step(numbers)
            if not numbers.finite:
                self._stop_not_finite(numbers)
        self._pending.clear()
        return stop_reason(self._metrics.stop_vote)

    def _stop_not_finite(self, numbers: StepNumbers) -> None:
        try:
            folder = self._dump(numbers.step, self._stream.rebuild_step(self._pending[numbers.step]))
            fed = f"of which what each rank fed lies in {folder}"
        except PackproofError as error:
            fed = f"of which nothing could be dumped: {error.where}: {error.what}"
        refused = not_finite(numbers, fed)
        self._end("not finite", f"{refused.what} at step {numbers.step}")
        raise refused

    def _validate(self) -> None:
        metrics = StepMetrics(group=Group.of_parallel_state(), device=self._rank.device)
        batches = masked_out = 0
        for fed in self._stream.validation():
            masked_out += fed.conversations_masked_out
            self._engine.padding = fed.padding
            for pair in self._engine.evaluate(fed.microbatches).losses:
                metrics.add_loss(pair[0], pair[1])
            batches += 1
        losses = metrics.report_losses()
        self._measure(VALIDATION, losses.loss)
        skipped = self._stream.skipped_in_validation
        values: dict[str, Value] = {
            "validation_batches": batches,
            "all_masked": losses.all_masked,
            "rows_skipped": len(skipped),
            "conversations_masked_out": masked_out,
        }
        if self._skipped_in_validation != len(skipped):
            self._skipped_in_validation = len(skipped)
            self._progress.say(left_out("validation", skipped))
        if losses.loss is not None:
            values["validation_loss"] = losses.loss
        self._log.log(Record(kind="validation", step=self._step, values=values))
        told = "nothing in it is trained, so it has no loss" if losses.loss is None else f"loss {losses.loss:.4f}"
        too_long = f"; {masked_out} conversations were too long and trained nothing" if masked_out else ""
        self._progress.say(f"validation after step {self._step}: {told}{too_long}")
        self._ended = self._engine.clock.mark()

    def _measure(self, name: str, loss: float | None) -> None:
        """Keep the metric by which the best checkpoints are chosen; a validation without trained tokens measures
        nothing.
        """
        self._measured.pop(name, None)
        if loss is not None:
            self._measured[name] = loss

    def _save(self) -> None:
        began = time.perf_counter()
        path = self._checkpoints.save(
            self._engine,
            step=self._step,
            consumed_samples=self._consumed,
            fingerprint=self._identity,
            config=self._job.describe(),
            metrics=self._measured,
            run=self._name,
            trained_tokens=self._trained_tokens,
            skipped_rows=len(self._stream.skipped),
            tokenizer=self._tokenizer.to_json(),
            allowed=self._held.check,
        )
        self._progress.say(f"saved {path} ({time.perf_counter() - began:.1f} s)")
        self._ended = self._engine.clock.mark()

    def _dump(self, step: int, fed: StepBatch) -> Path:
        return dump(
            Path(self._job.logger.log_dir) / "dumps" / f"step_{step:08d}",
            fed,
            place=self._place,
            normalization=self._engine.settings.normalization,
            depths=multi_token_depths(self._job),
            provenance=self._stream.provenance(),
            locations=[self._stream.locate(sample) for sample in fed.samples],
        )

    def _total_steps(self) -> int | None:
        limits = [each for each in (self._job.sft.max_num_steps, self._stream.total_steps) if each is not None]
        return min(limits, default=None)

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
        return open_run_loggers(
            self._job,
            self._rank,
            run=self._name,
            finished_steps=self._step,
            skipped_rows=len(self._stream.skipped),
            notes={f"note_{note.kind}": note.text for note in self._stream.token_notes},
        )

    def _bar(self) -> RunProgress:
        return RunProgress(
            total_steps=self._total_steps() or 0,
            finished_steps=self._step,
            rank=self._place.rank,
            bar=self._job.logger.progress,
            console=self._console,
        )


def _is_due(step: int, period: int) -> bool:
    """Return whether a period ends at this step; a period of 0 never ends."""
    return period > 0 and step % period == 0
