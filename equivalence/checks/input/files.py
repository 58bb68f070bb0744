"""File layers: what the direct path's reader and Megatron-LM's make of the same bytes, and where they differ on purpose.

Megatron-LM reads with Hugging Face datasets over Arrow; the direct path refuses what Arrow guesses at.
"""

from __future__ import annotations

import datetime as dt
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.subjects.megatron_lm import read_file
from production.errors import BadInput
from production.files.source import open_source

Outcome = list[Any] | str
"""The rows' messages, or the kind of the refusal."""


@dataclass(frozen=True, kw_only=True)
class FileLayer:
    """One file that the two readers may take differently."""

    name: str
    content: bytes
    ours: Outcome
    """Result of the direct path's reader."""
    theirs: Outcome
    """Result of Megatron-LM's reader; an error by the name of its type."""
    why: str
    """Empty where both must be equal."""

    @property
    def diverges(self) -> bool:
        """Return whether the two are meant to differ."""
        return self.ours != self.theirs


def _line(*messages: str) -> bytes:
    return ('{"messages": [' + ", ".join(messages) + "]}\n").encode()


def _message(content: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


_GOOD = _line('{"role": "system", "content": "good"}')
_GOOD_ROW = [_message("good")]
_DATES = _line('{"role": "system", "content": "2024-01-31"}', '{"role": "user", "content": "2024-02-01"}')
_ARROW_FAILS = "DatasetGenerationError"

LAYERS: tuple[FileLayer, ...] = (
    FileLayer(name="plain", content=_GOOD * 2, ours=[_GOOD_ROW] * 2, theirs=[_GOOD_ROW] * 2, why=""),
    FileLayer(
        name="raw line separators",
        content=_line('{"role": "system", "content": "a\u2028b\u0085c"}') + _GOOD,
        ours=[[_message("a\u2028b\u0085c")], _GOOD_ROW],
        theirs=[[_message("a\u2028b\u0085c")], _GOOD_ROW],
        why="",
    ),
    FileLayer(
        name="surrogate pair",
        content=_line(r'{"role": "system", "content": "\ud83d\ude00"}') + _GOOD,
        ours=[[_message("😀")], _GOOD_ROW],
        theirs=[[_message("😀")], _GOOD_ROW],
        why="",
    ),
    FileLayer(
        name="carriage returns",
        content=_GOOD.replace(b"\n", b"\r\n") * 2,
        ours=[_GOOD_ROW] * 2,
        theirs=[_GOOD_ROW] * 2,
        why="",
    ),
    FileLayer(
        name="no last newline", content=_GOOD + _GOOD.strip(), ours=[_GOOD_ROW] * 2, theirs=[_GOOD_ROW] * 2, why=""
    ),
    FileLayer(
        name="tool calls",
        content=_line('{"role": "system", "content": "a", "tool_calls": [{"name": "f"}]}') + _GOOD,
        ours=[[{**_message("a"), "tool_calls": [{"name": "f"}]}], _GOOD_ROW],
        theirs=[[{**_message("a"), "tool_calls": [{"name": "f"}]}], _GOOD_ROW],
        why="",
    ),
    FileLayer(
        name="blank line",
        content=_GOOD + b"\n" + _GOOD,
        ours="blank_line",
        theirs=[_GOOD_ROW] * 2,
        why="Arrow skips blank lines, so row numbers are no line numbers.",
    ),
    FileLayer(
        name="byte order mark",
        content=b"\xef\xbb\xbf" + _GOOD * 2,
        ours="bom",
        theirs=[_GOOD_ROW] * 2,
        why="Arrow drops the mark at the start of a file and fails on one further in, where files were joined.",
    ),
    FileLayer(
        name="two rows on a line",
        content=_GOOD.strip() + b" " + _GOOD,
        ours="invalid_json",
        theirs=[_GOOD_ROW] * 2,
        why="Arrow splits by JSON values, not by lines.",
    ),
    FileLayer(
        name="a row over two lines",
        content=_GOOD.replace(b": [", b":\n [") + _GOOD,
        ours="invalid_json",
        theirs=[_GOOD_ROW] * 2,
        why="Arrow splits by JSON values, not by lines.",
    ),
    FileLayer(
        name="duplicate key, one row",
        content=_line('{"role": "system", "content": "a", "content": "b"}'),
        ours="duplicate_key",
        theirs=[_message("b")],
        why="Arrow refuses it, and the reader falls back to a parser that takes a one-line file for a table: the last value wins and each message is a row.",
    ),
    FileLayer(
        name="duplicate key, two rows",
        content=_line('{"role": "system", "content": "a", "content": "b"}') + _GOOD,
        ours="duplicate_key",
        theirs=_ARROW_FAILS,
        why="Both refuse; only one says which line.",
    ),
    FileLayer(
        name="lone surrogate, one row",
        content=_line(r'{"role": "system", "content": "a\ud800b"}'),
        ours="lone_surrogate",
        theirs=[_message("ab")],
        why="The fallback drops the surrogate, and each message is a row.",
    ),
    FileLayer(
        name="lone surrogate, two rows",
        content=_line(r'{"role": "system", "content": "a\ud800b"}') + _GOOD,
        ours="lone_surrogate",
        theirs=_ARROW_FAILS,
        why="Both refuse; only one says which line.",
    ),
    FileLayer(
        name="contents that all look like dates",
        content=_DATES,
        ours=[[_message("2024-01-31"), _message("2024-02-01", "user")]],
        theirs=[[_message(dt.datetime(2024, 1, 31)), _message(dt.datetime(2024, 2, 1), "user")]],  # noqa: DTZ001
        why="Arrow guesses a column's type: text that looks like dates in every row becomes dates.",
    ),
    FileLayer(
        name="contents of which some look like dates",
        content=_DATES + _GOOD,
        ours=[[_message("2024-01-31"), _message("2024-02-01", "user")], _GOOD_ROW],
        theirs=[[_message("2024-01-31"), _message("2024-02-01", "user")], _GOOD_ROW],
        why="",
    ),
    FileLayer(
        name="null content",
        content=_line('{"role": "system", "content": null}') + _GOOD,
        ours="content_null",
        theirs=[[_message(None)], _GOOD_ROW],
        why="`identity` renders it as nothing, the Nemotron formats fail deep in a template.",
    ),
    FileLayer(
        name="missing content",
        content=_line('{"role": "system"}') + _GOOD,
        ours="missing_content",
        theirs=[[{"role": "system"}], _GOOD_ROW],
        why="As null content.",
    ),
    FileLayer(
        name="content parts",
        content=_line('{"role": "system", "content": [{"type": "text", "text": "x"}]}') + _GOOD,
        ours="content_parts",
        theirs=[[_message([{"type": "text", "text": "x"}])], _GOOD_ROW],
        why="`identity` would train on the list's Python text.",
    ),
    FileLayer(
        name="numbers as content",
        content=_line('{"role": "system", "content": 1}') + _GOOD,
        ours="content_not_text",
        theirs=[[_message(1)], _GOOD_ROW],
        why="`identity` would train on the number's text.",
    ),
    FileLayer(
        name="messages are no list",
        content=b'{"messages": {"role": "system", "content": "b"}}\n' + _GOOD,
        ours="row_not_list",
        theirs=[_message("b"), _GOOD_ROW],
        why="The dataset then fails on the first key as if it were a message.",
    ),
    FileLayer(
        name="a row with no message",
        content=b'{"messages": []}\n' + _GOOD,
        ours="empty_row",
        theirs=[[], _GOOD_ROW],
        why="The dataset then fails with an IndexError, each epoch.",
    ),
    FileLayer(name="an empty file", content=b"", ours="empty_file", theirs="StopIteration", why="Both refuse."),
    FileLayer(
        name="truncated last line",
        content=_GOOD + _GOOD[:25],
        ours="truncated_last_line",
        theirs=_ARROW_FAILS,
        why="Both refuse; only one says which line.",
    ),
    FileLayer(
        name="invalid UTF-8",
        content=_line('{"role": "system", "content": "a"}').replace(b'"a"', b'"a\xff"') + _GOOD,
        ours="invalid_utf8",
        theirs="UnicodeDecodeError",
        why="Both refuse; only one says which line.",
    ),
    FileLayer(
        name="NUL byte",
        content=_line('{"role": "system", "content": "a"}').replace(b'"a"', b'"a\x00"') + _GOOD,
        ours="nul_byte",
        theirs=_ARROW_FAILS,
        why="Both refuse; only one says which line.",
    ),
)


def check_file_layers(folder: Path) -> Iterator[tuple[FileLayer, CheckResult]]:
    """Write each file, read it with both readers, and compare both results with the registered results."""
    for number, layer in enumerate(LAYERS):
        yield layer, _check(layer, folder / f"{number:02d}.jsonl")


def check_file_layer(layer: FileLayer) -> CheckResult:
    """Check one layer, as a saved case holds it."""
    with tempfile.TemporaryDirectory(prefix="packproof-layer-") as folder:
        return _check(layer, Path(folder) / "layer.jsonl")


def _check(layer: FileLayer, path: Path) -> CheckResult:
    path.write_bytes(layer.content)
    findings = []
    for side, wanted, found in (
        ("production", layer.ours, _read_ours(path, path.parent)),
        ("megatron_lm", layer.theirs, _read_theirs(path)),
    ):
        if found != wanted:
            difference = Difference(tensor="rows", position=None, left=wanted, right=found, kind="other")
            findings.append(Finding(left=f"registered: {layer.name}", right=side, differences=[difference]))
    return CheckResult(check="files", findings=findings, fired={layer.name: int(layer.diverges)})


def _read_ours(path: Path, folder: Path) -> Outcome:
    try:
        return list(open_source(path, cache_folder=folder / "index"))
    except BadInput as error:
        return error.kind


def _read_theirs(path: Path) -> Outcome:
    logging.disable(logging.ERROR)  # its fallback logs each failure; the outcome is what is compared
    try:
        rows = read_file(path)
        return [rows[index] for index in range(len(rows))]
    except Exception as error:  # noqa: BLE001 - whatever it raises is its outcome
        return type(error).__name__
    finally:
        logging.disable(logging.NOTSET)
