"""The corpus: saved cases as small JSON, shipped ones beside this file, fresh counterexamples in a run's output folder.

A case is named by what it holds, so saving the same one twice keeps one file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from equivalence.cases import RowCase, read_case
from equivalence.errors import CaseError

SAVED = Path(__file__).resolve().parent / "saved"
"""Cases that are replayed by every run and every test, for good."""
FRESH = Path("build") / "equivalence" / "corpus"
"""Where runs save shrunk counterexamples, from the working folder."""


def save(case: RowCase, why: str, *, folder: Path = FRESH) -> Path:
    """Save a case with the reason; returns its file. The name says the classes and a hash of the row and its settings."""
    case = case.with_(note=why)
    key = case.with_(note="", origin="", labels=(), expected=None).to_json()
    labels = re.sub(r"[^a-z0-9]+", "-", " ".join(case.labels[:2]).lower()).strip("-") or "row"
    path = folder / f"{case.settings.prompt_format}-{labels[:60]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(case.to_json(), encoding="utf-8")
    return path


def replay(*folders: Path) -> Iterator[tuple[Path, RowCase]]:
    """All saved cases: those of the given folders first, in the order of their names, then the shipped ones.

    CaseError names a file that cannot be read.
    """
    for folder in (*folders, SAVED):
        for path in sorted(folder.glob("*.json")):
            yield path, read_case(path)


def promote(path: Path, name: str) -> Path:
    """Move a saved case to the shipped ones under a name; from then on it is a permanent test.

    CaseError if the file is no case, or the name is taken or unfit for a file.
    """
    case = read_case(path)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise CaseError(f"{name!r} is no name for a case: use small letters, digits, - and _")
    target = SAVED / f"{name}.json"
    if target.exists():
        raise CaseError(f"{target} exists already: choose another name")
    SAVED.mkdir(exist_ok=True)
    target.write_text(case.to_json(), encoding="utf-8")
    path.unlink()
    return target
