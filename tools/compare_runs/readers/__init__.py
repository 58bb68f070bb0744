"""Read recorded runs: packproof's JSON lines, TensorBoard event files, exports of W&B, logs of Megatron-LM."""

from __future__ import annotations

import json
from pathlib import Path

from equivalence.errors import InputError
from production.errors import PackproofError
from production.files.file_state import is_there
from tools.compare_runs.readers.event_files import PATTERN, read_events
from tools.compare_runs.readers.lines import read_lines
from tools.compare_runs.readers.megatron_log import read_log
from tools.compare_runs.readers.names import Names, UnknownKindError
from tools.compare_runs.readers.tables import read_csv, read_json
from tools.compare_runs.run import Run

__all__ = ["Names", "read_run"]

KINDS = (
    "a Megatron-LM log, a run's folder or its metrics.jsonl, TensorBoard event files or their folder, "
    "or an export of W&B (.csv, .json, .jsonl)"
)
"""Kinds of files that can be read."""


def read_run(path: Path, names: Names) -> Run:
    """Read the run of a file or folder, whichever program wrote it.

    A folder is a run of packproof (`metrics.jsonl`), or holds event files. Raises InputError for any other file or folder and for a run
    without a loss; PackproofError for a path that does not exist or cannot be read.
    """
    if not is_there(path):
        raise PackproofError(what="there is no such file or folder", where=str(path), fix=f"give {KINDS}")
    if not path.is_dir() and not path.is_file():
        raise PackproofError(
            what="it is neither a regular file nor a folder, and may have no end", where=str(path), fix=f"give {KINDS}"
        )
    try:
        return _read(path, names)
    except UnknownKindError as error:
        raise InputError(f"{error}. To fix it: give {KINDS}") from error
    except UnicodeDecodeError as error:
        raise PackproofError(
            what=f"the file must be UTF-8 text, and byte {error.start:,} is not", where=str(path), fix=f"give {KINDS}"
        ) from error
    except OSError as error:
        raise PackproofError(
            what=f"it cannot be read ({error.strerror or error})",
            where=str(error.filename or path),
            fix="see that this user may read it",
        ) from error


def _read(path: Path, names: Names) -> Run:
    if path.is_dir():
        if (path / "metrics.jsonl").exists():
            return read_lines(path / "metrics.jsonl", names)
        if next(path.glob(PATTERN), None) is not None:
            return read_events(path, names)
        raise UnknownKindError(f"{path}: neither metrics.jsonl nor event files of TensorBoard lie in it")
    if path.name.startswith(PATTERN.removesuffix("*")):
        return read_events(path, names)
    if path.suffix == ".wandb":
        raise InputError(f"{path}: W&B's own file; sync it and export the run's history as CSV or JSON")
    if path.suffix == ".csv":
        return read_csv(path, names)
    if path.suffix == ".json":
        return read_json(path, names)
    if path.suffix == ".jsonl":
        return read_lines(path, names) if _is_ours(path) else read_json(path, names)
    return read_log(path, names)


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            first = json.loads(file.readline())
        except (ValueError, RecursionError):
            return True  # whose reader says which line it is
    return isinstance(first, dict) and "kind" in first
