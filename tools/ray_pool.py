"""Run a function over tasks on a Ray cluster, and yield its results in the order of the tasks, a few at a time.

A task whose process or node is lost runs again elsewhere. Each task has one result, which is taken once and in order, so
that nothing is lost or counted twice. Ray comes with the extra `ray` and is imported only where it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from production.errors import PackproofError
from tools.counted import counted

INSTALL = "python -m pip install 'packproof[ray]'"
"""The command that installs what this engine needs."""
RETRIES = 3
"""Times that a task runs again after its process or its node was lost."""
LONGEST_SECONDS = 1_800.0
"""Seconds in which the oldest task must end: a cluster that lost its nodes would let us wait for ever."""
_LOOK_SECONDS = 10.0
_STORE_BYTES, _STORE_BYTES_EACH = 96 << 20, 24 << 20
"""Object store of a cluster of our own: the function with its tokenizer, and for each process a few tasks and results."""
_LONGEST_FOLDER = 40
"""Characters of Ray's folder: its sockets lie in it, and the path of a socket has 107 bytes at most."""
_LIBRARIES = ("tokenizers", "transformers", "jinja2", "numpy", "torch", "msgspec", "xxhash", "ray")
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # its words on a lost process, which would go to standard output
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about devices that nobody asked for
}
"""Variables that keep Ray from reporting and from printing."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's own switch for clusters of one machine: every server listens on the loopback device alone."""

_held: tuple[str, Callable[[Any], Any]] | None = None
"""In a process of the cluster: the function that it has, and its number."""


@dataclass(frozen=True, kw_only=True)
class _Origin:
    """Names the place where a command was started."""

    code: str
    """Digest of the code in use there."""
    host: str
    """Name of the machine."""


@dataclass(frozen=True, kw_only=True)
class RayPool:
    """A cluster that this process is connected to."""

    workers: int
    """Cores of the cluster; a task takes one."""
    where: str
    """The cluster, in words."""

    def run[Task, Result](
        self, function: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result, in the order of the tasks; at most two tasks a core wait.

        Raises what the function raises, and PackproofError where a task lost its process too often, where the cluster
        lost all cores, and where a node has other code or other libraries.
        """
        import ray  # noqa: PLC0415 - an extra

        held = [ray.put(function)]  # in a list it is a reference, which each process resolves once
        start = functools.partial(
            ray.remote(_run).options(max_retries=RETRIES).remote,
            held,
            _Origin(code=code_in_use(), host=socket.gethostname()),
        )
        left = iter(tasks)
        waiting: deque[tuple[Task, Any]] = deque()
        try:
            waiting.extend((task, start(task)) for task in itertools.islice(left, 2 * self.workers))
            while waiting:
                task, reference = waiting[0]
                done = self._result(reference)
                waiting.popleft()
                waiting.extend((further, start(further)) for further in itertools.islice(left, 1))
                yield task, done
        finally:
            for _, reference in waiting if ray.is_initialized() else ():  # the cluster may be left before the iterator
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.cancel(reference, force=True)

    def _result(self, reference: Any) -> Any:
        import ray  # noqa: PLC0415

        began = time.monotonic()
        while True:
            try:
                error, done = ray.get(reference, timeout=_LOOK_SECONDS)
            except ray.exceptions.GetTimeoutError:
                self._check_alive(time.monotonic() - began)
            except ray.exceptions.RayTaskError:
                raise  # a fault of our own, with its traceback there
            except ray.exceptions.RayError as lost:
                raise PackproofError(
                    what=f"a task was lost {counted(RETRIES + 1, 'time')} with its process or node ({_first_line(lost)})",
                    where=self.where,
                    fix="give the nodes more memory or fewer cores, and look into Ray's logs",
                ) from lost
            else:
                if error is not None:
                    raise error
                return done

    def _check_alive(self, waited: float) -> None:
        import ray  # noqa: PLC0415

        fix = "add nodes to the cluster, or end what keeps them busy"
        if not ray.cluster_resources().get("CPU"):
            raise PackproofError(what="the cluster has no core left", where=self.where, fix=fix)
        if waited > LONGEST_SECONDS:
            raise PackproofError(what=f"a task did not end in {LONGEST_SECONDS:,.0f} s", where=self.where, fix=fix)


@contextlib.contextmanager
def open_cluster(processes: int | None) -> Iterator[RayPool]:
    """Connect to the cluster that RAY_ADDRESS names, or start one of `processes` cores on this machine; leaving it ends both.

    A connection that this process has already is used and left open. Raises PackproofError where Ray is not installed,
    where the cluster cannot be reached, and where `processes` is given for a cluster that others started.
    """
    if importlib.util.find_spec("ray") is None:
        raise PackproofError(what="Ray is not installed", where="--engine ray", fix=f"install it with {INSTALL}")
    address = os.environ.get("RAY_ADDRESS", "")
    if address and processes is not None:
        raise PackproofError(
            what="the number of processes is that of the cluster's cores, so none can be given",
            where=f"--processes with RAY_ADDRESS={address}",
            fix="leave --processes out",
        )
    if address.startswith("ray://"):
        raise PackproofError(
            what="addresses of Ray's client are not taken",
            where=f"RAY_ADDRESS={address}",
            fix="run the command on a node of the cluster, with RAY_ADDRESS=HOST:PORT",
        )
    with contextlib.ExitStack() as stack:
        if address:
            stack.enter_context(_connected(address))
        else:
            stack.enter_context(_started(processes))
        pool = _pool(address)
        print(f"ray: {pool.where}", file=sys.stderr, flush=True)
        yield pool


def _pool(address: str) -> RayPool:
    import ray  # noqa: PLC0415

    nodes = sum(node["Alive"] for node in ray.nodes())
    workers = int(ray.cluster_resources().get("CPU", 0))
    where = f"{counted(workers, 'core')} on {counted(nodes, 'node')} {f'of {address}' if address else 'of this machine, since RAY_ADDRESS names no cluster'}"
    if workers < 1:
        raise PackproofError(what="the cluster has no core", where=where, fix="add nodes to the cluster")
    return RayPool(workers=workers, where=where)


@contextlib.contextmanager
def _started(processes: int | None) -> Iterator[None]:
    """Start a cluster of this machine, whose files go with it."""
    count = len(os.sched_getaffinity(0)) if processes is None else processes
    if count < 1:
        raise PackproofError(what=f"{count} processes", where="processes", fix="give at least 1")
    if "ray" not in sys.modules:  # which reads it when it is imported
        os.environ.update(LOOPBACK)
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="packproof-ray-", dir=base if len(base) < _LONGEST_FOLDER - 22 else "/tmp")  # noqa: S108 - for its short name
    try:
        with _initialized(
            address="local",
            num_cpus=count,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES + count * _STORE_BYTES_EACH,
            _temp_dir=folder,
        ):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    try:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=_LOOK_SECONDS):
            pass  # Ray itself tries for minutes
    except (OSError, ValueError) as error:
        raise PackproofError(
            what=f"no cluster answers there ({error})",
            where=f"RAY_ADDRESS={address}",
            fix="give HOST:PORT of a running cluster, or unset RAY_ADDRESS to use this machine alone",
        ) from None
    with _initialized(address=address):
        yield


@contextlib.contextmanager
def _initialized(**options: Any) -> Iterator[None]:
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    import ray  # noqa: PLC0415

    if ray.is_initialized():
        yield
        return
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main else signal.SIG_DFL
    try:
        _connect(ray, **options)
        if before not in {signal.SIG_DFL, None}:  # Ray sets its own, which ends this process without its last words
            signal.signal(signal.SIGTERM, before)
        yield
    finally:
        ray.shutdown()
        if in_main and before is not None:
            signal.signal(signal.SIGTERM, before)


def _connect(ray: Any, **options: Any) -> None:
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    except Exception as error:  # Ray raises bare ones, of which most are about time
        raise PackproofError(
            what=f"the cluster did not start or answer ({_first_line(error)})",
            where="--engine ray",
            fix="try again on a machine that is less busy, or look into Ray's logs",
        ) from error


def _run(held: list[Any], origin: _Origin, task: Any) -> tuple[Exception | None, Any]:
    """Run a task in a process of the cluster; errors that a user can fix come back as values, in their own class."""
    global _held  # noqa: PLW0603 - a process keeps the function for all its tasks
    try:
        number = held[0].hex()
        if _held is None or _held[0] != number:
            _begin(origin)
            import ray  # noqa: PLC0415

            _held = number, ray.get(held[0])
        return None, _held[1](task)
    except PackproofError as error:
        kind: Any = type(error)  # called with one text while it is handled, it keeps its fields
        node = socket.gethostname()
        return error if node == origin.host else kind(f"{error} (on node {node})"), None
    except OSError as error:
        return error, None


def _begin(origin: _Origin) -> None:
    import torch  # noqa: PLC0415

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
    torch.set_num_threads(1)
    if code_in_use() != origin.code:
        raise PackproofError(
            what="packproof, Python or a library is another version than where the command was started",
            where=f"node {socket.gethostname()}",
            fix="install the same packages on every node",
        )


@functools.cache
def code_in_use() -> str:
    """Return 32 hex digits of everything that decides a result: our code, Python, and the libraries that the code calls."""
    root = Path(__file__).resolve().parents[1]
    digest = xxhash.xxh3_128(platform.python_version().encode())
    for part in ("production", "tools"):
        for path in sorted((root / part).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    for name in _LIBRARIES:
        digest.update(f"{name} {version(name)}\0".encode())
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
