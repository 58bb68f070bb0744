"""Build the configuration's sections from plain values: every key known, every type the declared one, no value
guessed (SPEC R-SETUP-1).
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from production.training.config.keys import PASSED_ON, is_key, nearest_key, section_keys
from production.training.config.layers import MISSING, Overlay, defaults
from production.training.config.megatron_options import LARGEST, Kind, check_option, option_fields
from production.training.config.nemo_rl import is_nemo_rl_key
from production.training.config.refusal import ConfigRefused, nearest
from production.training.config.schema.data import DataFile, Dataset
from production.training.config.schema.job import Source
from production.training.config.schema.plain import ABOUT_THE_FILES
from production.training.config.schema.policy import MegatronCfg, Switch
from production.training.config.yaml_reader import leaves

_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


class Builder:
    """Builds sections from an overlay's plain values; ConfigRefused names the dotted key and the line that set the
    value.
    """

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self._where = overlay.where

    def section[T](self, kind: type[T], values: Any, key: str) -> T:
        """Build one section; `key` is its dotted key, empty for the whole job."""
        hints = typing.get_type_hints(kind)
        found: dict[str, Any] = {}
        for name in section_keys(kind):
            full = f"{key}.{name}" if key else name
            if isinstance(hints[name], type) and dataclasses.is_dataclass(hints[name]):
                found[name] = self.section(hints[name], values[name], full)
            else:
                found[name] = self.value(hints[name], values[name], full)
                if kind is MegatronCfg and name in PASSED_ON:
                    self._check_options(name, found[name], full)
        return kind(**found)

    def check_keys(self, kind: type, values: Any, key: str = "") -> None:
        """Refuse keys that no section has, before anything is resolved: all of them, each with the nearest valid one (SPEC R-SETUP-1)."""
        self._refuse_unknown(list(self._unknown(kind, values, key)))

    def _unknown(self, kind: type, values: Any, key: str) -> Iterator[tuple[str, str]]:
        """Yield each unknown key with the section that holds it."""
        if not isinstance(values, Mapping):
            what = f"{key} must be a section, got {_shown(values)}"
            raise self._refuse("wrong_type", key, what, "indent its keys below it, or take it out")
        hints = typing.get_type_hints(kind)
        for name, value in values.items():
            full = f"{key}.{name}" if key else name
            if kind is MegatronCfg and name in PASSED_ON:
                yield from self._unknown_options(name, value, full)
            elif name in hints and name not in ABOUT_THE_FILES:
                yield from self._unknown_inside(hints[name], value, full)
            elif kind is not Switch and not is_key(kind, name) and not is_nemo_rl_key(full, value):
                yield full, key

    def _unknown_inside(self, hint: Any, value: Any, key: str) -> Iterator[tuple[str, str]]:
        """Yield unknown keys of a section, or of the entries of a list; a wrong shape is refused where its value is
        built.
        """
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from self._unknown(hint, value, key)
            return
        for inner in (each for each in typing.get_args(hint) if dataclasses.is_dataclass(each)):
            entries = (
                {f"{key}[{index}]": each for index, each in enumerate(value)}
                if isinstance(value, list)
                else {key: value}
            )
            for full, each in entries.items():
                if isinstance(each, Mapping):
                    yield from self._unknown(typing.cast("type", inner), each, full)

    def _unknown_options(self, kind: Kind, given: Any, key: str) -> Iterator[tuple[str, str]]:
        for name in given if isinstance(given, Mapping) else ():
            if name not in option_fields(kind):
                yield f"{key}.{name}", key

    def _refuse_unknown(self, found: list[tuple[str, str]]) -> None:
        if not found:
            return
        near = [nearest_key(full, section) for full, section in found]
        told = [
            f"{full} is not {'an option of the installed megatron-core' if section.endswith(PASSED_ON) else 'a key of a job'}"
            + (f"; the nearest is {close}" if close else "")
            for (full, section), close in zip(found, near, strict=True)
        ]
        write = ", ".join(close for close in near if close)
        out = f"take {'it' if len(found) < 2 else 'them'} out"
        raise ConfigRefused(
            kind="unknown_key",
            key=found[0][0],
            what="; ".join(told),
            where=", ".join(self._where(full) for full, _ in found),
            fix=f"write {write}, or {out}"
            if write
            else f"{out}: no key has a similar name (--print-config shows all keys)",
        )

    def refuse_twice(self, key: str, again: str) -> None:
        """Refuse an option that stands in `megatron_cfg` and again below `transformer`."""
        what = f"{key} must be set once, and is set again as {again} at {self._where(again)}"
        raise self._refuse("set_twice", key, what, "keep one of the two")

    def value(self, hint: Any, value: Any, key: str) -> Any:
        """Return `value` if its type is `hint`, else raise ConfigRefused."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in {types.UnionType, typing.Union}:
            rest = [each for each in arguments if each is not type(None)]
            return None if value is None else self.value(rest[0], value, key)
        if origin is typing.Literal:
            if value in arguments and isinstance(value, str):
                return value
            like = nearest(str(value), arguments)
            what = f"{key} must be one of {', '.join(arguments)}, got {_shown(value)}; the nearest is {like}"
            raise self._refuse("no_choice", key, what, f"write one of {', '.join(arguments)}")
        if origin is tuple:
            by_entry = {Dataset: self._datasets, DataFile: self._files}
            return (
                by_entry[arguments[0]](value, key)
                if arguments[0] in by_entry
                else self._tuple(arguments[0], value, key)
            )
        if origin in {Mapping, typing.get_origin(Mapping[str, Any])}:
            return self._mapping(arguments[1], value, key)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            self.check_keys(hint, value, key)
            return self.section(hint, {**defaults(hint), **value}, key)
        if hint is Any:
            return value
        return self._scalar(hint, value, key)

    def _scalar(self, hint: Any, value: Any, key: str) -> Any:
        if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) >= float("1e308") or not math.isfinite(value):
                raise self._refuse(
                    "wrong_type", key, f"{key} must be a finite number, got {value}", "give a finite number"
                )
            return float(value)
        if hint is int and type(value) is int and abs(value) >= LARGEST:
            raise self._refuse(
                "wrong_type", key, f"{key} must be below 2**64, got {value}", "give a whole number below 2**64"
            )
        if type(value) is hint:
            return value
        wanted = _WANTED[hint]
        what = f"{key} must be {wanted}, got {_shown(value)}"
        quoted = hint is str and isinstance(value, bool | int | float)
        fix = f'write "{value}" in quotes if the word is meant' if quoted else f"give {wanted}"
        if value == "None":
            fix = "write null if it should be absent"
        raise self._refuse("wrong_type", key, what, fix)

    def _tuple(self, hint: Any, value: Any, key: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise self._refuse("wrong_type", key, f"{key} must be a list, got {_shown(value)}", "give a list")
        return tuple(self.value(hint, each, f"{key}[{index}]") for index, each in enumerate(value))

    def _datasets(self, value: Any, key: str) -> tuple[Dataset, ...]:
        """Build one dataset or a list of them, each with `data.default` filled in."""
        if isinstance(value, list):
            return tuple(self._dataset(each, f"{key}[{index}]") for index, each in enumerate(value))
        return () if value is None else (self._dataset(value, key),)

    def _dataset(self, value: Any, key: str) -> Dataset:
        self.check_keys(Dataset, value, key)
        filled = dict(value)
        for name, given in self._overlay.values["data"]["default"].items():
            if name not in filled and given is not None:
                filled[name] = given
                source = self._overlay.sources.get(f"data.default.{name}")
                if source is not None:
                    self._overlay.sources[f"{key}.{name}"] = source
        if filled.get("megatron_sft_context_parallel_size") is None:
            place = "policy.megatron_cfg.context_parallel_size"
            filled["megatron_sft_context_parallel_size"] = self._overlay.values["policy"]["megatron_cfg"][
                "context_parallel_size"
            ]
            self._overlay.sources[f"{key}.megatron_sft_context_parallel_size"] = Source(kind="derived", place=place)
        filled = {**defaults(Dataset), **filled}
        missing_values(filled, self._where, prefix=f"{key}.")
        return self.section(Dataset, filled, key)

    def _files(self, value: Any, key: str) -> tuple[DataFile, ...]:
        """Build files from a path, a list of paths, or a list of `{path, weight}`."""
        if isinstance(value, str):
            return (DataFile(path=value),)
        if not isinstance(value, list) or not value:
            what = f"{key} must be a path or a list of paths, got {_shown(value)}"
            raise self._refuse("wrong_type", key, what, "give a path, a list of paths, or a list of {path, weight}")
        found: list[DataFile] = []
        for index, each in enumerate(value):
            full = f"{key}[{index}]"
            if isinstance(each, str):
                found.append(DataFile(path=each))
            else:
                self.check_keys(DataFile, each, full)
                filled = {**defaults(DataFile), **each}
                missing_values(filled, self._where, prefix=f"{full}.")
                found.append(self.section(DataFile, filled, full))
        return tuple(found)

    def _mapping(self, hint: Any, value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            what = f"{key} must be a mapping, got {_shown(value)}"
            raise self._refuse("wrong_type", key, what, "indent its keys below it, or take it out")
        return {name: self.value(hint, each, f"{key}.{name}") for name, each in value.items()}

    def _check_options(self, kind: Kind, given: Mapping[str, Any], key: str) -> None:
        self._refuse_unknown(list(self._unknown_options(kind, given, key)))
        for name, value in given.items():
            full = self._overlay.written(f"{key}.{name}")
            check_option(kind, name, value, key=full, where=self._where(full))

    def _refuse(self, kind: str, key: str, what: str, fix: str) -> ConfigRefused:
        return ConfigRefused(kind=kind, key=key, what=what, where=self._where(key), fix=fix)


def missing_values(values: Any, where: Callable[[str], str], *, prefix: str = "") -> None:
    """Refuse missing required values, all of them at once (SPEC R-SETUP-3)."""
    unset = [key for key, value in leaves(values) if value == MISSING]
    if unset:
        keys = [prefix + key for key in unset]
        what = f"{', '.join(keys)} must be set" if len(keys) < 2 else f"{', '.join(keys)} must all be set"
        fix = f"write it into the file, lay the file over a base (`defaults: base.yaml`), or add {keys[0]}=…"
        raise ConfigRefused(kind="missing", key=keys[0], what=what, where=where(keys[0]), fix=fix)


def _shown(value: Any) -> str:
    return (
        "null"
        if value is None
        else f"a {'mapping' if isinstance(value, dict) else 'list'}"
        if isinstance(value, dict | list)
        else repr(value)
    )
