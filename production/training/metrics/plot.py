"""Draw line plots and histograms as SVG text, without a plotting library: a run's losses, two runs' over each other, a file's lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 34, 40
ROW = 16
"""Height of a legend's entry that stands below the title."""
TICK_ROOM = 42
"""The least distance between two steps on the axis."""
COLUMNS = 700
"""Columns of a line with more points; each column keeps its lowest and highest point, so that spikes stay."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Holds one series."""

    name: str
    """Name in the legend."""
    points: Sequence[tuple[float, float]]
    """Points (x, y) with rising x; a y that is NaN or infinite breaks the line and is marked at the top."""
    colour: str = "#316dca"
    """As SVG's stroke."""
    width: float = 1.6
    """Width of the stroke, in pixels."""
    dashes: str = ""
    """As SVG's stroke-dasharray, such as `5 4`."""
    dots: bool = False
    """Whether each point is marked, for few of them."""


def draw(
    lines: Sequence[Line], *, title: str, x_title: str, y_title: str, from_zero: bool = False, width: int = WIDTH
) -> str:
    """Return the plot as one `<svg>` element that can also stand alone as a file; light or dark as the viewer asks.

    `width` is in pixels, which are also the unit of letters: use a small width for a small screen. A legend that does
    not fit beside the title goes below the title.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if math.isfinite(y)]
    x_low, x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    if from_zero:  # and up to something, so that what is 0 all along lies on the axis
        ys += [0.0] if any(ys) else [0.0, 1.0]
    y_ticks = ticks(min(ys, default=0.0), max(ys, default=1.0))
    x_ticks = [x for x in ticks(x_low, x_high, whole=True) if x_low <= x <= x_high]
    x_ticks = x_ticks[:: math.ceil(len(x_ticks) * TICK_ROOM / (width - LEFT - RIGHT))]
    legend, below = _legend([line for line in lines if line.name], title, width)
    frame = _Frame(x_low=x_low, x_high=x_high, y_low=y_ticks[0], y_high=y_ticks[-1], width=width, top=TOP + below)
    marks = [(frame.x(x), f"{x:g}") for x in x_ticks]
    strokes = itertools.chain.from_iterable(_strokes(line, frame) for line in lines)
    return _figure(frame, [*strokes, *legend], marks, y_ticks, title=title, x_title=x_title, y_title=y_title)


def draw_bars(
    labels: Sequence[str],
    values: Sequence[float],
    *,
    title: str,
    x_title: str,
    y_title: str,
    colour: str = "#316dca",
    width: int = WIDTH,
) -> str:
    """Return a histogram as one `<svg>` element: one bar a value, each from its label to the next label.

    `labels` are the edges of the bars, one more than there are values; as many are written as there is room for.
    """
    y_ticks = ticks(0.0, max([*values, 1.0]), whole=True)
    frame = _Frame(x_low=0, x_high=max(len(values), 1), y_low=0.0, y_high=y_ticks[-1], width=width, top=TOP)
    step = math.ceil(len(labels) * TICK_ROOM / (width - LEFT - RIGHT))
    marks = [(frame.x(at), labels[at]) for at in range(0, len(labels), step)]
    bars = (
        f'<rect x="{frame.x(at) + 0.5:.1f}" y="{frame.y(value):.1f}" width="{frame.x(1) - frame.x(0) - 1:.1f}" '
        f'height="{frame.bottom - frame.y(value):.1f}" fill="{colour}"><title>{escape(labels[at])} to {escape(labels[at + 1])}: {value:,g}</title></rect>'
        for at, value in enumerate(values)
        if value
    )
    return _figure(frame, bars, marks, y_ticks, title=title, x_title=x_title, y_title=y_title)


def _figure(
    frame: _Frame,
    drawn: Iterable[str],
    x_marks: Sequence[tuple[float, str]],
    y_ticks: Sequence[float],
    *,
    title: str,
    x_title: str,
    y_title: str,
) -> str:
    """Return the whole `<svg>` element; `x_marks` are places on the axis, in pixels, and what is written there."""
    size = f'viewBox="0 0 {frame.width} {frame.height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" class="packproof-lines">',
            _STYLE,
            f'<rect class="back" width="{frame.width}" height="{frame.height}"/>',
            f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
            *_axes(frame, x_marks, y_ticks),
            f'<text x="{(LEFT + frame.right) / 2:g}" y="{frame.height - 8}" text-anchor="middle">{escape(x_title)}</text>',
            f'<text transform="translate(14 {(frame.top + frame.bottom) / 2:g}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>',
            *drawn,
            "</svg>\n",
        ]
    )


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers from at most `low` to at least `high`, four to eleven of them."""
    if not high > low:
        spread = abs(low) * 0.05 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / 6
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    if whole:
        step = max(1, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int
    top: int

    @property
    def height(self) -> int:
        return HEIGHT + self.top - TOP

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low) if self.x_high > self.x_low else 0.5
        return LEFT + share * (self.right - LEFT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.bottom - share * (self.bottom - self.top)


def _axes(frame: _Frame, x_marks: Sequence[tuple[float, str]], y_ticks: Sequence[float]) -> Iterator[str]:
    for value in y_ticks:
        y = frame.y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value, y_ticks)}</text>'
    for x, text in x_marks:
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom}" y2="{frame.bottom + 4}"/>'
        yield f'<text x="{x:.1f}" y="{frame.bottom + 17}" text-anchor="middle">{escape(text)}</text>'


def _number(value: float, among: Sequence[float]) -> str:
    """Return a number with as many digits as distinguish it from its neighbours."""
    step = among[1] - among[0]
    largest = max(abs(among[0]), abs(among[-1]))
    if value == 0:
        return "0"
    if largest < 1e-3 or largest >= 1e6:
        digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))
        return f"{value:.{digits}e}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _strokes(line: Line, frame: _Frame) -> Iterator[str]:
    style = f'fill="none" stroke="{line.colour}" stroke-width="{line.width:g}" stroke-linejoin="round"'
    if line.dashes:
        style += f' stroke-dasharray="{line.dashes}"'
    for run in _runs(_thinned(line.points)):
        path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in run)
        if len(run) > 1:
            yield f'<path d="M{path}" {style}/>'
        if line.dots or len(run) == 1:
            for x, y in run:
                yield f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6" fill="{line.colour}"/>'
    for x, y in line.points:
        if not math.isfinite(y):
            yield (
                f'<text class="bad" x="{frame.x(x):.1f}" y="{frame.top + 8}" text-anchor="middle">×'
                f"<title>{escape(line.name)}: {y} at {x:g}</title></text>"
            )


def _runs(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    for finite, run in itertools.groupby(points, lambda point: math.isfinite(point[1])):
        if finite:
            yield list(run)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= 2 * COLUMNS:
        return list(points)
    kept: list[tuple[float, float]] = []
    for column in itertools.batched(points, math.ceil(len(points) / COLUMNS)):
        finite = [point for point in column if math.isfinite(point[1])]
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])} if finite else set()
        kept += sorted({*ends, *(point for point in column if not math.isfinite(point[1]))})
    return kept


def _legend(lines: Sequence[Line], title: str, width: int) -> tuple[list[str], int]:
    """Return the legend and its height below the title: 0 where the legend fits beside the title, else a row for each
    line.
    """
    rooms = [_room(line) for line in lines]
    if LEFT + 7.5 * len(title) + sum(rooms) <= width - RIGHT:
        lefts = itertools.accumulate(rooms[:-1], initial=float(width - RIGHT) - sum(rooms))
        return [_entry(line, left, 16) for line, left in zip(lines, lefts, strict=False)], 0
    return [_entry(line, LEFT, 34 + ROW * at) for at, line in enumerate(lines)], ROW * len(lines)


def _entry(line: Line, left: float, y: int) -> str:
    dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    return (
        f'<line x1="{left:.1f}" x2="{left + 24:.1f}" y1="{y}" y2="{y}" stroke="{line.colour}" '
        f'stroke-width="{line.width:g}"{dashes}/>'
        f'<text x="{left + 30:.1f}" y="{y + 4}">{escape(line.name)}</text>'
    )


def _room(line: Line) -> float:
    """Return the width of a legend's entry: without the font, a guess by the letter."""
    return 50 + 6.3 * len(line.name)


_STYLE = """<style>
.packproof-lines text { font: 11.5px system-ui, "DejaVu Sans", sans-serif; fill: #57606a; }
.packproof-lines .title { font-weight: 600; font-size: 13px; fill: #1d1f23; }
.packproof-lines .back { fill: #fff; } .packproof-lines .grid { stroke: #e6e6e2; } .packproof-lines .tick { stroke: #9aa0a8; }
.packproof-lines .bad { fill: #b3261e; font-weight: 700; font-size: 14px; }
@media (prefers-color-scheme: dark) {
.packproof-lines text { fill: #a7aeb9; } .packproof-lines .title { fill: #e4e6ea; }
.packproof-lines .back { fill: #1d2026; } .packproof-lines .grid { stroke: #31353d; } .packproof-lines .bad { fill: #ff8a80; }
}
</style>"""
