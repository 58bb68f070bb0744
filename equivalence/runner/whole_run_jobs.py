"""Check whole runs of the training job in the main job: both paths, a stop in the middle, a resume, against the
reference.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence.cases.data import DataCase
from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.runs.whole_run import NAME, check_whole_run, whole
from equivalence.errors import SuiteError
from equivalence.expectations.run import ExpectedRun, expect_run
from equivalence.generators.models import Layout, layouts
from equivalence.mutants.layout_mutant import CP2, LayoutMutant
from equivalence.runner.counters import Tally, differing
from equivalence.runner.job import Job
from equivalence.runner.layout_runs import MODULES, seats
from equivalence.trainers.whole_run import TRAIN, Record, RunCase, RunOutcome, logged
from equivalence.workers import CaseFailed, Failure, WorldNotOpened, open_world, preload
from production.errors import PackproofError
from production.parallel.sizes import ParallelSizes

RUN_SECONDS = 600.0
DP2 = Layout(sizes=ParallelSizes(), data_size=2)
ENTER = "equivalence.mutants.layouts:enter_alone"


@dataclass(frozen=True, kw_only=True, eq=False)
class Performed:
    """Holds the ranks' results of a case."""

    outcomes: list[list[RunOutcome]]
    """[rank][part]."""
    log: list[Record]


def preload_whole_runs() -> None:
    """Import in this process what ranks need."""
    preload(
        *MODULES,
        "equivalence.trainers.whole_run",
        "production.training.trainer",
        "production.training.data.batch_dump",
        "transformers.models.auto.tokenization_auto",
        "transformers.tokenization_utils_tokenizers",
        "rich.progress",
        "torch.distributed.checkpoint",
    )


def cases_of(job: Job) -> list[RunCase]:
    """Return the runs of a job: one path in data parallelism alone, or in every layout of as many ranks as `first` says.

    The direct path is then run again with the distributed optimizer, whose state a resume puts together from shares, and
    with depths weighed by rows: over cp 2, or in each of those layouts.
    """
    assert job.aim is not None
    found = [each for each in layouts(job.first) if each.sizes.expert_tensor == 1] if job.first else [DP2]
    shared = [each for each in found if each.data_size * each.sizes.context > 1] if job.first else [CP2]
    rows, workers = job.seed % 2**31, (2, job.first % 2)
    cases = [
        RunCase(path=job.aim, sizes=each.sizes, data_size=each.data_size, seed=rows, workers=workers) for each in found
    ]
    if job.aim == "direct":
        cases += [
            distributed(RunCase(path="direct", sizes=each.sizes, data_size=each.data_size, seed=rows, workers=workers))
            for each in shared
        ]
    return cases


def distributed(case: RunCase) -> RunCase:
    """Return the case with the distributed optimizer, and with depths weighed by rows."""
    return dataclasses.replace(case, mtp_weights="rows", is_distributed=True)


def run_drawn(job: Job, tally: Tally) -> None:
    """Run the cases of a job, up to the first that differs."""
    for case in cases_of(job):
        result = check_case(case)
        tally.count(result, "any")
        saved = DataCase(check=NAME, value=case, origin=job.title).to_json()
        where = f"{job.title}: {case.layout}"
        tally.differences += differing(result, prompt_format="any", where=where, case=saved)
        if not result.equal:
            return


def check_case(case: RunCase, *, fault: str | None = None, expected: ExpectedRun | None = None) -> CheckResult:
    """Run a case in a world of its own, and hold it to `expected`, or to the reference's run from the weights that it began with.

    `fault` is the name of a mutant that every rank enters.
    """
    with tempfile.TemporaryDirectory(prefix="packproof-run-") as name:
        folder = Path(name)
        case.write_files(folder)
        try:
            performed = perform(case, folder, fault=fault)
            wanted = expected or expect_from(case, folder, performed.outcomes)
            return check_whole_run(case, performed.outcomes, wanted, performed.log)
        except (CaseFailed, WorldNotOpened) as failed:
            return _failed(case, failed.failure)
        except PackproofError as error:
            return _finding("what all ranks give", "one model's weights", str(error))


def check_fault(mutant: LayoutMutant, *, seed: int) -> CheckResult:
    """Run four steps with a fault on every rank, stopped after the second, against the reference's run of them."""
    case = short_case(mutant.path, mutant.layout, seed=seed)
    case = distributed(case) if mutant.is_distributed else case
    return check_case(case, fault=mutant.name, expected=sound_run(case)[1])


def short_case(path: str, layout: Layout, *, seed: int) -> RunCase:
    """Return the shortest run that is stopped between two steps on either side."""
    return RunCase(
        path=path, sizes=layout.sizes, data_size=layout.data_size, seed=seed, steps=4, stop_after=2, workers=(1, 0)
    )


@functools.lru_cache(maxsize=4)
def sound_run(case: RunCase) -> tuple[Performed, ExpectedRun]:
    """Return the results of ranks without a fault, and the reference's run from the weights that they begin with.

    SuiteError where the two differ, or cannot be compared.
    """
    with tempfile.TemporaryDirectory(prefix="packproof-run-") as name:
        folder = Path(name)
        case.write_files(folder)
        performed = perform(case, folder)
        expected = expect_from(case, folder, performed.outcomes)
        result = check_whole_run(case, performed.outcomes, expected, performed.log)
        if not result.equal or result.refused:
            raise SuiteError(f"a run without a fault differs, or cannot be compared: {result}; take another seed")
        return performed, expected


def perform(case: RunCase, folder: Path, *, fault: str | None = None) -> Performed:
    """Run a case whose files lie in the folder. Raises CaseFailed, WorldNotOpened."""
    entered: dict[str, Any] = {} if fault is None else {"enter": ENTER, "entry": fault}
    with seats(case.world_size), open_world(case.world_size, **entered) as world:
        outcomes = world.run(TRAIN, (case, str(folder)), deadline_s=RUN_SECONDS)
    return Performed(outcomes=outcomes, log=logged(case, folder))


def expect_from(case: RunCase, folder: Path, outcomes: Sequence[Sequence[RunOutcome]]) -> ExpectedRun:
    """Return the reference's run from the weights that the ranks began with."""
    return expect_run(case, folder, whole([parts[0].begun for parts in outcomes]))


def _failed(case: RunCase, failure: Failure) -> CheckResult:
    kind = failure.first.exception or failure.first.state
    return _finding(f"rank {failure.first.rank} of {case.layout}", f"a result, not {kind}", str(failure))


def _finding(name: str, left: str, right: str) -> CheckResult:
    wrong = Difference(tensor=name, position=None, left=left, right=right, kind="failed")
    return CheckResult(check=NAME, findings=[Finding(left="expected", right="production", differences=[wrong])])
