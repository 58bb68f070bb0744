"""Recognize files that are not JSON lines by their first bytes, and rows of another shape (R-FILE-11, R-FILE-12)."""

from __future__ import annotations

import json
from typing import Any

from production.errors import BadInput

FIRST_BYTES = 1 << 16
"""Bytes of a file that are looked at."""
_TO_JSON = "to_json('rows.jsonl', lines=True, force_ascii=False)"
_REWRITE = "write its rows as JSON lines, one row a line"
_UTF8 = "save it as UTF-8 (iconv -f {} -t UTF-8)"
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1", "a Parquet file", f"write it as JSON lines: datasets.Dataset.from_parquet(path).{_TO_JSON}"),
    (b"ARROW1", "an Arrow file", f"write it as JSON lines: datasets.Dataset.from_file(path).{_TO_JSON}"),
    (b"\xff\xff\xff\xff", "an Arrow stream", f"write it as JSON lines: datasets.Dataset.from_file(path).{_TO_JSON}"),
    (b"MMIDIDX\0", "the index of a Megatron-LM dataset", "name the JSON lines that it was made from"),
    (b"BZh", "packed with bzip2", "unpack it with bunzip2"),
    (b"\xfd7zXZ\0", "packed with xz", "unpack it with unxz"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip (a .pt or .npz file is one, too)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"\x93NUMPY", "a NumPy file", _REWRITE),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _REWRITE),
    (b"SQLite format 3\0", "an SQLite database", _REWRITE),
    (b"\x80\x02", "a Python pickle", _REWRITE),
    (b"\x80\x03", "a Python pickle", _REWRITE),
    (b"\x80\x04", "a Python pickle", _REWRITE),
    (b"\x80\x05", "a Python pickle", _REWRITE),
    (b"%PDF-", "a PDF", _REWRITE),
    (b"\xff\xfe\0\0", "UTF-32 text", _UTF8.format("UTF-32")),
    (b"\0\0\xfe\xff", "UTF-32 text", _UTF8.format("UTF-32")),
    (b"\xff\xfe", "UTF-16 text", _UTF8.format("UTF-16")),
    (b"\xfe\xff", "UTF-16 text", _UTF8.format("UTF-16")),
    (b"{\0", "UTF-16 text without a byte order mark", _UTF8.format("UTF-16LE")),
    (b"\0{", "UTF-16 text without a byte order mark", _UTF8.format("UTF-16BE")),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself", "fetch the file with git lfs pull"),
    (b"<!DOCTYPE", "a web page", "download the file again: the address gave a page, perhaps of a login"),
    (b"<!doctype", "a web page", "download the file again: the address gave a page, perhaps of a login"),
    (b"<html", "a web page", "download the file again: the address gave a page, perhaps of a login"),
)
_BYTE_ORDER_MARKS = (b"\xff\xfe\0\0", b"\0\0\xfe\xff", b"\xff\xfe", b"\xfe\xff")
_COMPRESSED = {"gzip": (b"\x1f\x8b", ".gz"), "Zstandard": (b"\x28\xb5\x2f\xfd", ".zst")}


def check_packed(first: bytes, expected: str | None, *, file: str) -> None:
    """Refuse a file whose name says another compression than its first bytes; `expected` is `gzip`, `Zstandard` or None for none.

    Raises BadInput `other_format`, `corrupt_compressed`, or as `check_contents`.
    """
    found = next((name for name, (magic, _) in _COMPRESSED.items() if first.startswith(magic)), None)
    if found == expected or not first:
        if expected is None:
            check_contents(first, file=file)
        return
    if found is not None:
        says = "no compression" if expected is None else expected
        raise _other(
            f"the file is packed with {found}, and its name says {says}",
            f"rename it to end in {_COMPRESSED[found][1]}",
            file,
        )
    check_contents(first, file=file)
    if expected is not None and first.lstrip()[:1] in (b"{", b"["):
        what, fix = f"the file is plain text, and its name says {expected}", "take that ending off its name"
        raise BadInput(kind="corrupt_compressed", what=what, fix=fix, file=file, line=1, byte=0)


def check_contents(first: bytes, *, file: str) -> None:
    """Refuse a file that is not JSON lines by its first bytes.

    Raises BadInput `other_format`, `bom`, `json_array` or `indented_json`.
    """
    for magic, what, fix in _MAGIC:
        if first.startswith(magic):
            kind = "bom" if magic in _BYTE_ORDER_MARKS else "other_format"
            raise BadInput(kind=kind, what=f"the file is {what}", fix=fix, file=file, line=1, byte=0)
    line, ends, rest = first.lstrip(b" \t\r\n").partition(b"\n")
    line = line.strip()
    if line == b"{":
        what, fix = "rows are spread over several lines (indented JSON)", "write each row on one line: jq -c . FILE"
        raise BadInput(kind="indented_json", what=what, fix=fix, file=file, line=1, byte=0)
    if line.startswith(b"[") and _is_array_of_rows(line, is_whole=bool(ends) or len(first) < FIRST_BYTES, more=bool(rest.strip())):  # fmt: skip
        fix = "write each row of the array on one line: jq -c '.[]' FILE"
        raise BadInput(kind="json_array", what="the file is one JSON array, not JSON lines", fix=fix, file=file, line=1, byte=0)  # fmt: skip


def likeness(row: dict[str, Any], chat_key: str) -> tuple[str, str] | None:
    """Return the format that a row without the chat key resembles, and the fix; None where it resembles no known
    format.
    """
    for key, value in row.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and {"role", "content"} <= first.keys():
            return f"messages stand under {key!r}", f"name that key (chat_key: {key})"
        if isinstance(first, dict) and {"from", "value"} <= first.keys():
            return "it looks like ShareGPT", _of_sharegpt(chat_key)
    if {"instruction", "output"} <= row.keys():
        return "it looks like Alpaca", _of_pair(chat_key, "instruction and input", "output")
    for asked, answered in (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("input", "output")):  # fmt: skip
        if {asked, answered} <= row.keys():
            return f"it looks like pairs of {asked} and {answered}", _of_pair(chat_key, asked, answered)
    if {"chosen", "rejected"} <= row.keys():
        return "it looks like preferences", "this trains on conversations: write the chosen one as messages"
    if "text" in row:
        return "it looks like plain text for pretraining", "this trains on conversations: write messages"
    return None


def message_likeness(message: dict[str, Any], chat_key: str) -> tuple[str, str] | None:
    """Return the same of a message without role or content."""
    return ("it looks like ShareGPT", _of_sharegpt(chat_key)) if {"from", "value"} <= message.keys() else None


def _of_sharegpt(chat_key: str) -> str:
    return (
        f'write {{"{chat_key}": [{{"role": …, "content": …}}]}}: `from` as role (human is user, gpt is assistant), `value` as content'
    )  # fmt: skip


def _of_pair(chat_key: str, asked: str, answered: str) -> str:
    return f'write {{"{chat_key}": [{{"role": "user", "content": {asked}}}, {{"role": "assistant", "content": {answered}}}]}}'


def _is_array_of_rows(line: bytes, *, is_whole: bool, more: bool) -> bool:
    """Return whether a line that begins with a bracket begins an array of rows, and is not a row that is a list
    itself.
    """
    if not is_whole:
        return line[1:].lstrip()[:1] in (b"{", b"[")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line[1:].strip()[:1] in (b"", b"{", b"[")
    first = value[0] if value else None
    return not more and isinstance(first, dict) and "role" not in first


def _other(what: str, fix: str, file: str) -> BadInput:
    return BadInput(kind="other_format", what=f"the file is {what}", fix=fix, file=file)
