"""A world of ranks, forked, joined over a file store and gloo on the loopback interface, and killed as one process group.

A world serves one layout and dies with its first failure: destroying megatron-core's groups leaks, a new fork takes 0.1 s.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from equivalence.errors import SuiteError
from equivalence.workers import rank as child_side
from equivalence.workers import values
from equivalence.workers.failures import CaseFailed, Failure, RankReport, WorldNotOpened, in_order
from equivalence.workers.rank import FINISHED, RAISED, Raised, RankSetup
from equivalence.workers.seats import seats
from equivalence.workers.waiting import Child, Deadlines, await_answers, dump_stacks, printed, report
from equivalence.workers.worker import check_name
from production.library_warnings import quiet_fork

_parents_ends: set[Connection] = set()
"""Of all open worlds: a fork inherits them, and a rank that held another's would hide this process's end from it."""
_forking = threading.Lock()
_is_rank = False


class World:
    """Open ranks that answer cases; made by `open_world`, which closes it.

    Not to be shared by threads, and to be opened and closed by the same one: on Linux the kernel ends ranks with the
    thread that forked them.
    """

    size: int
    """Ranks."""
    alive: bool
    """Whether it takes cases; False after a failure and after its end."""

    def __init__(self, size: int, *, enter: str | None, entry: Any, deadlines: Deadlines) -> None:
        """Fork the ranks and wait until all have joined and entered. Raises WorldNotOpened."""
        self.size = size
        self.alive = False
        self._deadlines = deadlines
        self._children: list[Child] = []
        self._folder = Path(tempfile.mkdtemp(prefix="packproof-world-"))
        try:
            encoded = values.dump(entry)
            for rank in range(size):
                self._fork(rank, enter, encoded)
            name = f"opening a world with {enter}" if enter else "opening a world"
            self._await(name, time.monotonic(), deadlines.open_s, WorldNotOpened)
        except BaseException:
            self.close()
            raise
        self.alive = True

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in order; empty once closed. The first id is also the process group."""
        return tuple(child.pid for child in self._children)

    def run(self, target: str, payload: Any = None, *, deadline_s: float | None = None) -> list[Any]:
        """Call `module:function` as `function(payload, worker)` on every rank; what each returned, by rank.

        payload and results: whatever pickle takes; tensors cross as values (host, contiguous, detached). Every rank starts
        the case from the same seeds (`rank.alone`). `deadline_s` replaces `Deadlines.case_s` for this case.

        Raises CaseFailed if a rank raises, dies, or has not finished: within a second of a failure, `idle_s` after
        nothing moves, or at the deadline. The world is closed then. A case that ends well must leave no message
        in flight and no setting changed (of the latter some are checked: `StateLeftBehindError`).
        """
        check_name(target)
        if not self.alive:
            raise SuiteError(f"this world of {self.size} is closed; open another for {target}")
        data = values.dump((target, payload))
        try:
            started = time.monotonic()
            for child in self._children:
                child.send(data)
            within = self._deadlines.case_s if deadline_s is None else deadline_s
            return self._await(target, started, within, CaseFailed)
        except BaseException:  # also Ctrl-C: an answer that comes later would be taken for that of the next case
            self.close()
            raise

    def close(self) -> None:
        """Kill the process group, reap it, remove its folder. A second call does nothing."""
        self.alive = False
        if self._children:
            # Once for the group with what ranks have started, once each for one that had not joined the group yet.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._children[0].pid, signal.SIGKILL)
            for child in self._children:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        for child in self._children:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
            _parents_ends.discard(child.connection)
            child.connection.close()
        self._children = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fork(self, rank: int, enter: str | None, entry: bytes) -> None:
        global _is_rank  # noqa: PLW0603 - a fact of the process
        group = self._children[0].pid if self._children else 0
        place = RankSetup(
            rank=rank,
            size=self.size,
            folder=self._folder,
            parent=os.getpid(),
            group=group,
            enter=enter,
            entry=entry,
        )
        ours, theirs = Pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with _forking, quiet_fork():
            _parents_ends.add(ours)
            # Ctrl-C must neither reach the child before it is cut loose nor this process before it knows the child.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                pid = os.fork()
                if pid == 0:
                    _is_rank = True
                    child_side.serve(place, theirs, list(_parents_ends))
                with suppress(PermissionError, ProcessLookupError):  # the child did it first, whoever comes first
                    os.setpgid(pid, group)
                self._children.append(
                    Child(rank=rank, pid=pid, connection=ours, output=place.output, stacks=place.stacks)
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def _await(
        self, name: str, started: float, within_s: float, failed: type[CaseFailed | WorldNotOpened]
    ) -> list[Any]:
        why = await_answers(self._children, failed_tag=RAISED, within_s=within_s, deadlines=self._deadlines)
        results: list[Any] = []
        unread: RankReport | None = None
        for child in self._children:
            if (child.answer or b"").startswith(FINISHED):
                try:
                    results.append(values.load(memoryview(child.answer or b"")[1:]))
                except Exception as error:  # noqa: BLE001 - whatever the result's own class does when it is read
                    how = f"gave a result that cannot be read here: {type(error).__name__}: {error}"
                    unread = RankReport(rank=child.rank, state="raised", how=how, exception=type(error).__name__)
        if not why and unread is None:
            return results
        raise failed(self._failure(name, started, why, unread))

    def _failure(self, name: str, started: float, why: str, unread: RankReport | None) -> Failure:
        dump_stacks([child for child in self._children if child.waited_for])
        reports = []
        for child in self._children:
            raised = unread if unread is not None and unread.rank == child.rank else _raised(child, started)
            reports.append(report(child, started=started, raised=raised))
        ranks = in_order(reports)
        fault = f"rank {ranks[0].rank} {ranks[0].how}"
        given_up = f"{why}: {fault}" if ranks[0].state == "stuck" else fault
        return Failure(target=name, size=self.size, why=given_up, ranks=ranks)


@contextmanager
def open_world(
    size: int, *, enter: str | None = None, entry: Any = None, deadlines: Deadlines | None = None
) -> Iterator[World]:
    """Context manager for a world of `size` ranks of gloo, each in the context manager that `module:function`, called as
    `enter(entry, worker)`, returns (a CPU shim, megatron-core's parallel state); the value of that context manager is `worker.entered`.

    Ranks are killed at the end, without leaving `enter`: nothing of a rank outlives the process. Call `preload` first, or each
    world imports again. Raises InputError for an impossible size, SuiteError where running workers leave no room for the world
    or in a rank itself, WorldNotOpened (with `.failure`) if a rank fails before the first case.
    """
    if enter is not None:
        check_name(enter)
    if _is_rank:
        raise SuiteError("a rank cannot open worlds of its own")
    deadlines = deadlines or Deadlines()
    with seats(size, patience_s=deadlines.open_s):
        world = World(size, enter=enter, entry=entry, deadlines=deadlines)
        try:
            yield world
        finally:
            world.close()


def _raised(child: Child, started: float) -> RankReport | None:
    if not (child.answer or b"").startswith(RAISED):
        return None
    raised: Raised = values.load(memoryview(child.answer or b"")[1:])
    message = (raised.message.splitlines() or [""])[0]
    return RankReport(
        rank=child.rank,
        state="raised",
        how=f"raised {raised.exception} at {raised.place}{f': {message}' if message else ''}",
        stack=raised.stack,
        output=printed(child),
        exception=raised.exception,
        seconds=raised.at - started,
    )
