"""Read, seal and verify a checkpoint's manifest, which is the last file written and lists every other file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from torch import distributed

from production.errors import PackproofError

MANIFEST = "packproof.json"
RESHARDABLE = "fully_reshardable"
"""megatron-core's name for a state by the names of the whole model's weights, which any layout can read."""
_NAME = re.compile(r"step_(\d{8})")
_CHUNK = 1 << 22


class CheckpointRefused(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A checkpoint cannot be trusted, or belongs to another job."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Names a checkpoint's run and step, and the size and checksum of each file."""

    step: int
    """Steps taken."""
    consumed_samples: int
    """Rows consumed by all steps."""
    fingerprint: dict[str, Any]
    """Identity of what the run feeds (`production.training.data.batch_stream.BatchStream.identity`)."""
    config: dict[str, Any]
    """The resolved job."""
    metrics: dict[str, float | None]
    """Metrics by which the best checkpoints are chosen; None for NaN or infinity, which JSON lacks."""
    has_optimizer: bool
    """Whether a job can be resumed from the checkpoint."""
    sharding_type: str
    """megatron-core's name for the layout of the distributed optimizer's state."""
    files: dict[str, list[int]]
    """Size and xxh3-64 of each file, by its path in the folder."""
    checksum: int = 0
    """xxh3-64 of this manifest with a 0 here."""
    run: str = ""
    """Run that wrote the checkpoint: drawn where a job begins, kept by resumed jobs; empty in older checkpoints."""
    trained_tokens: int | None = None
    """Trained tokens of all steps; None where the number is not known."""
    skipped_rows: int | None = None
    """Lines of the training files that `on_bad_row: skip` leaves out; None where it is not known."""
    tokenizer: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fingerprint of the tokenizer (`production.tokens.fingerprint`); empty in older checkpoints."""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """Versions of the packages that wrote the checkpoint."""


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return all complete checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: path.name)


def sealed(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with its checksum."""
    raw = msgspec.to_builtins(msgspec.structs.replace(manifest, checksum=0))
    return msgspec.json.encode(raw | {"checksum": _checksum(raw)})


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at `path`.

    Raises CheckpointRefused where the manifest is unreadable or was changed.
    """
    try:
        raw = msgspec.json.decode((path / MANIFEST).read_bytes(), type=dict[str, Any])
        manifest = msgspec.convert(raw, Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise damaged(f"{MANIFEST} cannot be read ({error})", path) from error
    if _checksum(raw) != manifest.checksum:
        raise damaged(f"{MANIFEST} was changed after it was written", path)
    return manifest


def verify(path: Path) -> Manifest:
    """Read the manifest and compare every file with the manifest; all ranks share the work.

    Raises CheckpointRefused on all ranks.
    """
    fault: str | None = None
    manifest = None
    try:
        manifest = read_manifest(path)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        for name in list(manifest.files)[rank::size]:
            if not (path / name).is_file():
                fault = f"{name} is missing"
            elif digest(path / name) != manifest.files[name]:
                fault = f"{name} was changed after it was written"
            if fault:
                break
    except CheckpointRefused as error:
        fault = error.what
    except OSError as error:
        fault = str(error)
    faults: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(faults, fault)
    if found := next((each for each in faults if each), None):
        raise damaged(f"the checkpoint is damaged: {found}", path)
    assert manifest is not None
    return manifest


def check_optimizer(path: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint that no run can be resumed from."""
    if not manifest.has_optimizer:
        raise CheckpointRefused(
            what="the checkpoint was written without the optimizer's state, from which a run resumes",
            where=str(path),
            fix="start from the checkpoint's weights in a new folder (model.initial=megatron, model.initial_path, checkpointing.checkpoint_dir)",
        )


def digest(path: Path) -> list[int]:
    """Return size and xxh3-64 of a file."""
    hashed = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
        return [file.tell(), hashed.intdigest()]


def damaged(what: str, path: Path) -> CheckpointRefused:
    """Return the refusal of a checkpoint whose files differ from the manifest."""
    return CheckpointRefused(
        what=what, where=str(path), fix="move the checkpoint away: the job then resumes from the checkpoint before it"
    )


def _checksum(raw: dict[str, Any]) -> int:
    """Return the checksum of the JSON as written, with a 0 for the checksum: fields of other versions are covered
    too.
    """
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(raw | {"checksum": 0}))
