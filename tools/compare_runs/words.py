"""The rows of a comparison's tables in words, the same on a terminal and on a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.compare_runs.comparison import Comparison, Difference


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table of differences."""

    what: str
    mean: str
    largest: str
    largest_at: str
    relative: str
    finite: str
    steps: str
    fine: bool
    """Whether all values are numbers."""


def time_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """System, mean step time, window, relative throughput: the table of the published comparison; empty without times."""
    times = comparison.times
    if times is None:
        return []
    first, second = comparison.runs
    window = f"steps {comparison.window}"
    relative = 100 * times.relative_throughput
    return [
        (first.name, f"{times.mean[0]:.4f} s", window, "100.00 %"),
        (second.name, f"{times.mean[1]:.4f} s", window, f"{relative:.2f} %"),
        (
            f"{second.name}, gap",
            f"{times.gap:+.4f} s ({100 * times.gap_share:+.2f} %)",
            f"{times.steps} steps",
            f"{relative - 100:+.2f} %",
        ),
    ]


def bound(comparison: Comparison) -> str:
    """The paired ratio of step times with its bounds, in one sentence."""
    if comparison.times is None:
        return "step times are not compared"
    paired = comparison.times.paired
    if paired is None:
        return "one step in the window: no bound of the ratio"
    return (
        f"paired ratio of step times {paired.ratio:.4f}; with 95 % confidence below {paired.upper:.4f}, "
        f"and with 95 % above {paired.lower:.4f} ({paired.pairs} pairs)"
    )


def difference_rows(comparison: Comparison) -> list[Row]:
    """One row a series: those of the window, the loss over all steps, validations."""
    rows = [_row(each, _called(each.name)) for each in comparison.differences]
    first, last = comparison.span
    rows.append(_row(comparison.whole, f"loss, all steps of both ({first}-{last})"))
    if comparison.validation is not None:
        rows.append(_row(comparison.validation, "validation loss"))
    return rows


def verdict(comparison: Comparison) -> str:
    """`findings` as one sentence."""
    return "; ".join(findings(comparison))


def findings(comparison: Comparison) -> list[str]:
    """Where the losses first differ, of all steps that both runs have, by how much in the window, and what of it is rounding."""
    loss = comparison.loss
    if not loss.all_finite:
        who = [
            f"{run.name} at {some(steps)}" for run, steps in zip(comparison.runs, loss.not_finite, strict=True) if steps
        ]
        return [f"losses that are no numbers: {', '.join(who)}"]
    return [_where(comparison), *_by_how_much(comparison), *_rounding(comparison)]


def _where(comparison: Comparison) -> str:
    """The first difference, sought in all steps that both runs have."""
    whole, window = comparison.whole, comparison.window
    first, last = comparison.span
    every = f"all {whole.steps} steps that both runs have ({first}-{last})"
    if whole.first_at is None:
        return f"equal losses, to the last recorded digit, at {every}"
    return f"losses first differ at step {whole.first_at}, of {every}" + (
        f", outside of the window {window}" if not window.first <= whole.first_at <= window.last else ""
    )


def _by_how_much(comparison: Comparison) -> list[str]:
    loss, window = comparison.loss, comparison.window
    if comparison.whole.first_at is None:
        return []
    if loss.first_at is None:
        return [f"in steps {window} all {loss.steps} are equal"]
    told = f"in steps {window} they differ at {loss.differing} of {loss.steps}, by {loss.mean:.3g} on average"
    return [f"{told} and {loss.largest:.3g} at most (step {loss.largest_at})"]


def _rounding(comparison: Comparison) -> list[str]:
    """What of the differences comes of the digits that were written down; nothing where both runs stand as they were."""
    whole = comparison.whole
    rounded = [f"{run.name} to {run.precision}" for run in comparison.runs if run.precision != "exact"]
    if whole.first_at is None or not rounded:
        return []
    written = f"the sources round losses ({' and '.join(rounded)})"
    if whole.beyond_rounding_at is None:
        return [f"{written}, and no difference is more than rounding: as far as they can tell, the losses are equal"]
    count, at = whole.beyond_rounding, whole.beyond_rounding_at
    return [
        f"{written}: by more than rounding they differ at {count} step{'s' if count > 1 else ''}, first at step {at}"
    ]


def some(steps: Sequence[int]) -> str:
    """The first of them."""
    told = ", ".join(map(str, steps[:6]))
    return f"step{'s' if len(steps) > 1 else ''} {told}" + (f" and {len(steps) - 6} more" if len(steps) > 6 else "")


def _row(found: Difference, what: str) -> Row:
    bad = sum(map(len, found.not_finite))
    return Row(
        what=what,
        mean=_number(found.mean),
        largest=_number(found.largest),
        largest_at="" if not found.largest else "–" if found.largest_at is None else str(found.largest_at),
        relative="–" if math.isnan(found.largest_relative) else f"{100 * found.largest_relative:.3g} %",
        finite="all" if not bad else f"not {bad}",
        steps=str(found.steps),
        fine=found.all_finite,
    )


def _called(name: str) -> str:
    return {"gradient_norm": "gradient norm"}.get(name, name.replace("_", " "))


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "0" if value == 0 else f"{value:.6f}" if value >= 1e-4 else f"{value:.2e}"
