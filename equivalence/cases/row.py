"""A row case: everything needed to build one row again, as small JSON that stays readable and stable in git."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from equivalence.cases.difference import Difference
from equivalence.errors import CaseError
from equivalence.subjects import Row, RowSettings
from equivalence.subjects.protocol import ROW_TENSORS
from production.files.file_state import read_regular

SCHEMA = 1
"""Raised when a saved case can no longer be read as it was meant."""


@dataclass(frozen=True, kw_only=True)
class RowCase:
    """One row to build. `replace` from dataclasses changes it."""

    messages: tuple[Any, ...]
    """The row's messages; whatever JSON can say, also what no message may be."""
    settings: RowSettings
    tokenizer: str
    """A name that `equivalence.generators.tokenizers.load` knows, or the path of a folder."""
    labels: tuple[str, ...] = ()
    """Fault classes it was built for."""
    note: str = ""
    """Reason for saving the case."""
    origin: str = ""
    """Origin of the case: a unit with its seed, a file with its row."""
    check: str = "rows"
    """rows, batches, divergences or smallest (a registered divergence's row): what showed it, and what replays it."""
    others: tuple[tuple[Any, ...], ...] = ()
    """Messages of the other rows of its batch."""
    expected: Mapping[str, Any] | None = field(default=None, hash=False)
    """Expected values for every side: some of Row's fields as lists, or {"refusal": kind}."""

    @property
    def stem(self) -> str:
        """Return the beginning of the file's name: format and classes."""
        return f"{self.settings.prompt_format} {' '.join(self.labels[:2]) or 'row'}"

    def to_json(self) -> str:
        """Return the case as JSON: sorted, one message on each line, ASCII only, so that lone surrogates survive."""
        head = {
            "schema": SCHEMA,
            "note": self.note,
            "origin": self.origin,
            "labels": list(self.labels),
            "tokenizer": self.tokenizer,
            "settings": _settings_to_json(self.settings),
            **({} if self.check == "rows" else {"check": self.check}),
            **({"others": self.others} if self.others else {}),
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        if self.expected is not None:
            values = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in self.expected.items())
            lines.append(f'  "expected": {{\n{values}\n  }}')
        messages = ",\n".join(f"    {json.dumps(message)}" for message in self.messages)
        lines.append(f'  "messages": [\n{messages}\n  ]' if messages else '  "messages": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "the case") -> RowCase:
        """Read a case. CaseError names `where` and what is wrong."""
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CaseError(f"{where} is not valid JSON: {error}; save the case again") from error
        if not isinstance(read, dict) or read.get("schema") != SCHEMA:
            found = read.get("schema") if isinstance(read, dict) else type(read).__name__
            raise CaseError(f"{where} has schema {found!r}, this packproof reads {SCHEMA}; save the case again")
        known = {each.name for each in fields(cls)} | {"schema"}
        if unknown := sorted(set(read) - known):
            raise CaseError(f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        if not isinstance(read.get("messages"), list):
            raise CaseError(f"{where} has no list of messages; save the case again")
        try:
            return cls(
                messages=tuple(read["messages"]),
                settings=RowSettings(**read["settings"]),
                tokenizer=read["tokenizer"],
                labels=tuple(read.get("labels", ())),
                note=read.get("note", ""),
                origin=read.get("origin", ""),
                check=read.get("check", "rows"),
                others=tuple(map(tuple, read.get("others", ()))),
                expected=read.get("expected"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CaseError(
                f"{where} cannot be read as a case: {error!r}; a case needs messages, settings and tokenizer"
            ) from error

    def with_(self, **changes: Any) -> RowCase:
        """Return the same case with some fields changed."""
        return replace(self, **changes)


def read_case(path: Path) -> RowCase:
    """Read a saved case. CaseError names the file and what is wrong with it."""
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CaseError(f"{path} cannot be read as a case: {error}; give the path of a saved case") from error
    return RowCase.from_json(text, where=str(path))


def expectation(row: Row) -> dict[str, Any]:
    """Return a row as what a case may expect: its tensors as lists and its longest segment, or its refusal's kind."""
    if row.refusal is not None:
        return {"refusal": row.refusal.kind}
    return {name: getattr(row, name).tolist() for name in ROW_TENSORS} | {"max_seqlen": row.max_seqlen}


def differs_from_expected(row: Row, expected: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of a row from the case's expected values, one for each field; empty if none."""
    if "refusal" in expected or row.refusal is not None:
        found = row.refusal.kind if row.refusal else None
        wanted = expected.get("refusal")
        return [] if found == wanted else [_wrong("refusal", wanted, found)]
    wrong = []
    for name, wanted in expected.items():
        value = getattr(row, name)
        found = value.tolist() if hasattr(value, "tolist") else value
        if found != wanted:
            wrong.append(_wrong(name, wanted, found))
    return wrong


def _wrong(name: str, wanted: object, found: object) -> Difference:
    return Difference(tensor=name, position=None, left=wanted, right=found, kind="other")


def _settings_to_json(settings: RowSettings) -> dict[str, Any]:
    """Return all fields that are not at their default, so that a file holds only what matters (pack_length has no default)."""
    return {
        each.name: cast("Any", getattr(settings, each.name))
        for each in fields(settings)
        if getattr(settings, each.name) != each.default or each.name in ("prompt_format", "semantics")
    }
