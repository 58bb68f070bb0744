"""Read chat files of any size as lines: JSON lines, gzip, Zstandard, Parquet, whole folders and standard input."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from production.errors import PackproofError
from production.files.file_state import check_state, is_there, state_of
from production.files.head import stream_lines
from production.files.lines import MAX_LINE_BYTES

STDIN = Path("-")
"""Stands for standard input."""
SUFFIXES = (".jsonl", ".gz", ".zst", ".zstd", ".parquet")
"""Endings of the files that a folder is searched for."""
CHUNK_LINES, CHUNK_BYTES = 512, 1 << 22
"""Lines and bytes of a chunk, about; the same for any number of processes, so that everybody measures the same batches."""


@dataclass(kw_only=True)
class InputFile:
    """One input file, with what was counted while it was read."""

    path: Path
    """The file; `-` is standard input."""
    layout: str = ""
    """Layout of its lines: `messages`, `sharegpt` or `alpaca`."""
    lines: int = 0
    """Lines read."""
    sha256: str = ""
    """Hash of the file's bytes as they lie on disk; set when it has been read."""
    split: int = 0
    """Conversations split at system messages in the middle."""
    dropped_keys: Counter[str] = field(default_factory=Counter)
    """Keys beside the messages: a row joins conversations and cannot keep them."""
    message_keys: Counter[str] = field(default_factory=Counter)
    """Keys of messages beside role and content that name nothing to train and no text: kept, though only a chat template reads them."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Lines that are measured together."""

    input: int
    """Index of the input file."""
    first: int
    """Line number of the first, from 1."""
    lines: tuple[bytes, ...]
    """The lines with their newlines."""


def expand(paths: Sequence[Path]) -> list[Path]:
    """Return the files that are named, and the files of named folders in the order of their paths.

    Raises PackproofError for a folder without a chat file, and for a file that is named twice.
    """
    found: list[Path] = []
    for path in paths:
        if path == STDIN or not (is_there(path) and path.is_dir()):
            found.append(path)
            continue
        files = sorted(
            each
            for each in path.rglob("*")
            if each.suffix in SUFFIXES and each.is_file() and not each.name.startswith(".")
        )
        if not files:
            raise PackproofError(
                what=f"the folder has no file that ends in {', '.join(SUFFIXES)}",
                where=str(path),
                fix="name the chat files",
            )
        found += files
    resolved = [path if path == STDIN or not is_there(path) else path.resolve() for path in found]
    if twice := [path.name for path, count in Counter(resolved).items() if count > 1]:
        raise PackproofError(
            what="the file is given twice, so its conversations would be packed twice",
            where=twice[0],
            fix="give it once",
        )
    return found


def read_chunks(files: Sequence[InputFile]) -> Iterator[Chunk]:
    """Yield the lines of all files in order; a file's hash is set when its last line has been read.

    Raises BadInput where a file cannot be read, is damaged, is no chat file, or changes before its hash is taken.
    """
    for index, file in enumerate(files):
        before = state_of(file.path) if file.path != STDIN and is_there(file.path) else None
        digest = hashlib.sha256()
        waiting: list[bytes] = []
        size = 0
        for number, line in enumerate(_lines(file.path), 1):
            if file.path == STDIN:
                digest.update(line)
            file.lines = number
            waiting.append(line)
            size += len(line)
            if len(waiting) >= CHUNK_LINES or size >= CHUNK_BYTES:
                yield Chunk(input=index, first=number - len(waiting) + 1, lines=tuple(waiting))
                waiting, size = [], 0
        if waiting:
            yield Chunk(input=index, first=file.lines - len(waiting) + 1, lines=tuple(waiting))
        if file.path != STDIN:
            with file.path.open("rb") as raw:
                digest = hashlib.file_digest(raw, "sha256")
            check_state(file.path, before)
        file.sha256 = digest.hexdigest()


def _lines(path: Path) -> Iterator[bytes]:
    if path == STDIN:
        # Longer lines are refused by the parser as one that does not end: memory stays bounded.
        while line := sys.stdin.buffer.readline(MAX_LINE_BYTES):
            yield line
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix in {".xz", ".bz2"}:
        raise PackproofError(
            what="files packed so are not read", where=str(path), fix="unpack it, or pack it with gzip or zstd"
        )
    else:
        for line in stream_lines(str(path)):
            if len(line) > MAX_LINE_BYTES:
                raise PackproofError(what=f"a line has more than {MAX_LINE_BYTES:,} bytes", where=str(path), fix="write one conversation a line")  # fmt: skip
            yield line


def _parquet(path: Path) -> Iterator[bytes]:
    import pyarrow as pa  # noqa: PLC0415 - only where a Parquet file is read
    from pyarrow import parquet  # noqa: PLC0415

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=CHUNK_LINES):
                for row in batch.to_pylist():
                    yield msgspec.json.encode(_without_null(row)) + b"\n"
    except (pa.ArrowException, TypeError) as error:
        said = " ".join(str(error).split())
        raise PackproofError(
            what=f"it cannot be read as Parquet ({said})", where=str(path), fix="write it again"
        ) from error


def _without_null(value: Any) -> Any:
    """Leave out keys without a value: a column's structs all have every key that one of them has. A content stays."""
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None or key == "content"}
    return [_without_null(each) for each in value] if isinstance(value, list) else value
