"""Make NeMo-RL's modules find what a rank of a run has: a context-parallel group, a tensor-parallel group of one, the cut's index."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

from megatron.core import parallel_state, utils
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from equivalence.checks.cuts.loss import world_of_one
from equivalence.trainers.megatron_step import partitioned_indices


@contextlib.contextmanager
def rank_of(size: int, rank: int) -> Iterator[None]:
    """Context manager for what needs the size and the rank of its context-parallel group, and sends nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    kernel = utils.tex
    utils.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    try:
        with _groups(context=distributed.group.WORLD, tensor=None):
            yield
    finally:
        utils.tex = kernel
        distributed.destroy_process_group()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Context manager for a run of one rank, whose groups are real and hold that rank alone."""
    with world_of_one() as group, _groups(context=group, tensor=group):
        yield


@contextlib.contextmanager
def _groups(**groups: object) -> Iterator[None]:
    names = {name: f"_{name.upper()}_{'MODEL_' if name == 'tensor' else ''}PARALLEL_GROUP" for name in groups}
    before = {name: getattr(parallel_state, name) for name in names.values()}
    for name, group in groups.items():
        setattr(parallel_state, names[name], group)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
