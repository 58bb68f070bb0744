"""Decide when a run ends: at its length, at a signal, or at a time by which it must have saved."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from production.training.config.schema.sections import Sft

Reason = Literal["finished", "data ended", "signal", "time limit"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a job to save and end: torchrun and Slurm send the first, Slurm's `--signal` may send the second."""


def length_reached(step: int, sft: Sft) -> str:
    """Return which of the two limits ended a run at the given step; a resumed run may be past a lowered limit."""
    is_steps = sft.max_num_steps is not None and step >= sft.max_num_steps
    return f"sft.max_num_steps: {sft.max_num_steps}" if is_steps else f"sft.max_num_epochs: {sft.max_num_epochs}"


def nothing_left(step: int, total: int, *, reason: Reason, why: str) -> str:
    """Return the note on a resumed run of `total` steps that is at its end, or past it."""
    limit = why.replace(": ", " ") if reason == "finished" else f"its end ({why})"
    return f"step {step} is already {'past' if step > total else 'at'} {limit}: nothing to train"


@contextlib.contextmanager
def graceful_shutdown() -> Iterator[list[str]]:
    """Collect the signals that ask for an end, instead of ending at once; the former handlers come back on exit."""
    asked: list[str] = []
    former = {
        each: signal.signal(each, lambda number, _frame: asked.append(signal.Signals(number).name)) for each in SIGNALS
    }
    try:
        yield asked
    finally:
        for each, handler in former.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)


class Shutdown:
    """Decides whether a run ends now, on all ranks alike: a signal reaches ranks at different steps, and clocks
    differ.

    The ranks' votes travel with the numbers of a report, so that a vote costs no message of its own:
    `metrics.rank_stats.measured` reads the largest vote of all ranks, and `trainer` ends the run by `stop_reason`.
    """

    def __init__(self, *, asked: Sequence[str], must_save_by: str | None, started: float) -> None:
        """Start the clock: `must_save_by` is `days:hours:minutes:seconds` after `started`, a time of time.monotonic."""
        self._asked = asked
        self._until = None if must_save_by is None else started + seconds(must_save_by)

    def stop_vote(self) -> int:
        """Return this rank's vote: 2 for a signal, 1 for the time, 0 otherwise."""
        is_late = self._until is not None and time.monotonic() > self._until
        return 2 if self._asked else 1 if is_late else 0


def stop_reason(stop_vote: int) -> Reason | None:
    """Return why a run ends after a report, of which `stop_vote` is the largest of all ranks: the same on all."""
    reasons: dict[int, Reason | None] = {0: None, 1: "time limit", 2: "signal"}
    return reasons[stop_vote]


def seconds(duration: str) -> int:
    """Return the seconds of a validated `days:hours:minutes:seconds`."""
    days, hours, minutes, rest = map(int, duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
