"""The main job: `python -m equivalence` compares all sides on saved, real and generated rows; `promote` keeps a case; `mutants` prints what finds which fault."""

from __future__ import annotations

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
from rich.live import Live
from rich.table import Table

from equivalence import exits
from equivalence.corpus import store
from equivalence.errors import InputError
from equivalence.mutants.matrix import CHECKS, failures, kill_matrix
from equivalence.plan import shard_of
from equivalence.pool import default_workers
from equivalence.report import html, summary, terminal
from equivalence.run import Options, count_rows, execute

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Compare all sides: saved cases first, then file layers, the packed sample, and generated rows.

    Exit code 0: all equal; 1: something differs, or a fault class was never hit; 2: bad input, or a side could not run;
    130: interrupted (what ran is reported).
    """

    size: Literal["tiny", "standard", "long"] = "standard"
    """tiny: a minute on two cores; standard: some six; long: until --rows are done, or for ever."""
    seed: int = 0
    """The same seed draws the same rows, on any number of workers."""
    shard: str = "1/1"
    """i/n: only every n-th job, for a run spread over machines."""
    subjects: str = "reference,production,megatron_lm"
    """Sides to compare, comma-separated; your own as module:object."""
    workers: int | None = None
    """Processes; the cores that there are unless given."""
    rows: int | None = None
    """Generated rows, at least; whole rounds are run."""
    sample: str = str(EXAMPLES / "packed" / "sample.jsonl.packed")
    """Packed JSONL file of real rows; `none` leaves it and the file layers out."""
    tokenizer: str = "nemotron-mini"
    """Of the sample: a name (nemotron-mini, nemotron-like, …) or a folder."""
    pack_length: int = 2048
    """Of the sample, in tokens; rounded down to what context parallelism divides."""
    out: Path = Path("build/equivalence")
    """Folder for report.json, report.html and shrunk counterexamples."""


@dataclass(frozen=True, kw_only=True)
class Promote:
    """Make a saved counterexample permanent: it moves into equivalence/corpus/saved and becomes a test."""

    file: Annotated[Path, tyro.conf.Positional]
    """The case, such as build/equivalence/corpus/….json."""
    name: str
    """What it shall be called: small letters, digits, - and _."""


@dataclass(frozen=True, kw_only=True)
class Mutants:
    """Put each known fault into production and print which check finds it. Exit code 1 if one survives or a check finds none."""

    workers: int | None = None
    """Processes; the cores that there are unless given."""
    seed: int = 0
    """Of the generated rows."""
    first_only: bool = False
    """Stop at the first check that finds a fault: a minute instead of some minutes."""
    sample: str = str(EXAMPLES / "packed" / "sample.jsonl.packed")
    """Packed JSONL file of real rows for nemotron-mini; `none` leaves it out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Console script. Returns the exit code."""
    return exits.run(_main, arguments)


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "run")
    asked = tyro.cli(
        Annotated[Run, tyro.conf.subcommand("run")]
        | Annotated[Promote, tyro.conf.subcommand("promote")]
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
    )
    with terminal.Reporter(console) as progress:
        outcome = execute(options, progress)
    document = summary.summarise(outcome, command)
    files = [asked.out / "report.json", asked.out / "report.html"]
    summary.write_json(document, files[0])
    html.write_html(document, files[1])
    terminal.show(document, console, [str(file) for file in files])
    return outcome.exit_code


def _mutants(asked: Mutants, console: Console) -> int:
    _quiet()
    sample = None if asked.sample == "none" else Path(asked.sample)
    table = Table(
        title="faults put into production, and the jobs each check ran until it found them", title_justify="left"
    )
    table.add_column("fault")
    for check in CHECKS:
        table.add_column(check, justify="right")
    matrix = []
    with Live(table, console=console, vertical_overflow="visible", transient=True):
        for kills in kill_matrix(
            sample=None if sample is None else (sample, count_rows(sample)),
            workers=asked.workers or default_workers(),
            seed=asked.seed,
            first_only=asked.first_only,
        ):
            matrix.append(kills)
            cells = ["" if count is None else str(count) if count else "·" for count in kills.found.values()]
            table.add_row(kills.mutant, *cells, style="red" if kills.survives else None)
    console.print(table)
    wrong = failures(matrix, checks=() if asked.first_only else CHECKS)
    for line in wrong:
        console.print(line, style="red", highlight=False)
    console.print(f"{sum(not kills.survives for kills in matrix)} of {len(matrix)} faults found", highlight=False)
    return 1 if wrong else 0


def _quiet() -> None:
    torch.set_num_threads(1)  # the workers are the parallelism
    # Says on each start that there is no CUDA; rows are built on the CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _subjects(names: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if len(found) < 2:  # one side equals itself
        raise InputError(f"--subjects {names}: name at least two sides, such as reference,production")
    return found


if __name__ == "__main__":
    sys.exit(main())
