"""Write a checkpoint's folder: write the files beside the place, check them, rename the folder, and report disk
faults.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader

from production.errors import PackproofError
from production.training.checkpoint.manifest import MANIFEST, CheckpointRefused

_ROOM = 1 << 20
"""Free bytes below which a save that failed is said to have filled the disk."""


def check_written(work: Path) -> None:
    """Refuse a folder that lacks a file of its own list of tensors: another process wrote to the folder or removed a
    file.
    """
    try:
        stored = (FileSystemReader(work).read_metadata().storage_data or {}).values()
    except (OSError, EOFError, ValueError) as error:
        raise _incomplete(f"the checkpoint's list of tensors cannot be read ({error})", work) from error
    ends: dict[str, int] = {}
    for each in stored:
        ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
    for name, end in ends.items():
        size = (work / name).stat().st_size if (work / name).is_file() else 0
        if size < end:
            raise _incomplete(f"{name} must have {end} bytes, got {size}", work)
    if not ends:
        raise _incomplete("the checkpoint holds no tensor", work)


def _incomplete(what: str, work: Path) -> CheckpointRefused:
    fix = "stop what else writes to that folder or removes files there, and start the job again"
    return CheckpointRefused(
        what=f"the checkpoint is not complete after it was written: {what}", where=str(work), fix=fix
    )


def make_way(final: Path) -> None:
    """Clear the place of a checkpoint of this run that is saved again; an incomplete checkpoint is moved aside, not
    removed.
    """
    if (final / MANIFEST).is_file():
        remove(final)
    elif final.exists():
        names = (f"incomplete_{final.name}{suffix}" for suffix in ("", *(f".{number}" for number in range(1, 1000))))
        final.rename(next(path for name in names if not (path := final.with_name(name)).exists()))


def told(error: BaseException, folder: Path) -> str:
    """Return why a save failed; a full disk is named as such, whatever error a library raised."""
    text = str(error)
    is_full = getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or _is_full(folder)
    return f"the disk is full: {text}" if is_full and not isinstance(error, PackproofError) else text


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _ROOM
    except OSError:
        return False


def remove(path: Path) -> None:
    """Rename the folder out of the way at once, then remove the folder."""
    gone = path.with_name(f".{path.name}.removing")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def write(path: Path, data: bytes) -> None:
    """Flush a file to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
