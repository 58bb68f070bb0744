"""Check that a file is still the one that was indexed: size, time and sampled blocks at each opening, all bytes on
request.
"""

import errno
import os
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import xxhash

from production.files.faults import bad_file

BLOCK_BYTES = 1 << 19
"""Read at a time when scanning: fits the second-level cache, so hashing and searching cost little beside reading."""
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 14
_CLOCK_TICK_NS = 20_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Identity of a file at the time when it was read."""

    size: int
    """In bytes."""
    mtime_ns: int
    """Time of the last change, in nanoseconds."""
    sample: bytes
    """xxh3-128 of 16 blocks of 16 KiB, first and last among them; of all bytes where the file has no more."""
    content: bytes
    """xxh3-128 of all bytes."""

    layout: ClassVar[struct.Struct] = struct.Struct("<qq16s16s")
    """Format in an index: size, time, sample, content."""

    @property
    def stamp(self) -> tuple[int, int]:
        """Return size and time, which can be compared at each access."""
        return self.size, self.mtime_ns

    def pack(self) -> bytes:
        """Return the identity as `layout` bytes."""
        return self.layout.pack(self.size, self.mtime_ns, self.sample, self.content)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the identity of these bytes: the inverse of `pack`."""
        size, mtime_ns, sample, content = cls.layout.unpack(data)
        return cls(size=size, mtime_ns=mtime_ns, sample=sample, content=content)


def is_there(path: str | Path) -> bool:
    """Return whether a file of this name exists; False for an impossible name, such as one that is too long or holds
    a NUL byte.
    """
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises for some of them


def open_for_reading(path: Path, name: str) -> int:
    """Open a regular file and return its descriptor; `name` is its name in errors.

    Raises BadInput where no such file can be read.
    """
    try:
        mode = path.stat().st_mode
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if stat.S_ISREG(mode) else None
    except FileNotFoundError:
        what = "the link leads nowhere" if path.is_symlink() else "there is no such file"
        raise bad_file("missing_file", what, file=name) from None
    except NotADirectoryError:
        raise bad_file("missing_file", "there is no such file", file=name) from None
    except ValueError as error:  # a NUL byte or half a surrogate pair, of which the file system is never asked
        raise bad_file("missing_file", f"no file can have this name ({error})", file=repr(name)[1:-1]) from None
    except OSError as error:
        raise bad_file("unreadable_file", f"it cannot be opened ({error.strerror})", file=name) from error
    if descriptor is None:
        raise bad_file(
            "not_a_file", "it must be a file, got a folder" if path.is_dir() else "it must be a regular file", file=name
        )
    return descriptor


def read_regular(path: Path, *, most_bytes: int = 1 << 30) -> bytes:
    """Return the bytes of a regular file.

    Raises OSError, which says why, also for a folder, a device or a pipe, which would be read without end, for a name
    that no file can have, and for a file of more than `most_bytes`.
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:
        raise OSError(errno.EINVAL, f"no file can have this name ({error})", repr(str(path))) from None
    if not stat.S_ISREG(mode):
        is_one = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise OSError(errno.EINVAL, f"it is {is_one}", str(path))
    with path.open("rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 20:,} MiB", str(path))
    return found


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return size and time of a file, comparable with `Identity.stamp`."""
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class FileState:
    """Holds size, time and inode of the file under a name at one moment; a later state that differs shows a changed or replaced file."""

    size: int
    """In bytes."""
    mtime_ns: int
    """Time of the last change, in nanoseconds."""
    device: int
    """Number of its file system."""
    inode: int
    """Number of the file there: another file under the same name has another."""


def state_of(path: Path) -> FileState:
    """Return the state of the file that has this name now. Raises OSError where there is none."""
    status = path.stat()
    return FileState(size=status.st_size, mtime_ns=status.st_mtime_ns, device=status.st_dev, inode=status.st_ino)


def check_state(path: Path, before: FileState | None) -> None:
    """Compare a file with its earlier state; None: it could not be looked at. Raises BadInput (`file_changed`)."""
    try:
        now = state_of(path)
    except (OSError, ValueError):
        now = None
    if now == before:
        return
    if now is None:
        what = "the file is gone"
    elif before is None:
        what = "the file was not there"
    elif (now.device, now.inode) != (before.device, before.inode):
        what = f"another file has its name now (inode {before.inode}, now {now.inode}; {before.size:,} bytes, now {now.size:,})"
    elif now.size != before.size:
        what = f"it had {before.size:,} bytes and has {now.size:,} now"
    else:
        what = "it was written to, and has another time of change"
    raise bad_file("file_changed", f"the file changed while it was read: {what}", file=str(path))


def sample_of(descriptor: int, size: int) -> bytes:
    """Return the hash of sampled blocks, 256 KiB at most."""
    digest = xxhash.xxh3_128()
    last = max(0, size - _SAMPLE_BYTES)
    if size <= _SAMPLES * _SAMPLE_BYTES:
        starts = list(range(0, size, _SAMPLE_BYTES))
    else:
        starts = [last * index // (_SAMPLES - 1) for index in range(_SAMPLES)]
    for start in starts:
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, start))
    return digest.digest()


def content_of(descriptor: int, each: Callable[[bytearray, int], None] | None = None) -> bytes:
    """Return the hash of all bytes, from the first; `each` gets the buffer of every block and the number of bytes in
    it.
    """
    digest = xxhash.xxh3_128()
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    start = 0
    while filled := os.preadv(descriptor, [view], start):
        digest.update(view[:filled])
        if each is not None:
            each(buffer, filled)
        start += filled
    return digest.digest()


def let_clock_tick(status: os.stat_result) -> None:
    """Wait until a change made from now on gets another time: file systems keep the time of a coarse clock."""
    age = time.time_ns() - status.st_mtime_ns
    # A small file's sample is all of it, and shows the change anyway.
    if status.st_size > _SAMPLES * _SAMPLE_BYTES and 0 <= age < _CLOCK_TICK_NS:
        time.sleep((_CLOCK_TICK_NS - age) / 1e9)
