"""Draw histograms of a scan with the lines of the training job's plots: a plot for a wide screen and one for a small one."""

from __future__ import annotations

from collections.abc import Sequence

from production.training.metrics.plot import WIDTH, Line, draw

NARROW = 400
"""Width of a plot for a small screen, in the plot's own pixels."""
COLOUR = "#316dca"


def histogram(bins: Sequence[Sequence[float]], *, end: float, title: str, x_title: str) -> tuple[str, str]:
    """Return a histogram wide and narrow as SVG. `bins` are (lower end, rows); `end` is the upper end of the last."""
    starts = [start for start, _ in bins]
    points: list[tuple[float, float]] = [(starts[0], 0.0)] if bins else []
    for (start, rows), stop in zip(bins, [*starts[1:], end], strict=True):
        points += [(float(start), float(rows)), (float(stop), float(rows))]
    points += [(end, 0.0)] if bins else []
    line = Line(name="", points=points, colour=COLOUR, width=2)
    wide, narrow = (
        draw([line], title=title, x_title=x_title, y_title="rows", from_zero=True, width=width)
        for width in (WIDTH, NARROW)
    )
    return wide, narrow


def histograms(scan: dict[str, object]) -> list[tuple[str, str]]:
    """Return the plots of one scan of a certificate: fill, trained share, lengths of segments."""
    bins: dict[str, list[list[float]]] = scan["histograms"]  # type: ignore[assignment] # plain JSON
    found = [
        histogram(
            bins["fill_percent"], end=100.0, title="how full rows are", x_title="percent of a row that is not padding"
        ),
        histogram(
            bins["trained_percent"],
            end=100.0,
            title="how much of a row trains",
            x_title="percent of a row's own tokens",
        ),
    ]
    lengths = bins["segment_tokens"]
    if lengths:
        # On a scale of powers of two, since lengths reach over orders of magnitude.
        powers = [[float(int(start).bit_length() - 1), count] for start, count in lengths]
        gapless = {int(power): count for power, count in powers}
        whole = [[float(at), gapless.get(at, 0)] for at in range(int(powers[0][0]), int(powers[-1][0]) + 1)]
        wide, narrow = histogram(
            whole, end=whole[-1][0] + 1, title="how long segments are", x_title="tokens of a segment, as a power of two"
        )
        found.append((wide.replace(">rows<", ">segments<"), narrow.replace(">rows<", ">segments<")))
    return found
