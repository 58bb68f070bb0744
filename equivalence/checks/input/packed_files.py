"""Packed files: what the reader of production makes of drawn files, against the reference's ten lines over the same bytes (R-FILE).

Every file is read in order and out of order, opened again from its index, and once more after something happened to it: the reader must
never take the rows of another state of the file. Third side of a bad line is the generator, which knows its fault and where it stands.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equivalence.cases.result import CheckResult, Finding
from equivalence.checks.input.answers import Seen, compared
from equivalence.generators.files import BAD_AT, SAMPLE_BYTES, SAMPLES, FilesCase, pack
from production.errors import BadInput
from production.files.source import PackedSource, open_source
from reference.files import Line, read_lines, rows_of

_THEN = 1_700_000_000 * 10**9
"""When files were last changed, in nanoseconds: long ago, so that nobody waits for a clock to tick."""
_READS = 12


@dataclass
class _Files:
    """The files of a case on disk."""

    case: FilesCase
    folder: Path
    contents: list[bytes]
    random: random.Random
    paths: list[Path] = field(default_factory=list)
    ticks: int = 0
    read: dict[tuple[tuple[bytes, ...], str], list[Line]] = field(default_factory=dict)
    """What the reference has read, by contents and key."""

    def write(self, number: int, content: bytes, *, same_tick: bool = False) -> None:
        """Put a content into a file; only `same_tick` leaves the time of its last change."""
        draft = self.case.files[number]
        self.contents[number] = content
        self.paths[number].write_bytes(draft.packed(content))
        self.ticks += not same_tick
        self.set_time(self.paths[number])

    def set_time(self, path: Path) -> None:
        os.utime(path, ns=(_THEN + self.ticks, _THEN + self.ticks))

    def open(self, paths: Sequence[Path] | None = None, **options: Any) -> PackedSource:
        options = {"on_bad_row": "skip" if self.case.skip else "error"} | options
        return open_source(self.paths if paths is None else paths, cache_folder=self.folder / "cache", **options)

    def expected(self, *, contents: Sequence[bytes] | None = None, chat_key: str = "messages") -> list[Line] | Seen:
        """Return the rows of the reference, or the kind by which opening is refused."""
        contents = self.contents if contents is None else contents
        asked = (tuple(contents), chat_key)
        if asked not in self.read:  # parsing is what takes long
            self.read[asked] = read_lines(contents, chat_key)
        lines = self.read[asked]
        for number, content in enumerate(contents):
            if not content:
                return {"refused": ("empty_file", number, 1, 0)}
        for number in range(len(contents)):
            own = [line for line in lines if line.file == number]
            if self.case.skip and all(line.fault for line in own):
                return {"refused": ("no_rows_left", *_fault(own[0])[1:])}
        return lines


def check_packed_files(case: FilesCase) -> CheckResult:
    """Read the files whole, then after each act of the case, and compare all that both sides say."""
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="packproof-files-") as folder:
        files = _Files(case=case, folder=Path(folder), contents=case.contents(), random=random.Random(case.seed))  # noqa: S311
        for number, draft in enumerate(case.files):
            files.paths.append(Path(folder) / f"{number}.jsonl{draft.packing}")
            files.write(number, files.contents[number])
        findings += compared("opened", *_both(files, files.open, whole=True))
        for act in case.acts:
            if findings:
                break
            for name, sides in _ACTS[act](files).items():
                findings += compared(f"{act}: {name}", *sides)
    return CheckResult(check="packed_files", findings=findings)


def _both(
    files: _Files, opened: Callable[[], PackedSource], *, whole: bool = False, reverse: bool = False, **expected: Any
) -> tuple[Seen, Seen]:
    """Read the files, or a part of them, with the reference and production.

    An error of production's own is its answer.
    """
    wanted = files.expected(**expected)
    theirs = wanted if isinstance(wanted, dict) else _told(files, wanted, whole=whole)
    places = {str(path): number for number, path in enumerate(reversed(files.paths) if reverse else files.paths)}
    try:
        with opened() as source:
            ours = _asked(source, places, list(theirs.get("rows by number", {})), whole=whole)
    except BadInput as error:
        ours = {"refused": _placed(error, places)}
    except Exception as error:  # noqa: BLE001 - a reader that fails is a difference
        ours = {"raised": f"{type(error).__name__}: {error}"}
    return theirs, ours


def _told(files: _Files, lines: list[Line], *, whole: bool) -> Seen:
    """Return the reference's answers."""
    skip = files.case.skip
    rows = rows_of(lines, skip=skip)
    faults = [line for line in lines if line.fault]
    ends = [place + step for place in _last_rows(rows) for step in (0, 1)]
    numbers = [0, *ends, *(files.random.randrange(len(rows)) for _ in range(_READS))]
    files.random.shuffle(numbers)
    seen: Seen = {
        "number of rows": len(rows),
        "skipped": [(line.file, line.line, _fault(line)[3], line.fault) for line in faults] if skip else [],
        "rows by number": {number: _row(rows[number]) for number in numbers if number < len(rows)},
    }
    if whole:
        first = next((place for place, line in enumerate(rows) if line.fault), len(rows))
        seen["rows in order"] = [line.messages for line in rows[:first]]
        seen["stopped by"] = None if first == len(rows) else _fault(rows[first])
        seen["faults"] = [_fault(line) for line in faults]
        seen["progress"] = [sum(map(len, files.contents))] * 2
    return seen


def _asked(source: PackedSource, places: dict[str, int], numbers: list[int], *, whole: bool) -> Seen:
    """Production's answers, rows in the order of `numbers`."""
    seen: Seen = {
        "number of rows": len(source),
        "skipped": [(places[bad.file], *bad[1:]) for bad in source.skipped],
        "rows by number": {number: _read(source, number, places) for number in numbers},
    }
    if whole:
        rows: list[Any] = []
        stopped = None
        try:
            rows.extend(source)
        except BadInput as error:
            stopped = _placed(error, places)
        progress: list[tuple[int, int]] = []
        seen |= {"rows in order": rows, "stopped by": stopped}
        seen["faults"] = [_placed(fault, places) for fault in source.faults(lambda *done: progress.append(done))]
        seen["progress"] = list(progress[-1])
    return seen


def _row(line: Line) -> tuple[Any, ...]:
    place = (line.file, line.line, line.start, line.start + len(line.data))
    return place, line.data, _fault(line) if line.fault else line.messages


def _read(source: PackedSource, number: int, places: dict[str, int]) -> tuple[Any, ...]:
    try:
        found: Any = source[number]
    except BadInput as error:
        found = _placed(error, places)
    place = source.locate(number - len(source))  # counted from the end: the same row
    return (places[place.file], *place[1:]), source.raw(number), found


def _fault(line: Line) -> tuple[str, int, int, int]:
    """Kind, file, line and byte of a bad line."""
    assert line.fault is not None
    at = BAD_AT.get(line.data.removesuffix(b"\n"), 0)
    # The row as a whole lacks the key; what is wrong further in is not looked at.
    at = {"truncated_last_line": len(line.data), "missing_chat_key": 0}.get(line.fault, at)
    return line.fault, line.file, line.line, line.start + at


def _placed(error: BadInput, places: dict[str, int]) -> tuple[str, int | None, int | None, int | None]:
    return error.kind, places.get(error.file), error.line, error.byte


def _last_rows(rows: Sequence[Line]) -> list[int]:
    """Return the number of each file's last row."""
    return [place for place, line in enumerate(rows) if place + 1 == len(rows) or rows[place + 1].file != line.file]


# What may happen to files. Each act gives names of what was asked then, with both answers.


def _reopen(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    def opened() -> PackedSource:
        source = files.open()
        built.append([each["index_built_now"] for each in source.describe()["files"]])  # type: ignore[attr-defined]
        return source

    built: list[list[bool]] = []
    both = _both(files, opened)
    own = {"index built": built[0] if built else []}
    return {"rows": both, "index": ({"index built": [False] * len(own["index built"])}, own)}


def _pickle(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    def opened() -> PackedSource:
        with files.open() as source:
            source.locate(0)
            again: PackedSource = pickle.loads(pickle.dumps(source))  # noqa: S301 - its own
        return again

    return {"rows": _both(files, opened)}


def _copy(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Copies in another folder, packed otherwise, are the same rows with the same fingerprint; with one more row they are not."""
    folder = files.folder / "copies"
    folder.mkdir(exist_ok=True)
    paths, packings = [], ("", ".gz", ".zst")
    for number, draft in enumerate(files.case.files):
        packing = packings[(packings.index(draft.packing) + 1) % 3]
        paths.append(folder / f"{number}-copy{packing}")
        paths[-1].write_bytes(pack(files.contents[number], packing, draft.cuts[:1], 0))  # type: ignore[arg-type] # one of them
        files.set_time(paths[-1])
    try:
        same = files.open().fingerprint == files.open(paths).fingerprint
        other = files.open().fingerprint == files.open([*paths, paths[0]]).fingerprint
    except BadInput:  # refused as a whole: `opened` has told
        return {}
    return {"fingerprint": ({"same": True, "with a file twice": False}, {"same": same, "with a file twice": other})}


def _reverse(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Files in another order are other rows, with another fingerprint."""
    contents = list(reversed(files.contents))
    paths = list(reversed(files.paths))
    both = _both(files, lambda: files.open(paths), reverse=True, contents=contents)
    if "refused" in both[0]:
        return {"rows": both}
    same = files.open().fingerprint == files.open(paths).fingerprint
    return {"rows": both, "fingerprint": ({"same": contents == files.contents}, {"same": same})}


def _rewrite(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Compare a file of the same size with other lines: the open source refuses to read on, and the next opening sees the new lines."""
    try:
        source = files.open()
    except BadInput:
        return {}
    before = source.fingerprint
    number, content = _changed(files)
    files.write(number, content)
    theirs: Seen = {"reading on": "file_changed", "same fingerprint": False}
    ours: Seen = {"reading on": None}
    row = next((row for row in range(len(source)) if source.locate(row).file == str(files.paths[number])), None)
    with source:
        try:
            ours["reading on"] = "rows" if row is None or source.raw(row) else "nothing"
        except BadInput as error:
            ours["reading on"] = error.kind
    both = _both(files, files.open)
    ours["same fingerprint"] = "refused" not in both[0] and files.open().fingerprint == before
    return {"change": (theirs, ours), "rows": both}


def _rewrite_in_the_same_tick(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Compare such a file with its old time: the change lies in a sampled block, where it is seen (R-FILE-4)."""
    number, content = _changed(files)
    if files.case.files[number].packing:
        return {}
    files.write(number, content, same_tick=True)
    return {"rows": _both(files, files.open)}


def _verify(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Compare a change anywhere, of the same size and time: it is seen where all bytes are hashed."""
    number, content = _changed(files, anywhere=True)
    files.write(number, content, same_tick=not files.case.files[number].packing)
    return {"rows": _both(files, lambda: files.open(verify=True), whole=True)}


def _other_key(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Return the other key: a row under one key is not a row under another, and the reverse."""
    other = _both(files, lambda: files.open(chat_key="other"), chat_key="other")
    return {"rows under the other key": other, "rows": _both(files, files.open)}


def _as_a_chat_file(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Opened as chat files, whose messages may call tools in place of a content, they have other rows, and the reverse."""
    try:
        with files.open(takes_tool_calls=True) as source:
            ours: Seen = {"rows": len(source), "faults": sum(1 for _ in source.faults())}
    except BadInput as error:
        ours = {"refused": error.kind}
    return {"rows of chat files": (_of_chat_files(files), ours), "rows": _both(files, files.open)}


def _of_chat_files(files: _Files) -> Seen:
    """Return the reference's rows, and the lines that are rows of a chat file alone."""
    lines = [read_lines([content], "messages") for content in files.contents]
    taken = [[line for line in own if line.fault is None or b'"tool_calls": [' in line.data] for own in lines]
    if not all(files.contents):
        return {"refused": "empty_file"}
    if files.case.skip and not all(taken):
        return {"refused": "no_rows_left"}
    rows, count = sum(map(len, taken)), sum(map(len, lines))
    return {"rows": rows if files.case.skip else count, "faults": count - rows}


def _damage_the_cache(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Compare after a byte of an index, of its verdicts or of an unpacked copy was changed, with the old size and time."""
    kept = sorted(path for path in (files.folder / "cache").glob(".*") if path.stat().st_size)
    if not kept:
        return {}
    path = files.random.choice(kept)
    content = bytearray(path.read_bytes())
    # Within the last block of a copy, which is sampled.
    content[-1 - files.random.randrange(min(len(content), SAMPLE_BYTES))] ^= 1 << files.random.randrange(8)
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return {f"rows after {path.suffix}": _both(files, files.open)}


def _cut_the_packed_file(files: _Files) -> dict[str, tuple[Seen, Seen]]:
    """Compare a packed file whose end is missing: it has no rows, not those before the cut."""
    for number, draft in enumerate(files.case.files):
        packed = draft.packed(files.contents[number])
        if draft.packing and files.contents[number] and not (draft.packing == ".gz" and draft.zeros):
            files.paths[number].write_bytes(packed[: len(packed) - files.random.randint(1, 3)])
            files.ticks += 1
            files.set_time(files.paths[number])
            both = _both(files, files.open)
            files.write(number, files.contents[number])
            if both[0].get("refused", ("",))[0] == "empty_file":
                return {}
            kind = both[1].get("refused", ("rows",))[0]
            return {
                "opened": ({"refused": "truncated_compressed"}, {"refused": kind}),
                "fixed": _both(files, files.open),
            }
    return {}


_ACTS: dict[str, Callable[[_Files], dict[str, tuple[Seen, Seen]]]] = {
    "reopen": _reopen,
    "pickle": _pickle,
    "copy": _copy,
    "reverse": _reverse,
    "rewrite": _rewrite,
    "rewrite in the same tick": _rewrite_in_the_same_tick,
    "verify": _verify,
    "other key": _other_key,
    "as a chat file": _as_a_chat_file,
    "damage the cache": _damage_the_cache,
    "cut the packed file": _cut_the_packed_file,
}


def _changed(files: _Files, *, anywhere: bool = False) -> tuple[int, bytes]:
    """Return a file and other content of its size: two neighbouring lines swapped, or a letter of its first line changed."""
    number = files.random.randrange(len(files.contents))
    if anywhere:  # where most of it lies in no sample
        number = max(range(len(files.contents)), key=lambda number: len(files.contents[number]))
    content = files.contents[number]
    lines = content.split(b"\n")
    ends = itertools.accumulate(len(line) + 1 for line in lines[1:-1])
    # The first block is sampled.
    places = [place for place, end in enumerate(ends) if anywhere or end + len(lines[0]) < SAMPLE_BYTES]
    odd = [place for place in places if lines[place] != lines[place + 1]]
    moving = [place for place in odd if len(lines[place]) != len(lines[place + 1])]
    if anywhere:
        # Lines of other lengths whose bytes no sample holds: only all bytes tell that they were swapped.
        moving = [place for place in moving if _is_in_no_sample(content, lines, place)] or moving
    if moving:
        odd = moving
    if odd:
        place = files.random.choice(odd)
        lines[place : place + 2] = [lines[place + 1], lines[place]]
        return number, b"\n".join(lines)
    return number, content.replace(b"user", b"uses", 1) if b"user" in content else content.replace(b"uses", b"user", 1)


def _is_in_no_sample(content: bytes, lines: Sequence[bytes], place: int) -> bool:
    """Return whether lines `place` and the next lie outside the 16 blocks of 16 KiB that are sampled, from the first
    to the last (R-FILE-4).
    """
    if len(content) <= SAMPLES * SAMPLE_BYTES:
        return False
    start = sum(len(line) + 1 for line in lines[:place])
    end = start + len(lines[place]) + len(lines[place + 1]) + 1
    last = len(content) - SAMPLE_BYTES
    blocks = [last * block // (SAMPLES - 1) for block in range(SAMPLES)]
    return all(end <= block or block + SAMPLE_BYTES <= start for block in blocks)
