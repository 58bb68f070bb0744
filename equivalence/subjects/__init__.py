"""Offer every side behind one protocol: reference, production, megatron_lm, or your own: `module:object`, or an adapter in its own
environment, `exec:"PYTHON my_adapter.py"`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable
from typing import cast

from equivalence.errors import InputError
from equivalence.subjects.protocol import (
    BATCH_TENSORS,
    PROMPT_FORMATS,
    ROW_TENSORS,
    Batch,
    Messages,
    Refusal,
    Row,
    RowSettings,
    Subject,
)

__all__ = [
    "BATCH_TENSORS",
    "BUILT_IN",
    "EXTERNAL",
    "PROMPT_FORMATS",
    "ROW_TENSORS",
    "Batch",
    "Messages",
    "Refusal",
    "Row",
    "RowSettings",
    "Subject",
    "join_names",
    "load",
    "split_names",
]

BUILT_IN = ("reference", "production", "megatron_lm")
NEMO_RL = "nemo_rl"
"""Name of the checkout of NeMo-RL that `packproof witness add nemo-rl` keeps; its rows are built in a process of their own."""
EXTERNAL = "exec:"
"""Begins the name of a subject that runs as a process of its own; the rest is its command line."""


def split_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list. Commas between quotes do not separate.

    Quotes around a whole command line are taken off: `exec:"python my.py"` and `exec:python my.py` are one name.
    """
    parts = re.findall(r"""(?:"[^"]*"|'[^']*'|[^,"']|["'])+""", text)
    return tuple(name for part in parts if (name := _unquoted(part.strip())))


def join_names(names: Iterable[str]) -> str:
    """Return names as one comma-separated list that `split_names` takes apart."""
    return ",".join(_quoted(name) if "," in name and name.startswith(EXTERNAL) else name for name in names)


def _quoted(name: str) -> str:
    command = name.removeprefix(EXTERNAL)
    quote = "'" if '"' in command else '"'
    return f"{EXTERNAL}{quote}{command}{quote}"


def _unquoted(name: str) -> str:
    command = name.removeprefix(EXTERNAL)
    if command == name:
        return name
    command = command.strip()
    quote = command[:1]
    if quote in ("'", '"') and command.find(quote, 1) == len(command) - 1:
        command = command[1:-1]
    return EXTERNAL + command


def load(name: str) -> Subject:
    """Load a subject by name: one of BUILT_IN, a witness that was added, `module:object` (an object or a class without arguments), or `exec:COMMAND`.

    Raises ValueError for an unknown subject, ImportError if the subject's imports fail.
    """
    if name in BUILT_IN:
        return cast("Subject", importlib.import_module(f"equivalence.subjects.{name}").SUBJECT)
    if name == NEMO_RL:
        return cast("Subject", importlib.import_module("equivalence.witnesses.nemo_rl.subject").NemoRL())
    store = importlib.import_module("equivalence.witnesses.store")
    if name.startswith(store.PREFIX):
        external = importlib.import_module("equivalence.subjects.external.subject")
        try:
            command = store.find(name.removeprefix(store.PREFIX)).command
        except InputError as error:
            raise ValueError(str(error)) from error
        return cast("Subject", external.ExternalSubject(command))
    if name.startswith(EXTERNAL):
        subject = importlib.import_module("equivalence.subjects.external.subject").ExternalSubject(
            name.removeprefix(EXTERNAL)
        )
        if subject.name in BUILT_IN:
            raise ValueError(
                f"{name!r} calls itself {subject.name!r}, which is the name of a built-in side: give it another name, serve(…, name=…)"
            )
        return cast("Subject", subject)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(
            f"no subject is called {name!r}: choose one of {', '.join(BUILT_IN)} and {NEMO_RL}, or give module:object or exec:COMMAND"
        )
    if os.getcwd() not in sys.path:  # noqa: PTH109 - an installed script does not look where the user is
        sys.path.append(os.getcwd())  # noqa: PTH109
    found = getattr(importlib.import_module(module), attribute, None)
    if found is None:
        raise ValueError(f"module {module!r} has no {attribute!r}: give module:object of a subject")
    subject = found() if isinstance(found, type) else found
    missing = [part for part in ("build_row", "collate") if not callable(getattr(subject, part, None))]
    if missing:
        raise ValueError(f"{name!r} lacks {', '.join(missing)}: a subject has build_row and collate")
    return cast("Subject", subject)
