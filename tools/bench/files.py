"""Measures inspection and packing of whole files against the bare tokenizer on the same texts and cores, and the packers alone.

The machine may be shared: all contenders take turns, and ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from production.errors import PackproofError
from production.files.source import open_source
from production.online.packing import PACKERS, pack
from production.rows.builder import BuiltRow, RowBuilder, RowSettings
from production.tokens.folder import load_folder
from production.tokens.prompts import FORMATS, render_messages, split_conversations
from tools.inspect_rows.scan import scan
from tools.pack_rows.output import write_rows
from tools.pack_rows.packing import PackSettings, pack_files

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "packed" / "sample.jsonl.packed"
TOKENIZER = ROOT / "examples" / "tokenizers" / "nemotron-mini"
_FORMAT = FORMATS["nemotron-nano-v2"]
AIM_OF_BARE, AIM_OF_TWO = 0.85, 1.7


def inspect_files(*, copies: int = 8, rounds: int = 3, processes: tuple[int, ...] = (1, 2)) -> list[dict[str, float]]:
    """Inspect the sample, its rows repeated with other texts, beside `encode_batch_fast` over the same turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = _distinct_rows(Path(folder) / "rows.jsonl", copies)
        texts = _texts(path)

        def act(count: int) -> None:
            scan([path], TOKENIZER, RowSettings(pack_length=2048), count, keep=1)

        return _compare("inspect", act, texts, rounds, processes)


def pack_chats(*, copies: int = 8, rounds: int = 3, processes: tuple[int, ...] = (1, 2)) -> list[dict[str, float]]:
    """Pack the sample's conversations, repeated with other texts, beside `encode_batch_fast` over the same turns."""
    with tempfile.TemporaryDirectory() as folder:
        rows = _distinct_rows(Path(folder) / "rows.jsonl", copies)
        chats = Path(folder) / "chats.jsonl"
        with open_source(rows) as source, chats.open("w") as file:
            for messages in source:
                row = split_conversations(messages)
                for number in range(row.count):
                    file.write(json.dumps({"messages": row.conversation(number)}, ensure_ascii=False) + "\n")
        texts = _texts(rows)
        settings = PackSettings(prompt_format="nemotron-nano-v2", pack_length=2048, on_bad="skip", on_long="skip")

        def act(count: int) -> None:
            packing = pack_files([chats], TOKENIZER, settings, processes=count)
            write_rows(packing, Path(folder) / "out.packed")
            packing.spool.close()

        return _compare("pack", act, texts, rounds, processes)


def packers(
    *,
    sequences: int = 1_000_000,
    capacity: int = 2_048,
    seed: int = 0,
    trl: Path | None = None,
    axolotl: Path | None = None,
) -> list[tuple[str, float, float]]:
    """Pack lengths drawn from the sample's own, by every packer: seconds of processor time, and how full the bins are.

    `trl` and `axolotl` are Python interpreters of environments in which these are installed; their packers then pack the
    same lengths. PackproofError where a package is not there.
    """
    lengths = np.random.default_rng(seed).choice(_sample_lengths(capacity), sequences)
    table = Table(title=f"{sequences:,} lengths of the sample's, capacity {capacity:,}")
    for column in ("packer", "seconds", "bins", "fill", "lost"):
        table.add_column(column, justify="left" if column == "packer" else "right")
    found = []

    def show(name: str, seconds: float, bins: int, tokens: int, lost: int) -> None:
        fill = tokens / (bins * capacity)
        found.append((name, seconds, fill))
        table.add_row(name, f"{seconds:.2f}", f"{bins:,}", f"{fill:.2%}", f"{lost:,}")

    as_list = lengths.tolist()
    for name in (*PACKERS, "first_fit_shuffle"):
        start = time.process_time()
        bins = pack(as_list, capacity, algorithm=name, seed=seed if name == "first_fit_shuffle" else None)
        seconds = time.process_time() - start
        held = np.bincount([index for each in bins for index in each], minlength=sequences)
        show(name, seconds, len(bins), int(held @ lengths), int(np.count_nonzero(held != 1)))
    for name, python in (("trl", trl), ("axolotl", axolotl)):
        if python is not None:
            other = _packed_by(name, python, lengths, capacity)
            show(name, other["seconds"], other["bins"], other["tokens"], other["lost"])
    Console().print(table)
    return found


def _packed_by(name: str, python: Path, lengths: NDArray[np.int64], capacity: int) -> dict[str, Any]:
    """Return what another project's packer makes of the lengths, in its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.npy"
        np.save(path, lengths)
        command = [str(python), str(Path(__file__).with_name("packers_of_others.py")), name, str(path), str(capacity)]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - named by the user
        except OSError as error:
            done = subprocess.CompletedProcess(command, 127, "", str(error))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PackproofError(
            what=f"{name} does not pack there: {last}",
            where=str(python),
            fix=f"python -m venv {name}-env && {name}-env/bin/pip install {name}, and give --{name} {name}-env/bin/python",
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def inspect_memory(*, megabytes: int = 300, processes: int = 2) -> float:
    """Inspect a file of this size and return the most memory over idle, in MB, of this process and those that it forks."""
    with tempfile.TemporaryDirectory() as folder:
        path = _distinct_rows(Path(folder) / "rows.jsonl", max(1, megabytes * 1_000_000 // SAMPLE.stat().st_size))
        scan([SAMPLE], TOKENIZER, RowSettings(pack_length=2048), 1, most_rows=32)
        before = _own_memory()
        most, ended = 0.0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not ended.wait(0.2):
                most = max(most, _own_memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            scan([path], TOKENIZER, RowSettings(pack_length=2048), processes)
        finally:
            ended.set()
            watcher.join()
        over = (most - before) / 1e6
        Console().print(f"inspect of {path.stat().st_size / 1e6:,.0f} MB in {processes} processes: {over:,.0f} MB over idle at most (unshared memory)")  # fmt: skip
        return over


def _own_memory() -> float:
    """Return the unshared memory of this process and its children, in bytes."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            total += process.memory_full_info().uss
        except psutil.Error:
            continue
    return total


def _compare(
    name: str, act: Callable[[int], None], texts: list[list[str]], rounds: int, processes: tuple[int, ...]
) -> list[dict[str, float]]:
    tokenizer = load_folder(TOKENIZER)
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in processes}
    with _without_threads():
        for _ in range(rounds):
            for count in processes:
                bare = _bare(tokenizer, texts, count)
                start = time.perf_counter()
                act(count)
                times[count].append((bare, time.perf_counter() - start))
    console, table = Console(), Table(title=f"{name}: medians of {rounds} rounds")
    for column in ("processes", "bare seconds", "seconds", "of the bare tokenizer", "over one process"):
        table.add_column(column, justify="right")
    results = []
    for count, pairs in times.items():
        of_bare = statistics.median(bare / own for bare, own in pairs)
        over_one = statistics.median(one[1] / own[1] for one, own in zip(times[processes[0]], pairs, strict=True))
        results.append({"processes": count, "of_bare": of_bare, "over_one": over_one})
        medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
        table.add_row(str(count), f"{medians[0]:.2f}", f"{medians[1]:.2f}", f"{of_bare:.2f}", f"{over_one:.2f}")
    console.print(table)
    console.print(f"aims: {AIM_OF_BARE} of the bare tokenizer, two processes {AIM_OF_TWO} times one; 1-minute load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")  # fmt: skip
    return results


@contextlib.contextmanager
def _without_threads() -> Iterator[None]:
    """Switch the tokenizer's own threads off: one process is to use one core, as each of two does."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM")
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _bare(tokenizer: Any, texts: list[list[str]], processes: int) -> float:
    """Return the seconds in which as many processes encode the texts of each row, and do nothing else."""
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    start = time.perf_counter()
    workers = [
        multiprocessing.get_context("fork").Process(target=_encode, args=(encode, texts[rank::processes]))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def _encode(encode: Any, rows: list[list[str]]) -> None:
    for row in rows:
        for encoding in encode(row, add_special_tokens=False):
            len(encoding.ids)


def _distinct_rows(path: Path, copies: int) -> Path:
    """Write the sample's rows several times, each with a number in front of every content, so that no cache helps."""
    with path.open("w") as file, open_source(SAMPLE) as source:
        for copy in range(copies):
            for messages in source:
                changed = [{**message, "content": f"{copy} {message['content']}"} if message["content"] else message for message in messages]  # fmt: skip
                file.write(json.dumps({"messages": changed}, ensure_ascii=False) + "\n")
    return path


def _texts(path: Path) -> list[list[str]]:
    with open_source(path) as source:
        rows = [split_conversations(messages) for messages in source]
    return [
        list(dict.fromkeys(text for number in range(row.count) for text in render_messages(row.conversation(number), _FORMAT, number)))
        for row in rows
    ]  # fmt: skip


def _sample_lengths(capacity: int) -> list[int]:
    builder = RowBuilder(tokenizer=load_folder(TOKENIZER), settings=RowSettings(pack_length=2048))
    with open_source(SAMPLE) as source:
        built = builder.build_whole_group(list(source))
    lengths = np.concatenate([row.laid.lengths for row in built if isinstance(row, BuiltRow)])
    return [int(length) for length in lengths if 0 < length <= capacity]
