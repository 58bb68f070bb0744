"""Run a function over tasks in forked processes, and yield its results in the order of the tasks, a few at a time."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from production.errors import PackproofError
from production.library_warnings import quiet_fork

_PR_SET_PDEATHSIG = 1
_function: Callable[[Any], Any] | None = None
"""Set before the processes are forked, so that they share what it holds: a tokenizer, an open file."""


class OrderedPool(Protocol):
    """Runs a function over tasks in several places and yields its results in the order of the tasks."""

    @property
    def workers(self) -> int:
        """Tasks that run at once."""

    def run[Task, Result](
        self, function: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result, in the order of the tasks, a few at a time."""


@dataclass(frozen=True, kw_only=True)
class ProcessPool:
    """Forked processes of this machine."""

    workers: int
    """Processes; 1 forks none."""

    def run[Task, Result](
        self, function: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Run as `run_in_order` does."""
        return run_in_order(function, tasks, self.workers)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_in_order[Task, Result](
    function: Callable[[Task], Result], tasks: Iterable[Task], processes: int
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result, in the order of the tasks; at most two tasks a process wait.

    One process forks none. A fork beside threads is safe for what the processes do here: they read files, tokenize
    without threads and use numpy. They end with the thread that takes the results, however it ends. Raises what the function raises, and PackproofError where a process was killed or
    `processes` is below 1.
    """
    if processes < 1:
        raise PackproofError(what=f"must be at least 1, got {processes}", where="processes", fix="give at least 1")
    if processes == 1:
        for task in tasks:
            yield task, function(task)
        return
    global _function  # noqa: PLW0603 - what is forked is found by its name
    _function = function
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process has one core; the library warns of a fork otherwise
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("fork"), initializer=_begin, initargs=(os.getpid(),)
    )
    waiting: deque[tuple[Task, Future[Result]]] = deque()
    left = iter(tasks)
    try:
        with quiet_fork():
            for task in itertools.islice(left, 2 * processes):
                waiting.append((task, pool.submit(_run, task)))
        while waiting:
            task, result = waiting.popleft()
            done = result.result()
            for further in itertools.islice(left, 1):
                waiting.append((further, pool.submit(_run, further)))
            yield task, done
    except KeyboardInterrupt:
        for process in list((pool._processes or {}).values()):  # noqa: SLF001 - no public way before Python 3.14
            process.kill()  # a task may take long, and nobody waits for its result
        raise
    except BrokenProcessPool:
        raise PackproofError(
            what="a process was ended from outside, as the kernel does when memory runs out",
            where=f"{processes} processes",
            fix="give fewer processes (--processes), or more memory",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        _function = None
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM")
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _begin(parent: int) -> None:
    """Begin a process: it ends with its parent, also with one that is killed, and leaves the terminal's Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
    torch.set_num_threads(1)


def _run(task: Any) -> Any:
    assert _function is not None
    return _function(task)
