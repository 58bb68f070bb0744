"""Build one packed row from its messages, as Megatron-LM does, in array operations over whole rows.

Conversations are tokenized ahead of need in bounded runs, so that conversations which a full row never reaches are
neither paid for nor refused.

Prompts are masked before this module, in `production/tokens/conversations.py`. `RowBuilder._finish` masks the labels at
boundaries and in padding, and sets `cu_seqlens`.

Reference: `reference/rows.py`, R-LAYOUT-1 to 7, docs/SPEC.md#row and #report.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from production.errors import PackproofError, RowRefused
from production.refusals import refusal
from production.rows.row_layout import Laid, count_losses, joined, own_places, positions
from production.semantics import Semantics, nearest
from production.tokens.conversations import ConversationTokenizer, Tokenized
from production.tokens.encoder import Ids
from production.tokens.prompts import (
    FORMATS,
    RowMessages,
    check_row_ends,
    count_unrendered,
    format_of,
    split_conversations,
)
from production.tokens.turn_tokens import IGNORE_INDEX

GROUP_TOKENS = 32_768
"""Tokens below which rows are built together in build_many: the fixed cost of a row is a tenth of a row of 4096."""
AHEAD = 1.5
"""Factor by which more text is tokenized at once than probably fills the row: most rows fit, and one call is better
than two.
"""


LONGEST = 1 << 31
"""Tokens that int32 boundaries cannot count."""


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings of a row. Raises PackproofError where no row could be built (docs/SPEC.md#refusals)."""

    pack_length: int
    """P: tokens a row has in the model."""
    prompt_format: str = "nemotron-nano-v2"
    """One of prompts.FORMATS."""
    context_parallel_size: int = 1
    """cp: segments are padded to multiples of 2·cp where it exceeds 1."""
    semantics: Semantics = dataclasses.field(default_factory=Semantics)
    """Choice of behaviour where published paths differ."""
    pad_token: str | None = None
    """Override of the format's pad token."""
    assistant_prefix_len: int | None = None
    """Override of the format's assistant prefix, in tokens."""

    def __post_init__(self) -> None:
        """Refuse settings that no row could satisfy."""
        if self.prompt_format not in FORMATS:
            raise PackproofError(
                what=f"must be a prompt format, got {self.prompt_format!r}; the nearest is {nearest(self.prompt_format, FORMATS)!r}",
                where="prompt_format",
                fix=f"choose one of {', '.join(FORMATS)}",
            )
        if self.pack_length < 1:
            raise PackproofError(
                what=f"must be at least 1, got {self.pack_length}", where="pack_length", fix="give at least 1"
            )
        if self.context_parallel_size < 1:
            raise PackproofError(
                what=f"must be at least 1, got {self.context_parallel_size}",
                where="context_parallel_size",
                fix="give at least 1",
            )
        if max(self.pack_length, 2 * self.context_parallel_size) >= LONGEST:
            raise PackproofError(
                what=f"P and 2·cp must be below {LONGEST}, got P {self.pack_length} and cp {self.context_parallel_size}",
                where="pack_length, context_parallel_size",
                fix="give smaller numbers: boundaries are int32",
            )
        try:
            (self.pad_token or "").encode()
        except UnicodeEncodeError as error:
            what = f"{self.pad_token!r} cannot be encoded ({error.reason})"
            raise PackproofError(what=what, where="pad_token", fix="name a token of the tokenizer") from None
        prefix = self.assistant_prefix_len or 0
        if prefix < 0 or (prefix and self.prompt_format == "identity"):
            why = "identity renders no prefix" if prefix > 0 else "a prefix has no negative length"
            raise PackproofError(
                what=f"{prefix} tokens: {why}", where="assistant_prefix_len", fix="give 0 or leave it out"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """Holds a packed row (docs/SPEC.md#tensors) and the report of its losses (docs/SPEC.md#report)."""

    input_ids: torch.Tensor
    """[P] int64."""
    target_ids: torch.Tensor
    """[P] int64, already shifted; -100 where nothing is trained."""
    token_mask: torch.Tensor
    """[P] float32: 1 where the target counts in the loss."""
    position_ids: torch.Tensor
    """[P] int64, restarting at 0 with each conversation."""
    cu_seqlens: torch.Tensor
    """[K] int32, from 0 to its first P."""
    max_seqlen: int
    """The longest segment, padding included."""
    context_parallel_size: int
    """The cp whose granularity its segments are padded to."""
    report: dict[str, int | None]
    """The counts of docs/SPEC.md#report."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltRow:
    """Holds a row beside what it was made of."""

    row: Row
    """The row."""
    messages: RowMessages
    """Its messages, split into conversations."""
    laid: Laid
    """The conversations that were begun, before padding and truncation."""


class RowBuilder:
    """Builds rows with one tokenizer for one choice of settings. The tokenizer must not be changed meanwhile."""

    def __init__(self, *, tokenizer: Any, settings: RowSettings, reuse_equal_turns: bool = True) -> None:
        self._settings = settings
        self._semantics = settings.semantics
        self._format = format_of(settings.prompt_format, settings.semantics)
        pad = find_pad(tokenizer, settings)
        self._pad, self._knows_pad = pad.id, pad.is_known
        prefix = settings.assistant_prefix_len
        self._conversations = ConversationTokenizer(
            tokenizer=tokenizer,
            prompt_format=self._format,
            semantics=settings.semantics,
            assistant_prefix_len=self._format.assistant_prefix_len if prefix is None else prefix,
            reuse_equal_turns=reuse_equal_turns,
        )
        self._characters_per_token = 2.0
        """Characters per token of the rows so far, which decides how much text is tokenized ahead and never changes a
        row.
        """

    def build(self, messages: Sequence[Any]) -> Row:
        """Return the row of these messages. Raises RowRefused with the kind that docs/SPEC.md#refusals names."""
        (row,) = self.build_group([messages])
        if isinstance(row, RowRefused):
            raise row
        return row

    def build_many(self, rows: Iterable[Sequence[Any]], *, workers: int = 1) -> Iterator[Row | RowRefused]:
        """Yield the rows in order, a refused row as its refusal; short rows are built some at a time, which takes a
        fifth less.

        Each of `workers` threads builds ahead while the caller works. The tokenizer releases the interpreter while it
        encodes, so that with two threads some rows are rendered and laid out while others are encoded. With 0 all
        work is done in the caller's thread.
        """
        groups = itertools.batched(rows, max(1, GROUP_TOKENS // self._settings.pack_length))
        if not workers:
            yield from itertools.chain.from_iterable(map(self.build_group, groups))
            return
        waiting: deque[Future[list[Row | RowRefused]]] = deque()
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="packproof-rows") as ahead:
            for group in groups:
                waiting.append(ahead.submit(self.build_group, group))
                if len(waiting) > workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()

    def build_group(self, rows: Sequence[Sequence[Any]]) -> list[Row | RowRefused]:
        """Return these rows, each or its refusal, with conversations encoded in one batch as far as they probably
        fill the rows.
        """
        return [row.row if isinstance(row, BuiltRow) else row for row in self.build_whole_group(rows)]

    def build_whole_group(self, rows: Sequence[Sequence[Any]]) -> list[BuiltRow | RowRefused]:
        """Return these rows as `build_group` does, each beside its conversations, for those who count them."""
        opened = [_or_refusal(self._open, messages) for messages in rows]
        good = [row for row in opened if isinstance(row, RowMessages)]
        first = self._conversations.tokenize_all(
            good,
            first=0,
            lasts=[self._most(row) for row in good],
            characters=self._characters_ahead(self._settings.pack_length + 1),
        )
        tokenized = iter(first)
        return [
            row if isinstance(row, RowRefused) else _or_refusal(self._close, row, next(tokenized)) for row in opened
        ]

    def _open(self, messages: Sequence[Any]) -> RowMessages:
        """Split the row into conversations, after all checks that come before tokenization."""
        semantics = self._semantics
        if self._format.render is None and semantics.default_format == "refuse":
            raise refusal(
                "unsupported_format", f"the prompt format {self._format.name} is refused by default_format=refuse"
            )
        if not self._knows_pad and semantics.unknown_pad_token == "refuse":
            raise refusal("no_pad_token", "the vocabulary lacks the pad token")
        if not len(messages):
            raise refusal("empty_row", "the row has no message")
        if semantics.row_ends == "system_to_assistant":
            check_row_ends(messages)
        if self._pad is None and semantics.unknown_pad_token == "unk_early":
            raise refusal("no_pad_token", "the tokenizer has neither the pad token nor an unknown token")
        return split_conversations(messages)

    def _close(self, row: RowMessages, first: Tokenized) -> BuiltRow:
        laid = self._lay_out(row, first)
        return BuiltRow(row=self._finish(laid, row), messages=row, laid=laid)

    def _most(self, row: RowMessages) -> int:
        """Return how many conversations may be begun (R-LAYOUT-5)."""
        stops = self._semantics.boundaries_beyond_pack_length == "stop"
        return min(row.count, self._settings.pack_length) if stops else row.count

    def _characters_ahead(self, tokens: int) -> int:
        return int(tokens * self._characters_per_token * AHEAD) + 512

    @property
    def pad_token_id(self) -> int | None:
        """Return the id of padding and of its targets (R-PAD-1); None where the tokenizer has no pad token."""
        return self._pad

    def _lay_out(self, row: RowMessages, found: Tokenized) -> Laid:
        """Lay out conversation after conversation until the row is full (R-LAYOUT-1 to 5); the first are tokenized
        already.
        """
        length, granularity = self._settings.pack_length, self._granularity()
        full = length if self._semantics.exact_fill == "stop" else length + 1
        most = self._most(row)
        parts: list[Laid] = []
        begun = end = 0
        while True:
            if len(found.tokens) > 64:
                self._characters_per_token = found.characters / len(found.tokens)
            ends = end + (-(-found.lengths // granularity) * granularity).cumsum()
            part = Laid(tokens=found.tokens, targets=found.targets, lengths=found.lengths, ends=ends)
            reached = len(ends)
            if reached and ends[-1] >= full:  # the one that fills the row is begun, those after it are not
                reached = int(np.searchsorted(ends, full)) + 1
                part = part.first(reached)
            parts.append(part)
            begun += reached
            end = int(part.ends[-1]) if reached else end
            if begun >= most or end >= full:
                return parts[0] if len(parts) == 1 else joined(parts)
            if found.refused is not None:
                raise found.refused
            characters = self._characters_ahead(length + 1 - end)
            found = self._conversations.tokenize(row, first=begun, last=most, characters=characters)

    def _granularity(self) -> int:
        cp = self._settings.context_parallel_size
        return 2 * cp if cp > 1 else 1

    def _finish(self, laid: Laid, row: RowMessages) -> Row:
        """Finish the row: padding, checks of the whole row, shift, mask, boundaries and report."""
        length, semantics = self._settings.pack_length, self._semantics
        if not len(laid.tokens):
            raise refusal("empty_row", "no conversation of the row has a token")
        if self._pad is None:
            raise refusal("no_pad_token", "the tokenizer has neither the pad token nor an unknown token")
        boundaries = np.concatenate([[0], laid.ends])
        starts = boundaries[:-1].copy()
        boundaries[-1] = length
        losses, kept = count_losses(laid.lengths, np.minimum(length - starts, laid.lengths), row.count)
        self._check_whole(boundaries, losses)
        tokens = np.full(length + 1, self._pad, dtype=np.int64)
        targets = np.full(length + 1, self._pad, dtype=np.int64)
        own = own_places(starts, laid.lengths, kept)
        tokens[own], targets[own] = laid.tokens[:kept], laid.targets[:kept]
        cu_seqlens = boundaries[: int(np.searchsorted(boundaries, length)) + 1]
        inner = cu_seqlens[1:-1]
        inner = inner[inner > 0]
        target_ids = targets[1:]
        if semantics.boundary_label == "ignore":
            target_ids[inner - 1] = IGNORE_INDEX
        is_trained = target_ids != IGNORE_INDEX
        if semantics.padding_mask == "by_value":
            is_trained &= target_ids != self._pad
        else:
            is_own = np.zeros(length + 1, dtype=np.bool_)
            is_own[own] = True
            is_trained &= is_own[1:]
        unrendered, unknown_keys = count_unrendered(row, self._format)
        return Row(
            input_ids=torch.from_numpy(tokens[:-1]),
            target_ids=torch.from_numpy(target_ids),
            token_mask=torch.from_numpy(is_trained.astype(np.float32)),
            position_ids=torch.from_numpy(positions(starts, laid.ends, length)),
            cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
            max_seqlen=int((cu_seqlens[1:] - cu_seqlens[:-1]).max()),
            context_parallel_size=self._settings.context_parallel_size,
            report=losses
            | {
                "hidden_segments": len(boundaries) - len(cu_seqlens),
                "padding_tokens": length - kept,
                "trained_tokens": int(np.count_nonzero(is_trained)),
                "boundary_labels": len(set(inner[is_trained[inner - 1]].tolist())),
                "unrendered_messages": unrendered,
                "unknown_keys": unknown_keys,
            },
        )

    def _check_whole(self, boundaries: Ids, losses: dict[str, int | None]) -> None:
        """Apply R-LAYOUT-7, after the pad id."""
        semantics, length = self._semantics, self._settings.pack_length
        if semantics.boundaries_beyond_pack_length == "refuse" and len(boundaries) > length + 1:
            raise refusal("too_many_boundaries", f"a row of {length} tokens cannot hold {len(boundaries)} boundaries")
        if semantics.indivisible_segment == "refuse" and self._settings.context_parallel_size > 1:
            odd = np.flatnonzero(np.diff(boundaries) % self._granularity())
            if len(odd):
                first = int(odd[0])
                what = (
                    f"a segment of {boundaries[first + 1] - boundaries[first]} tokens at 2·cp = {self._granularity()}"
                )
                raise refusal("indivisible_segment", what, conversation=first)
        if semantics.lost_conversations == "refuse":
            for kind in ("dropped", "truncated"):
                if losses[kind]:
                    raise refusal(kind, f"{losses[kind]} of {losses['conversations']} conversations {kind}")


@dataclass(frozen=True, kw_only=True)
class Pad:
    """Names the token that padding gets (R-PAD-1)."""

    token: str | None
    """Text of the token; None where the tokenizer has no pad token."""
    id: int | None
    """Id of the token, the unknown token's where the vocabulary lacks it; None without a token."""
    is_known: bool
    """Whether the vocabulary has the token itself."""


def find_pad(tokenizer: Any, settings: RowSettings) -> Pad:
    """Return the pad token of rows with these settings (R-PAD-1)."""
    token = FORMATS[settings.prompt_format].pad_token if settings.pad_token is None else settings.pad_token
    if token is None:
        token = tokenizer.eos_token if tokenizer.pad_token is None else tokenizer.pad_token
    if token is None:
        return Pad(token=None, id=None, is_known=False)
    pad: int | None = tokenizer.convert_tokens_to_ids(token)
    unknown = tokenizer.unk_token_id
    # The whole vocabulary is only asked for where the id alone does not tell.
    is_known = pad is not None and (pad != unknown or token == tokenizer.unk_token or token in tokenizer.get_vocab())
    return Pad(token=token, id=pad, is_known=is_known)


def _or_refusal[**Arguments, Value](
    step: Callable[Arguments, Value], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Value | RowRefused:
    try:
        return step(*arguments, **options)
    except RowRefused as error:
        return error
