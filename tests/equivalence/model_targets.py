"""What the tests of training steps enter on ranks, by name: faults in production."""

import contextlib
import os
import signal
from pathlib import Path
from unittest import mock

from equivalence.trainers.production_step import layout


def dies_once(entry, worker):
    """Rank 1 is killed in its first step; `entry` is (sizes, the path of a file that says it has happened)."""
    return _once(entry, worker, is_here=worker.rank == 1, fault=lambda: os.kill(os.getpid(), signal.SIGKILL))


def fails_once_alone(entry, worker):
    """The first step on one rank raises; `entry` as that of `dies_once`."""

    def fault():
        raise RuntimeError("alone")

    return _once(entry, worker, is_here=worker.size == 1, fault=fault)


@contextlib.contextmanager
def _once(entry, worker, *, is_here, fault):
    sizes, marker = entry
    from production.training import step

    own = step.forward_backward

    def forward_backward(*args, **options):
        if is_here and not Path(marker).exists():
            Path(marker).touch()
            fault()
        return own(*args, **options)

    with layout(sizes, worker) as place, mock.patch.object(step, "forward_backward", forward_backward):
        yield place


def compiled_functions(case, worker):
    """How many functions torch's compiler looks at in a step."""
    from torch._dynamo.utils import counters

    from equivalence.trainers.production_step import run

    run(case, worker)
    return counters["frames"]["total"]


@contextlib.contextmanager
def one_segment(sizes, worker):
    """Attention is told that the row is one segment."""
    from production.parallel import microbatches

    own = microbatches._thd

    def thd(cu_seqlens, _max_seqlen, total, device):
        whole = cu_seqlens[[0, -1]]
        return own(whole, int(whole[-1]), total, device)

    with layout(sizes, worker) as place, mock.patch.object(microbatches, "_thd", thd):
        yield place


@contextlib.contextmanager
def wrong_divisor(sizes, worker):
    """The online path divides by more than it trained."""
    from production import loss

    with layout(sizes, worker) as place, mock.patch.object(loss, "ONLINE_EPSILON", 1.0):
        yield place


@contextlib.contextmanager
def same_rows(sizes, worker):
    """Every data-parallel rank takes the rows of the first."""
    from production.rows import batch as batches

    own = batches.take_rank

    def take_rank(batch, *, rank, size):  # noqa: ARG001 - the fault
        return own(batch, rank=0, size=size)

    with layout(sizes, worker) as place, mock.patch.object(batches, "take_rank", take_rank):
        yield place
