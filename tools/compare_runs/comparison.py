"""Compare two runs over a window of steps: the numbers of the published comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equivalence.errors import InputError
from tools.compare_runs.aligned import Pair, paired_values
from tools.compare_runs.paired import PairedRatio, paired_ratio
from tools.compare_runs.readers.names import ROUTER_LOSSES
from tools.compare_runs.run import Run, mean


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps that are compared, both ends included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """Parse `3-20`, or `7` for one step. Raises InputError for another form."""
        first, dash, last = text.partition("-")
        try:
            found = cls(first=int(first), last=int(last) if dash else int(first))
        except ValueError:
            raise InputError(f"--steps {text}: say FIRST-LAST, such as 3-20") from None
        if found.last < found.first:
            raise InputError(f"--steps {text}: the last step must not be before the first")
        return found

    def among(self, steps: set[int]) -> list[int]:
        """Return the given steps that lie in the window, in rising order."""
        return sorted(step for step in steps if self.first <= step <= self.last)

    def __str__(self) -> str:
        """Return the window in the form that `parse` reads."""
        return f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Step times over the window's steps that both runs have, in seconds."""

    mean: tuple[float, float]
    steps: int
    paired: PairedRatio | None
    """Of the second run's time to the first one's; None for fewer than two steps."""

    @property
    def relative_throughput(self) -> float:
        """Throughput of the second run relative to the first."""
        return self.mean[0] / self.mean[1]

    @property
    def gap(self) -> float:
        """Seconds by which the second run's step is longer."""
        return self.mean[1] - self.mean[0]

    @property
    def gap_share(self) -> float:
        """`gap` relative to the first run's step."""
        return self.gap / self.mean[0]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Comparison of one series of two runs. Values that are not finite in either run are left out of means, and counted."""

    name: str
    steps: int
    """Steps that both runs have."""
    mean: float
    """Mean absolute difference."""
    largest: float
    """Largest absolute difference."""
    largest_at: int | None
    largest_relative: float
    """Largest absolute difference over the first run's value."""
    first_at: int | None
    """The first step at which the two are not equal; None where they are equal to the last recorded digit."""
    differing: int
    """Steps at which the two are not equal."""
    beyond_rounding_at: int | None
    """The first step at which they differ by more than rounding to the digits that were recorded can make."""
    beyond_rounding: int
    """Steps at which they do."""
    not_finite: tuple[tuple[int, ...], tuple[int, ...]]
    """Steps of each run at which the value is not a finite number."""

    @property
    def all_finite(self) -> bool:
        """Return whether every value of both runs is a finite number."""
        return not any(self.not_finite)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side; the first is what the second is held against."""

    runs: tuple[Run, Run]
    window: Window
    times: Times | None
    """None where a run has no step times."""
    differences: Sequence[Difference]
    """Over the window: loss, then depths and gradient norm where both runs have them."""
    wholes: Sequence[Difference]
    """The loss, then each depth's loss, over all steps that both runs have, also outside of the window."""
    span: tuple[int, int]
    """The first and the last of the loss's."""
    validation: Difference | None
    """Difference over all validations that both runs have; None without such validations, or if the runs average different things."""
    trained_by_one: Sequence[int]
    """Steps at which one run has a loss, and the other trained nothing."""
    remarks: Sequence[str]

    @property
    def loss(self) -> Difference:
        """Difference of the loss over the window."""
        return self.differences[0]

    @property
    def whole(self) -> Difference:
        """Difference of the loss over all steps that both runs have."""
        return self.wholes[0]

    @property
    def losses(self) -> Sequence[Difference]:
        """Differences of all comparable series of losses over all steps: the loss, depths, validations."""
        return [each for each in (*self.wholes, self.validation) if each is not None and each.steps]

    @property
    def equal(self) -> bool:
        """Return whether all losses of all series are equal at every step that both runs have."""
        return not self.trained_by_one and all(each.first_at is None for each in self.losses)

    @property
    def equal_but_for_rounding(self) -> bool:
        """Return whether every loss is equal up to rounding to the recorded digits."""
        return not self.trained_by_one and all(each.beyond_rounding_at is None for each in self.losses)

    @property
    def windowed_losses(self) -> Sequence[Difference]:
        """Differences of the loss and of each depth's loss, over the window."""
        return [each for each in self.differences if each.name.endswith("loss")]

    @property
    def all_finite(self) -> bool:
        """Return whether every loss of the window is a finite number, at depths too."""
        return all(each.all_finite for each in self.windowed_losses)

    def document(self) -> dict[str, Any]:
        """Return a value for `json.dumps(allow_nan=False)`, with NaN and infinities as strings."""
        times: dict[str, Any] | None = None
        if self.times is not None:
            times = dataclasses.asdict(self.times)
            times |= {
                "relative_throughput": self.times.relative_throughput,
                "gap_seconds": self.times.gap,
                "gap_percent": 100 * self.times.gap_share,
            }
        document = {
            "runs": [
                {"name": run.name, "source": run.source, "place": run.place, "remarks": list(run.remarks)}
                for run in self.runs
            ],
            "window": [self.window.first, self.window.last],
            "step_seconds": times,
            "differences": {each.name: _difference(each) for each in self.differences},
            "all_steps": _difference(self.whole),
            "losses_at_all_steps": {each.name: _difference(each) for each in self.losses},
            "equal": self.equal,
            "equal_but_for_rounding": self.equal_but_for_rounding,
            "trained_by_one": list(self.trained_by_one),
            "validation": None if self.validation is None else _difference(self.validation),
            "remarks": list(self.remarks),
        }
        found = plain(document)
        assert isinstance(found, dict)
        return found


def compare(first: Run, second: Run, window: Window) -> Comparison:
    """Return the comparison. Raises InputError where no step of the window has a loss in both runs."""
    pairs = {name: paired_values(first, second, name) for name in {*first.series} & {*second.series}}
    both = set(pairs.get("loss", ()))
    steps = window.among(both)
    if not steps:
        spans = " and ".join(f"{run.name} has {_span(run.steps('loss'))}" for run in (first, second))
        raise InputError(
            f"no step of {window} has a loss in both runs: {spans}; choose --steps, or shift with --offset-b"
        )
    depths = min(first.depths, second.depths)
    losses = ["loss", *(f"mtp_{depth}_loss" for depth in range(1, depths + 1))]
    losses += [name for name in ROUTER_LOSSES if pairs.get(name)]
    rates = [name for depth in range(1, depths + 1) if pairs.get(name := f"mtp_{depth}_acceptance_rate")]
    names = [*losses, *rates, *(["gradient_norm"] if pairs.get("gradient_norm") else [])]
    is_alike = not (first.validation and second.validation) or first.validation == second.validation
    validated = pairs.get("validation_loss") if is_alike else None
    return Comparison(
        runs=(first, second),
        window=window,
        times=_times(pairs.get("step_seconds", {}), window),
        differences=[
            _compared(name, {step: pairs[name][step] for step in window.among(set(pairs[name]))}) for name in names
        ],
        wholes=[_compared(name, pairs[name]) for name in losses],
        span=(min(both), max(both)),
        validation=_compared("validation_loss", validated) if validated else None,
        trained_by_one=_trained_by_one(first, second),
        remarks=_remarks(first, second, window, pairs),
    )


def _times(pairs: Mapping[int, Pair], window: Window) -> Times | None:
    found = [pairs[step] for step in window.among(set(pairs))]
    found = [pair for pair in found if all(math.isfinite(each) and each > 0 for each in (pair.first, pair.second))]
    if not found:
        return None
    before, after = [pair.first for pair in found], [pair.second for pair in found]
    steps = sum(pair.width for pair in found)
    means = [
        math.fsum(value * pair.width for value, pair in zip(each, found, strict=True)) / steps
        for each in (before, after)
    ]
    return Times(mean=(means[0], means[1]), steps=steps, paired=paired_ratio(before, after))


def _compared(name: str, pairs: Mapping[int, Pair]) -> Difference:
    gaps = {step: pair.gap for step, pair in pairs.items() if math.isfinite(pair.gap)}
    at = max(gaps, key=gaps.__getitem__) if gaps else None
    differing = [step for step, pair in pairs.items() if pair.first != pair.second]
    beyond = [step for step in differing if not pairs[step].gap <= pairs[step].allowed]
    relative = (gap / abs(pairs[step].first) for step, gap in gaps.items() if pairs[step].first)
    return Difference(
        name=name,
        steps=len(pairs),
        mean=mean(list(gaps.values())),
        largest=math.nan if at is None else gaps[at],
        largest_at=at,
        largest_relative=max(relative, default=math.nan),
        first_at=next(iter(differing), None),
        differing=len(differing),
        beyond_rounding_at=next(iter(beyond), None),
        beyond_rounding=len(beyond),
        not_finite=(
            tuple(step for step, pair in pairs.items() if not math.isfinite(pair.first)),
            tuple(step for step, pair in pairs.items() if not math.isfinite(pair.second)),
        ),
    )


def _trained_by_one(first: Run, second: Run) -> list[int]:
    """Return the steps at which one run has a loss that averages over steps in which the other run trained nothing."""
    found = set()
    for run, other in ((first, second), (second, first)):
        for step, value in other.series["loss"].items():
            width = other.width("loss", step)
            is_hit = any(each in run.untrained for each in range(step - width + 1, step + 1))
            # A mean over several steps is not a number where one of them trained nothing: that agrees.
            if is_hit and (width == 1 or math.isfinite(value)):
                found.add(step)
    return sorted(found)


def _remarks(first: Run, second: Run, window: Window, pairs: Mapping[str, Mapping[int, Pair]]) -> list[str]:
    remarks = [f"{run.name}: {remark}" for run in (first, second) for remark in run.remarks]
    covered = {
        each
        for step in window.among(set(pairs["loss"]))
        for each in range(step - pairs["loss"][step].width + 1, step + 1)
    } | (first.untrained & second.untrained)
    if missing := window.last - window.first + 1 - len(window.among(covered)):
        remarks.append(f"{missing} of the {window.last - window.first + 1} steps of the window are not in both runs")
    if empty := sorted(first.untrained & second.untrained):
        remarks.append(
            f"both runs trained nothing at {len(empty)} steps, first at step {empty[0]}: they have no loss there"
        )
    for name, what in (("consumed_samples", "rows so far"), ("learning_rate", "learning rates")):
        unlike = [
            step
            for step, pair in pairs.get(name, {}).items()
            if not (pair.gap <= pair.allowed or math.isclose(pair.first, pair.second, rel_tol=1e-9))
        ]
        if unlike:
            remarks.append(f"the runs differ in {what} from step {unlike[0]} on: they did not do the same work")
    if (
        first.series.get("validation_loss")
        and second.series.get("validation_loss")
        and first.validation != second.validation
    ):
        told = [f"{run.name}'s are {run.validation}" for run in (first, second) if run.validation]
        if len(told) == 2:
            remarks.append(f"validation losses are other numbers, and not compared: {'; '.join(told)}")
    for run in (first, second):
        if not run.steps("step_seconds"):
            remarks.append(f"{run.name} has no step times: they are not compared")
        if not run.steps("gradient_norm"):
            remarks.append(f"{run.name} has no gradient norms: they are not compared")
    if first.depths != second.depths:
        remarks.append(f"losses of {first.depths} and {second.depths} depths: those of the first are compared")
    return remarks


def _difference(found: Difference) -> dict[str, Any]:
    return dataclasses.asdict(found) | {"all_finite": found.all_finite, "equal": found.first_at is None}


def _span(steps: set[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no step"


def plain(value: Any) -> Any:
    """Return a value for JSON, with NaN and infinities as strings."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
