"""All faults of the layout kind by name, and what a rank of a world enters to have one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from equivalence.mutants.cut_faults import CUT_MUTANTS
from equivalence.mutants.deal_faults import DEAL_MUTANTS
from equivalence.mutants.feed_faults import FEED_MUTANTS
from equivalence.mutants.file_faults import FILE_MUTANTS
from equivalence.mutants.layout_mutant import LayoutMutant
from equivalence.mutants.loss_faults import LOSS_MUTANTS
from equivalence.mutants.rank_faults import RANK_MUTANTS
from equivalence.mutants.run_faults import RUN_MUTANTS
from production.parallel.sizes import ParallelSizes

LAYOUT_MUTANTS: tuple[LayoutMutant, ...] = (
    *CUT_MUTANTS,
    *DEAL_MUTANTS,
    *LOSS_MUTANTS,
    *RANK_MUTANTS,
    *FEED_MUTANTS,
    *FILE_MUTANTS,
    *RUN_MUTANTS,
)
"""Each fault that has happened, or that a reader of SPEC could make."""


def find(name: str) -> LayoutMutant:
    """Return the fault of this name. Raises ValueError for an unknown name."""
    for mutant in LAYOUT_MUTANTS:
        if mutant.name == name:
            return mutant
    raise ValueError(f"no fault is called {name!r}; choose one of {', '.join(each.name for each in LAYOUT_MUTANTS)}")


def entered(name: str) -> Callable[[ParallelSizes], tuple[str, Any]]:
    """Return the `entered` argument of `step_runs.run_layout` for worlds whose ranks all have the fault."""
    return lambda sizes: ("equivalence.mutants.layout_faults:enter", (name, sizes))


@contextmanager
def enter_alone(name: str, worker: Any) -> Iterator[None]:
    """Context manager that each rank of a whole run enters: the fault. The job lays its ranks out itself."""
    del worker
    with find(name).entered():
        yield


@contextmanager
def enter(entry: tuple[str, ParallelSizes], worker: Any) -> Iterator[Any]:
    """Context manager that each rank enters: the fault, then `equivalence.trainers.production_step.layout`."""
    from equivalence.trainers.production_step import layout  # noqa: PLC0415 - the ranks' part

    name, sizes = entry
    with find(name).entered(), layout(sizes, worker) as place:
        yield place
