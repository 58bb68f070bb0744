"""Measure production's rows against Megatron-LM's SFTDataset and against the bare tokenizer, on the same rows in one run.

Each number of threads gets a process of its own, in which the contenders take turns. Each ratio is the median over rounds, so that other
load on the machine affects all contenders equally.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from equivalence.generators.real_tokenizers import cached_tokenizer
from production.errors import PackproofError

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "packed" / "sample.jsonl.packed"
TARGETS = {
    ("short", 1): (5.5, 0.85),
    ("short", 2): (10.0, 0.80),
    ("long", 1): (3.5, 0.85),
    ("long", 2): (7.0, 0.80),
}
"""Targets for nemotron-nano-v2: smallest ratio to Megatron-LM, and smallest fraction of the bare tokenizer's rate."""

Kind = Literal["short", "long"]
Format = Literal["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table; speeds are medians, ratios medians of the rounds' ratios."""

    kind: str
    """`short` turns, as in a chat, or `long` ones of some hundred to some thousand tokens."""
    prompt_format: str
    pack_length: int
    threads: int
    rows: int
    tokens: int
    """Tokens in the rows, padding apart."""
    megatron_lm: float
    """Million tokens/s of SFTDataset."""
    production: float
    """Million tokens/s of production, equal turns encoded once."""
    bare: float
    """Million tokens/s of `encode_batch_fast` over each row's turn texts, equal ones once."""
    over_megatron_lm: float
    """Production's speed over SFTDataset's."""
    over_bare_unique: float
    """Production's speed over the bare tokenizer's, both with equal turns encoded once."""
    over_bare_all: float
    """The same with each turn encoded."""

    def misses(self) -> list[str]:
        """Return the missed targets of TARGETS, in words."""
        if self.prompt_format != "nemotron-nano-v2" or (self.kind, self.threads) not in TARGETS:
            return []
        megatron_lm, bare = TARGETS[self.kind, self.threads]
        found = (
            ("Megatron-LM", self.over_megatron_lm, megatron_lm),
            ("bare, equal turns once", self.over_bare_unique, bare),
            ("bare, all turns", self.over_bare_all, bare),
        )
        return [f"{what}: {ratio:.2f} of {least:.2f}" for what, ratio, least in found if ratio < least]


def rows(
    *,
    data: Path = SAMPLE,
    tokenizer: Path | None = None,
    kinds: tuple[Kind, ...] = ("short", "long"),
    formats: tuple[Format, ...] = ("nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"),
    pack_lengths: tuple[int, ...] = (4096, 32_768, 262_144),
    threads: tuple[int, ...] = (1, 2),
    repeats: int = 5,
    json_file: Path | None = None,
) -> None:
    """Build the same rows with production, with Megatron-LM and with the bare tokenizer, and print tokens/s and ratios.

    `data` is a packed file or a folder of packed files; conversations with short and with long turns are taken from `data` repeatedly, with
    another number in each text, until the rows are full. `tokenizer` is a folder (by default the real tokenizer of 131,072 ids).
    `json_file` receives the results for machines. The default run takes about ten minutes on two cores; fewer values take less.
    """
    folder = cached_tokenizer("nemotron-like") if tokenizer is None else tokenizer
    files = sorted(data.glob("*.jsonl*")) if data.is_dir() else [data]
    files = [file for file in files if file.suffix in {".jsonl", ".packed"}]
    if not files or not all(file.is_file() for file in files):
        raise PackproofError(
            what="a packed file must be given",
            where=str(data),
            fix="give a .jsonl.packed file or a folder of such files",
        )
    results: list[Result] = []
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has no width of its own, and the table needs this much
    for count in threads:
        for prompt_format in formats:
            task = {
                "files": [str(file) for file in files],
                "tokenizer": str(folder),
                "kinds": kinds,
                "prompt_format": prompt_format,
                "pack_lengths": pack_lengths,
                "threads": count,
                "repeats": repeats,
            }
            console.print(f"{prompt_format}, {count} thread{'s' * (count > 1)} …", highlight=False)
            found = _in_process(task)
            results += found
            for result in found:
                ratios = f"{result.over_megatron_lm:.2f} × Megatron-LM, {result.over_bare_unique:.2f} of bare"
                console.print(f"  {result.kind} turns, P {result.pack_length:,}: {ratios}", highlight=False)
            if json_file is not None:  # after each, so that an interrupted run has what it measured
                json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    _show(console, results, repeats)


def _in_process(task: dict[str, Any]) -> list[Result]:
    """Return the results of a process with `threads` threads; rayon and torch fix their numbers of threads at start."""
    count = str(task["threads"])
    names = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, count) | {"TOKENIZERS_PARALLELISM": "true"}
    with tempfile.TemporaryDirectory(prefix="packproof-bench-") as place:
        out = Path(place) / "results.json"
        command = [sys.executable, "-m", "tools.bench.contenders", json.dumps(task), str(out)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)  # noqa: S603
        if done.returncode:
            raise PackproofError(
                what=f"the measuring process failed:\n{done.stderr[-2000:]}",
                where=f"{task['prompt_format']}, {count} threads",
                fix="see its last lines above",
            )
        return msgspec.json.decode(out.read_bytes(), type=list[Result])


def _show(console: Console, results: list[Result], repeats: int) -> None:
    table = Table(title=f"rows: million tokens/s and ratios, medians of {repeats} rounds", expand=False)
    for title in ("turns", "format", "P", "threads", "M-LM", "bare", "ours"):
        table.add_column(title, justify="left" if title in {"turns", "format"} else "right")
    for title in ("× M-LM", "of bare, once", "of bare, all"):
        table.add_column(title, justify="right")
    for result in sorted(
        results, key=lambda one: (one.prompt_format != "nemotron-nano-v2", one.prompt_format, one.kind)
    ):
        speeds = (f"{speed:.3f}" for speed in (result.megatron_lm, result.bare, result.production))
        ratios = (result.over_megatron_lm, result.over_bare_unique, result.over_bare_all)
        table.add_row(
            result.kind,
            result.prompt_format,
            f"{result.pack_length:,}",
            str(result.threads),
            *speeds,
            *(f"{ratio:.2f}" for ratio in ratios),
            style="bold red" if result.misses() else None,
        )
    console.print(table)
    console.print(
        "M-LM: Megatron-LM. Red: below a target. Bare: encode_batch_fast over the same turn texts, which renders and lays out nothing."
    )
    nano = [result.over_megatron_lm for result in results if result.prompt_format == "nemotron-nano-v2"]
    if nano:
        console.print(
            f"nemotron-nano-v2: {min(nano):.2f} to {max(nano):.2f} times Megatron-LM, median {statistics.median(nano):.2f}"
        )
    for result in results:
        for miss in result.misses():
            console.print(f"below target: {result.kind}, P {result.pack_length:,}, {result.threads} threads: {miss}")
