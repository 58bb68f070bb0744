"""Find where each conversation lies in the rows of one call, from the tokens; boundaries only settle what is ambiguous.

The search is greedy and takes every token once. Tokens that belong to no conversation and are no padding are foreign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from packproof.rows import ReadRow


@dataclass(frozen=True)
class Span:
    """One run of a conversation's tokens in a row."""

    conversation: int
    offset: int
    """First of its tokens that lies here; 0 unless the conversation was split."""
    start: int
    """Position in the row."""
    length: int

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.length


@dataclass(frozen=True)
class PlacedRow:
    """A row with the conversations in it."""

    row: ReadRow
    spans: list[Span]
    """In the order of the row."""
    padding: list[bool]
    """[L] positions that hold the pad id and belong to no conversation."""
    foreign: int | None
    """First position whose token is neither a conversation's next token nor padding."""


@dataclass
class _Piece:
    conversation: int
    offset: int
    tokens: list[int]
    """Those that are still to be placed."""


def expected_tokens(tokens: Sequence[int], last_token: str) -> list[int]:
    """Return the tokens of a conversation that are inputs, by the convention `last_token`."""
    return list(tokens[:-1] if last_token == "dropped" else tokens)


def place(
    rows: Sequence[ReadRow],
    conversations: Sequence[Mapping[str, Sequence[Any]]],
    conventions: Mapping[str, str],
    pad_id: int,
) -> list[PlacedRow]:
    """Place the conversations of one call in its rows. Conventions `last_token` and `overlong` decide what a conversation may be."""
    pieces = [
        _Piece(number, 0, expected_tokens(each["tokens"], conventions["last_token"]))
        for number, each in enumerate(conversations)
    ]
    pieces = [piece for piece in pieces if piece.tokens]
    return [_place_row(row, pieces, conventions["overlong"], pad_id) for row in rows]


def _place_row(row: ReadRow, pieces: list[_Piece], overlong: str, pad_id: int) -> PlacedRow:
    tokens, starts = row.tokens, set(row.boundaries or [])
    spans: list[Span] = []
    padding = [False] * len(tokens)
    foreign: int | None = None
    at = 0
    while at < len(tokens):
        piece, length = _best(tokens, at, pieces, starts, overlong, pad_id)
        if piece is None:
            if tokens[at] == pad_id:
                padding[at] = True
            elif foreign is None:
                foreign = at
            at += 1
            continue
        spans.append(Span(piece.conversation, piece.offset, at, length))
        if length < len(piece.tokens) and overlong == "split":
            piece.offset, piece.tokens = piece.offset + length, piece.tokens[length:]
        else:
            pieces.remove(piece)
        at += length
    return PlacedRow(row, spans, padding, foreign)


def _best(
    tokens: Sequence[int], at: int, pieces: Sequence[_Piece], starts: set[int], overlong: str, pad_id: int
) -> tuple[_Piece | None, int]:
    """Return the piece that lies at a position and how many of its tokens do; (None, 0) where there is none."""
    # A pad id inside a segment is padding, unless a whole conversation lies there that no padding can be.
    is_padding = tokens[at] == pad_id and bool(starts) and at not in starts
    best: tuple[_Piece | None, int] = (None, 0)
    rank: tuple[bool, bool, int] = (False, False, 0)
    for order, piece in enumerate(pieces):
        if piece.tokens[0] != tokens[at]:
            continue
        length = len(piece.tokens)
        whole = list(tokens[at : at + length]) == piece.tokens
        if is_padding and not (whole and any(token != pad_id for token in piece.tokens)):
            continue
        if not whole:
            length = _common(tokens, at, piece.tokens)
            ends = at + length == len(tokens) or at + length in starts
            if overlong not in ("cut", "split") or not ends:
                continue
        found = (whole, at + length in starts or at + length == len(tokens), -order)
        if best[0] is None or found > rank:
            best, rank = (piece, length), found
    return best


def _common(tokens: Sequence[int], at: int, piece: Sequence[int]) -> int:
    """Count how many of the piece's first tokens lie at a position."""
    count = 0
    while count < len(piece) and at + count < len(tokens) and tokens[at + count] == piece[count]:
        count += 1
    return count
