"""Packed files as a person would read them: all lines with Python's own JSON, and which of them are rows (docs/SPEC.md#files)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


class LineRefused(ValueError):  # noqa: N818 - reads as the verdict it is
    """Error for a line that does not hold a row; `kind` is the kind in SPEC's file rules."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of one of several files."""

    file: int
    """Number of the file, from 0."""
    line: int
    """From 1."""
    start: int
    """Byte of the unpacked file."""
    data: bytes
    """With its newline, if it has one."""
    messages: list[Message]
    """Empty if the line does not hold a row."""
    fault: str | None
    """Kind of the fault; None for a line that holds a row."""


def lines_of(content: bytes) -> list[bytes]:
    """Split a file's bytes after each newline, and only there. R-FILE-1, R-FILE-2."""
    pieces = content.split(b"\n")
    return [piece + b"\n" for piece in pieces[:-1]] + [piece for piece in pieces[-1:] if piece]


def read_lines(contents: Sequence[bytes], chat_key: str) -> list[Line]:
    """Read every line of the files, end to end in the order given."""
    found = []
    for file, content in enumerate(contents):
        start = 0
        for number, data in enumerate(lines_of(content), 1):
            messages, fault = [], None
            try:
                messages = read_row(data, chat_key)
            except LineRefused as refused:
                fault = refused.kind
            found.append(Line(file=file, line=number, start=start, data=data, messages=messages, fault=fault))
            start += len(data)
    return found


def rows_of(lines: Sequence[Line], *, skip: bool) -> list[Line]:
    """Return the lines that are rows, in order: all of them, or with `skip` the good ones only. R-FILE-8.

    A row's number is its place in this list, so a skipped line takes no number.
    """
    return [line for line in lines if not (skip and line.fault)]


def read_row(data: bytes, chat_key: str) -> list[Message]:
    """Return the messages of a line. LineRefused names the fault: of the bytes, then of the JSON, then of the shape. R-FILE-6, R-FILE-7."""
    text = read_text(data)
    try:
        row = json.loads(text, object_pairs_hook=keys_once, parse_constant=no_number)
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        raise LineRefused("truncated_last_line" if ends_early and data[-1:] != b"\n" else "invalid_json") from None
    if "\\u" in text:  # half of a surrogate pair can only be written so
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise LineRefused("lone_surrogate") from None
    return read_messages(row, chat_key)


def read_text(data: bytes) -> str:
    """Return a line's text, without white space at its end."""
    line = data.rstrip(b" \t\r\n")
    if not line:
        raise LineRefused("blank_line")
    if line.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise LineRefused("bom")
    if b"\0" in line:
        raise LineRefused("nul_byte")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        ends_early = error.reason == "unexpected end of data" and error.end == len(line) and data[-1:] != b"\n"
        raise LineRefused("truncated_last_line" if ends_early else "invalid_utf8") from None


def read_messages(row: Any, chat_key: str) -> list[Message]:
    """Return the messages of parsed JSON."""
    if not isinstance(row, dict):
        raise LineRefused("row_not_object")
    if chat_key not in row:
        raise LineRefused("missing_chat_key")
    messages = row[chat_key]
    if not isinstance(messages, list):
        raise LineRefused("row_not_list")
    if not messages:
        raise LineRefused("empty_row")
    for message in messages:
        if not isinstance(message, dict):
            raise LineRefused("message_not_object")
        for key in ("role", "content"):
            if key not in message:
                raise LineRefused(f"missing_{key}")
            if not isinstance(message[key], str):
                kinds = {type(None): "content_null", list: "content_parts"} if key == "content" else {}
                raise LineRefused(kinds.get(type(message[key]), f"{key}_not_text"))
    return messages


def keys_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of an object's keys and values; refuse a key that appears twice."""
    if len(dict(pairs)) < len(pairs):
        raise LineRefused("duplicate_key")
    return dict(pairs)


def no_number(_: str) -> None:
    """Refuse NaN and Infinity, which are not JSON."""
    raise LineRefused("invalid_json")
