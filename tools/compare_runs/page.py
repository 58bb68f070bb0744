"""A comparison as one self-contained HTML page: tables, both losses over each other, their ratio and difference, step times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from equivalence.report.templates import environment
from production.training.metrics.plot import WIDTH, Line, draw
from tools.compare_runs import words
from tools.compare_runs.aligned import paired_values
from tools.compare_runs.comparison import Comparison
from tools.compare_runs.readers.names import ROUTER_LOSSES
from tools.compare_runs.run import Run

FIRST, SECOND = "#8db9f2", "#d9480f"
LOSSES = ("#8250df", "#1a7f37", "#bf8700", "#0969da", "#cf222e")
"""Colours of the loss and of each depth's loss in one picture."""
FEW = 60
"""Largest number of points at which each point gets a marker."""
NARROW, NARROW_BELOW = 400, "44rem"
"""Width of a picture for a small screen, in the picture's own pixels, and the page's width below which it is shown."""


def write_page(comparison: Comparison, path: Path, *, broken: Sequence[str] = ()) -> None:
    """Write the page; `broken` are the limits that do not hold."""
    template = environment("tools.compare_runs").get_template("page.html")
    page = template.render(
        comparison=comparison,
        times=words.time_rows(comparison),
        bound=words.bound(comparison),
        rows=words.difference_rows(comparison),
        verdict=words.verdict(comparison),
        broken=broken,
        pictures=zip(pictures(comparison), pictures(comparison, width=NARROW), strict=True),
        narrow_below=NARROW_BELOW,
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def pictures(comparison: Comparison, *, width: int = WIDTH) -> list[str]:
    """Draw all steps, not the window alone: losses, how far they are apart, depths, validations, step times, gradient norms."""
    first, second = comparison.runs
    overlay = partial(_overlay, first, second, width=width)
    found = [overlay("loss", "loss"), *_apart(comparison, width)]
    depths = range(1, min(first.depths, second.depths) + 1)
    found += [overlay(f"mtp_{depth}_loss", f"mtp {depth} loss") for depth in depths]
    if comparison.validation is not None:
        found.append(overlay("validation_loss", "validation loss"))
    if comparison.times is not None:
        # The first steps build what the others use, and would flatten the rest.
        start = comparison.window.first
        found.append(overlay("step_seconds", f"step time, from step {start} on", unit="seconds", start=start))
    if any(each.name == "gradient_norm" for each in comparison.differences):
        found.append(overlay("gradient_norm", "gradient norm"))
    return found


def _overlay(first: Run, second: Run, series: str, title: str, *, width: int, unit: str = "", start: int = 0) -> str:
    after = _points(second, series, start)
    lines = [
        # The first run broad and pale, the second thin upon it: equal lines still show both.
        Line(name=first.name, points=_points(first, series, start), colour=FIRST, width=5),
        Line(name=second.name, points=after, colour=SECOND, width=1.6, dots=len(after) <= FEW),
    ]
    return draw(lines, title=title, x_title="step", y_title=unit or title, width=width)


def _apart(comparison: Comparison, width: int) -> list[str]:
    """Draw B / A and |B - A| of the loss and of each depth's loss; a constant ratio is a level line in the first only."""
    first, second = comparison.runs
    names = [each.name for each in comparison.wholes if each.steps and each.name not in ROUTER_LOSSES]
    pairs = {name: paired_values(first, second, name) for name in names}
    every = first.steps("loss") | second.steps("loss")
    ends = (float(min(every)), float(max(every)))
    ratios = [
        [(float(step), pair.second / pair.first) for step, pair in found.items() if pair.first]
        for found in pairs.values()
    ]
    gaps = [[(float(step), pair.gap) for step, pair in found.items()] for found in pairs.values()]
    equal = Line(name="equal", points=[(x, 1.0) for x in ends], colour="#8a9099", width=1, dashes="5 4")
    # Not seen: it spans the steps of the losses' own picture above, so that one step stands at one place in both.
    span = Line(name="", points=[(x, 0.0) for x in ends], colour="none")
    return [
        draw([equal, *_lines(names, ratios)], title="B / A of the losses", x_title="step", y_title="", width=width),
        draw(
            [span, *_lines(names, gaps)],
            title="absolute difference of the losses",
            x_title="step",
            y_title="|B - A|",
            from_zero=True,
            width=width,
        ),
    ]


def _lines(names: Sequence[str], points: Sequence[list[tuple[float, float]]]) -> list[Line]:
    return [
        Line(name=name.replace("_", " "), points=each, colour=colour, dots=len(each) <= FEW)
        for name, each, colour in zip(names, points, itertools.cycle(LOSSES), strict=False)
    ]


def _points(run: Run, series: str, start: int) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in sorted(run.series[series].items()) if step >= start]
