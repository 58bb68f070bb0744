"""Lay files over the defaults and resolve interpolations: the plain configuration and the source of each value (SPEC
R-SETUP-3).
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from production.training.config.refusal import ConfigRefused, nearest
from production.training.config.schema.job import Job, Source
from production.training.config.schema.plain import ABOUT_THE_FILES
from production.training.config.yaml_reader import PART, Layer, Plain, leaves, read_override

MISSING = "???"
"""OmegaConf's mark of a value that must be set."""
_NOT_FOUND = re.compile(r"Interpolation key '(.+?)' not found")


_OF_RESOLVERS = (RecursionError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""Exceptions of a resolver, or of the grammar of interpolations, beside OmegaConf's own errors."""


class Overlay:
    """Holds values and their sources while layers are laid over each other; later layers win, lists are replaced as a
    whole.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = defaults(Job)
        self.sources: dict[str, Source] = {}

    def lay(self, layer: Layer) -> None:
        """Lay a file over the current values."""
        self._forget(layer.values)
        self.values = _merged(self.values, layer.values)
        self.sources.update({key: Source(kind="file", place=place) for key, place in layer.places.items()})

    def override(self, text: str) -> None:
        """Lay one `key=value` over the current values."""
        key, value, places = read_override(text)
        if not isinstance(value, dict):
            self._drop(key)
        self.values = _put(self.values, PART.findall(key), value, key, f"override {text!r}")
        self.sources.update({key: Source(kind="override", place=place) for key, place in places.items()})

    def resolve(self) -> None:
        """Replace every interpolation; ConfigRefused names the key, its line, and the nearest key to a missing one."""
        if not OmegaConf.has_resolver("mul"):  # NeMo-RL's files multiply
            OmegaConf.register_new_resolver("mul", _product)
        written_so = [(key, text) for key, text in leaves(self.values) if isinstance(text, str) and "${" in text]
        for key, written in written_so:
            try:
                OmegaConf.create({"value": written})
            except (OmegaConfBaseException, *_OF_RESOLVERS) as error:
                raise self._unresolved(key, written, error) from None
        if not written_so:
            return
        config = OmegaConf.create(self.values)
        for key, written in written_so:
            try:
                value = OmegaConf.select(config, key, throw_on_resolution_failure=True)
                value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except (OmegaConfBaseException, *_OF_RESOLVERS) as error:
                raise self._unresolved(key, written, error) from None
            if value == MISSING or (value is None and OmegaConf.is_missing(config, key)):
                raise self._unresolved(key, written, "it refers to a value that is not set")
            self.values = _put(self.values, PART.findall(key), value, key, self.where(key))
            self.sources[key] = dataclasses.replace(self.sources[key], expression=written)

    def where(self, key: str) -> str:
        """Return `key (place)` of the value's source, else of a source inside the value, else of the nearest section
        with a known place.
        """
        around = key
        if around not in self.sources:
            inside = (each for each in self.sources if each.startswith((f"{key}.", f"{key}[")))
            around = next(inside, key)
        while around and around not in self.sources:
            around = around.rpartition("[" if around.endswith("]") else ".")[0]
        return f"{key} ({self.sources[around].place})" if around else f"{key} (default)"

    def written(self, key: str) -> str:
        """Return the key as the file writes it (`Source.written`)."""
        return (self.sources[key].written if key in self.sources else "") or key

    def _unresolved(self, key: str, written: str, error: Exception | str) -> ConfigRefused:
        reason = str(error).split("\n", maxsplit=1)[0] or type(error).__name__
        if isinstance(error, RecursionError):
            reason = "it refers to itself"
        found = _NOT_FOUND.search(reason)
        like = nearest(found[1], [each for each, _ in leaves(self.values)], cutoff=0.6) if found else None
        fix = f"name a key that has a value; the nearest is {like}" if like else "name a key that has a value"
        what = f"{written} cannot be resolved: {reason}"
        return ConfigRefused(kind="interpolation", key=key, what=what, where=self.where(key), fix=fix)

    def _forget(self, values: Plain, key: str = "") -> None:
        if isinstance(values, dict) and values:
            for name, value in values.items():
                self._forget(value, f"{key}.{name}" if key else name)
        else:
            self._drop(key)

    def _drop(self, key: str) -> None:
        inside = (f"{key}.", f"{key}[")
        self.sources = {each: source for each, source in self.sources.items() if not each.startswith(inside)}


def _product(left: Any, right: Any) -> Any:
    """Multiply two numbers, as NeMo-RL's files do; a word times a number would be as long as the number says."""
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right)):
        raise ValueError(f"mul must have two numbers, got {left!r} and {right!r}")
    return left * right


def defaults(section: type) -> dict[str, Any]:
    """Return the defaults of a section as plain values: `???` where a value must be set, null where it may be absent."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(section)
    for each in dataclasses.fields(section):
        if each.name in ABOUT_THE_FILES:
            continue
        if dataclasses.is_dataclass(hints[each.name]):
            found[each.name] = defaults(hints[each.name])
        elif each.default is not dataclasses.MISSING:
            found[each.name] = list(each.default) if isinstance(each.default, tuple) else each.default
        else:
            found[each.name] = {} if each.default_factory is not dataclasses.MISSING else MISSING
    return found


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    found = dict(below)
    for name, value in above.items():
        found[name] = _merged(below[name], value) if name in below else value
    return found


def _put(values: Any, parts: Iterable[str], new: Any, key: str, where: str) -> Any:
    """Return a copy of `values` with `new` at the path `parts`; a mapping is merged into a mapping."""
    parts = list(parts)
    if not parts:
        return _merged(values, new)
    name, *rest = parts
    if name.startswith("["):
        index = int(name[1:-1])
        if not isinstance(values, list) or index >= len(values):
            count = len(values) if isinstance(values, list) else 0
            what = (
                f"{key} must name an entry of the list, from 0 to {count - 1}, got {index}"
                if count
                else f"{key} must name an entry of a list, got entry {index} of an empty list"
            )
            raise ConfigRefused(kind="override", key=key, what=what, where=where, fix="name an entry of the list")
        return [_put(each, rest, new, key, where) if at == index else each for at, each in enumerate(values)]
    if isinstance(values, list) and values:  # an empty one is a split that no file has: it may be one dataset
        what = f"{key} must name an entry of a list by its number, got {name!r}"
        raise ConfigRefused(
            kind="override", key=key, what=what, where=where, fix="name an entry by its number, such as [0]"
        )
    below = values if isinstance(values, dict) else {}
    return {**below, name: _put(below.get(name), rest, new, key, where)}
