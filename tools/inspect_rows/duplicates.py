"""Find what stands in a file more than once, by 128-bit hashes in bounded memory.

Records go into 256 buckets by their first byte; buckets lie on disk once they are many. Equal records share a bucket,
so that one bucket at a time is sorted. With a hundred million records the chance that any two different ones share
their hash is below 1e-22.
"""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8"), ("conversation", "<i8")])
"""A hash, and where its row or conversation stands; conversation -1 is the whole row."""
_BUCKETS = 256
_IN_MEMORY = 1 << 20
"""Records kept in memory: 32 MiB."""

_encode = msgspec.json.Encoder(order="sorted").encode


def hash_messages(messages: Sequence[Any]) -> tuple[int, int]:
    """Return the hash of messages, high and low 64 bits; the order of keys does not count."""
    return _hash(_encode(messages))


def hash_row(messages: Sequence[Any]) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Return the hash of a row, and that of each of its conversations; each message is encoded once."""
    starts = [index for index, message in enumerate(messages) if message["role"] == "system" and index]
    if not starts:
        alone = hash_messages(messages)
        return alone, [alone]
    encoded = [_encode(messages[start:end]) for start, end in itertools.pairwise([0, *starts, len(messages)])]
    row = b"[" + b",".join(each[1:-1] for each in encoded) + b"]"
    return _hash(row), list(map(_hash, encoded))


def _hash(encoded: bytes) -> tuple[int, int]:
    digest = xxhash.xxh3_128_intdigest(encoded)
    return digest >> 64, digest & ((1 << 64) - 1)


class DuplicateFinder:
    """Takes records in the order of the file, and gives groups of equal ones. Context manager: leaving it frees the disk."""

    def __init__(self, folder: Path | None = None, *, in_memory: int = _IN_MEMORY) -> None:
        self._folder = folder
        self._most = in_memory
        self._waiting: list[NDArray[Any]] = []
        self._held = 0
        self._spilled: tempfile.TemporaryDirectory[str] | None = None
        self.records = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spilled is not None:
            self._spilled.cleanup()

    def add(self, records: NDArray[Any]) -> None:
        """Take the records of the next part of the file."""
        if not len(records):
            return
        self._waiting.append(records)
        self._held += len(records)
        self.records += len(records)
        if self._held > self._most:
            self._spill()

    def groups(self) -> Iterator[NDArray[Any]]:
        """Yield the records of each hash that more than one record has, in the order of the file."""
        for bucket in self._buckets():
            ordered = bucket[np.lexsort((bucket["conversation"], bucket["row"], bucket["low"], bucket["high"]))]
            starts_group = np.ones(len(ordered), dtype=np.bool_)
            starts_group[1:] = (ordered["high"][1:] != ordered["high"][:-1]) | (
                ordered["low"][1:] != ordered["low"][:-1]
            )
            starts = np.flatnonzero(starts_group)
            ends = np.append(starts[1:], len(ordered))
            for index in np.flatnonzero(ends - starts > 1).tolist():
                yield ordered[starts[index] : ends[index]]

    def summary(self, most: int) -> tuple[int, int, int, list[NDArray[Any]]]:
        """Return distinct records, redundant copies, groups, and the `most` largest groups, the largest first."""
        redundant = groups = 0
        largest: list[tuple[int, int, int, NDArray[Any]]] = []
        for group in self.groups():
            redundant += len(group) - 1
            groups += 1
            # Ties go to the earlier place, so that the result does not depend on the buckets.
            entry = (len(group), -int(group["row"][0]), -int(group["conversation"][0]), group)
            if len(largest) < most:
                heapq.heappush(largest, entry)
            elif entry[:3] > largest[0][:3]:
                heapq.heapreplace(largest, entry)
        ordered = [group for *_, group in sorted(largest, key=lambda entry: entry[:3], reverse=True)]
        return self.records - redundant, redundant, groups, ordered

    def redundant(self) -> NDArray[Any]:
        """Return row and conversation of every copy beyond the first, in the order of the file: 16 bytes a copy."""
        copies = [group[["row", "conversation"]][1:] for group in self.groups()]
        if not copies:
            return np.empty(0, dtype=[("row", "<i8"), ("conversation", "<i8")])
        joined = np.concatenate(copies)
        ordered: NDArray[Any] = joined[np.lexsort((joined["conversation"], joined["row"]))]
        return ordered

    def _buckets(self) -> Iterator[NDArray[Any]]:
        if self._spilled is None:
            if self._waiting:
                yield np.concatenate(self._waiting)
            return
        self._spill()
        for number in range(_BUCKETS):
            path = Path(self._spilled.name) / f"{number:02x}"
            if path.exists():
                yield np.fromfile(path, dtype=RECORD)

    def _spill(self) -> None:
        if not self._waiting:
            return
        if self._spilled is None:
            self._spilled = tempfile.TemporaryDirectory(prefix="packproof-duplicates-", dir=self._folder)
        records = np.concatenate(self._waiting)
        buckets = (records["high"] >> np.uint64(56)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        records, buckets = records[order], buckets[order]
        cuts = np.searchsorted(buckets, np.arange(_BUCKETS + 1))
        for number in range(_BUCKETS):
            part = records[cuts[number] : cuts[number + 1]]
            if len(part):
                with (Path(self._spilled.name) / f"{number:02x}").open("ab") as file:
                    part.tofile(file)
        self._waiting.clear()
        self._held = 0
