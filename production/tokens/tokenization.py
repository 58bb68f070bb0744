"""Plan which texts of a conversation are encoded, so that no text is encoded twice where once suffices (R-ENCODE-1,
R-TURN-1).

A masked format needs the tokens of the whole and of each turn. Where `text_splits` proves that turns cut the text,
the turns alone give both; otherwise both are encoded, as Megatron-LM does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from production.errors import RowRefused
from production.tokens.chat_template import ChatTemplate
from production.tokens.prompts import Conversation, PromptFormat, RowMessages, render_messages
from production.tokens.text_splits import HardBoundaries

_HEADER = "<SPECIAL_11>Assistant\n"


@dataclass(kw_only=True)
class Plan:
    """Holds the texts to encode, and how conversations and turns are assembled from them."""

    first: int
    """The place of the first conversation in the row."""
    texts: list[str] = field(default_factory=list)
    """Texts to encode."""
    first_texts: list[int] = field(default_factory=list)
    """[C]: the first text of each conversation."""
    whole: list[int] = field(default_factory=list)
    """Texts that make up the conversations, one after the other. Not used where these are all texts, as they lie."""
    whole_counts: list[int] = field(default_factory=list)
    """[C]: number of those texts in each conversation."""
    turns: list[int] = field(default_factory=list)
    """Texts that make up the turns alone. Not used where these are all texts, one a turn."""
    turn_counts: list[int] = field(default_factory=list)
    """[turns]: number of those texts in each turn."""

    characters: int = 0
    """Characters of the rendered conversations."""
    refused: RowRefused | None = None
    """Refusal of the next conversation, which could not be rendered."""

    @property
    def last(self) -> int:
        """Return the place behind the last conversation."""
        return self.first + len(self.first_texts)

    def add(self, text: str) -> int:
        """Add a text to encode; return its place among the texts."""
        self.texts.append(text)
        return len(self.texts) - 1


class Planner:
    """Plans conversations of one prompt format for one tokenizer."""

    def __init__(
        self, *, tokenizer: Any, prompt_format: PromptFormat, is_masked: bool, boundaries: HardBoundaries
    ) -> None:
        self._format = prompt_format
        self._template = ChatTemplate(tokenizer) if prompt_format.render is None else None
        self._ends_lines = boundaries.ends_lines
        self._plan_into = self._choose(is_masked, boundaries)
        self.is_built_up = self._plan_into in (self._plan_whole_and_turns, self._plan_h_aligned)
        """Whether conversations and turns are each assembled from texts; if not, texts are the one or the other as
        they lie.
        """

    def plan(self, row: RowMessages, *, first: int, last: int, characters: int) -> Plan:
        """Plan conversation `first` and those after it, before `last`, until they render to `characters`, or one is
        refused.
        """
        plan = Plan(first=first)
        for number in range(first, last):
            if plan.characters >= characters:
                break
            begin = len(plan.texts)
            try:
                plan.characters += self._plan_into(plan, row.conversation(number), number)
            except RowRefused as error:
                plan.refused = error
                break
            plan.first_texts.append(begin)
        return plan

    def _choose(self, is_masked: bool, boundaries: HardBoundaries) -> Callable[[Plan, Conversation, int], int]:  # noqa: FBT001
        if self._format.render is None:
            return self._plan_template
        if not is_masked:
            return self._plan_whole
        starts = self._format.turn_starts
        if not starts or not all(map(boundaries.holds, starts)):
            return self._plan_whole_and_turns
        return self._plan_h_aligned if self._format.name == "nemotron-h-aligned" else self._plan_turns

    def _plan_template(self, plan: Plan, conversation: Conversation, number: int) -> int:
        """Plan the conversation's texts; return their characters, as the following methods do."""
        assert self._template is not None
        text = self._template.render(conversation, number)
        plan.add(text)
        plan.whole_counts.append(1)
        return len(text)

    def _plan_whole(self, plan: Plan, conversation: Conversation, number: int) -> int:
        text = "".join(render_messages(conversation, self._format, number))
        plan.add(text)
        plan.whole_counts.append(1)
        return len(text)

    def _plan_turns(self, plan: Plan, conversation: Conversation, number: int) -> int:
        """Plan turns alone: each turn is empty or starts with a hard boundary, so that the conversation's tokens are
        those of its turns.
        """
        texts = render_messages(conversation, self._format, number)
        plan.texts += texts
        plan.whole_counts.append(len(texts))
        return sum(map(len, texts))

    def _plan_whole_and_turns(self, plan: Plan, conversation: Conversation, number: int) -> int:
        """Plan the whole and each turn, as Megatron-LM does, where nothing is proven."""
        texts = render_messages(conversation, self._format, number)
        plan.whole.append(plan.add("".join(texts)))
        plan.whole_counts.append(1)
        plan.turns += map(plan.add, texts)
        plan.turn_counts += [1] * len(texts)
        return sum(map(len, texts))

    def _plan_h_aligned(self, plan: Plan, conversation: Conversation, number: int) -> int:
        """Cut before each system and user turn and before the header at a user turn's end; an answer may merge with that header.

        So an answer is encoded twice, behind its header and alone, and everything else once. Where the pre-tokenizer provably ends
        the header's line (`HardBoundaries.ends_lines`), an answer behind its header is encoded once, too.
        """
        pieces: list[int] = []
        texts = render_messages(conversation, self._format, number)
        for message, text in zip(conversation, texts, strict=True):
            role = message["role"]
            if role == "assistant":
                plan.turns.append(plan.add(text))
                if self._ends_lines and pieces and plan.texts[pieces[-1]] == _HEADER and _is_visible(text[0]):
                    pieces.append(plan.turns[-1])
                elif pieces:
                    pieces[-1] = plan.add(plan.texts[pieces[-1]] + text)
                else:
                    pieces.append(plan.turns[-1])
                plan.turn_counts.append(1)
                continue
            cuts = [text[: -len(_HEADER)], _HEADER] if role == "user" else [text]
            added = list(map(plan.add, cuts))
            plan.turns += added
            plan.turn_counts.append(len(added))
            if text or not pieces:
                pieces += added
        plan.whole += pieces
        plan.whole_counts.append(len(pieces))
        return sum(map(len, texts))


def _is_visible(character: str) -> bool:
    """Return whether a character is surely no white space to any library; a few that are none are not seen to be."""
    return "!" <= character <= "~" or character.isalnum()
