"""Compare a job's file, tokenizer and configuration with a certificate: `packproof check --verify check.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from production.errors import PackproofError
from production.training.certificate import HELD, differences, fingerprints, read_certificate
from production.training.config import load
from production.training.data.tokenizer import load_tokenizer
from production.training.dry_run import planned_ranks
from tools.counted import counted

ALL_BYTES = 1 << 32
"""Bytes of a job's files up to which every byte is read again: seconds."""


def verify(
    certificate: Path, files: Sequence[Path], overrides: Sequence[str], console: Console, *, all_bytes: bool
) -> int:
    """Return 0 where all is as it was checked and the verdict lets a job start, else 1. PackproofError for what cannot be read.

    The job is the one that the certificate names, unless `files` name another.
    """
    read = read_certificate(certificate)
    request = read.get("request", {})
    paths = list(files) or [Path(each) for each in request.get("files", [])]
    said = list(overrides) if files else list(request.get("overrides", []))
    if missing := [path for path in paths if not path.is_file()]:
        raise PackproofError(
            what=f"the job file {missing[0]} does not exist",
            where=str(certificate),
            fix=f"run this where the check ran, or name the job: packproof check JOB.yaml --verify {certificate}",
        )
    job = load(paths, said)
    size = request.get("world_size")
    ranks = planned_ranks(job) if size is None else int(size)
    names = {file.path for each in (*job.data.train, *job.data.validation) for file in each.data_path}
    whole = all_bytes or sum(Path(name).stat().st_size for name in names if Path(name).is_file()) <= ALL_BYTES
    now = fingerprints(job, load_tokenizer(job), ranks, verify=whole)
    told = differences(read["fingerprints"], now)
    is_held = read.get("verdict") in HELD
    for each in told:
        console.print(f"no longer what was checked: {each}", style="red", markup=False, highlight=False, soft_wrap=True)
    how = (
        "every byte of the files was read" if whole else "files by size, time and samples; --all-bytes reads every byte"
    )
    console.print(
        f"{certificate} of {read.get('made', 'an unknown time')}, verdict {read.get('verdict')}: "
        + (f"{counted(len(told), 'thing')} changed" if told else "file, tokenizer and configuration are still those")
        + f" ({how})",
        style="bold red" if told else "green" if is_held else "",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if not is_held:
        console.print(
            f"this certificate starts no job: its verdict must be {' or '.join(HELD)}, got {read.get('verdict')} "
            f"({read.get('summary', 'no summary')}). To fix it: mend what the check found and check the job again",
            style="bold red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return 1 if told or not is_held else 0
