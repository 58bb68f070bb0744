"""Parse one line of a packed file: with msgspec where its answer is provably the strict parser's, else with that
parser.

msgspec takes the last of two equal keys without a word. Counting the keys written finds them, at half of the decoding time.
"""

from typing import Any

import msgspec
import numpy as np

from production.files.contents import likeness, message_likeness
from production.files.faults import LineError
from production.files.strict import MAX_DEPTH, StrictJson

type Message = dict[str, Any]
"""One message with all its keys; `role` and `content` are there and are text."""

_decode = msgspec.json.Decoder().decode
_QUOTE, _BACKSLASH, _COLON = b'"\\:'
_IS_SPACE = np.isin(np.arange(256), list(b" \t\r"))
_LONGEST_SPACE = 64
_SHORT = 1 << 12
_BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def parse_row(line: bytes, *, chat_key: str, unterminated: bool = False) -> list[Message]:
    """Return the messages of a row, every key kept (SPEC R-FILE-6); otherwise as `parse_record`."""
    messages: list[Message] = parse_record(line, chat_key=chat_key, unterminated=unterminated)[chat_key]
    return messages


def parse_record(
    line: bytes, *, chat_key: str, unterminated: bool = False, takes_tool_calls: bool = False
) -> dict[str, Any]:
    """Return the whole object of a row, whose `chat_key` holds its messages (SPEC R-FILE-6).

    `line` is without its newline; `unterminated` says that it never had one, as only a file's last line may (R-FILE-2).
    `takes_tool_calls` lets a message with `tool_calls` have a null content or none, as chat files have it (R-FILE-14).
    LineError names the first fault: of the bytes (a mark, then a NUL byte, then what is not UTF-8, wherever each stands), then of the
    JSON, then of the row's shape.
    """
    line, length = line.rstrip(b" \t\r"), len(line)
    try:
        row: dict[str, Any] = _decode(line)
        fault, keys = _check_shape(row, chat_key, takes_tool_calls=takes_tool_calls)
        if fault is None and _count_written_keys(line) == keys:
            return row
    except (msgspec.DecodeError, RecursionError):
        pass  # the strict parser decides, and names the fault
    try:
        return _parse_strictly(line, chat_key, takes_tool_calls=takes_tool_calls)
    except LineError as fault:
        if unterminated and fault.at_end:
            raise LineError("truncated_last_line", length, "the file ends within this row") from None
        raise


def parse_object(line: bytes, *, unterminated: bool = False) -> dict[str, Any]:
    """Return the object of a line whatever its keys, for chat files of other layouts; as strictly as `parse_record`.

    Raises LineError for a line that is not a JSON object (R-FILE-6).
    """
    line, length = line.rstrip(b" \t\r"), len(line)
    try:
        row: Any = _decode(line)
        if type(row) is dict and _count_written_keys(line) == _count_keys(row, 0):
            return row
    except (msgspec.DecodeError, RecursionError):
        pass  # the strict parser decides, and names the fault
    try:
        parsed = StrictJson(_text(line)).value
    except LineError as fault:
        if unterminated and fault.at_end:
            raise LineError("truncated_last_line", length, "the file ends within this row") from None
        raise
    if type(parsed) is not dict:
        raise LineError("row_not_object", 0, f"the row is {_name(parsed)}, not an object")
    return parsed


def _parse_strictly(line: bytes, chat_key: str, *, takes_tool_calls: bool) -> dict[str, Any]:
    parsed = StrictJson(_text(line))
    fault_of_shape, _ = _check_shape(parsed.value, chat_key, takes_tool_calls=takes_tool_calls)
    if fault_of_shape is not None:
        kind, what, path = fault_of_shape
        looks = _looks_like(parsed.value, kind, path, chat_key)
        said, fix = (what, None) if looks is None else (f"{what}; {looks[0]}", looks[1])
        raise LineError(kind, parsed.offset_of(*path), said, fix=fix)
    row: dict[str, Any] = parsed.value
    return row


def _looks_like(row: Any, kind: str, path: tuple[str | int, ...], chat_key: str) -> tuple[str, str] | None:
    """Return the format that a row of another shape resembles, and the fix."""
    if kind == "missing_chat_key":
        return likeness(row, chat_key)
    if kind in ("missing_role", "missing_content"):
        return message_likeness(row[chat_key][path[1]], chat_key)
    if kind == "row_not_object" and type(row) is list and row and type(row[0]) is dict:
        return "it looks like the bare messages", f'write {{"{chat_key}": [ … ]}} around them'
    return None


def _text(line: bytes) -> str:
    if not line:
        raise LineError("blank_line", 0, "the line is blank")
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if line.startswith(mark):
            raise LineError("bom", 0, f"the line begins with the byte order mark of {encoding}")
    # Before the decoding: the zeros of a crash or of UTF-16 explain bytes that are not UTF-8, and not the other way round.
    if (nul := line.find(0)) >= 0:
        raise LineError("nul_byte", nul, "a NUL byte stands in the line")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        at_end = error.end == len(line) and error.reason == "unexpected end of data"
        what = f"byte 0x{line[error.start]:02x} is not UTF-8 here ({error.reason})"
        raise LineError("invalid_utf8", error.start, what, at_end=at_end) from None


def _check_shape(
    row: Any, chat_key: str, *, takes_tool_calls: bool
) -> tuple[tuple[str, str, tuple[str | int, ...]] | None, int]:
    """Return the first fault of shape as kind, text and path, and the number of keys of all objects of the row
    together.
    """
    if type(row) is not dict:
        return ("row_not_object", f"the row is {_name(row)}, not an object", ()), 0
    if chat_key not in row:
        return ("missing_chat_key", f"the row has no key {chat_key!r}", ()), 0
    messages = row[chat_key]
    if type(messages) is not list:
        return ("row_not_list", f"{chat_key!r} is {_name(messages)}, not a list of messages", (chat_key,)), 0
    if not messages:
        return ("empty_row", "the row has no message", (chat_key,)), 0
    keys = len(row)
    for index, message in enumerate(messages):
        is_text = type(message) is dict and type(message.get("role")) is str and type(message.get("content")) is str
        if not is_text and not (takes_tool_calls and _only_calls(message)):
            return _fault_of_message(message, chat_key, index), 0
        keys += len(message)
        if len(message) > 2 or "content" not in message:
            keys += sum(_count_keys(value, 4) for value in message.values())
    if len(row) > 1:
        keys += sum(_count_keys(value, 2) for key, value in row.items() if key != chat_key)
    return None, keys


def _only_calls(message: Any) -> bool:
    """Return whether a message only calls tools; chat files then have a null content or no content."""
    if type(message) is not dict or type(message.get("role")) is not str or message.get("content") is not None:
        return False
    calls = message.get("tool_calls")
    return type(calls) is list and bool(calls)


def _fault_of_message(message: Any, chat_key: str, index: int) -> tuple[str, str, tuple[str | int, ...]]:
    which, path = f"message {index}", (chat_key, index)
    if type(message) is not dict:
        return "message_not_object", f"{which} is {_name(message)}, not an object", path
    for key in ("role", "content"):
        if key not in message:
            return f"missing_{key}", f"{which} has no {key}", path
        if type(message[key]) is not str:
            kinds = {} if key == "role" else {type(None): "content_null", list: "content_parts"}
            kind = kinds.get(type(message[key]), f"{key}_not_text")
            return kind, f"{which}'s {key} is {_name(message[key])}, not text", (*path, key)
    raise AssertionError("the message has a fault")


def _count_keys(value: Any, depth: int) -> int:
    """Return the keys of all objects in `value`, which stands `depth` levels deep."""
    if type(value) is dict:
        if depth > MAX_DEPTH:
            raise RecursionError
        return len(value) + sum(_count_keys(item, depth + 1) for item in value.values())
    if type(value) is list:
        if depth > MAX_DEPTH:
            raise RecursionError
        return sum(_count_keys(item, depth + 1) for item in value)
    return 0


def _count_written_keys(line: bytes) -> int:
    """Return the number of keys that valid JSON `line`, an object, writes, equal keys counted each; -1 for unbounded
    white space.

    In valid JSON backslashes stand in texts only, and escape in pairs from the left: with those pairs out, a quote is
    part of a text just where a backslash precedes it. The others open and close texts in turn, and the texts that a
    colon follows, white space aside, are the keys.
    """
    if b"\\\\" in line:
        line = line.replace(b"\\\\", b"__")
    if len(line) < _SHORT:  # the same on bytes: arrays have a price of their own
        return b"".join(line.replace(b'\\"', b"__").split(b'"')[::2]).count(b":")
    byte = np.frombuffer(line, dtype=np.uint8)
    quotes = np.flatnonzero(byte == _QUOTE)
    at = quotes[byte[quotes - 1] != _BACKSLASH][1::2]  # a brace precedes the first, and follows the last
    keys = 0
    for _ in range(_LONGEST_SPACE):
        at = at + 1
        behind = byte[at]
        keys += int(np.count_nonzero(behind == _COLON))
        at = at[_IS_SPACE[behind]]
        if not len(at):
            return keys
    return -1


def _name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names[type(value)]
