"""Puts a fault into production, in this process, and takes it out again: one function or name, wherever it has been imported."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

_PACKAGES = ("production.", "equivalence.checks.", "equivalence.generators.")
"""Packages whose modules may have bound the name; the faults' own modules keep the sound function."""


@contextlib.contextmanager
def replaced(target: str, wrong: Callable[[Any], Any]) -> Iterator[None]:
    """Context manager that replaces `module:name` or `module:Class.name` by `wrong(original)`, also where it was imported by name.

    Import every module that must see the fault before: on exit, later imported modules are restored as well.
    """
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    sound = inspect.getattr_static(owner, name)  # a property as such
    faulty = wrong(sound)
    setattr(owner, name, faulty)
    if not outer:
        _rebind(sound, faulty)
    try:
        yield
    finally:
        setattr(owner, name, sound)
        if not outer:
            _rebind(faulty, sound)


def _rebind(old: object, new: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES):
            for bound, value in list(vars(module).items()):
                if value is old:
                    setattr(module, bound, new)
