"""Time a step in the order of the device that runs it: events that wait for nothing, read as seconds at a report.

On CUDA a mark is an event, four of them a step: the host's clock would tell when work was launched, not when it was
done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Seconds = float | Callable[[], float]
"""A number, or a function that returns it at a report: on CUDA the number is known only when the device has come so
far.
"""

Event = Any
"""Result of a clock's `mark`: the host's time, or a CUDA event."""


class Clock(Protocol):
    """Takes marks and returns the time between them."""

    def mark(self) -> Event:
        """Return a mark behind all that this rank has launched so far. Waits for nothing."""

    def between(self, begin: Event, end: Event) -> Seconds:
        """Return the time from one mark to a later one, for `read` at a report."""


class HostClock:
    """Clock of the CPU, where a call has finished its work on return."""

    def mark(self) -> Event:
        """Return the host's time."""
        return time.perf_counter()

    def between(self, begin: Event, end: Event) -> Seconds:
        """Return the time between two marks, which is known at once."""
        return float(end - begin)


class DeviceClock:
    """Clock of CUDA: events on the current stream. Its logic is tested with stand-ins of events, and has never run on
    a GPU.

    The time between two events is the device's own time, idle time included. A step whose rows came late, while the
    device had nothing to do, is longer by the wait; a step whose rows came while the device was at work is not.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        """Use `event` to make an event that keeps time; None: `torch.cuda.Event(enable_timing=True)`."""
        self._event = event or _event

    def mark(self) -> Event:
        """Return an event, recorded behind what was launched so far."""
        event = self._event()
        event.record()
        return event

    def between(self, begin: Event, end: Event) -> Seconds:
        """Return a function that reads the time, and waits until the device has passed the second event."""

        def seconds() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000  # of milliseconds

        return seconds


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no types here


def clock_here() -> Clock:
    """Return the device's clock where steps run on CUDA, else the host's."""
    return DeviceClock() if torch.cuda.is_available() else HostClock()


def read(seconds: Seconds) -> float:
    """Return the number; on CUDA this may wait for the device."""
    return seconds() if callable(seconds) else seconds
