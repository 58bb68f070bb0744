"""A rank's process from torchrun's environment to megatron-core's parallel state, and back; and who is missing when a collective fails."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from production.device.shim import cpu_shim
from production.errors import PackproofError
from production.parallel import Place, Sizes, parallel

HEARTBEAT_SECONDS = 1.0
"""Between two signs of life of a rank."""
SILENT_SECONDS = 5.0
"""A rank that gave none for so long is named as missing."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A rank that may train."""

    place: Place
    device: torch.device
    backend: str
    """`nccl` or `gloo`."""


class RankLost(PackproofError):  # noqa: N818 - says what happened
    """A collective failed because another rank is gone; names it."""


@contextlib.contextmanager
def launched(
    sizes: Sizes, *, device: str, timeout_seconds: int, seed: int, deterministic: bool = True
) -> Iterator[Launched]:
    """Join the world that torchrun started (or be one of one rank), lay it out, seed it; all undone on exit.

    `device` is `cpu`, `cuda` or `auto`. Raises PackproofError for a device that is not there or a world that the layout
    does not fit, RankLost where a rank vanishes while this one waits for it.
    """
    is_cuda = _is_cuda(device)
    _quiet()
    with contextlib.ExitStack() as undo:
        if not is_cuda:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            undo.enter_context(cpu_shim())
        else:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if deterministic:
            # Kernels that have no deterministic form say so instead of differing from run to run.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(mode=True, warn_only=is_cuda)
            undo.callback(torch.use_deterministic_algorithms, False)  # noqa: FBT003
        backend = "nccl" if is_cuda else "gloo"
        _join(backend, timeout_seconds)
        undo.callback(_leave)
        undo.enter_context(_naming_the_lost())
        place = undo.enter_context(parallel(sizes))
        _seed(seed, place)
        yield Launched(
            place=place,
            device=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"),
            backend=backend,
        )


def world_size() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_cuda(device: str) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise PackproofError(
            what="no CUDA device is visible", where="cluster.device", mend="set it to cpu, or run where there is one"
        )
    return device != "cpu" and torch.cuda.is_available()


def _join(backend: str, timeout_seconds: int) -> None:
    timeout = dt.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        distributed.init_process_group(backend, timeout=timeout)
        return
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def _leave() -> None:
    with contextlib.suppress(Exception):  # a group whose rank is gone cannot be left in order
        distributed.destroy_process_group()


def _seed(seed: int, place: Place) -> None:
    """As Megatron-LM: pipeline stages differ, tensor-parallel ranks in what they share out, replicas not at all."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415 - heavy

    of_stage = seed + 100 * place.pipeline_rank
    torch.manual_seed(of_stage)
    model_parallel_cuda_manual_seed(of_stage)
    torch.manual_seed(of_stage)  # on the CPU the tracker has moved the one generator there is


@contextlib.contextmanager
def _naming_the_lost() -> Iterator[None]:
    """Turns the error of a collective into RankLost where a rank has given no sign of life."""
    if distributed.get_world_size() == 1:
        yield
        return
    heart = _Heart()
    try:
        yield
    except (RuntimeError, distributed.DistBackendError) as error:
        if isinstance(error, PackproofError) or not _is_of_a_collective(error):
            raise
        if missing := heart.missing():
            raise RankLost(
                what=f"rank {', '.join(map(str, missing))} is gone: it gave no sign of life for {SILENT_SECONDS:g} s",
                where=f"rank {distributed.get_rank()}, waiting for it",
                mend="see what that rank printed last (killed for memory, a lost machine); then start the job again, which "
                "goes on from its newest checkpoint",
            ) from error
        raise
    finally:
        heart.stop()


class _Heart:
    """Tells the store every second that this rank lives, and asks it who has not."""

    def __init__(self) -> None:
        self._store: Any = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - the one that init made
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self._beat()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def missing(self) -> list[int]:
        """Ranks whose last sign of life is too old, after having waited for one."""
        before = self._counts()
        time.sleep(SILENT_SECONDS)
        after = self._counts()
        return [rank for rank in range(self._size) if rank != self._rank and before[rank] == after[rank]]

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=SILENT_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            try:
                self._beat()
            except Exception:  # noqa: BLE001 - the store goes with the rank that serves it
                return

    def _beat(self) -> None:
        self._store.add(f"packproof/alive/{self._rank}", 1)

    def _counts(self) -> list[int]:
        """Of each rank; 0 where the store itself is gone, which rank 0 serves."""
        try:
            return [int(self._store.add(f"packproof/alive/{rank}", 0)) for rank in range(self._size)]
        except Exception:  # noqa: BLE001 - as above
            return [0 if rank == 0 else rank - self._size - int(time.monotonic() * 1e3) for rank in range(self._size)]


def _is_of_a_collective(error: BaseException) -> bool:
    said = str(error).lower()
    return any(word in said for word in ("connection", "gloo", "nccl", "timed out", "timeout", "peer", "socket"))


def _quiet() -> None:
    """megatron-core says a dozen times that optional kernels are absent, and torch that names it calls are old."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
