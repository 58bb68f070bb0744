"""Draw packed files: lines around the blocks that a reader reads by, dense and sparse, bad ones among them, plain or in members and frames."""

from __future__ import annotations

import gzip
import itertools
from dataclasses import dataclass
from typing import Literal

import zstandard

from equivalence.generators.choices import Choices

SAMPLE_BYTES = 1 << 14
SAMPLES = 16
EDGES = (1 << 11, SAMPLE_BYTES, 1 << 18, 1 << 19, 1 << 21)
"""Bytes at which blocks end: of compressed input, of a sample, of all samples, of a scan, of reading ahead."""
STRIDE = 1 << 12
"""Lines whose places a reader looks up at once."""
SHORTEST = 60
"""Bytes of a good line, at least."""
_HEAD, _TAIL = b'{"messages": [{"role": "user", "content": "', b'"}]}\n'
_ODD = "é\u2028\x85".encode()
"""Characters that end no line, although Python's splitlines splits at them."""

_MARKED = {
    b"^\n": "blank_line",
    b"^ \t\n": "blank_line",
    b"^{}\n": "missing_chat_key",
    b'^{"other": [{"role": "u", "content": "b"}]}\n': "missing_chat_key",
    b"^[]\n": "row_not_object",
    b'{"messages": ^{"role": "u", "content": "b"}}\n': "row_not_list",
    b'{"messages": ^[]}\n': "empty_row",
    b'{"messages": [^"b"]}\n': "message_not_object",
    b'{"messages": [^{"content": "b"}]}\n': "missing_role",
    b'{"messages": [{"role": ^1, "content": "b"}]}\n': "role_not_text",
    b'{"messages": [^{"role": "u"}]}\n': "missing_content",
    b'{"messages": [{"role": "u", "content": ^null}]}\n': "content_null",
    b'{"messages": [{"role": "u", "content": "b"}, {"role": "u", "content": ^[1]}]}\n': "content_parts",
    b'{"messages": [{"role": "u", "content": ^1}]}\n': "content_not_text",
    b'{"messages": [{"role": "u", "content": "b^\xff"}]}\n': "invalid_utf8",
    b'{"messages": [{"role": "u", "content": "b^\x00"}]}\n': "nul_byte",
    b'^\xef\xbb\xbf{"messages": [{"role": "u", "content": "b"}]}\n': "bom",
    b'{"messages": [{"role": "u", "content": "b"}]} ^x\n': "invalid_json",
    b'{"messages": [{"role": "u", "content": "b"}]}^\x0b\n': "invalid_json",
    b'{"messages": [{"role": "u", "content": "b"}]} ^\x0c\n': "invalid_json",
    b'{"messages": [{"role": "u", "content": "b"}], "x": ^NaN}\n': "invalid_json",
    b'{"messages": [{"role": "u", "content": "b", ^"role": "v"}]}\n': "duplicate_key",
    rb'{"messages": [{"role": "u", "content": "b^\ud800"}]}' + b"\n": "lone_surrogate",
    # A row of a chat file, whose messages may call tools in place of a content (R-FILE-14); no packed row.
    b'{"messages": [{"role": "u", "content": ^null, "tool_calls": [{"x": 1}]}]}\n': "content_null",
    b'{"messages": [^{"role": "u", "tool_calls": [{"x": 1}]}]}\n': "missing_content",
    # Both faults of bytes: the NUL byte is named, wherever it stands (R-FILE-6b).
    b'{"messages": [{"role": "u", "content": "b\xff^\x00"}]}\n': "nul_byte",
    b'{"messages": [{"role": "u", "content": "b^\x00\xff"}]}\n': "nul_byte",
}
BAD = tuple((line.replace(b"^", b""), kind, line.index(b"^")) for line, kind in _MARKED.items())
"""Lines that hold no row: the bytes, SPEC's kind of fault, and the byte of the fault."""
BAD_AT = {line.removesuffix(b"\n"): at for line, _, at in BAD}
"""Byte of the fault, by the line without its newline."""

Packing = Literal["", ".gz", ".zst"]
ACTS = (
    *(
        "reopen",
        "pickle",
        "copy",
        "reverse",
        "rewrite",
        "rewrite in the same tick",
        "verify",
        "other key",
        "as a chat file",
    ),
    *("damage the cache", "cut the packed file"),
)
"""Change of the files after they were read once."""


@dataclass(frozen=True, kw_only=True)
class FileDraft:
    """One file."""

    runs: tuple[tuple[int, int], ...]
    """Runs of lines: number of lines and bytes of each; -n bytes mean the bad line n - 1 of BAD."""
    missing: int
    """Bytes that are cut from the end: 1 is the last newline."""
    packing: Packing
    cuts: tuple[int, ...]
    """Borders of members or frames, in thousandths of the file."""
    zeros: int
    """Bytes of padding behind the members of a gzip file."""

    def content(self, name: str) -> bytes:
        """Return the unpacked bytes; each line contains `name`, so that no two files are equal."""
        numbers = itertools.count()
        lines = [_line(length, f"{name}{next(numbers)} ".encode()) for count, length in self.runs for _ in range(count)]
        content = b"".join(lines)
        return content[: len(content) - self.missing]

    def packed(self, content: bytes) -> bytes:
        """Return these bytes as they lie in the file."""
        return pack(content, self.packing, self.cuts, self.zeros)


@dataclass(frozen=True, kw_only=True)
class FilesCase:
    """Some files, how they are opened, and what becomes of them."""

    files: tuple[FileDraft, ...]
    skip: bool
    """`on_bad_row="skip"`."""
    acts: tuple[str, ...]
    """Of ACTS."""
    seed: int
    """Of the rows that are read, and of what is changed where."""

    def contents(self) -> list[bytes]:
        """Return the unpacked bytes of each file."""
        return [file.content("abcdef"[number]) for number, file in enumerate(self.files)]


def pack(content: bytes, packing: Packing, cuts: tuple[int, ...], zeros: int) -> bytes:
    """Return the content in as many members (gzip) or frames (Zstandard) as the cuts make, empty ones included."""
    places = [0, *sorted(len(content) * cut // 1000 for cut in cuts), len(content)]
    parts = [content[start:end] for start, end in itertools.pairwise(places)]
    if packing == ".gz":
        return b"".join(gzip.compress(part, compresslevel=1, mtime=0) for part in parts) + bytes(zeros)
    if packing == ".zst":
        return b"".join(zstandard.ZstdCompressor(level=1).compress(part) for part in parts)
    return content


def draw_files(choices: Choices) -> FilesCase:
    """Draw one to three files; one case in ten has one of megabytes or of thousands of lines."""
    is_large = choices.rarely(10)
    count = choices.integer(1, 2 if is_large else 3)
    large = choices.integer(0, count - 1) if is_large else -1
    acts = [choices.one_of(ACTS) for _ in range(choices.integer(1, 3))]
    return FilesCase(
        files=tuple(_draw_file(choices, is_large=number == large) for number in range(count)),
        skip=choices.one_of((False, True, True)),
        acts=("verify", acts[0]) if is_large else tuple(acts),
        seed=choices.integer(0, 2**32),
    )


def _draw_file(choices: Choices, *, is_large: bool) -> FileDraft:
    runs = _draw_large(choices) if is_large else _draw_small(choices)
    return FileDraft(
        runs=tuple(runs),
        missing=choices.one_of((0, 0, 1, 9, 30)) if runs and runs[-1][1] > 0 else 0,
        packing=choices.one_of(("", "", ".gz", ".zst")),
        cuts=tuple(choices.integers(0, 1000, fewest=0, longest=3)),
        zeros=choices.one_of((0, 0, 512)),
    )


def _draw_small(choices: Choices) -> list[tuple[int, int]]:
    """Draw a few kilobytes; one file in thirty is empty."""
    if choices.integer(0, 29) == 29:
        return []
    runs: list[tuple[int, int]] = []
    for _ in range(choices.integer(2, 7)):
        kind = choices.one_of(("few", "bad", "edge", "dense", "sparse"))
        if kind == "bad":
            runs.append((1, -choices.integer(1, len(BAD))))
        elif kind == "edge":
            runs.append(_to_edge(choices, runs, EDGES[:2]))
        elif kind == "dense":
            runs.append((choices.integer(5, 60), choices.integer(SHORTEST, 90)))
        elif kind == "sparse":
            runs.append((choices.integer(1, 3), choices.integer(2000, 20_000)))
        else:
            runs.append((choices.integer(1, 4), choices.integer(SHORTEST, 200)))
    return runs


def _draw_large(choices: Choices) -> list[tuple[int, int]]:
    """Draw one of three layouts: lines near a stride's length, blocks of short lines followed by long lines, or long lines around such blocks."""
    # Of large files, every third one in plain draws: one line more than a stride is what a reader may lose.
    kind = "stride" if choices.rarely(30) else choices.one_of(("blocks", "long"))
    if kind == "stride":
        return [(STRIDE + choices.one_of((1, 1, 1, 0)), choices.integer(SHORTEST, 64))]
    runs: list[tuple[int, int]] = []
    if kind == "blocks":
        if choices.one_of((False, True)):
            runs.append((1, -choices.integer(1, len(BAD))))
            runs.append(_to_edge(choices, runs, (512,)))
        runs.append((2048 + choices.integer(-1, 3), 512))
    for _ in range(choices.integer(0 if runs else 2, 3)):
        runs.append(_to_edge(choices, runs, EDGES[2:]))
        runs.append((choices.integer(1, 3), choices.integer(SHORTEST, 200)))
    if kind == "blocks" and len(runs) > 2:
        runs.append((1100, 512))
    # Two short lines of other lengths between long ones: they can change places where no sample of the file sees it.
    runs += [(choices.integer(90, 300), 1024), (1, 150), (1, 250), (choices.integer(90, 300), 1024)]
    return runs


def _to_edge(choices: Choices, runs: list[tuple[int, int]], edges: tuple[int, ...]) -> tuple[int, int]:
    """Draw one line up to the next edge, or a byte less or more."""
    size = sum(count * (length if length > 0 else len(BAD[-length - 1][0])) for count, length in runs)
    edge = choices.one_of(edges)
    gap = -size % edge + choices.one_of((0, 0, 1, -1))
    return 1, gap if gap >= SHORTEST else gap + max(edge, 512)


def _line(length: int, name: bytes) -> bytes:
    if length < 0:
        return BAD[-length - 1][0]
    room = length - len(_HEAD) - len(name) - len(_TAIL)
    odd = _ODD if room > len(_ODD) else b""
    return _HEAD + name + odd + b"x" * (room - len(odd)) + _TAIL
