"""Choose the folder of what is made once and kept: tokenizers, by their contents."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the cache folder: PACKPROOF_CACHE, else packproof under XDG_CACHE_HOME, else under ~/.cache."""
    if chosen := os.environ.get("PACKPROOF_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "packproof"
