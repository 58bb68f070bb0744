"""Read lines of a file one after the other, without an index: for packing, and for the first rows that are checked
before a run.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from production.errors import BadInput
from production.files.compressed import compression_of
from production.files.contents import FIRST_BYTES, check_contents, check_packed
from production.files.faults import LineError, bad_file, bad_line
from production.files.file_state import open_for_reading
from production.files.lines import MAX_LINE_BYTES
from production.files.parse import Message, parse_record, parse_row

MOST_BYTES = 1 << 24
"""Bytes of a file that are read at most: a line that does not end within them is left to the run."""

MOST_COUNTED = 1 << 33
"""Bytes before a truncated last line up to which its line is counted: seconds."""


def first_rows(
    name: str, count: int, chat_key: str, *, skip: bool, takes_tool_calls: bool = False
) -> Iterator[tuple[int, list[Message]]]:
    """Yield line and messages as `first_records` yields line and record."""
    for number, record in first_records(name, count, chat_key, skip=skip, takes_tool_calls=takes_tool_calls):
        yield number, record[chat_key]


def first_records(
    name: str, count: int, chat_key: str, *, skip: bool, takes_tool_calls: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number (from 1) and record of the first `count` lines; with `skip` lines that cannot be read are left out.

    `takes_tool_calls` as `open_source` has it.

    Raises BadInput as `open_source` and a row's reading do. Nothing is written.
    """
    start = 0
    for number, line in enumerate(itertools.islice(stream_lines(name, most_bytes=MOST_BYTES), count), 1):
        ended = line.endswith(b"\n")
        if not ended and start + len(line) >= MOST_BYTES:
            return
        try:
            yield (
                number,
                parse_record(
                    line.removesuffix(b"\n"),
                    chat_key=chat_key,
                    unterminated=not ended,
                    takes_tool_calls=takes_tool_calls,
                ),
            )
        except LineError as fault:
            if not skip:
                raise bad_line(fault, file=name, line=number, start=start) from None
        start += len(line)
    if not start:
        raise bad_file("empty_file", "the file has no row", file=name, line=1, byte=0)


def cut_end(name: str, chat_key: str) -> BadInput | None:
    """Return the fault of a last line that was cut while it was written or copied; None where nothing is seen.

    Only the end of the file is read; a packed one is not looked at, since unpacking finds it (`truncated_compressed`).
    """
    path = Path(name)
    if compression_of(path) is not None:
        return None
    with open(open_for_reading(path, name), "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MOST_BYTES)
        file.seek(start)
        end = file.read(MOST_BYTES)
    at = end.rfind(b"\n") + 1
    if at == len(end) or (at == 0 and start):
        return None
    try:
        parse_row(end[at:], chat_key=chat_key, unterminated=True)
    except LineError as fault:
        if fault.kind == "truncated_last_line":
            line = _lines_before(path, name, start + at)
            return bad_file(
                fault.kind,
                "the file ends within its last row",
                file=name,
                line=None if line is None else line + 1,
                byte=size,
            )
    return None


def _lines_before(path: Path, name: str, end: int) -> int | None:
    """Return the newlines before the byte `end`; None for a file so large that counting would take minutes."""
    if end > MOST_COUNTED:
        return None
    lines, left = 0, end
    with open(open_for_reading(path, name), "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        while left > 0 and (piece := file.read(min(left, MOST_BYTES))):
            lines += piece.count(b"\n")
            left -= len(piece)
    return lines


def stream_lines(name: str, *, most_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file with their newlines, unpacked where its name says so, up to `most_bytes` of them.

    A line of more than MAX_LINE_BYTES comes in pieces that are one byte longer than that: memory stays bounded.

    Raises BadInput for a file that cannot be opened, is damaged, or is not JSON lines (`contents`).
    """
    path = Path(name)
    packed = compression_of(path)
    with open(open_for_reading(path, name), "rb") as raw:  # noqa: PTH123 - a descriptor, not a path
        check_packed(raw.read(FIRST_BYTES), packed, file=name)
        raw.seek(0)
        left = sys.maxsize if most_bytes is None else most_bytes
        try:
            if packed is not None:
                with _unpacked(raw, packed) as stream:
                    check_contents(stream.read(FIRST_BYTES), file=name)
                raw.seek(0)
            with _unpacked(raw, packed) as stream:
                while left > 0 and (line := stream.readline(min(left, MAX_LINE_BYTES + 1))):
                    yield line
                    left -= len(line)
        except EOFError:
            raise bad_file("truncated_compressed", "the compressed data end too early", file=name) from None
        except (zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise bad_file("corrupt_compressed", f"the compressed data are damaged ({error})", file=name) from None


def _unpacked(raw: IO[bytes], packed: str | None) -> IO[bytes]:
    if packed == "gzip":
        return cast("IO[bytes]", gzip.open(raw))
    if packed == "Zstandard":
        frames = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
        return cast("IO[bytes]", io.BufferedReader(cast("io.RawIOBase", frames)))
    return raw
