"""The child's side: cut loose from the parent's interpreter, join the world, then answer cases until the pipe ends.

It never returns and runs no exit handler: the parent's frames, handlers and buffers lie below it and are not its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, though not in its list of exports

from equivalence.workers import values
from equivalence.workers.worker import Worker, resolve

FINISHED, RAISED = b"F", b"R"
DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of all its threads."""

_LONG = timedelta(hours=24)
"""Of collectives: the parent gives up much earlier, with every rank's stack, which gloo's own timeout does not have."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Facts that a child needs to join its world."""

    rank: int
    size: int
    folder: Path
    """Of the world: its store, and each rank's output and stacks."""
    parent: int
    """Its process id."""
    group: int
    """The process group to join: rank 0's process id; 0 for rank 0 itself."""
    enter: str | None
    entry: bytes
    """The payload of `enter`, as `values.dump` wrote it."""

    @property
    def output(self) -> Path:
        """File of this rank's output during its case."""
        return self.folder / f"rank-{self.rank}.out"

    @property
    def stacks(self) -> Path:
        """File of faulthandler's dump of this rank."""
        return self.folder / f"rank-{self.rank}.stacks"


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception on a rank, as text: its own class may not be importable, or picklable, elsewhere."""

    exception: str
    """The type's name."""
    message: str
    """Its text, whole."""
    place: str
    """file:line of the innermost frame outside of torch."""
    stack: str
    """The traceback from the case's own first frame on."""
    at: float
    """When, by time.monotonic, which all processes of a machine share."""


class StateLeftBehindError(RuntimeError):
    """A case that changed the process for the cases after it."""


def serve(place: RankSetup, connection: Connection, foreign: list[Connection]) -> NoReturn:
    """Run a rank until the process ends. `foreign` are the parent's ends of this and other worlds' pipes, inherited and to be closed."""
    status = 1
    try:
        os.setpgid(0, place.group)
        _cut_loose(place)
        for other in foreign:
            other.close()
        _answer(place, connection)
        status = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        status = 0  # the parent closed the world or is gone
    except BaseException:  # noqa: BLE001 - below lie the parent's frames, which must not see it
        traceback.print_exc()
    finally:
        os._exit(status)


def _answer(place: RankSetup, connection: Connection) -> None:
    with ExitStack() as stack:
        worker = Worker(rank=place.rank, size=place.size)

        def opening() -> None:
            nonlocal worker
            _join(place)
            if place.enter is not None:
                manager = resolve(place.enter)(values.load(place.entry), worker)
                worker = replace(worker, entered=stack.enter_context(manager))

        connection.send_bytes(_outcome(opening, skipped=2))
        while True:
            data = connection.recv_bytes()
            os.ftruncate(1, 0)

            def case(data: bytes = data) -> Any:
                target, payload = values.load(data)
                return alone(resolve(target), payload, worker)

            connection.send_bytes(_outcome(case, skipped=3))


def alone(function: Any, payload: Any, worker: Worker) -> Any:
    """Call a target from fixed seeds (torch's on the host, random, numpy's); raise StateLeftBehindError if torch's settings differ afterwards.

    A case therefore gives the same alone as after a thousand others.
    """
    random.seed(0)
    torch.default_generator.manual_seed(0)  # not torch.manual_seed, whose call for CUDA costs more than a small case
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    before = _settings()
    result = function(payload, worker)
    after = _settings()
    if after != before:
        changed = ", ".join(
            f"{name}: {before[name]} became {now}" for name, now in after.items() if now != before[name]
        )
        raise StateLeftBehindError(
            f"the case must restore the settings that it changes, for the cases after it ({changed})"
        )
    return result


def _settings() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def _outcome(call: Any, *, skipped: int) -> bytes:
    """Return the result of a call, or its exception without the first `skipped` frames, which belong to this file."""
    try:
        return values.dump(call(), tag=FINISHED)
    except BaseException as error:  # noqa: BLE001 - a result to be reported, also SystemExit
        at, trace = time.monotonic(), error.__traceback__
        for _ in range(skipped):
            trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
        text = "".join(traceback.format_exception(type(error), error, trace))
        own = [frame for frame in traceback.extract_tb(trace) if "/torch/" not in frame.filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "in torch"
        raised = Raised(exception=type(error).__name__, message=str(error), place=place, stack=text, at=at)
        return values.dump(raised, tag=RAISED)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _join(place: RankSetup) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    for name, value in (("RANK", place.rank), ("WORLD_SIZE", place.size)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    store = FileStore(str(place.folder / "store"), place.size)
    torch.distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=_LONG)


def _cut_loose(place: RankSetup) -> None:
    """Undo what a fork inherits: signals, streams, tracing, warning filters, log handlers, threads."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, DUMP_SIGNAL):
        signal.signal(number, signal.SIG_DFL)
    _end_with(place.parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.settrace(None)  # coverage's tracer would count into memory that nobody reads
    threading.settrace(None)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(place.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - for the process's life
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    stacks = place.stacks.open("w")
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    warnings.resetwarnings()  # the filters are the parent's, pytest's say
    logging.getLogger().handlers[:] = [logging.StreamHandler(sys.stderr)]
    # What was loaded before the fork stays: looking through it again and again takes time, and copies its pages.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    torch.set_num_threads(1)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread ends; on other systems than Linux the end of the pipe signals that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
