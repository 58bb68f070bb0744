"""Measures what a subject outside the process costs beside its own time: the pipe, its frames, and the messages as JSON."""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from equivalence.generators import tokenizers
from equivalence.subjects import RowSettings
from equivalence.subjects.external.process import SubjectFailed
from equivalence.subjects.external.subject import ExternalSubject

SUBJECT_FOLDER = Path(__file__).resolve().parents[2] / "subject"
_ADAPTER = """
import sys, time
sys.path.insert(0, {folder!r})
{load}
from packproof_subject import serve
ROWS, SPENT = {{}}, [0.0, 0.0]
def build_row(messages, tokenizer, settings):
    began, used = time.perf_counter(), time.process_time()
    length = settings["pack_length"]
    if length not in ROWS:
        ROWS[length] = {row}
    row = dict(ROWS[length])
    SPENT[0] += time.perf_counter() - began
    SPENT[1] += time.process_time() - used
    row["max_seqlen"] = length
    row["report"] = {{"own": int(SPENT[0] * 1e9), "others_cpu": int((time.process_time() - SPENT[1]) * 1e9)}}
    return row
serve(build_row=build_row)
"""
_KINDS = {
    "lists": (
        "",
        (
            "dict(input_ids=list(range(length)), target_ids=list(range(length)), token_mask=[1.0] * length, "
            "position_ids=list(range(length)), cu_seqlens=[0, length])"
        ),
    ),
    "numpy": (
        "import numpy",
        (
            "dict(input_ids=numpy.arange(length), target_ids=numpy.arange(length), token_mask=numpy.ones(length, numpy.float32), "
            "position_ids=numpy.arange(length), cu_seqlens=numpy.array([0, length], numpy.int32))"
        ),
    ),
    "torch": (
        "import torch",
        (
            "dict(input_ids=torch.arange(length), target_ids=torch.arange(length), token_mask=torch.ones(length), "
            "position_ids=torch.arange(length), cu_seqlens=torch.tensor([0, length], dtype=torch.int32))"
        ),
    ),
}
"""What an adapter returns: what it imports, and its row."""


def subject(
    *,
    pack_length: int = 4096,
    rows: int = 256,
    repeats: int = 5,
    python: str = sys.executable,
    characters: int = 4,
) -> dict[str, float]:
    """Ask adapters that cost nothing themselves for rows, in batches and one by one; prints and returns milliseconds a row.

    Each adapter returns the same row again, as lists, numpy arrays or torch tensors, and counts its own time, which is taken off. A
    row's messages have `characters` a token. Medians of `repeats` rounds that are taken in turns: by the clock, and processor time
    of both sides together, which a busy machine does not lengthen. `python` runs the adapters.
    """
    tokenizer, settings = tokenizers.load("word"), RowSettings(pack_length=pack_length)
    message = {"role": "user", "content": "w1 " * (pack_length * characters // 3)}
    asked = [[message]] * rows
    with tempfile.TemporaryDirectory(prefix="packproof-bench-") as folder:
        subjects = {kind: ExternalSubject(_command(Path(folder), kind, python)) for kind in _KINDS}
        spent: dict[str, list[tuple[float, float]]] = {}
        for _ in range(repeats + 1):  # the first round fills the caches
            for kind, each in subjects.items():
                for name, at_once in ((kind, rows), (f"{kind}, one by one", 1)):
                    spent.setdefault(name, []).append(_timed(each, asked, tokenizer, settings, at_once=at_once))
        for each in subjects.values():
            each.close()
    found = {}
    for name, rounds in spent.items():
        found[name], used = (1e3 * statistics.median(column) for column in zip(*rounds[1:], strict=True))
        told = f"{found[name]:6.3f} ms a row of {pack_length:,} tokens beside the subject's own time"
        print(f"{name:<20} {told}, {used:6.3f} ms of processor time on both sides")
    return found


def _command(folder: Path, kind: str, python: str) -> str:
    load, row = _KINDS[kind]
    path = folder / f"gives_{kind}.py"
    path.write_text(_ADAPTER.format(folder=str(SUBJECT_FOLDER), load=load, row=row), encoding="utf-8")
    return shlex.join([python, str(path)])


def _timed(
    subject: ExternalSubject, asked: list[Any], tokenizer: Any, settings: RowSettings, *, at_once: int
) -> tuple[float, float]:
    """Return the seconds a row by the clock, and the processor seconds of both processes, both without the adapter's own time."""
    before = _report(subject.build_rows(asked[:1], tokenizer, settings))
    began, used = time.perf_counter(), time.process_time()
    built: list[Any] = []
    for first in range(0, len(asked), at_once):
        built += subject.build_rows(asked[first : first + at_once], tokenizer, settings)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    after = _report(built)
    own, others = ((after[name] - before[name]) / 1e9 for name in ("own", "others_cpu"))
    return (seconds - own) / len(asked), (used + others) / len(asked)


def _report(built: list[Any]) -> dict[str, int]:
    last = built[-1]
    if isinstance(last, SubjectFailed):
        raise last
    return dict(last.report)
