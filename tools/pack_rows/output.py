"""Writes rows, and beside them what they were made of: nothing in a packed file itself says which tokenizer built it."""

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from production.files.cache import atomic_file
from production.files.fingerprint import fingerprint_file
from production.files.manifest import manifest_path, write_manifest
from tools.pack_rows.conversation import SourceLocation
from tools.pack_rows.packing import Packing, row_line

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""The files by which a tokenizer encodes and renders; the same folder may hold gigabytes of weights."""
_VERSIONED = ("packproof", "transformers", "tokenizers", "jinja2")


def write_rows(packing: Packing, out: Path) -> tuple[Path, Path]:
    """Write the rows to `out` and the manifest beside it; return both paths. A crash leaves the old files or the new.

    The manifest goes last and holds the rows' hash, so a pair that does not belong together shows. Rows are written
    one at a time.
    """
    digest = hashlib.sha256()
    with atomic_file(out) as file:
        for row in packing.rows:
            line = row_line(row)
            digest.update(line)
            file.write(line)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    output = {"file": out.name, "sha256": digest.hexdigest(), "bytes": size, "rows": len(packing.rows)}
    output["digest"] = fingerprint_file(out).digest
    return out, write_manifest(out, {"output": output, **manifest(packing)})


def describe_output(name: str, lines: bytes) -> dict[str, Any]:
    """Return the manifest's entry on the packed file `name` with the content `lines`."""
    return {
        "file": name,
        "sha256": hashlib.sha256(lines).hexdigest(),
        "bytes": len(lines),
        "rows": lines.count(b"\n"),
    }


def manifest(packing: Packing) -> dict[str, Any]:
    """Return what the rows were made of. Names of files only, no folders and no time: equal inputs give equal bytes."""
    settings = asdict(packing.settings)
    refused: list[dict[str, list[SourceLocation]]] = [{} for _ in packing.inputs]
    for refusal in packing.refused:
        refused[refusal.place.input].setdefault(refusal.kind, []).append(refusal.place)
    return {
        "inputs": [
            {
                "file": file.path.name,
                "layout": file.layout,
                "sha256": file.sha256,
                "lines": file.lines,
                "refused_lines": {kind: _line_ranges(places) for kind, places in sorted(refused[index].items())},
                "keys_beside_messages_dropped": dict(sorted(file.dropped_keys.items())),
                "keys_of_messages_kept": dict(sorted(file.message_keys.items())),
            }
            for index, file in enumerate(packing.inputs)
        ],
        "tokenizer": {
            **describe_tokenizer(packing.tokenizer, packing.vocab_size),
            "fingerprint": packing.fingerprint.to_json(),
        },
        "packer": {"name": packing.settings.algorithm, "version": _versions(["packproof"])["packproof"]},
        "settings": settings,
        "notes": {note.kind: note.text for note in packing.notes},
        "counts": packing.counts(),
        "fill": packing.fill(),
        "refused": dict(sorted(packing.refused_by_kind().items())),
        "versions": {"python": platform.python_version(), **_versions(_VERSIONED)},
    }


def describe_tokenizer(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the manifest's entry on a tokenizer: the hash of each file that matters, and one over them all."""
    files = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in TOKENIZER_FILES
        if (folder / name).is_file()
    }
    both = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return {
        "folder": folder.resolve().name,
        "vocab_size": vocab_size,
        "sha256": hashlib.sha256(both.encode()).hexdigest(),
        "files": files,
    }


def json_bytes(value: object) -> bytes:
    """Return `value` as indented JSON for people, raw UTF-8."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _line_ranges(places: Iterable[SourceLocation]) -> str:
    """Return lines as text, `3, 7-12`, with the piece after a stroke where a conversation was split: `9/1`."""
    runs: list[list[SourceLocation]] = []
    for place in places:
        if runs and place.piece == place.part == runs[-1][-1].piece == 0 and place.line == runs[-1][-1].line + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ", ".join(
        f"{run[0].line}-{run[-1].line}" if len(run) > 1 else f"{run[0].line}{f'/{run[0].piece}' * bool(run[0].piece)}"
        for run in runs
    )


__all__ = [
    "describe_output",
    "describe_tokenizer",
    "json_bytes",
    "manifest",
    "manifest_path",
    "write_rows",
]


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            found[name] = "not installed"
    return found
