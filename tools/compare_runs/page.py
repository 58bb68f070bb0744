"""A comparison as one self-contained HTML page: tables, both losses over each other, their difference, step times."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2

from production.training.picture import Line, draw
from tools.compare_runs import words
from tools.compare_runs.comparison import Comparison
from tools.compare_runs.run import Run

FIRST, SECOND, BETWEEN = "#8db9f2", "#d9480f", "#8250df"
FEW = 60
"""Up to so many points each is marked."""


def write_page(comparison: Comparison, path: Path, *, broken: Sequence[str] = ()) -> None:
    """Write the page; `broken` are the limits that do not hold."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files("tools.compare_runs").joinpath("page.html").read_text(encoding="utf-8"))
    page = template.render(
        comparison=comparison,
        style=files("equivalence.report").joinpath("report.css").read_text(encoding="utf-8"),
        times=words.time_rows(comparison),
        bound=words.bound(comparison),
        rows=words.difference_rows(comparison),
        verdict=words.verdict(comparison),
        broken=broken,
        pictures=pictures(comparison),
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def pictures(comparison: Comparison) -> list[str]:
    """SVG elements over all steps, not the window alone: losses, their difference, depths, validations, step times, gradient norms."""
    first, second = comparison.runs
    found = [_overlay(first, second, "loss", "loss"), _between(first, second)]
    depths = range(1, min(first.depths, second.depths) + 1)
    found += [_overlay(first, second, f"mtp_{depth}_loss", f"mtp {depth} loss") for depth in depths]
    if comparison.validation is not None:
        found.append(_overlay(first, second, "validation_loss", "validation loss"))
    if comparison.times is not None:
        # The first steps build what the others use, and would flatten the rest.
        start = comparison.window.first
        title = f"step time, from step {start} on"
        found.append(_overlay(first, second, "step_seconds", title, unit="seconds", start=start))
    if any(each.name == "gradient_norm" for each in comparison.differences):
        found.append(_overlay(first, second, "gradient_norm", "gradient norm"))
    return found


def _overlay(first: Run, second: Run, series: str, title: str, *, unit: str = "", start: int = 0) -> str:
    after = _points(second, series, start)
    lines = [
        # The first run broad and pale, the second thin upon it: equal lines still show both.
        Line(name=first.name, points=_points(first, series, start), colour=FIRST, width=5),
        Line(name=second.name, points=after, colour=SECOND, width=1.6, dots=len(after) <= FEW),
    ]
    return draw(lines, title=title, x_title="step", y_title=unit or title)


def _between(first: Run, second: Run) -> str:
    steps = sorted(first.steps("loss") & second.steps("loss"))
    every = first.steps("loss") | second.steps("loss")
    points = [(float(step), abs(second.series["loss"][step] - first.series["loss"][step])) for step in steps]
    line = Line(name="|B - A|", points=points, colour=BETWEEN, dots=len(points) <= FEW)
    # Not seen: it spans the steps of the losses' own picture above, so that one step stands at one place in both.
    span = Line(name="", points=[(float(step), 0.0) for step in (min(every), max(every))], colour="none")
    return draw(
        [span, line], title="absolute difference of the losses", x_title="step", y_title="|B - A|", from_zero=True
    )


def _points(run: Run, series: str, start: int) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in sorted(run.series[series].items()) if step >= start]
