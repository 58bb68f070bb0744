"""When things happened, in the order of the device that does them: marks that wait for nothing, read as seconds at a report.

On CUDA a mark is an event, four of them a step: the host's own clock would tell when work was asked for, not when it was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Seconds = float | Callable[[], float]
"""A number, or what gives it at a report: on CUDA it is known only when the device has come so far."""

Mark = Any
"""What a clock's `mark` gave: the host's time, or a CUDA event."""


class Clock(Protocol):
    """Takes marks and says what lies between them."""

    def mark(self) -> Mark:
        """Here, after all that this rank has asked of its device so far. Waits for nothing."""

    def between(self, begin: Mark, end: Mark) -> Seconds:
        """From one mark to a later one. To be read by `read`, at a report."""


class HostClock:
    """Of the CPU, where what was called has been done on return."""

    def mark(self) -> Mark:
        """The host's time."""
        return time.perf_counter()

    def between(self, begin: Mark, end: Mark) -> Seconds:
        """Known at once."""
        return float(end - begin)


class DeviceClock:
    """Of CUDA: events on the current stream. Its logic is tested with stand-ins of events; no GPU was at hand, and it has never run on one.

    What lies between two events is the device's own time, idle time included: a step that waited for its rows, and found the
    device with nothing to do, is longer by that; one whose rows came while the device was at work is not.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        """`event` makes one that keeps time; None: `torch.cuda.Event(enable_timing=True)`."""
        self._event = event or _event

    def mark(self) -> Mark:
        """An event, recorded behind what was launched so far."""
        event = self._event()
        event.record()
        return event

    def between(self, begin: Mark, end: Mark) -> Seconds:
        """Known when the device has passed the second event: reading it waits for that."""

        def seconds() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000  # of milliseconds

        return seconds


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no types here


def clock_here() -> Clock:
    """The device's where steps run on CUDA, else the host's."""
    return DeviceClock() if torch.cuda.is_available() else HostClock()


def read(seconds: Seconds) -> float:
    """The number; on CUDA this may wait for the device."""
    return seconds() if callable(seconds) else seconds
