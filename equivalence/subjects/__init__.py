"""Offer every side behind one protocol: reference, production, megatron_lm, or your own `module:object`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import cast

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
    "PROMPT_FORMATS",
    "ROW_TENSORS",
    "Batch",
    "Messages",
    "Refusal",
    "Row",
    "RowSettings",
    "Subject",
    "load",
]

BUILT_IN = ("reference", "production", "megatron_lm")


def load(name: str) -> Subject:
    """Load a subject by name: one of BUILT_IN, or `module:object` (an object or a class without arguments).

    Raises ValueError for an unknown subject, ImportError if the subject's imports fail.
    """
    if name in BUILT_IN:
        return cast("Subject", importlib.import_module(f"equivalence.subjects.{name}").SUBJECT)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"no subject is called {name!r}: choose one of {', '.join(BUILT_IN)}, or give module:object")
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
