"""Draw histograms of a scan with the lines of the training job's plots: a plot for a wide screen and one for a small one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from production.training.metrics.plot import WIDTH, Line, draw

NARROW = 400
"""Width of a plot for a small screen, in the plot's own pixels."""
COLOUR = "#316dca"


def histograms(scan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the plots of one scan of a certificate: fill, trained share, lengths; each wide and narrow."""
    found: Mapping[str, Any] = scan["histograms"]
    return [
        _histogram(
            found["fill"], title="how full rows are", x_title="percent of a row that is not padding", y_title="rows"
        ),
        _histogram(
            found["trained_share"],
            title="how much of a conversation trains",
            x_title="percent of a conversation's tokens",
            y_title="conversations",
        ),
        _histogram(
            found["conversation_tokens"],
            title="how long conversations are",
            x_title="tokens, as a power of two",
            y_title="conversations",
            is_length=True,
        ),
    ]


def _histogram(
    bins: Mapping[str, Any], *, title: str, x_title: str, y_title: str, is_length: bool = False
) -> tuple[str, str]:
    edges, counts = list(bins["edges"]), list(bins["counts"])
    if is_length:  # lengths reach over orders of magnitude
        while len(counts) > 1 and not counts[-1]:
            counts.pop()
            edges.pop()
        edges = [math.log2(edge + 1) for edge in edges]
    else:
        edges = [100 * edge for edge in edges]
    points = [(edges[0], 0.0)]
    for (start, stop), count in zip(itertools.pairwise(edges), counts, strict=True):
        points += [(start, float(count)), (stop, float(count))]
    points.append((edges[-1], 0.0))
    line = Line(name="", points=points, colour=COLOUR, width=2)
    wide, narrow = (
        draw([line], title=title, x_title=x_title, y_title=y_title, from_zero=True, width=width)
        for width in (WIDTH, NARROW)
    )
    return wide, narrow
