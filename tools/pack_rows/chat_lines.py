"""Parse the lines of chat files into conversations that a packed row can hold, or into a refusal that says why not.

What a packed file holds is trained on, so nothing here is repaired in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from production.files.faults import LineError
from production.files.parse import Message, parse_object, parse_record
from production.tokens.message_keys import MessageKeys
from tools.pack_rows.conversation import Conversation, ConversationError, Refusal, SourceLocation
from tools.pack_rows.inputs import Chunk, InputFile
from tools.pack_rows.layouts import messages_of

MissingSystem = Literal["insert", "refuse"]
MiddleSystem = Literal["refuse", "split"]


def read_conversations(
    chunk: Chunk,
    file: InputFile,
    *,
    chat_key: str,
    missing_system: MissingSystem,
    middle_system: MiddleSystem,
    keys: MessageKeys,
) -> Iterator[Conversation | Refusal]:
    r"""Yield the conversations of some lines in order; counts are kept in `file`, whose layout they have.

    Lines end at `\n` only: real contents hold U+2028 and its like.
    """
    for number, line in enumerate(chunk.lines, chunk.first):
        try:
            messages = _parse(line, file, chat_key, keys)
            pieces = _at_systems(messages, file, missing_system, middle_system)
        except ConversationError as error:
            place = SourceLocation(input=chunk.input, line=number)
            yield Refusal(place=place, kind=error.kind, detail=str(error))
            continue
        for piece, (part, inserted) in enumerate(pieces):
            place = SourceLocation(input=chunk.input, line=number, piece=piece)
            yield Conversation(place=place, messages=tuple(part), system_inserted=inserted)


def _parse(line: bytes, file: InputFile, chat_key: str, keys: MessageKeys) -> list[Message]:
    """Return the messages of a line: by the parser that reads packed files, since the shape of a line is the same."""
    ended = line.endswith(b"\n")
    line = line.removesuffix(b"\n")
    messages: list[Message]
    beside: dict[str, Any]
    try:
        if file.layout == "messages":
            record = parse_record(line, chat_key=chat_key, unterminated=not ended)
            messages = record[chat_key]
            beside = {key: value for key, value in record.items() if key != chat_key}
        else:
            messages, beside = messages_of(parse_object(line, unterminated=not ended), file.layout, chat_key)
    except LineError as error:
        raise ConversationError(error.kind, f"{error.what}; {error.fix}") from None
    if (fault := keys.fault_of_line(beside)) is not None:
        raise ConversationError(fault[0], f"{fault[1]}; {keys.fix(fault[0])}")
    if beside:
        file.dropped_keys.update(list(beside))
    if extra := [key for message in messages for key in message if key not in {"role", "content"}]:
        file.message_keys.update(extra)
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
