"""Write an inspection as one self-contained HTML page: verdict, findings with their fix, tables and histograms."""

from __future__ import annotations

from pathlib import Path

from equivalence.report.templates import environment
from production.files.cache import atomic_file
from production.training.metrics.plot import WIDTH, draw_bars
from tools.inspect_rows import terminal
from tools.inspect_rows.inspection import Histogram, Inspection

NARROW, NARROW_BELOW = 400, "44rem"
"""Width of a picture for a small screen, in the picture's own pixels, and the page's width below which it is shown."""


def write_page(found: Inspection, path: Path) -> None:
    """Write the page, whole or not at all."""
    template = environment("tools.inspect_rows").get_template("page.html")
    page = template.render(
        found=found,
        verdict=terminal.verdict(found),
        totals=list(terminal.totals(found)),
        worst=list(terminal.worst_rows(found)),
        kinds=sorted(found.findings_by_kind, key=lambda kind: (["fails", "loses", "note"].index(found.severities[kind]), kind)),
        tables=[
            ("Distributions", terminal.HISTOGRAM_COLUMNS, terminal.histogram_rows(found)),
            ("Under each preset", terminal.PRESET_COLUMNS, terminal.preset_rows(found)),
            ("Under another context parallel size", terminal.CONTEXT_COLUMNS, terminal.context_rows(found)),
        ],
        pictures=[(picture(each), picture(each, width=NARROW)) for each in found.histograms if each.count],
        narrow_below=NARROW_BELOW,
    )  # fmt: skip
    with atomic_file(path) as file:
        file.write(page.encode("utf-8", errors="backslashreplace"))


def picture(histogram: Histogram, *, width: int = WIDTH) -> str:
    """Draw a histogram between its first and last bin that is not empty."""
    filled = [at for at, number in enumerate(histogram.counts) if number]
    first, last = (filled[0], filled[-1] + 1) if filled else (0, 1)
    labels = [_label(edge, histogram.unit) for edge in histogram.edges[first : last + 1]]
    return draw_bars(
        labels,
        histogram.counts[first:last],
        title=histogram.name.replace("_", " "),
        x_title=histogram.unit,
        y_title="number",
        width=width,
    )


def _label(edge: float, unit: str) -> str:
    if unit == "share":
        return f"{edge:.0%}"
    for size, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if edge >= size:
            return f"{edge / size:g}{letter}"
    return f"{edge:g}"
