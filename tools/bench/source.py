"""Measures production's file source against reading the file's bytes once, both in one run on one generated file."""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from production.files.file_state import BLOCK_BYTES
from production.files.parse import parse_row
from production.files.source import PackedSource, open_source

_WORDS = [
    "the",
    "row",
    "says:",
    '"packed"',
    "naïve",
    "数据",
    "\n",
    "x = {'a': 1}",
    "—",
    "label",
    "boundary",
    "😀",
    "mot :",
    "of",
]
_BLOCK = 1 << 26

# VmHWM, not ru_maxrss: that one starts at the parent's.
_MEMORY = """
import sys
def kilobytes(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name + ":"))
from production.files.source import open_source
idle = kilobytes("VmRSS")
source = open_source(sys.argv[1], cache_folder=sys.argv[2])
built = kilobytes("VmHWM")
for row in source:
    pass
for number in range(0, len(source), 7):
    source[number]
print((built - idle) / 1024, (kilobytes("VmHWM") - idle) / 1024)
"""


def source(*, size_gb: float = 1.0, row_kb: float = 32.0, repeats: int = 5, folder: Path | None = None) -> None:
    """Open, index, reopen and read a generated file; print the ratios and remove the file.

    `row_kb` is the mean length of a line; short lines cost more, because each line is found separately. `folder` is the place of the file
    (by default the system's temporary folder); it needs `size_gb` of space, and as much memory for the cache.
    """
    with tempfile.TemporaryDirectory(prefix="packproof-bench-", dir=folder) as place:
        if shutil.disk_usage(place).free < size_gb * 1.1e9:
            sys.exit(f"{place} has no room for {size_gb} GB; name another folder (--folder)")
        path = Path(place) / "rows.jsonl.packed"
        size = _write(path, size_gb, row_kb)
        _show(_measure(path, Path(place), size, repeats), size, row_kb, repeats)


def _measure(path: Path, place: Path, size: int, repeats: int) -> list[tuple[str, str, str, str]]:
    times: dict[str, list[float]] = {"read": [], "index": [], "reopen": []}
    for repeat in range(repeats):  # taken in turns: what else the machine does meets all alike
        times["read"].append(_seconds(lambda: _read(path)))
        times["index"].append(_seconds(lambda repeat=repeat: open_source(path, cache_folder=place / str(repeat))))  # type: ignore[misc]
        times["reopen"].append(_seconds(lambda repeat=repeat: open_source(path, cache_folder=place / str(repeat))))  # type: ignore[misc]
    read, index, reopen = (statistics.median(times[name]) for name in ("read", "index", "reopen"))
    found = open_source(path, cache_folder=place / "0")
    memory = subprocess.run(  # noqa: S603 - this interpreter, on the file made above
        [sys.executable, "-c", _MEMORY, path, place / "memory"], check=True, capture_output=True, text=True
    )
    built, used = map(float, memory.stdout.split())
    return [
        ("read the bytes once", f"{read:.3f} s", f"{size / read / 1e9:.2f} GB/s", ""),
        ("open and index", f"{index:.3f} s", f"{index / read:.2f} × reading", "≤ 2 ×"),
        ("reopen", f"{reopen * 1e3:.1f} ms", "", "< 50 ms"),
        ("resident above idle, indexing", f"{built:.0f} MB", "", "< 300 MB"),
        ("resident above idle, reading all", f"{used:.0f} MB", "", "< 300 MB"),
        *_access(found),
    ]


def _access(found: PackedSource) -> list[tuple[str, str, str, str]]:
    """Measure random access, and the cost of a row's checks beside its decoding."""
    picks = random.Random(1).sample(range(len(found)), min(500, len(found)))  # noqa: S311
    lines = [found.raw(number)[:-1] for number in picks]
    size = sum(map(len, lines))
    access = min(_seconds(lambda: [found[number] for number in picks]) for _ in range(3))
    decode = msgspec.json.Decoder().decode
    bare = min(_seconds(lambda: [decode(line) for line in lines]) for _ in range(3))
    parse = min(_seconds(lambda: [parse_row(line, chat_key=found.chat_key) for line in lines]) for _ in range(3))
    return [
        ("one row at random", f"{access / len(picks) * 1e6:.0f} µs", f"{size / access / 1e6:.0f} MB/s", ""),
        ("msgspec alone", f"{bare / len(picks) * 1e6:.0f} µs", f"{size / bare / 1e6:.0f} MB/s", ""),
        ("parse_row (all checks)", f"{parse / len(picks) * 1e6:.0f} µs", f"{parse / bare:.2f} × msgspec", ""),
    ]


def _show(rows: list[tuple[str, str, str, str]], size: int, row_kb: float, repeats: int) -> None:
    table = Table(title=f"{size / 1e9:.2f} GB, lines of {row_kb:g} kB on average, medians of {repeats}")
    for heading in ("what", "measured", "ratio", "aim"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _write(path: Path, size_gb: float, row_kb: float) -> int:
    choose = random.Random(0)  # noqa: S311
    text = " ".join(choose.choices(_WORDS, k=1 << 18))
    block = bytearray()
    while len(block) < min(_BLOCK, size_gb * 1e9):
        turns = []
        for _ in range(max(1, round(row_kb * 1.6))):  # about 600 bytes a turn
            start = choose.randrange(len(text) - 2000)
            length = int(choose.uniform(0, min(1000.0, row_kb * 1000)))
            turns.append({"role": choose.choice(["user", "assistant"]), "content": text[start : start + length]})
        block += json.dumps({"messages": turns}, ensure_ascii=False).encode() + b"\n"
    with path.open("wb") as file:
        while file.tell() < size_gb * 1e9:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())  # else it is written out while the clock runs
    return path.stat().st_size


def _read(path: Path) -> None:
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def run(argv: list[str] | None = None) -> None:
    """Run `source` from a command line."""
    import tyro  # noqa: PLC0415 - only a command line needs it

    tyro.cli(source, args=argv)


if __name__ == "__main__":
    run()
