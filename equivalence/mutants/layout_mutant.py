"""A fault of the layout kind: one name of production replaced in memory, in this process or in every rank of a world."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from equivalence.generators.models import Layout
from equivalence.mutants.patches import replaced
from production.parallel.sizes import ParallelSizes

CP2 = Layout(sizes=ParallelSizes(context=2), data_size=1)
CP4 = Layout(sizes=ParallelSizes(context=4), data_size=1)


@dataclass(frozen=True, kw_only=True)
class LayoutMutant:
    """Production with one fault in how rows are cut, shifted, dealt, or turned into a gradient."""

    name: str
    story: str
    """Origin of the fault, or its effect on a run."""
    target: str
    """Replaced function: `module:name` or `module:Class.name`."""
    wrong: Callable[[Any], Any]
    """The faulty one, made from the sound one."""
    first: str
    """The check that is asked first, the cheapest that finds it."""
    layout: Layout = CP2
    """The cheapest layout of the smallest run whose training steps show it, if any do."""
    path: str = "direct"
    """Of a fault of whole runs: the path whose run shows it, in `layout`."""
    is_distributed: bool = False
    """Of a fault of whole runs: whether it takes the distributed optimizer, or depths weighed by rows, to show it."""
    raises: tuple[str, ...] = ()
    """Exceptions by which production itself may refuse to go on; any other is a failure of this suite."""

    def entered(self) -> AbstractContextManager[None]:
        """Return a context manager in which this process has the fault."""
        return replaced(self.target, self.wrong)
