"""Place the tokens of conversations in a row, and count the tokens that the row loses (docs/SPEC.md#row, R-REPORT-1).

`builder` makes the boundaries (`cu_seqlens`) of these ends, and cuts them at the first P.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from production.tokens.encoder import Ids


@dataclass(frozen=True, kw_only=True, eq=False)
class Laid:
    """Holds the conversations of a row that were begun, before padding."""

    tokens: Ids
    """[T] int64: the conversations' tokens, end to end."""
    targets: Ids
    """[T] int64: the same with -100 where nothing is trained, not shifted yet."""
    lengths: Ids
    """[C]: tokens of each."""
    ends: Ids
    """[C]: length of the row after each, cp padding included."""

    def first(self, count: int) -> Laid:
        """Return the first `count` conversations."""
        own = int(self.lengths[:count].sum())
        return Laid(
            tokens=self.tokens[:own], targets=self.targets[:own], lengths=self.lengths[:count], ends=self.ends[:count]
        )


def joined(parts: list[Laid]) -> Laid:
    """Join conversations one after the other."""
    return Laid(
        tokens=np.concatenate([part.tokens for part in parts]),
        targets=np.concatenate([part.targets for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        ends=np.concatenate([part.ends for part in parts]),
    )


def own_places(starts: Ids, lengths: Ids, kept: int) -> Ids | slice:
    """Return the places of the conversations' kept tokens in the row: as they are, where no padding lies between."""
    shift = starts - lengths.cumsum() + lengths
    return shift.repeat(lengths)[:kept] + np.arange(kept) if shift.any() else slice(0, kept)


def positions(starts: Ids, ends: Ids, length: int) -> Ids:
    """Return positions, which restart at each conversation that has a token and count on through all padding after
    it.
    """
    restarts = starts[(ends > starts) & (starts < length)]
    ends = np.append(restarts[1:], length)
    positions: Ids = np.arange(length) - restarts.repeat(ends - restarts)
    return positions


def count_losses(lengths: Ids, room: Ids, conversations: int) -> tuple[dict[str, int | None], int]:
    """Count losses by R-REPORT-1, and the tokens of conversations that are in the row; `room` [C] is at most a
    conversation's length.
    """
    in_row = np.maximum(room, 0)
    total, kept = int(lengths.sum()), int(in_row.sum())
    whole, truncated = len(lengths), 0
    if kept < total:
        whole = int(np.count_nonzero(in_row == lengths))
        truncated = int(np.count_nonzero((in_row > 0) & (in_row < lengths)))
    return {
        "conversations": conversations,
        "kept": whole,
        "truncated": truncated,
        "dropped": conversations - whole - truncated,
        "empty_conversations": len(lengths) - int(np.count_nonzero(lengths)),
        "truncated_tokens": total - kept,
    }, kept
