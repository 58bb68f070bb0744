"""Plan a run: its jobs in order, from a size, a seed and a shard, the same on any number of workers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from equivalence.checks.registry import CHECKS, names
from equivalence.errors import InputError
from equivalence.generators.drafts import PRESET_NAMES
from equivalence.generators.faults.registry import classes
from equivalence.generators.models import AIMS, layouts
from equivalence.runner.job import Job
from equivalence.runner.own_settings import OwnSettings
from equivalence.runner.restriction import EVERYTHING, Restriction
from equivalence.subjects.protocol import MEGATRON_PRESETS, PROMPT_FORMATS, RowSettings

CONTEXT_PARALLEL_SIZES = (1, 2, 3, 4)
LAYOUT_CHECKS = names("data")
HEAVY = {
    "online_microbatches": 0.2,
    "direct_vs_online": 0.2,
    "loss": 0.1,
    "online_loss": 0.2,
    "packed_files": 0.15,
    "loader": 0.05,
}
"""Checks of layouts that draw only this part of `Size.plain`: they follow each draw through all ranks and depths, or write files, 5 to 20 ms."""
NEVER_SMALL = ("packed_files", "loader")
"""Checks of layouts that Hypothesis does not draw for: each draw writes files or forks workers, and shrinking would take minutes."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Training steps in layouts of one number of ranks."""

    layouts: int | None = None
    """How many layouts, spread over all of them; None: every one."""
    models: int = 1
    """Cases of the check `models` for each layout."""
    others: int = 1
    """Cases of `leaks` for every other layout, and of `paths` for those between; of both where there are only a few layouts."""


FEW_LAYOUTS = 7


@dataclass(frozen=True, kw_only=True)
class Size:
    """Amount of work of a run."""

    rows_per_class: int
    """Generated rows for each fault class and format, of a class of weight 1."""
    rounds: int
    """How often, each time with other seeds."""
    free_rows: int
    """Generated rows of any class, for each format and round."""
    batches: int
    """Batches for each format and round."""
    divergences: int
    """Rows that walk between presets, for each format and round."""
    layouts: int
    """Rows that are cut, shifted, packed and divided by their tokens, for each check of layouts and each round: drawn by Hypothesis."""
    plain: int
    """The same drawn as plain random numbers; of the checks in HEAVY a part."""
    models: Mapping[int, Steps]
    """Training steps of models, by the number of ranks."""
    trainer: Mapping[str, tuple[int, ...]]
    """Runs of twenty steps: for each of `trainer_jobs.KINDS` the numbers of ranks whose layouts are all trained in; 0: a few of two ranks."""
    whole_runs: tuple[int, ...]
    """Whole runs of the training job on both paths: the numbers of ranks in whose layouts; 0: in dp 2 alone."""
    sample_witnessed: int
    """Rows of the packed sample for each format, cp and preset that Megatron-LM is a witness of, beside every row in its own settings."""
    sample_rows: int
    """The same for each other preset, of which Megatron-LM is no witness."""
    whole_tokenizer: bool
    """Whether the sample is also built with the real tokenizer of 131,072 ids, which takes seconds to load."""


SIZES = {
    "tiny": Size(
        rows_per_class=8,
        rounds=1,
        free_rows=50,
        batches=25,
        divergences=12,
        layouts=50,
        plain=950,
        models={1: Steps(models=6, others=3), 2: Steps(models=3), 4: Steps(), 8: Steps(layouts=8)},
        trainer={"dense": (0,), "experts": (0,), "float32": (0,)},
        whole_runs=(0,),
        sample_witnessed=2,
        sample_rows=1,
        whole_tokenizer=False,
    ),
    "standard": Size(
        rows_per_class=20,
        rounds=4,
        free_rows=200,
        batches=100,
        divergences=40,
        layouts=150,
        plain=3000,
        models={
            1: Steps(models=30, others=10),
            2: Steps(models=12, others=4),
            4: Steps(models=5, others=2),
            8: Steps(),
        },
        trainer={"dense": (1, 2), "experts": (2,), "hybrid": (2,), "float32": (2,)},
        whole_runs=(2,),
        sample_witnessed=30,
        sample_rows=8,
        whole_tokenizer=True,
    ),
    "long": Size(
        rows_per_class=40,
        rounds=1,
        free_rows=400,
        batches=200,
        divergences=100,
        layouts=300,
        plain=6000,
        models={
            1: Steps(models=60, others=20),
            2: Steps(models=40, others=10),
            4: Steps(models=20, others=5),
            8: Steps(models=10, others=3),
        },
        trainer={"dense": (1, 2, 4, 8), "experts": (1, 2, 4, 8), "hybrid": (1, 2, 4), "float32": (1, 2, 4)},
        whole_runs=(1, 2),
        sample_witnessed=240,
        sample_rows=32,
        whole_tokenizer=True,
    ),
}
"""On two idle cores: some three minutes, some twenty, and as many rounds as the asked-for rows need; training steps are two thirds of it."""


KINDS = {"layouts": "context_parallel", "own": "sample"}
"""Kinds of jobs that cost what a check of another name does."""
MODEL_COST = {1: 30.0, 2: 70.0, 4: 140.0, 8: 250.0}
"""Cost of an example of a training step by the number of ranks, in generated rows, to estimate the time left."""


def cost(job: Job) -> float:
    """Return a job's work in rows' worth."""
    if job.layout is not None:
        return MODEL_COST[job.layout.world_size] * job.examples
    check = CHECKS.get(KINDS.get(job.kind, job.kind))
    return check.cost * (job.examples + job.plain) if check is not None and check.cost else 50.0


def shard_of(text: str) -> tuple[int, int]:
    """Return `i/n` as numbers, i from 1. InputError says what is wrong."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise InputError(f"--shard {text}: give i/n with i from 1 to n, such as 1/4")
    return int(index), int(count)


def corpus_jobs(paths: Sequence[Path], subjects: tuple[str, ...]) -> list[Job]:
    """Return saved cases of any kind, some to a job."""
    return [Job(kind="corpus", subjects=subjects, paths=tuple(map(str, some))) for some in itertools.batched(paths, 5)]


WHOLE_TOKENIZER = "nemotron-like"


def own_jobs(own: OwnSettings, tokenizer: str, subjects: tuple[str, ...]) -> Iterator[Job]:
    """Yield every row of a packed file in its own settings, some to a job."""
    settings = own.settings
    for some in itertools.batched(range(own.rows), OWN_ROWS):
        yield _sample_job(own, settings, some[0], 1, len(some), tokenizer, subjects, is_own=True)


OWN_ROWS = 31
"""Rows of a job of `own_jobs`."""


def sample_jobs(
    own: OwnSettings, tokenizer: str, size: Size, subjects: tuple[str, ...], *, restriction: Restriction = EVERYTHING
) -> Iterator[Job]:
    """Yield some rows of the packed sample in each other format, cp and preset that the restriction takes."""
    presets = [*MEGATRON_PRESETS, *(preset for preset in PRESET_NAMES if preset not in MEGATRON_PRESETS)]
    presets += [name for name in restriction.semantics if name not in presets]
    sizes = [*CONTEXT_PARALLEL_SIZES, *restriction.context_parallel_sizes]
    place = 0
    for prompt_format, cp, preset in itertools.product(PROMPT_FORMATS, dict.fromkeys(sizes), presets):
        settings = replace(
            own.settings,
            prompt_format=prompt_format,
            context_parallel_size=cp,
            semantics=preset,
            pack_length=max(own.settings.pack_length - (own.settings.pack_length % (2 * cp) if cp > 1 else 0), 1),
        )
        if settings == own.settings or not restriction.takes(settings):
            continue
        if (prompt_format, preset) == ("default", "nemo-rl-direct"):  # which has no such format
            continue
        wanted = size.sample_witnessed if preset in MEGATRON_PRESETS else size.sample_rows
        count = min(own.rows, wanted)
        step = own.rows // count
        yield _sample_job(own, settings, place % step, step, count, tokenizer, subjects)
        if size.whole_tokenizer and tokenizer != WHOLE_TOKENIZER and preset in MEGATRON_PRESETS:
            count = min(own.rows, max(1, size.sample_witnessed // 4))
            step = own.rows // count
            yield _sample_job(own, settings, (place + 1) % step, step, count, WHOLE_TOKENIZER, subjects)
        place += 1


def _sample_job(
    own: OwnSettings,
    settings: RowSettings,
    first: int,
    step: int,
    count: int,
    tokenizer: str,
    subjects: tuple[str, ...],
    *,
    is_own: bool = False,
) -> Job:
    return Job(
        kind="sample",
        subjects=subjects,
        prompt_format=settings.prompt_format,
        context_parallel_size=settings.context_parallel_size,
        semantics=settings.semantics,
        pack_length=settings.pack_length,
        tokenizer=tokenizer,
        paths=(str(own.file),),
        first=first,
        step=step,
        examples=count,
        is_own=is_own,
    )


def generated_jobs(
    size: Size,
    seed: int,
    subjects: tuple[str, ...],
    *,
    rows: int | None = None,
    restriction: Restriction = EVERYTHING,
) -> Iterator[Job]:
    """Yield generated rows, batches and divergences of the formats taken, round by round; with `rows` as many rounds as they need.

    Rows that walk between presets are left out where semantics are restricted.
    """
    per_round = 0
    for number in itertools.count():
        if rows is None and number >= size.rounds:
            return
        if rows is not None and number and number * per_round >= rows:
            return
        for job in _round(size, f"{seed}/{number}", subjects, restriction):
            per_round += job.examples if number == 0 and job.kind == "rows" else 0
            yield job


LIGHT = 0.1
"""Classes of at most this weight may have a single row: one costs as much as a hundred others."""


def _round(size: Size, seed: str, subjects: tuple[str, ...], restriction: Restriction) -> Iterator[Job]:
    formats = [name for name in PROMPT_FORMATS if restriction.takes_format(name)]
    for each, prompt_format in itertools.product(classes().values(), formats):
        if each.applies(prompt_format):
            yield Job(
                kind="rows",
                subjects=subjects,
                prompt_format=prompt_format,
                aim=each.name,
                seed=_seed(seed, each.name, prompt_format),
                examples=max(3 if each.weight > LIGHT else 1, round(size.rows_per_class * each.weight)),
                restriction=restriction,
            )
    for prompt_format in formats:
        for kind, examples in (("rows", size.free_rows), ("batches", size.batches), ("divergences", size.divergences)):
            if kind == "divergences" and restriction.semantics:
                continue
            # Divergences cost some forty builds a row, so they come in small pieces.
            for number, some in enumerate(itertools.batched(range(examples), 6 if kind == "divergences" else 50)):
                yield Job(
                    kind=kind,
                    subjects=subjects,
                    prompt_format=prompt_format,
                    seed=_seed(seed, kind, prompt_format, str(number)),
                    examples=len(some),
                    restriction=restriction,
                )


RECORDED = {
    "packings": 2768,
    "partitions": 938,
    "batches": 60,
    "conversations": 53,
    "nemo-rl-direct": 1697,
    "megatron-lm-0.19": 435,
    "megatron-lm-main": 435,
    "megatron-lm-0.18": 435,
    "megatron-lm-0.17": 433,
}
"""Recorded outcomes by what they are held to (`recorded_jobs.run`), and how many there are."""
RECORDED_AT_ONCE = 700
"""Recorded outcomes of one job."""


def recorded_jobs(subjects: tuple[str, ...]) -> Iterator[Job]:
    """Yield every recorded outcome, in every size: some to a job."""
    for name, count in RECORDED.items():
        for first in range(0, count, RECORDED_AT_ONCE):
            examples = min(RECORDED_AT_ONCE, count - first)
            yield Job(kind="recorded", subjects=subjects, aim=name, first=first, examples=examples)


def layout_jobs(size: Size, seed: int, subjects: tuple[str, ...]) -> Iterator[Job]:
    """Yield jobs for cuts, depths and bins. They compare reference, production and megatron-core's own arithmetic, whatever subjects build rows."""
    for check, number in itertools.product(LAYOUT_CHECKS, range(size.rounds)):
        yield Job(
            kind="layouts",
            subjects=subjects,
            aim=check,
            seed=_seed(str(seed), "layouts", check, str(number)),
            examples=0 if check in NEVER_SMALL else size.layouts,
            plain=round(size.plain * HEAVY.get(check, 1)),
        )


def model_jobs(size: Size, seed: int, subjects: tuple[str, ...]) -> Iterator[Job]:
    """Yield training steps, a job for each layout, the most ranks first; like those of layouts, whoever builds rows."""
    for world_size in sorted(size.models, reverse=True):
        steps, found = size.models[world_size], layouts(world_size)
        wanted = len(found) if steps.layouts is None else min(steps.layouts, len(found))
        for number in range(wanted):
            layout = found[number * len(found) // wanted]
            both = len(found) <= FEW_LAYOUTS
            counts = (
                steps.models,
                steps.others if both or number % 2 == 0 else 0,
                steps.others if both or number % 2 == 1 else 0,
            )
            yield Job(
                kind="models",
                subjects=subjects,
                layout=layout,
                counts=counts,
                examples=sum(counts),
                first=number % len(AIMS),
                seed=_seed(str(seed), "models", layout.name),
            )


def trainer_jobs(size: Size, seed: int, subjects: tuple[str, ...]) -> Iterator[Job]:
    """Yield runs of twenty steps, a job for each kind of model and number of ranks."""
    for kind, ranks in size.trainer.items():
        for count in ranks:
            yield Job(
                kind="trainer",
                subjects=subjects,
                aim=kind,
                first=count,
                examples=1,
                seed=_seed(str(seed), "trainer", kind, str(count)),
            )


def whole_run_jobs(size: Size, seed: int, subjects: tuple[str, ...]) -> Iterator[Job]:
    """Yield whole runs of the training job, a job for each path and number of ranks."""
    for count, path in itertools.product(size.whole_runs, ("direct", "online")):
        yield Job(
            kind="whole_run",
            subjects=subjects,
            aim=path,
            first=count,
            examples=1,
            seed=_seed(str(seed), "whole_run", path, str(count)),
        )


def spread(few: Sequence[Job], many: Sequence[Job]) -> Iterator[Job]:
    """Yield the jobs of both, `few` at even distances, because a world of eight ranks leaves workers for jobs without ranks."""
    every = len(many) // max(len(few), 1) + 1
    left = iter(few)
    for number, job in enumerate(many):
        if number % every == 0:
            yield from itertools.islice(left, 1)
        yield job
    yield from left


def _seed(*parts: str) -> int:
    """Return a seed of its own for each job, the same everywhere."""
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:6], "big")
