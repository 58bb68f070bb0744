"""Say whether a job may start: does its own file, under its own tokenizer and configuration, feed the model what
Megatron-LM would, which data does it lose, and which faults would stop it.

    packproof check JOB.yaml [key=value …] --out DIR     # five parts and a certificate: check.json and check.html
    packproof check JOB.yaml --cache --only config       # build the rows of data.cache_dir before the job starts
    packproof check --verify DIR/check.json              # are file, tokenizer and configuration unchanged?

Exit status: 0 proven (with --only: no fault in those parts), 1 a difference, a loss that the configuration does not
allow, or a part that could not run, 2 bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from equivalence.subjects import BUILT_IN, Subject
from equivalence.subjects import load as load_subject
from production import exits
from production.errors import PackproofError
from production.library_warnings import quiet_process
from production.training.certificate import fingerprints
from production.training.config import Job, load
from tools.check.cache_part import build_cache, check_cache_dir
from tools.check.certificate import certificate, write_json, write_text
from tools.check.config_part import check_config, refuse
from tools.check.file_part import check_file
from tools.check.progress import Progress
from tools.check.result import CACHE, EXIT, PARTS, PartResult, absent_parts, verdict_of
from tools.check.scan import Scanned
from tools.check.target import Target, open_target
from tools.check.terminal import show_part, show_verdict
from tools.check.verify import verify

CANNOT_RUN = 2
NEVER = float("inf")
LEAST_ROWS, MOST_ROWS = 8, 64
SAMPLE_TOKENS = 1 << 21
"""Tokens of the sample where `--rows` is not given."""
EDGE_ROWS = 4
"""Times `--rows` that are compared of each kind of edge at most."""
_SHARES = {"file": 0.5, "rows": 0.8, "layout": 0.9}
"""Share of the budget that is spent when a part must have ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's own) and return its exit status."""
    return exits.run(_main, arguments)


def _main(arguments: Sequence[str] | None) -> int:
    quiet_process()
    torch.set_num_threads(1)  # ranks are forked from here, and a fork copies no threads
    options = _options(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    try:
        if options.verify is not None:
            return verify(options.verify, options.files, options.overrides, console, all_bytes=options.all_bytes)
        job = _without_certificate(load(options.files, options.overrides))
        sides = _sides(options.subjects)
        if options.cache:
            check_cache_dir(job)
        return _Check(options, job, sides, console).run()
    except (PackproofError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
    except (ValueError, ImportError) as error:
        print(f"packproof check: {error}", file=sys.stderr)
    return CANNOT_RUN


class _Check:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, job: Job, sides: dict[str, Subject], console: Console) -> None:
        self._options, self._job, self._sides, self._console = options, job, sides, console
        fitting = SAMPLE_TOKENS // max(job.policy.max_total_sequence_length, 1)
        self._rows: int = options.rows or min(max(fitting, LEAST_ROWS), MOST_ROWS)
        self._progress = Progress()
        self._started = time.monotonic()
        self._results: dict[str, PartResult] = {}
        self._scans: list[Scanned] = []

    def run(self) -> int:
        """Run the parts that were asked for, write the certificate, and return the exit status."""
        options = self._options
        self._progress.start("the configuration")
        config, dry_run = check_config(self._job, options.world_size)
        target, held = None, None
        try:
            target = open_target(self._job, dry_run.ranks)
            self._progress.start("the fingerprints")
            held = fingerprints(self._job, target.tokenizer, dry_run.ranks)
        except (PackproofError, OSError) as error:
            refuse(config, error)
        # Every other part needs a job that can be opened, so the configuration is always examined, and shown with what opening found.
        self._add(config)
        if target is not None:
            self._compare(target)
            if options.cache:
                self._cache(target)
            self._check_unchanged(target, held)
        seconds = time.monotonic() - self._started
        asked = [name for name in PARTS if name in options.only]
        verdict = verdict_of(self._results.values(), asked)
        absent = absent_parts(self._results, asked)
        made = certificate(
            verdict,
            self._results,
            absent=absent,
            request={
                "files": [str(file) for file in options.files],
                "overrides": options.overrides,
                "world_size": options.world_size,
                "only": asked,
                "rows": self._rows,
                "budget_seconds": None if options.budget == NEVER else options.budget,
                "subjects": options.subjects,
                "cache": options.cache,
            },
            fingerprints=held,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=seconds,
        )
        self._progress.clear()
        show_verdict(verdict, self._results, absent, seconds, self._console)
        self._write(made)
        return EXIT[verdict]

    def _compare(self, target: Target) -> None:
        """Run the parts that need the file; layout and order only for a configuration that may run."""
        options = self._options
        scans_needed = {"file", "rows", "layout"} & set(options.only)
        if scans_needed:
            result, self._scans = check_file(
                target,
                most=EDGE_ROWS * self._rows,
                deadline=self._deadline("file"),
                progress=self._progress,
                told=self._results["config"].findings,
                processes=options.processes,
            )
            self._add(result)
        if "rows" in options.only:
            from tools.check.rows_part import check_rows  # noqa: PLC0415 - what follows imports seconds of witnesses

            self._add(
                check_rows(
                    target,
                    self._scans,
                    self._sides,
                    rows=self._rows,
                    deadline=self._deadline("rows"),
                    progress=self._progress,
                )
            )
        if self._results["config"].status == "refused":
            return
        if "layout" in options.only:
            from tools.check.layout_part import check_layout  # noqa: PLC0415 - as above

            self._add(check_layout(target, self._scans[0], deadline=self._deadline("layout"), progress=self._progress))
        if "order" in options.only:
            from tools.check.order_part import check_job_order  # noqa: PLC0415 - as above

            self._add(check_job_order(target, progress=self._progress))

    def _cache(self, target: Target) -> None:
        """Build the row cache of a job that may start; one that is refused would never read the rows."""
        if self._results["config"].status == "refused":
            self._add(PartResult(name=CACHE, summary="nothing was built, since the job cannot start as it stands"))
            return
        try:
            result = build_cache(
                target,
                processes=self._options.processes,
                deadline=self._started + float(self._options.budget),
                progress=self._progress,
            )
        except (PackproofError, OSError) as error:
            self._refuse(error)
            return
        self._add(result)

    def _check_unchanged(self, target: Target, held: dict[str, Any] | None) -> None:
        """Refuse a file that changed while it was checked."""
        try:
            now = fingerprints(self._job, target.tokenizer, target.ranks)
        except (PackproofError, OSError) as error:
            self._refuse(error)
            return
        if now != held:
            self._refuse(
                PackproofError(
                    what="a file changed while it was checked",
                    where=target.train.names,
                    fix="check the file again when nothing writes to it",
                )
            )

    def _refuse(self, error: PackproofError | OSError) -> None:
        finding = refuse(self._results["config"], error)
        if finding is None:
            return
        self._progress.clear()
        self._console.print(f"    {finding.text()}", style="red", markup=False, highlight=False, soft_wrap=True)

    def _add(self, result: PartResult) -> None:
        self._results[result.name] = result
        self._progress.clear()
        show_part(result, self._console)

    def _deadline(self, part: str) -> float:
        return self._started + float(self._options.budget) * _SHARES[part]

    def _write(self, made: dict[str, Any]) -> None:
        from tools.check.page import render_page  # noqa: PLC0415 - jinja2, and only at the end

        folder = self._options.out
        path = write_json(made, folder)
        page = write_text(path.with_suffix(".html"), render_page(made))
        self._console.print(f"certificate: {path} and {page}", highlight=False, soft_wrap=True)


def _without_certificate(job: Job) -> Job:
    """Return the job as it is checked: a certificate that it names is what a check makes again."""
    return dataclasses.replace(job, data=dataclasses.replace(job.data, certificate=None))


def _sides(text: str) -> dict[str, Subject]:
    names = [name for name in text.split(",") if name]
    if len(set(names)) < 2:
        raise ValueError(f"--subjects must name two sides at least, with commas between, got {text!r}")
    return {name: load_subject(name) for name in names}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="packproof check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="JOB.yaml | key=value",
        help="the job's YAML file (several are laid over each other), and overrides",
    )
    parser.add_argument(
        "--only",
        type=_parts,
        default=list(PARTS),
        metavar="PARTS",
        help=f"parts with commas between: {','.join(PARTS)}",
    )
    parser.add_argument(
        "--rows",
        type=_rows,
        help=f"rows of a sample spread over the file (default {MOST_ROWS}, fewer where rows are long); {EDGE_ROWS} times as many of each kind of "
        "edge at most",
    )
    parser.add_argument(
        "--budget",
        type=_budget,
        default=NEVER,
        metavar="TIME",
        help="longest time of the check, such as 90s, 10m or 2h",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/check"),
        help="folder of check.json and check.html (default build/check)",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        help="ranks of the job, in place of the cluster section; default: WORLD_SIZE, else the cluster section, else one replica",
    )
    parser.add_argument(
        "--subjects", default=",".join(BUILT_IN), help="sides of the part rows; your own as module:object"
    )
    parser.add_argument(
        "--cache",
        action="store_true",
        help="build the job's row cache (data.cache_dir), so that a job started afterwards reads every row from its first step on",
    )
    parser.add_argument(
        "--processes",
        type=_rows,
        help="processes that build rows for the part file and for --cache (default: 1 for small files, else the cores)",
    )
    parser.add_argument(
        "--verify", type=Path, metavar="CHECK.json", help="compare file, tokenizer and configuration with a certificate"
    )
    parser.add_argument(
        "--all-bytes",
        action="store_true",
        help="with --verify: read every byte of the files again, whatever their size",
    )
    options = parser.parse_intermixed_args(arguments)
    options.overrides = [word for word in options.words if "=" in word]
    options.files = [Path(word) for word in options.words if "=" not in word]
    if not options.files and options.verify is None:
        parser.error("name a job's YAML file, or a certificate with --verify")
    if options.cache and options.verify is not None:
        parser.error("--cache builds rows of a job's YAML file, and --verify builds none: give one of the two")
    return options


def _parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    return names or list(PARTS)


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _budget(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in "smh" and text else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < NEVER:
        raise argparse.ArgumentTypeError(f"must be a time above 0, such as 90s, 10m or 2h, got {text!r}")
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
