"""Read and write the manifest beside a packed file, which names the settings of its rows and what they were made of.

`tools.pack_rows` and `tools.inspect_rows` write manifests; every reader goes through `read_manifest`.

The file's size tells whether the manifest belongs to the file: a hash would read the whole file for one row. Before a run
`check_output` compares rows and hash as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from production.errors import BadInput
from production.files.cache import write_file
from production.files.compressed import compression_of
from production.files.file_state import is_there, read_regular
from production.files.head import stream_lines

_KINDS: dict[str, type] = {"pack_length": int, "prompt_format": str, "context_parallel_size": int, "semantics": str}
FORMAT = "packproof-packed-rows/3"
"""Name and version of the manifests that are written; older ones are read too, which have no checksum."""
_FAMILY = "packproof-packed-rows/"
FORMATS = (f"{_FAMILY}1", f"{_FAMILY}2", FORMAT)
"""Versions that are read; a manifest that names another kind of format, or none, is somebody else's and is read as it stands."""
_ANEW = "pack the file again, or move the manifest away and say what it was packed for"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Holds a manifest."""

    path: Path
    """Place of the manifest."""
    settings: Mapping[str, Any]
    """Fields of RowSettings that it names: pack_length, prompt_format, context_parallel_size, semantics."""
    tokenizer: Mapping[str, str]
    """SHA-256 of each file of the tokenizer that packed the rows, by name; empty where the manifest does not say."""
    tokenizer_fingerprint: Mapping[str, Any] | None = None
    """Fingerprint of that tokenizer (`production.tokens.fingerprint`); None in manifests before version 2."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """Entries on the packed file itself, before any compression: `bytes`, `rows`, `sha256` and, from version 2 on, `digest`
    (`production.files.fingerprint`); those that have the type that they must have."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Rows, conversations and tokens by name; empty where the manifest does not say."""
    fill: Mapping[str, Any] | None = None
    """Histogram of how full rows are: `edges` and `counts`; None in manifests before version 2."""
    packer: Mapping[str, Any] = field(default_factory=dict)
    """Name and version of what packed the rows; `name` is None where nobody knows it."""


def read_manifest(file: Path) -> Manifest | None:
    """Return the manifest beside a packed file, or None if there is no manifest.

    The manifest is `FILE.manifest.json`; for a compressed file `NAME.jsonl.gz`, also `NAME.jsonl.manifest.json`.

    Raises BadInput (kind `manifest`) for a manifest that cannot be read, that was changed after it was written, or that is
    of a file of another size.
    """
    if not is_there(file) or not file.name:
        return None  # told by whoever opens it
    names = [file.name, *([file.stem] if compression_of(file) is not None else [])]
    path = next((path for name in names if (path := file.with_name(f"{name}.manifest.json")).exists()), None)
    if path is None:
        return None
    try:
        said = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(path, f"cannot be read ({error})") from error
    if not isinstance(said, dict):
        raise _bad(path, "is not a JSON object")
    if str(said.get("format")).startswith(_FAMILY) and said["format"] not in FORMATS:
        raise _bad(
            path,
            f"has the format {said['format']!r}, and this version of packproof reads {', '.join(FORMATS)}",
            fix="take the version of packproof that packed the file, or pack the file again",
        )
    if _is_changed(said):
        raise _bad(
            path,
            "was changed after it was written",
            fix="restore it, or pack the file anew; to keep a change that you made, take its keys format and checksum out",
        )
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
    fingerprint = said_of.get("fingerprint") if isinstance(said_of, dict) else None
    return Manifest(
        path=path,
        settings=found,
        tokenizer=hashes,
        tokenizer_fingerprint=fingerprint if isinstance(fingerprint, dict) else None,
        output=_output(said),
        counts=_mapping(said.get("counts")),
        fill=said.get("fill") if isinstance(said.get("fill"), dict) else None,
        packer=_mapping(said.get("packer")),
    )


def manifest_path(file: Path) -> Path:
    """Return where the manifest of a packed file stands."""
    return file.with_name(f"{file.name}.manifest.json")


def write_manifest(file: Path, contents: Mapping[str, Any]) -> Path:
    """Write a manifest beside a packed file, whole or not at all, and return its path; raw UTF-8, indented for people."""
    whole = {"format": FORMAT, **contents}
    whole["checksum"] = _checksum(whole)
    return write_file(manifest_path(file), (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode())


def _is_changed(said: Mapping[str, Any]) -> bool:
    """Return whether a manifest says something else than when it was written; older ones cannot tell."""
    if "checksum" not in said and said.get("format") != FORMAT:
        return False
    try:
        return bool(said.get("checksum") != _checksum(said))
    except RecursionError:  # deeper than anything that is written
        return True


def _checksum(said: Mapping[str, Any]) -> str:
    """Return 32 hex digits of everything that a manifest says, in any order and form of JSON, but its checksum."""
    rest = {key: value for key, value in said.items() if key != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode())


def check_output(file: Path, manifest: Manifest, *, most_bytes: int) -> None:
    """Compare rows and hash of the whole file, unpacked, with its manifest; a file of more than `most_bytes` is left
    alone.

    Raises BadInput (kind `manifest`) where they differ, and as `head.stream_lines` for a file that cannot be read.
    """
    said, limit = manifest.output, manifest.output.get("bytes")
    if limit is None or limit > most_bytes or not ({"rows", "sha256"} & said.keys()):
        return
    size = rows = 0
    digest = hashlib.sha256()
    for line in stream_lines(str(file), most_bytes=limit + 1):
        size += len(line)
        rows += line.endswith(b"\n")
        digest.update(line)
    if size > limit:
        raise _other(manifest, file, "bytes", f"{limit:,}", f"more than {limit:,}")
    check_count(file, manifest, size=size, rows=rows)
    if said.get("sha256", digest.hexdigest()) != digest.hexdigest():
        raise _other(manifest, file, "sha256", said["sha256"][:12], digest.hexdigest()[:12])


def check_count(file: Path, manifest: Manifest, *, size: int, rows: int) -> None:
    """Compare bytes and rows of a file, unpacked, with its manifest. Raises BadInput (kind `manifest`)."""
    for name, found in (("bytes", size), ("rows", rows)):
        if (said := manifest.output.get(name, found)) != found:
            raise _other(manifest, file, name, f"{said:,}", f"{found:,}")


def other_files(manifest: Manifest, tokenizer: Path) -> list[str]:
    """Return the files by which a tokenizer's folder differs from the one that packed the rows."""
    return [
        name
        for name, digest in manifest.tokenizer.items()
        if not (tokenizer / name).is_file() or hashlib.sha256((tokenizer / name).read_bytes()).hexdigest() != digest
    ]


def _output(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries on the file that have the type that they must have; others say nothing."""
    given = said.get("output")
    kinds: dict[str, type] = {"bytes": int, "rows": int, "sha256": str, "digest": str}
    return {} if not isinstance(given, dict) else {
        name: given[name] for name, kind in kinds.items() if type(given.get(name)) is kind
    }  # fmt: skip


def _check_size(file: Path, path: Path, said: Mapping[str, Any]) -> None:
    size = _output(said).get("bytes")
    if size is None or compression_of(file) is not None or not file.is_file():
        return
    if (found := file.stat().st_size) != size:
        raise _bad(path, f"is of a file of {size:,} bytes, and {file} has {found:,}", _ANEW)


def _other(manifest: Manifest, file: Path, name: str, said: str, found: str) -> BadInput:
    return _bad(manifest.path, f"is of a file with {name} {said}, and {file} has {found} (unpacked)", _ANEW)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _bad(path: Path, what: str, fix: str = "correct it, or move it away") -> BadInput:
    return BadInput(kind="manifest", what=f"the manifest {what}", fix=fix, file=str(path))
