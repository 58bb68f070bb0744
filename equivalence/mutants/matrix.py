"""The kill matrix: which check finds which fault, by the jobs of the smallest run with the faulty production as a side.

A fault that no check finds, and a check that finds none, are failures of the suite itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from equivalence.cases import store
from equivalence.checks.blame import RAISED
from equivalence.generators import tokenizers
from equivalence.generators.faults.registry import classes
from equivalence.mutants.row_faults import ROW_MUTANTS, Mutant
from equivalence.runner import job_runners
from equivalence.runner.job import Job
from equivalence.runner.own_settings import own_settings
from equivalence.runner.plan import SIZES, corpus_jobs, generated_jobs, own_jobs, sample_jobs
from equivalence.runner.restriction import EVERYTHING

CHECKS = ("corpus", "smallest", "sample", "rows", "batches", "divergences")
"""The checks of a run that a faulty row or batch can show in."""
JUDGE = "reference"
"""The other side: equal to Megatron-LM by the run itself, and quicker."""


@dataclass(frozen=True, kw_only=True)
class Kills:
    """Checks that found one fault."""

    mutant: str
    story: str
    found: dict[str, int | None]
    """By check: number of jobs until one found the fault; 0 if no job did, None if the check did not run."""

    @property
    def survives(self) -> bool:
        """Return whether no check found the fault."""
        return not any(self.found.values())


def kill_matrix(
    mutants: Sequence[Mutant] = ROW_MUTANTS,
    *,
    sample: tuple[Path, int] | None,
    workers: int = 1,
    seed: int = 0,
    first_only: bool = False,
) -> Iterator[Kills]:
    """Yield for each fault the checks that find it, in the order of `mutants`.

    `sample` is a packed file and its number of rows; its rows are read with the tokenizer nemotron-mini. With `first_only`, the
    checks after the first that finds the fault are not run.
    """
    for name in (*tokenizers.RECIPES, "nemotron-mini"):
        tokenizers.load(name)
    classes()
    asked = [(mutant.name, sample, seed, first_only) for mutant in mutants]
    if workers == 1:
        yield from map(_kills, *zip(*asked, strict=True))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        yield from pool.map(_kills, *zip(*asked, strict=True))


def failures(matrix: Sequence[Kills], *, checks: Sequence[str] = CHECKS) -> list[str]:
    """Return the failures of the suite by its matrix: faults that survive, and checks that find nothing."""
    survivors = [f"no check finds {kills.mutant}: {kills.story}" for kills in matrix if kills.survives]
    idle = [f"the check {check} finds no fault" for check in checks if not any(kills.found[check] for kills in matrix)]
    return survivors + idle


def _kills(name: str, sample: tuple[Path, int] | None, seed: int, first_only: bool) -> Kills:  # noqa: FBT001 - mapped over
    (mutant,) = [mutant for mutant in ROW_MUTANTS if mutant.name == name]
    subjects = (JUDGE, f"equivalence.mutants.subjects:{name}")
    found: dict[str, int | None] = dict.fromkeys(CHECKS)
    # A fault of batches cannot show in rows, and asking would take a minute each.
    for check in ("batches",) if mutant.is_of_batches else CHECKS:
        found[check] = 0
        for number, job in enumerate(_jobs(check, subjects, sample, seed), start=1):
            tally = job_runners.run(replace(job, shrink=False))
            if tally.errors:
                raise RuntimeError(f"fault {name} could not run in {job.title}: {tally.errors[0]}")
            if raised := [each for each in tally.differences if each.first["class"] == RAISED]:
                raise RuntimeError(f"fault {name} could not run in {job.title}: {raised[0].first['right']}")
            if tally.differences:
                found[check] = number
                break
        if first_only and found[check]:
            break
    return Kills(mutant=name, story=mutant.story, found=found)


def _jobs(check: str, subjects: tuple[str, ...], sample: tuple[Path, int] | None, seed: int) -> Iterator[Job]:
    """Yield the jobs of one check in the smallest run."""
    size = SIZES["tiny"]
    if check == "corpus":
        yield from corpus_jobs([path for path, _ in store.replay(kinds=["rows"])], subjects)
    elif check == "smallest":
        yield Job(kind="smallest", subjects=subjects)
    elif check == "sample":
        if sample is not None:
            own = own_settings(sample[0], pack_length=None, restriction=EVERYTHING)
            yield from own_jobs(own, "nemotron-mini", subjects)
            yield from sample_jobs(own, "nemotron-mini", size, subjects)
    else:
        yield from (job for job in generated_jobs(size, seed, subjects) if job.kind == check)
