"""The same targets in a world that something else has launched: one rank per process, results gathered on rank 0.

No parent watches here, so each rank watches itself: past a case's deadline, or when the launcher ends it because another rank
failed, it prints its stacks and exits.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from equivalence.workers import values
from equivalence.workers.failures import own_frames, where
from equivalence.workers.rank import alone
from equivalence.workers.worker import Worker, check_name, resolve

STUCK = 1
"""Exit status of a rank that did not finish in time."""


def run_launched(
    target: str,
    payloads: Iterable[Any],
    *,
    enter: str | None = None,
    entry: Any = None,
    deadline_s: float = 120.0,
    backend: str = "gloo",
) -> Iterator[list[Any] | None]:
    """Call `module:function` on every rank once per payload; on rank 0 yields what each rank returned, elsewhere None.

    The process group is made here from torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) with `backend`;
    results are gathered by gloo of their own group, so a target may use the default one as it likes. `enter` and `entry` are
    `open_world`'s, and here the context is left at the end. What a target raises goes through with a note of
    rank and case and ends the run: the other ranks may be waiting for this one. A rank whose case, or whose wait for the others'
    results, takes longer than `deadline_s` prints its stacks and exits with status 1.
    """
    check_name(target)
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=2 * deadline_s + 600))
    try:
        gathering = cast("ProcessGroup", torch.distributed.new_group(backend="gloo"))
        worker = Worker(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
        with _Watch(worker.rank, deadline_s) as watch, ExitStack() as stack:
            if enter is not None:
                check_name(enter)
                watch.start(f"{enter}, before the first case of {target}")
                entered = stack.enter_context(resolve(enter)(entry, worker))
                worker = dataclasses.replace(worker, entered=entered)
            for number, payload in enumerate(payloads):
                name = f"case {number} of {target}"
                watch.start(name)
                try:
                    result = alone(resolve(target), payload, worker)
                    encoded = values.dump(result)
                except Exception as error:
                    error.add_note(f"on rank {worker.rank} of {worker.size}, {name}")
                    raise
                watch.start(f"{name}, which it had finished: it waited for the others")
                everyone: list[Any] | None = [None] * worker.size if worker.rank == 0 else None
                torch.distributed.gather_object(encoded, everyone, dst=0, group=gathering)
                watch.stop()
                yield [values.load(data) for data in everyone] if everyone is not None else None
    finally:
        torch.distributed.destroy_process_group()


def plain(value: Any) -> Any:
    """Convert a result for JSON: tensors as dtype, shape and all values, dataclasses as their fields, other objects as their repr."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.tolist()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


class _Watch:
    """A thread that ends this process, with its stacks, when a case is late or SIGTERM comes.

    A Python handler would not run while the main thread waits in a collective; the signal's wake-up pipe is written even then.
    """

    def __init__(self, rank: int, deadline_s: float) -> None:
        self._rank = rank
        self._deadline_s = deadline_s
        self._name = "no case"
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._look, name="packproof-watch", daemon=True)

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGTERM, lambda *_: None)
        self._wake_up = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wake_up)
        signal.signal(signal.SIGTERM, self._handler)
        os.write(self._write, b"E")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def start(self, name: str) -> None:
        """Start the deadline of a case."""
        self._name = name
        os.write(self._write, b"C")

    def stop(self) -> None:
        """Stop the deadline."""
        os.write(self._write, b"N")

    def _look(self) -> None:
        running = False
        while True:
            ready, _, _ = select.select([self._read], [], [], self._deadline_s if running else None)
            if not ready:
                self._end(f"had not finished {self._name} after {self._deadline_s:g} s", STUCK)
            for byte in os.read(self._read, 4096):
                if byte == signal.SIGTERM:
                    self._end(f"was ended by SIGTERM in {self._name}", 128 + signal.SIGTERM)
                if byte == ord("E"):
                    return
                running = byte == ord("C") if byte in b"CN" else running

    def _end(self, what: str, status: int) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            _, _, others = file.read().partition("\n\n")  # without this thread, which comes first
        stack = own_frames(others)
        lines = [f"rank {self._rank} {what}, {where(stack)}", *(f"    {line}" for line in stack.splitlines())]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
        os._exit(status)
