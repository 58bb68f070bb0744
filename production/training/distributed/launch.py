"""Take a rank's process from torchrun's environment to megatron-core's parallel state, and back."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from production.errors import PackproofError
from production.library_warnings import quiet_process
from production.model.device.shim import cpu_shim
from production.parallel.sizes import ParallelSizes, RankCoordinates, parallel
from production.training.distributed.environment import started_ranks, threads
from production.training.distributed.heartbeat import report_lost_ranks


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Holds what a rank needs to train."""

    place: RankCoordinates
    """Coordinates of the rank in the layout of ranks."""
    device: torch.device
    """Device of the rank's model."""
    backend: str
    """`nccl` or `gloo`."""


@contextlib.contextmanager
def launched(
    sizes: ParallelSizes, *, device: str, timeout_seconds: int, seed: int, deterministic: bool = True
) -> Iterator[Launched]:
    """Join the world that torchrun started, lay it out and seed it; undo everything on exit.

    Without torchrun the world has one rank; an existing default process group is kept. `device` is `cpu`, `cuda` or
    `auto`. Raises PackproofError for a device that is absent or a world that the layout does not fit,
    heartbeat.RankLost where a rank vanishes while this one waits for it.
    """
    is_cuda = _is_cuda(device)
    quiet_process()
    with contextlib.ExitStack() as undo:
        if not is_cuda:
            torch.set_num_threads(threads())
            undo.enter_context(cpu_shim())
        else:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if deterministic:
            # Kernels that have no deterministic form say so instead of differing from run to run.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(mode=True, warn_only=is_cuda)
            undo.callback(torch.use_deterministic_algorithms, False)  # noqa: FBT003
        backend = "nccl" if is_cuda else "gloo"
        if not distributed.is_initialized():
            _join(backend, timeout_seconds)
            undo.callback(_leave)
        undo.enter_context(report_lost_ranks())
        place = undo.enter_context(parallel(sizes, timeout_seconds=timeout_seconds))
        _seed(seed, place)
        yield Launched(
            place=place,
            device=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"),
            backend=backend,
        )


def world_size() -> int:
    """Return the ranks that torchrun started, or those of the existing process group; 1 without either."""
    return distributed.get_world_size() if distributed.is_initialized() else started_ranks() or 1


def _is_cuda(device: str) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise PackproofError(
            what="must be cpu or auto without a CUDA device, got cuda",
            where="cluster.device",
            fix="set it to cpu, or run on a machine with a CUDA device",
        )
    return device != "cpu" and torch.cuda.is_available()


def _join(backend: str, timeout_seconds: int) -> None:
    timeout = dt.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        try:
            distributed.init_process_group(backend, timeout=timeout)
        except (RuntimeError, ValueError, OSError) as error:
            raise PackproofError(
                what=f"the ranks did not find each other within {timeout_seconds} s: {str(error).splitlines()[0]}",
                where=f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '?')}",
                fix="start all ranks, with torchrun or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of one run",
            ) from error
        return
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def _leave() -> None:
    with contextlib.suppress(Exception):  # a group whose rank is gone cannot be left in order
        distributed.destroy_process_group()


def _seed(seed: int, place: RankCoordinates) -> None:
    """Seed as Megatron-LM does: pipeline stages differ, tensor-parallel ranks differ in what they divide, replicas do
    not differ.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415 - heavy

    of_stage = seed + 100 * place.pipeline_rank
    torch.manual_seed(of_stage)
    model_parallel_cuda_manual_seed(of_stage)
    torch.manual_seed(of_stage)  # on the CPU the tracker has moved the one generator there is
