"""Place indexes and unpacked copies in a cache, and write each file whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash


def cache_places(path: Path, suffix: str, cache_folder: Path | None) -> list[Path]:
    """Return the possible places of the file for `path` with this suffix, best first (SPEC R-FILE-3).

    In `cache_folder` alone if one is given; else beside the file; else, for folders that cannot be written to, under
    `$XDG_CACHE_HOME/packproof` or `~/.cache/packproof`. Names begin with a dot, so that globs over rows pass them by.
    """
    # Names alone collide in a folder shared by several sources.
    absolute = os.path.abspath(path)  # noqa: PTH100 - resolve() would merge links that are indexed apart
    keyed = f".{path.name}.{xxhash.xxh3_64_hexdigest(os.fsencode(absolute))}{suffix}"
    if cache_folder is not None:
        return [cache_folder / keyed]
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "packproof"
    return [path.parent / f".{path.name}{suffix}", user / keyed]


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """Open a new file, readable and writable, that becomes `target` when the block ends well and is removed
    otherwise.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x+b") as file:
            yield file
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all, onto the disk before it gets its name, and return its path."""
    with atomic_file(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path
