"""Exports of W&B: CSV of a chart or of a run's history, JSON of its history as a list, columns, or one object a line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from equivalence.errors import InputError
from production.files.file_state import read_regular
from tools.compare_runs.readers.names import Names, UnknownKindError, no_loss, validation_of
from tools.compare_runs.run import Gathered, Run, to_number

STEPS = ("_step", "Step", "step", "trainer/global_step", "train/global_step")
"""Names of the column of steps; the first one present counts."""
_CHART_ENDS = ("__MIN", "__MAX")


def read_csv(path: Path, names: Names) -> Run:
    """Read the run of a CSV export. Raises InputError for a chart of several runs, and in the cases of `read_json`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = [row for row in csv.DictReader(file, strict=True) if None not in row.values()]  # no cut rows
        except csv.Error as error:
            raise InputError(f"{path}: the file must be CSV, and cannot be read as such: {error}") from error
    return _run(path, names, [_charted(path, row) for row in rows], "W&B export (CSV)")


def read_json(path: Path, names: Names) -> Run:
    """Read the run of a JSON export. Raises InputError for an export without a column of steps or without a loss."""
    text = read_regular(path).decode()
    try:
        content = json.loads(text, parse_float=Decimal)  # which keeps the digits that were written
    except (ValueError, RecursionError):
        lines = [line for line in text.split("\n") if line.strip()]
        if len(lines) > 1 and not text.endswith("\n") and not lines[-1].rstrip().endswith("}"):
            lines.pop()  # it was cut, and a line that is not whole is no line
        try:
            content = [json.loads(line, parse_float=Decimal) for line in lines]
        except (ValueError, RecursionError) as error:
            raise UnknownKindError(f"{path}: neither JSON nor one JSON object a line: {error}") from error
    rows = list(_columns(path, content)) if isinstance(content, dict) and not _is_row(content) else content
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UnknownKindError(f"{path}: no history of a run: give a list of objects, columns, or one object a line")
    return _run(path, names, rows, "W&B export (JSON)")


def _is_row(content: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, list | dict) for name, value in content.items() if name in STEPS)


def _columns(path: Path, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield rows from columns that are lists, or objects by index, as pandas writes them."""
    columns = {name: list(values.values()) if isinstance(values, dict) else values for name, values in content.items()}
    if not all(isinstance(values, list) for values in columns.values()):
        raise InputError(f"{path}: some columns are lists and some are not")
    if len({len(values) for values in columns.values()}) > 1:
        raise InputError(f"{path}: all columns must have one length")
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _charted(path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the additions of a chart's export from a row: the prefix `RUN - NAME`, and two columns of extremes."""
    found: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for column, value in row.items():
        if column is None or column.endswith(_CHART_ENDS):
            continue
        owner, dash, name = column.rpartition(" - ")
        if not dash:
            found[column] = value
            continue
        if owners.setdefault(name, owner) != owner:
            raise InputError(f"{path}: {name} of several runs, {owners[name]} and {owner}: export one run at a time")
        found[name] = value
    return found


def _run(path: Path, names: Names, rows: Sequence[Mapping[str, Any]], source: str) -> Run:
    recorded = {name for row in rows for name in row}
    column = next((name for name in STEPS if name in recorded), None)
    if column is None:
        raise UnknownKindError(
            f"{path}: no column of steps ({', '.join(STEPS)}) among {', '.join(sorted(recorded)[:20])}"
        )
    found = names.find(recorded)
    if not any(meaning.series == "loss" for meaning in found.values()):
        raise no_loss(path, recorded)
    gathered = Gathered()
    for row in rows:
        step = to_number(row.get(column))
        if step is None:
            continue
        for name, meaning in found.items():
            written = row.get(name)
            value = to_number(written)
            if value is not None:
                text = str(written) if meaning.factor == 1 else None
                gathered.put(meaning.series, int(step) + meaning.shift, value * meaning.factor, text=text)
    gathered.set_untrained_aside()
    precisions = gathered.precisions()
    return Run(
        name=path.stem,
        source=source,
        place=str(path),
        series=gathered.series,
        precisions=precisions,
        untrained=frozenset(gathered.untrained),
        validation=validation_of(found),
        remarks=[
            "an export of W&B may leave steps out: those that both runs have are compared",
            *([f"the export has losses to {precisions['loss'].words}"] if "loss" in precisions else []),
        ],
    )
