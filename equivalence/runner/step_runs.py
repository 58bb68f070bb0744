"""Run cases with a model in one layout and check the results: the one entry for the main job, the bench and planted
faults.

    preload_models()
    for ran in run_layout(cases):                       # all of one layout; in a world of one rank, then in the layout's
        ran.case, ran.results, ran.equal

A fault is entered on every rank before its first case by another `entered`: a function from the sizes to what `open_world` takes as
`enter` and `entry`. `enter` names a context manager `module:function(entry, worker)` that puts the fault in, enters
`equivalence.trainers.production_step.layout(sizes, worker)` and yields what that yields:

    run_layout(cases, entered=lambda sizes: ("equivalence.mutants.layout_faults:enter", ("shift_twice", sizes)))

`tiny_cases(sizes, data_size)` are the cases of that layout in the smallest run. A rank that raises, dies or hangs is a finding of its
case, with its stack; the next case gets a new world.
"""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.cases.step import ModelCase
from equivalence.checks.steps.invariance import check_invariance, check_order
from equivalence.checks.steps.leaks import RUN, Run, check_leaks
from equivalence.checks.steps.models import check_model, compare_outcomes, shapes_of
from equivalence.checks.steps.paths import check_paths
from equivalence.expectations.step import expect
from equivalence.subjects.protocol import Subject
from equivalence.trainers.production_step import GivenRows, RankOutcome, given, gradients
from equivalence.workers import (
    MOST_WORKERS,
    Case,
    CaseFailed,
    Failure,
    ReopeningWorld,
    WorldNotOpened,
    preload,
    reopening_world,
)
from production.errors import PackproofError
from production.parallel.sizes import ParallelSizes

MODULES = (
    "equivalence.trainers.production_step",
    "equivalence.trainers.megatron_step",
    "production.model.device.shim",
    "production.training.step",
    "production.model.model",
    "production.model.weights",
    "megatron.core.models.mimo.model.base",
)
"""Modules that a rank needs beside megatron-core, and that megatron-core imports only where it makes an optimizer."""
CASE_SECONDS = 300.0
"""A hang is found by its idleness long before; a machine that is shared by many only makes a case slow."""
WITNESS = "third_witness"

Entered = Callable[[ParallelSizes], tuple[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One case, checked."""

    case: ModelCase
    results: list[CheckResult]
    seconds: float
    """Of wall time, without the opening of worlds that earlier cases had."""

    @property
    def equal(self) -> bool:
        """Return whether no check differs."""
        return all(each.equal for each in self.results)


def preload_models() -> None:
    """Import in this process what ranks need: call it before the first world, and before forking workers that open some."""
    preload(*MODULES)


def plain_layout(sizes: ParallelSizes) -> tuple[str, Any]:
    """Return production without a fault."""
    return "equivalence.trainers.production_step:layout", sizes


def has_witness(case: ModelCase) -> bool:
    """Return whether Megatron-LM itself divides losses so: it knows no `global_valid_tokens`, and weights by rank."""
    return case.check == "models" and case.normalization != "global_valid_tokens" and case.mtp_weights == "rank"


def run_layout(cases: Sequence[ModelCase], *, entered: Entered = plain_layout) -> Generator[Ran]:
    """Check cases that share a layout, one after another. At most eight ranks live.

    Ranks first: they run all cases, up to one that fails; only when their world is closed does this process compute what is expected
    of them, so that another worker's ranks run meanwhile. After a failure the cases that are left get new worlds.
    """
    for case in cases:
        if (case.sizes, case.world_size) != (cases[0].sizes, cases[0].world_size):
            raise ValueError(f"all cases must have one layout, got {case.layout} and {cases[0].layout}")
    left = list(cases)
    while left:
        asked: list[tuple[Judge | Failure, float]] = []
        error: Exception | None = None
        with seats(left[0].world_size):
            try:
                asked.extend(_asked(left, entered))  # keeps what came before an error
            except Exception as raised:  # noqa: BLE001 - of a check; raised again when what was found before it is told
                error = raised
        for case, (judge, seconds) in zip(left, asked, strict=False):
            started = time.perf_counter()
            yield Ran(case=case, results=_judged(case, judge), seconds=seconds + time.perf_counter() - started)
        if error is not None:
            raise error
        left = left[len(asked) :]


def check_case(case: ModelCase, *, entered: Entered = plain_layout) -> list[CheckResult]:
    """Run all checks of one case, in worlds of its own."""
    (ran,) = run_layout([case], entered=entered)
    return ran.results


def check_saved(case: ModelCase, sides: Sequence[Subject]) -> list[CheckResult]:
    """Replay a saved step, whoever builds rows."""
    del sides
    preload_models()
    return check_case(case)


@contextmanager
def seats(count: int) -> Iterator[None]:
    """Wait until `count` of the machine-wide eight ranks of this run are free: workers forked from one parent share them."""
    held: list[int] = []
    fcntl.lockf(_seats, fcntl.LOCK_EX, 1, MOST_WORKERS)  # one takes at a time, so that two do not wait for each other
    try:
        while len(held) < count:
            for seat in range(MOST_WORKERS):
                if len(held) < count and seat not in held and _take(seat):
                    held.append(seat)
            if len(held) < count:
                time.sleep(0.02)
    finally:
        fcntl.lockf(_seats, fcntl.LOCK_UN, 1, MOST_WORKERS)
    try:
        yield
    finally:
        for seat in held:
            fcntl.lockf(_seats, fcntl.LOCK_UN, 1, seat)


_seats = tempfile.TemporaryFile()  # noqa: SIM115 - for the process's life
"""Locks on its bytes belong to a process and end with it; forked ranks inherit none."""


def _take(seat: int) -> bool:
    try:
        fcntl.lockf(_seats, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, seat)
    except BlockingIOError:
        return False
    return True


Judge = Callable[[], list[CheckResult]]
"""Function that checks a case once its ranks have run."""


def _asked(cases: Sequence[ModelCase], entered: Entered) -> Iterator[tuple[Judge | Failure, float]]:
    """Run the ranks' part of each case, with its seconds of wall time; the last one is the first that fails."""
    alone = _on_one_rank(cases, entered)
    enter, entry = entered(cases[0].sizes)
    with reopening_world(cases[0].world_size, enter=enter, entry=entry) as world:

        def run(target: str, payload: Any) -> list[RankOutcome]:
            return _run(world, target, payload)

        for case, (one_rank, seconds) in zip(cases, alone, strict=False):
            started = time.perf_counter()
            judge = one_rank if isinstance(one_rank, Failure) else _ask_or_fail(case, run, one_rank)
            yield judge, seconds + time.perf_counter() - started
            if isinstance(judge, Failure):
                return


def _on_one_rank(
    cases: Sequence[ModelCase], entered: Entered
) -> list[tuple[list[RankOutcome] | Failure | None, float]]:
    """Run each case of `models` on one rank, None where it is not asked; the last is the first that fails.

    Return results and seconds.
    """
    found: list[tuple[list[RankOutcome] | Failure | None, float]] = []
    enter, entry = entered(ParallelSizes())
    with reopening_world(1, enter=enter, entry=entry) as world:
        for case in cases:
            started, one_rank = time.perf_counter(), None
            if case.check == "models" and case.world_size > 1:
                try:
                    one_rank = _run(world, RUN, case.on_one_rank())
                except (CaseFailed, WorldNotOpened) as failed:
                    return [*found, (failed.failure, time.perf_counter() - started)]
            found.append((one_rank, time.perf_counter() - started))
    return found


def _run(world: ReopeningWorld, target: str, payload: Any) -> list[RankOutcome]:
    done = world.run(Case(target=target, payload=payload, deadline_s=CASE_SECONDS))
    if done.failure is not None:
        raise CaseFailed(done.failure)
    return list(done.results or ())


def _ask_or_fail(case: ModelCase, run: Run, alone: list[RankOutcome] | None) -> Judge | Failure:
    try:
        return _ask(case, run, alone)
    except (CaseFailed, WorldNotOpened) as failed:
        return failed.failure
    except (PackproofError, ValueError) as error:
        results = [_no_model(case, error)]
        return lambda: results


def _ask(case: ModelCase, run: Run, alone: list[RankOutcome] | None) -> Judge:
    """Run all steps of a case on the ranks; `alone` is what one rank gave."""
    if case.check != "models":  # these ask and judge in turn
        result = {"leaks": check_leaks, "paths": check_paths}[case.check](case, run)
        return lambda: [result]
    outcomes = run(RUN, case)
    baseline = run("equivalence.trainers.production_step:run_baseline", case) if has_witness(case) else None
    order = [*range(1, len(case.rows)), 0] if len(case.rows) > 1 and case.seed % 2 else []
    again = run(RUN, _reordered(case, order)) if order else []

    def judge() -> list[CheckResult]:
        expected = expect(case, shapes_of(gradients(outcomes)))
        results = [check_model(case, outcomes, expected=expected)]
        if baseline is not None:
            results.append(compare_outcomes(WITNESS, "production", outcomes, "megatron_lm", baseline))
        if alone is not None:
            results.append(check_invariance(case, outcomes, alone, expected))
        if order:
            results.append(check_order(outcomes, again, order, case, expected))
        return results

    return judge


def _reordered(case: ModelCase, order: Sequence[int]) -> GivenRows:
    """Return the case with row `order[i]` of the global batch at i."""
    rows = [row for rank in range(case.data_size) for row in case.rows_of_rank(rank)]
    # Rank by rank, as they were dealt: row i stands at its rank's i // dp.
    per_rank = len(case.rows) // case.data_size
    by_number = [rows[(row % case.data_size) * per_rank + row // case.data_size] for row in range(len(case.rows))]
    return given(case, [by_number[row] for row in order])


def _judged(case: ModelCase, judge: Judge | Failure) -> list[CheckResult]:
    if isinstance(judge, Failure):
        return [failed_case(case, judge)]
    try:
        return judge()
    except (PackproofError, ValueError) as error:
        return [_no_model(case, error)]


def _no_model(case: ModelCase, error: Exception) -> CheckResult:
    """Return parts of gradients that are no whole model, or not the reference's."""
    return _finding(case, "what all ranks give", "one model's gradients", str(error))


def failed_case(case: ModelCase, failure: Failure) -> CheckResult:
    """Return a rank that gave no result, as a finding with its stack."""
    kind = failure.first.exception or failure.first.state
    return _finding(case, f"rank {failure.first.rank} of {case.layout}", f"a result, not {kind}", str(failure))


def _finding(case: ModelCase, name: str, left: str, right: str) -> CheckResult:
    wrong = Difference(tensor=name, position=None, left=left, right=right, kind="failed")
    return CheckResult(check=case.check, findings=[Finding(left="expected", right="production", differences=[wrong])])
