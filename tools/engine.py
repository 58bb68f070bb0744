"""Choose where tasks run: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from tools.ordered_pool import OrderedPool, ProcessPool, cores
from tools.ray_pool import open_cluster

Engine = Literal["processes", "ray"]


@contextlib.contextmanager
def open_pool(engine: Engine, processes: int | None) -> Iterator[OrderedPool]:
    """Open the pool of an engine; `processes` is its number of processes, all cores where it is None.

    Raises PackproofError where the engine cannot run.
    """
    if engine == "ray":
        with open_cluster(processes) as pool:
            yield pool
    else:
        yield ProcessPool(workers=cores() if processes is None else processes)
