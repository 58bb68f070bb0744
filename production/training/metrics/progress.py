"""Show a run's progress: one bar that stays in place on a terminal, plain lines elsewhere, nothing on ranks other
than 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from production.training.metrics.step_numbers import StepNumbers

RECENT = 0.9
"""Weight of the earlier mean in the step time from which the remaining time is estimated: some twenty steps count."""


class RunProgress:
    """Shows progress over the steps of a run. A context manager; draws only at a step, and starts no thread."""

    def __init__(
        self,
        *,
        total_steps: int,
        finished_steps: int = 0,
        rank: int = 0,
        bar: bool = True,
        console: Console | None = None,
        plain_every_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show progress; `plain_every_seconds` is the least time between plain lines, and 0 prints one a step.

        First and last lines are always printed. Without `bar` neither the bar nor a line a step is shown; `say`
        always prints.
        """
        self._total = total_steps
        self._done = finished_steps
        self._console = Console(stderr=True) if console is None else console
        self._silent = rank != 0
        self._shows_steps = bar and not self._silent
        self._every = plain_every_seconds
        self._clock = clock
        self._told: float | None = None
        self._mean: float | None = None
        self._bar = Progress(
            TextColumn(
                "step {task.completed}/{task.total}",
                style="bold",
                table_column=Column(no_wrap=True, min_width=len(f"step {total_steps}/{total_steps}")),
            ),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[said]}"),
            console=self._console,
            auto_refresh=False,
            disable=not self._shows_steps or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=finished_steps, said="")

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()

    def step(self, report: StepNumbers) -> None:
        """Record that a step has ended."""
        self._done = report.step
        before = report.step_seconds if self._mean is None else self._mean
        self._mean = RECENT * before + (1 - RECENT) * report.step_seconds
        if not self._shows_steps:
            return
        said = self._said(report)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=report.step, said=said, refresh=True)
            return
        now = self._clock()
        if self._told is None or now - self._told >= self._every or report.step >= self._total:
            self._told = now
            self._console.print(Text(f"step {report.step}/{self._total}  {said}"), soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line of its own, above the bar: a validation, a checkpoint, a warning."""
        if not self._silent:
            self._bar.console.print(Text(text), soft_wrap=True)

    @property
    def seconds_left(self) -> float | None:
        """Return the remaining seconds at the pace of the latest steps; None before the first."""
        return None if self._mean is None else self._mean * max(0, self._total - self._done)

    def _said(self, report: StepNumbers) -> str:
        parts = ["nothing trained" if report.loss is None else f"loss {report.loss:.4f}"]
        parts += [f"mtp {depth} {loss:.4f}" for depth, loss in enumerate(report.mtp_losses, 1) if loss is not None]
        if report.gradient_norm is not None:
            parts.append(f"gradient norm {report.gradient_norm:.3g}")
        parts.append(f"{duration(report.step_seconds)} a step")
        parts.append(f"{compact(report.tokens_per_second)} tokens/s")
        if report.mfu is not None:
            parts.append(f"MFU {report.mfu:.1%}")
        if self.seconds_left:
            parts.append(f"{duration(self.seconds_left)} left")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def compact(number: float) -> str:
    """Return a number with three digits and k, M or G."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {letter}"
    return f"{number:.3g}"
