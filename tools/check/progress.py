"""Show how far a check is: one line that stays in place on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

PLAIN_SECONDS = 10.0
"""Seconds between two lines where there is no terminal."""
DRAWN_SECONDS = 0.2


class Progress:
    """Shows the running part with its count, rate and time left; writes to standard error only."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._title = ""
        self._started = self._told = clock()
        self._is_drawn = False

    def start(self, title: str) -> None:
        """Begin a part."""
        self.clear()
        self._title = title
        self._started = self._told = self._clock()
        self._write(f"{title} …")

    def update(self, done: int, total: int, unit: str) -> None:
        """Tell how many of `total` units are done."""
        now = self._clock()
        if now - self._told < (DRAWN_SECONDS if self._is_terminal else PLAIN_SECONDS):
            return
        self._told = now
        rate = done / max(now - self._started, 1e-9)
        left = (total - done) / rate if rate else float("inf")
        self._write(
            f"{self._title}: {done:,} of {total:,} {unit} ({100 * done / max(total, 1):.0f} %), {rate:,.1f} {unit}/s, "
            f"{_duration(left)} left"
        )

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        if self._is_terminal and self._is_drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
        self._is_drawn = False

    def _write(self, text: str) -> None:
        if self._is_terminal:
            self._stream.write(f"\r\x1b[2K{text}")
            self._is_drawn = True
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def _duration(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
