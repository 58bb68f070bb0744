"""Bound a ratio of step times from pairs of the same step on two systems.

Pairing removes what both systems share: a step of long segments is slow on both. Neighbouring steps on a busy machine are correlated,
which the bound ignores: interleave the systems, or read the bound as a lower limit of the uncertainty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class PairedRatio:
    """The second system's time over the first one's."""

    ratio: float
    """Geometric mean over the pairs."""
    lower: float
    """The true mean is above with 95 % confidence: one-sided, by Student's t over the logarithms."""
    upper: float
    """It is below, as above: what "no worse than" is judged by. The two together enclose it with 90 %."""
    pairs: int


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> PairedRatio | None:
    """Return the ratio of two lists of seconds, pair by pair, all above 0; None for fewer than two pairs."""
    logs = [math.log(after / before) for before, after in zip(first, second, strict=True)]
    if len(logs) < 2:
        return None
    mean = statistics.fmean(logs)
    reach = student_quantile(CONFIDENCE, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return PairedRatio(
        ratio=math.exp(mean), lower=math.exp(mean - reach), upper=math.exp(mean + reach), pairs=len(logs)
    )


def student_quantile(probability: float, freedom: int) -> float:
    """Return the t below which Student's distribution with these degrees of freedom stays with the given probability (0.5 to 1)."""
    low, high = 0.0, 1.0
    while (1 + _between(high, freedom)) / 2 < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if (1 + _between(middle, freedom)) / 2 < probability:
            low = middle
        else:
            high = middle
    return high


def _between(t: float, freedom: int) -> float:
    """Return P(-t < T < t), by the finite series for whole degrees of freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
