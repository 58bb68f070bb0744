"""Hold one conversation on its way into a row, its place in the input, and why it is refused."""

from __future__ import annotations

from dataclasses import dataclass

from production.files.parse import Message


@dataclass(frozen=True, kw_only=True)
class SourceLocation:
    """Place of a conversation in the input."""

    input: int
    """Index of the input file."""
    line: int
    """Line, from 1; of a Parquet file the row, from 1."""
    piece: int = 0
    """Index of the piece, where a conversation was split at its system messages."""
    part: int = 0
    """Index of the part, where a conversation that no row could hold was split at its turns."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation as it will stand in a row; the first message is a system message, and no other one is."""

    place: SourceLocation
    """Where it was read."""
    messages: tuple[Message, ...]
    """Its messages with every key they came with."""
    system_inserted: bool = False
    """Whether the first message was put there, empty, because the conversation had none."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One conversation that is in no row, and why."""

    place: SourceLocation
    """Where it was read."""
    kind: str
    """The name under which it is counted."""
    detail: str
    """What is wrong, and how to fix it."""


class ConversationError(ValueError):
    """A line or a conversation that cannot be packed."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
