"""Restrict a run to some formats, context parallel sizes and semantics."""

from __future__ import annotations

from dataclasses import dataclass

from equivalence.cases.row import RowCase
from equivalence.errors import InputError
from equivalence.subjects.protocol import PROMPT_FORMATS, RowSettings
from production.errors import PackproofError
from production.semantics import nearest, parse


@dataclass(frozen=True, kw_only=True)
class Restriction:
    """Values that are taken; an empty tuple takes all."""

    prompt_formats: tuple[str, ...] = ()
    context_parallel_sizes: tuple[int, ...] = ()
    semantics: tuple[str, ...] = ()

    @property
    def is_any(self) -> bool:
        """Return whether anything is restricted."""
        return bool(self.prompt_formats or self.context_parallel_sizes or self.semantics)

    def takes_format(self, prompt_format: str) -> bool:
        """Return whether a format is taken."""
        return not self.prompt_formats or prompt_format in self.prompt_formats

    def takes(self, settings: RowSettings) -> bool:
        """Return whether settings are taken."""
        return (
            self.takes_format(settings.prompt_format)
            and (not self.context_parallel_sizes or settings.context_parallel_size in self.context_parallel_sizes)
            and (not self.semantics or settings.semantics in self.semantics)
        )

    def moved(self, case: RowCase) -> RowCase:
        """Return a drawn case with the cp and semantics that are not taken replaced by taken ones, in turn by its length; its format is."""
        settings = case.settings
        changes: dict[str, object] = {}
        if self.context_parallel_sizes and settings.context_parallel_size not in self.context_parallel_sizes:
            size = self.context_parallel_sizes[settings.pack_length % len(self.context_parallel_sizes)]
            unit = 2 * size if size > 1 else 1
            changes |= {"context_parallel_size": size, "pack_length": -(-settings.pack_length // unit) * unit}
        if self.semantics and settings.semantics not in self.semantics:
            changes["semantics"] = self.semantics[settings.pack_length % len(self.semantics)]
        return case.with_(settings=settings.replace(**changes)) if changes else case


EVERYTHING = Restriction()
"""Restricts nothing."""


def restriction(formats: str | None, sizes: str | None, semantics: str | None) -> Restriction:
    """Read the options `--formats`, `--cp` and `--semantics`. InputError names what is misspelt, and the nearest that there is."""
    named = _listed(formats)
    for name in named:
        if name not in PROMPT_FORMATS:
            raise InputError(
                f"--formats {formats}: no format is called {name!r}; the nearest is {nearest(name, PROMPT_FORMATS)!r}, "
                f"and all are {', '.join(PROMPT_FORMATS)}"
            )
    numbers = _listed(sizes)
    if wrong := [each for each in numbers if not (each.isascii() and each.isdigit() and 1 <= int(each) < 1 << 20)]:
        raise InputError(
            f"--cp {sizes}: each size must be a number from 1, got {wrong[0]!r}; write numbers such as 1,2"
        )
    presets = _presets(semantics)
    for name in presets:
        try:
            parse(name)
        except PackproofError as error:
            raise InputError(f"--semantics {semantics}: {error}") from error
    return Restriction(
        prompt_formats=named, context_parallel_sizes=tuple(int(each) for each in numbers), semantics=presets
    )


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.strip() for each in (text or "").split(",") if each.strip()))


def _presets(text: str | None) -> tuple[str, ...]:
    """Return presets separated by commas, each followed by its own overrides (`field=value`)."""
    found: list[str] = []
    for each in (part.strip() for part in (text or "").split(",") if part.strip()):
        if "=" in each and found:
            found[-1] += f",{each}"
        else:
            found.append(each)
    return tuple(dict.fromkeys(found))
