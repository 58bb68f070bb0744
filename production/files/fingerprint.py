"""Fingerprint a file of any size by all its bytes, in several threads and in bounded memory.

The digest is a tree: the hash of the hashes of blocks, so that blocks are read and hashed side by side. Equal bytes
have equal digests under any name and with any number of threads.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from production.files.faults import bad_file
from production.files.file_state import open_for_reading, stamp_of

BLOCK_BYTES = 1 << 24
"""Bytes of a block of the tree; another number would give other digests."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileFingerprint:
    """Identifies the bytes of a file."""

    size: int
    """Bytes of the file."""
    digest: str
    """32 hex digits: xxh3-128 of the size and of the xxh3-128 of each block of 16 MiB."""


def fingerprint_file(
    path: str | os.PathLike[str], *, threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> FileFingerprint:
    """Return the fingerprint of a regular file; `progress` gets the bytes hashed and the bytes in all.

    Raises BadInput where the file cannot be read (`missing_file`, …) or changes meanwhile (`file_changed`).
    """
    name = os.fspath(path)
    descriptor = open_for_reading(Path(name), name)
    try:
        before = os.fstat(descriptor)
        size = before.st_size
        tree = xxhash.xxh3_128(size.to_bytes(8, "little"))
        starts = iter(range(0, size, BLOCK_BYTES))
        count = len(os.sched_getaffinity(0)) if threads is None else max(1, threads)
        with ThreadPoolExecutor(count, thread_name_prefix="packproof-hash") as pool:
            waiting: deque[Future[bytes]] = deque(
                pool.submit(_block, descriptor, start) for start in itertools.islice(starts, 2 * count)
            )
            done = 0
            while waiting:
                tree.update(waiting.popleft().result())
                done = min(done + BLOCK_BYTES, size)
                if progress is not None:
                    progress(done, size)
                waiting.extend(pool.submit(_block, descriptor, start) for start in itertools.islice(starts, 1))
        if stamp_of(os.fstat(descriptor)) != stamp_of(before):
            raise bad_file("file_changed", "the file changed while it was hashed", file=name)
    finally:
        os.close(descriptor)
    return FileFingerprint(size=size, digest=tree.hexdigest())


def _block(descriptor: int, start: int) -> bytes:
    digest = xxhash.xxh3_128()
    at, end = start, start + BLOCK_BYTES
    while at < end and (data := os.pread(descriptor, min(_READ_BYTES, end - at), at)):
        digest.update(data)
        at += len(data)
    return digest.digest()
