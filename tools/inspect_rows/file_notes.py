"""Say what is worth knowing of a file: line ends, separators and markers that another tool would read otherwise, and rows that look packed for others."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from production.files.head import stream_lines
from tools.counted import counted
from tools.inspect_rows.inspection import Inspection

_SEPARATORS = re.compile(rb"\xe2\x80[\xa8\xa9]|\xc2\x85|\\u202[89]|\\u0085")
"""U+2028, U+2029 and U+0085, as they are or escaped: Python's `splitlines` ends a line at each."""
_MARKER = re.compile(rb"<\|[A-Za-z0-9_]{2,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>|<SPECIAL_\d+>")
CRLF, SEPARATOR = "CRLF", "separator"
"""Kinds of lines, beside markers, which are their own kind."""
_MOST_MARKERS = 64
_FIRST_LINES = 3
"""Lines of each kind that are named."""
_SPLIT = 2
"""Tokens from which a marker is mere text for a tokenizer."""
OVERFULL_SHARE, MOSTLY_OVERFULL = 0.01, 0.5
"""Shares of overfull rows above which a file looks as if it had been packed for something else, and above which a check does not pass."""
UNDERFULL = 0.6
"""Share of a file's tokens below which it looks as if it had been packed for something else."""
ENOUGH_ROWS = 20
"""Rows below which a share says nothing of how a file was packed."""
FIX_PACKING = "find out which tokenizer, prompt format, pack length and cp it was packed for, and give the job those or pack it again"


@dataclass(kw_only=True)
class LineTexts:
    """Counts of lines, and the first lines of each kind, from 1."""

    file: str
    lines: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[int]] = field(default_factory=dict)
    is_whole: bool = True

    def add(self, kind: str) -> None:
        """Count the current line."""
        self.counts[kind] += 1
        first = self.first.setdefault(kind, [])
        if len(first) < _FIRST_LINES:
            first.append(self.lines)

    def place(self, kind: str) -> str:
        """Return the file with the first lines of a kind: `rows.jsonl, lines 41 and 97`."""
        *others, last = map(str, self.first[kind])
        more = "the first: " if self.counts[kind] > len(self.first[kind]) else ""
        lines = f"lines {', '.join(others)} and {last}" if others else f"line {last}"
        return f"{self.file}, {more}{lines}"


def look_through(file: str, *, deadline: float) -> LineTexts:
    """Read every line of a file once, unpacked where it is packed, up to `deadline`. Raises BadInput as `stream_lines`."""
    found = LineTexts(file=file)
    for line in stream_lines(file):
        found.lines += 1
        if line.endswith(b"\r\n"):
            found.add(CRLF)
        if _SEPARATORS.search(line):
            found.add(SEPARATOR)
        for marker in (
            set(_MARKER.findall(line))
            if b"<|" in line or b"<S" in line or b"INST]" in line or b"_of_turn>" in line
            else ()
        ):
            if marker.decode() in found.counts or len(found.counts) < _MOST_MARKERS:
                found.add(marker.decode())
        if not found.lines % 4096 and time.monotonic() > deadline:
            found.is_whole = False
            break
    return found


def notes_of(found: LineTexts, tokenizer: Any) -> Iterator[str]:
    """Yield what is worth knowing of a file's lines, with where it is first and what to do."""
    if count := found.counts[CRLF]:
        yield (
            f"{found.place(CRLF)}: {counted(count, 'line', 'ends', 'end')} in CRLF: the rows are read as they are; write the "
            "file with \\n where another tool is to count its bytes"
        )
    if count := found.counts[SEPARATOR]:
        yield (
            f"{found.place(SEPARATOR)}: {counted(count, 'line', 'holds', 'hold')} U+2028, U+2029 or U+0085, at which Python's "
            "splitlines and some readers end a line: rows are counted by \\n here and in Megatron-LM, so a tool that counts more has split them; "
            "count lines with wc -l"
        )
    for marker, count in found.counts.items():
        if marker in (CRLF, SEPARATOR):
            continue
        pieces = len(tokenizer(marker, add_special_tokens=False)["input_ids"])
        if pieces >= _SPLIT:
            yield (
                f"{found.place(marker)}: {marker} stands in {counted(count, 'line')} and is {pieces} tokens of this tokenizer, as "
                "if the file had been written for another: give the job the tokenizer that it was packed with, or pack it again without the marker"
            )


def is_packed_otherwise(found: Inspection) -> bool:
    """Return whether so many rows are overfull that the file must have been packed for something else."""
    return _overfull_share(found) > MOSTLY_OVERFULL


def packed_otherwise(found: Inspection) -> str | None:
    """Say that a file without a word about its settings looks as if it had been packed for others; None where it does not."""
    share = _overfull_share(found)
    fill = found.counts["content_tokens"] / max(found.counts["row_tokens"], 1)
    if share > OVERFULL_SHARE:
        return (
            f"{100 * share:.1f} % of its rows are overfull, as if packed for another tokenizer, format or a longer row"
        )
    if fill < UNDERFULL and found.counts["rows_built"] >= ENOUGH_ROWS:
        return f"only {100 * fill:.0f} % of its rows is filled, as if packed for another tokenizer, format or a shorter row"
    return None


def _overfull_share(found: Inspection) -> float:
    """Return the share of rows with a conversation that is cut or dropped; 0 for too few rows."""
    built = found.counts["rows_built"]
    return found.counts["rows_overfull"] / built if built >= ENOUGH_ROWS else 0.0
