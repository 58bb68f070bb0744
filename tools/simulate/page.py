"""Write a walk as one self-contained HTML page, without a script: the load of every rank, and who owns what."""

from __future__ import annotations

import colorsys
import itertools
from typing import Any

from equivalence.report.templates import environment
from production.parallel.context_parallel import find_layout
from tools.simulate.costs import Costs
from tools.simulate.terminal import span
from tools.simulate.walk import Walk

MOST_SEGMENTS = 16
"""Segments of the first row that are drawn."""
MOST_ROWS = 64
"""Rows of each data-parallel rank whose work is drawn."""


def render_page(found: Walk, costs: Costs) -> str:
    """Return the page as text."""
    template = environment("tools.simulate").get_template("page.html")
    job = found.job
    return template.render(
        job=job,
        costs=costs,
        faults=found.faults,
        segments=int(found.segments.sum()),
        tokens=span(int(found.tokens.sum(dim=1).min()), int(found.tokens.sum(dim=1).max())),
        heat=_heat(found),
        bars=_bars(found),
        strips=_strips(found),
        colours=[_colour(rank, job.cp) for rank in range(job.cp)],
    )


def _heat(found: Walk) -> list[list[dict[str, Any]]]:
    """Return [dp][cp]: the attention work of each rank relative to the mean over all ranks."""
    work = found.work.sum(dim=1).double()
    relative = work / work.mean()
    return [
        [
            {"ratio": f"{value:.3f}", "work": f"{int(work[row, column]):,}", **_shade(value)}
            for column, value in enumerate(values)
        ]
        for row, values in enumerate(relative.tolist())
    ]


def _bars(found: Walk) -> list[list[dict[str, Any]]]:
    """Return [dp][microbatch]: the work of a row's slowest rank relative to the largest, and the work of an even distribution."""
    slowest = found.work.amax(dim=2).double()
    mean = found.work.double().mean(dim=2)
    top = float(slowest.max())
    return [
        [
            {"slowest": 100 * float(slowest[rank, row]) / top, "mean": 100 * float(mean[rank, row]) / top}
            for row in range(min(slowest.shape[1], MOST_ROWS))
        ]
        for rank in range(found.job.dp)
    ]


def _strips(found: Walk) -> list[dict[str, Any]]:
    """Return the first segments of the first row, each as pieces with their owning rank and their place in the picture."""
    job, layout = found.job, find_layout(found.job.layout)
    boundaries = found.rows[0].tolist()
    owner = {piece: rank for rank in range(job.cp) for piece in layout.owned(rank, job.cp)}
    pieces = layout.pieces(job.cp) if job.cp > 1 else 1
    if layout.unit == "row":
        boundaries = [0, job.pack_length]
    spans = [(a, b) for a, b in itertools.pairwise(boundaries) if b > a][:MOST_SEGMENTS]
    longest = max(b - a for a, b in spans)
    return [
        {
            "start": start,
            "length": end - start,
            "pieces": [
                {
                    "x": 100 * piece * (end - start) / pieces / longest,
                    "width": 100 * (end - start) / pieces / longest,
                    "rank": owner.get(piece, 0),
                    "colour": _colour(owner.get(piece, 0), job.cp),
                }
                for piece in range(pieces)
            ],
        }
        for start, end in spans
    ]


def _colour(rank: int, size: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(0.58 + 0.75 * rank / max(size, 2), 0.45 + 0.18 * (rank % 2), 0.5)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _shade(ratio: float) -> dict[str, Any]:
    """Return the colour strength of a cell in percent, full at a factor of 1.5, and its side of the mean."""
    return {"side": "above" if ratio > 1 else "below", "strength": round(70 * min(abs(ratio - 1) / 0.5, 1))}
