"""Find the settings of a packed file's rows: those of its manifest, those given, and else the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence.errors import InputError
from equivalence.runner.restriction import Restriction
from equivalence.subjects.protocol import RowSettings
from production.errors import PackproofError
from production.files.head import first_rows
from production.files.manifest import read_manifest

DEFAULT_PACK_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class OwnSettings:
    """A packed file, and what its rows are built for before anything else."""

    file: Path
    rows: int
    settings: RowSettings
    origins: Mapping[str, str]
    """Where each of pack_length, prompt_format, context_parallel_size and semantics comes from: manifest, given or default."""

    @property
    def told(self) -> str:
        """In words."""
        values = {
            "prompt_format": self.settings.prompt_format,
            "context_parallel_size": f"cp {self.settings.context_parallel_size}",
            "semantics": self.settings.semantics,
            "pack_length": f"{self.settings.pack_length:,} tokens",
        }
        by_origin: dict[str, list[str]] = {}
        for name, value in values.items():
            by_origin.setdefault(self.origins[name], []).append(value)
        says = {"manifest": "as its manifest says", "given": "as given", "default": "by default"}
        return "; ".join(f"{', '.join(found)} {says[origin]}" for origin, found in by_origin.items())


def own_settings(file: Path, *, pack_length: int | None, restriction: Restriction) -> OwnSettings:
    """Settle the settings of a file's rows. InputError where what is given contradicts the manifest in what decided the packing."""
    rows = count_rows(file)
    try:
        manifest = read_manifest(file)
    except PackproofError as error:
        raise InputError(str(error)) from error
    said: Mapping[str, Any] = {} if manifest is None else manifest.settings
    where = "" if manifest is None else str(manifest.path)
    if pack_length is not None and said.get("pack_length", pack_length) != pack_length:
        raise InputError(_contradiction("--pack-length", pack_length, file, said["pack_length"], where))
    if "prompt_format" in said and not restriction.takes_format(said["prompt_format"]):
        formats = ",".join(restriction.prompt_formats)
        raise InputError(_contradiction("--formats", formats, file, said["prompt_format"], where))
    given: dict[str, Any] = {
        "pack_length": pack_length,
        "prompt_format": None if "prompt_format" in said else next(iter(restriction.prompt_formats), None),
        "context_parallel_size": _taken(said.get("context_parallel_size"), restriction.context_parallel_sizes),
        "semantics": _taken(said.get("semantics"), restriction.semantics),
    }
    usual = {"pack_length": DEFAULT_PACK_LENGTH, "prompt_format": "nemotron-nano-v2", "context_parallel_size": 1}
    usual["semantics"] = "megatron-lm-0.19"
    settings, origins = {}, {}
    for name, value in given.items():
        if value is not None and said.get(name) != value:
            settings[name], origins[name] = value, "given"
        elif name in said:
            settings[name], origins[name] = said[name], "manifest"
        else:
            settings[name], origins[name] = usual[name], "default"
    try:
        return OwnSettings(file=file, rows=rows, settings=RowSettings(**settings), origins=origins)
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error


def count_rows(path: Path) -> int:
    """Count the lines of a packed file. InputError if it is not there, or empty."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a packed JSONL file with --sample, or --sample none")
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a packed JSONL file with --sample, or --sample none")
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    if not count:
        raise InputError(f"{path} is empty; give a packed JSONL file with --sample, or --sample none")
    next(first_rows(str(path), 1, "messages", skip=True), None)  # BadInput for what is not JSON lines
    return count


def _taken(said: Any, allowed: tuple[Any, ...]) -> Any:
    """Return the first allowed value where what the manifest says is none of them; None leaves it to the manifest and the default."""
    return None if not allowed or said in allowed else allowed[0]


def _contradiction(option: str, given: object, file: Path, said: object, manifest: str) -> str:
    return (
        f"{option} {given}, and {file} was packed for {said} (its manifest {manifest} says so): leave {option} out, "
        "or give a copy of the file without its manifest"
    )
