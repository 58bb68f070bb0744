"""At most eight live workers in one parent, over all of its open worlds: memory and sockets, not cores, are the limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from equivalence.errors import InputError, SuiteError

MOST_WORKERS = 8
"""Live worker processes at a time."""

_changed = threading.Condition()
_taken: dict[int, int] = {}
"""Seats by the thread that took them."""


@contextmanager
def seats(size: int, *, patience_s: float) -> Iterator[None]:
    """Hold `size` seats, waiting up to `patience_s` for other threads to release theirs.

    Raises InputError if there are never that many seats, SuiteError if this thread itself holds the missing seats, or if they stay taken.
    """
    if not 1 <= size <= MOST_WORKERS:
        raise InputError(f"a world must have 1 to {MOST_WORKERS} ranks, got {size}")
    thread = threading.get_ident()
    until = time.monotonic() + patience_s
    with _changed:
        while sum(_taken.values()) + size > MOST_WORKERS:
            if _taken.get(thread, 0) + size > MOST_WORKERS or not _changed.wait(max(0.0, until - time.monotonic())):
                raise SuiteError(
                    f"{sum(_taken.values())} workers live, and {size} more would exceed {MOST_WORKERS}: "
                    "close a world before opening the next"
                )
        _taken[thread] = _taken.get(thread, 0) + size
    try:
        yield
    finally:
        with _changed:
            _taken[thread] -= size
            if not _taken[thread]:
                del _taken[thread]
            _changed.notify_all()
