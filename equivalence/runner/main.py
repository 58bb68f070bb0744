"""Take a run from its options to its outcome: order its jobs, save cases, and decide whether the run fails."""

from __future__ import annotations

import importlib
import itertools
import shlex
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from equivalence.cases import store
from equivalence.cases.row import RowCase
from equivalence.checks.rows.divergences import label
from equivalence.divergences import registry
from equivalence.errors import InputError, WorkerDiedError
from equivalence.generators import tokenizers
from equivalence.generators.drafts import PRESET_NAMES
from equivalence.generators.faults.registry import classes
from equivalence.generators.models import FEATURES, VARIES
from equivalence.runner import jobs
from equivalence.runner.alone import Replayer, replayer
from equivalence.runner.counters import Differing, Tally
from equivalence.runner.job import Job
from equivalence.runner.own_settings import OwnSettings, own_settings
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
from equivalence.runner.restriction import EVERYTHING, Restriction
from equivalence.runner.witnesses import Witness, witnesses
from equivalence.workers import MOST_WORKERS
from production.tokens.format_fit import format_misfits, misfit_text
from production.tokens.prompts import FORMATS

STOP_AFTER = 20
"""Differences after which a run stops: more of the same would only take time."""
STOP_AFTER_ERRORS = 3
MOST_TIES = 0.05
"""Of training steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run."""

    size: str
    seed: int
    shard: tuple[int, int]
    subjects: tuple[str, ...]
    workers: int
    sample: Path | None
    """None: no sample."""
    tokenizer: str
    pack_length: int | None
    """Of the sample; None: what its manifest says."""
    out: Path
    rows: int | None
    """Generated rows, rounded up to whole rounds; None: what the size says."""
    models: bool = True
    """Whether training steps are run, in worlds of up to eight ranks."""
    restriction: Restriction = EVERYTHING
    """Formats, context parallel sizes and semantics that rows are built in."""

    job: str | None = None
    """Only jobs whose title holds this."""

    @property
    def is_whole(self) -> bool:
        """Return whether no part of the plan was left to others, so that everything aimed at must have been hit."""
        return self.shard == (1, 1) and not self.restriction.is_any and self.job is None

    @property
    def holds_production(self) -> bool:
        """Return whether the run is about production at all: checks of data, steps and runs hold it, whoever builds
        rows.
        """
        return "production" in self.subjects


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a run."""

    options: Options
    witnesses: list[Witness]
    tally: Tally = field(default_factory=Tally)
    own: OwnSettings | None = None
    """The packed file and its own settings."""
    left_out: list[str] = field(default_factory=list)
    """Parts of the plan that this run leaves out, in words."""
    seconds: float = 0.0
    done: float = 0.0
    """Work done and work planned, in rows' worth; None where the plan is endless."""
    planned: float | None = None
    interrupted: bool = False
    stopped: bool = False
    """Ended early because enough differed."""

    @property
    def unhit(self) -> list[str]:
        """Return in words what was aimed at and never hit. Only a whole run must hit everything."""
        if self.interrupted or self.stopped or self.tally.errors or self.options.restriction.is_any:
            return []
        missed = [
            f"class {name} in {prompt_format}: {count} rows aimed at it, none hit"
            for (name, prompt_format), count in sorted(self.tally.aimed.items())
            if not self.tally.hits[name, prompt_format]
        ]
        if self.options.is_whole:
            fired = {entry for (entry, _), count in self.tally.fired.items() if count}
            missed += [
                f"divergence {label(each)} never fired" for each in registry.REGISTRY if label(each) not in fired
            ]
            if self.options.models and self.options.holds_production:
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
    if options.workers < 1 or any(each is not None and each < 1 for each in (options.rows, options.pack_length)):
        raise InputError("--workers, --rows and --pack-length count something: give at least 1")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {options.out} cannot be made a folder ({error.strerror}); choose another place"
        ) from error
    own = None
    if options.sample is not None:
        own = own_settings(options.sample, pack_length=options.pack_length, restriction=options.restriction)
    outcome = Outcome(options=options, witnesses=witnesses(options.subjects), own=own)
    size = SIZES[options.size]
    _preload(options, size)
    asked = (job for job in _planned(outcome, size) if options.job is None or options.job in job.title)
    planned = _in_shard(asked, options.shard)
    if options.rows is None and options.size == "long":
        endless: Iterator[Job] = planned
    else:
        listed = list(planned)
        outcome.planned, endless = sum(map(cost, listed)), iter(listed)
    started = time.perf_counter()
    with replayer([jobs.subject(name) for name in options.subjects]) as alone:
        try:
            # In batches, since an endless plan cannot be handed out at once.
            while not outcome.stopped and (some := list(itertools.islice(endless, 2000))):
                _run_some(some, outcome, progress, started, alone)
        except KeyboardInterrupt:
            outcome.interrupted = True
        except WorkerDiedError as died:
            outcome.tally.errors.append(str(died))
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
                tally.differences = [_saved(each, outcome, alone) for each in tally.differences]
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


def _planned(outcome: Outcome, size: Size) -> Iterator[Job]:
    """Yield first what tells most in least time: saved cases, the file's rows in their own settings, one-rank steps,
    generated rows.
    """
    options, own = outcome.options, outcome.own
    subjects, taken = options.subjects, options.restriction
    runs_steps = options.models and options.holds_production
    if not options.holds_production:
        outcome.left_out.append(
            "checks of data, training steps and runs: they hold production, which is not among the subjects"
        )
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
    return (job for job in recorded_jobs(options.subjects) if options.holds_production or job.aim in PRESET_NAMES)


def _saved_cases(outcome: Outcome, kinds: list[str]) -> list[Path]:
    """Return fresh cases, then shipped ones, of these kinds; rows of settings that the run does not take are left out and counted."""
    taken, found, left_out = outcome.options.restriction, [], 0
    for path, case in store.replay(outcome.options.out / "corpus", kinds=kinds):
        if isinstance(case, RowCase) and not taken.takes(case.settings):
            left_out += 1
        else:
            found.append(path)
    if left_out:
        outcome.left_out.append(f"{left_out} saved cases of other formats, cp or semantics")
    return found


def _other_rows(outcome: Outcome, size: Size) -> Iterator[Job]:
    """Yield rows of the sample in other settings, and file readers."""
    options = outcome.options
    if outcome.own is not None:
        yield from sample_jobs(outcome.own, options.tokenizer, size, options.subjects, restriction=options.restriction)
    if "megatron_lm" in options.subjects:  # its reader is one of the two
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


def _preload(options: Options, size: Size) -> None:
    """Load what workers share before they fork: no thread may have worked yet."""
    of_sample = [options.tokenizer, *([WHOLE_TOKENIZER] if size.whole_tokenizer else [])] if options.sample else []
    for name in (*tokenizers.RECIPES, "nemotron-mini", *of_sample):
        tokenizers.load(name)
    for name in options.subjects:
        jobs.subject(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of megatron-core, that CUDA and optional kernels are absent
        importlib.import_module("equivalence.runner.layout_jobs")
        importlib.import_module("equivalence.runner.recorded_jobs")
        if options.models:
            importlib.import_module("equivalence.runner.step_jobs").preload_models()
            importlib.import_module("equivalence.runner.run_jobs").preload_training()
            importlib.import_module("equivalence.runner.whole_run_jobs").preload_whole_runs()
    classes()


def sample_notes(sample: Path | None, tokenizer: str) -> list[str]:
    """Return prompt formats that do not fit the sample's tokenizer: rows of them are compared all the same, and nothing else says so."""
    if sample is None:
        return []
    loaded = tokenizers.load(tokenizer)
    found = {name: format_misfits(loaded, name) for name in FORMATS}
    return [misfit_text(name, misfits) for name, misfits in found.items() if misfits]


def _saved(differing: Differing, outcome: Outcome, alone: Replayer) -> Differing:
    """Save the shrunk case of a difference where the next run replays it first, and replay the first of a kind alone."""
    if differing.case is None:
        return differing
    options = outcome.options
    case = store.parse(differing.case)
    if not any(_is_alike(each, differing) for each in outcome.tally.differences):
        differing = replace(differing, alone=alone(differing.case), together=_together(case, differing, options))
    if differing.path is not None:  # it was replayed from there
        return differing
    why = f"{differing.check}: {differing.left} and {differing.right} differ"
    path = store.save(case, why, folder=options.out / "corpus")
    return replace(differing, path=str(path), command=store.command(case, path, _sides(differing, case, options)))


def _together(case: store.Case, differing: Differing, options: Options) -> str:
    """Return the command that draws a case again with those before it."""
    title = case.origin or differing.where
    words = ["python", "-m", "equivalence", "run", "--size", options.size, "--seed", str(options.seed)]
    return shlex.join([*words, "--job", title, "--subjects", ",".join(options.subjects)])


def _sides(differing: Differing, case: store.Case, options: Options) -> list[str]:
    """Return the two sides that differ, as they were asked for; all, where one is a prediction or the case is no single row's."""
    asked = {jobs.subject(name).name: name for name in options.subjects}
    sides = [asked[side] for side in (differing.left, differing.right) if side in asked]
    return sides if len(sides) == 2 and store.is_single_row(case) else list(options.subjects)


def _is_alike(one: Differing, other: Differing) -> bool:
    """Return whether two differences are of one kind, so that one replay alone speaks for both."""
    return (one.check, one.left, one.right, one.first["class"], one.case is None) == (
        other.check, other.left, other.right, other.first["class"], other.case is None,
    )  # fmt: skip
