"""List the sides that a run compares, their versions, and what had to be stood in for."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

from equivalence.errors import InputError, WitnessError
from equivalence.runner import job_runners

LIBRARIES = ("megatron-core", "torch", "transformers", "tokenizers", "hypothesis", "packproof")


@dataclass(frozen=True, kw_only=True)
class Witness:
    """One side of the comparison."""

    name: str
    """As it was asked for."""
    called: str
    """As differences name it."""
    version: str
    stand_ins: tuple[str, ...]
    """What is not the side as it comes, in words."""


def witnesses(names: tuple[str, ...]) -> list[Witness]:
    """Load the sides. WitnessError names one that cannot be loaded, and why."""
    found: list[Witness] = []
    for name in names:
        try:
            subject = job_runners.subject(name)
        except Exception as error:
            raise WitnessError(
                f"the witness {name} cannot run: {type(error).__name__}: {error}; "
                "install what it needs, or name the sides that shall be compared with --subjects"
            ) from error
        if any(each.called == subject.name for each in found):
            raise InputError(
                f"{name} calls itself {subject.name!r} as another subject does: give each a name of its own, "
                "in an adapter as serve(…, name=…)"
            )
        stand_ins = getattr(subject, "stand_ins", None)
        found.append(
            Witness(
                name=name,
                called=subject.name,
                version=str(getattr(subject, "version", _version("packproof") if ":" not in name else "your own")),
                stand_ins=tuple(stand_ins()) if callable(stand_ins) else (),
            )
        )
    return found


def versions() -> dict[str, str]:
    """Return versions of Python and the libraries that decide a row."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
