"""Keep built rows on disk, so that a row is tokenized once for all epochs, runs and ranks of a machine.

A folder holds the rows of one source, tokenizer, settings and version of the code; any other of these is another folder, so a stale
row cannot be read. Each process appends records to a segment file of its own and then publishes the record's place in an index, which
all processes share: a process that is killed in between leaves bytes that nobody reads. Records carry a checksum, which each read
verifies; a record that is damaged is built again.

Records are read, not mapped: a file that is cut short under a mapping ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from production.errors import PackproofError, RowRefused
from production.rows.builder import Row
from production.training.data import row_record
from production.training.data.row_record import DamagedRecord, decode, encode

_ENTRY = struct.Struct("<IIQQQ")
"""Segment number plus 1, zero, offset, length, xxh3-64 of the record seeded with the row's number."""
_INDEX, _LOCK = "index", "in-use"
_SUFFIX = ".rows"
_OPEN_SEGMENTS = 64
_RECOUNT_BYTES = 1 << 26
"""Bytes that a process writes before it adds up the whole cache again."""
_CODE = ("rows", "tokens", "semantics.py", "refusals.py", "training/data/dataset.py")
"""Parts of `production` that decide a row."""
_LIBRARIES = ("tokenizers", "transformers", "jinja2", "numpy", "torch")


class RowCache:
    """Reads and writes the rows of one source by number. May be forked; each process then writes a segment of its own."""

    def __init__(self, folder: Path, *, facts: Mapping[str, Any], rows: int, limit_bytes: int) -> None:
        """Open the cache of these facts under `folder`, or begin it.

        `facts` are all that decides a row besides the code: the source's fingerprint, the tokenizer, the settings. `rows` is
        the number of rows of the source. Above `limit_bytes` under `folder`, caches of other facts that nobody uses are
        removed, the longest unused first, and nothing more is stored if that is not enough. Raises PackproofError where the
        folder cannot be written.
        """
        self._folder, self._limit = folder, limit_bytes
        self.rows = rows
        """Number of rows of the source."""
        key = xxhash.xxh3_128_hexdigest(msgspec.json.encode([cache_facts(facts), rows], order="deterministic"))
        self.path = folder / key
        """Folder of these rows."""
        try:
            self._lock = _lock_folder(self.path)
            self._index = self._open_index()
            _make_room(folder, limit_bytes, keep=self.path)
            self._left = self._room()
        except OSError as error:
            raise PackproofError(
                what=f"cannot be used ({error.strerror or error})",
                where=f"data.cache_dir {folder}",
                fix="give a folder that this machine can write to, or leave data.cache_dir out",
            ) from error
        self._segments: dict[int, int] = {}
        self._own: tuple[int, int, int] | None = None
        self._uncounted = 0

    def get(self, row: int) -> Row | RowRefused | None:
        """Return the stored row or refusal; None where none is stored or the stored bytes are damaged."""
        entry = _ENTRY.unpack(os.pread(self._index, _ENTRY.size, row * _ENTRY.size).ljust(_ENTRY.size, b"\0"))
        segment, _, offset, length, digest = entry
        if not segment:
            return None
        try:
            data = self._read(segment - 1, offset, length)
            if data is None or xxhash.xxh3_64_intdigest(data, seed=row) != digest:
                return None
            return decode(data)
        except (OSError, DamagedRecord):
            return None

    def put(self, row: int, built: Row | RowRefused) -> None:
        """Store a row or its refusal. A full disk or the limit ends storing, never the job; the process says so once."""
        if self._left <= 0:
            return
        record = encode(built)
        try:
            number, descriptor, end = self._own_segment()
            _write(descriptor, record, end)
            self._own = (number, descriptor, end + len(record))
            digest = xxhash.xxh3_64_intdigest(record, seed=row)
            os.pwrite(self._index, _ENTRY.pack(number + 1, 0, end, len(record), digest), row * _ENTRY.size)
        except OSError as error:
            self._stop(f"{error.strerror or error}")
            return
        self._left -= len(record)
        self._uncounted += len(record)
        if self._uncounted >= _RECOUNT_BYTES or self._left <= 0:
            self._uncounted, self._left = 0, self._room()
            if self._left <= 0:
                self._stop(f"the limit of {self._limit / 1e9:g} GB is reached (data.cache_limit_gb)")

    def stored(self) -> int:
        """Return how many rows are stored."""
        count = 0
        for start in range(0, self.rows, 1 << 16):
            data = os.pread(self._index, _ENTRY.size * min(1 << 16, self.rows - start), start * _ENTRY.size)
            count += int(np.count_nonzero(np.frombuffer(data, "<u4").reshape(-1, _ENTRY.size // 4)[:, 0]))
        return count

    def size_bytes(self) -> int:
        """Return the bytes that these rows and their index take on disk."""
        return _size(self.path)

    def close(self) -> None:
        """Close the files; the folder may be removed by others then."""
        own = [] if self._own is None else [self._own[1]]
        for descriptor in (self._index, self._lock, *self._segments.values(), *own):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._segments.clear()
        self._own = None

    def _open_index(self) -> int:
        """Open the index; several processes may begin it at once, since each extends it to the same zeros."""
        descriptor = os.open(self.path / _INDEX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, self.rows * _ENTRY.size)
        return descriptor

    def _read(self, segment: int, offset: int, length: int) -> memoryview | None:
        descriptor = self._segments.get(segment)
        if descriptor is None:
            if len(self._segments) >= _OPEN_SEGMENTS:
                os.close(self._segments.pop(next(iter(self._segments))))
            descriptor = os.open(self.path / f"{segment:08}{_SUFFIX}", os.O_RDONLY | os.O_CLOEXEC)
            self._segments[segment] = descriptor
        if offset + length > os.fstat(descriptor).st_size:  # before memory of a damaged entry's length is asked for
            return None
        view = memoryview(np.empty(length, dtype=np.uint8)).cast("B")
        done = 0
        while done < length:
            read = os.preadv(descriptor, [view[done:]], offset + done)
            if not read:
                return None
            done += read
        return view

    def _own_segment(self) -> tuple[int, int, int]:
        """Return number, descriptor and end of this process's segment."""
        if self._own is None or self._owner != os.getpid():
            number = 1 + max(
                (int(path.stem) for path in self.path.glob(f"*{_SUFFIX}") if path.stem.isdigit()), default=-1
            )
            while True:
                try:
                    path = self.path / f"{number:08}{_SUFFIX}"
                    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                    break
                except FileExistsError:
                    number += 1
            self._own, self._owner = (number, descriptor, 0), os.getpid()
        return self._own

    _owner = -1

    def _room(self) -> int:
        return self._limit - sum(_size(one) for one in _folders(self._folder))

    def _stop(self, why: str) -> None:
        self._left = 0
        text = f"packproof: no more rows are stored in the row cache {self._folder}: {why}; the job goes on without"
        print(text, file=sys.stderr, flush=True)


def cache_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a cache key: the given ones, the code that builds rows, and the libraries that it calls."""
    return {"record": row_record.VERSION, "code": code_digest(), "facts": dict(facts)}


@functools.cache
def code_digest() -> str:
    """Return 32 hex digits of the code that decides a row, and of the versions of the libraries that the code calls."""
    root = Path(__file__).resolve().parents[2]
    digest = xxhash.xxh3_128()
    for part in _CODE:
        for path in sorted((root / part).rglob("*.py")) if (root / part).is_dir() else [root / part]:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    for name in _LIBRARIES:
        digest.update(f"{name} {version(name)}\0".encode())
    return digest.hexdigest()


def _lock_folder(path: Path) -> int:
    """Return a descriptor with a shared lock that says that the folder is in use."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # removed meanwhile
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), (path / _LOCK).stat()):
                os.utime(path / _LOCK)
                return descriptor
        os.close(descriptor)


def _make_room(folder: Path, limit: int, *, keep: Path) -> None:
    """Remove caches that nobody uses, the longest unused first, until the folder is within the limit."""
    others = [one for one in _folders(folder) if one != keep and (one / _LOCK).exists()]
    size = sum(_size(one) for one in [*others, keep])
    for one in sorted(others, key=_last_use):
        if size <= limit:
            return
        with _alone(one) as is_alone:
            if is_alone:
                size -= _size(one)
                shutil.rmtree(one, ignore_errors=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _folders(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [one for one in folder.iterdir() if len(one.name) == 32 and one.is_dir()]
    return []


def _last_use(path: Path) -> float:
    with contextlib.suppress(OSError):
        return (path / _LOCK).stat().st_mtime
    return 0.0


def _size(path: Path) -> int:
    """Return the bytes that a cache's files take on disk; the index is sparse."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat().st_blocks * 512
    return total


def _write(descriptor: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written
