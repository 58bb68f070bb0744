"""Read YAML text into plain values with the line of each, more strictly than YAML 1.1: no word silently becomes
another value (SPEC R-SETUP-2).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from production.files.file_state import read_regular
from production.training.config.refusal import ConfigRefused

Plain = dict[str, Any] | list[Any] | str | int | float | bool | None

_BARE_WORDS = {"yes", "no", "on", "off"}
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?")
_NOT_FINITE = {".inf": "inf", "-.inf": "-inf", "+.inf": "inf", ".nan": "nan"}
_MOST_BYTES = 1 << 22
"""Bytes of one file at most: a configuration has some thousand."""
_MOST_NODES = 100_000
_DEEPEST = 64
_TOO_DEEP = f"values must be nested at most {_DEEPEST} levels deep"
_LONGEST_NUMBER = 100
PART = re.compile(r"[^.\[\]]+|\[\d+\]")
"""One step of a dotted key: a name, or the place in a list."""
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")
"""Characters that no path, no name and no terminal can take: NUL and halves of surrogate pairs."""
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*|\[\d+\])*")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Holds the content of one file or override."""

    values: dict[str, Any]
    """Nested mappings, lists and plain values; interpolations still as text."""
    places: dict[str, str]
    """Dotted key of every node to `file:line`, or to the override."""


def read_file(path: str | Path, *, inherited: tuple[Path, ...] = ()) -> list[Layer]:
    """Return the layers of a YAML file: first those that its `defaults` name (a path or a list, relative to it), then
    the file itself.

    Raises ConfigRefused for a file that cannot be read (R-SETUP-2).
    """
    path = Path(path)
    _check_text(str(path), str(path).encode(errors="backslashreplace").decode(), key="defaults" if inherited else "")
    if path.resolve() in inherited:
        chain = " -> ".join(str(each) for each in (*inherited, path))
        raise _refuse(
            "defaults",
            "a file must not name itself by defaults, directly or through other files",
            chain,
            "take one `defaults` out",
            key="defaults",
        )
    try:
        text = read_regular(path, most_bytes=_MOST_BYTES).decode("utf-8")
    except OSError as error:
        if error.errno == errno.EFBIG:
            what = f"the file must have at most {_MOST_BYTES >> 20} MiB"
            raise _refuse("no_yaml", what, str(path), "name the YAML file of the job") from None
        raise _refuse(
            "no_file", f"the file cannot be read: {error.strerror}", str(path), "give the path of a file that exists"
        ) from None
    except UnicodeDecodeError as error:
        raise _refuse(
            "no_yaml", f"the file must be UTF-8, and is not at byte {error.start}", str(path), "save it as UTF-8"
        ) from None
    layer = read_text(text, name=str(path))
    parents = layer.values.pop("defaults", [])
    place = layer.places.pop("defaults", str(path))
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise _refuse(
            "wrong_type",
            "defaults must be a path or a list of paths",
            place,
            "write a path or a list of paths",
            key="defaults",
        )
    layers: list[Layer] = []
    for parent in parents:
        layers += read_file(path.parent / parent, inherited=(*inherited, path.resolve()))
    places = {key: at for key, at in layer.places.items() if not key.startswith("defaults[")}
    return [*layers, Layer(values=layer.values, places=places)]


def read_text(text: str, *, name: str) -> Layer:
    """Read one document. ConfigRefused names the line of a duplicate key, a bare word, or invalid YAML."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise _refuse("no_yaml", _TOO_DEEP, name, "nest the values less deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise _refuse(
            "no_yaml",
            f"the file must be YAML, and is not: {problem}",
            where,
            "fix the line, or the indentation above it",
        ) from None
    reader = _Reader(name)
    values = {} if node is None else reader.value(node, "")
    if not isinstance(values, dict):
        raise _refuse(
            "no_yaml", "the file must be a mapping of sections", name, "begin with `sft:`, `policy:`, `data:` and so on"
        )
    return Layer(values=values, places=reader.places)


def read_override(text: str) -> tuple[str, Plain, dict[str, str]]:
    """Return the key, the value and the places of `key=value`; the value is YAML, so that `a=[1, 2]` and `a=null`
    have their YAML meaning.

    Raises ConfigRefused for another form.
    """
    key, equals, written = text.partition("=")
    place = f"override {text!r}"
    if not equals or not _KEY.fullmatch(key) or len(PART.findall(key)) > _DEEPEST:
        fix = "write section.key=value, such as policy.precision=float32, with no plus or tilde before it"
        raise _refuse("override", "must be key=value", place, fix, key=key)
    try:
        node = yaml.compose(written, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        raise _refuse(
            "override", f"the value must be YAML, got {written!r}", place, "put the value in quotes", key=key
        ) from None
    reader = _Reader(place, lines=False)
    return key, None if node is None else reader.value(node, key), reader.places or {key: place}


def leaves(values: Plain, key: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield dotted key and value of everything that is neither a mapping nor a list, and of empty mappings and lists."""
    if isinstance(values, dict) and (values or not key):
        for name, value in values.items():
            yield from leaves(value, f"{key}.{name}" if key else name)
    elif isinstance(values, list) and values:
        for index, value in enumerate(values):
            yield from leaves(value, f"{key}[{index}]")
    else:
        yield key, values


class _Reader:
    """Walks YAML nodes: PyYAML's own constructor would take the last of two equal keys and turn `no` into False."""

    def __init__(self, name: str, *, lines: bool = True) -> None:
        self.places: dict[str, str] = {}
        self._name = name
        self._lines = lines
        self._around: list[yaml.Node] = []
        self._nodes = 0

    def value(self, node: yaml.Node, key: str) -> Any:
        self._check_size(node, key)
        if key:
            self.places[key] = self._place(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        self._around.append(node)
        found: Any
        if isinstance(node, yaml.MappingNode):
            found = self._mapping(node, key)
        else:
            assert isinstance(node, yaml.SequenceNode)
            found = [self.value(each, f"{key}[{index}]") for index, each in enumerate(node.value)]
        self._around.pop()
        return found

    def _check_size(self, node: yaml.Node, key: str) -> None:
        """Refuse an alias inside itself, and aliases that expand a file beyond what a person wrote."""
        self._nodes += 1
        what = ""
        if any(node is each for each in self._around):
            what = f"{key or 'the file'}: an alias must not contain itself"
        elif len(self._around) > _DEEPEST:
            what = f"{key[:80]}: {_TOO_DEEP}"
        elif self._nodes > _MOST_NODES:
            what = f"the file must have at most {_MOST_NODES:,} values, each use of an alias counted"
        if what:
            raise _refuse("no_yaml", what, self._place(node), "write the values out, or use ${...}", key=key)

    def _mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first: dict[str, str] = {}
        for name_node, value_node in node.value:
            place = self._place(name_node)
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else ""
            full = f"{key}.{name}" if key else str(name)
            _check_text(str(name), place, key=key)
            if not name or name == "<<":
                what = "merge keys (<<) are not supported" if name == "<<" else "a key must be a word"
                raise _refuse("no_yaml", what, place, "write the keys out, or use ${...} or `defaults:`", key=full)
            if name in found:
                what = f"{full} must be set once, and is set first at {first[name]}"
                raise _refuse("duplicate_key", what, place, "keep one of the two", key=full)
            first[name] = place
            found[name] = self.value(value_node, full)
            self.places[full] = place
        return found

    def _scalar(self, node: yaml.ScalarNode, key: str) -> Plain:
        text: str = node.value
        _check_text(text, self._place(node), key=key)
        if node.style is not None or node.tag == "!":
            return text
        if text.lower() in _BARE_WORDS:
            what = f"{key} must not be a bare `{text}`: some YAML readers take it for a word, and others for {str(text.lower() in {'yes', 'on'}).lower()}"
            fix = f'write true or false, or "{text}" in quotes where the word is meant'
            raise _refuse("bare_word", what, self._place(node), fix, key=key)
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INTEGER.fullmatch(text):
            if len(text) > _LONGEST_NUMBER:
                what = f"{key} must have at most {_LONGEST_NUMBER} digits, got {len(text)}"
                raise _refuse(
                    "wrong_type", what, self._place(node), f"give a number of at most {_LONGEST_NUMBER} digits", key=key
                )
            return int(text)
        if _FLOAT.fullmatch(text) or text.lower() in _NOT_FINITE:
            return float(_NOT_FINITE.get(text.lower(), text))
        return text

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}" if self._lines else self._name


def _check_text(text: str, place: str, *, key: str) -> None:
    if _NO_TEXT.search(text):
        what = f"{key or 'a name'}: {text[:60]!a} must not contain NUL or half of a surrogate pair"
        raise _refuse("no_text", what, place, "write it without that character", key=key)


def _refuse(kind: str, what: str, where: str, fix: str, *, key: str = "") -> ConfigRefused:
    return ConfigRefused(kind=kind, key=key, what=what, where=where, fix=fix)
