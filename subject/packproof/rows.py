"""Read what a packing function returns into plain lists: labels beside the token that predicts them, masks, boundaries.

Nothing is judged here. A value that cannot be read raises MalformedPackError, which names the pack and the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

IGNORE_INDEX = -100
"""The label of a position that does not train."""
FIELDS = (
    "input_ids",
    "labels",
    "mask",
    "position_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "sources",
    "shards",
    "depths",
    "lost",
)
"""Fields that a pack may have; the first two must be there."""
SHARD_FIELDS = ("input_ids", "labels", "mask", "position_ids")
"""Fields of a shard or of a depth, in the order in which they are compared."""


class MalformedPackError(ValueError):
    """A packing function returned a value that is not a list of packs."""


@dataclass(frozen=True)
class ReadRow:
    """One pack in plain lists. All lists have the row's own length L, in its own order."""

    tokens: list[int]
    labels: list[int]
    """[L] the token that each position predicts; IGNORE_INDEX where the pack says so, and at the last position under `shift: model`."""
    trained: list[bool]
    """[L] whether the label counts in the loss: it is not IGNORE_INDEX, and the mask is not 0."""
    positions: list[int] | None
    """[L]; None where the pack has no `position_ids`."""
    boundaries: list[int] | None
    """Physical boundaries, from 0 on; None where neither boundaries nor positions are there."""
    boundaries_from: str
    """`cu_seqlens_padded`, `cu_seqlens`, `position_ids`, or nothing."""
    lengths: list[int] | None
    """Tokens of each segment without padding, where the pack has both kinds of boundaries."""
    shards: list[dict[str, list[int]]] | None
    """One dict of lists for each context-parallel rank, as the pack gave them."""
    lost: list[int]
    """Conversations that the pack says it left out or cut."""
    raw: dict[str, Any] = field(default_factory=dict)
    """The pack's own fields as plain lists, for comparisons to the bit."""


def read_packs(packs: Any, shift: str) -> list[ReadRow]:
    """Read all packs of one call; `shift` is that convention (`model` or `data`). Raises MalformedPackError."""
    if isinstance(packs, Mapping) or not isinstance(packs, (list, tuple)):
        raise MalformedPackError(f"pack must return a list of packs, got {type(packs).__name__}: return [pack, …]")
    return [read_pack(pack, shift, number) for number, pack in enumerate(packs)]


def read_pack(pack: Any, shift: str, number: int = 0) -> ReadRow:
    """Read pack `number` of a call. Raises MalformedPackError."""
    raw = plain(pack, number)
    tokens, labels = raw["input_ids"], raw["labels"]
    mask = raw["mask"] if "mask" in raw else [int(label != IGNORE_INDEX) for label in labels]
    for name, values in (("labels", labels), ("mask", mask), ("position_ids", raw.get("position_ids", tokens))):
        if len(values) != len(tokens):
            raise MalformedPackError(
                "pack %d: %s must have the %d positions of input_ids, got %d" % (number, name, len(tokens), len(values))
            )
    if shift == "model":  # the model drops the first label; the last position predicts nothing
        labels, mask = [*labels[1:], IGNORE_INDEX], [*mask[1:], 0]
    boundaries, source = _boundaries(raw, len(tokens))
    return ReadRow(
        tokens=tokens,
        labels=labels,
        trained=[bool(weight) and label != IGNORE_INDEX for weight, label in zip(mask, labels)],
        positions=raw.get("position_ids"),
        boundaries=boundaries,
        boundaries_from=source,
        lengths=_lengths(raw),
        shards=raw.get("shards"),
        lost=raw.get("lost") or [],
        raw=raw,
    )


def plain(pack: Any, number: int = 0) -> dict[str, Any]:
    """Return a pack's fields as plain lists of numbers. A batch dimension of one is taken away. Raises MalformedPackError."""
    if not isinstance(pack, Mapping):
        raise MalformedPackError("pack %d must be a dict of fields, got %s" % (number, type(pack).__name__))
    unknown = sorted(str(name) for name in pack if name not in FIELDS)
    missing = [name for name in FIELDS[:2] if pack.get(name) is None]
    if unknown or missing:
        told = ["lacks " + ", ".join(missing)] if missing else []
        told += ["has unknown fields " + ", ".join(unknown)] if unknown else []
        raise MalformedPackError("pack %d %s; known are %s" % (number, " and ".join(told), ", ".join(FIELDS)))
    found: dict[str, Any] = {}
    for name in FIELDS:
        value = pack.get(name)
        if value is None:
            continue
        if name in ("shards", "depths"):
            if not isinstance(value, (list, tuple)):
                raise MalformedPackError(
                    "pack %d: %s must be a list of dicts, got %s" % (number, name, type(value).__name__)
                )
            found[name] = [_shard(each, name, number) for each in value]
        elif name == "sources":
            found[name] = value
        else:
            found[name] = _numbers(value, name, number)
        if name.startswith("cu_seqlens") and found[name][:1] != [0]:
            raise MalformedPackError("pack %d: %s must begin with 0, got %s" % (number, name, found[name][:1]))
    return found


def _shard(shard: Any, name: str, number: int) -> dict[str, list[int]]:
    if not isinstance(shard, Mapping) or "input_ids" not in shard or "labels" not in shard:
        raise MalformedPackError("pack %d: each of %s must be a dict with input_ids and labels" % (number, name))
    return {each: _numbers(shard[each], each, number) for each in SHARD_FIELDS if shard.get(each) is not None}


def _numbers(value: Any, name: str, number: int) -> list[int]:
    """Return a list, an array or a tensor as a flat list of whole numbers."""
    try:
        values = value.tolist() if hasattr(value, "tolist") else list(value)
        while len(values) == 1 and isinstance(values[0], (list, tuple)):
            values = list(values[0])
        made = [int(each) for each in values]
    except (TypeError, ValueError, OverflowError) as error:  # no list, a list of lists, a text, NaN
        raise MalformedPackError("pack %d: %s must be one row of whole numbers: %s" % (number, name, error)) from error
    for each, whole in zip(values, made):
        if each != whole:
            raise MalformedPackError("pack %d: %s must be one row of whole numbers, got %r" % (number, name, each))
    return made


def _boundaries(raw: Mapping[str, Any], length: int) -> Any:
    """Return the physical boundaries and the field that they come from. What fills them behind the row's end is taken away (R-CU-1)."""
    for name in ("cu_seqlens_padded", "cu_seqlens"):
        if raw.get(name):
            return _cut_filling(raw[name], length), name
    positions = raw.get("position_ids")
    if positions:
        return [at for at, position in enumerate(positions) if position == 0 or at == 0] + [length], "position_ids"
    return None, ""


def _cut_filling(boundaries: Sequence[int], length: int) -> list[int]:
    kept: list[int] = []
    for boundary in boundaries:
        if boundary < 0 or (kept and kept[-1] == length):
            break
        kept.append(boundary)
    return kept


def _lengths(raw: Mapping[str, Any]) -> list[int] | None:
    if not raw.get("cu_seqlens") or not raw.get("cu_seqlens_padded"):
        return None
    ends = [boundary for boundary in raw["cu_seqlens"] if boundary >= 0]
    return [end - start for start, end in zip(ends, ends[1:])]
