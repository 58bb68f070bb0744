"""The decorator that makes a packing function a subject: its level, its conventions, its cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

from packproof.cases import SETS, Case, drawn_cases, load_vectors, manifest
from packproof.conventions import declare
from packproof.levels import LEVELS, Level, level_named


@dataclass(frozen=True)
class Declared:
    """Holds the levels, conventions and preset by which a packing function is judged."""

    level: str
    """The highest level that must be reached, with all below it."""
    conventions: dict[str, str] = field(default_factory=dict)
    preset: str = "megatron-lm-0.19"
    """Whose rows L10 is about."""
    drawn: int = 50
    seed: int = 0
    sets: tuple[str, ...] = SETS
    not_shown: tuple[str, ...] = ()
    """Levels that need not be shown, since the rows have no field for them."""

    def levels(self) -> list[Level]:
        """Return the levels that must be reached."""
        names = [level.name for level in LEVELS]
        return list(LEVELS[: names.index(self.level) + 1])

    def cases(self) -> list[Case]:
        """Return the vectors and the drawn cases."""
        return [case for case in load_vectors() if case.set in self.sets] + drawn_cases(self.drawn, self.seed)


def conformance(
    *,
    level: str,
    preset: str = "megatron-lm-0.19",
    drawn: int = 50,
    seed: int = 0,
    sets: Sequence[str] = SETS,
    not_shown: Sequence[str] = (),
    **conventions: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare that a packing function reaches a level, and under which conventions. ValueError for an unknown word.

    The function itself is returned unchanged but for the attribute `packproof_conformance`.
    """
    declare(conventions)
    if preset not in manifest()["presets"]:
        raise ValueError("preset must be one of {}, got {!r}".format(", ".join(manifest()["presets"]), preset))
    unknown = [name for name in sets if name not in SETS]
    if unknown:
        raise ValueError("sets has {}; known are {}".format(", ".join(unknown), ", ".join(SETS)))
    declared = Declared(
        level=level_named(level).name,
        conventions=dict(conventions),
        preset=preset,
        drawn=drawn,
        seed=seed,
        sets=tuple(sets),
        not_shown=tuple(level_named(name).name for name in not_shown),
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.packproof_conformance = declared  # type: ignore[attr-defined]
        return function

    return decorate
