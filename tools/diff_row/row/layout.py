"""Map a row for display: the conversation and turn of each position, padding, and lost conversations.

The map follows the boundaries of a side and the texts of the messages, and judges nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equivalence.subjects import Messages, Row, RowSettings
from equivalence.subjects.reference import adapt
from reference import prompts
from reference.refusals import RowRefused

NO_TURN = -1
"""Value in `turn_at` for padding, or for an unknown turn."""

Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Conversation of the row, with its outcome."""

    number: int
    """From 0, in the order of the row."""
    roles: tuple[str, ...]
    """Of its messages; empty where only a dump is known."""
    tokens: int | None
    """Its own tokens, padding apart; None if they could not be counted."""
    start: int | None
    """Its first position; None if it is not in the row."""
    end: int | None
    """The boundary where its segment ends."""
    padding: int | None
    """Positions of its segment that are padding."""
    trained: int | None
    """Positions of its segment whose label counts in the loss."""
    state: str
    """kept, truncated, dropped, empty, or unknown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMap:
    """The conversations of a row and the same by position. Arrays are [P]; P is 0 if no side built the row."""

    conversations: tuple[Conversation, ...]
    conversation_at: Ints
    turn_at: Ints
    """Index of the message in its conversation, or NO_TURN."""
    padded: Flags
    """Positions that hold padding."""
    padding_known: bool
    """False if padding was inferred from ids alone, because only a dump is known."""

    def role(self, position: int) -> str | None:
        """Return the role of the turn at a position."""
        turn = int(self.turn_at[position])
        roles = self.conversations[int(self.conversation_at[position])].roles
        return roles[turn] if 0 <= turn < len(roles) else None

    def place(self, position: int) -> str:
        """Return `1·2 assistant`: conversation, turn, role; or a word for a position outside of turns."""
        if not 0 <= position < len(self.conversation_at):
            return ""
        conversation = int(self.conversation_at[position])
        if self.padded[position]:
            return f"{conversation} padding"
        role = self.role(position)
        return f"{conversation}" if role is None else f"{conversation}·{int(self.turn_at[position])} {role}"


def map_row(messages: Messages | None, tokenizer: Any | None, settings: RowSettings | None, row: Row | None) -> RowMap:
    """Map a row by its messages and the boundaries of one built side; either may be missing."""
    if messages is not None and tokenizer is not None and settings is not None:
        return _map_messages(messages, tokenizer, settings, row)
    if row is None or row.cu_seqlens is None or row.input_ids is None:
        return _paint([], [], 0, padding_known=False)
    return _map_dump(row)


def map_conversations(conversations: Sequence[tuple[tuple[str, ...], Ints]], row: Row) -> RowMap:
    """Map a row whose conversations are known as their roles and the message of each token: a bin of the online path."""
    ends = boundaries(row) if row.input_ids is not None else [0]
    found = []
    for number, (roles, turn_of) in enumerate(conversations):
        start, end = (ends[number], ends[number + 1]) if number < len(ends) - 1 else (None, None)
        found.append(_conversation(number, roles, turn_of, start, end, row))
    return _paint(found, [turn_of for _, turn_of in conversations], ends[-1], padding_known=True)


def boundaries(row: Row) -> list[int]:
    """Return the boundaries of a built row, from 0 to P in order; [0, P] if its own boundaries are not valid."""
    assert row.input_ids is not None
    length = int(row.input_ids.shape[-1])
    found = [] if row.cu_seqlens is None else [int(value) for value in row.cu_seqlens.reshape(-1)]
    inside = [value for value in found if 0 <= value <= length]
    if inside != sorted(inside) or not inside or inside[0] != 0:
        return [0, length]
    return inside if inside[-1] == length and len(inside) > 1 else [*inside, length]


def _map_messages(messages: Messages, tokenizer: Any, settings: RowSettings, row: Row | None) -> RowMap:
    try:
        split = prompts.split_conversations(messages)
    except RowRefused:
        split = [list(messages)]
    ends = boundaries(row) if row is not None and row.input_ids is not None else [0]
    conversations, turns = [], []
    for number, conversation in enumerate(split):
        inside = number < len(ends) - 1
        turn_of = token_turns(conversation, tokenizer, settings)
        start, end = (ends[number], ends[number + 1]) if inside else (None, None)
        roles = tuple(str(message.get("role")) if hasattr(message, "get") else "?" for message in conversation)
        conversations.append(_conversation(number, roles, turn_of, start, end, row))
        turns.append(turn_of)
    return _paint(conversations, turns, ends[-1], padding_known=True)


def token_turns(conversation: prompts.Conversation, tokenizer: Any, settings: RowSettings) -> Ints | None:
    """Return the turn of each token of a conversation; None for a conversation without text, NO_TURN where the text does not decide.

    A token belongs to the turn in which its first character lies, which also holds where tokens merge across turns.
    """
    prompt = prompts.Prompt(format=settings.prompt_format)
    adapted = adapt(tokenizer)
    try:
        text = prompts.render(conversation, prompt, adapted)
        if not getattr(tokenizer, "is_fast", False):
            return np.full(len(adapted.encode(text)), NO_TURN, np.int32)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except (RowRefused, KeyError, TypeError, AttributeError):  # a message that is none, a text that cannot be encoded
        return None
    starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
    ends = _turn_ends(conversation, prompt, adapted, text)
    if ends is None:
        return np.full(len(starts), NO_TURN, np.int32)
    turns: Ints = np.searchsorted(np.array(ends), starts, side="right").astype(np.int32)
    return turns


def _turn_ends(
    conversation: prompts.Conversation, prompt: prompts.Prompt, tokenizer: prompts.Tokenizer, text: str
) -> list[int] | None:
    """Return the end of each turn's text. A chat template gives it only if the rendering of each beginning begins the whole rendering."""
    if prompt.format != "default":
        lengths = [len(prompts.render_message(message, prompt.format)) for message in conversation]
        return list(np.cumsum(lengths))
    ends = []
    for count in range(1, len(conversation) + 1):
        try:
            beginning = prompts.render(conversation[:count], prompt, tokenizer)
        except RowRefused:
            return None
        if not text.startswith(beginning):
            return None
        ends.append(len(beginning))
    return ends


def _conversation(
    number: int, roles: tuple[str, ...], turn_of: Ints | None, start: int | None, end: int | None, row: Row | None
) -> Conversation:
    own = None if turn_of is None else len(turn_of)
    if row is None or row.input_ids is None:
        return Conversation(
            number=number, roles=roles, tokens=own, start=None, end=None, padding=None, trained=None, state="not built"
        )
    if start is None or end is None:
        state = "empty" if own == 0 else "dropped"
        return Conversation(
            number=number, roles=roles, tokens=own, start=None, end=None, padding=None, trained=None, state=state
        )
    size = end - start
    kept = None if own is None else min(own, size)
    trained = None if row.token_mask is None else int((row.token_mask[start:end] != 0).sum())
    return Conversation(
        number=number,
        roles=roles,
        tokens=own,
        start=start,
        end=end,
        padding=None if kept is None else size - kept,
        trained=trained,
        state=_state(own, kept),
    )


def _state(own: int | None, kept: int | None) -> str:
    """Return the outcome of a conversation (R-REPORT-1)."""
    if own is None or kept is None:
        return "unknown"
    if own == 0:
        return "empty"
    return "kept" if kept == own else "truncated" if kept else "dropped"


def _map_dump(row: Row) -> RowMap:
    """Map a dump, which has segments only. The last label of a row is always the pad id, and padding is a run at the end of a segment."""
    assert row.input_ids is not None
    ids = row.input_ids.reshape(-1).numpy()
    pad = None if row.target_ids is None or not row.target_ids.numel() else int(row.target_ids.reshape(-1)[-1])
    conversations, turns = [], []
    ends = boundaries(row)
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        others = np.flatnonzero(ids[start:end] != pad)
        own = int(others[-1]) + 1 if len(others) else 0
        turn_of = np.full(own, NO_TURN, np.int32)
        conversations.append(_conversation(number, (), turn_of, start, end, row))
        turns.append(turn_of)
    return _paint(conversations, turns, ends[-1], padding_known=False)


def _paint(
    conversations: Sequence[Conversation], turns: Sequence[Ints | None], length: int, *, padding_known: bool
) -> RowMap:
    conversation_at = np.zeros(length, np.int32)
    turn_at = np.full(length, NO_TURN, np.int32)
    padded = np.zeros(length, np.bool_)
    for conversation, turn_of in zip(conversations, turns, strict=True):
        if conversation.start is None or conversation.end is None:
            continue
        start, end = conversation.start, conversation.end
        conversation_at[start:end] = conversation.number
        if turn_of is not None:
            kept = min(len(turn_of), end - start)
            turn_at[start : start + kept] = turn_of[:kept]
            padded[start + kept : end] = True
    return RowMap(
        conversations=tuple(conversations),
        conversation_at=conversation_at,
        turn_at=turn_at,
        padded=padded,
        padding_known=padding_known,
    )
