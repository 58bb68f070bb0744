"""The rows of a comparison's tables in words, the same on a terminal and on a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.compare_runs.comparison import Comparison, Difference
from tools.compare_runs.run import Run


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


FEWEST_RATIOS = 3
"""Number of steps from which a constant ratio is not a coincidence."""
MOST_SPREAD = 0.1
"""Largest range of a constant ratio, relative to its distance from 1."""


def time_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Return the table of the published comparison: system, mean step time, window, relative throughput; empty without times."""
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
    """Return the paired ratio of step times with its bounds, in one sentence."""
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
    """Return the rows of the table of differences: one for each series in the window, then the loss over all common steps, then the
    validation loss.
    """
    rows = [_row(each, _called(each.name)) for each in comparison.differences]
    first, last = comparison.span
    rows.append(_row(comparison.whole, f"loss, all steps of both ({first}-{last})"))
    if comparison.validation is not None:
        rows.append(_row(comparison.validation, "validation loss"))
    return rows


def verdict(comparison: Comparison) -> str:
    """Return `findings` as one sentence."""
    return "; ".join(findings(comparison))


def findings(comparison: Comparison) -> list[str]:
    """Return the differences that exceed rounding: the first step and series at which losses differ, over all steps of both runs, and the size."""
    if not comparison.all_finite:
        who = [
            f"{run.name} at {some(steps)}" + ("" if each.name == "loss" else f" ({_called(each.name)})")
            for each in comparison.windowed_losses
            for run, steps in zip(comparison.runs, each.not_finite, strict=True)
            if steps
        ]
        return [f"losses that are not numbers: {', '.join(who)}"]
    return [
        *_rounding(comparison),
        *_ratio(comparison),
        _where(comparison),
        *_by_how_much(comparison),
        *_missing(comparison),
        *_norms(comparison),
    ]


def _where(comparison: Comparison) -> str:
    """Describe the first difference of the loss and of each depth's loss over all steps that both runs have."""
    wholes, window = [each for each in comparison.wholes if each.steps], comparison.window
    first, last = comparison.span
    every = f"all {comparison.whole.steps} steps that both runs have ({first}-{last})"
    differ = [each.first_at for each in wholes if each.first_at is not None]
    if not differ:
        which = "" if len(wholes) == 1 else f" ({_names(wholes)})"
        return f"equal losses{which}, to the last recorded digit, at {every}"
    at = min(differ)
    which = "" if len(wholes) == 1 else f" in {_names([each for each in wholes if each.first_at == at])}"
    outside = "" if window.first <= at <= window.last else f", outside of the window {window}"
    if comparison.equal_but_for_rounding:
        return f"within rounding, recorded losses are unequal from step {at} on{which}, of {every}{outside}"
    return f"losses first differ at step {at}{which}, of {every}{outside}"


def _ratio(comparison: Comparison) -> list[str]:
    """Say that the losses differ by one ratio at all steps, where they do: another divisor or mask makes that, other rows do not."""
    if comparison.whole.beyond_rounding_at is None or comparison.trained_by_one:
        return []
    first, second = (run.series["loss"] for run in comparison.runs)
    steps = [step for step in sorted(first.keys() & second.keys()) if first[step] != 0]
    ratios = [second[step] / first[step] for step in steps]
    if len(ratios) < FEWEST_RATIOS or not all(map(math.isfinite, ratios)):
        return []
    mean = sum(ratios) / len(ratios)
    if max(ratios) - min(ratios) > MOST_SPREAD * abs(mean - 1):
        return []
    return [
        f"a constant ratio: B's loss is {mean:.5g} times A's at all {len(steps)} steps (docs/guides/your-loss-is-off.md)"
    ]


def _by_how_much(comparison: Comparison) -> list[str]:
    """Return one sentence for each series that differs, with the series that are equal."""
    wholes = [each for each in comparison.wholes if each.steps]
    found = [_apart(comparison, each, alone=len(wholes) == 1) for each in wholes if each.first_at is not None]
    if found and (equal := [each for each in wholes if each.first_at is None]):
        found.append(f"equal at all steps: {_names(equal)}")
    validation = comparison.validation
    if validation is not None and validation.first_at is not None:
        found.append(
            f"validation losses differ at {validation.differing} of {validation.steps}, first at step "
            f"{validation.first_at}, by {validation.largest:.3g} at most"
        )
    return found


def _apart(comparison: Comparison, whole: Difference, *, alone: bool) -> str:
    """Describe the difference of one series in the window, or over all steps if the window is equal."""
    window = next(each for each in comparison.differences if each.name == whole.name)
    subject, they = ("", "they ") if alone else (f"{_called(whole.name)}: ", "")
    if window.first_at is None:
        told = f"in steps {comparison.window} all {window.steps} are equal"
        return f"{subject}{told}, over all steps {they}differ by {whole.largest:.3g} at most (step {whole.largest_at})"
    told = f"in steps {comparison.window} {they}differ at {window.differing} of {window.steps}"
    return (
        f"{subject}{told}, by {window.mean:.3g} on average and {window.largest:.3g} at most (step {window.largest_at})"
    )


def _missing(comparison: Comparison) -> list[str]:
    """Return the series of depths that lack some step at which the loss has a value."""
    return [
        f"{_called(each.name)} is in both runs at {each.steps} of these {comparison.whole.steps} steps"
        for each in comparison.wholes
        if each.steps != comparison.whole.steps
    ]


def _norms(comparison: Comparison) -> list[str]:
    """Return the gradient norms of the window that differ by more than the digits of their sources explain."""
    return [
        f"gradient norms differ by more than rounding at {each.beyond_rounding} of {each.steps} steps, first at step {each.beyond_rounding_at}"
        for each in comparison.differences
        if each.name == "gradient_norm" and each.beyond_rounding_at is not None
    ]


def _rounding(comparison: Comparison) -> list[str]:
    """Return the differences that the printed digits explain; empty for two runs in full precision."""
    rounded = [f"{run.name} to {words}" for run in comparison.runs if (words := _written(comparison, run))]
    told = _trained(comparison)
    if comparison.equal or not rounded:
        return told
    written = f"the sources round losses, {' and '.join(rounded)}"
    if comparison.equal_but_for_rounding:
        return [f"equal losses as far as the sources can tell: no difference is more than rounding ({written})"]
    beyond = [each for each in comparison.losses if each.beyond_rounding_at is not None]
    which = [
        f"at {each.beyond_rounding} step{'s' if each.beyond_rounding > 1 else ''}, first at step {each.beyond_rounding_at}"
        + ("" if len(comparison.losses) == 1 else f" ({_called(each.name)})")
        for each in beyond
    ]
    return [*told, *([f"by more than rounding losses differ {'; '.join(which)} ({written})"] if which else [])]


def _written(comparison: Comparison, run: Run) -> str:
    """Return the precision of a run's losses in words; empty for full precision."""
    names = [each.name for each in comparison.losses]
    precision = next((run.precisions[name] for name in names if name in run.precisions), None)
    if precision is not None:
        return precision.words
    return "float32 sums" if any(name in run.loose for name in names) else ""


def _trained(comparison: Comparison) -> list[str]:
    if not comparison.trained_by_one:
        return []
    return [f"only one of the two trained, and has a loss, at {some(comparison.trained_by_one)}"]


def _names(series: Sequence[Difference]) -> str:
    return ", ".join(_called(each.name) for each in series)


def some(steps: Sequence[int]) -> str:
    """Return a short list: the first items and the number of the others."""
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
