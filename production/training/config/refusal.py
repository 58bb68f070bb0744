"""Define the configuration's refusals: each names the fault, the dotted key, the line that set it, and the fix.

`yaml_reader` and `building` make those of reading (bad YAML, an unknown key, a wrong type); the modules in `checks/` make
those of set-up, in the order of `validation`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from production.errors import PackproofError


class ConfigRefused(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A configuration cannot be read: an unknown key, a wrong type, a missing value (SPEC R-SETUP-1 to 4)."""

    kind: str
    key: str

    def __init__(self, *, kind: str, key: str, what: str, where: str, fix: str) -> None:
        super().__init__(what=what, where=where, fix=fix)
        self.kind = kind
        """One word for the fault, such as `unknown_key`."""
        self.key = key
        """The dotted key at fault; empty where a whole file is."""


class SetupRefused(ConfigRefused):
    """A configuration can be read but must not run (docs/spec-setup.md); the refusal comes before any model is built."""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.0) -> str | None:
    """Return the valid name that is most like `name`; None where no name is like it enough."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)
