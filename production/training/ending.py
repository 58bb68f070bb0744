"""What ends a run before its last step: a signal that asks for it, or a time by which it must have saved."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import distributed

Reason = Literal["finished", "data ended", "signal", "time limit"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a job to save and end: torchrun and Slurm send the first, Slurm's `--signal` may send the second."""


@contextlib.contextmanager
def asked_to_end() -> Iterator[list[str]]:
    """Collects the signals that ask for an end, instead of ending at once; the former handlers come back on exit."""
    asked: list[str] = []
    former = {
        each: signal.signal(each, lambda number, _frame: asked.append(signal.Signals(number).name)) for each in SIGNALS
    }
    try:
        yield asked
    finally:
        for each, handler in former.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)


class Ending:
    """Whether a run ends now, agreed on by all ranks: a signal reaches them at different steps, and clocks differ."""

    def __init__(self, *, asked: Sequence[str], must_save_by: str | None, started: float, device: torch.device) -> None:
        """`must_save_by` is `days:hours:minutes:seconds` after `started`, a time of time.monotonic."""
        self._asked, self._device = asked, device
        self._until = None if must_save_by is None else started + seconds(must_save_by)

    def why(self) -> Reason | None:
        """Collective over the world, and waits for the device; one all-reduce of one number."""
        is_late = self._until is not None and time.monotonic() > self._until
        wish = torch.tensor([2 if self._asked else 1 if is_late else 0], device=self._device)
        distributed.all_reduce(wish, op=distributed.ReduceOp.MAX)
        reasons: dict[int, Reason | None] = {0: None, 1: "time limit", 2: "signal"}
        return reasons[int(wish)]


def seconds(duration: str) -> int:
    """Of `days:hours:minutes:seconds`, as validated."""
    days, hours, minutes, rest = map(int, duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
