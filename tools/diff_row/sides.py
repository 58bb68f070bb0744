"""Load the sides of a row by name, and say which version each is."""

from __future__ import annotations

import importlib.metadata
from typing import Any, cast

from equivalence.subjects import BUILT_IN, EXTERNAL, RowSettings, Subject, load
from production.library_warnings import quiet_libraries
from tools.diff_row.errors import BadInput


def covers(subject: Subject, settings: RowSettings) -> bool:
    """Return whether a side takes these settings; one that says nothing takes all."""
    asked = getattr(subject, "covers", None)
    return asked is None or bool(asked(settings))


def subject_named(name: str) -> Subject:
    """Return a side's subject; one outside the process runs on until `end_external`. Raises BadInput."""
    if name in _EXTERNAL:
        return _EXTERNAL[name]
    try:
        with quiet_libraries():
            subject = load(name)
    except (ValueError, ImportError) as error:
        raise BadInput(f"side {name!r}: {error}") from error
    if name.startswith(EXTERNAL):
        _EXTERNAL[name] = _EXTERNAL[subject.name] = subject
    return subject


def end_external() -> None:
    """End the subjects outside the process."""
    for subject in _EXTERNAL.values():
        cast("Any", subject).close()
    _EXTERNAL.clear()


_EXTERNAL: dict[str, Subject] = {}
"""Subjects outside the process that run already, by their command and by the name that they give themselves."""


def version_of(subject: Subject, name: str) -> str:
    """Return a side's own version; for packproof's sides the package's version."""
    said = getattr(subject, "version", None)
    if said is not None:
        return str(said)
    if name in BUILT_IN:
        try:
            return f"packproof {importlib.metadata.version('packproof')}"
        except importlib.metadata.PackageNotFoundError:
            return "packproof, not installed"
    return ""
