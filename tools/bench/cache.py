"""Measures a row that is read from the row cache against copying its bytes, and against Megatron-LM building it."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from equivalence.generators.real_tokenizers import cached_tokenizer
from production.files.source import open_source
from production.rows.builder import Row, RowBuilder, RowSettings
from production.tokens.folder import load_folder
from production.training.data.dataset import row_facts
from production.training.data.row_cache import RowCache
from tools.bench.contenders import megatron_lm_dataset
from tools.bench.loader import full_rows
from tools.bench.rows import SAMPLE

TENSORS = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens")


def cache(
    *, data: Path = SAMPLE, tokenizer: Path | None = None, pack_length: int = 262_144, rows: int = 3, repeats: int = 99
) -> dict[str, float]:
    """Read the same rows from the cache, build them with production and with Megatron-LM, and copy their bytes; print the ratios.

    Rows are read with their checksum verified, from the system's page cache. `copy` copies the five tensors of the built row to new
    memory. `data` is a packed file whose rows are put together until they fill `pack_length`; `tokenizer` a folder.
    """
    torch.set_num_threads(1)
    folder = cached_tokenizer("nemotron-like") if tokenizer is None else tokenizer
    found = load_folder(folder)
    settings = RowSettings(pack_length=pack_length)
    builder = RowBuilder(tokenizer=found, settings=settings)
    messages = full_rows(builder, data, pack_length, rows)
    built = [builder.build(one) for one in messages]
    with tempfile.TemporaryDirectory(prefix="packproof-bench-") as place:
        path = Path(place) / "rows.jsonl.packed"
        path.write_text("".join(json.dumps({"messages": one}, ensure_ascii=False) + "\n" for one in messages))
        facts = row_facts(open_source(path), found, settings)
        stored = RowCache(Path(place) / "cache", facts=facts, rows=rows, limit_bytes=10**12)
        for number, row in enumerate(built):
            stored.put(number, row)
            _check_equal(stored.get(number), row)
        dataset = megatron_lm_dataset(str(folder), settings.prompt_format, pack_length, messages)
        contenders: dict[str, tuple[int, Callable[[int], object]]] = {
            "cache": (repeats, stored.get),
            "copy": (repeats, lambda number: [getattr(built[number], name).clone() for name in TENSORS]),
            "production": (3, lambda number: builder.build(messages[number])),
            "megatron_lm": (1, lambda number: dataset[number]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        # Reading and copying take turns, so that what else the machine does meets both alike; building takes a thousand times as long.
        for group in (("cache", "copy"), ("production",), ("megatron_lm",)):
            for _ in range(contenders[group[0]][0]):
                for name in group:
                    begin = time.perf_counter()
                    for number in range(rows):
                        contenders[name][1](number)
                    seconds[name].append((time.perf_counter() - begin) / rows)
        bytes_a_row = sum(file.stat().st_size for file in stored.path.glob("*.rows")) / rows
        stored.close()
    return _show(seconds, bytes_a_row, pack_length)


def _check_equal(stored: object, row: Row) -> None:
    if not isinstance(stored, Row) or not all(
        torch.equal(getattr(stored, name), getattr(row, name)) for name in TENSORS
    ):
        raise SystemExit("a cached row differs from the built one: no speed is worth comparing")


def _show(seconds: dict[str, list[float]], bytes_a_row: float, pack_length: int) -> dict[str, float]:
    median = {name: statistics.median(times) for name, times in seconds.items()}
    table = Table(title=f"a row of {pack_length:,} tokens, medians; {bytes_a_row / 1e6:.1f} MB a row on disk")
    for heading in ("what", "ms", "time of the cache"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, value in median.items():
        table.add_row(name, f"{value * 1e3:.2f}", f"{value / median['cache']:.2f} x")
    Console().print(table)
    return {name: value / median["cache"] for name, value in median.items()}
