"""Measure the conversations of a group of built rows in array operations over all of them, which a row alone is too short for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from production.rows.builder import BuiltRow
from production.tokens.turn_tokens import IGNORE_INDEX
from tools.inspect_rows.part import SIZES

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupFacts:
    """Facts of R built rows of one pack length, which have C conversations that were begun."""

    pack_length: int
    """P."""
    bounds: Ints
    """[R + 1]: where each row's conversations begin in the arrays of conversations."""
    row: Ints
    """[C]: index of the row within the group."""
    lengths: Ints
    """[C]: tokens of each conversation."""
    in_row: Ints
    """[C]: tokens of each that the row holds."""
    trained: Ints
    """[C]: labels that count and are tokens of the conversation."""
    content: Ints
    """[R]: conversation tokens in the row."""
    tokens: Ints
    """[R]: conversation tokens, those that the row loses included."""
    pads: Ints
    """[R]: conversation tokens that are the pad id."""
    pad_labels: Ints
    """[R]: those of them that are targets."""
    outside: Ints
    """[R]: conversation tokens with an id outside the vocabulary."""
    is_exactly_full: Flags
    """[R]: the last conversation ends where the row does."""
    meets_the_end: Flags
    """[R]: some conversation ends where the row does."""
    has_empty: Flags
    """[R]: some conversation has no token."""
    has_idle: Flags
    """[R]: some conversation has tokens in the row and trains none."""
    has_cut: Flags
    """[R]: some conversation has tokens that the row does not hold."""
    trains_a_first_token: Flags
    """[R]: a conversation behind another has a first token that is a target."""

    @classmethod
    def of(cls, rows: Sequence[BuiltRow], *, pack_length: int, pad_id: int | None, vocab_size: int) -> Self:
        """Return the facts of these rows, of which each has a token; there is at least one row."""
        counts = np.array([len(row.laid.lengths) for row in rows], dtype=np.int64)
        bounds = np.concatenate([[0], counts.cumsum()])
        first = bounds[:-1]
        row = np.arange(len(rows)).repeat(counts)
        lengths = np.concatenate([each.laid.lengths for each in rows])
        ends = np.concatenate([each.laid.ends for each in rows])
        starts = np.empty_like(ends)
        starts[1:] = ends[:-1]
        starts[first] = 0
        in_row = np.clip(pack_length - starts, 0, lengths)
        trained = _trained_of_each([each.row.token_mask.numpy() for each in rows], starts, in_row, row)
        tokens = np.concatenate([each.laid.tokens for each in rows])
        targets = np.concatenate([each.laid.targets for each in rows])
        at = lengths.cumsum() - lengths  # in `tokens`
        begins = at[first]
        behind = (at > begins[row]) & (lengths > 0)
        is_first_trained = np.zeros(len(lengths), dtype=np.bool_)
        is_first_trained[behind] = targets[at[behind]] != IGNORE_INDEX
        is_pad = tokens == pad_id
        return cls(
            pack_length=pack_length,
            bounds=bounds,
            row=row,
            lengths=lengths,
            in_row=in_row,
            trained=trained,
            content=np.add.reduceat(in_row, first),
            tokens=np.add.reduceat(lengths, first),
            pads=_count(is_pad, begins),
            pad_labels=_count(is_pad & (targets != IGNORE_INDEX), begins) if is_pad.any() else np.zeros_like(counts),
            outside=_count(tokens >= vocab_size, begins),
            is_exactly_full=ends[bounds[1:] - 1] == pack_length,
            meets_the_end=np.logical_or.reduceat(ends == pack_length, first),
            has_empty=np.logical_or.reduceat(lengths == 0, first),
            has_idle=np.logical_or.reduceat((trained == 0) & (in_row > 0), first),
            has_cut=np.logical_or.reduceat(in_row < lengths, first),
            trains_a_first_token=np.logical_or.reduceat(is_first_trained, first),
        )

    def conversations(self, row: int) -> slice:
        """Return where the conversations of row `row` stand in the arrays of conversations."""
        return slice(int(self.bounds[row]), int(self.bounds[row + 1]))

    def context_parallel(self, is_counted: Flags) -> Ints:
        """Return `Part.context_parallel` of the rows that are counted [R], laid out for each cp (R-LAYOUT-2, R-LAYOUT-3)."""
        first = self.bounds[:-1]
        multiples = 2 * np.array(SIZES)[:, None]
        padded = -(-self.lengths // multiples) * multiples
        starts = padded.cumsum(axis=1) - padded
        starts -= starts[:, first][:, self.row]
        lost = self.lengths - np.clip(self.pack_length - starts, 0, self.lengths)
        of_rows = [np.add.reduceat(values, first, axis=1)[:, is_counted] for values in ((padded != self.lengths).astype(np.int64), padded - self.lengths, lost)]  # fmt: skip
        indivisible, padding, lost = of_rows
        facts = np.stack([indivisible, indivisible > 0, padding, lost > 0, lost], axis=2)
        summed: Ints = facts.sum(axis=1)
        return summed


def _count(is_such: Flags, begins: Ints) -> Ints:
    """Return how many tokens of each row are such; a row has at least one token."""
    if not is_such.any():
        return np.zeros(len(begins), dtype=np.int64)
    counted: Ints = np.add.reduceat(is_such.astype(np.int64), begins)
    return counted


def _trained_of_each(masks: list[NDArray[np.float32]], starts: Ints, in_row: Ints, row: Ints) -> Ints:
    """Return the trained labels that are tokens of each conversation: label p is token p + 1 of the row (R-SHIFT-1)."""
    length = len(masks[0])
    sums = np.zeros(length * len(masks) + 1, dtype=np.int64)
    np.concatenate(masks).cumsum(dtype=np.int64, out=sums[1:])
    before = row * length
    first = np.clip(starts - 1, 0, length)
    last = np.maximum(np.clip(starts + in_row - 1, 0, length), first)
    trained: NDArray[Any] = np.where(in_row > 0, sums[before + last] - sums[before + first], 0)
    return trained
