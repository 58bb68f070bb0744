"""Choose which differences a run shows, save their cases, and decide when so much differs that the run stops."""

from __future__ import annotations

import shlex
from dataclasses import replace

from equivalence.cases import store
from equivalence.runner import job_runners, known
from equivalence.runner.alone import Replayer
from equivalence.runner.counters import Differing
from equivalence.runner.job import Job
from equivalence.runner.outcome import Options, Outcome
from equivalence.subjects import join_names

STOP_AFTER = 20
"""Differences between built-in sides after which a run stops: more of the same would only take time."""
STOP_AFTER_OF_OWN = 300
"""Differences after which a run stops whoever differs."""
STOP_AFTER_ERRORS = 3


def show(differing: Differing, job: Job, outcome: Outcome, alone: Replayer | None) -> None:
    """Add a difference of a job to the outcome; of a subject of one's own only the first ones of each kind, so that the run
    goes on.
    """
    tally = outcome.tally
    if (
        _is_of_own(differing, outcome)
        and [each.kind for each in tally.differences].count(differing.kind) >= known.MOST_SHOWN
    ):
        tally.alike[differing.kind] += 1
    else:
        tally.differences.append(_saved(differing, job, outcome, alone))


def enough(outcome: Outcome) -> bool:
    """Return whether so much differs or could not run that the rest would only take time."""
    differences = outcome.tally.differences
    of_built_in = sum(not _is_of_own(each, outcome) for each in differences)
    too_many = of_built_in >= STOP_AFTER or len(differences) >= STOP_AFTER_OF_OWN
    return too_many or len(outcome.tally.errors) >= STOP_AFTER_ERRORS


def _is_of_own(differing: Differing, outcome: Outcome) -> bool:
    return bool(
        known.own_names(job_runners.subject(name).name for name in outcome.options.subjects)
        & {differing.left, differing.right}
    )


def _saved(differing: Differing, job: Job, outcome: Outcome, alone: Replayer | None) -> Differing:
    """Save the shrunk case of a difference where the next run replays it first, and replay the first of a kind alone, if
    asked.
    """
    if differing.case is None:
        return differing
    options = outcome.options
    case = store.parse(differing.case)
    if alone is not None and not any(_is_alike(each, differing) for each in outcome.tally.differences):
        differing = replace(differing, alone=alone(differing.case), together=_together(job, options))
    if differing.path is not None:  # it was replayed from there
        return differing
    why = f"{differing.check}: {differing.left} and {differing.right} differ"
    path = store.save(case, why, folder=options.out / "corpus")
    return replace(differing, path=str(path), command=store.command(case, path, _sides(differing, case, options)))


def _together(job: Job, options: Options) -> str:
    """Return the command that runs a case again with those before it."""
    words = ["python", "-m", "equivalence", "run", "--size", options.size, "--seed", str(options.seed)]
    return shlex.join([*words, "--job", job.title, "--subjects", join_names(options.subjects)])


def _sides(differing: Differing, case: store.Case, options: Options) -> list[str]:
    """Return the two sides that differ, as they were asked for; all sides where one is a prediction or the case is not of a single row."""
    asked = {job_runners.subject(name).name: name for name in options.subjects}
    sides = [asked[side] for side in (differing.left, differing.right) if side in asked]
    return sides if len(sides) == 2 and store.is_single_row(case) else list(options.subjects)


def _is_alike(one: Differing, other: Differing) -> bool:
    """Return whether two differences are of one kind, so that one replay alone speaks for both."""
    return (one.check, one.left, one.right, one.first["class"], one.case is None) == (
        other.check, other.left, other.right, other.first["class"], other.case is None,
    )  # fmt: skip
