"""Take a run from its options to its outcome: order its jobs, save cases, and decide whether the run fails."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from equivalence.cases import store
from equivalence.cases.row import RowCase
from equivalence.errors import InputError, WorkerDiedError
from equivalence.generators import tokenizers
from equivalence.generators.faults.registry import classes
from equivalence.runner import job_runners, known
from equivalence.runner.alone import Replayer, replayer
from equivalence.runner.counters import Tally
from equivalence.runner.first_look import WITHOUT, first_jobs, looking
from equivalence.runner.job import Job
from equivalence.runner.outcome import Options, Outcome
from equivalence.runner.own_settings import own_settings
from equivalence.runner.plan import (
    SIZES,
    WHOLE_TOKENIZER,
    Size,
    corpus_jobs,
    cost,
    generated_jobs,
    layout_jobs,
    model_jobs,
    own_jobs,
    recorded_jobs,
    sample_jobs,
    spread,
    trainer_jobs,
    whole_run_jobs,
)
from equivalence.runner.pool import run_jobs
from equivalence.runner.shown import enough, show
from equivalence.runner.witnesses import witnesses
from equivalence.workers import MOST_WORKERS
from production.library_warnings import quiet_libraries
from production.tokens.format_fit import format_misfits, misfit_text
from production.tokens.prompts import FORMATS
from reference.semantics import PRESETS

Progress = Callable[[str, Outcome], None]
"""Told the title of what runs, and the outcome so far."""


def execute(options: Options, progress: Progress) -> Outcome:
    """Run everything. InputError for what cannot be used, WitnessError for a side that cannot be loaded."""
    if options.workers < 1 or any(each is not None and each < 1 for each in (options.rows, options.pack_length)):
        raise InputError("--workers, --rows and --pack-length must be at least 1")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {options.out} cannot be made a folder ({error.strerror}); choose another place"
        ) from error
    own = None
    if options.sample is not None:
        own = own_settings(options.sample, pack_length=options.pack_length, restriction=options.restriction)
    outcome = Outcome(
        options=options, witnesses=witnesses(tuple(name for name in options.subjects if name != WITHOUT)), own=own
    )
    size = SIZES[options.size]
    for name in _tokenizers_of(options, size):
        tokenizers.load(name)

    def looked(job: Job, tally: Tally) -> None:
        for each in tally.differences:
            show(each, job, outcome, None)
        tally.differences = []
        outcome.tally.add(tally)
        progress(job.title, outcome)

    with looking(_first_jobs(outcome), looked) as done:
        outcome.witnesses = witnesses(options.subjects)
        _preload(options)
    outcome.stopped = enough(outcome)
    asked = (
        job for job in _planned(outcome, size) if job not in done and (options.job is None or options.job in job.title)
    )
    planned = _in_shard(asked, options.shard)
    if options.rows is None and options.size == "long":
        endless: Iterator[Job] = planned
    else:
        listed = list(planned)
        outcome.planned, endless = sum(map(cost, listed)), iter(listed)
    for name in options.subjects:
        job_runners.release(name)
    known.begin()
    started = time.perf_counter()
    with replayer([job_runners.subject(name) for name in options.subjects]) as alone:
        try:
            # In batches, since an endless plan cannot be handed out at once.
            while not outcome.stopped and (some := list(itertools.islice(endless, 2000))):
                _run_some(some, outcome, progress, started, alone)
        except KeyboardInterrupt:
            outcome.interrupted = True
        except WorkerDiedError as died:
            outcome.tally.errors.append(str(died))
    known.end()
    for name in options.subjects:
        job_runners.forget(name)
    outcome.seconds = time.perf_counter() - started
    if not outcome.tally.rows and not outcome.interrupted and not outcome.tally.errors:
        index, count = options.shard
        outcome.tally.errors.append(
            f"nothing was compared: shard {index}/{count} holds no such job, or no two sides take what it holds; take fewer shards, "
            "or restrict less"
        )
    return outcome


def _run_some(some: list[Job], outcome: Outcome, progress: Progress, started: float, alone: Replayer) -> None:
    running = run_jobs(some, outcome.options.workers)
    try:
        for ended in running:
            if ended is not None:
                job, tally = ended
                for each in tally.differences:
                    show(each, job, outcome, alone)
                tally.differences = []
                outcome.tally.add(tally)
                outcome.done += cost(job)
                progress(job.title, outcome)
            else:
                progress("", outcome)
            outcome.seconds = time.perf_counter() - started
            if enough(outcome):
                outcome.stopped = True
                break
    finally:
        running.close()  # type: ignore[attr-defined]  # a generator, which ends its workers


def _first_jobs(outcome: Outcome) -> list[Job]:
    """Return the jobs of a first look; a part of a plan has none, since it did not ask for a look."""
    options = outcome.options
    if options.job is not None or options.shard != (1, 1):
        return []
    has_recorded = options.restriction.is_any and options.holds_production
    return list(first_jobs(outcome.own, options.tokenizer, options.subjects, has_recorded=has_recorded))


def _planned(outcome: Outcome, size: Size) -> Iterator[Job]:
    """Yield first what tells most in least time: saved cases, the file's rows in their own settings, one-rank steps,
    generated rows.
    """
    options, own = outcome.options, outcome.own
    subjects, taken = options.subjects, options.restriction
    runs_steps = options.models and options.holds_production
    if not options.holds_production:
        why = "--rows-only" if options.rows_only else "they hold production, which is not among the subjects"
        outcome.left_out.append(f"checks of data, training steps and runs: {why}")
    yield from corpus_jobs(_saved_cases(outcome, ["rows", *(["data"] if options.holds_production else [])]), subjects)
    if own is not None:
        yield from own_jobs(own, options.tokenizer, subjects)
    if taken.is_any:
        outcome.left_out.append(
            "smallest rows of registered divergences, and recorded outcomes: each has settings of its own"
        )
    else:
        yield Job(kind="smallest", subjects=subjects)
    if taken.semantics:
        outcome.left_out.append("walks between presets: --semantics restricts them")
    steps = list(model_jobs(size, options.seed, subjects)) if runs_steps else []
    generated = generated_jobs(size, options.seed, subjects, rows=options.rows, restriction=taken)
    if options.size == "long" and options.rows is None:
        yield from _recorded(options)
        yield from _of_production(outcome, size, steps)
        yield from _other_rows(outcome, size)
        yield from generated  # without end
        return
    aimed, others = _parted(generated)
    one_rank, largest, between = _by_ranks(steps)
    yield from one_rank
    if not taken.is_any:
        yield from _recorded(options)
    yield from spread(list(layout_jobs(size, options.seed, subjects)) if options.holds_production else [], aimed)
    yield from spread(largest, [*others, *_other_rows(outcome, size)])
    yield from _of_production(outcome, size, between, layouts=False)


def _of_production(outcome: Outcome, size: Size, steps: list[Job], *, layouts: bool = True) -> Iterator[Job]:
    """Yield saved steps and runs, runs of twenty steps, training steps, and with `layouts` checks of data first."""
    options = outcome.options
    if not options.holds_production:
        return
    if layouts:
        yield from layout_jobs(size, options.seed, options.subjects)
    if options.models:
        yield from corpus_jobs(_saved_cases(outcome, ["models", "runs"]), options.subjects)
        yield from trainer_jobs(size, options.seed, options.subjects)
        yield from whole_run_jobs(size, options.seed, options.subjects)
        yield from steps


def _recorded(options: Options) -> Iterator[Job]:
    """Yield jobs for recorded outcomes: all if production is a subject, else only rows, which any subject builds."""
    return (job for job in recorded_jobs(options.subjects) if options.holds_production or job.aim in PRESETS)


def _saved_cases(outcome: Outcome, kinds: list[str]) -> list[Path]:
    """Return fresh cases, then shipped ones, of these kinds; rows of settings that the run does not take are left out and counted."""
    taken, found, left_out = outcome.options.restriction, [], 0
    for path, case in store.replay(outcome.options.out / "corpus", kinds=kinds):
        if isinstance(case, RowCase) and not taken.takes(case.settings):
            left_out += 1
        else:
            found.append(path)
    if left_out:
        outcome.left_out.append(
            f"{left_out} saved {'case' if left_out == 1 else 'cases'} of other formats, cp or semantics"
        )
    return found


def _other_rows(outcome: Outcome, size: Size) -> Iterator[Job]:
    """Yield rows of the sample in other settings, and file readers."""
    options = outcome.options
    if outcome.own is not None:
        yield from sample_jobs(outcome.own, options.tokenizer, size, options.subjects, restriction=options.restriction)
    if "megatron_lm" in options.subjects and not options.rows_only:  # its reader is one of the two
        yield Job(kind="files", subjects=options.subjects, paths=(str(options.out / "files"),))


def _parted(generated: Iterator[Job]) -> tuple[list[Job], list[Job]]:
    """Return rows aimed at fault classes, and all others."""
    listed = list(generated)
    return [job for job in listed if job.aim], [job for job in listed if not job.aim]


def _by_ranks(steps: list[Job]) -> tuple[list[Job], list[Job], list[Job]]:
    """Return training steps of one rank, of the most ranks, and between."""
    ranks = {id(job): job.layout.world_size if job.layout else 1 for job in steps}
    one_rank = [job for job in steps if ranks[id(job)] == 1]
    largest = [job for job in steps if ranks[id(job)] == MOST_WORKERS]
    return one_rank, largest, [job for job in steps if 1 < ranks[id(job)] < MOST_WORKERS]


def _in_shard(planned: Iterator[Job], shard: tuple[int, int]) -> Iterator[Job]:
    index, count = shard
    return (job for number, job in enumerate(planned) if number % count == index - 1)


def _tokenizers_of(options: Options, size: Size) -> tuple[str, ...]:
    of_sample = [options.tokenizer, *([WHOLE_TOKENIZER] if size.whole_tokenizer else [])] if options.sample else []
    return (*tokenizers.RECIPES, "nemotron-mini", *of_sample)


def _preload(options: Options) -> None:
    """Import what workers share before they fork: no thread may have worked yet."""
    with quiet_libraries():
        if options.holds_production:
            importlib.import_module("equivalence.runner.layout_jobs")
        if not options.restriction.is_any:  # recorded outcomes have settings of their own; megatron-core takes seconds
            importlib.import_module("equivalence.runner.recorded_jobs")
        if options.models:
            importlib.import_module("equivalence.runner.step_jobs").preload_models()
            importlib.import_module("equivalence.runner.trainer_jobs").preload_training()
            importlib.import_module("equivalence.runner.whole_run_jobs").preload_whole_runs()
    classes()


def sample_notes(sample: Path | None, tokenizer: str) -> list[str]:
    """Return prompt formats that do not fit the sample's tokenizer: rows of them are compared all the same, and nothing else says so."""
    if sample is None:
        return []
    loaded = tokenizers.load(tokenizer)
    found = {name: format_misfits(loaded, name) for name in FORMATS}
    return [misfit_text(name, misfits) for name, misfits in found.items() if misfits]
