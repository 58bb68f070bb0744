"""What the tests of workers run on ranks, by name."""

import contextlib
import ctypes
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    name: str
    value: torch.Tensor


def summed(payload, worker):
    total = torch.tensor(payload["numbers"]).sum() * (worker.rank + 1)
    dist.all_reduce(total)
    return total


def place(payload, worker):
    return worker.rank, worker.size, dist.get_rank(), dist.get_world_size(), os.getpid(), worker.entered, payload


def kinds(_payload, worker):
    return {
        "bfloat16": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
        "float64": torch.tensor([[0.1, float("inf")]], dtype=torch.float64),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "scalar": torch.tensor(worker.rank, dtype=torch.int32),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "gradient": (torch.ones(2, requires_grad=True) * 3),
        "verdict": Verdict(name=f"rank {worker.rank}", value=torch.tensor([worker.rank])),
        "plain": [None, 1, 2.5, "text", b"bytes", (True,), {3}],
        "large": torch.arange(200_000, dtype=torch.float64),
    }


def doubled(payload, _worker):
    payload["tensor"] *= 2  # what crosses owns its memory
    return payload["tensor"]


def drawn(_payload, _worker):
    return torch.rand(2), random.random(), float(np.random.rand())  # noqa: NPY002 - the state that a rank sets


def modules(_payload, _worker):
    return set(sys.modules)


def warned(_payload, _worker):
    import warnings

    warnings.warn("a warning is printed in a rank, not raised", stacklevel=1)
    return sys.gettrace() is None, threading.active_count()


def raises(payload, worker):
    print("printed before the fault by", worker.rank)
    if worker.rank == payload:
        raise ValueError("boom\nand more")
    dist.all_reduce(torch.ones(1))


def leaves_early(payload, worker):
    print("printed before the wait by", worker.rank)
    if worker.rank != payload:
        dist.all_reduce(torch.ones(1))


def waits_elsewhere(_payload, worker):
    if worker.rank == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        dist.all_reduce(torch.ones(1))


def killed(payload, worker):
    if worker.rank == payload:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def exits(payload, worker):
    if worker.rank == payload:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def crashes(payload, worker):
    if worker.rank == payload:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(1))


def quits(payload, worker):
    if worker.rank == payload:
        sys.exit("it had enough")


def computes(payload, worker):
    until = time.process_time() + payload if worker.rank == 0 else 0
    while time.process_time() < until:
        pass
    dist.all_reduce(torch.ones(1))
    return worker.rank


def cannot_be_sent(_payload, worker):
    return (lambda: None) if worker.rank == 1 else None


class Unreadable:
    def __reduce__(self):
        return os.listdir, ("/no/such/folder",)


def cannot_be_read(_payload, worker):
    return Unreadable() if worker.rank == 1 else None


def leaves_float64(payload, worker):
    if worker.rank == payload:
        torch.set_default_dtype(torch.float64)


def starts_a_process(_payload, worker):
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]).pid if worker.rank else 0


def current_device(_payload, _worker):
    return str(torch.cuda.current_device()), torch.ones(1, device="cuda").device.type


def sleeps(payload, _worker):
    time.sleep(payload)


@contextlib.contextmanager
def entered(entry, worker):
    if entry.get("raises") == worker.rank:
        raise ValueError("boom in enter")
    yield {"rank": worker.rank, **entry}


@contextlib.contextmanager
def patched(_entry, _worker):
    from production.model.device.shim import cpu_shim

    with cpu_shim():
        yield
