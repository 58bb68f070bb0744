"""Turn conversations into tokens and targets, in array operations over all conversations that are tokenized at once.

Conversations are taken turn by turn (`turn_tokens`) only where something is odd, whether refused or not.

Reference: `reference/prompts.py`, R-ENCODE-1, docs/SPEC.md#targets-and-turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from production.errors import RowRefused
from production.refusals import refusal
from production.semantics import Semantics
from production.tokens.encoder import EncodedTexts, Ids, TextEncoder, UnencodableError
from production.tokens.prompts import PromptFormat, RowMessages
from production.tokens.tokenization import Plan, Planner
from production.tokens.turn_tokens import IGNORE_INDEX, TurnRules


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenized:
    """Holds conversations in the order given, up to the first that is refused or to the number of characters asked
    for.
    """

    tokens: Ids
    """[N]: of all conversations, one after the other."""
    targets: Ids
    """[N]: -100 where a token is not trained."""
    lengths: Ids
    """[C]: tokens of each conversation."""
    characters: int
    """Characters of the rendered conversations."""
    refused: RowRefused | None
    """Refusal of the conversation after these; None if that conversation was not read."""


class ConversationTokenizer:
    """Makes tokens and targets in one prompt format, under one choice of semantics."""

    def __init__(
        self,
        *,
        tokenizer: Any,
        prompt_format: PromptFormat,
        semantics: Semantics,
        assistant_prefix_len: int,
        reuse_equal_turns: bool = True,
    ) -> None:
        self._is_masked = prompt_format.is_masked(semantics)
        self._checks_roles = self._is_masked or semantics.turn_rules == "every_format"
        self._refuses_empty = semantics.empty_conversation == "refuse"
        self._refuses_long_prefix = semantics.long_assistant_prefix == "refuse"
        self._prefix = assistant_prefix_len
        self._rules = TurnRules(
            semantics=semantics, is_masked=self._is_masked, assistant_prefix_len=assistant_prefix_len
        )
        self._encoder = TextEncoder(tokenizer, reuse_equal=reuse_equal_turns)
        self._planner = Planner(
            tokenizer=tokenizer,
            prompt_format=prompt_format,
            is_masked=self._is_masked,
            boundaries=self._encoder.boundaries,
        )

    def tokenize(self, row: RowMessages, *, first: int, last: int, characters: int) -> Tokenized:
        """Tokenize conversation `first` and those after it, before `last`, until they render to `characters`.

        A refusal ends the conversations and is returned, not raised: the caller knows whether the refused
        conversation is needed.
        """
        return self.tokenize_all([row], first=first, lasts=[last], characters=characters)[0]

    def tokenize_all(
        self, rows: Sequence[RowMessages], *, first: int, lasts: Sequence[int], characters: int
    ) -> list[Tokenized]:
        """Tokenize the conversations of several rows, all encoded in one batch."""
        plans = [
            self._planner.plan(row, first=first, last=last, characters=characters)
            for row, last in zip(rows, lasts, strict=True)
        ]
        try:
            encoded = self._encoder.encode_all([plan.texts for plan in plans])
        except UnencodableError as error:
            if len(plans) == 1:
                return [self._before_bad_text(rows[0], plans[0], error)]
            return [
                self.tokenize(row, first=first, last=last, characters=characters)
                for row, last in zip(rows, lasts, strict=True)
            ]
        return [self._finish(*of_row) for of_row in zip(rows, plans, encoded, strict=True)]

    def _before_bad_text(self, row: RowMessages, plan: Plan, error: UnencodableError) -> Tokenized:
        bad = plan.first + int(np.searchsorted(plan.first_texts, error.index, side="right")) - 1
        reason = refusal("bad_text", f"the tokenizer refuses its text: {error}", conversation=bad)
        before = self.tokenize(row, first=plan.first, last=bad, characters=plan.characters)
        return before if before.refused else dataclasses.replace(before, refused=reason)

    def _finish(self, row: RowMessages, plan: Plan, encoded: EncodedTexts) -> Tokenized:
        if not plan.first_texts:
            return _nothing(plan.refused)
        whole = np.array(plan.whole, dtype=np.int64) if self._planner.is_built_up else None
        tokens = encoded.take(whole)
        result = Tokenized(
            tokens=tokens,
            targets=tokens,
            lengths=_sums(encoded.lengths if whole is None else encoded.lengths[whole], plan.whole_counts),
            characters=plan.characters,
            refused=plan.refused,
        )
        return self._with_targets(result, row, plan, encoded)

    def _with_targets(self, result: Tokenized, row: RowMessages, plan: Plan, encoded: EncodedTexts) -> Tokenized:
        """Return the result with its targets, cut at the first conversation whose turns are refused."""
        first, last = plan.first, plan.last
        if not self._checks_roles:
            return self._cut_at_empty(result, first)
        prompts = self._rules.find_prompts(row, first, last)
        if not self._is_masked:
            return self._walk(result, row, first, None, None) if prompts is None else self._cut_at_empty(result, first)
        turn_lengths, turn_tokens = encoded.lengths, result.tokens
        is_odd = prompts is None
        bounds = np.array(row.bounds[first : last + 1])
        counts = bounds[1:] - bounds[:-1]
        if self._planner.is_built_up:
            turns = np.array(plan.turns, dtype=np.int64)
            turn_lengths, turn_tokens = _sums(encoded.lengths[turns], plan.turn_counts), encoded.take(turns)
            is_odd = is_odd or not np.array_equal(_sums(turn_lengths, counts), result.lengths)
            is_odd = is_odd or not np.array_equal(turn_tokens, result.tokens)
        if prompts is not None and self._refuses_long_prefix:
            is_odd = is_odd or bool((turn_lengths[~prompts] < self._prefix).any())
        if is_odd or prompts is None:
            return self._walk(result, row, first, turn_tokens, turn_lengths)
        targets = self._mask_prompts(result, counts, turn_lengths, prompts)
        return self._cut_at_empty(dataclasses.replace(result, targets=targets), first)

    def _mask_prompts(self, result: Tokenized, counts: Ids, turn_lengths: Ids, prompts: NDArray[np.bool_]) -> Ids:
        """Apply R-TARGET-1 to conversations of `counts` turns in which nothing is odd."""
        is_ignored = prompts.repeat(turn_lengths)
        prefix = min(self._prefix, len(is_ignored))
        if prefix:
            starts = (turn_lengths.cumsum() - turn_lengths)[~prompts]
            prefixes = starts[:, None] + np.arange(prefix)
            if (turn_lengths[~prompts] < prefix).any():
                ends = result.lengths.cumsum().repeat(counts)
                prefixes = prefixes[prefixes < ends[~prompts, None]]
            is_ignored[prefixes] = True
        return np.where(is_ignored, IGNORE_INDEX, result.tokens)

    def _walk(
        self, result: Tokenized, row: RowMessages, first: int, turn_tokens: Ids | None, turn_lengths: Ids | None
    ) -> Tokenized:
        """Apply R-TARGET-1 where something is odd: conversation by conversation, turn by turn."""
        tokens = np.split(result.tokens, np.cumsum(result.lengths)[:-1])
        turns = None
        if turn_tokens is not None and turn_lengths is not None:
            turns = iter(np.split(turn_tokens, np.cumsum(turn_lengths)[:-1]))
        targets: list[Ids] = [result.tokens[:0]]
        for place, own in enumerate(tokens):
            conversation = row.conversation(first + place)
            alone = None if turns is None else [next(turns) for _ in conversation]
            try:
                targets.append(self._rules.targets(conversation, first + place, own, alone))
            except RowRefused as error:
                return _cut(dataclasses.replace(result, targets=np.concatenate(targets)), place, error)
        return dataclasses.replace(result, targets=np.concatenate(targets))

    def _cut_at_empty(self, result: Tokenized, first: int) -> Tokenized:
        if not self._refuses_empty or result.lengths.all():
            return result
        number = int(np.argmin(result.lengths))
        try:
            self._rules.check_empty(0, first + number)
        except RowRefused as error:
            return _cut(result, number, error)
        raise AssertionError


def _sums(values: Ids, counts: Sequence[int] | Ids) -> Ids:
    """Return the sums of runs of values; each run has at least one value."""
    if len(values) == len(counts):
        return values
    ends = np.cumsum(np.array(counts, dtype=np.int64), dtype=np.int64)
    sums: Ids = np.add.reduceat(values, ends - counts)
    return sums


def _nothing(refused: RowRefused | None) -> Tokenized:
    none = np.empty(0, dtype=np.int64)
    return Tokenized(tokens=none, targets=none, lengths=none, characters=0, refused=refused)


def _cut(result: Tokenized, count: int, refused: RowRefused) -> Tokenized:
    """Return the first `count` conversations, and the refusal after them."""
    length = int(result.lengths[:count].sum())
    return dataclasses.replace(
        result,
        tokens=result.tokens[:length],
        targets=result.targets[:length],
        lengths=result.lengths[:count],
        refused=refused,
    )
