"""Measures the loader against the bare RowBuilder on the same rows in one run, and how long a step waits for it."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from equivalence.generators.real_tokenizers import cached_tokenizer
from production.files.source import open_source
from production.rows.batch import BatchSettings
from production.rows.builder import RowBuilder, RowSettings
from production.tokens.folder import load_folder
from production.training.data.dataset import PackedData
from production.training.data.loader import Loader, LoaderSettings
from production.training.data.order import Order
from production.training.order_settings import OrderSettings
from tools.bench.rows import SAMPLE

Messages = list[dict[str, Any]]


def loader(
    *,
    data: Path = SAMPLE,
    tokenizer: Path | None = None,
    pack_length: int = 32_768,
    global_batch_size: int = 4,
    steps: int = 4,
    workers: tuple[int, ...] = (0, 1, 2),
    prefetch: int = 2,
    pace: float = 2.0,
    repeats: int = 3,
) -> dict[int, float]:
    """Prepare the same batches with each number of workers and with RowBuilder alone; prints and returns the ratios of speed.

    RowBuilder has parsed messages and one thread, as each worker has; a loader also reads, parses, sends and collates, and is
    forked and closed in the time. Then a step of `pace` times a batch's own building time is waited for, and the wait printed.
    `data` is a packed file whose rows are put together until they fill `pack_length`; `tokenizer` a folder.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    found = load_folder(cached_tokenizer("nemotron-like") if tokenizer is None else tokenizer)
    settings = RowSettings(pack_length=pack_length)
    builder = RowBuilder(tokenizer=found, settings=settings)
    rows = full_rows(builder, data, pack_length, steps * global_batch_size)
    with tempfile.TemporaryDirectory(prefix="packproof-bench-") as place:
        path = Path(place) / "rows.jsonl.packed"
        path.write_text("".join(json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in rows))
        guards = BatchSettings(
            context_parallel_size=1, data_parallel_size=1, global_batch_size=global_batch_size, pad_token_id=None
        )
        recipe = PackedData(sources=[open_source(path)], tokenizer=found, settings=settings, guards=guards)
        order = Order(
            recipe.rows,
            OrderSettings(
                kind="sequential",
                last_batch="drop",
                global_batch_size=global_batch_size,
                data_parallel_size=1,
                max_epochs=1,
            ),
        )
        seconds: dict[int | None, list[float]] = {count: [] for count in (None, *workers)}
        for _ in range(repeats):  # taken in turns: what else the machine does meets all alike
            for count, times in seconds.items():
                start = time.perf_counter()
                if count is None:
                    for at in range(0, len(rows), recipe.group):
                        builder.build_group(rows[at : at + recipe.group])
                else:
                    _go_through(recipe, order, count, prefetch, 0.0)
                times.append(time.perf_counter() - start)
        step = pace * statistics.median(seconds[None]) / steps
        waits = {count: _go_through(recipe, order, count, prefetch, step) for count in workers}
    return _show(seconds, waits, step, tokens=len(rows) * pack_length, pack_length=pack_length)


def _go_through(recipe: PackedData, order: Order, workers: int, prefetch: int, step_seconds: float) -> list[float]:
    """Go through all batches, holding each for the time of a step; return the waiting time for each."""
    settings = LoaderSettings(workers=workers, prefetch=prefetch)
    waits = []
    with Loader(recipe, order, share=(0, 1), settings=settings) as batches:
        for prepared in batches:
            waits.append(prepared.wait_seconds)
            time.sleep(step_seconds)
    return waits


def _show(
    seconds: dict[int | None, list[float]], waits: dict[int, list[float]], step: float, *, tokens: int, pack_length: int
) -> dict[int, float]:
    ratios: dict[int, float] = {}
    table = Table(title=f"{tokens:,} tokens in rows of {pack_length:,}, medians of {len(seconds[None])} rounds")
    for heading in ("what", "M tokens/s", "of RowBuilder", f"longest wait of a step of {step * 1e3:.0f} ms", "first"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for count, times in seconds.items():
        speed = f"{tokens / statistics.median(times) / 1e6:.3f}"
        if count is None:
            table.add_row("RowBuilder", speed, "", "", "")
            continue
        ratios[count] = statistics.median(bare / own for bare, own in zip(seconds[None], times, strict=True))
        first, *others = waits[count]
        told = f"{max(others) * 1e3:.1f} ms" if others else ""
        table.add_row(f"{count} workers", speed, f"{ratios[count]:.2f}", told, f"{first * 1e3:.1f} ms")
    Console().print(table)
    return ratios


def full_rows(builder: RowBuilder, data: Path, pack_length: int, count: int) -> list[Messages]:
    """Return rows without padding."""
    texts = _numbered(data)
    rows: list[Messages] = []
    while len(rows) < count:
        row: Messages = []
        missing = pack_length
        while missing:
            characters = 0
            while characters < 3 * missing:
                row += (part := next(texts))
                characters += sum(len(message["content"]) for message in part)
            missing = int(builder.build(row).report["padding_tokens"] or 0)
        rows.append(row)
    return rows


def _numbered(data: Path) -> Iterator[Messages]:
    """Yield the file's rows again and again, with a number in each text, so that no text repeats."""
    with open_source(data) as source:
        for repeat in itertools.count():
            for row in source:
                yield [
                    {
                        "role": message["role"],
                        "content": f"{repeat}. {message['content']}" if message["content"] else "",
                    }
                    for message in row
                ]
