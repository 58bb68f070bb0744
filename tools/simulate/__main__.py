"""Compute the indices of all ranks of a job in one process, before any machine is booked.

    packproof-simulate --tp 8 --cp 16 --ep 32 --dp 4 --pack-length 262144 --rows 64 --html ranks.html

Checks that every token is owned exactly once and that labels stay with their tokens at every depth; shows the load of the
ranks, and what multi-token prediction, attention and experts send. Exit status: 0 all is well, 1 it is not, 2 bad input.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import psutil
import torch
import tyro
from rich.console import Console

from production import exits
from production.errors import PackproofError
from tools.simulate.costs import costs_of
from tools.simulate.layout import Job, draw_rows, first, read_rows
from tools.simulate.page import render_page
from tools.simulate.terminal import show
from tools.simulate.walk import walk


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the command line."""

    tp: int = 1
    """Tensor parallel size."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Expert parallel size."""
    dp: int = 1
    """Data parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    pack_length: int = 262_144
    """Tokens a row has in the model."""
    rows: int | None = None
    """Rows of the global batch. Default: the rows of the file, or one row for each data-parallel rank without a file."""
    segments: int = 128
    """Segments of a drawn row."""
    file: Path | None = None
    """Rows of your own instead of drawn ones: JSON lines, each the lengths of a row's segments or {"cu_seqlens": [...]}."""
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Cut of a row among context-parallel ranks."""
    sequence_parallel: bool = True
    """Whether tensor parallel ranks each hold a slice of the tokens."""
    depths: int = 1
    """Depths of multi-token prediction."""
    hidden: int = 4_096
    """Hidden size, by which the bytes that experts send are counted."""
    kv_heads: int = 8
    """Heads of keys and values, by which the bytes that attention sends are counted."""
    head_dim: int = 128
    """Size of a head."""
    topk: int = 8
    """Experts a token is sent to."""
    value_bytes: int = 2
    """Bytes of an activation: 2 for bfloat16."""
    seed: int = 0
    """Seed of the drawn rows."""
    html: Annotated[Path | None, tyro.conf.arg(aliases=("--picture",))] = None
    """Write one self-contained HTML page with the load of every rank there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    return exits.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    options = tyro.cli(Arguments, args=argv, prog="packproof-simulate", description=__doc__)
    start = time.perf_counter()
    # Many short operations: with more threads they wait for each other.
    torch.set_num_threads(1)
    try:
        given = None if options.file is None else read_rows(options.file)
        job = _job(options, len(given) if given is not None else options.dp)
        rows = draw_rows(job, segments=options.segments, seed=options.seed) if given is None else first(given, job.rows)
        found = walk(job, rows)
        costs = costs_of(found)
        if options.html is not None:
            options.html.parent.mkdir(parents=True, exist_ok=True)
            options.html.write_text(render_page(found, costs), encoding="utf-8")
    except (PackproofError, OSError) as error:
        print(f"packproof-simulate: {error}", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=110)
    show(found, costs, console)
    memory = psutil.Process().memory_info().rss / 1e9
    console.print(
        f"walked {job.ranks:,} ranks × {job.rows // job.dp} rows each in {time.perf_counter() - start:.1f} s, {memory:.1f} GB resident"
    )
    return 1 if found.faults else 0


def _job(options: Arguments, rows: int) -> Job:
    same = {each.name: getattr(options, each.name) for each in dataclasses.fields(Job)}
    return Job(**same | {"rows": rows if options.rows is None else options.rows})


if __name__ == "__main__":
    sys.exit(main())
