"""Errors of the suite itself, all of one base: each says what, where and how to fix it."""

from __future__ import annotations


class SuiteError(ValueError):
    """Anything that ends a run with exit code 2 and a message instead of a traceback."""


class CaseError(SuiteError):
    """A case file that cannot be read, or a name for one that cannot be used."""


class InputError(SuiteError):
    """An option or file that cannot be used."""


class WitnessError(SuiteError):
    """A side that cannot be loaded. It is never left out in silence."""


class WorkerDiedError(SuiteError):
    """A worker process that ended without a result."""
