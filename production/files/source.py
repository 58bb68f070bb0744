"""Read packed JSONL files of any size as one sequence of rows, at random by byte offsets in bounded memory.

Rows are checked when they are read; `on_bad_row="skip"` pays one full pass for numbers that leave bad lines out.

Reference: `reference/files.py`, R-FILE-1 to 14.
"""

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec
import xxhash

from production.errors import BadInput
from production.files.faults import LineError, bad_file, bad_line
from production.files.lines import LineFile
from production.files.manifest import check_count, read_manifest
from production.files.parse import Message, parse_record
from production.files.verdicts import BadLine, load_verdicts, save_verdicts, verdicts_path

type OnBadRow = Literal["error", "skip"]
type Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes in all."""
_PROGRESS_BYTES = 1 << 24


class Location(NamedTuple):
    """Location of a row."""

    file: str
    """The path as the user wrote it."""
    line: int
    """1-based."""
    byte_start: int
    """0-based, in the unpacked file."""
    byte_end: int
    """The byte behind the row and its newline."""


class SkippedRow(NamedTuple):
    """Names a line that `on_bad_row="skip"` left out."""

    file: str
    """The path as the user wrote it."""
    line: int
    """1-based."""
    byte: int
    """0-based offset of the fault, in the unpacked file."""
    kind: str
    """One word for the fault, of R-FILE."""


def open_source(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    chat_key: str = "messages",
    on_bad_row: OnBadRow = "error",
    cache_folder: str | os.PathLike[str] | None = None,
    verify: bool = False,
    takes_tool_calls: bool = False,
) -> "PackedSource":
    """Open one file or several, end to end in the order given: JSON lines, plain or packed with gzip or Zstandard.

    An index that is missing, damaged or of another state of the file is built again: in `cache_folder`, or beside the
    file, or in the user's cache. `verify` compares all bytes, not only size, time and samples. `takes_tool_calls`
    is for chat files, whose messages may have tool calls in place of a content (R-FILE-14). BadInput where a file cannot be
    opened (SPEC R-FILE).
    """
    names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not names:
        raise bad_file("no_files", "no file is named", file="(none)")
    if on_bad_row not in {"error", "skip"}:
        raise ValueError(f'on_bad_row is {on_bad_row!r}; it must be "error" or "skip"')
    folder = None if cache_folder is None else Path(os.path.abspath(cache_folder))  # noqa: PTH100 - keeps links
    files = [LineFile(name, cache_folder=folder, verify=verify) for name in names]
    return PackedSource(files, chat_key=chat_key, on_bad_row=on_bad_row, takes_tool_calls=takes_tool_calls)


class PackedSource:
    """Gives rows by number.

    May be pickled, forked, and read by several threads; a file that changes meanwhile raises BadInput.
    """

    def __init__(
        self, files: Sequence[LineFile], *, chat_key: str, on_bad_row: OnBadRow, takes_tool_calls: bool = False
    ) -> None:
        self.chat_key = chat_key
        self.on_bad_row = on_bad_row
        self.takes_tool_calls = takes_tool_calls
        skip = on_bad_row == "skip"
        self._files = [
            _RowFile(file, chat_key=chat_key, skip=skip, takes_tool_calls=takes_tool_calls) for file in files
        ]
        self._ends = list(accumulate(map(len, self._files)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> list[Message]:
        """Return the messages of row `row`, every key kept; BadInput names the file, line and byte of a fault."""
        messages: list[Message] = self.record(row)[self.chat_key]
        return messages

    def record(self, row: int) -> dict[str, Any]:
        """Return the whole object of row `row`, with the keys beside its messages; BadInput as for the messages."""
        file, row_of_file = self._find(row)
        return file.parse(file.line_of(row_of_file))

    def __iter__(self) -> Iterator[list[Message]]:
        for file in self._files:
            for found in file.parse_all():
                if isinstance(found, BadInput):
                    raise found
                yield found

    def raw(self, row: int) -> bytes:
        """Return the row's line as it stands in the file, with its newline."""
        file, row_of_file = self._find(row)
        return file.read(file.line_of(row_of_file))

    def locate(self, row: int) -> Location:
        """Return the location of row `row`."""
        file, row_of_file = self._find(row)
        line = file.line_of(row_of_file)
        return Location(file.lines.name, line + 1, *file.lines.bounds(line))

    def faults(self, progress: Progress | None = None) -> Iterator[BadInput]:
        """Read every line and yield each fault, faults of skipped lines too."""
        total, before = sum(file.size for file in self._files), 0
        for file in self._files:
            for done, fault in file.faults():
                if fault is not None:
                    yield fault
                elif progress is not None:
                    progress(before + done, total)
            before += file.size

    def validate(self, progress: Progress | None = None) -> None:
        """Read every row, and raise the first fault; skipped rows are known and raise nothing."""
        skipped = {(row.file, row.line) for row in self.skipped}
        for fault in self.faults(progress):
            if (fault.file, fault.line) not in skipped:
                raise fault

    @property
    def skipped(self) -> list[SkippedRow]:
        """Return the lines left out, in order; always empty with `on_bad_row="error"`."""
        return [SkippedRow(file.lines.name, *bad) for file in self._files for bad in file.bad]

    @property
    def fingerprint(self) -> str:
        """Return 32 hex digits of the rows and their numbers: equal for copies, also packed ones, under any name
        (R-FILE-10).
        """
        states: list[object] = [[file.size, file.lines.header.plain.content.hex()] for file in self._files]
        if self.takes_tool_calls:
            states.append("tool calls")
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode([self.chat_key, self.on_bad_row, states]))

    def describe(self) -> dict[str, object]:
        """Return the files that were opened, for people and for logs: plain JSON."""
        return {
            "rows": len(self),
            "skipped": sum(len(file.bad) for file in self._files),
            "chat_key": self.chat_key,
            "on_bad_row": self.on_bad_row,
            "fingerprint": self.fingerprint,
            "files": [file.describe() for file in self._files],
        }

    def check_manifests(self) -> None:
        """Compare bytes and lines of each file, unpacked, with the manifest beside it. Raises BadInput (kind `manifest`)."""
        for file in self._files:
            path = Path(file.lines.name)
            if (manifest := read_manifest(path)) is not None:
                check_count(path, manifest, size=file.size, rows=len(file.lines))

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        for file in self._files:
            file.lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, row: int) -> tuple["_RowFile", int]:
        number = operator.index(row)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"row {row} of a source with {len(self)} rows")
        which = bisect_right(self._ends, number)
        return self._files[which], number - (self._ends[which - 1] if which else 0)


class _RowFile:
    """Gives a file's lines as rows, without those to skip."""

    def __init__(self, lines: LineFile, *, chat_key: str, skip: bool, takes_tool_calls: bool) -> None:
        self.lines = lines
        self.size = lines.header.plain.size
        self._chat_key = chat_key
        self._takes_tool_calls = takes_tool_calls
        self.bad = self._find_bad() if skip else []
        if len(self.bad) == len(lines):
            first = self.bad[0]
            what = f"every line is bad, the first by {first.kind}"
            raise bad_file("no_rows_left", what, file=lines.name, line=first.line, byte=first.byte)
        # Bad line number k leaves its row to the next line: rows from here on stand k + 1 lines further down.
        self._shifts = [bad.line - 1 - index for index, bad in enumerate(self.bad)]

    def __len__(self) -> int:
        return len(self.lines) - len(self.bad)

    def line_of(self, row: int) -> int:
        return row + bisect_right(self._shifts, row)

    def read(self, line: int) -> bytes:
        try:
            return self.lines.read(line)
        except LineError as fault:
            raise self._place(fault, line, self.lines.bounds(line)[0]) from None

    def parse(self, line: int) -> dict[str, Any]:
        data = self.read(line)
        try:
            return self._parse(data)
        except LineError as fault:
            raise self._place(fault, line, self.lines.bounds(line)[0]) from None

    def parse_all(self) -> Iterator[list[Message] | BadInput]:
        skipped = {bad.line - 1 for bad in self.bad}
        for line, start, data in self.lines.read_all():
            if line not in skipped:
                found = self._parse_or_fault(line, start, data)
                yield found if isinstance(found, BadInput) else found[self._chat_key]

    def faults(self) -> Iterator[tuple[int, BadInput | None]]:
        """Yield bytes read, and a fault or None for progress alone, each 16 MiB and at the end."""
        told = 0
        for line, start, data in self.lines.read_all():
            if start - told >= _PROGRESS_BYTES:
                told = start
                yield start, None
            found = self._parse_or_fault(line, start, data)
            if isinstance(found, BadInput):
                yield start, found
        yield self.size, None

    def describe(self) -> dict[str, object]:
        found: dict[str, object] = {
            "file": self.lines.name,
            "bytes": self.lines.header.origin.size,
            "lines": len(self.lines),
            "rows": len(self),
            "index": str(self.lines.index_path),
            "index_built_now": self.lines.built,
            "plain_bytes": self.size,
            "content": self.lines.header.plain.content.hex(),
        }
        if self.lines.header.plain != self.lines.header.origin:
            found |= {"unpacked_copy": str(self.lines.plain_path), "unpacked_bytes": self.size}
        return found

    def _find_bad(self) -> list[BadLine]:
        # A chat file's lines are judged otherwise, so its verdicts are kept apart.
        judged_by = f"{self._chat_key}, with tool calls" if self._takes_tool_calls else self._chat_key
        path = verdicts_path(self.lines.index_path, judged_by)
        bad = load_verdicts(path, self.lines.header, judged_by)
        if bad is None:
            bad = [BadLine(fault.line or 0, fault.byte or 0, fault.kind) for _, fault in self.faults() if fault]
            save_verdicts(path, self.lines.header, judged_by, bad)
        return bad

    def _parse_or_fault(self, line: int, start: int, data: bytes | LineError) -> dict[str, Any] | BadInput:
        if isinstance(data, LineError):
            return self._place(data, line, start)
        try:
            return self._parse(data)
        except LineError as fault:
            return self._place(fault, line, start)

    def _parse(self, data: bytes) -> dict[str, Any]:
        ended = data.endswith(b"\n")
        return parse_record(
            data[:-1] if ended else data,
            chat_key=self._chat_key,
            unterminated=not ended,
            takes_tool_calls=self._takes_tool_calls,
        )

    def _place(self, fault: LineError, line: int, start: int) -> BadInput:
        return bad_line(fault, file=self.lines.name, line=line + 1, start=start)
