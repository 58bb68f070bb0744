"""The positions around a place in the row, with what each side has there: what the screen and the JSON both show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tools.diff_row.row.findings import REACH, TOKEN_TENSORS, Findings, boundary_set


@dataclass(frozen=True, kw_only=True)
class ContextPosition:
    """One position."""

    position: int
    tokens: Mapping[str, str]
    """Side to the text of its token."""
    where: str
    """Conversation, turn and role; or conversation and `padding`."""
    boundary: tuple[str, ...]
    """The sides that have a boundary before this position."""
    values: Mapping[str, Mapping[str, int | float | None]]
    """Tensor to side to value; None where the side is shorter."""
    differs: frozenset[str]
    """The tensors in which sides differ here."""


def context_window(findings: Findings, position: int, reach: int = REACH) -> list[ContextPosition]:
    """Return the positions from `reach` before to `reach` after a position, cut at the ends of the row."""
    ends = {side.name: boundary_set(side.row) for side in findings.built}
    places = []
    for at in range(max(0, position - reach), min(findings.length, position + reach + 1)):
        values = {
            tensor: {side.name: _value(getattr(side.row, tensor), at) for side in findings.built}
            for tensor in TOKEN_TENSORS
        }
        tokens = {name: findings.texts.text(int(i)) if i is not None else "" for name, i in values["input_ids"].items()}
        places.append(
            ContextPosition(
                position=at,
                tokens=tokens,
                where=findings.map.place(at),
                boundary=tuple(name for name, found in ends.items() if at in found),
                values=values,
                differs=frozenset(
                    tensor for tensor, sides in values.items() if len(set(map(repr, sides.values()))) > 1
                ),
            )
        )
    return places


def groups(places: list[ContextPosition], tensor: str) -> list[tuple[str, ...]]:
    """Group the sides that have the same values of a tensor at all of these places."""
    found: dict[tuple[str, ...], list[str]] = {}
    for side in places[0].values[tensor] if places else ():
        found.setdefault(tuple(repr(place.values[tensor][side]) for place in places), []).append(side)
    return [tuple(sides) for sides in found.values()]


def _value(tensor: torch.Tensor | None, position: int) -> int | float | None:
    if tensor is None or position >= tensor.numel():
        return None
    value = tensor.reshape(-1)[position].item()
    return int(value) if float(value).is_integer() else float(value)
