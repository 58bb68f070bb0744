"""A run as it is compared: named series by step, wherever they were recorded."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

DIGITS, FLOAT32_BITS = 7, 24
Series = Mapping[int, float]
"""By step; 1 is the first in what packproof, Megatron-LM and NeMo-RL write."""


Precision = Literal["exact", "7 digits", "float32"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Series under packproof's names: `loss`, `mtp_1_loss`, `gradient_norm`, `step_seconds`, `learning_rate`, `validation_loss`, `consumed_samples`."""

    name: str
    source: str
    """What it was read from, such as `Megatron-LM log`."""
    place: str
    """The file or folder, or how it was run."""
    series: Mapping[str, Series]
    remarks: Sequence[str] = ()
    """What a reader of a comparison must know: the precision of the source, steps that were run again."""
    precision: Precision = "exact"
    """How losses stand in the source: as they were, to 7 decimal digits, or in float32."""

    def steps(self, name: str) -> set[int]:
        """Those at which the series has a value, also one that is no number."""
        return set(self.series.get(name, ()))

    def rounding(self, value: float) -> float:
        """How far a recorded loss may be from what it was rounded from: half a unit in its last place."""
        if self.precision == "exact" or value == 0 or not math.isfinite(value):
            return 0.0
        if self.precision == "float32":
            return math.ldexp(0.5, math.frexp(value)[1] - FLOAT32_BITS)
        return 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) - DIGITS + 1)

    @property
    def depths(self) -> int:
        """Depths of multi-token prediction whose losses are there."""
        depth = 0
        while f"mtp_{depth + 1}_loss" in self.series:
            depth += 1
        return depth


class Gathered:
    """Series while they are read; what begins again at an earlier step takes the later steps back."""

    def __init__(self) -> None:
        self.series: dict[str, dict[int, float]] = {}
        self.again = 0
        """Steps that were taken back."""

    def put(self, name: str, step: int, value: float) -> None:
        """One value; a later one of the same step counts."""
        self.series.setdefault(name, {})[step] = value

    def restart(self, first: int) -> None:
        """The run goes on at this step: what was recorded of it and of later ones is run again."""
        self.again += sum(step >= first for step in self.series.get("loss", ()))
        for values in self.series.values():
            for step in [step for step in values if step >= first]:
                del values[step]

    def remarks(self) -> list[str]:
        """What was taken back."""
        return [f"{self.again} steps were run again after a restart: the later ones count"] if self.again else []


def shifted(run: Run, by: int) -> Run:
    """The run with `by` added to each step, for a system that counts from 0."""
    if not by:
        return run
    moved = {name: {step + by: value for step, value in values.items()} for name, values in run.series.items()}
    remarks = [*run.remarks, f"its steps are counted {by:+d}"]
    return dataclasses.replace(run, series=moved, remarks=remarks)


def to_number(value: object) -> float | None:
    """As exporters write numbers: also `NaN`, `Infinity`, an empty cell for None; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(str(value).strip())
    except ValueError:
        return None


def spacing(steps: Sequence[int]) -> int:
    """The usual distance between neighbouring steps; 1 for fewer than two."""
    gaps = sorted(after - before for before, after in itertools.pairwise(steps))
    return gaps[len(gaps) // 2] if gaps else 1


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan
