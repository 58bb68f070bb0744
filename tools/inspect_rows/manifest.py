"""Compare packed files with their manifests, and make the manifest of a file that has none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from production.errors import PackproofError
from production.files.fingerprint import fingerprint_file
from production.files.manifest import manifest_path, read_manifest, write_manifest
from production.tokens.fingerprint import differences_from_json, fingerprint_tokenizer
from tools.inspect_rows.inspection import Inspection


def manifest_notes(files: Sequence[Path], tokenizer: Any) -> list[str]:
    """Return how each file and this tokenizer differ from what the manifest beside the file says.

    Raises BadInput for a manifest that cannot be read, or that is of a file of another size.
    """
    now = fingerprint_tokenizer(tokenizer)
    told = []
    for file in files:
        manifest = read_manifest(file)
        if manifest is None:
            continue
        if manifest.tokenizer_fingerprint is not None:
            differing = differences_from_json(manifest.tokenizer_fingerprint, now, name=str(manifest.path))
            if differing:
                told.append(f"{file} was packed with another tokenizer. {' '.join(differing)}")
        digest = manifest.output.get("digest")
        if digest is not None and digest != (found := fingerprint_file(file).digest):
            told.append(
                f"{file} is not the file that its manifest describes: its digest is {found}, and the manifest says {digest}."
            )
    return told


def make_manifest(files: Sequence[Path], found: Inspection, tokenizer: Any, folder: Path) -> list[Path]:
    """Write the manifest of a file that has none, and return its path.

    Raises PackproofError for several files, whose counts the inspection has only together, for a scan that ended early
    and for a file that has a manifest.
    """
    if len(files) != 1:
        raise PackproofError(
            what=f"{len(files)} files are inspected at once, and a manifest is of one file",
            where="--write-manifest",
            fix="inspect the files one by one",
        )
    (file,) = files
    if not found.rows_complete:
        raise PackproofError(
            what="the scan ended early, and a manifest counts all rows",
            where=str(file),
            fix="leave --rows and --budget out",
        )
    if read_manifest(file) is not None:
        raise PackproofError(
            what="the file has a manifest already", where=str(manifest_path(file)), fix="move it away to make another"
        )
    whole = fingerprint_file(file)
    with file.open("rb") as raw:
        sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
    output = {
        "file": file.name,
        "sha256": sha256,
        "digest": whole.digest,
        "bytes": whole.size,
        "rows": found.counts["rows"],
    }
    fill = next(each for each in found.histograms if each.name == "fill")
    contents = {
        "output": output,
        "settings": dict(found.settings),
        "tokenizer": {
            "folder": folder.resolve().name,
            "vocab_size": len(tokenizer),
            "fingerprint": fingerprint_tokenizer(tokenizer).to_json(),
        },
        "counts": dict(found.counts),
        "fill": {"edges": list(fill.edges), "counts": list(fill.counts)},
        "packer": {"name": None, "version": None},
        "made_by": "packproof inspect --write-manifest",
    }
    return [write_manifest(file, contents)]
