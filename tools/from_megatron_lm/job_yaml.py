"""Hold what a run's arguments say of a job, and write it as YAML with the argument beside each key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_SECTIONS = ("sft", "policy", "model", "data", "loss", "checkpointing", "logger", "cluster")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One key of the job."""

    key: str
    """Dotted key."""
    value: Any
    """Plain value."""
    comment: str
    """Argument that it comes from, and whether the argument was left out."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """The job that a run's arguments say."""

    lines: list[Line] = field(default_factory=list)
    """Keys, in the order of their sections."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Arguments that cannot be translated, each with what to do instead."""
    without_effect: list[tuple[str, str]] = field(default_factory=list)
    """Arguments away from their default, or given, that have no effect here, each with the reason."""
    without_key: list[tuple[str, str]] = field(default_factory=list)
    """Arguments that a command line gives and that need no key of the job, each with the reason."""
    notes: list[str] = field(default_factory=list)
    """Differences of the two programs that no key can say."""


def yaml_text(found: Translation, name: str) -> str:
    """Return the job as YAML; each key is followed by the argument that says it."""
    head = [
        f"# Translated from {name} by packproof from-megatron-lm. Check it: packproof train --config FILE --dry-run"
    ]
    head += [f"# note: {note}" for note in found.notes]
    head += [f"# accepted without effect: {argument}: {why}" for argument, why in found.without_effect]
    head += [f"# needs no key: {argument}: {why}" for argument, why in found.without_key]
    body = []
    for depth, key, line in _sections(found.lines):
        text = "  " * depth + (f"{key}:" if line is None else f"{key}: {json.dumps(line.value, ensure_ascii=False)}")
        body.append(text if line is None else f"{text:<56}  # {line.comment}")
    return "\n".join([*head, *body]) + "\n"


def _sections(lines: list[Line]) -> Iterator[tuple[int, str, Line | None]]:
    """Yield indentation, name and line of each key of the YAML; section heads have no line."""
    tree: dict[str, Any] = {name: {} for name in _SECTIONS}
    for line in lines:
        *parents, name = line.key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = line
    yield from _walk(tree, 0)


def _walk(tree: dict[str, Any], depth: int) -> Iterator[tuple[int, str, Line | None]]:
    for name, value in sorted(tree.items(), key=lambda each: isinstance(each[1], dict)):
        yield depth, name, value if isinstance(value, Line) else None
        if isinstance(value, dict):
            yield from _walk(value, depth + 1)
