"""Lay out a loaded optimizer for ranks other than those that saved it.

megatron-core saves tensors under the names of the whole model's weights, which any layout can read. Parameter groups it
saves as the first rank had them, although pipeline stages and shares of experts have groups of their own. The groups here
keep what this layout made of the configuration, and take the count of steps alone from the checkpoint: rates and decays
come from the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

_STEP = "common_step"
"""megatron-core's name for the count of steps that the plain optimizer's parameters share."""


def structure_of(wanted: Any) -> Any:
    """Return a copy of the mappings and lists of a state that is going to be loaded, which empties them."""
    if isinstance(wanted, dict):
        return {name: structure_of(value) for name, value in wanted.items()}
    return [structure_of(value) for value in wanted] if isinstance(wanted, list) else wanted


def lay_out(own: Any, loaded: Any) -> Any:
    """Return `own`, an optimizer's state as `structure_of` gives it, with the tensors and the step count of `loaded`."""
    common, group = _first(loaded, _STEP), _first(loaded, "param_groups")
    steps = group[0].get("step") if group else None
    # A number, not a tensor: megatron-core looks for different ones among the groups of a chain.
    return _filled(own, loaded, steps=float(common) if steps is None and common is not None else steps)


def _filled(own: Any, loaded: Any, *, steps: Any) -> Any:
    if isinstance(own, LocalNonpersistentObject):
        return own.unwrap()
    if isinstance(own, ShardedBase):
        return loaded
    if isinstance(own, list):
        several = loaded if isinstance(loaded, list) else []
        return [
            _filled(each, several[place] if place < len(several) else None, steps=steps)
            for place, each in enumerate(own)
        ]
    if not isinstance(own, dict):
        return own
    named = loaded if isinstance(loaded, dict) else {}
    found = {name: _filled(each, named.get(name), steps=steps) for name, each in own.items()}
    if steps is not None and "param_groups" in own:
        found["param_groups"] = [{**group, "step": steps} for group in found["param_groups"]]
        if "state" in own:
            found["state"][_STEP] = torch.tensor(float(steps))
    return found


def _first(state: Any, name: str) -> Any:
    """Return the first value of this name in nested mappings; None where there is none."""
    if not isinstance(state, dict):
        return None
    if name in state:
        return state[name]
    return next((found for each in state.values() if (found := _first(each, name)) is not None), None)


@contextlib.contextmanager
def without_steps(optimizers: list[Any]) -> Iterator[None]:
    """Let a distributed optimizer of torch's Adam load weights and moments without a count of steps for each parameter.

    megatron-core 0.19.2 leaves the count out of `fully_reshardable` and then asks for it.
    """
    changed = [each for each in optimizers if hasattr(each, "_set_main_param_and_optimizer_states")]

    def lenient(optimizer: Any) -> Any:
        strict = optimizer._set_main_param_and_optimizer_states  # noqa: SLF001 - the one place where it can be given
        return lambda parameter, tensors: strict(parameter, {"step": None, **tensors})

    for each in changed:
        each._set_main_param_and_optimizer_states = lenient(each)  # noqa: SLF001
    try:
        yield
    finally:
        for each in changed:
            del each._set_main_param_and_optimizer_states  # noqa: SLF001


@contextlib.contextmanager
def with_padded_buckets(optimizers: list[Any]) -> Iterator[None]:
    """Count the padding between buckets while a distributed optimizer is described as `fully_reshardable`.

    megatron-core 0.19.2 joins buckets without their padding and then cuts parameters out at places that count it: behind
    the first padded bucket each parameter would get the state of places further on, and the last zeros.
    """
    before = []
    for buffer in {id(each): each for optimizer in optimizers for each in getattr(optimizer, "buffers", ())}.values():
        before += [(part, part.numel_unpadded) for part in (buffer, *buffer.buckets)]
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)
    try:
        yield
    finally:
        for part, numel in before:
            part.numel_unpadded = numel
