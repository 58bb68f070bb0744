"""Keep measured conversations on disk until their rows are known: memory holds 12 bytes of each.

A journal names every chunk that is whole. A process that is killed leaves a folder from which the next one goes on, and
which nobody takes for a packed file.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from production.errors import PackproofError
from tools.counted import counted
from tools.pack_rows.conversation import Refusal, SourceLocation
from tools.pack_rows.lengths import Measured

_ENTRY = struct.Struct("<q8s")
"""Before each entry of the journal: its bytes and their xxh3-64."""

_OTHER_VERSION = "another version of packproof"

_LOCKS: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
"""This process's locks: a process that is forked must not hold them on when this one is gone."""


@dataclass(frozen=True, kw_only=True)
class PackedConversation:
    """A conversation in a row; its text is kept as JSON, which is a fraction of the objects' size."""

    place: SourceLocation
    """Where it was read."""
    json: str
    """Its messages as they will be written, without the brackets around them."""
    messages: int
    """Its messages."""
    system_inserted: bool
    """Whether its system message was put there, empty."""
    measured: Measured
    """Its size."""
    padded: int
    """Tokens it takes in the row, padding for context parallelism included."""


@dataclass(frozen=True, kw_only=True)
class MeasuredChunk:
    """Outcome of the lines of one chunk."""

    input: int
    """Index of the input file."""
    lines: int
    """Lines read."""
    conversations: int
    """Conversations read, pieces counted each; refused lines count as one."""
    records: bytes
    """The accepted conversations, encoded end to end; empty in the journal."""
    sizes: bytes
    """int32 bytes of each record."""
    padded: bytes
    """int32 tokens that each takes in a row."""
    refused: tuple[Refusal, ...]
    """What no row will hold."""
    split: int
    """Conversations split at system messages."""
    dropped_keys: dict[str, int]
    """Keys beside the messages."""
    message_keys: dict[str, int]
    """Keys of messages beside role and content."""
    digest: bytes = b""
    """In the journal: xxh3-64 of the records, which lie in a file of their own."""


_encoder = msgspec.msgpack.Encoder()
_decode_record = msgspec.msgpack.Decoder(PackedConversation).decode
_decode_chunk = msgspec.msgpack.Decoder(MeasuredChunk).decode


def encode_record(conversation: PackedConversation) -> bytes:
    """Return a conversation as bytes, which `Spool.conversation` reads."""
    return _encoder.encode(conversation)


class Spool:
    """Holds accepted conversations in the order read. Context manager: leaving it closes the files."""

    def __init__(self, folder: Path | None, *, key: dict[str, Any], resume: bool, restart: bool = False) -> None:
        """Open `folder`, or a temporary one. `key` is what the chunks depend on; with `resume` the chunks of an earlier process are kept.

        Raises PackproofError where another process writes there, where the earlier one packed something else, and where
        its chunks could be used and neither `resume` nor `restart` says what to do with them.
        """
        self._temporary = None if folder is not None else tempfile.TemporaryDirectory(prefix="packproof-pack-")
        self.folder = Path(self._temporary.name) if self._temporary is not None else folder
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("wb")
        _LOCKS.add(self._lock)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise PackproofError(
                what="another process is packing into the same file",
                where=str(self.folder),
                fix="wait for it, or give another --out",
            ) from None
        self._sizes: list[NDArray[np.int32]] = []
        self._padded: list[NDArray[np.int32]] = []
        self._ends: NDArray[np.int64] | None = None
        self.end = 0
        self.chunks = 0
        try:
            if not (resume or restart):
                self._refuse_to_discard(key)
            kept = self._kept(key) if resume else []
        except PackproofError:
            self._lock.close()
            raise
        if not kept:
            for name in ("records", "journal"):
                (self.folder / name).unlink(missing_ok=True)
            self._write_key(key)
        self._records = (self.folder / "records").open("r+b" if kept else "w+b")
        self._journal = (self.folder / "journal").open("ab")
        self.earlier: list[MeasuredChunk] = kept
        """Chunks of the earlier process, in order."""
        for chunk in kept:
            self._take(chunk)
        self._records.truncate(self.end)
        self._records.seek(self.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return sum(map(len, self._padded))

    def close(self) -> None:
        """Close the files; a temporary folder is removed."""
        for file in (self._records, self._journal, self._lock):
            file.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def remove(self) -> None:
        """Remove the folder: what it held is written elsewhere, or will not be."""
        self.close()
        if self._temporary is None and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, chunk: MeasuredChunk) -> None:
        """Keep a chunk: its records first, then its entry in the journal."""
        self._records.write(chunk.records)
        if self._temporary is None:
            self._records.flush()
        digest = xxhash.xxh3_64_digest(chunk.records)
        entry = _encoder.encode(dataclasses.replace(chunk, records=b"", digest=digest))
        self._take(chunk)
        if self._temporary is None:
            self._journal.write(_ENTRY.pack(len(entry), xxhash.xxh3_64_digest(entry)) + entry)
            self._journal.flush()

    def padded(self) -> NDArray[np.int32]:
        """Return [N] int32: tokens that each conversation takes in a row."""
        return np.concatenate(self._padded) if self._padded else np.empty(0, dtype=np.int32)

    def conversation(self, number: int) -> PackedConversation:
        """Return conversation `number`, in the order read."""
        if self._ends is None:
            self._records.flush()
            self._ends = np.concatenate([[0], *self._sizes], dtype=np.int64).cumsum()
        start, end = int(self._ends[number]), int(self._ends[number + 1])
        return _decode_record(os.pread(self._records.fileno(), end - start, start))

    def __iter__(self) -> Iterator[PackedConversation]:
        return map(self.conversation, range(len(self)))

    def _take(self, chunk: MeasuredChunk) -> None:
        sizes = np.frombuffer(chunk.sizes, dtype=np.int32)
        self._sizes.append(sizes)
        self._padded.append(np.frombuffer(chunk.padded, dtype=np.int32))
        self.end += int(sizes.sum(dtype=np.int64))
        self.chunks += 1

    def _write_key(self, key: dict[str, Any]) -> None:
        assert self.folder is not None
        (self.folder / "key.json").write_bytes(msgspec.json.encode(key, order="sorted"))

    def _refuse_to_discard(self, key: dict[str, Any]) -> None:
        """Refuse to begin anew where an earlier process measured conversations, of whatever files and settings."""
        chunks, end = self._whole_chunks()
        others = "" if end is None else self._differences(key)
        if not chunks and _OTHER_VERSION not in others:
            return
        measured = f"with {counted(sum(chunk.conversations for chunk in chunks), 'conversation') if chunks else 'conversations'} measured"
        if others:
            raise PackproofError(
                what=f"a packing was ended there, {measured}, that had {others}",
                where=str(self.folder),
                fix="go on with it by its own options and --resume, or throw it away and begin anew by --restart",
            )
        raise PackproofError(
            what=f"a packing of the same files and settings was ended there, {measured}",
            where=str(self.folder),
            fix="go on with it by --resume, or throw it away and begin anew by --restart",
        )

    def _kept(self, key: dict[str, Any]) -> list[MeasuredChunk]:
        """Return the whole chunks of an earlier process, and cut off what it began."""
        assert self.folder is not None
        chunks, end = self._whole_chunks()
        if chunks and (others := self._differences(key)):
            raise PackproofError(
                what=f"what was packed there had {others}",
                where=str(self.folder),
                fix="give its own options to go on with it, or throw it away and begin anew by --restart",
            )
        if end is not None:
            os.truncate(self.folder / "journal", end)
        return chunks

    def _differences(self, key: dict[str, Any]) -> str:
        """Return in words what the earlier packing had other than this one; empty where they are equal."""
        assert self.folder is not None
        path = self.folder / "key.json"
        try:
            before = msgspec.json.decode(path.read_bytes())
            now = msgspec.json.decode(msgspec.json.encode(key))  # tuples are lists there
            then, settings = before["settings"], now["settings"]
            others = [
                f"{name} {then.get(name)!r} (now {settings.get(name)!r})"
                for name in sorted(then.keys() | settings.keys())
                if then.get(name) != settings.get(name)
            ]
            others += ["other inputs, or inputs that changed"] * (before["files"] != now["files"])
            others += ["another tokenizer"] * (before["tokenizer"] != now["tokenizer"])
            others += [_OTHER_VERSION] * (before["version"] != now["version"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError):
            return "options that cannot be read any more (key.json is missing or damaged)"
        return ", ".join(others)

    def _whole_chunks(self) -> tuple[list[MeasuredChunk], int | None]:
        """Return the chunks that are whole in the journal and in the records, up to the first that is not, and where they end.

        None in place of the end: nothing was written.
        """
        assert self.folder is not None
        journal, records = self.folder / "journal", self.folder / "records"
        if not (journal.is_file() and records.is_file()):
            return [], None
        data = journal.read_bytes()
        if not data:
            return [], None
        kept: list[MeasuredChunk] = []
        at = 0
        with records.open("rb") as file:
            while at + _ENTRY.size <= len(data):
                length, digest = _ENTRY.unpack_from(data, at)
                entry = data[at + _ENTRY.size : at + _ENTRY.size + max(length, 0)]
                if len(entry) != length or xxhash.xxh3_64_digest(entry) != digest:
                    break
                try:
                    chunk = _decode_chunk(entry)
                except msgspec.DecodeError:  # of another version
                    break
                size = int(np.frombuffer(chunk.sizes, dtype=np.int32).sum(dtype=np.int64))
                if xxhash.xxh3_64_digest(file.read(size)) != chunk.digest:
                    break
                kept.append(chunk)
                at += _ENTRY.size + length
        return kept, at


def _close_locks() -> None:
    for lock in list(_LOCKS):
        lock.close()
    _LOCKS.clear()


os.register_at_fork(after_in_child=_close_locks)
