"""Choose the folder of what is made once and kept, such as tokenizers, and make a folder whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_root() -> Path:
    """Return the cache folder: PACKPROOF_CACHE, else packproof under XDG_CACHE_HOME, else under ~/.cache."""
    if chosen := os.environ.get("PACKPROOF_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "packproof"


@contextlib.contextmanager
def whole_folder(place: Path) -> Iterator[Path]:
    """Yield where to make a folder that becomes `place` by one rename; one that another process made meanwhile stays, as both are equal."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
        half = Path(scratch) / "whole"
        yield half
        try:
            half.rename(place)
        except OSError:
            if not place.is_dir():
                raise
