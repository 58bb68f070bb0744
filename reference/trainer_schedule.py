"""The course of learning rate and weight decay over the steps of a run: megatron-core's formulas in its order, so that values are equal to the bit (docs/SPEC.md#training-step)."""

from __future__ import annotations

import math
from dataclasses import dataclass

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LAST_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
"""Of the final decay under WSD: warm-up, stable, decay."""
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All lengths are in steps, and count from the first step of the run. Raises ValueError for what no rule speaks of."""

    max_lr: float
    """The learning rate after warm-up."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    init_lr: float = 0.0
    """Learning rate at the beginning of the warm-up."""
    warmup_steps: int = 0
    decay_steps: int
    """Until `min_lr`, warm-up included."""
    style: str = "constant"
    """One of STYLES."""
    last_style: str | None = None
    """One of LAST_STYLES; only under WSD."""
    last_steps: int | None = None
    """Length of the final decay; only under WSD."""
    rows_per_step: int = 1
    """The global batch size: Megatron-LM counts in rows, which shows in the last place of a root. R-TRAIN-2."""
    weight_decay: float = 0.0
    """Weight decay of the first step."""
    end_weight_decay: float | None = None
    """Weight decay of step `weight_decay_steps` and all later steps; None: that of the first step."""
    weight_decay_style: str = "constant"
    """One of WEIGHT_DECAY_STYLES."""
    weight_decay_steps: int | None = None
    """Steps of the run, over which the weight decay grows, whatever the rate does; needed where it grows. R-TRAIN-3."""

    def __post_init__(self) -> None:
        """Refuse what no rule speaks of."""
        for value, choices in (
            (self.style, STYLES),
            (self.weight_decay_style, WEIGHT_DECAY_STYLES),
            (self.last_style, LAST_STYLES if self.style == "WSD" else (None,)),
        ):
            if value not in choices:
                raise ValueError(f"the schedule {self.style} must have one of {choices}, got {value!r}")
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise ValueError(
                f"warmup_steps must be at least 0 and below decay_steps, {self.decay_steps}, got {self.warmup_steps}"
            )
        if self.style == "WSD" and not 1 <= (self.last_steps or 0) <= self.decay_steps - self.warmup_steps:
            raise ValueError(
                f"last_steps must be from 1 to {self.decay_steps - self.warmup_steps} under WSD, got {self.last_steps}"
            )
        if self.weight_decay_steps is not None and self.weight_decay_steps < 1:
            raise ValueError(f"weight_decay_steps must be at least 1, got {self.weight_decay_steps}")
        if self.weight_decay_style == "constant" and self.end_weight_decay not in (None, self.weight_decay):
            raise ValueError(
                "the first and last weight decay must be equal where it is constant; choose linear or cosine"
            )

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 0. R-TRAIN-1, R-TRAIN-2."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * float(step) / float(self.warmup_steps)
        if self.style == "constant":
            return self.max_lr
        if step > self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            warmed, passed = self.warmup_steps * self.rows_per_step, step * self.rows_per_step
            return max(self.min_lr, self.max_lr * math.pow(max(warmed, 1), 0.5) / math.pow(max(passed, 1), 0.5))
        return self.min_lr + self._share(step) * (self.max_lr - self.min_lr)

    def weight_decay_at(self, step: int) -> float:
        """Return the weight decay of a step. R-TRAIN-3."""
        end = self.weight_decay if self.end_weight_decay is None else self.end_weight_decay
        if self.weight_decay_style == "constant":
            return end
        if self.weight_decay_steps is None:
            raise ValueError("weight_decay_steps must be given for a weight decay that grows over the run")
        if step > self.weight_decay_steps:
            return end
        passed = float(step) / float(self.weight_decay_steps)
        share = passed if self.weight_decay_style == "linear" else 0.5 * (math.cos(math.pi * (1 - passed)) + 1.0)
        return self.weight_decay + share * (end - self.weight_decay)

    def _share(self, step: int) -> float:
        """Return the fraction of the way from `min_lr` up to `max_lr`, from 1 down to 0."""
        if self.style == "WSD":
            assert self.last_steps is not None
            begin = self.decay_steps - self.last_steps
            if step <= begin:
                return 1.0
            return _fall(self.last_style or "", float(step - begin) / float(self.last_steps))
        passed = float(step - self.warmup_steps) / float(self.decay_steps - self.warmup_steps)
        return _fall(self.style, passed)


def _fall(style: str, passed: float) -> float:
    """Return 1 at the start of the decay and 0 at its end, by the style. R-TRAIN-2."""
    if style == "linear":
        return 1.0 - passed
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * passed) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, passed) - 1.0
    assert style == "minus_sqrt"
    return 1.0 - math.sqrt(passed)
