"""Hold Megatron-LM's half of a training step of another version to the installed version's, to the bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from equivalence.cases import store
from equivalence.cases.step import ModelCase
from equivalence.checks.steps.models import compare_outcomes
from equivalence.errors import InputError
from equivalence.generators.models import AIMS, Aim, Layout, draw_cases, layouts
from equivalence.runner.step_runs import has_witness
from equivalence.trainers.production_step import Part, RankOutcome
from production.parallel.sizes import RankCoordinates

NUMBER = 18
"""Seed of the drawn cases."""
MOST_RANKS = 2
LONGEST_TOLD = 160
"""Characters of a complaint that the table shows."""


@dataclass(frozen=True, kw_only=True)
class KnownDifference:
    """A difference of a version's steps from the installed version's that was followed to its cause."""

    versions: str
    """What the version begins with."""
    applies: Callable[[ModelCase], bool]
    """Whether a case has it; then it must be there, and in no case else."""
    tensors: str
    """Pattern of the tensors that may differ; each tensor that differs must match."""
    why: str


KNOWN = (
    KnownDifference(
        versions="0.18.",
        applies=lambda case: (
            bool(case.shape.experts) and case.sizes.expert == 1 and case.sizes.tensor != case.sizes.expert_tensor
        ),
        tensors=r"gradient of \S*\.experts\.\S+|gradient norm",
        why="0.18 does not add up the gradients of experts that tp ranks hold alike (ep 1, etp other than tp)",
    ),
)
"""By version; docs/versions.md tells each with its measurement."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One case on one version: what each rank ended up with, or why it did not run."""

    ranks: list[RankOutcome] = field(default_factory=list)
    failed: str = ""
    """Complaint of the first rank; empty where all ran."""


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """Steps of one kind of case, on a witness and on the installed version."""

    kind: str
    """Model and ranks, in words."""
    cases: int
    equal: int
    """Cases that are equal to the bit on every rank: token losses, reports, depths, gradients and their norm."""
    differing: dict[str, int] = field(default_factory=dict)
    """Tensor to the cases in which it differs, without those of known differences."""
    known: dict[str, int] = field(default_factory=dict)
    """Reason of a known difference to the cases that have it."""
    cannot_run: dict[str, int] = field(default_factory=dict)
    """Complaint to the cases that it ended."""

    @property
    def is_expected(self) -> bool:
        """Return whether every case is equal or differs as is known."""
        return self.equal + sum(self.known.values()) == self.cases

    @property
    def text(self) -> str:
        """Return the verdict as one line."""
        told = "".join(f"; known ({count}): {why}" for why, count in self.known.items())
        told += "".join(f"; cannot run ({count}): {why[:LONGEST_TOLD]}" for why, count in self.cannot_run.items())
        if self.differing:
            told += "; differ: " + ", ".join(f"{name} ({count})" for name, count in self.differing.items())
        return f"training steps, {self.kind:<38}{self.equal:>5} of {self.cases} equal{told}"


def step_cases(*, examples: int = 1) -> list[ModelCase]:
    """Return saved and drawn cases of one and two ranks that Megatron-LM itself can run, by layout; saved ones also on one rank."""
    saved = [case for _, case in store.replay(kinds=("models",)) if isinstance(case, ModelCase)]
    found = [*(case.on_one_rank() for case in saved), *saved]
    for layout in (each for size in range(1, MOST_RANKS + 1) for each in layouts(size)):
        for number, aim in enumerate(AIMS):
            found += _drawn(layout, aim, NUMBER + number, examples)
    chosen = [case for case in found if has_witness(case) and case.world_size <= MOST_RANKS]
    return sorted(chosen, key=lambda case: (case.world_size, case.layout, case.sizes.expert))


def _drawn(layout: Layout, aim: Aim, number: int, examples: int) -> Sequence[ModelCase]:
    wanted = Aim(architecture=aim.architecture, experts=aim.experts, depths=aim.depths, witnessed=True)
    return draw_cases("models", layout, wanted, number=number, examples=examples)


def kind_of(case: ModelCase) -> str:
    """Return the kind of a case's model and the number of its ranks, in words."""
    depths = "depths" if case.shape.depths else "no depths"
    ranks = "one rank" if case.world_size == 1 else f"{case.world_size} ranks"
    return f"{case.shape.architecture} {'experts' if case.shape.experts else 'dense'}, {depths}, {ranks}"


def run_steps(root: str, cases: Sequence[ModelCase]) -> tuple[str, list[StepResult]]:
    """Run cases in a process that imports `root` first, and return megatron-core's version there and each case's result.

    InputError where the process itself does not get as far as a case, with the last line that it said.
    """
    with tempfile.TemporaryDirectory(prefix="packproof-steps-") as folder:
        given, out = Path(folder) / "cases.jsonl", Path(folder) / "results.pt"
        given.write_text("".join(" ".join(case.to_json().split("\n")) + "\n" for case in cases), encoding="utf-8")
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "equivalence.witnesses.serve_steps",
            root,
            str(given),
            str(out),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # no pool of threads that forked ranks would wait for
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - this Python, and files of this function
        if done.returncode or not out.is_file():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise InputError(f"training steps cannot run on {root}: {last}")
        read = torch.load(out, weights_only=True)
    return read["version"], [_result(each) for each in read["results"]]


def compare_steps(
    version: str, cases: Sequence[ModelCase], installed: Sequence[StepResult], witness: Sequence[StepResult]
) -> list[StepVerdict]:
    """Compare the steps of a witness of this version of megatron-core with the installed version's, kind by kind."""
    kinds: dict[str, list[_Compared]] = {}
    for case, one, other in zip(cases, installed, witness, strict=True):
        kinds.setdefault(kind_of(case), []).append(_compared(version, case, one, other))
    return [_verdict(kind, compared) for kind, compared in kinds.items()]


@dataclass(frozen=True, kw_only=True)
class _Compared:
    differing: set[str] = field(default_factory=set)
    known: str = ""
    cannot_run: str = ""


def _compared(version: str, case: ModelCase, one: StepResult, other: StepResult) -> _Compared:
    if other.failed or one.failed:
        return _Compared(cannot_run=other.failed or f"on the installed version: {one.failed}")
    names = differing_tensors(one.ranks, other.ranks)
    known = next((each for each in KNOWN if version.startswith(each.versions) and each.applies(case)), None)
    if known is None:
        return _Compared(differing=names)
    unknown = {name for name in names if not re.fullmatch(known.tensors, name)}
    if not names:
        unknown = {f"nothing, though it must: {known.why}"}
    return _Compared(differing=unknown, known="" if unknown else known.why)


def _verdict(kind: str, compared: Sequence[_Compared]) -> StepVerdict:
    return StepVerdict(
        kind=kind,
        cases=len(compared),
        equal=sum(not (each.differing or each.known or each.cannot_run) for each in compared),
        differing=_counted(name for each in compared for name in each.differing),
        known=_counted(each.known for each in compared if each.known),
        cannot_run=_counted(each.cannot_run for each in compared if each.cannot_run),
    )


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(sorted(names)).most_common())


def differing_tensors(one: Sequence[RankOutcome], other: Sequence[RankOutcome]) -> set[str]:
    """Return which tensors of a step differ, without numbers of ranks, microbatches, depths, layers and experts."""
    if [each.place for each in one] != [each.place for each in other]:
        return {"places of ranks"}
    compared = compare_outcomes("steps", "installed", one, "witness", other)
    names = {each.tensor for finding in compared.findings for each in finding.differences}
    plain = (re.sub(r"^(?:rank|microbatch|depth) \d+ |(?<=\s)(?:microbatch|depth) \d+ ", "", name) for name in names)
    return {re.sub(r"\.\d+\.", ".*.", name) for name in plain}


def _result(read: dict[str, Any]) -> StepResult:
    if "failed" in read:
        return StepResult(failed=read["failed"])
    return StepResult(ranks=[_outcome(each) for each in read["ranks"]])


def _outcome(read: dict[str, Any]) -> RankOutcome:
    parts = [Part(**each) for each in read["gradients"]]
    return RankOutcome(**{**read, "place": RankCoordinates(**read["place"]), "gradients": parts})
