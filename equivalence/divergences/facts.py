"""Gather the facts from which a divergence is predicted: a row's outcome under the more permissive semantics, and its causes.

A refusal has a stage, its place in the order of checks (docs/SPEC.md#refusals), so that the earlier of two refusals is known.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equivalence.subjects.protocol import Messages, Refusal, Row, RowSettings
from equivalence.subjects.reference import SUBJECT, adapt, row_settings
from equivalence.subjects.tokenizers import as_transformers
from reference import prompts
from reference.refusals import RowRefused

Stage = tuple[int, ...]

(
    UNSUPPORTED,
    EARLY_PAD,
    NO_MESSAGE,
    ENDS,
    PAD,
    SPLIT,
    CONVERSATIONS,
    NO_TOKEN,
    LATE_PAD,
    BOUNDARIES,
    DIVISIBLE,
    DROPPED,
    TRUNCATED,
) = range(13)
"""The stages of a row, in docs/SPEC.md#refusals's order."""

WHOLE, AFTER = -1, 1 << 30
"""In place of a turn's number: before the first turn, after the last."""

TURN_STEPS = {
    "bad_message": 1,
    "exact_role": 2,
    "bad_content": 3,
    "empty_assistant": 4,
    "role_order": 5,
    "unknown_role": 6,
    "prefix_too_long": 7,
    "turn_mismatch": 8,
}
"""The order of R-TURN-1 to R-TURN-3 within one turn."""

_ROW_STAGES = {
    "unsupported_format": UNSUPPORTED,
    "too_many_boundaries": BOUNDARIES,
    "indivisible_segment": DIVISIBLE,
    "dropped": DROPPED,
    "truncated": TRUNCATED,
}


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A conversation that was tokenized, or refused while it was."""

    number: int
    conversation: list[prompts.Message]
    start: int
    """Tokens of the row before it, padding included."""
    tokens: list[int] | None
    """Its own tokens; None where it could not be rendered or encoded."""
    refused: bool


class Facts:
    """A row under one semantics: its outcome by the reference, and the conversations that were reached."""

    def __init__(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> None:
        self.messages = messages
        self.hf = as_transformers(tokenizer)
        self.settings = settings
        self.own = row_settings(settings)
        self.prompt = self.own.prompt
        self.semantics = self.own.semantics
        self.tokenizer = adapt(self.hf)

    @functools.cached_property
    def outcome(self) -> Row:
        """Reference's row or refusal."""
        return SUBJECT.build_row(self.messages, self.hf, self.settings)

    @functools.cached_property
    def is_padding(self) -> list[bool]:
        """[P + 1]: where the builder put padding; only for a row that is not refused."""
        return SUBJECT.build(self.messages, self.hf, self.settings).is_padding

    @functools.cached_property
    def masked(self) -> bool:
        """Return whether the format is masked under these semantics."""
        return prompts.is_masked(self.prompt, self.semantics)

    @functools.cached_property
    def reached(self) -> list[Reached]:
        """Conversations in order, up to the one that fills the row or is refused (R-LAYOUT-1 to R-LAYOUT-5)."""
        try:
            conversations = prompts.split_conversations(self.messages)
        except RowRefused:
            return []
        found: list[Reached] = []
        length, pack_length = 0, self.settings.pack_length
        granularity = 2 * self.settings.context_parallel_size if self.settings.context_parallel_size > 1 else 1
        for number, conversation in enumerate(conversations):
            full = self.semantics.exact_fill == "stop" and length == pack_length
            crowded = self.semantics.boundaries_beyond_pack_length == "stop" and len(found) == pack_length
            if full or crowded:
                break
            tokens, refused = self._tokens(conversation)
            found.append(
                Reached(number=number, conversation=conversation, start=length, tokens=tokens, refused=refused)
            )
            if refused:
                break
            length += len(tokens or [])
            length += -length % granularity
            if length > pack_length:
                break
        return found

    def _tokens(self, conversation: list[prompts.Message]) -> tuple[list[int] | None, bool]:
        try:
            tokens = prompts.encode(prompts.render(conversation, self.prompt, self.tokenizer), self.tokenizer)
        except RowRefused:
            return None, True
        try:
            prompts.tokenize_conversation(conversation, self.prompt, self.tokenizer, self.semantics)
        except RowRefused:
            return tokens, True
        return tokens, False

    def turn_tokens(self, message: prompts.Message) -> list[int]:
        """Return a turn's tokens when the turn is rendered and encoded alone."""
        return prompts.encode(prompts.render([message], self.prompt, self.tokenizer), self.tokenizer)


def stage_of(refusal: Refusal, messages: Messages, settings: RowSettings) -> Stage:
    """Return the place of a reference refusal in the order of checks."""
    kind, conversation, turn = refusal.kind, refusal.conversation, refusal.turn
    if kind in _ROW_STAGES:
        return (_ROW_STAGES[kind],)
    if kind in ("row_start", "row_end"):
        return (ENDS, int(kind == "row_end"))
    if conversation is not None:
        if turn is not None:
            exact = kind == "unknown_role" and row_settings(settings).semantics.turn_rules == "every_format"
            return (CONVERSATIONS, conversation, turn, TURN_STEPS["exact_role" if exact else kind])
        if kind in ("turn_mismatch", "empty_conversation"):
            return (CONVERSATIONS, conversation, AFTER, int(kind == "empty_conversation"))
        return (CONVERSATIONS, conversation, WHOLE, 0)
    semantics = row_settings(settings).semantics
    if kind == "no_pad_token":
        return ({"refuse": EARLY_PAD, "unk_early": PAD, "unk": LATE_PAD}[semantics.unknown_pad_token],)
    if kind == "empty_row":
        return (NO_TOKEN if messages else NO_MESSAGE,)
    if semantics.row_ends == "system_to_assistant":
        for place, message in enumerate((messages[0], messages[-1])):
            if not is_message(message):
                return (ENDS, place)
    return (SPLIT,)


def is_message(message: object) -> bool:
    """Return whether R-SPLIT-2 accepts a message."""
    return isinstance(message, Mapping) and "role" in message
