"""Name the rank at fault when a collective fails: ranks send heartbeats over the store, and report why they stop or
where they hang.

A heartbeat a second a rank costs the store two small messages; a failing job takes 5 s more to say which rank it was.
Over gloo, whose collectives raise an error after their timeout; NCCL's own watchdog ends a process instead, and has
not been run here.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from torch import distributed

from production.errors import PackproofError

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a rank."""
SILENT_SECONDS = 5.0
"""Seconds without a heartbeat after which a rank counts as gone; a rank that is alive has that long to report where
it hangs.
"""
REPORTED_ELSEWHERE = "told by another rank"
"""Note of an error that another rank has raised in the same words: the error is printed once."""


class RankLost(PackproofError):  # noqa: N818 - says what happened
    """A collective failed because of another rank, which the error names."""


@contextlib.contextmanager
def report_lost_ranks() -> Iterator[None]:
    """Turn the error of a collective into RankLost with the ranks that are gone, that stopped and why, or that hang.

    Enter it in the default process group; with one rank it does nothing.
    """
    if distributed.get_world_size() == 1:
        yield
        return
    watch = _Watch()
    try:
        yield
    except BaseException as error:
        if isinstance(error, PackproofError | KeyboardInterrupt | SystemExit) or not is_of_a_collective(error):
            watch.stops_for(error)
            raise
        lost = watch.verdict()
        if lost is None:
            raise
        watch.marks_if_told(lost)
        raise lost from error
    finally:
        watch.end()


class _Watch:
    """Tells the store every second that this rank lives, and asks it about the others."""

    def __init__(self) -> None:
        self._store: Any = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - the one that init made
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
        # Jobs one after the other in one process group share its store.
        self._job = self._store.add(f"packproof/jobs/{self._rank}", 1)
        self._beat()
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="packproof-heartbeat", daemon=True)
        self._thread.start()

    def stops_for(self, error: BaseException) -> None:
        """Report why this rank stops, for the ranks that will wait for it."""
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.set(self._key("stopped", self._rank), _short(error))
            self.marks_if_told(error)

    def marks_if_told(self, error: BaseException) -> None:
        """Note on an error that another rank has raised it too."""
        with contextlib.suppress(Exception):
            if self._store.add(self._key("told", _short(error)), 1) > 1:
                error.add_note(REPORTED_ELSEWHERE)

    def verdict(self) -> RankLost | None:
        """Return which rank is at fault, after having waited for a heartbeat; None where no rank is known to be."""
        try:
            self._store.set(self._key("waited", self._rank), "")
            before = self._counts()
            time.sleep(SILENT_SECONDS / 5)  # others time out at about the same time
            others = [rank for rank in range(self._size) if rank != self._rank]
            for rank in others:
                if not self._said("waited", rank) and not self._said("stopped", rank):
                    self._store.set(self._key("asked", rank), "")
            time.sleep(SILENT_SECONDS * 4 / 5)
            after = self._counts()
            waited = {rank for rank in others if self._said("waited", rank) or self._said("waits", rank)}
            stopped = {rank: self._told("stopped", rank) for rank in others if self._said("stopped", rank)}
            hangs = {rank: self._told("hangs", rank) for rank in others if self._said("hangs", rank)}
        except Exception:  # noqa: BLE001 - whatever a store raises that nobody serves any more
            gone = "the store is gone, which the machine of rank 0 serves"
            return _lost(gone, "that machine")
        rest = [rank for rank in others if rank not in waited and rank not in stopped]
        gone_ranks = [rank for rank in rest if before[rank] == after[rank] and rank not in hangs]
        hung = [rank for rank in rest if rank not in gone_ranks]
        told = [f"rank {rank} stopped: {why}" for rank, why in stopped.items()]
        if gone_ranks:
            told.append(f"{_ranks(gone_ranks)} gone: no sign of life for {SILENT_SECONDS:g} s")
        for rank in hung if not told else ():
            place = f", but hangs at {hangs[rank]}" if rank in hangs else ""
            told.append(f"rank {rank} is alive and did not come to the collective that others wait in{place}")
        return _lost("; ".join(told), "that rank") if told else None

    def end(self) -> None:
        self._ended.set()
        self._thread.join(timeout=SILENT_SECONDS)

    def _run(self) -> None:
        is_asked = False
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                self._beat()
                if not is_asked and self._said("asked", self._rank):
                    is_asked = True
                    self._answer()
            except Exception:  # noqa: BLE001 - the store is gone, which a collective will find out
                return

    def _answer(self) -> None:
        """Answer ranks that have given this rank up: report where it is and, unless it waits as they do, end its
        process.
        """
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001 - the one way to see another thread's stack
        if frame is None:
            return
        stack = traceback.extract_stack(frame)
        if _is_waiting(stack):
            self._store.set(self._key("waits", self._rank), "")
            return
        self._store.set(self._key("hangs", self._rank), _place(stack))
        until = time.monotonic() + 2 * SILENT_SECONDS
        while time.monotonic() < until:  # others still ask whether this rank lives
            if self._ended.wait(HEARTBEAT_SECONDS):
                return
            with contextlib.suppress(Exception):  # the store may be gone, and this rank has to end all the same
                self._beat()
        lines = "".join(traceback.format_list(stack))
        said = f"{lines}failed: rank {self._rank} hangs at the call above: it did not come to a collective, and the others gave up\n"
        os.write(2, said.encode(errors="replace"))
        os._exit(1)

    def _said(self, what: str, rank: int) -> bool:
        return bool(self._store.check([self._key(what, rank)]))

    def _told(self, what: str, rank: int) -> str:
        return str(self._store.get(self._key(what, rank)).decode())

    def _beat(self) -> None:
        self._store.add(self._key("alive", self._rank), 1)

    def _counts(self) -> list[int]:
        return [int(self._store.add(self._key("alive", rank), 0)) for rank in range(self._size)]

    def _key(self, what: str, whose: int | str) -> str:
        return f"packproof/{self._job}/{what}/{whose}"


def _lost(what: str, whose: str) -> RankLost:
    return RankLost(
        what=what,
        where="a collective of the job",
        fix=f"see what {whose} printed last (killed for memory? a lost machine?), then start the job again: it goes on from "
        "its newest checkpoint",
    )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} {'are' if len(numbers) > 1 else 'is'}"


def _short(error: BaseException) -> str:
    return f"{'' if isinstance(error, PackproofError) else f'{type(error).__name__}: '}{error}"[:2000]


def _place(stack: traceback.StackSummary) -> str:
    """Return the innermost call, and the innermost call of this package where that is another."""
    at = [stack[-1], *(frame for frame in stack[-2::-1] if f"{os.sep}production{os.sep}" in frame.filename)][:2]
    return ", called from ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in at)


def _is_waiting(stack: traceback.StackSummary) -> bool:
    """Return whether a rank is in a collective itself: its own timeout is then some seconds away."""
    inner = stack[-1]
    is_torch = f"{os.sep}torch{os.sep}distributed{os.sep}" in inner.filename
    return is_torch or ".wait()" in linecache.getline(inner.filename, inner.lineno or 0)


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether an error is of a collective: backends raise RuntimeError, which only its text tells apart."""
    said = f"{type(error).__name__} {error}".lower()
    words = ("connection", "gloo", "nccl", "timed out", "timeout", "peer", "socket", "distbackend")
    return not isinstance(error, OSError) and any(word in said for word in words)
