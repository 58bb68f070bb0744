"""Runs a first look in a process of its own while this one imports megatron-core, which takes longer than all of it: the
sample's rows in their own settings, and recorded outcomes, by every side but Megatron-LM's.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

from equivalence.runner.counters import Tally
from equivalence.runner.job import Job
from equivalence.runner.job_runners import run
from equivalence.runner.own_settings import OwnSettings
from equivalence.runner.plan import own_jobs, recorded_jobs
from production.library_warnings import quiet_fork

WITHOUT = "megatron_lm"
"""The side that is left out: its import is what the first look does not wait for."""
NEEDS_MEGATRON = ("partitions",)
"""Recorded outcomes that megatron-core's own arithmetic is held to as well."""
_FORK = multiprocessing.get_context("fork")

Ended = Callable[[Job, Tally], None]
"""Called with each job as it ends, from a thread that nothing else runs beside but imports."""


def first_jobs(
    own: OwnSettings | None, tokenizer: str, subjects: Sequence[str], *, has_recorded: bool
) -> Iterator[Job]:
    """Yield the jobs of a first look: rows of the file by all sides but one, recorded outcomes as the run's own plan has them, then
    the file's other rows.

    There are none where fewer than two sides are left.
    """
    sides = tuple(name for name in subjects if name != WITHOUT)
    if own is None or len(sides) < 2:
        return
    rows = (replace(job, kind="first_look", subjects=sides) for job in own_jobs(own, tokenizer, sides))
    yield from itertools.islice(rows, 1)
    if has_recorded:
        yield from (job for job in recorded_jobs(tuple(subjects)) if job.aim not in NEEDS_MEGATRON)
    yield from rows


@contextlib.contextmanager
def looking(jobs: Sequence[Job], ended: Ended) -> Iterator[list[Job]]:
    """Run the jobs beside what the context does, and end with the job that is running when the context does.

    Yields a list which holds the jobs that ended once the context is left; jobs that are not in it have not run. Enter it before
    anything is computed here: the process is forked.
    """
    done: list[Job] = []
    if not jobs:
        yield done
        return
    ours, theirs = _FORK.Pipe(duplex=False)
    stop = _FORK.Event()
    process = _FORK.Process(target=_look, args=(theirs, tuple(jobs), stop, os.getpid()))
    with quiet_fork():
        process.start()
    theirs.close()
    listener = threading.Thread(target=_listen, args=(ours, jobs, done, ended), name="packproof-first-look")
    listener.start()
    try:
        yield done
        stop.set()
        listener.join()
    finally:  # an exception or Ctrl-C waits for no job
        process.kill()
        process.join()
        listener.join()
        ours.close()


def _look(pipe: Connection, jobs: tuple[Job, ...], stop: Event, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number, job in enumerate(jobs):
        if stop.is_set() or os.getppid() != parent:
            return
        pipe.send((number, run(job)))


def _listen(pipe: Connection, jobs: Sequence[Job], done: list[Job], ended: Ended) -> None:
    """Take in results until the other process ends; what it could not do is left to the run."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, tally = pipe.recv()
            done.append(jobs[number])
            ended(jobs[number], tally)
