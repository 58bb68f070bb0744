"""Write a repaired copy of packed files and a list of every change; the originals are only read.

A line that says a row in another way is written as one: behind a byte order mark, with a carriage return at its end, as a
bare list of messages, or as turns of ShareGPT. `drop` leaves out what a run would refuse or lose. `split` moves conversations that do not fit into rows of their own
behind their row, and leaves out only what no row could hold. `mark` changes no row and names its faults under the key
`packproof`, for a reader that filters by itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from production.errors import BadInput, PackproofError, RowRefused
from production.files.cache import atomic_file
from production.files.faults import LineError
from production.files.file_state import is_there
from production.files.parse import parse_object, parse_record
from production.files.source import PackedSource
from production.rows.builder import BuiltRow, RowBuilder, RowSettings
from production.tokens.message_keys import MessageKeys
from production.tokens.prompts import split_conversations
from tools.counted import counted
from tools.pack_rows.conversation import ConversationError
from tools.pack_rows.layouts import layout_of, messages_of

FixBy = Literal["drop", "split", "mark"]
MARK = "packproof"
"""Key beside the messages of a marked row."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Holds one change between the original and the repaired file."""

    action: Literal[
        "repaired_line", "dropped_line", "dropped_row", "dropped_conversation", "moved_conversation", "marked_row"
    ]
    """What was done."""
    kind: str
    """Why: a kind of finding."""
    file: str
    """The original."""
    line: int
    """1-based line of the original."""
    conversation: int | None
    """0-based conversation within the original row; None for the whole row."""
    out_row: int | None
    """0-based row of the repaired file that it stands in now; None where it is left out."""
    what: str
    """What was wrong, with its numbers."""


@dataclass(kw_only=True)
class Repair:
    """Counts what a repair did."""

    out: Path
    """The repaired file."""
    changes: Path
    """The list of changes, one JSON object a line."""
    rows: int = 0
    """Rows of the repaired file."""
    by_action: Counter[str] = field(default_factory=Counter)
    """Number of changes of each action."""
    dropped_lines: Counter[str] = field(default_factory=Counter)
    """Number of lines left out, by what was wrong with them."""


class Fixer:
    """Repairs rows one after the other."""

    def __init__(
        self,
        *,
        tokenizer: Any,
        settings: RowSettings,
        keys: MessageKeys,
        by: FixBy,
        redundant: NDArray[Any] | None = None,
        drop_idle: bool = False,
    ) -> None:
        """`redundant` names copies that are left out (rows with conversation -1); `drop_idle` leaves out conversations that train nothing."""
        self._builder = RowBuilder(tokenizer=tokenizer, settings=settings)
        self._keys = keys
        self._length = settings.pack_length
        self._by = by
        self._drop_idle = drop_idle
        self._redundant = redundant

    def write(self, source: PackedSource, out: Path, *, check: Callable[[], None] = lambda: None) -> Repair:
        """Write the repaired file and the list of changes, each whole or not at all; `check` is called before they are kept.

        The list gets its name first: a repair that is killed in between leaves a list without its file, never a new file without its list.
        """
        check_place(out, [Path(str(file["file"])) for file in source.describe()["files"]], overwrite=True)  # type: ignore[attr-defined]
        result = Repair(out=out, changes=changes_path(out))
        with atomic_file(out) as rows, atomic_file(result.changes) as changes:  # the last opened is renamed first
            for number in range(len(source)):
                self._write_row(source, number, rows, changes, result)
            if not result.rows:
                raise PackproofError(
                    what="no row is left, so nothing was written", where=str(out), fix="look at the findings: the settings may not be the file's"
                )  # fmt: skip
            check()
        return result

    def _write_row(self, source: PackedSource, number: int, rows: BinaryIO, changes: BinaryIO, result: Repair) -> None:
        place = source.locate(number)

        def note(action: Any, kind: str, conversation: int | None, what: str, out_row: int | None = None) -> None:
            change = Change(
                action=action, kind=kind, file=place.file, line=place.line, conversation=conversation,
                out_row=out_row, what=what,
            )  # fmt: skip
            changes.write(msgspec.json.encode(change) + b"\n")
            result.by_action[action] += 1

        try:
            record = source.record(number)
            if source.raw(number).endswith(b"\r\n"):
                note("repaired_line", "carriage_return", None, "the line ended with a carriage return before the newline", result.rows)  # fmt: skip
        except BadInput as error:
            if error.line is None:
                raise
            found = _in_another_way(error, source, number)
            if found is None:
                note("dropped_line", error.kind, None, error.what)
                result.dropped_lines[error.kind] += 1
                return
            record, kind, what = found
            note("repaired_line", kind, None, what, result.rows)
        messages = record[source.chat_key]
        if self._by == "mark":
            kinds = self._faults(messages)
            if kinds:
                record = {**record, MARK: kinds}
                note("marked_row", kinds[0], None, ", ".join(kinds), result.rows)
            _put(rows, record, result)
            return
        left, dropped = self._kept(messages, number)
        for conversation, kind, what in dropped:
            note("dropped_conversation", kind, conversation, what)
        before, is_first = result.rows, True
        while left:
            fits, left, dropped = self._fit(left)
            for conversation, kind, what in dropped:
                note("dropped_conversation", kind, conversation, what)
            for conversation, _ in () if is_first else fits:
                note("moved_conversation", "truncated", conversation, "it did not fit into its row", result.rows)
            if fits:
                joined = [message for _, conversation in fits for message in conversation]
                _put(rows, {**record, source.chat_key: joined}, result)
            is_first = False
        if result.rows == before:
            note("dropped_row", "nothing_left", None, "no conversation of the row is left")

    def _kept(
        self, messages: Sequence[Any], number: int
    ) -> tuple[list[tuple[int, Sequence[Any]]], list[tuple[int, str, str]]]:
        """Return the conversations of a row with their numbers, copies and unhonoured keys left out."""
        row = split_conversations(messages)
        kept, dropped = [], []
        copies = self._copies(number)
        for index in range(row.count):
            conversation = row.conversation(index)
            if index in copies or -1 in copies:
                dropped.append((index, "duplicate", "the same stands earlier in the files"))
                continue
            try:
                self._keys.check(conversation)
            except RowRefused as error:
                dropped.append((index, error.kind, error.what))
                continue
            kept.append((index, conversation))
        return kept, dropped

    def _copies(self, number: int) -> set[int]:
        if self._redundant is None:
            return set()
        first, last = np.searchsorted(self._redundant["row"], [number, number + 1])
        return set(self._redundant["conversation"][first:last].tolist())

    def _fit(
        self, conversations: list[tuple[int, Sequence[Any]]]
    ) -> tuple[list[tuple[int, Sequence[Any]]], list[tuple[int, Sequence[Any]]], list[tuple[int, str, str]]]:
        """Return the conversations that a row holds whole, those for a further row, and those that are left out."""
        dropped: list[tuple[int, str, str]] = []
        left = list(conversations)
        more: list[tuple[int, Sequence[Any]]] = []
        while left:
            (built,) = self._builder.build_whole_group([[message for _, each in left for message in each]])
            if isinstance(built, RowRefused):
                if (
                    built.kind in ("dropped", "truncated", "too_many_boundaries", "indivisible_segment")
                    and len(left) > 1
                ):
                    more.insert(0, left.pop())
                    continue
                at = 0 if built.conversation is None else min(built.conversation, len(left) - 1)
                if built.conversation is None and built.kind == "row_end":
                    at = len(left) - 1
                number, _ = left.pop(at)
                dropped.append((number, built.kind, built.what))
                continue
            idle = self._idle(built) if self._drop_idle else []
            if idle:
                dropped += [(left[at][0], "trains_nothing", "no token of it trains") for at in idle]
                left = [each for at, each in enumerate(left) if at not in idle]
                continue
            return self._cut(left, more, built, dropped)
        return [], more, dropped

    def _cut(
        self,
        left: list[tuple[int, Sequence[Any]]],
        more: list[tuple[int, Sequence[Any]]],
        built: BuiltRow,
        dropped: list[tuple[int, str, str]],
    ) -> tuple[list[tuple[int, Sequence[Any]]], list[tuple[int, Sequence[Any]]], list[tuple[int, str, str]]]:
        whole = int(np.count_nonzero(built.laid.ends <= self._length))
        fits, over = left[:whole], left[whole:]
        # A conversation's own tokens may fit where its padding for context parallelism does not.
        if over and whole < len(built.laid.lengths):
            start = int(built.laid.ends[whole - 1]) if whole else 0
            if start + int(built.laid.lengths[whole]) <= self._length and start < self._length:
                fits, over = left[: whole + 1], left[whole + 1 :]
        if over and not fits:
            number, _ = over[0]
            tokens = int(built.laid.lengths[0])
            dropped.append((number, "too_long", f"it has {counted(tokens, 'token')} and a row {self._length}"))
            over = over[1:]
        over = over + more
        if self._by == "drop":
            dropped += [(number, "truncated", "it did not fit into its row") for number, _ in over]
            over = []
        return fits, over, dropped

    def _idle(self, built: BuiltRow) -> list[int]:
        mask, laid = built.row.token_mask.numpy(), built.laid
        starts = np.concatenate([[0], laid.ends[:-1]])
        idle = []
        for at, (start, length) in enumerate(zip(starts.tolist(), laid.lengths.tolist(), strict=True)):
            if start + length <= self._length and not mask[max(start - 1, 0) : start + length - 1].any():
                idle.append(at)
        return idle

    def _faults(self, messages: Sequence[Any]) -> list[str]:
        kinds = []
        try:
            self._keys.check(messages)
        except RowRefused as error:
            kinds.append(error.kind)
        (built,) = self._builder.build_whole_group([messages])
        if isinstance(built, RowRefused):
            return [*kinds, built.kind]
        kinds += [
            kind
            for kind in ("truncated", "dropped", "unrendered_messages", "empty_conversations")
            if built.row.report[kind]
        ]
        if not built.row.report["trained_tokens"]:
            kinds.append("row_trains_nothing")
        return kinds


def check_place(out: Path, files: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse a place for the repaired file that is one of the originals, or taken. Raises PackproofError."""
    if out.resolve() in {file.resolve() for file in files}:
        raise PackproofError(
            what="the output is the file that is read",
            where=str(out),
            fix="name another file: originals are never changed",
        )
    for place in () if overwrite else (out, changes_path(out)):
        if is_there(place):
            raise PackproofError(
                what="the file exists", where=str(place), fix="choose another --fix, or replace it with --overwrite"
            )


def changes_path(out: Path) -> Path:
    """Return the place of the list of changes of a repaired file."""
    return out.with_name(f"{out.name}.changes.jsonl")


def _in_another_way(error: BadInput, source: PackedSource, number: int) -> tuple[dict[str, Any], str, str] | None:
    """Return the row that an unreadable line means, with the kind and the words of the change; None where it is not plain."""
    if error.kind == "line_too_long":
        return None
    line = source.raw(number).removesuffix(b"\n")
    words = ["a byte order mark stood before the row"] if line.startswith(_BYTE_ORDER_MARK) else []
    if line.endswith(b"\r"):
        words.append("the line ended with a carriage return before the newline")
    line = line.removeprefix(_BYTE_ORDER_MARK)
    for kind, what, convert in _OTHER_WAYS:
        try:
            record = convert(line, source.chat_key)
        except (LineError, ConversationError):
            continue
        return record, kind or error.kind, ", and ".join([*words, what] if what else words)
    return None


def _as_row(line: bytes, chat_key: str) -> dict[str, Any]:
    return parse_record(line, chat_key=chat_key)


def _bare(line: bytes, chat_key: str) -> dict[str, Any]:
    return parse_record(b"{%s: %s}" % (json.dumps(chat_key).encode(), line.rstrip(b" \t\r")), chat_key=chat_key)


def _sharegpt(line: bytes, chat_key: str) -> dict[str, Any]:
    record = parse_object(line)
    if layout_of(record, chat_key) != "sharegpt":
        raise ConversationError("sharegpt_shape", "the line has no turns of ShareGPT")
    messages, beside = messages_of(record, "sharegpt", chat_key)
    return parse_record(json.dumps({**beside, chat_key: messages}).encode(), chat_key=chat_key)


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_WAYS: tuple[tuple[str, str, Callable[[bytes, str], dict[str, Any]]], ...] = (
    ("", "", _as_row),
    ("bare_messages", "the line was the bare list of messages", _bare),
    ("sharegpt", "the line had turns of ShareGPT", _sharegpt),
)


def changes_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the changes of a list, in the order of the original."""
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _put(rows: BinaryIO, record: dict[str, Any], result: Repair) -> None:
    rows.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    result.rows += 1
