"""Compare what two readers of files answer, question by question."""

from __future__ import annotations

from typing import Any

from equivalence.cases.difference import Difference
from equivalence.cases.result import Finding

_SIDES = ("reference", "production")
Seen = dict[str, Any]
"""Answers of one side on the files, by the question."""


def compared(name: str, theirs: Seen, ours: Seen) -> list[Finding]:
    """One finding for each answer that differs, with the first place of it."""
    found = [
        Difference(tensor=f"{name}: {key}", position=None, left=_short(left), right=_short(right), kind="other")
        for key in dict.fromkeys((*theirs, *ours))
        for left, right in [_apart(theirs.get(key), ours.get(key))]
        if left != right
    ]
    return [Finding(left=_SIDES[0], right=_SIDES[1], differences=found)] if found else []


def _apart(left: Any, right: Any) -> tuple[Any, Any]:
    """Return the first items of two lists or dicts that differ; other values unchanged."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return next(((left[key], right[key]) for key in left if left[key] != right[key]), (None, None))
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return next(((a, b) for a, b in zip(left, right, strict=True) if a != b), (None, None))
    return left, right


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]} …"
