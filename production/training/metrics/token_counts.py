"""Count tokens of rows on the host, and carry the counts through a float32 message without loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from production.rows.builder import Row
from production.training.metrics.flops import segment_squares

LIMB_BITS = 12
"""Bits of a whole number that one float32 carries, so that the sum over 4096 ranks is still exact."""
LIMBS = 5
"""Limbs of a whole number: below 2^60."""


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Counts of rows (docs/SPEC.md#report), which can be added."""

    rows: int = 0
    """Rows counted."""
    tokens: int = 0
    """Positions, padding included."""
    padding_tokens: int = 0
    """Positions that only fill up a segment or the row."""
    trained_tokens: int = 0
    """Positions whose label counts in the loss."""
    truncated_rows: int = 0
    """Rows that end within a conversation."""
    dropped_conversations: int = 0
    """Conversations that lost all their tokens, or were never tokenized."""
    masked_out_conversations: int = 0
    """Online conversations that were too long, and so were cut to a stub that counts nowhere (R-ONLINE-8)."""
    control_tokens: int = 0
    """Control tokens that stand in contents as text (SPEC R-TOLD-2)."""
    labels_masked_as_padding: int = 0
    """Labels of contents that do not count because they are the pad token's id (SPEC R-TOLD-2)."""
    prompt_messages_trained: int = 0
    """Messages of the system, users and tools in rows of a format that masks none of them (SPEC R-TOLD-2)."""
    square_sum: int = 0
    """Σ L² over segments without their padding, which is the cost of attention (`flops.segment_squares`)."""

    @classmethod
    def of_row(cls, row: Row) -> RowCounts:
        """Return the counts of one row."""
        report = {name: value or 0 for name, value in row.report.items()}
        return cls(
            rows=1,
            tokens=len(row.input_ids),
            padding_tokens=report["padding_tokens"],
            trained_tokens=report["trained_tokens"],
            truncated_rows=int(report["truncated"] > 0),
            dropped_conversations=report["dropped"],
            control_tokens=report.get("control_tokens", 0),
            labels_masked_as_padding=report.get("labels_masked_as_padding", 0),
            prompt_messages_trained=report.get("prompt_messages_trained", 0),
            square_sum=segment_squares(row.cu_seqlens, report["padding_tokens"]),
        )

    def __add__(self, other: RowCounts) -> RowCounts:
        """Return the sum of both counts."""
        return RowCounts(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def limbs(self) -> list[float]:
        """Return the counts as whole numbers of LIMB_BITS bits, the lowest first: up to 4096 such lists can be added
        in float32.
        """
        mask = (1 << LIMB_BITS) - 1
        return [float(getattr(self, name) >> LIMB_BITS * limb & mask) for name in _NAMES for limb in range(LIMBS)]

    @classmethod
    def of_limbs(cls, limbs: Sequence[float]) -> RowCounts:
        """Return the counts of summed limbs."""
        return cls(
            **{
                name: sum(int(limbs[at * LIMBS + limb]) << LIMB_BITS * limb for limb in range(LIMBS))
                for at, name in enumerate(_NAMES)
            }
        )


_NAMES = tuple(field.name for field in dataclasses.fields(RowCounts))
SENT = len(_NAMES) * LIMBS
"""Numbers in `RowCounts.limbs`."""
