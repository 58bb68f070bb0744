"""Remember which lines of a file are bad, so that a source that skips them pays for the search only once (R-FILE-8)."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from production.files.cache import atomic_file
from production.files.index import IndexHeader

_VERSION = 1
"""Version of the verdicts, raised whenever a rule about rows changes: older verdicts are void then."""
_DIGEST_BYTES = 16


class BadLine(NamedTuple):
    """Names a line that is not a row."""

    line: int
    """1-based."""
    byte: int
    """0-based offset of the fault in the file."""
    kind: str
    """One word for the fault, of R-FILE."""


class _Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    chat_key: str
    index: bytes
    """The index header, which holds the file's identity."""
    bad: list[BadLine]


def verdicts_path(index_path: Path, chat_key: str) -> Path:
    """Return the path beside the index, one file for each chat key."""
    return index_path.with_name(f"{index_path.name}.{xxhash.xxh3_64_hexdigest(chat_key.encode())}.bad")


def save_verdicts(path: Path, header: IndexHeader, chat_key: str, bad: list[BadLine]) -> None:
    """Save the verdicts of a full pass; a folder that has become read-only costs the next opening another pass."""
    data = msgspec.json.encode(_Verdicts(version=_VERSION, chat_key=chat_key, index=header.pack(), bad=bad))
    with contextlib.suppress(OSError), atomic_file(path) as file:
        file.write(xxhash.xxh3_128_digest(data) + data)


def load_verdicts(path: Path, header: IndexHeader, chat_key: str) -> list[BadLine] | None:
    """Return the saved verdicts; None without verdicts for this very file, key and set of rules."""
    try:
        content = path.read_bytes()
        if xxhash.xxh3_128_digest(content[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
            return None
        found = msgspec.json.decode(content[_DIGEST_BYTES:], type=_Verdicts)
    except (OSError, msgspec.DecodeError):
        return None
    current = (found.version, found.chat_key, found.index) == (_VERSION, chat_key, header.pack())
    return found.bad if current else None
