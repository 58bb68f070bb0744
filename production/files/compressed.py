"""Unpack gzip and Zstandard files once, into a cache, so that rows can be read at random in bounded memory
(R-FILE-9).

The price is disk: the unpacked copy stays until the cache is removed.
"""

import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from production.errors import BadInput
from production.files.cache import atomic_file
from production.files.faults import bad_file
from production.files.file_state import Identity, content_of, let_clock_tick, sample_of, stamp_of

_SUFFIXES = {".gz": "gzip", ".zst": "Zstandard", ".zstd": "Zstandard"}
_CHUNK_BYTES = 1 << 20
# A Zstandard block of 4 bytes can stand for 128 KiB: so much input makes at most 64 MiB of output.
_INPUT_BYTES = 1 << 11
_CHECK_SPACE_BYTES = 1 << 26


def is_compressed(path: Path) -> bool:
    """Return whether the file's name says that it must be unpacked first."""
    return path.suffix.lower() in _SUFFIXES


def compression_of(path: Path) -> str | None:
    """Return the compression that the file's name says; None without compression."""
    return _SUFFIXES.get(path.suffix.lower())


def unpack(target: Path, descriptor: int, *, suffix: str, name: str) -> Identity:
    """Write the unpacked bytes of the open file to `target`, atomically; return the identity of the compressed file.

    The copy takes the original's time, so that all who unpack it at once make the same file. BadInput
    `truncated_compressed`, `corrupt_compressed`, `no_space`, `file_changed`; OSError where `target` cannot be written.
    """
    before = os.fstat(descriptor)
    let_clock_tick(before)
    with atomic_file(target) as file:
        _need_space(target.parent, before.st_size, name)
        with open(os.dup(descriptor), "rb") as packed:  # noqa: PTH123 - a descriptor, not a path
            packed.seek(0)
            chunks = _gzip(packed) if _SUFFIXES[suffix.lower()] == "gzip" else _zstandard(packed)
            _write(file, chunks, folder=target.parent, name=name)
        identity = Identity(
            size=before.st_size,
            mtime_ns=before.st_mtime_ns,
            sample=sample_of(descriptor, before.st_size),
            content=content_of(descriptor),
        )
        if stamp_of(os.fstat(descriptor)) != identity.stamp:
            raise bad_file("file_changed", "the file changed while it was unpacked", file=name)
        file.flush()
        os.fsync(file.fileno())
        os.utime(file.fileno(), ns=(before.st_mtime_ns, before.st_mtime_ns))
    return identity


def _write(file: BinaryIO, chunks: Iterator[bytes], *, folder: Path, name: str) -> None:
    unchecked = 0
    try:
        for chunk in chunks:
            unchecked += len(chunk)
            if unchecked > _CHECK_SPACE_BYTES:
                _need_space(folder, unchecked, name)
                unchecked = 0
            file.write(chunk)
    except EOFError:
        raise _placed(file, "truncated_compressed", "the compressed data end too early", name) from None
    except (zlib.error, zstandard.ZstdError) as error:
        raise _placed(file, "corrupt_compressed", f"the compressed data are damaged ({error})", name) from None
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise bad_file("no_space", f"no room to unpack it into {folder} ({error.strerror})", file=name) from None


def _gzip(packed: BinaryIO) -> Iterator[bytes]:
    # Not the gzip module, which drops what it has unpacked when the end is missing.
    member: zlib._Decompress | None = None
    padding = b""
    while data := packed.read(_INPUT_BYTES):
        while data := data if member else data.lstrip(padding):
            if member is None:
                member = zlib.decompressobj(wbits=31)
                padding = b"\0"  # zeros may stand after a member, not before the first
            yield member.decompress(data, _CHUNK_BYTES)
            data = member.unused_data if member.eof else member.unconsumed_tail
            member = None if member.eof else member
    if member is not None:
        raise EOFError


def _zstandard(packed: BinaryIO) -> Iterator[bytes]:
    # Not stream_reader, which takes the end of the file for the end of a frame.
    frame: zstandard.ZstdDecompressionObj | None = None
    while data := packed.read(_INPUT_BYTES):
        while data:
            if frame is None:
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


def _need_space(folder: Path, size: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + _CHECK_SPACE_BYTES:
        what = f"no room to unpack it into {folder}: {free / 1e9:.2f} GB are free, at least {size / 1e9:.2f} GB more are needed"
        raise bad_file("no_space", what, file=name)


def _placed(file: BinaryIO, kind: str, what: str, name: str) -> BadInput:
    """Return the fault at the end of what could be unpacked."""
    file.seek(0)
    size = newlines = 0
    while chunk := file.read(_CHUNK_BYTES):
        size += len(chunk)
        newlines += chunk.count(b"\n")
    return bad_file(kind, f"{what}; {size} bytes could be unpacked", file=name, line=newlines + 1, byte=size)
