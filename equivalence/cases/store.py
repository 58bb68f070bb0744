"""Save, load, replay and promote cases of every kind.

Shipped cases are small JSON files beside this module; new counterexamples lie in a run's output folder. In both places each kind except rows
has a folder of its own. A case's name is derived from its contents, so saving the same case twice keeps one file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

from equivalence.cases.result import CheckResult
from equivalence.errors import CaseError
from equivalence.subjects import join_names
from equivalence.subjects.protocol import Subject
from production.files.file_state import read_regular

SAVED = Path(__file__).resolve().parent / "saved"
"""Cases that are replayed by every run and every test, for good."""
FRESH = Path("build") / "equivalence" / "corpus"
"""Folder in which runs save shrunk counterexamples, relative to the working folder."""


class Case(Protocol):
    """Interface of a case to the store: a frozen dataclass with `note` and `origin`, which do not belong to its contents."""

    @property
    def note(self) -> str:
        """Reason for saving the case."""
        ...

    @property
    def origin(self) -> str:
        """Job that drew the case."""
        ...

    @property
    def stem(self) -> str:
        """Return the beginning of the file's name."""
        ...

    def to_json(self) -> str:
        """Return the case as JSON."""
        ...

    @classmethod
    def from_json(cls, text: str, *, where: str = ...) -> Self:
        """Read a case. CaseError names `where`."""
        ...


@dataclass(frozen=True, kw_only=True)
class CaseKind:
    """One kind of case."""

    name: str
    folder: str
    """Below a corpus; "" is the corpus itself."""
    key: str
    """A key that only the JSON of this kind has."""
    type: str
    """`module:class` of its cases."""
    check: str
    """`module:function` from a case and the subjects to the results of its checks."""


KINDS = (
    CaseKind(
        name="rows",
        folder="",
        key="messages",
        type="equivalence.cases.row:RowCase",
        check="equivalence.runner.row_cases:check_saved",
    ),
    CaseKind(
        name="data",
        folder="data",
        key="value",
        type="equivalence.cases.data:DataCase",
        check="equivalence.runner.layout_jobs:check_saved",
    ),
    CaseKind(
        name="runs",
        folder="runs",
        key="schedule",
        type="equivalence.trainers.production_run:TrainingCase",
        check="equivalence.runner.trainer_jobs:check_saved",
    ),
    CaseKind(
        name="models",
        folder="models",
        key="masked",
        type="equivalence.cases.step:ModelCase",
        check="equivalence.runner.step_runs:check_saved",
    ),
)
"""All kinds, in the order of replay."""
ALL_KINDS = tuple(kind.name for kind in KINDS)


def kind_of(case: Case) -> CaseKind:
    """Return the kind of a case."""
    name = f"{type(case).__module__}:{type(case).__qualname__}"
    return next(kind for kind in KINDS if kind.type == name)


def parse(text: str, *, where: str = "the case") -> Case:
    """Read the JSON of a case of any kind. CaseError names `where` and what is wrong."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{where} is not valid JSON: {error}; save the case again") from error
    kind = next((kind for kind in KINDS if isinstance(read, dict) and kind.key in read), None)
    if kind is None:
        keys = ", ".join(f"{kind.key} ({kind.name})" for kind in KINDS)
        raise CaseError(
            f"{where} must be a saved case: a JSON object with one of the keys {keys}; give a case that a run saved"
        )
    return cast("Case", _named(kind.type).from_json(text, where=where))


def read(path: Path) -> Case:
    """Read a saved case of any kind. CaseError names the file and what is wrong with it."""
    return parse(text_of(path), where=str(path))


def text_of(path: Path) -> str:
    """Return the text of a saved case. CaseError where it cannot be read."""
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CaseError(f"{path} cannot be read as a case: {error}; give the path of a saved case") from error


def save(case: Case, why: str, *, folder: Path = FRESH) -> Path:
    """Save a case with the reason in its kind's folder of a corpus; return its file. The name ends in a hash of what it holds."""
    case = dataclasses.replace(cast("Any", case), note=why)
    held = {"note": "", "origin": ""} | ({"labels": (), "expected": None} if hasattr(case, "expected") else {})
    key = dataclasses.replace(cast("Any", case), **held).to_json()
    stem = re.sub(r"[^a-z0-9]+", "-", case.stem.lower()).strip("-")[:80]
    path = folder / kind_of(case).folder / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(case.to_json(), encoding="utf-8")
    return path


def replay(*folders: Path, kinds: Sequence[str] = ALL_KINDS) -> Iterator[tuple[Path, Case]]:
    """Yield all saved cases of these kinds: those of the given corpora first, in the order of their names, then the shipped ones.

    CaseError names a file that cannot be read.
    """
    for folder in (*folders, SAVED):
        for kind in (kind for kind in KINDS if kind.name in kinds):
            for path in sorted((folder / kind.folder).glob("*.json")):
                yield path, cast("Case", _named(kind.type).from_json(text_of(path), where=str(path)))


def promote(path: Path, name: str) -> Path:
    """Move a saved case of any kind to the shipped cases under a name, which makes the case a permanent test.

    Raises CaseError for a file that is not a case, and for a name that is taken or not valid for a file.
    """
    case = read(path)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise CaseError(f"the name of a case must have only small letters, digits, - and _, got {name!r}")
    target = SAVED / kind_of(case).folder / f"{name}.json"
    if target.exists():
        raise CaseError(f"{target} exists already: choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(case.to_json(), encoding="utf-8")
    path.unlink()
    return target


def check(case: Case, sides: Sequence[Subject]) -> list[CheckResult]:
    """Run every check of a case again; `sides` are the subjects, which only rows ask."""
    found = _named(kind_of(case).check)(case, sides)
    return cast("list[CheckResult]", found)


def command(case: Case, path: Path | str, sides: Sequence[str]) -> str:
    """Return the command that shows a saved case's difference: on one screen of diff_row where it is a single row's."""
    named = ["--sides" if is_single_row(case) else "--subjects", join_names(sides)]
    if is_single_row(case):
        return shlex.join(["python", "-m", "tools.diff_row", "--case", str(path), *named])
    return shlex.join(
        ["python", "-m", "equivalence", "replay", str(path), *(named if kind_of(case).name == "rows" else [])]
    )


def is_single_row(case: Case) -> bool:
    """Return whether a case is one row that its sides build, without a batch, another preset or an expected outcome beside it."""
    is_row = getattr(case, "check", "") == "rows" and kind_of(case).name == "rows"
    return is_row and getattr(case, "expected", None) is None


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
