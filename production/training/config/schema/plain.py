"""Turn a configuration into plain values, for files and logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

ABOUT_THE_FILES = ("sources", "without_effect", "unsupported", "loaded_files", "loaded_overrides")
"""Fields of `Job` that say something of its files and are no keys."""


def plain(value: Any) -> Any:
    """Return `value` as mappings, lists and plain values, without the sources."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [each.name for each in dataclasses.fields(value) if each.name not in ABOUT_THE_FILES]
        return {name: plain(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value
