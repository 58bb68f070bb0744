"""Train runs of twenty steps in the main job: a kind of model in several layouts, each against one run of the
reference where all layouts train alike.

A kind costs one reference run of five times twenty steps, a second or two of the processor for the smallest model, and each layout about as much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from equivalence.cases.result import CheckResult
from equivalence.cases.step import ModelCase, ModelShape
from equivalence.checks.runs.trainer import (
    check_distributed,
    check_trainer,
    equal_to_the_bit,
    expect_training,
    trains_alike,
    whole_weights,
)
from equivalence.generators.models import Layout, layouts
from equivalence.runner.counters import Tally, differing
from equivalence.runner.job import Job
from equivalence.runner.step_runs import MODULES, failed_case, plain_layout, seats
from equivalence.subjects.protocol import Subject
from equivalence.trainers.production_run import TRAIN, TrainingCase, TrainingOutcome
from equivalence.workers import CaseFailed, World, WorldNotOpened, open_world, preload
from production.parallel.sizes import ParallelSizes
from reference.trainer import Schedule
from reference.trainer_bounds import Trained

KINDS = ("dense", "experts", "hybrid", "float32")
"""`float32` holds clipping and the distributed optimizer to the reference and to the plain one; the others are in float64."""
RUN_SECONDS = 900.0
"""Seconds that a world may take for twenty steps: eight ranks of tp 8 took 341 s beside other work."""
FEW: dict[str, tuple[Layout, ...]] = {
    "dense": (Layout(sizes=ParallelSizes(tensor=2), data_size=1), Layout(sizes=ParallelSizes(context=2), data_size=1)),
    "experts": (Layout(sizes=ParallelSizes(expert=2), data_size=2),),
    "float32": (Layout(sizes=ParallelSizes(), data_size=2),),
}
"""What the smallest run trains in."""


def preload_training() -> None:
    """Import in this process what ranks need."""
    preload(*MODULES, "equivalence.trainers.production_run", "production.training.engine", "production.training.config")


def case_of(kind: str, layout: Layout, *, ranks: int, seed: int) -> TrainingCase:
    """Return the run of a kind in a layout of at most `ranks` ranks: the model fits all of them, so it is the same in all."""
    unit = 2 * max(ranks, 2)
    wide = max(ranks, 2)
    is_moe = kind == "experts"
    pattern = ("*E" if is_moe else "*-") * wide if kind == "hybrid" else ""
    shape = ModelShape(
        architecture="hybrid" if kind == "hybrid" else "gpt",
        layers=wide,
        pattern=pattern,
        hidden_size=4 * wide,
        heads=wide,
        query_groups=wide,
        ffn_hidden_size=4 * wide,
        vocab_size=24 if wide < 8 else 32,
        experts=wide if is_moe else 0,
        depths=0 if is_moe else 1,
    )
    return TrainingCase(
        model=ModelCase(
            shape=shape,
            sizes=layout.sizes,
            data_size=layout.data_size,
            rows=tuple((unit, unit) if row % 2 else (2 * unit,) for row in range(wide)),
            masked=tuple((0.9, 0.4)[row % 2] for row in range(wide)),
            normalization={"experts": "global_valid_tokens", "hybrid": "mean_of_means"}.get(kind, "per_token"),
            mtp_weights="rank" if kind == "hybrid" else "rows",
            seed=seed,
        ),
        schedule=_SCHEDULES[(KINDS.index(kind) + seed) % len(_SCHEDULES)],
        precision="float32" if kind == "float32" else "float64",
        clip_gradient=0.5 if kind == "float32" else 0.0,
    )


_SCHEDULES = (
    Schedule(max_lr=1e-2, min_lr=1e-3, warmup_steps=3, decay_steps=20, style="cosine", weight_decay=0.1),
    Schedule(max_lr=1e-2, warmup_steps=2, decay_steps=15, style="linear", weight_decay=0.1),
    Schedule(max_lr=1e-2, min_lr=1e-3, decay_steps=18, style="WSD", last_style="minus_sqrt", last_steps=6, weight_decay=0.2),
    Schedule(
        max_lr=1e-2, init_lr=1e-3, warmup_steps=4, decay_steps=30, style="inverse-square-root",
        weight_decay=0.0, end_weight_decay=0.3, weight_decay_style="cosine",
    ),
    Schedule(max_lr=5e-3, decay_steps=21, weight_decay=0.1),
)  # fmt: skip


def layouts_of(job: Job) -> list[Layout]:
    """Return the layouts that a job trains in; `first` is the number of ranks, 0 for the few of the smallest run."""
    kind = job.aim or ""
    if not job.first:
        return list(FEW[kind])
    found = layouts(job.first)
    if kind != "experts":
        return [each for each in found if each.sizes.expert == 1]
    # Without expert parallelism the model is one more for the others to do, and costs what they do.
    return [each for each in found if each.sizes.expert > 1 or each.world_size == 1]


def run_drawn(job: Job, tally: Tally) -> None:
    """Train a kind in all layouts of a job, up to the first that differs; what differs is a case that can be replayed."""
    found, ranks = layouts_of(job), job.first
    ranks = ranks or max(each.world_size for each in found)
    shared: Trained | None = None
    for layout in found:
        case = case_of(job.aim or "", layout, ranks=ranks, seed=job.seed % 2**31)
        case = dataclasses.replace(case, origin=f"{job.title}: {layout.name}")
        results, shared = check_run(case, shared if trains_alike(case) else None)
        for each in results:
            tally.count(each, "any")
            tally.differences += differing(each, prompt_format="any", where=case.origin, case=case.to_json())
        if not all(each.equal for each in results):
            return


def check_saved(case: TrainingCase, sides: Sequence[Subject]) -> list[CheckResult]:
    """Replay a saved run, whoever builds rows."""
    del sides
    preload_training()
    return check_run(case)[0]


def check_run(case: TrainingCase, shared: Trained | None = None) -> tuple[list[CheckResult], Trained | None]:
    """Train a case in its layout and check it; `shared` is the reference's run, where an earlier layout trained alike. Returns it."""
    enter, entry = plain_layout(case.model.sizes)
    size = case.model.world_size
    try:
        with seats(size), open_world(size, enter=enter, entry=entry) as world:
            outcomes = _trained(case, world)
            if shared is None:
                shapes = {name: tuple(each.shape) for name, each in whole_weights(outcomes).items()}
                shared = expect_training(case, shapes)
            results = [check_trainer(case, outcomes, shared)]
            if case.precision == "float32":
                results += _distributed(case, outcomes, shared, world)
    except (CaseFailed, WorldNotOpened) as failed:
        results = [dataclasses.replace(failed_case(case.model, failed.failure), check="trainer")]
    return results, shared


def _distributed(
    case: TrainingCase, plain: Sequence[TrainingOutcome], expected: Trained, world: World
) -> Iterator[CheckResult]:
    """Check the distributed optimizer with clipping, against the reference and the plain one; without clipping where both are equal to the bit."""
    outcomes = _trained(dataclasses.replace(case, is_distributed=True), world)
    yield check_trainer(case, outcomes, expected)
    yield check_distributed(case, plain, outcomes, expected)
    free = dataclasses.replace(case, clip_gradient=0.0)
    if equal_to_the_bit(free):
        one, other = (_trained(dataclasses.replace(free, is_distributed=each), world) for each in (False, True))
        yield check_distributed(free, one, other)


def _trained(case: TrainingCase, world: World) -> list[TrainingOutcome]:
    return world.run(TRAIN, case, deadline_s=RUN_SECONDS)
