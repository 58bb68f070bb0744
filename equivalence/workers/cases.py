"""Many cases in one world, which is opened again after each failure: one outcome a case, whatever the ranks do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from equivalence.workers.failures import CaseFailed, Failure
from equivalence.workers.waiting import Deadlines
from equivalence.workers.world import World, open_world


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call on every rank of a world."""

    target: str
    """`module:function`, called as `function(payload, worker)`."""
    payload: Any = None
    """Whatever pickle takes; the same for every rank."""
    deadline_s: float | None = None
    """Replaces `Deadlines.case_s`."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of a case: the results of all ranks, or a failure."""

    case: Case
    results: tuple[Any, ...] | None
    """By rank; None if it failed."""
    failure: Failure | None
    """None if it did not."""
    seconds: float
    """Of wall time, with the opening of the world where this case needed it."""


class ReopeningWorld:
    """A world that lasts over failures, for a search that runs failing cases again and again; made by `reopening_world`."""

    openings: int
    """Number of times that a world was opened for the case."""

    def __init__(self, size: int, *, enter: str | None, entry: Any, deadlines: Deadlines | None) -> None:
        self.size = size
        self.openings = 0
        self._arguments = {"enter": enter, "entry": entry, "deadlines": deadlines}
        self._stack = ExitStack()
        self._world: World | None = None

    def run(self, case: Case) -> Outcome:
        """Run a case, in a new world if the last one died. Raises WorldNotOpened, as `open_world` does."""
        started = time.perf_counter()
        results, failure = None, None
        if self._world is None or not self._world.alive:
            self.close()
            self._world = self._stack.enter_context(open_world(self.size, **self._arguments))
            self.openings += 1
        try:
            results = tuple(self._world.run(case.target, case.payload, deadline_s=case.deadline_s))
        except CaseFailed as failed:
            failure = failed.failure
        return Outcome(case=case, results=results, failure=failure, seconds=time.perf_counter() - started)

    def close(self) -> None:
        """Close the world that is open, if any; the next case opens another."""
        self._stack.close()


@contextmanager
def reopening_world(
    size: int, *, enter: str | None = None, entry: Any = None, deadlines: Deadlines | None = None
) -> Iterator[ReopeningWorld]:
    """Context manager for a `ReopeningWorld` with `open_world`'s arguments; its first case opens the world."""
    world = ReopeningWorld(size, enter=enter, entry=entry, deadlines=deadlines)
    try:
        yield world
    finally:
        world.close()


def run_cases(
    size: int,
    cases: Iterable[Case],
    *,
    enter: str | None = None,
    entry: Any = None,
    deadlines: Deadlines | None = None,
) -> Iterator[Outcome]:
    """Run cases one after another in worlds of `size` ranks, a new one after each failure; one outcome a case, in order.

    Closing the iterator closes the world. Raises WorldNotOpened if one cannot be opened: no case is at fault then.
    """
    with reopening_world(size, enter=enter, entry=entry, deadlines=deadlines) as world:
        for case in cases:
            yield world.run(case)
