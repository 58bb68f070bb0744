"""Check megatron-core's own options: each key against the fields of the installed class, each value against its
annotation.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from production.library_warnings import quiet_libraries
from production.training.config.refusal import ConfigRefused

Kind = Literal["transformer", "optimizer", "distributed_data_parallel_config"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNSUITED = object()
LARGEST = 1 << 64
"""Bound above every whole number that torch and megatron-core count with."""


@functools.cache
def option_fields(kind: Kind) -> dict[str, Any]:
    """Return name and annotation of every public field of megatron-core's class for `kind`."""
    chosen = option_class(kind)
    hints = typing.get_type_hints(chosen)
    return {each.name: hints[each.name] for each in dataclasses.fields(chosen) if not each.name.startswith("_")}


def option_class(kind: Kind) -> Any:
    """Return megatron-core's class for `kind`."""
    # Imported here: megatron-core takes seconds, and its absence of kernels is no news to who reads a configuration.
    with quiet_libraries():
        from megatron.core.distributed import DistributedDataParallelConfig  # noqa: PLC0415
        from megatron.core.optimizer import OptimizerConfig  # noqa: PLC0415
        from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    return {
        "transformer": TransformerConfig,
        "optimizer": OptimizerConfig,
        "distributed_data_parallel_config": DistributedDataParallelConfig,
    }[kind]


def check_option(kind: Kind, name: str, value: Any, *, key: str, where: str) -> None:
    """Refuse a value that the annotation of the option `name` does not take (SPEC R-SETUP-4)."""
    fields = option_fields(kind)
    if value != option_defaults(kind)[name] and (number := _impossible(value)) is not None:
        what, fix = f"{key} must be finite and below 2**63, got {number}", "give a finite number below 2**63"
        raise ConfigRefused(kind="wrong_type", key=key, what=what, where=where, fix=fix)
    if _converted(fields[name], value) is _UNSUITED:
        written = _readable(fields[name])
        if written == "a function":
            what, fix = (
                f"{key} is a function, which a file cannot hold",
                "take it out; model.activation names a function",
            )
        else:
            what, fix = f"{key} must be {written} for megatron-core, got {value!r}", f"give {written}"
        raise ConfigRefused(kind="wrong_type", key=key, what=what, where=where, fix=fix)


@functools.cache
def option_defaults(kind: Kind) -> dict[str, Any]:
    """Return megatron-core's default of every option of `kind` by name; all options have one."""
    return {
        each.name: each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
        for each in dataclasses.fields(option_class(kind))
        if each.name in option_fields(kind)
    }


def converted(kind: Kind, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as megatron-core takes them: dtypes, enumerations and tuples in place of words and lists."""
    fields = option_fields(kind)
    return {name: _converted(fields[name], value) for name, value in given.items()}


def dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`."""
    return _DTYPES[name]


def _converted(hint: Any, value: Any) -> Any:
    """Return `value` as `hint` needs it, or `_UNSUITED`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return None if value is None else _UNSUITED
    if origin in {typing.Union, types.UnionType}:
        return next((got for each in arguments if (got := _converted(each, value)) is not _UNSUITED), _UNSUITED)
    if origin is typing.Literal:
        return next((each for each in arguments if each == value and type(each) is type(value)), _UNSUITED)
    if hint is torch.dtype:
        return _DTYPES.get(str(value).removeprefix("torch."), _UNSUITED)
    if origin in {list, tuple} or hint in {list, tuple}:
        return _sequence(origin or hint, arguments, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next((each for each in hint if isinstance(value, str) and each.name == value), _UNSUITED)
    if hint is float:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _UNSUITED
    if hint in {int, str, bool}:
        return value if type(value) is hint else _UNSUITED
    return _UNSUITED


def _impossible(value: Any) -> int | float | None:
    """Return whether a number, also in a list or mapping, is invalid for every option: NaN, infinity, or too large."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    if isinstance(value, int):
        return value if abs(value) >= LARGEST >> 1 else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for each in inner if (found := _impossible(each)) is not None), None)


def _sequence(kind: type, arguments: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return _UNSUITED
    if not arguments:
        return kind(value)
    endless = kind is list or arguments[-1] is Ellipsis
    hints = [arguments[0]] * len(value) if endless else list(arguments)
    if len(hints) != len(value):
        return _UNSUITED
    found = [_converted(hint, each) for hint, each in zip(hints, value, strict=True)]
    return _UNSUITED if any(each is _UNSUITED for each in found) else kind(found)


def _readable(hint: Any) -> str:
    """Return an annotation in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        words = [_readable(each) for each in arguments]
        return " or ".join(dict.fromkeys(word for word in words if word != "a function" or len(set(words)) <= 2))
    if origin is typing.Literal:
        return "one of " + ", ".join(str(each) for each in arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(each.name for each in hint)
    if hint is torch.dtype:
        return "one of " + ", ".join(_DTYPES)
    if origin in {list, tuple} or hint in {list, tuple}:
        return "a list" + (f" of {_readable(arguments[0])}" if arguments else "")
    plain: dict[Any, str] = {
        type(None): "null", int: "a whole number", float: "a number", str: "a word", bool: "true or false",
    }  # fmt: skip
    if hint in plain:
        return plain[hint]
    return "a function" if origin in {Callable, typing.get_origin(typing.Callable)} else "an object"
