"""Read the manifest beside a packed file, which names the settings of its rows; `tools.pack_rows` writes one.

The file's size tells whether the manifest belongs to the file: a hash would read the whole file for one row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from production.errors import BadInput
from production.files.file_state import is_there

_KINDS: dict[str, type] = {"pack_length": int, "prompt_format": str, "context_parallel_size": int, "semantics": str}
_PACKED = (".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Holds a manifest."""

    path: Path
    """Place of the manifest."""
    settings: Mapping[str, Any]
    """Fields of RowSettings that it names: pack_length, prompt_format, context_parallel_size, semantics."""
    tokenizer: Mapping[str, str]
    """SHA-256 of each file of the tokenizer that packed the rows, by name; empty where the manifest does not say."""


def read_manifest(file: Path) -> Manifest | None:
    """Return the manifest `FILE.manifest.json` beside a packed file, also without `.gz` or `.zst`; None without a
    manifest.

    Raises BadInput (kind `manifest`) for a manifest that cannot be read, or that is of a file of another size.
    """
    if not is_there(file) or not file.name:
        return None  # told by whoever opens it
    names = [file.name, *([file.stem] if file.suffix in _PACKED else [])]
    path = next((path for name in names if (path := file.with_name(f"{name}.manifest.json")).exists()), None)
    if path is None:
        return None
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(path, f"cannot be read ({error})") from error
    if not isinstance(said, dict):
        raise _bad(path, "is not JSON object")
    _check_size(file, path, said)
    settings = said.get("settings")
    known = {**said, **settings} if isinstance(settings, dict) else said
    found = {name: known[name] for name in _KINDS if known.get(name) is not None}
    for name, value in found.items():
        if type(value) is not _KINDS[name]:
            raise _bad(path, f"says {name} {value!r}")
    said_of = said.get("tokenizer")
    files = said_of.get("files") if isinstance(said_of, dict) else None
    hashes = {str(name): str(digest) for name, digest in files.items()} if isinstance(files, dict) else {}
    return Manifest(path=path, settings=found, tokenizer=hashes)


def other_files(manifest: Manifest, tokenizer: Path) -> list[str]:
    """Return the files by which a tokenizer's folder differs from the one that packed the rows."""
    return [
        name
        for name, digest in manifest.tokenizer.items()
        if not (tokenizer / name).is_file() or hashlib.sha256((tokenizer / name).read_bytes()).hexdigest() != digest
    ]


def _check_size(file: Path, path: Path, said: Mapping[str, Any]) -> None:
    output = said.get("output")
    size = output.get("bytes") if isinstance(output, dict) else None
    if type(size) is not int or file.suffix in _PACKED or not file.is_file():
        return
    if (found := file.stat().st_size) != size:
        mend = "pack the file anew, or move the manifest away and say what it was packed for"
        raise _bad(path, f"is of a file of {size:,} bytes, and {file} has {found:,}", mend)


def _bad(path: Path, what: str, mend: str = "correct it, or move it away") -> BadInput:
    return BadInput(kind="manifest", what=f"the manifest {what}", mend=mend, file=str(path))
