"""Read JSON strictly, with the place of every value: the definition of what a row says, and the source of a fault's
name (R-FILE-7).

About 20 times slower than msgspec, so `parse` comes here only with lines that failed or look suspicious.
"""

import json
import math
import re
from typing import Any

from production.files.faults import LineError

MAX_DEPTH = 128
"""Levels of nesting, the row itself being the first: deep enough for any tool schema, and no stack overflows on it."""
MAX_DIGITS = 4300
"""Digits of an integer, as CPython limits them by default."""

# Possessive: a text of megabytes must leave no backtracking state behind.
_TEXT = re.compile(r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-|-?(?:0|[1-9][0-9]*)(?:\.|(?:\.[0-9]+)?[eE][-+]?)")
_SPACE = re.compile(r"[ \t\r\n]*")
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}
_NO_JSON = ("NaN", "Infinity", "-Infinity")


class StrictJson:
    """Holds one parsed line: `value` is its content, `offset_of` gives the place of each part."""

    value: Any
    """Content of the line, as Python's own types."""

    def __init__(self, text: str) -> None:
        """Parse `text`; LineError for the first thing that is not JSON, a duplicate key or half of a surrogate pair."""
        self._text = text
        self._places: dict[tuple[int, str | int], int] = {}
        self._start = self._skip(0)
        self.value, end = self._value(self._start, 1)
        end = self._skip(end)
        if end < len(text):
            raise self._fault(end, "the line goes on after the row's end")

    def offset_of(self, *path: str | int) -> int:
        """Return the byte within the line at which the value under `path` (keys and indices from the row down)
        begins.
        """
        value, place = self.value, self._start
        for step in path:
            place = self._places[id(value), step]
            value = value[step]
        return self._bytes(place)

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        text = self._text
        first = text[at : at + 1]
        if first == '"':
            return self._string(at)
        if first and first in "{[":
            if depth > MAX_DEPTH:
                raise self._fault(at, f"values are nested more than {MAX_DEPTH} levels deep", kind="nested_too_deep")
            return self._object(at, depth) if first == "{" else self._list(at, depth)
        for word, constant in _CONSTANTS.items():
            if text.startswith(word, at):
                return constant, at + len(word)
        if number := _NUMBER.match(text, at):
            return self._number(number)
        for word in _NO_JSON:
            if text.startswith(word, at):
                raise self._fault(at, f"{word} is not JSON")
        rest = text[at : at + 9]
        raise self._fault(
            at, "a value is expected here", begun=any(word.startswith(rest) for word in (*_CONSTANTS, "-"))
        )

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._skip(at + 1)
        if self._text.startswith("}", at):
            return found, at + 1
        while True:
            if not self._text.startswith('"', at):
                raise self._fault(at, "a key in double quotes is expected here")
            key, end = self._string(at)
            if key in found:
                raise self._fault(at, f"the key {_short(key)} stands twice in one object", kind="duplicate_key")
            end = self._skip(end)
            if not self._text.startswith(":", end):
                raise self._fault(end, "a colon is expected here")
            end = self._skip(end + 1)
            self._places[id(found), key] = end
            found[key], end = self._value(end, depth + 1)
            at, more = self._next(end, "}")
            if not more:
                return found, at

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._skip(at + 1)
        if self._text.startswith("]", at):
            return found, at + 1
        while True:
            self._places[id(found), len(found)] = at
            item, end = self._value(at, depth + 1)
            found.append(item)
            at, more = self._next(end, "]")
            if not more:
                return found, at

    def _next(self, at: int, close: str) -> tuple[int, bool]:
        at = self._skip(at)
        if self._text.startswith(close, at):
            return at + 1, False
        if not self._text.startswith(",", at):
            raise self._fault(at, f"a comma or {close} is expected here")
        return self._skip(at + 1), True

    def _string(self, at: int) -> tuple[str, int]:
        matched = _TEXT.match(self._text, at + 1)
        assert matched is not None
        end = matched.end()
        if not self._text.startswith('"', end):
            begun = _ESCAPE_BEGUN.fullmatch(self._text, end) is not None
            what = (
                "this escape is not JSON"
                if self._text.startswith("\\", end)
                else "a control character stands in a text"
            )
            raise self._fault(end, what, begun=begun)
        value: str = json.loads(self._text[at : end + 1])
        try:
            value.encode()
        except UnicodeEncodeError:
            place = self._half_pair(at + 1, end)
            half = self._text[place : place + 6]
            raise self._fault(place, f"{half} is half of a surrogate pair", kind="lone_surrogate") from None
        return value, end + 1

    def _half_pair(self, at: int, end: int) -> int:
        high: int | None = None
        for escape in _ESCAPE.finditer(self._text, at, end):
            code = int(escape[1], 16) if escape[1] else 0
            if high is not None:
                if escape.start() != high + 6 or not 0xDC00 <= code <= 0xDFFF:
                    return high
                high = None
            elif 0xD800 <= code <= 0xDBFF:
                high = escape.start()
            elif 0xDC00 <= code <= 0xDFFF:
                return escape.start()
        assert high is not None
        return high

    def _number(self, number: re.Match[str]) -> tuple[int | float, int]:
        at, end = number.span()
        if _NUMBER_BEGUN.fullmatch(self._text, at):
            raise self._fault(end, "the number goes on after the line's end", begun=True)
        if number[2] is None and number[3] is None:
            if len(number[1].lstrip("-")) > MAX_DIGITS:
                raise self._fault(at, f"an integer of more than {MAX_DIGITS} digits", kind="number_out_of_range")
            return int(number[0]), end
        value = float(number[0])
        if math.isinf(value):
            raise self._fault(at, "the number is beyond the range of a double", kind="number_out_of_range")
        return value, end

    def _skip(self, at: int) -> int:
        matched = _SPACE.match(self._text, at)
        assert matched is not None
        return matched.end()

    def _fault(self, at: int, what: str, *, kind: str = "invalid_json", begun: bool = False) -> LineError:
        if kind == "invalid_json" and (begun or at >= len(self._text)):
            return LineError(kind, len(self._text.encode()), "the line ends before its JSON does", at_end=True)
        return LineError(kind, self._bytes(at), what)

    def _bytes(self, at: int) -> int:
        return len(self._text[:at].encode())


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")
