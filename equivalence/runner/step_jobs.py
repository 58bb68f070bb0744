"""Draw, replay and count training steps by layout in the main job, and shrink steps that differ."""

from __future__ import annotations

import contextlib
import dataclasses

from equivalence.cases import store
from equivalence.cases.step import CHECKS, ModelCase
from equivalence.generators.models import AIMS, VARIES, Layout, draw_cases, features
from equivalence.runner import shrink
from equivalence.runner.counters import Tally, differing
from equivalence.runner.job import Job
from equivalence.runner.plan import SIZES, model_jobs
from equivalence.runner.step_runs import WITNESS, Entered, Ran, check_case, plain_layout, preload_models, run_layout
from equivalence.trainers import megatron_step

__all__ = ["cases_of", "preload_models", "run_drawn", "run_saved", "tiny_cases", "witness_facts"]


def tiny_cases(layout: Layout, *, seed: int = 0) -> list[ModelCase]:
    """Return training-step cases that `--size tiny` runs for a layout; empty if that size skips the layout."""
    return [
        case for job in model_jobs(SIZES["tiny"], seed, ()) if job.layout == layout for case in cases_of(job, layout)
    ]


def cases_of(job: Job, layout: Layout) -> list[ModelCase]:
    """Return the cases of a job, each with an aim of its own, so that few cases still cover every kind of model; the first has the third witness."""
    found: list[ModelCase] = []
    for check, count in zip(CHECKS, job.counts, strict=True):
        for number in range(count):
            place = len(found)
            aim = dataclasses.replace(AIMS[(job.first + place) % len(AIMS)], witnessed=place == 0)
            drawn = draw_cases(check, layout, aim, number=job.seed + 1000 * place + number, examples=1)
            found += [dataclasses.replace(case, origin=job.title) for case in drawn]
    return found


def run_drawn(job: Job, layout: Layout, tally: Tally, *, entered: Entered = plain_layout) -> None:
    """Run a job's cases up to the first that differs, which is shrunk."""
    with contextlib.closing(run_layout(cases_of(job, layout), entered=entered)) as running:
        for ran in running:
            count(ran, tally)
            if not ran.equal:
                break
        else:
            return
    # Its worlds are closed now: smaller ones need their seats.
    small, results = ran.case, ran.results
    if job.shrink:
        small, results = shrink.shrink(small, results, lambda case: check_case(case, entered=entered))
    for result in results:
        tally.differences += differing(
            result, prompt_format="any", where=f"{job.title}: {small.layout}", case=small.to_json()
        )


def run_saved(case: ModelCase, path: str, tally: Tally) -> None:
    """Replay the case that stands at a path."""
    for ran in run_layout([case]):
        count(ran, tally)
        for result in ran.results:
            found = differing(
                result, prompt_format="any", where=path, case=case.to_json(), command=store.command(case, path, ())
            )
            tally.differences += [dataclasses.replace(each, path=path) for each in found]


def count(ran: Ran, tally: Tally) -> None:
    """Count a case with its checks."""
    layout = tally.layouts[ran.case.layout]
    layout["ranks"] = ran.case.world_size
    layout["cases"] += 1
    layout["checks"] += len(ran.results)
    layout["ties"] += any(each.refused for each in ran.results)
    layout["third witness"] += any(each.check == WITNESS for each in ran.results)
    layout["differing"] += not ran.equal
    layout["seconds"] += ran.seconds  # type: ignore[assignment] # a Counter adds floats as well
    tally.features.update(set(features(ran.case)))
    for result in ran.results:
        tally.count(result, "any")
        tally.features[VARIES] += result.fired.get(VARIES, 0)


def witness_facts() -> dict[str, object]:
    """Return what the third witness of training steps is made of, for the report."""
    return {"upstream": list(megatron_step.UPSTREAM), "stand_ins": dict(megatron_step.STAND_INS)}
