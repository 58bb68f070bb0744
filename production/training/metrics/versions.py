"""Which packages a run was made with, for its records and its checkpoints."""

from __future__ import annotations

import functools
from importlib import metadata

_PACKAGES = ("packproof", "megatron-core", "torch", "transformers", "transformer-engine")


@functools.cache
def versions() -> dict[str, str]:
    """Version by package, of those that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
