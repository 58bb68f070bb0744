"""Run jobs in workers, forked from a parent that has imported and loaded everything, since a cold import takes 13 s.

A worker that dies ends the run with an error instead of a hang; Ctrl-C leaves it to the parent to say what ran.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from equivalence.errors import WorkerDiedError
from equivalence.runner.counters import Tally
from equivalence.runner.job import Job
from equivalence.runner.job_runners import run
from production.library_warnings import quiet_fork

POLL_SECONDS = 0.5


def run_jobs(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Tally] | None]:
    """Run jobs, in order of submission as workers are free; yields each as it ends, and None when nothing did for a while.

    With one worker everything runs in this process. Raises WorkerDiedError if a worker is killed. Closing the iterator ends
    all workers.
    """
    if workers == 1:
        for job in jobs:
            yield None
            yield job, run(job)
        return
    executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"), initializer=_start)
    try:
        with quiet_fork():
            waiting: dict[Future[Tally], Job] = {executor.submit(run, job): job for job in jobs}
        while waiting:
            done, _ = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                job = waiting.pop(future)
                try:
                    tally = future.result()
                except BrokenProcessPool as error:
                    raise WorkerDiedError(
                        f"a worker process ended while {job.title} or a job beside it ran: killed, or out of memory; "
                        "run again with --workers 1 to see where"
                    ) from error
                yield job, tally
            if not done:
                yield None
    finally:
        processes = list((executor._processes or {}).values())  # noqa: SLF001 - the executor cannot end a running job
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def default_workers() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What was loaded before the fork stays: looking through it again and again took a fifth of a worker's time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
