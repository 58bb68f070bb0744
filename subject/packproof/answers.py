"""Answers to the vectors in a file, for a CI that keeps no process: one JSON line a case, judged by the standard library alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from packproof.cases import Case, VectorsError
from packproof.verdict import Refused


def write_answers(
    path: Path, answers: Iterable[tuple[Case, Any]], conventions: Mapping[str, str] | None = None
) -> None:
    """Write outcomes as answers: the conventions first, then a line a case. Arrays and tensors become lists."""
    lines = [json.dumps({"conventions": dict(conventions or {})})]
    for case, outcome in answers:
        if isinstance(outcome, Refused):
            lines.append(json.dumps({"id": case.id, "refused": outcome.reason}))
        else:
            lines.append(json.dumps({"id": case.id, "packs": outcome}, default=lambda value: value.tolist()))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_answers(path: Path, cases: Sequence[Case]) -> tuple[list[tuple[Case, Any]], dict[str, str]]:
    """Return the outcome of every case, and the declared conventions. VectorsError names the line that cannot be used.

    Every case needs an answer: one that is left out would be passed unseen.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise VectorsError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise VectorsError(f"{path} is not UTF-8 text; write JSON lines") from error
    known = {case.id: case for case in cases}
    conventions: dict[str, str] = {}
    outcomes: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        read = _object(line, path, number)
        if "conventions" in read and number == 1:
            conventions = dict(read["conventions"])
            continue
        name = read.get("id")
        if name not in known or name in outcomes:
            raise VectorsError(
                "%s, line %d: %s; take the ids of vectors.jsonl, each once"
                % (
                    path,
                    number,
                    f"no case has the id {name!r}" if name not in known else f"id {name!r} is there twice",
                )
            )
        if ("packs" in read) == ("refused" in read):
            raise VectorsError("%s, line %d: an answer needs either `packs` or `refused`, not both" % (path, number))
        outcomes[str(name)] = read["packs"] if "packs" in read else Refused(str(read["refused"]))
    missing = [case.id for case in cases if case.id not in outcomes]
    if missing:
        raise VectorsError(
            "%s answers %d of %d %s; the first without an answer is %s"
            % (path, len(outcomes), len(cases), "case" if len(cases) == 1 else "cases", missing[0])
        )
    return [(case, outcomes[case.id]) for case in cases], conventions


def _object(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        read = json.loads(line)
    except ValueError as error:
        raise VectorsError("%s, line %d is not JSON: %s" % (path, number, error)) from error
    if not isinstance(read, dict):
        raise VectorsError("%s, line %d must be an object with an id, got %s" % (path, number, type(read).__name__))
    return read
