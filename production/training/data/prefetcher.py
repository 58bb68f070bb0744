"""Plan steps in order, deal their tasks to free workers, and hand the steps out in order, for the loader.

One thread deals out tasks and takes in results; a worker has two tasks at once, so that it never waits for the next
one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from production.errors import PackproofError
from production.training.data.order import Sample
from production.training.data.worker_process import WorkerDied, WorkerProcess

TASKS_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Holds the plan of one step of one rank."""

    step: int
    """0-based."""
    epoch: int
    """Epoch of the global batch's first sample, from 0."""
    samples: tuple[Sample, ...]
    """Samples of this rank, or of all ranks where the loader has no share."""
    weights: tuple[float, ...]
    """The sample mask."""
    consumed_samples: int
    """Samples that the whole job has consumed after this step."""


@dataclass(kw_only=True, eq=False)
class _Step:
    """Holds a step in preparation."""

    planned: Planned
    items: list[Any]
    """[samples]: each sample prepared, or its error."""
    missing: int
    """Items that are not prepared yet."""
    made: Any = None
    """The batch and its counts, once ready."""
    error: Exception | None = None
    is_ready: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class _Task:
    step: _Step
    first: int
    """First of the task's samples within the step."""
    samples: tuple[Sample, ...]


class Prefetcher:
    """Prepares `prefetch` steps ahead. Its own thread calls `plan` and `assemble`, one after the other."""

    def __init__(
        self,
        *,
        workers: Sequence[WorkerProcess],
        plan: Callable[[int], Planned | None],
        assemble: Callable[[Planned, Sequence[Any]], Any],
        group: int,
        prefetch: int,
        stuck_seconds: float,
        pin_memory: bool,
    ) -> None:
        """Take over the workers, which stop when the prefetcher is closed."""
        self._workers = tuple(workers)
        self._plan, self._assemble, self._group = plan, assemble, group
        self._prefetch, self._stuck_seconds = prefetch, stuck_seconds
        self._device = torch.cuda.current_device() if pin_memory else None
        self._given: dict[WorkerProcess, deque[_Task]] = {worker: deque() for worker in self._workers}
        self._changed = threading.Condition()
        self._steps: deque[_Step] = deque()
        self._tasks: deque[_Task] = deque()
        self._next = 0
        self._is_over = self._is_closed = False
        self._failure: BaseException | None = None
        self._owner = os.getpid()
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="packproof-loader", daemon=True)

    def seek(self, consumed_samples: int) -> None:
        """Continue after the given number of samples; steps in preparation for other samples are discarded."""
        with self._changed:
            self._steps.clear()
            self._tasks.clear()
            self._next, self._is_over = consumed_samples, False
            if not self._thread.is_alive() and not self._is_closed:
                self._thread.start()
        self._ring()

    def next(self) -> tuple[Planned, Any] | None:
        """Return the next step, waiting for it; None after the last.

        Raises the step's error, and again when the step is asked for again.
        """
        if os.getpid() != self._owner:
            fix = "open a loader in the process that asks it, after the fork"
            raise PackproofError(what="the loader belongs to another process", where="loader", fix=fix)
        until = time.monotonic() + self._stuck_seconds
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._is_closed:
                    raise PackproofError(what="the loader is closed", where="loader", fix="open a new loader")
                if self._steps and self._steps[0].is_ready:
                    break
                if self._is_over and not self._steps:
                    return None
                if time.monotonic() > until:
                    raise self._stuck()
                self._changed.wait(min(1.0, self._stuck_seconds))
            step = self._steps[0]
            if step.error is not None:
                raise step.error
            self._steps.popleft()
        self._ring()
        return step.planned, step.made

    def close(self) -> None:
        """Stop the workers and wait for their end; a fork of the owner leaves the workers alone."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._ring()
        if self._thread.is_alive():
            self._thread.join()
        for worker in self._workers:
            worker.end()
        self._steps.clear()
        self._tasks.clear()
        self._given.clear()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it has been rung
            os.write(self._wakeup_write, b".")

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            poll = select.poll()
            by_number = {worker.socket.fileno(): worker for worker in self._workers}
            for number in (self._wakeup_read, *by_number):
                poll.register(number, select.POLLIN)
            while self._deal():
                for number, _ in poll.poll():
                    if number == self._wakeup_read:
                        os.read(self._wakeup_read, 4096)
                    else:
                        self._take_in(by_number[number])
        except BaseException as error:  # noqa: BLE001 - the thread that waits has to hear of it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _deal(self) -> bool:
        """Plan as many steps as there is room for, and give each worker its tasks; return False once closed."""
        while (consumed := self._next_to_plan()) is not None:
            planned = self._plan(
                consumed
            )  # without the lock: an epoch's first step is shuffled here, and ready ones may be taken
            self._add(planned, consumed)
        with self._changed:
            while self._tasks and not self._is_closed:
                worker = min(self._workers, key=lambda one: len(self._given[one]))
                if len(self._given[worker]) >= TASKS_AHEAD:
                    break
                task = self._tasks.popleft()
                self._given[worker].append(task)
                try:
                    worker.send(task.samples)
                except OSError:
                    raise self._died(worker) from None
            return not self._is_closed

    def _next_to_plan(self) -> int | None:
        """Return the samples consumed before the next step that there is room for."""
        with self._changed:
            has_room = len(self._steps) < self._prefetch and not self._is_over and not self._is_closed
            return self._next if has_room else None

    def _add(self, planned: Planned | None, consumed: int) -> None:
        with self._changed:
            if consumed != self._next:  # gone on elsewhere meanwhile
                return
            if planned is None:
                self._is_over = True
                self._changed.notify_all()
                return
            self._next = planned.consumed_samples
            count = len(planned.samples)
            step = _Step(planned=planned, items=[None] * count, missing=count)
            self._steps.append(step)
            for first in range(0, count, self._group):
                self._tasks.append(_Task(step=step, first=first, samples=planned.samples[first : first + self._group]))

    def _take_in(self, worker: WorkerProcess) -> None:
        found = worker.receive()
        if found is None:
            raise self._died(worker)
        task = self._given[worker].popleft()
        step = task.step
        step.items[task.first : task.first + len(found)] = found
        step.missing -= len(found)
        with self._changed:
            if step.missing or step not in self._steps:  # gone on elsewhere meanwhile
                return
        try:
            step.made = self._assemble(step.planned, step.items)
            if self._device is not None:
                step.made = _pinned(step.made)
        except Exception as error:  # noqa: BLE001 - raised where the step is asked for
            step.error = error
        step.items.clear()
        with self._changed:
            step.is_ready = True
            self._changed.notify_all()

    def _died(self, worker: WorkerProcess) -> WorkerDied:
        doing = self._doing(worker)
        how = worker.end()
        fix = "see what it printed and how much memory there is; then resume from the last checkpoint"
        return WorkerDied(what=f"{how}, {doing}", where=worker.name, fix=fix)

    def _stuck(self) -> PackproofError:
        step = self._steps[0].planned.step if self._steps else "(none)"
        doing = "; ".join(f"{worker.name} {self._doing(worker)}" for worker in self._workers)
        return PackproofError(
            what=f"step {step} is not ready after {self._stuck_seconds:g} s, and all workers are alive: {doing}",
            where="loader",
            fix="raise stuck_seconds if a row may take that long; else prepare the rows with workers=0 to see where it hangs",
        )

    def _doing(self, worker: WorkerProcess) -> str:
        tasks = list(self._given[worker])
        if not tasks:
            return "with nothing to do"
        first = tasks[0]
        rows = ", ".join(str(sample.row) for sample in first.samples[:8])
        more = ", …" if len(first.samples) > 8 else ""
        return f"at step {first.step.planned.step}, source {first.samples[0].source}, rows {rows}{more}"


def _pinned(value: Any) -> Any:
    """Return the batch with every tensor in page-locked memory."""
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, tuple):
        return tuple(map(_pinned, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if any(isinstance(one, torch.Tensor | tuple) for one in fields.values()):
            return dataclasses.replace(value, **{name: _pinned(one) for name, one in fields.items()})
    return value
