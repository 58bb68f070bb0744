"""A run from its options to its outcome: the order of its jobs, what is saved, what makes it fail."""

from __future__ import annotations

import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from equivalence import divergences, jobs, model_cases
from equivalence.cases import RowCase
from equivalence.checks.divergences import label
from equivalence.corpus import store
from equivalence.errors import InputError, WorkerDiedError
from equivalence.generators import tokenizers
from equivalence.generators.fault_classes import classes
from equivalence.generators.models import FEATURES, VARIES
from equivalence.jobs import Job
from equivalence.plan import (
    SIZES,
    WHOLE_TOKENIZER,
    Size,
    corpus_jobs,
    cost,
    generated_jobs,
    layout_jobs,
    model_corpus_jobs,
    model_jobs,
    recorded_jobs,
    sample_jobs,
    spread,
    trainer_jobs,
)
from equivalence.pool import run_jobs
from equivalence.tally import MODEL_CHECKS, Differing, Tally
from equivalence.witnesses import Witness, witnesses
from equivalence.workers import MOST_WORKERS
from production.files.head import first_rows
from production.format_fit import format_misfits, misfit_text
from production.prompts import FORMATS

STOP_AFTER = 20
"""Differences after which a run stops: more of the same would only take time."""
STOP_AFTER_ERRORS = 3
MOST_TIES = 0.05
"""Of training steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run was asked for."""

    size: str
    seed: int
    shard: tuple[int, int]
    subjects: tuple[str, ...]
    workers: int
    sample: Path | None
    """None: no sample."""
    tokenizer: str
    pack_length: int
    out: Path
    rows: int | None
    """Generated rows, rounded up to whole rounds; None: what the size says."""
    models: bool = True
    """Whether training steps are run, in worlds of up to eight ranks."""


@dataclass(kw_only=True)
class Outcome:
    """What a run found."""

    options: Options
    witnesses: list[Witness]
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    done: float = 0.0
    """Work done and work planned, in rows' worth; None where the plan is endless."""
    planned: float | None = None
    interrupted: bool = False
    stopped: bool = False
    """Ended early because enough differed."""

    @property
    def unhit(self) -> list[str]:
        """What was aimed at and never hit, in words. Only a whole run is held to it."""
        if self.interrupted or self.stopped or self.tally.errors:
            return []
        missed = [
            f"class {name} in {prompt_format}: {count} rows aimed at it, none hit"
            for (name, prompt_format), count in sorted(self.tally.aimed.items())
            if not self.tally.hits[name, prompt_format]
        ]
        if self.options.shard == (1, 1):
            fired = {entry for (entry, _), count in self.tally.fired.items() if count}
            missed += [
                f"divergence {label(each)} never fired" for each in divergences.REGISTRY if label(each) not in fired
            ]
            if self.options.models:
                missed += [
                    f"training steps with {each}: none" for each in (*FEATURES, VARIES) if not self.tally.features[each]
                ]
        cases = sum(counts["cases"] for counts in self.tally.layouts.values())
        ties = sum(counts["ties"] for counts in self.tally.layouts.values())
        if ties > MOST_TIES * max(cases, 20):
            missed.append(f"{ties} of {cases} training steps could not be compared: a router's choice within rounding")
        return missed

    @property
    def exit_code(self) -> int:
        """0 equal, 1 a difference or a class that nothing hit, 2 a side that could not run, 130 interrupted."""
        if self.interrupted:
            return 130
        if self.tally.errors:
            return 2
        return 1 if self.tally.differences or self.unhit else 0

    @property
    def verdict(self) -> str:
        """One word for it."""
        names = {0: "equal", 2: "could not run", 130: "interrupted"}
        return names.get(self.exit_code, "different" if self.tally.differences else "not exercised")

    @property
    def generated(self) -> int:
        """Generated rows, without batches and divergences."""
        return sum(count for (check, _), count in self.tally.rows.items() if check == "rows")

    @property
    def rate(self) -> float:
        """Generated rows a second: drawn, built by all sides and compared, on all workers."""
        spent = self.tally.seconds["generated"] / self.options.workers
        return self.generated / spent if spent else 0.0


Progress = Callable[[str, Outcome], None]
"""Told the title of what runs, and the outcome so far."""


def execute(options: Options, progress: Progress) -> Outcome:
    """Run everything. InputError for what cannot be used, WitnessError for a side that cannot be loaded."""
    if options.workers < 1 or (options.rows is not None and options.rows < 1) or options.pack_length < 1:
        raise InputError("--workers, --rows and --pack-length count something: give at least 1")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {options.out} cannot be made a folder ({error.strerror}); choose another place"
        ) from error
    outcome = Outcome(options=options, witnesses=witnesses(options.subjects))
    size = SIZES[options.size]
    _preload(options, size)
    planned = _in_shard(_planned(options, size), options.shard)
    if options.rows is None and options.size == "long":
        endless: Iterator[Job] = planned
    else:
        listed = list(planned)
        outcome.planned, endless = sum(map(cost, listed)), iter(listed)
    started = time.perf_counter()
    try:
        # In batches, since an endless plan cannot be handed out at once.
        while not outcome.stopped and (some := list(itertools.islice(endless, 2000))):
            _run_some(some, options, outcome, progress, started)
    except KeyboardInterrupt:
        outcome.interrupted = True
    except WorkerDiedError as died:
        outcome.tally.errors.append(str(died))
    outcome.seconds = time.perf_counter() - started
    if not outcome.tally.rows and not outcome.interrupted and not outcome.tally.errors:
        index, count = options.shard
        outcome.tally.errors.append(f"nothing was compared: shard {index}/{count} holds no job; take fewer shards")
    return outcome


def _run_some(some: list[Job], options: Options, outcome: Outcome, progress: Progress, started: float) -> None:
    running = run_jobs(some, options.workers)
    try:
        for ended in running:
            if ended is not None:
                job, tally = ended
                tally.differences = [_saved(each, options) for each in tally.differences]
                outcome.tally.add(tally)
                outcome.done += cost(job)
                progress(job.title, outcome)
            else:
                progress("", outcome)
            outcome.seconds = time.perf_counter() - started
            if len(outcome.tally.differences) >= STOP_AFTER or len(outcome.tally.errors) >= STOP_AFTER_ERRORS:
                outcome.stopped = True
                break
    finally:
        running.close()  # type: ignore[attr-defined]  # a generator, which ends its workers


def _planned(options: Options, size: Size) -> Iterator[Job]:
    """Replay first: what once differed is the likeliest to differ, and the first to be mended."""
    fresh = [path for path, _ in store.replay(options.out / "corpus")]
    yield from corpus_jobs(fresh, options.subjects)
    if options.models:
        saved = [path for path, _ in model_cases.replay(options.out / "corpus" / "models")]
        yield from model_corpus_jobs(saved, options.subjects)
        yield from trainer_jobs(size, options.seed, options.subjects)
    yield Job(kind="smallest", subjects=options.subjects)
    if "megatron_lm" in options.subjects:  # its reader is one of the two
        yield Job(kind="files", subjects=options.subjects, paths=(str(options.out / "files"),))
    yield from recorded_jobs(options.subjects)
    yield from layout_jobs(size, options.seed, options.subjects)
    steps = list(model_jobs(size, options.seed, options.subjects)) if options.models else []
    rows = _row_jobs(options, size)
    if options.size == "long" and options.rows is None:
        yield from steps
        yield from rows  # without end
        return
    largest = [job for job in steps if job.layout is not None and job.layout.world_size == MOST_WORKERS]
    yield from spread(largest, list(rows))
    yield from steps[len(largest) :]


def _row_jobs(options: Options, size: Size) -> Iterator[Job]:
    if options.sample is not None:
        yield from sample_jobs(
            options.sample, count_rows(options.sample), options.tokenizer, options.pack_length, size, options.subjects
        )
    yield from generated_jobs(size, options.seed, options.subjects, rows=options.rows)


def _in_shard(planned: Iterator[Job], shard: tuple[int, int]) -> Iterator[Job]:
    index, count = shard
    return (job for number, job in enumerate(planned) if number % count == index - 1)


def _preload(options: Options, size: Size) -> None:
    """Load what workers share before they fork: no thread may have worked yet."""
    of_sample = [options.tokenizer, *([WHOLE_TOKENIZER] if size.whole_tokenizer else [])] if options.sample else []
    for name in (*tokenizers.RECIPES, "nemotron-mini", *of_sample):
        tokenizers.load(name)
    for name in options.subjects:
        jobs.subject(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of megatron-core, that CUDA and optional kernels are absent
        importlib.import_module("equivalence.layouts")
        importlib.import_module("equivalence.recorded_jobs")
        if options.models:
            importlib.import_module("equivalence.model_jobs").preload_models()
            importlib.import_module("equivalence.training_runs").preload_training()
    classes()


def count_rows(path: Path) -> int:
    """Lines of a packed file. InputError if it is not there, or empty."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a packed JSONL file with --sample, or --sample none")
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a packed JSONL file with --sample, or --sample none")
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    if not count:
        raise InputError(f"{path} is empty; give a packed JSONL file with --sample, or --sample none")
    next(first_rows(str(path), 1, "messages", skip=True), None)  # BadInput for what is no JSON lines
    return count


def sample_notes(sample: Path | None, tokenizer: str) -> list[str]:
    """Prompt formats that do not fit the sample's tokenizer: rows of them are compared all the same, and nothing else says so."""
    if sample is None:
        return []
    loaded = tokenizers.load(tokenizer)
    found = {name: format_misfits(loaded, name) for name in FORMATS}
    return [misfit_text(name, misfits) for name, misfits in found.items() if misfits]


def _saved(differing: Differing, options: Options) -> Differing:
    """Save the shrunk case of a difference where the next run replays it first."""
    if differing.case is None:
        return differing
    why = f"{differing.check}: {differing.left} and {differing.right} differ"
    if differing.check in MODEL_CHECKS:
        step = model_cases.ModelCase.from_json(differing.case)
        saved = model_cases.save(step, why, folder=options.out / "corpus" / "models")
        return replace(differing, path=str(saved), command=f"packproof-equivalence replay {saved}")
    case = RowCase.from_json(differing.case)
    path = store.save(case, why, folder=options.out / "corpus")
    asked = {jobs.subject(name).name: name for name in options.subjects}
    sides = [asked[side] for side in (differing.left, differing.right) if side in asked]
    # One side against a prediction: the others are its company on the screen.
    sides = sides if len(sides) == 2 else list(options.subjects)
    return replace(differing, path=str(path), command=jobs.diff_row_command(str(path), sides))
