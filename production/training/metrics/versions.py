"""List the package versions of a run, for its records and its checkpoints."""

from __future__ import annotations

import functools
from importlib import metadata

_PACKAGES = ("packproof", "megatron-core", "torch", "transformers", "transformer-engine")


@functools.cache
def versions() -> dict[str, str]:
    """Return the version of each installed package by name."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
