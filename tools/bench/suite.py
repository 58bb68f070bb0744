"""Measures the suite itself: cases a second on data alone, and training steps a second in worlds of two, four and eight ranks.

A step's case is all that the main job does with it: production's step, the reference's five, Megatron-LM's, one rank's, and the comparison.
It runs in the main job's own pool, a worker for each core and a layout to a job: two worlds of up to four ranks at a time, and beside a
world of eight, of which only one may live, what another worker's process expects of the layout before.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections import Counter
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from equivalence.runner.counters import Tally
from equivalence.runner.plan import LAYOUT_CHECKS, NEVER_SMALL, SIZES, Steps, model_jobs
from equivalence.runner.pool import default_workers, run_jobs
from production.library_warnings import quiet_libraries

DATA_AIM = 100.0
STEP_AIMS = {2: 2.0, 4: 0.7, 8: 0.5}
"""Cases a second on two idle cores."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One kind of case."""

    what: str
    cases: int
    seconds: float
    processor: float
    """Seconds of processor time of this process and all ranks; two cores need half of this time."""
    steps: int
    """Training steps that all ranks of the world took together; 0 for data alone."""
    aim: float

    @property
    def rate(self) -> float:
        """Cases per second."""
        return self.cases / self.seconds


def suite(
    *,
    examples: int = 100,
    worlds: tuple[int, ...] = (2, 4, 8),
    layouts: int = 6,
    cases: int = 3,
    workers: int | None = None,
) -> list[Measured]:
    """Run data cases and training steps as the main job draws them; prints and returns cases a second.

    `examples` of each check on data, in this process; `cases` in each of `layouts` layouts of a number of ranks (fewer where there are
    no more), with the opening of their worlds, on `workers` processes (one for each core). Raises RuntimeError where a case
    differs: a wrong suite has no speed.
    """
    torch.set_num_threads(1)
    with quiet_libraries():
        from equivalence.runner.step_runs import preload_models  # noqa: PLC0415 - megatron-core, which other benchmarks do without

        preload_models()
    measured = [_data(examples), *(_steps(size, layouts, cases, workers or default_workers()) for size in worlds)]
    table = Table(title="the suite's own speed, in wall time of this machine")
    for heading in (
        "what",
        "cases",
        "seconds",
        "cases/s",
        "processor s a case",
        "aim on two idle cores",
        "steps of a world",
    ):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for each in measured:
        table.add_row(
            each.what,
            f"{each.cases:,}",
            f"{each.seconds:.1f}",
            f"{each.rate:,.2f}",
            f"{each.processor / each.cases:.3f}",
            f"≥ {each.aim:g}",
            f"{each.steps:,}" if each.steps else "",
        )
    Console().print(table)
    return measured


def _data(examples: int) -> Measured:
    from equivalence.runner.layout_jobs import draw_layouts  # noqa: PLC0415 - as above

    started, count, used = time.perf_counter(), 0, _processor()
    for check in (each for each in LAYOUT_CHECKS if each not in NEVER_SMALL):
        for result, case in draw_layouts(check, number=0, examples=examples):
            count += 1
            if not result.equal:
                raise RuntimeError(f"{check} differs: {case}")
    seconds = time.perf_counter() - started
    return Measured(
        what="data alone, one process",
        cases=count,
        seconds=seconds,
        processor=_processor() - used,
        steps=0,
        aim=DATA_AIM,
    )


def _processor() -> float:
    """Return the processor seconds of this process and of all ranks that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _steps(world_size: int, layouts: int, cases: int, workers: int) -> Measured:
    steps = {world_size: Steps(layouts=layouts, models=cases, others=0)}
    jobs = list(model_jobs(dataclasses.replace(SIZES["tiny"], models=steps), 0, ()))
    started, used, whole = time.perf_counter(), _processor(), Tally()
    for ended in run_jobs(jobs, workers):
        if ended is not None:
            whole.add(ended[1])
    if whole.errors or whole.differences:
        raise RuntimeError(f"a training step differs, or could not run: {[*whole.errors, *whole.differences][0]}")
    checks = Counter({check: count for (check, _), count in whole.rows.items()})
    return Measured(
        what=f"training steps, {world_size} ranks",
        cases=checks["models"],
        seconds=time.perf_counter() - started,
        processor=_processor() - used,
        # Another order of the microbatches is a second `invariance` of its case.
        steps=checks["third_witness"] + checks["invariance"],
        aim=STEP_AIMS.get(world_size, 0.0),
    )


if __name__ == "__main__":
    import tyro

    tyro.cli(suite)
