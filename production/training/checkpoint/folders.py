"""Hold the folders that a run writes to, so that no other run writes there at the same time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import distributed

from production.errors import PackproofError
from production.training.checkpoint.lock import FolderLock
from production.training.config import Job


@dataclass(frozen=True, kw_only=True)
class HeldFolders:
    """Holds the locks of the first rank; other ranks hold no lock."""

    locks: Sequence[FolderLock]
    """One lock for each folder."""

    def name_run(self, run: str) -> None:
        """Write the run's name into the locks."""
        for lock in self.locks:
            lock.name_run(run)

    def check(self) -> None:
        """Raise lock.FolderLocked where another run has taken over one of the folders."""
        for lock in self.locks:
            lock.check()


@contextlib.contextmanager
def held_folders(job: Job) -> Iterator[HeldFolders]:
    """Hold the folders of checkpoints and of logs. Collective over the world.

    Raises lock.FolderLocked on all ranks where another run holds a folder.
    """
    with contextlib.ExitStack() as held:
        locks: list[FolderLock] = []
        fault: PackproofError | None = None
        if distributed.get_rank() == 0:
            try:
                locks += [held.enter_context(FolderLock(folder, key=key, say=_say)) for folder, key in _folders(job)]
            except PackproofError as error:
                fault = error
            except OSError as error:
                fix = "give folders that this machine can write to"
                fault = PackproofError(what=f"cannot be locked: {error}", where=str(error.filename), fix=fix)
        faults = [fault]
        distributed.broadcast_object_list(faults, src=0)
        if faults[0] is not None:
            raise faults[0]
        yield HeldFolders(locks=locks)


def _folders(job: Job) -> list[tuple[Path, str]]:
    """Return each folder once, with the configuration key that names the folder."""
    keys = ["logger.log_dir", *(["checkpointing.checkpoint_dir"] if job.checkpointing.enabled else [])]
    paths = {"logger.log_dir": job.logger.log_dir, "checkpointing.checkpoint_dir": job.checkpointing.checkpoint_dir}
    found = {Path(paths[key]).resolve(): (Path(paths[key]), job.where(key)) for key in keys}
    return list(found.values())


def _say(text: str) -> None:
    print(text, file=sys.stderr)
