"""Define the argument of a function that runs on a rank, and find the function by name."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from equivalence.errors import InputError

type Target = Callable[[Any, Worker], Any]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The place of one rank; the second argument of every target and of `enter`."""

    rank: int
    """Rank from 0 in the default process group, which is initialised."""
    size: int
    """Ranks of the world."""
    entered: Any = None
    """Value of the context manager of `enter`; None without one, and None for `enter` itself."""


def check_name(name: str) -> None:
    """Refuse a name that cannot be `module:function`, with InputError; imports nothing."""
    module, colon, attribute = name.partition(":")
    if not (colon and module and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))):
        raise InputError(f"the name of a function for a worker must be module:function, got {name!r}")


@functools.cache
def resolve(name: str) -> Target:
    """Return the function called `module:function` (or `module:Class.method`). Raises ImportError or AttributeError for an unknown name."""
    module, _, attribute = name.partition(":")
    return cast("Target", operator.attrgetter(attribute)(importlib.import_module(module)))
