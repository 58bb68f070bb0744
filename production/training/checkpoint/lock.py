"""Allow one run at a time in a folder, by a lock file that names host, process and run (docs/checkpoints.md).

The lock is a file of its own, taken by a hard link or by exclusive creation. Locks of the operating system are not
used: on a shared file system such locks hold on one machine only, or not at all, depending on the mount. The holder
increments a counter in the file every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from production.errors import PackproofError

NAME = ".packproof.lock"
BEAT_SECONDS = 5.0
"""Seconds between two increments of the counter in the file."""
STALE_SECONDS = 30.0
"""Seconds without an increment after which a lock of another machine belongs to a run that has ended."""


class FolderLocked(PackproofError):  # noqa: N818 - reads as the verdict it is
    """Another run writes to this folder, or has taken the folder over from this run."""


class FolderLock:
    """Holds a folder until it is closed. A process that was killed leaves the file behind, and the next run takes it over."""

    def __init__(self, folder: Path, *, key: str, say: Callable[[str], None] = lambda _text: None) -> None:
        """Take the folder, which is made where it does not exist; `key` is the folder's configuration key.

        Raises FolderLocked where a run holds the folder: at once where the run's process can be seen from here, else
        after `STALE_SECONDS` in which the other run's counter went on. A lock whose process has ended is taken over.
        """
        self._folder, self._key, self._say = folder, key, say
        self._path = folder / NAME
        self._owner: dict[str, Any] = {**_this_process(), "token": secrets.token_hex(8), "run": "", "beats": 0}
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._take()
        self._guard, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="packproof-lock", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """Return the lock, which is already taken."""
        return self

    def __exit__(self, *_raised: object) -> None:
        """Release the folder."""
        self.close()

    def name_run(self, run: str) -> None:
        """Write into the lock which run holds the folder."""
        with self._guard:
            self._owner["run"] = run
            self._write()

    def check(self) -> None:
        """Raise FolderLocked where another run has taken the folder meanwhile, such as while this process was halted."""
        owner = None
        for _ in range(5):  # a sign of life may be half written
            owner = _read(self._path)
            if owner is not None or not self._path.exists():
                break
            time.sleep(0.1)
        if owner is None or owner.get("token") != self._owner["token"]:
            raise self._locked(owner, "has taken the folder over from this run, which gave no sign of life")

    def close(self) -> None:
        """Release the lock; a lock that another run has taken over stays."""
        self._ended.set()
        self._thread.join(timeout=BEAT_SECONDS)
        with contextlib.suppress(OSError):
            owner = _read(self._path)
            if owner is not None and owner.get("token") == self._owner["token"]:
                self._path.unlink()
            os.close(self._file)

    def _take(self) -> int:
        while True:
            if (file := self._made()) is not None:
                return file
            owner = _read(self._path)
            if not self._is_left(owner):
                raise self._locked(owner, "writes to it")
            self._clear(owner)

    def _made(self) -> int | None:
        """Create the lock file with its content in one step; return None where the file already exists."""
        beside = self._path.with_name(f"{NAME}.{self._owner['token']}")
        file = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            os.write(file, _as_bytes(self._owner))
            os.fsync(file)
            os.link(beside, self._path)
        except FileExistsError:
            os.close(file)
            return None
        except OSError:  # a file system without hard links
            os.close(file)
            return self._created()
        finally:
            beside.unlink(missing_ok=True)
        return file

    def _created(self) -> int | None:
        try:
            file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except FileExistsError:
            return None
        os.write(file, _as_bytes(self._owner))
        os.fsync(file)
        return file

    def _is_left(self, owner: Mapping[str, Any] | None) -> bool:
        """Return whether the run that made the lock has ended."""
        here = _this_process()
        if owner is not None and here["boot"] and all(owner.get(name) == here[name] for name in ("boot", "processes")):
            return not _lives(owner)
        beats = None if owner is None else owner.get("beats")
        self._say(f"{self._path} is held by {_named(owner)}: waiting for its sign of life, {STALE_SECONDS:g} s at most")
        until = time.monotonic() + STALE_SECONDS
        while time.monotonic() < until:
            time.sleep(STALE_SECONDS / 30)
            now = _read(self._path)
            if now is None and not self._path.exists():
                return True
            if now is not None and now.get("beats") != beats:
                return False
        return True

    def _clear(self, owner: Mapping[str, Any] | None) -> None:
        """Move an abandoned lock out of the way, unless a third run was faster."""
        aside = self._path.with_name(f"{NAME}.{self._owner['token']}.left")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        taken = _read(aside)
        if taken is not None and (owner is None or taken.get("token") != owner.get("token")):
            with contextlib.suppress(OSError):  # of a run that lives: it finds out before it saves where this fails
                os.link(aside, self._path)
            aside.unlink(missing_ok=True)
            raise self._locked(taken, "writes to it")
        aside.unlink(missing_ok=True)
        self._say(f"took {self._folder} over from {_named(owner)}, which is gone")

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with (
                self._guard,
                contextlib.suppress(OSError),
            ):  # a server that is away for a while: the next one may come through
                self._owner["beats"] += 1
                self._write()

    def _write(self) -> None:
        """Write through the open file: a lock that was taken over is another file."""
        os.pwrite(self._file, _as_bytes(self._owner), 0)
        os.fsync(self._file)

    def _locked(self, owner: Mapping[str, Any] | None, does: str) -> FolderLocked:
        return FolderLocked(
            what=f"another run ({_named(owner)}) {does}",
            where=f"{self._key} {self._folder}",
            fix=f"give each run a folder of its own, or wait until the other run has ended; if the other run no longer exists, remove {self._path}",
        )


_WIDTH = 512
"""Bytes of the file: the content has a fixed length, so that no reader sees half of the content."""


def _as_bytes(owner: Mapping[str, Any]) -> bytes:
    return json.dumps(owner).encode()[: _WIDTH - 1].ljust(_WIDTH - 1) + b"\n"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _this_process() -> dict[str, Any]:
    """Return what identifies this process: boot of the machine, PID namespace, process number, start time."""
    return {
        "host": socket.gethostname()[:64],
        "boot": _text_of("/proc/sys/kernel/random/boot_id"),
        "processes": _link_of("/proc/self/ns/pid"),
        "process": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def _lives(owner: Mapping[str, Any]) -> bool:
    """Return whether the process of this machine still runs; a zombie counts as ended."""
    try:
        process = psutil.Process(int(owner["process"]))
        is_same = abs(process.create_time() - float(owner["started"])) < 1.0
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, ValueError, TypeError):
        return False


def _named(owner: Mapping[str, Any] | None) -> str:
    if owner is None:
        return "its lock cannot be read"
    run = f", run {owner['run']}" if owner.get("run") else ""
    return f"process {owner.get('process')} on {owner.get('host')}{run}"


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _link_of(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - no path, but a name
    except OSError:
        return ""
