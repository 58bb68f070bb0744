"""Define a run for comparison: named series by step, whichever program recorded them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

FLOAT32_BITS = 24
EXACT_DIGITS, FLOAT32_DIGITS = 15, 8
"""Significant digits from which a number was written in full: as a float64, and as a float32."""
Series = Mapping[int, float]
"""By step; 1 is the first in what packproof, Megatron-LM and NeMo-RL write."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision at which a source prints the numbers of one series, as far as the numbers show it."""

    digits: int
    """The most significant digits that a number has."""
    decimals: int
    """The most decimal places that a number has, its exponent counted in."""
    is_float32: bool = False
    """Whether the numbers were float32 before, or were written with as many digits as a float32 has."""
    words: str
    """The precision in a sentence, such as `7 digits`."""

    def half_unit(self, value: float) -> float:
        """Return how far a recorded value may be from the value that was rounded: half a unit in its last place."""
        if not math.isfinite(value):
            return 0.0
        by_place = 0.5 * 10.0**-self.decimals
        if value == 0:
            return 0.0 if self.is_float32 else by_place
        if self.is_float32:
            return math.ldexp(0.5, math.frexp(value)[1] - FLOAT32_BITS)
        return max(by_place, 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) - self.digits + 1))


FLOAT32 = Precision(digits=9, decimals=9, is_float32=True, words="float32")


def seen(numbers: Collection[str]) -> Precision | None:
    """Return the precision that these printed numbers show; None for numbers in full precision."""
    forms = {form for number in numbers if (form := _form(number)) is not None}
    digits = max((form[0] for form in forms), default=0)
    decimals = max((form[1] for form in forms), default=0)
    if digits >= EXACT_DIGITS or decimals <= 0:  # whole numbers, such as rows so far, are counted
        return None
    if digits >= FLOAT32_DIGITS:
        return FLOAT32
    places = {form[1] for form in forms}
    is_fixed = len({form[0] for form in forms}) > 1 and len(places) == 1 and decimals > 0
    words = f"{decimals} decimal{'s' * (decimals != 1)}" if is_fixed else f"{digits} digit{'s' * (digits != 1)}"
    return Precision(digits=digits, decimals=decimals, words=words)


def _form(number: str) -> tuple[int, int] | None:
    """Return significant digits and decimal places of a printed number; None for a value that is not finite."""
    try:
        parts = Decimal(number.strip()).as_tuple()
    except InvalidOperation:
        return None
    return (len(parts.digits), -parts.exponent) if isinstance(parts.exponent, int) else None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Series under packproof's names: `loss`, `mtp_1_loss`, `gradient_norm`, `step_seconds`, `learning_rate`, `validation_loss`, `consumed_samples`."""

    name: str
    source: str
    """Source of the run, such as `Megatron-LM log`."""
    place: str
    """The file or folder, or how it was run."""
    series: Mapping[str, Series]
    remarks: Sequence[str] = ()
    """Remarks for readers of a comparison: the precision of the source, steps that were run again."""
    precisions: Mapping[str, Precision] = dataclasses.field(default_factory=dict)
    """Precision by series; a series without an entry has full precision."""
    widths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Number of steps, up to and including each step, over which its losses and its time are means; 1 without an entry."""
    loose: Mapping[str, Series] = dataclasses.field(default_factory=dict)
    """By series and step, how far a value may be off beside its own rounding: it was summed in float32, or a mean was undone."""
    untrained: frozenset[int] = frozenset()
    """Steps that trained nothing: no loss is in the series."""
    validation: str = ""
    """Name of what a validation loss averages over, if the source says so."""

    def steps(self, name: str) -> set[int]:
        """Return the steps at which the series has a value, also a value that is not finite."""
        return set(self.series.get(name, ()))

    def rounding(self, name: str, step: int) -> float:
        """Return how far the value recorded at a step may be from what it was before it was written down."""
        precision = self.precisions.get(name)
        rounded = 0.0 if precision is None else precision.half_unit(self.series[name][step])
        return rounded + self.loose.get(name, {}).get(step, 0.0)

    def width(self, name: str, step: int) -> int:
        """Return over how many steps the value at a step is a mean."""
        return self.widths.get(step, 1) if is_mean(name) else 1

    @property
    def depths(self) -> int:
        """Number of depths of multi-token prediction with losses."""
        depth = 0
        while f"mtp_{depth + 1}_loss" in self.series:
            depth += 1
        return depth


def is_mean(name: str) -> bool:
    """Return whether Megatron-LM's log prints the series as a mean over its lines' iterations."""
    return name == "step_seconds" or (name.endswith("loss") and name != "validation_loss")


class Gathered:
    """Series while they are read; what begins again at an earlier step takes the later steps back."""

    def __init__(self) -> None:
        self.series: dict[str, dict[int, float]] = {}
        self.widths: dict[int, int] = {}
        self.loose: dict[str, dict[int, float]] = {}
        self.untrained: set[int] = set()
        self.again = 0
        """Steps that were taken back."""
        self._texts: dict[str, set[str]] = {}

    def put(self, name: str, step: int, value: float, *, text: str | None = None) -> None:
        """Take one value, and how it was written; a later one of the same step counts."""
        self.series.setdefault(name, {})[step] = value
        if text is not None:
            self._texts.setdefault(name, set()).add(text)

    def restart(self, first: int) -> None:
        """Continue at this step: discard the records of this step and of later steps, which are run again."""
        self.again += sum(step >= first for step in self.series.get("loss", ()))
        for values in (*self.series.values(), *self.loose.values()):
            for step in [step for step in values if step >= first]:
                del values[step]
        self.widths = {step: width for step, width in self.widths.items() if step < first}
        self.untrained = {step for step in self.untrained if step < first}

    def set_untrained_aside(self) -> None:
        """Remove losses of steps that trained nothing from the series.

        A loss that is not a number beside a gradient of exactly 0 is Megatron-LM's 0 / 0: every target was masked.
        """
        norms = self.series.get("gradient_norm", {})
        empty = (
            step for step, loss in self.series.get("loss", {}).items() if math.isnan(loss) and norms.get(step) == 0
        )
        self.untrained.update(step for step in empty if self.widths.get(step, 1) == 1)
        for name, values in self.series.items():
            if name.endswith("loss") and name != "validation_loss":
                for step in self.untrained:
                    values.pop(step, None)

    def remarks(self) -> list[str]:
        """Return what was taken back."""
        return [f"{self.again} steps were run again after a restart: the later ones count"] if self.again else []

    def precisions(self) -> dict[str, Precision]:
        """Return what the numbers of each series show of how they were rounded."""
        found = {name: seen(texts) for name, texts in self._texts.items() if name in self.series}
        return {name: precision for name, precision in found.items() if precision is not None}


def shifted(run: Run, by: int) -> Run:
    """Return the run with `by` added to each step, for a system that counts from 0."""
    if not by:
        return run
    moved, loose = (
        {name: {step + by: value for step, value in values.items()} for name, values in each.items()}
        for each in (run.series, run.loose)
    )
    return dataclasses.replace(
        run,
        series=moved,
        loose=loose,
        widths={step + by: width for step, width in run.widths.items()},
        untrained=frozenset(step + by for step in run.untrained),
        remarks=[*run.remarks, f"its steps are counted {by:+d}"],
    )


def to_number(value: object) -> float | None:
    """Return a number as exporters write it: also `NaN`, `Infinity`, an empty cell for None; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float | Decimal):
        return float(value)
    try:
        return float(str(value).strip())
    except ValueError:
        return None


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan
