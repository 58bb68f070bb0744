"""Reads chat files line by line into conversations that a packed row can hold, or into a refusal that says why not.

What a packed file holds is trained on, so nothing here is repaired in silence.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from production.errors import PackproofError
from production.files.faults import LineError
from production.files.head import stream_lines
from production.files.parse import Message, parse_row
from production.tokens.message_keys import MessageKeys

MissingSystem = Literal["insert", "refuse"]
MiddleSystem = Literal["refuse", "split"]


@dataclass(frozen=True, kw_only=True)
class SourceLocation:
    """Place of a conversation in the input."""

    input: int
    """Index of the input file."""
    line: int
    """Line, from 1."""
    piece: int = 0
    """Index of the piece, where a conversation was split at its system messages."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation of a row; its first message is the only system message."""

    place: SourceLocation
    """Place in the input."""
    messages: tuple[Message, ...]
    """Its messages with every key they came with."""
    system_inserted: bool = False
    """Whether the first message was put there, empty, because the conversation had none."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One conversation that is in no row, and why."""

    place: SourceLocation
    """Place in the input."""
    kind: str
    """The name under which it is counted."""
    detail: str
    """Fault and fix."""


@dataclass(kw_only=True)
class InputFile:
    """One input file, with what was counted while it was read."""

    path: Path
    """The file, `.jsonl` or gzipped `.jsonl.gz`."""
    lines: int = 0
    """Lines read."""
    sha256: str = ""
    """Hash of the file's bytes as they lie on disk; set when it has been read."""
    split: int = 0
    """Conversations split at system messages in the middle."""
    dropped_keys: Counter[str] = field(default_factory=Counter)
    """Keys beside the messages: a row joins conversations and cannot keep them."""
    message_keys: Counter[str] = field(default_factory=Counter)
    """Keys of messages beside role and content that name nothing to train and no text: kept, though only a chat template reads them."""


class ConversationError(ValueError):
    """A line or a conversation that cannot be packed."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def read_conversations(
    file: InputFile,
    index: int,
    *,
    chat_key: str,
    missing_system: MissingSystem,
    middle_system: MiddleSystem,
    keys: MessageKeys,
) -> Iterator[Conversation | Refusal]:
    r"""Yield the conversations of `file`, the input number `index`, in order; counts are kept in `file`.

    Lines end at `\n` only: real contents hold U+2028 and its like. Raises BadInput
    where the file cannot be read, or is not JSON lines.
    """
    for number, line in enumerate(_lines(file.path), 1):
        file.lines = number
        try:
            messages = _parse(line, file, chat_key, keys)
            pieces = _at_systems(messages, file, missing_system, middle_system)
        except ConversationError as error:
            yield Refusal(place=SourceLocation(input=index, line=number), kind=error.kind, detail=str(error))
            continue
        for piece, (part, inserted) in enumerate(pieces):
            place = SourceLocation(input=index, line=number, piece=piece)
            yield Conversation(place=place, messages=tuple(part), system_inserted=inserted)
    with file.path.open("rb") as raw:
        file.sha256 = hashlib.file_digest(raw, "sha256").hexdigest()


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix in {".zst", ".xz", ".bz2"}:
        raise PackproofError(
            what="only plain and gzipped chat files are read", where=str(path), mend="unpack it, or pack it with gzip"
        )
    yield from stream_lines(str(path))


def _parse(line: bytes, file: InputFile, chat_key: str, keys: MessageKeys) -> list[Message]:
    """Return the messages of a line: by the parser that reads packed files, since the shape of a line is the same."""
    ended = line.endswith(b"\n")
    line = line.removesuffix(b"\n")
    try:
        messages = parse_row(line, chat_key=chat_key, unterminated=not ended)
    except LineError as error:
        raise ConversationError(error.kind, f"{error.what}; {error.mend}") from None
    beside = {key: value for key, value in json.loads(line).items() if key != chat_key}
    if (fault := keys.fault_of_line(beside)) is not None:
        raise ConversationError(fault[0], f"{fault[1]}; {keys.mend(fault[0])}")
    file.dropped_keys.update(list(beside))
    file.message_keys.update(key for message in messages for key in message if key not in {"role", "content"})
    return messages


def _at_systems(
    messages: list[Message], file: InputFile, missing_system: MissingSystem, middle_system: MiddleSystem
) -> list[tuple[list[Message], bool]]:
    """Make every piece start with its only system message: a row splits exactly there. Also say which got an empty one."""
    pieces: list[list[Message]] = []
    for message in messages:
        if not pieces or message["role"] == "system":
            pieces.append([])
        pieces[-1].append(message)
    if len(pieces) > 1:
        if middle_system == "refuse":
            turn = len(pieces[0])
            raise ConversationError(
                "system_in_the_middle",
                f"message {turn} is a second system message: a row would split there into two conversations; "
                "remove it, or split with --middle-system split",
            )
        file.split += 1
    inserted = messages[0]["role"] != "system"
    if inserted:
        if missing_system == "refuse":
            raise ConversationError(
                "missing_system",
                "the conversation has no system message in front, so in a row it would join the one before it; "
                "add one, or let an empty one be added with --missing-system insert",
            )
        pieces[0].insert(0, {"role": "system", "content": ""})
    return [(piece, inserted and number == 0) for number, piece in enumerate(pieces)]
