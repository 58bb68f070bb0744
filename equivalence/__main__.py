"""The main job: `python -m equivalence` compares all sides on saved, real and generated rows; `promote` makes a case permanent; `mutants` prints which check finds which fault."""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before the library loads: its threads do not survive a fork

import torch
import tyro
from rich.console import Console

from equivalence.cases import store
from equivalence.checks.kinds import named
from equivalence.errors import InputError
from equivalence.mutants.matrix import CHECKS, Kills, failures, kill_matrix
from equivalence.report import html, kills, summary, terminal
from equivalence.runner import job_runners
from equivalence.runner.alone import checked
from equivalence.runner.main import execute, sample_notes
from equivalence.runner.outcome import Options
from equivalence.runner.own_settings import count_rows
from equivalence.runner.plan import shard_of
from equivalence.runner.pool import default_workers
from equivalence.runner.restriction import restriction
from equivalence.subjects import split_names
from production import exits

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Compare all sides: saved cases first, then every row of the packed sample in its own settings, generated rows, layouts and steps.

    Exit code 0: all equal; 1: something differs (an exception of production or of a subject is a difference), or a fault class was never hit;
    2: bad input, or a witness could not run; 130: interrupted (what ran is reported).
    """

    size: Literal["tiny", "standard", "long"] = "tiny"
    """tiny: some three minutes on two idle cores; standard: some twenty; long: until --rows are done, or until you stop it."""
    seed: int = 0
    """The same seed draws the same rows, on any number of workers."""
    shard: str = "1/1"
    """i/n: only every n-th job, for a run spread over machines."""
    subjects: str = "reference,production,megatron_lm"
    """Sides to compare, comma-separated; your own as module:object, or in an environment of its own as exec:"PYTHON my_adapter.py"."""
    workers: int | None = None
    """Processes; the cores that there are unless given."""
    rows: int | None = None
    """Generated rows, at least; whole rounds are run."""
    sample: str = str(EXAMPLES / "packed" / "sample.jsonl.packed")
    """Packed JSONL file of real rows: each is built first as its manifest says; `none` leaves it out."""
    tokenizer: str = "nemotron-mini"
    """Tokenizer of the sample: a name (nemotron-mini, nemotron-like, …) or a folder."""
    pack_length: int | None = None
    """Pack length of the sample, in tokens. Default: the manifest's, or 2048 without a manifest. In other settings it is rounded down to a multiple that cp allows."""
    formats: str | None = None
    """Prompt formats to build rows in, comma-separated; all unless given."""
    cp: str | None = None
    """Context parallel sizes of rows, comma-separated; all unless given."""
    semantics: str | None = None
    """Presets of rows, comma-separated, each with its overrides: strict,row_ends=any; all unless given."""
    rows_only: bool = False
    """Compare only rows and batches; leave out cuts, files, losses, training steps and runs, in which a subject takes no part."""
    models: bool = True
    """Compare training steps of models in worlds of one to eight ranks, which takes half of the time."""
    job: str | None = None
    """Run only jobs whose title in a report contains this text."""
    out: Path = Path("build/equivalence")
    """Folder for report.json, report.html and shrunk counterexamples."""


@dataclass(frozen=True, kw_only=True)
class Promote:
    """Make a saved counterexample permanent: the case moves into equivalence/cases/saved and becomes a test."""

    file: Annotated[Path, tyro.conf.Positional]
    """The case, such as build/equivalence/corpus/….json."""
    name: str
    """Name of the promoted case: small letters, digits, - and _."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Run one saved case of any kind again and print what differs. Exit code 1 if something does, 2 if a witness could not run."""

    file: Annotated[Path, tyro.conf.Positional]
    """The case, such as build/equivalence/corpus/models/….json."""
    subjects: str = "reference,production,megatron_lm"
    """Sides that build the rows of a row's case."""


@dataclass(frozen=True, kw_only=True)
class Mutants:
    """Put each known fault into production and print which check finds it. Exit code 1 if one survives or a check finds none."""

    kind: Literal["rows", "layouts", "both"] = "both"
    """Kind of fault: faults of rows and batches, or faults in cutting, shifting and distributing rows and computing gradients."""
    workers: int | None = None
    """Processes; the cores that there are unless given."""
    seed: int = 0
    """Seed of the generated rows."""
    first_only: bool = False
    """Stop at the first check that finds a fault: a minute instead of some minutes."""
    sample: str = str(EXAMPLES / "packed" / "sample.jsonl.packed")
    """Packed JSONL file of real rows for nemotron-mini; `none` leaves it out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return exits.run(_main, arguments)


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "run")
    asked = tyro.cli(
        Annotated[Run, tyro.conf.subcommand("run")]
        | Annotated[Promote, tyro.conf.subcommand("promote")]
        | Annotated[Replay, tyro.conf.subcommand("replay")]
        | Annotated[Mutants, tyro.conf.subcommand("mutants")],
        args=given,
        prog="packproof-equivalence",
        description=__doc__,
        use_underscores=False,
    )
    console, errors = Console(), Console(stderr=True)
    try:
        if isinstance(asked, Promote):
            console.print(
                f"{store.promote(asked.file, asked.name)} is a permanent test now", highlight=False, soft_wrap=True
            )
            return 0
        if isinstance(asked, Replay):
            return _replay(asked, console)
        if isinstance(asked, Mutants):
            return _mutants(asked, console)
        return _run(asked, shlex.join(["packproof-equivalence", *given]), console)
    except (ValueError, OSError) as error:
        errors.print(f"packproof-equivalence: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        return 2


def _run(asked: Run, command: str, console: Console) -> int:
    _quiet()
    options = Options(
        size=asked.size,
        seed=asked.seed,
        shard=shard_of(asked.shard),
        subjects=_subjects(asked.subjects),
        workers=default_workers() if asked.workers is None else asked.workers,
        sample=None if asked.sample == "none" else Path(asked.sample),
        tokenizer=asked.tokenizer,
        pack_length=asked.pack_length,
        out=asked.out,
        rows=asked.rows,
        models=asked.models and not asked.rows_only,
        rows_only=asked.rows_only,
        job=asked.job,
        restriction=restriction(asked.formats, asked.cp, asked.semantics),
    )
    for note in sample_notes(options.sample, options.tokenizer):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    with terminal.Reporter(console) as progress:
        outcome = execute(options, progress)
    document = summary.summarise(outcome, command)
    files = [asked.out / "report.json", asked.out / "report.html"]
    summary.write_json(document, files[0])
    html.write_html(document, files[1])
    terminal.show(document, console, [str(file) for file in files])
    return outcome.exit_code


def _replay(asked: Replay, console: Console) -> int:
    _quiet()
    case = store.read(asked.file)
    sides = (
        [job_runners.subject(name) for name in _subjects(asked.subjects)] if store.kind_of(case).name == "rows" else []
    )
    results = checked(case, sides)
    for result in results:
        for finding in result.findings:
            for each in finding.differences:
                place = "" if each.position is None else f"[{each.position}]"
                kind = named(each.kind, check=result.check, tensor=each.tensor)
                line = f"{result.check}: {each.tensor}{place}: {finding.left} {each.left} / {finding.right} {each.right} ({kind})"
                console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    equal = all(result.equal for result in results)
    said = ", ".join(
        f"{result.check} {result.refused or ('equal' if result.equal else 'different')}" for result in results
    )
    console.print(f"{case.stem}: {said}", highlight=False, markup=False)
    return 0 if equal else 1


def _mutants(asked: Mutants, console: Console) -> int:
    _quiet()
    sample = None if asked.sample == "none" else Path(asked.sample)
    workers, seed, first_only = asked.workers or default_workers(), asked.seed, asked.first_only
    found: list[Kills] = []
    wrong: list[str] = []
    if asked.kind in ("rows", "both"):
        of_sample = None if sample is None else (sample, count_rows(sample))
        of_rows = kill_matrix(sample=of_sample, workers=workers, seed=seed, first_only=first_only)
        found += kills.show_columns(of_rows, CHECKS, console)
        wrong += failures(found, checks=() if first_only else CHECKS)
    if asked.kind in ("layouts", "both"):
        # megatron-core, which other commands do without. Each check is the first of some fault.
        layout_matrix = importlib.import_module("equivalence.mutants.layout_matrix")
        matrix = layout_matrix.layout_kill_matrix(workers=workers, seed=seed, first_only=first_only)
        of_layouts = kills.show_words(matrix, console)
        wrong += failures(of_layouts, checks=layout_matrix.CHECKS_OF_LAYOUTS)
        found += of_layouts
    for line in wrong:
        console.print(line, style="red", highlight=False)
    console.print(f"{sum(not each.survives for each in found)} of {len(found)} faults found", highlight=False)
    return 1 if wrong else 0


def _quiet() -> None:
    torch.set_num_threads(1)  # the workers are the parallelism
    # Says on each start that there is no CUDA; rows are built on the CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _subjects(names: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(split_names(names)))
    if len(found) < 2:  # one side equals itself
        raise InputError(f"--subjects {names}: name at least two sides, such as reference,production")
    return found


if __name__ == "__main__":
    sys.exit(main())
