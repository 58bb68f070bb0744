"""Find each fault of the layout kind by the checks of the smallest run: data in this process, training steps in worlds.

A fault is run by the check that it names first; with `first_only`, by other checks only if that check does not find the fault.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from typing import Any

from equivalence.cases.result import CheckResult
from equivalence.checks.blame import RAISED
from equivalence.errors import SuiteError
from equivalence.mutants import layouts as faults
from equivalence.mutants.layout_mutant import LayoutMutant
from equivalence.mutants.layouts import LAYOUT_MUTANTS
from equivalence.mutants.matrix import Kills
from equivalence.mutants.run_faults import WHOLE_RUN
from equivalence.runner.counters import MODEL_CHECKS
from equivalence.runner.plan import LAYOUT_CHECKS, SIZES, layout_jobs
from equivalence.runner.search import CouldNotRun

CHECKS_OF_LAYOUTS = (*LAYOUT_CHECKS, *MODEL_CHECKS, WHOLE_RUN)
"""The checks of a run that a fault of the layout kind can show in. Runs of twenty steps are not asked: one takes as long as all faults together."""
_STEPS = "steps"
"""The checks of training steps, which a case asks together."""
_DRAWN_FOR = {"leaks": "leaks", "paths": "paths"}
"""Purpose of a training step, by the check that must find the fault; all other checks run on `models`."""


def layout_kill_matrix(
    mutants: Sequence[LayoutMutant] = LAYOUT_MUTANTS, *, workers: int = 1, seed: int = 0, first_only: bool = False
) -> Iterator[Kills]:
    """Yield the checks that find each fault, in order. With `first_only` no further check runs once a check has found the fault."""
    preload()
    asked = [(mutant.name, seed, first_only) for mutant in mutants]
    if workers == 1 or len(asked) == 1:
        yield from map(_kills, *zip(*asked, strict=True))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool, warnings.catch_warnings():
        # Python warns of any fork beside threads; those of torch and the tokenizers' library are idle here.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        yield from pool.map(_kills, *zip(*asked, strict=True))


def preload() -> None:
    """Import what the faults are put into, and what worlds need, before any process is forked."""
    importlib.import_module("equivalence.runner.step_jobs").preload_models()
    importlib.import_module("equivalence.runner.whole_run_jobs").preload_whole_runs()
    importlib.import_module("equivalence.runner.layout_jobs")


def _kills(name: str, seed: int, first_only: bool) -> Kills:  # noqa: FBT001 - mapped over
    mutant = faults.find(name)
    found: dict[str, int | None] = dict.fromkeys(CHECKS_OF_LAYOUTS)
    if mutant.first == WHOLE_RUN:  # nothing less begins, reports and resumes
        return Kills(mutant=name, story=mutant.story, found=found | {WHOLE_RUN: _in_whole_run(mutant, seed)})
    # What is wrong between ranks cannot show in data.
    draws = () if mutant.first in MODEL_CHECKS else sorted(LAYOUT_CHECKS, key=lambda check: check != mutant.first)
    for check in (*draws, _STEPS):
        if check == _STEPS:
            found |= _in_steps(mutant, seed, first_only=first_only)
        else:
            found[check] = _in_draws(mutant, check, seed)
        if first_only and any(found.values()):
            break
    return Kills(mutant=name, story=mutant.story, found=found)


def _in_draws(mutant: LayoutMutant, check: str, seed: int) -> int:
    """Return the number of draws of a check of data until one shows the fault; 0 if none does."""
    from equivalence.runner.layout_jobs import draw_layouts  # noqa: PLC0415 - see preload

    (job,) = [job for job in layout_jobs(SIZES["tiny"], seed, ()) if job.aim == check]
    with mutant.entered():
        try:
            # Another check than its own is asked in a sixth of the draws, so that the whole matrix takes minutes.
            plain = job.plain if check == mutant.first else job.plain // 6
            drawn = list(draw_layouts(check, number=job.seed, examples=job.examples, plain=plain, shrink=False))
        except CouldNotRun as error:
            raise SuiteError(f"fault {mutant.name} could not run in {check}: {error}") from error
    if drawn[-1][0].equal:
        return 0
    _expect_no_other_failure(mutant, drawn[-1][0])
    return len(drawn)


def _in_whole_run(mutant: LayoutMutant, seed: int) -> int:
    """Return 1 if a whole run of four steps shows the fault, else 0."""
    runs = importlib.import_module("equivalence.runner.whole_run_jobs")
    result = runs.check_fault(mutant, seed=seed)
    _expect_no_other_failure(mutant, result)
    return 0 if result.equal else 1


def _in_steps(mutant: LayoutMutant, seed: int, *, first_only: bool) -> dict[str, int | None]:
    """Return the number of cases until one shows the fault, for each check of training steps, in the fault's layout."""
    runs = importlib.import_module("equivalence.runner.layout_runs")
    cases = importlib.import_module("equivalence.runner.step_jobs").tiny_cases(mutant.layout, seed=seed)
    if not cases:
        raise SuiteError(f"fault {mutant.name}: the smallest run has no training step in {mutant.layout.name}")
    drawn_for = _DRAWN_FOR.get(mutant.first, "models")
    cases.sort(key=lambda case: case.check != drawn_for)  # stable: those that it names come first
    found: dict[str, int | None] = dict.fromkeys(MODEL_CHECKS, 0)
    # One at a time where the first may do: all of a layout run on one rank before its first.
    with closing(_ran(runs, cases, mutant, one_by_one=first_only)) as running:
        for number, ran in enumerate(running, start=1):
            for result in ran.results:
                if not result.equal:
                    _expect_no_other_failure(mutant, result)
                    found[result.check] = found[result.check] or number
            if first_only and any(found.values()):
                break
    return found


def _ran(runs: Any, cases: list[Any], mutant: LayoutMutant, *, one_by_one: bool) -> Generator[Any]:
    for some in ([case] for case in cases) if one_by_one else (cases,):
        yield from runs.run_layout(some, entered=faults.entered(mutant.name))


def _expect_no_other_failure(mutant: LayoutMutant, result: CheckResult) -> None:
    """Raise SuiteError if a rank failed other than by production's own refusals: then the fault itself is wrong."""
    for each in (difference for finding in result.findings for difference in finding.differences):
        failed = str(each.left).removeprefix("a result, not ")
        if each.kind == RAISED:
            failed = str(each.right).partition(":")[0]
        if each.kind in ("failed", RAISED) and failed != each.left and failed not in mutant.raises:
            raise SuiteError(f"fault {mutant.name} could not run: {each.right}")
