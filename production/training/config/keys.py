"""List every key that a job can have, megatron-core's options included, and find the key that an unknown one meant
(SPEC R-SETUP-1).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterator

from production.training.config.megatron_options import Kind, option_fields
from production.training.config.schema.job import Job
from production.training.config.schema.plain import ABOUT_THE_FILES
from production.training.config.schema.policy import MegatronCfg

PASSED_ON: tuple[Kind, ...] = ("transformer", "optimizer", "distributed_data_parallel_config")
"""Keys of `policy.megatron_cfg` that hold megatron-core's options by name."""
_MEGATRON = "policy.megatron_cfg"
_OF_THE_SECTION = 0.12
"""Bonus of a name in the same section over one elsewhere; likeness runs from 0 to 1."""
_NEAR, _NEAR_ELSEWHERE = 0.55, 0.75
"""Least likeness of a key of the same section, or of another, that is suggested."""
_WITHIN = 0.9
"""Likeness of a longer name of the same section that contains all words of this one in order."""


def section_keys(kind: type) -> list[str]:
    """Return the names that a section declares."""
    return [each.name for each in dataclasses.fields(kind) if each.name not in ABOUT_THE_FILES]


def is_key(kind: type, name: str) -> bool:
    """Return whether `name` may stand in a section of this class, as a key of its own or as an option that is moved
    to `transformer`.
    """
    return name in section_keys(kind) or (kind is MegatronCfg and name in option_fields("transformer"))


def nearest_key(full: str, section: str) -> str | None:
    """Return the valid dotted key that the unknown `full` of `section` meant; None where no key is near enough.

    A key of exactly that name elsewhere comes first, then the most similar name, with a small preference for the same
    section; ties are decided by the whole key.
    """
    name = full[len(section) + 1 :] if section else full
    plain = _without_numbers(section)

    def likeness(key: str) -> tuple[float, float]:
        place, _, leaf = key.rpartition(".")
        if leaf == name:
            return 2.0, _ratio(full, key)
        alike = _ratio(name, leaf)
        if place == plain:
            alike = max(alike, _WITHIN if f"_{name}_" in f"_{leaf}_" else 0.0) + _OF_THE_SECTION
        return alike, _ratio(full, key)

    found = max(all_keys(), key=likeness)
    place, _, leaf = found.rpartition(".")
    alike, _ = likeness(found)
    if alike < (_NEAR + _OF_THE_SECTION if place == plain else _NEAR_ELSEWHERE):
        return None
    return f"{section}.{leaf}" if section and place == plain else found


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Return the dotted keys of a job in the order of their declaration, without the numbers of lists."""
    options = [f"{_MEGATRON}.{name}" for name in option_fields("transformer")]
    options += [f"{_MEGATRON}.{kind}.{name}" for kind in PASSED_ON for name in option_fields(kind)]
    return tuple(dict.fromkeys([*_keys_of(Job, ""), *options]))


def _keys_of(kind: type, key: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    for name in section_keys(kind):
        full = f"{key}.{name}" if key else name
        yield full
        for hint in (hints[name], *typing.get_args(hints[name])):
            if dataclasses.is_dataclass(hint):
                yield from _keys_of(typing.cast("type", hint), full)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()


def _without_numbers(key: str) -> str:
    return ".".join(part.partition("[")[0] for part in key.split("."))
