"""Watch over one case from the parent: answers, deaths, and a world in which nothing moves any more.

A deadlock differs from slow work in the processor time of the world's process group, used or wanted, so a slow machine fails no case that
still computes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

from equivalence.workers.failures import (
    MOST_PRINTED,
    RankReport,
    State,
    ended,
    own_frames,
    where,
)
from equivalence.workers.rank import DUMP_SIGNAL

MOVING = 0.03
"""Share of one core below which a process counts as idle: a rank that polls a file store for another uses 0.01."""
_LOOK_SECONDS = 0.1
"""Between looks at the ranks' lives and processor time: an answer or an ended pipe is seen at once."""
_STACK_SECONDS = 2.0
"""Seconds to wait for the stacks of a stuck rank."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds of wall time for which the parent waits for ranks. They decide when a case has failed, and never its result."""

    open_s: float = 60.0
    """From the fork until every rank has joined and entered."""
    case_s: float = 120.0
    """For a whole case, unless `run` gets its own."""
    idle_s: float = 10.0
    """Unfinished ranks while the world, with what it started, uses no processor: a collective that waits for a rank which has
    finished or is elsewhere. So a case must not sleep as long, nor wait for something outside of its world."""
    after_failure_s: float = 1.0
    """For the others, once a rank has raised or died."""


@dataclass(kw_only=True)
class Child:
    """A rank as the parent sees it."""

    rank: int
    pid: int
    connection: Connection
    output: Path
    stacks: Path
    answer: bytes | None = None
    """Tag and value; None until it came."""
    death: str = ""
    """End of the process, if it has ended."""
    at: float = 0.0
    """When either was seen, by time.monotonic."""

    @property
    def waited_for(self) -> bool:
        """Return whether the rank has neither answered nor died."""
        return self.answer is None and not self.death

    def send(self, data: bytes) -> None:
        """Send bytes to the rank; a rank that is gone is noticed when the parent waits for it."""
        self.answer = None
        try:
            self.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            self.look()

    def receive(self) -> None:
        """Take its answer, or see how it ended."""
        try:
            self.answer = self.connection.recv_bytes()
            self.at = time.monotonic()
        except (EOFError, ConnectionResetError):
            self.look(patience_s=1.0)
            if not self.death:
                self.death = "closed its pipe to the parent and lives on"
                self.at = time.monotonic()

    def look(self, *, patience_s: float = 0.0) -> None:
        """See whether it ended, without reaping it: its id keeps the process group's name taken until all are killed."""
        until = time.monotonic() + patience_s
        while not self.death:
            try:
                end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self.death = "ended, and something else in this process took its exit status"
            else:
                if end is not None:
                    self.death = ended(end.si_code, end.si_status)
            if self.death:
                self.at = time.monotonic()
            elif time.monotonic() >= until:
                return
            else:
                time.sleep(0.002)


@dataclass(kw_only=True)
class Activity:
    """Activity of a process group, to distinguish waiting from working, also on a busy machine."""

    group: int
    since: float = field(default_factory=time.monotonic)
    used: dict[int, float] = field(default_factory=dict)
    """Processor seconds by process at `since`."""
    wanting: set[int] = field(default_factory=set)
    """Processes that were running, waiting for a core or for a disk at the last look."""

    def idle_seconds(self) -> float:
        """Return the seconds for which no process used more than MOVING of a core, or wanted a core at two checks in a row."""
        now, wanting_before = time.monotonic(), self.wanting
        used, self.wanting = _look_at(self.group)
        least = max(0.02, MOVING * (now - self.since))  # two ticks of the clock that counts it
        worked = any(seconds - self.used.get(pid, 0.0) > least for pid, seconds in used.items())
        if worked or self.wanting & wanting_before:
            self.since, self.used = now, used
        return now - self.since


def await_answers(children: Sequence[Child], *, failed_tag: bytes, within_s: float, deadlines: Deadlines) -> str:
    """Wait until every rank has answered well: ""; or until the case is to be given up: why, in a line."""
    started = time.monotonic()
    activity = Activity(group=children[0].pid)
    next_look = started + _LOOK_SECONDS
    failed_at: float | None = None
    while pending := [child for child in children if child.waited_for]:
        ready = wait([child.connection for child in pending], timeout=max(0.0, next_look - time.monotonic()))
        for child in pending:
            if child.connection in ready:
                child.receive()
        failed = [child for child in children if child.death or (child.answer or b"").startswith(failed_tag)]
        now = time.monotonic()
        if failed and failed_at is None:
            failed_at = now
        if failed_at is not None and now - failed_at >= deadlines.after_failure_s:
            break
        if now >= next_look:
            for child in pending:
                child.look()
            next_look = now + _LOOK_SECONDS
            if now - started >= within_s:
                return f"not finished after {within_s:g} s"
            if (idle := activity.idle_seconds()) >= deadlines.idle_s:
                return f"nothing has moved for {idle:.1f} s"
    return "a rank failed" if failed_at is not None or any(_bad(child, failed_tag) for child in children) else ""


def report(child: Child, *, started: float, raised: RankReport | None) -> RankReport:
    """Return the report of one rank, `raised` if its answer is an exception; `dump_stacks` has been called for stuck ranks."""
    state: State
    stack = own_frames(_tail(child.stacks, None))
    if raised is not None:
        return raised
    if child.death:
        state, how = "died", child.death + (f" {where(stack)}" if stack else "")
    elif child.answer is not None:
        state, how, stack = "finished", "had finished", ""
    else:
        state, how = "stuck", f"had not finished: {where(stack)}" if stack else "had not finished, and gave no stack"
    seconds = (child.at if state != "stuck" else time.monotonic()) - started
    return RankReport(rank=child.rank, state=state, how=how, stack=stack, output=printed(child), seconds=seconds)


def printed(child: Child) -> str:
    """Return the end of a rank's output during its case."""
    return _tail(child.output, MOST_PRINTED)


def dump_stacks(children: Sequence[Child]) -> None:
    """Have each of these write the stacks of all its threads; also one that waits in C does, a stopped one does not."""
    sizes: dict[int, int] = {}
    for child in children:
        os.kill(child.pid, DUMP_SIGNAL)  # not reaped yet, so the id is its own
    until = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < until:
        time.sleep(0.05)
        now = {child.rank: child.stacks.stat().st_size if child.stacks.exists() else 0 for child in children}
        if now == sizes and all(now.values()):
            return
        sizes = now


def _bad(child: Child, failed_tag: bytes) -> bool:
    return bool(child.death) or (child.answer or b"").startswith(failed_tag)


def _tail(path: Path, characters: int | None) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    if characters is None or len(text) <= characters:
        return text
    return f"[{len(text) - characters} characters before]…{text[-characters:]}"


def _look_at(group: int) -> tuple[dict[int, float], set[int]]:
    """Return the processor seconds of each process of a group (ranks, and processes that they started), and the processes that want a core."""
    seconds: dict[int, float] = {}
    wanting: set[int] = set()
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group:
                process = psutil.Process(pid)
                times = process.cpu_times()
                seconds[pid] = times.user + times.system
                if process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                    wanting.add(pid)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    return seconds, wanting
