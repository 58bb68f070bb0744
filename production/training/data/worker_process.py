"""Fork a worker process that prepares samples ahead, and carry its results back through shared memory.

A result lies in anonymous memory whose descriptor is sent, and is read in one call: a row of 262,144 tokens is 7 MB,
for which a pipe needs a hundred calls, each with a turn at the training process's interpreter lock. Such memory is
freed with its last user: nothing is left over.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from production.errors import PackproofError
from production.library_warnings import quiet_fork
from production.training.data.dataset import Recipe, Wire
from production.training.data.order import Sample

MESSAGE_BYTES = 1 << 17
"""Bytes of a task at most; sockets take somewhat more in one piece."""
_ALIGNMENT = 64
_HEADER_BYTES = 8
_ENDS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""This process's ends of all workers' sockets: a later fork must not hold them open."""


class WorkerDied(PackproofError):  # noqa: N818 - says what happened
    """A worker process ended by itself, or was killed."""


class WorkerProcess:
    """Runs one worker: takes a task at a time over a socket, and returns results in the same order."""

    def __init__(self, number: int, recipe: Recipe[Any, Any]) -> None:
        """Fork the worker.

        A fork of a process with threads is safe for what this child does: the child reads files, tokenizes without
        threads, uses numpy and wraps arrays as tensors. The child never touches a device, a process group or OpenMP,
        and leaves by `os._exit`. The worker is forked and not spawned: a fork starts in 10 ms and shares the
        tokenizer's memory, where importing torch alone takes seconds.
        """
        self.number = number
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {"TOKENIZERS_PARALLELISM": "false"}  # before the fork: the library warns in the child otherwise
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        parent = os.getpid()
        try:
            with quiet_fork():
                self.pid = os.fork()
            if not self.pid:
                _run(recipe, theirs, self.socket, parent)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value
        theirs.close()
        _ENDS.add(self.socket)
        self.status: int | None = None

    @property
    def name(self) -> str:
        """Return the worker's name in errors."""
        return f"loader worker {self.number} (process {self.pid})"

    def send(self, samples: Sequence[Sample]) -> None:
        """Have these samples prepared. Raises OSError where the worker has ended."""
        self.socket.send(pickle.dumps([tuple(sample) for sample in samples], protocol=5))

    def receive(self) -> list[Wire | PackproofError] | None:
        """Return the next result; None where the worker has ended."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        except ConnectionError:
            return None
        if not descriptors:
            return None
        try:
            return _unpack(_read(descriptors[0]))
        finally:
            os.close(descriptors[0])

    def end(self) -> str:
        """Stop the worker if it still runs, and return how it ended."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # also where another process, forked since, holds it open
        self.socket.close()
        if not self.has_ended(0.5):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.has_ended(None)
        assert self.status is not None
        return _in_words(self.status)

    def has_ended(self, seconds: float | None) -> bool:
        """Return whether the worker has ended, after waiting at most the given seconds; None waits for the end."""
        if self.status is None:
            self.status = self._wait(seconds)
        return self.status is not None

    def _wait(self, seconds: float | None) -> int | None:
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG if until is not None else 0)
            except ChildProcessError:  # somebody else has waited for it
                return -1
            if pid:
                return status
            if until is None or time.monotonic() > until:
                return None
            time.sleep(0.002)


def serve(recipe: Recipe[Any, Any], connection: socket.socket) -> None:
    """Prepare incoming tasks until the other end is closed."""
    while task := connection.recv(MESSAGE_BYTES):
        samples = [Sample(*fields) for fields in pickle.loads(task)]  # noqa: S301 - from the process that forked this one
        found = [item if isinstance(item, PackproofError) else recipe.to_wire(item) for item in recipe.prepare(samples)]
        descriptor = _pack(found)
        try:
            socket.send_fds(connection, [b"+"], [descriptor])
        finally:
            os.close(descriptor)


def _run(recipe: Recipe[Any, Any], connection: socket.socket, others: socket.socket, parent: int) -> None:
    """Run the child.

    The child ends with its parent, also inside a long task, and ignores the signals that a job's processes share.
    """
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        for end in (others, *_ENDS):
            end.close()
        gc.freeze()  # what the parent made is not this process's to finalize
        torch.set_num_threads(1)
        threading.Thread(target=_follow, args=(connection, parent), daemon=True).start()
        serve(recipe, connection)
        code = 0
    except (BrokenPipeError, ConnectionError):
        code = 0  # the parent has gone
    except BaseException:  # noqa: BLE001 - nothing may run on into the parent's program
        os.write(2, f"loader worker {os.getpid()}:\n{traceback.format_exc()}".encode(errors="replace"))
    finally:
        os._exit(code)


def _follow(connection: socket.socket, parent: int) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


def _pack(found: list[Wire | PackproofError]) -> int:
    """Return a descriptor of shared memory with the pickled structure and, aligned behind it, the arrays' bytes."""
    buffers: list[pickle.PickleBuffer] = []
    structure = pickle.dumps(found, protocol=5, buffer_callback=buffers.append)
    raws = [buffer.raw() for buffer in buffers]
    head = pickle.dumps((structure, [raw.nbytes for raw in raws]), protocol=5)
    descriptor = os.memfd_create("packproof-rows", os.MFD_CLOEXEC)
    try:
        places = _places(_HEADER_BYTES + len(head), [raw.nbytes for raw in raws])
        os.ftruncate(descriptor, places[-1])
        _write(descriptor, memoryview(len(head).to_bytes(_HEADER_BYTES, "little") + head), 0)
        for raw, place in zip(raws, places, strict=False):
            _write(descriptor, raw, place)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unpack(view: memoryview) -> list[Wire | PackproofError]:
    """Return the object that `_pack` wrote; the arrays keep the memory alive."""
    end = _HEADER_BYTES + int.from_bytes(view[:_HEADER_BYTES], "little")
    structure, sizes = pickle.loads(view[_HEADER_BYTES:end])  # noqa: S301 - from a process that this one forked
    places = _places(end, sizes)
    buffers = [view[place : place + size] for place, size in zip(places, sizes, strict=False)]
    found: list[Wire | PackproofError] = pickle.loads(structure, buffers=buffers)  # noqa: S301
    return found


def _places(start: int, sizes: Sequence[int]) -> list[int]:
    """Return the offset of each buffer, and the total size."""
    places = [start + -start % _ALIGNMENT]
    for size in sizes:
        end = places[-1] + size
        places.append(end + -end % _ALIGNMENT)
    return places


def _write(descriptor: int, data: memoryview, place: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written


def _read(descriptor: int) -> memoryview:
    """Read the whole memory: a mapping would hold a descriptor, and a step may have a thousand of them."""
    view = memoryview(np.empty(os.fstat(descriptor).st_size, dtype=np.uint8))
    place = 0
    while place < view.nbytes:
        place += os.preadv(descriptor, [view[place:]], place)
    return view


def _in_words(status: int) -> str:
    if status == -1:
        return "it is gone"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in signal.Signals else f"signal {number}"
        hint = ", as when memory runs out" if number == signal.SIGKILL else ""
        return f"it was ended by {name}{hint}"
    return f"it ended with exit code {os.waitstatus_to_exitcode(status)}"
