"""Count values into fixed bins, so that counts of parts add up to the counts of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.inspect_rows.inspection import Histogram


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Names what is counted, and its bins."""

    name: str
    """What is counted."""
    unit: str
    """Unit of the values."""
    edges: tuple[float, ...]
    """[B + 1]: rising edges."""


def _lengths(most_power: int = 28) -> tuple[float, ...]:
    """Return edges 0, 1, 2, 3, 4, 6, 8, 12, …: two bins an octave."""
    edges = [0, 1, 2, 3]
    for power in range(2, most_power):
        edges += [1 << power, 3 << (power - 1)]
    return tuple(float(edge) for edge in edges)


BINS = (
    Bins(name="conversation_tokens", unit="tokens", edges=_lengths()),
    Bins(name="row_content_tokens", unit="tokens", edges=_lengths()),
    Bins(name="fill", unit="share", edges=tuple(part / 50 for part in range(51))),
    Bins(name="trained_share", unit="share", edges=tuple(part / 50 for part in range(51))),
    Bins(name="turns", unit="messages", edges=(*map(float, range(33)), 48.0, 64.0, 96.0, 128.0, 256.0, 512.0)),
    Bins(name="conversations_of_a_row", unit="conversations", edges=_lengths(20)),
)
"""The histograms of an inspection. The shares count conversation tokens of a row over the pack length, and trained over own tokens of a conversation."""


_PARTS = 1 << 32
"""Parts of one in which values are added up: shares to 2e-10, whole numbers exactly."""


class HistogramCounter:
    """Counts values of one kind; may be pickled and added to another of the same kind."""

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        self.counts = np.zeros(len(bins.edges) - 1, dtype=np.int64)
        self.count = 0
        self._total = 0  # in whole parts, so that sums of parts are those of the whole to the bit
        self.least = float("inf")
        self.most = float("-inf")

    def add(self, values: NDArray[Any]) -> None:
        """Count these values."""
        if not len(values):
            return
        places = np.searchsorted(self.bins.edges, values, side="right") - 1
        self.counts += np.bincount(np.clip(places, 0, len(self.counts) - 1), minlength=len(self.counts))
        self.count += len(values)
        self._total += int(np.rint(np.asarray(values, dtype=np.float64) * _PARTS).astype(np.int64).sum())
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    def merge(self, other: HistogramCounter) -> None:
        """Add the counts of another part."""
        self.counts += other.counts
        self.count += other.count
        self._total += other._total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def result(self) -> Histogram:
        """Return the histogram."""
        return Histogram(
            name=self.bins.name,
            unit=self.bins.unit,
            edges=self.bins.edges,
            counts=tuple(self.counts.tolist()),
            count=self.count,
            total=self._total / _PARTS,
            least=self.least if self.count else None,
            most=self.most if self.count else None,
        )
