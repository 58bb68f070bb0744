"""Walks every side from its row to the rank, step by step, and finds what differs at each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from equivalence.subjects import BATCH_TENSORS, ROW_TENSORS, Row, RowSettings
from tools.diff_row.errors import problem
from tools.diff_row.rank.backends import Cut, Way, walk
from tools.diff_row.rank.coordinates import RankPlace
from tools.diff_row.rank.diff import differences_of, first_place
from tools.diff_row.rank.steps import STOPS, TENSORS, Has, RankFindings, Refused, Step, StepDifference
from tools.diff_row.row.findings import Findings, Side, compare
from tools.diff_row.row.layout import RowMap


def travel(
    row: Findings,
    place: RankPlace,
    *,
    subjects: Mapping[str, Any] | None,
    depths: int,
    layout: str = "zigzag",
    stop_at: str = "slice",
    at: int | None = None,
    ways: Mapping[str, tuple[str, Way]] | None = None,
    notes: Sequence[str] = (),
) -> RankFindings:
    """Trace a row whose sides are built, up to and including `stop_at` (not `weights`, which needs a global batch).

    `subjects` collate, by side; a side without one is collated by the reference; None for a bin, which nobody collates. `ways` hold the tensors
    of sides that were cut already (a dump of a job). Raises BadInput for a requested slice that does not divide.
    """
    cut = Cut(rank=place.context_rank, size=place.cp, layout=layout, depths=depths)
    last = STOPS.index(stop_at)
    gone = {
        side.name: (ways or {}).get(side.name) or walk(side.name, side.row, cut, (subjects or {}).get(side.name))
        for side in row.built
    }
    base = row.built[0].name if row.built else None
    steps = [_row_step(row)]
    if subjects is not None and base is not None and last >= STOPS.index("batch"):
        steps.append(_batch_step(row, subjects))
    if subjects is None and base is not None and last >= STOPS.index("batch"):
        steps.append(_bin_step({side: way for side, (_, way) in gone.items()}))
    names = ["microbatch"] if last >= STOPS.index("microbatch") else []
    names += [f"depth {k}" for k in range(1, depths + 1)] if last >= STOPS.index("depth") else []
    if last >= STOPS.index("share"):
        names += ["share", *(f"share, depth {k}" for k in range(1, depths + 1))]
    if base is not None:
        paths = {side: way for side, (_, way) in gone.items()}
        steps += [_way_step(name, row, paths, cut) for name in names if any(name in way for way in paths.values())]
        if last >= STOPS.index("slice") and steps[-1].origin is not None:
            steps += [_slice_step(step, place) for step in steps if step.name == "share"]
    return RankFindings(
        place=place,
        row=row,
        layout=layout,
        depths=depths,
        ways={side: who for side, (who, _) in gone.items()},
        steps=tuple(steps),
        at=_followed(steps, at, row),
        notes=tuple(notes),
    )


def _row_step(row: Findings) -> Step:
    """Return the findings on the row as a step: the first difference of each tensor of each pair with the first side."""
    sides: dict[str, Has] = {}
    for side in row.sides:
        refusal = side.row.refusal
        if refusal is not None:
            sides[side.name] = Refused(kind=refusal.kind, message=refusal.message)
        else:
            sides[side.name] = _row_tensors(side.row)
    found = []
    for pair in row.pairs:
        if pair.left != row.sides[0].name:
            continue
        for tensor, classes in pair.counts.items():
            first = next(
                (f for f in row.listed if (f.left, f.right, f.tensor) == (pair.left, pair.right, tensor)), None
            )
            position = None if first is None else first.position
            values = (
                (first.left_value, first.right_value) if first is not None else pair.fields.get(tensor, (None, None))
            )
            found.append(
                StepDifference(
                    left=pair.left,
                    right=pair.right,
                    tensor=tensor,
                    count=sum(classes.values()),
                    place=position,
                    position=position,
                    right_position=None,
                    left_value=values[0],
                    right_value=values[1],
                    cause=next(iter(classes)).replace("_", " "),
                )
            )
    origin = torch.arange(row.length) if row.built else None
    return Step(
        name="row", depth=0, sides=sides, origin=origin, differences=tuple(sorted(found, key=first_place)), view=row
    )


def _row_tensors(row: Row) -> dict[str, torch.Tensor]:
    found = {name: getattr(row, name) for name in ROW_TENSORS}
    return found | {"max_seqlen": torch.tensor(row.max_seqlen)}


def _batch_step(row: Findings, subjects: Mapping[str, Any]) -> Step:
    """Return the row as a batch of one: one row is one microbatch (R-BATCH-3)."""
    from equivalence.subjects import load  # noqa: PLC0415

    settings = row.settings or RowSettings(pack_length=row.length)
    sides: dict[str, Has] = {}
    for side in row.built:
        collate = getattr(subjects.get(side.name), "collate", None) or load("reference").collate
        try:
            batch = collate([side.row], settings)
        except Exception as error:
            raise problem(
                f"side {side.name!r} could not collate ({type(error).__name__}: {error})",
                where="batch",
                fix="stop at --stop-at row",
            ) from error
        values = {name: getattr(batch, name) for name in BATCH_TENSORS}
        sides[side.name] = {name: torch.as_tensor(value) for name, value in values.items() if value is not None}
    return Step(
        name="batch", depth=0, sides=sides, origin=None, differences=differences_of("batch", 0, sides), view=None
    )


def _bin_step(ways: Mapping[str, Way]) -> Step:
    """Return the conversations of a bin before they are squeezed into a row (R-ONLINE-2)."""
    missing = Refused(kind=None, message="this side does not have this step")
    sides = {side: way.get("batch", missing) for side, way in ways.items()}
    return Step(
        name="batch",
        depth=0,
        sides=sides,
        origin=None,
        differences=differences_of("batch", 0, sides),
        view=None,
        note="the bin's conversations as a padded batch, before they are squeezed",
    )


def _way_step(name: str, row: Findings, ways: Mapping[str, Way], cut: Cut) -> Step:
    kind, _, deeper = name.partition(", depth ")
    depth = int(deeper or (name.removeprefix("depth ") if name.startswith("depth ") else 0))
    missing = Refused(kind=None, message="this side does not have this step")
    sides: dict[str, Has] = {side: way.get(name, missing) for side, way in ways.items()}
    # A refusal further up is not told again: the way of all ends there.
    base = next(iter(ways))
    first = ways[base].get("share")
    begun = row.built[0].row.input_ids
    origin = torch.arange(begun.numel()) if kind != "share" and begun is not None else None
    if kind == "share" and first is not None and not isinstance(first, Refused):
        origin = first.get("positions")
    wholes: dict[str, Mapping[str, torch.Tensor]] = {}
    for side in row.built:
        whole = ways[side.name].get("microbatch")
        # A dump has no microbatch, but the row that it was made of.
        wholes[side.name] = _row_tensors(side.row) if whole is None or isinstance(whole, Refused) else whole
    found = differences_of(kind, depth, sides, origin=origin, wholes=wholes, cut=cut)
    step = Step(
        name="depth" if kind.startswith("depth") else kind,
        depth=depth,
        sides=sides,
        origin=origin,
        differences=found,
        view=None,
    )
    return dataclasses.replace(step, view=view_of(step, row))


def _slice_step(share: Step, place: RankPlace) -> Step:
    """Return the part of the share whose embedded tokens this tp rank holds. Raises BadInput if tp does not divide the share."""
    assert share.origin is not None
    total = len(share.origin)
    parts = place.tp if place.sequence_parallel else 1
    if total % parts:
        raise problem(
            f"a share of {total} tokens, which tp {parts} does not divide",
            where="--tp with sequence parallelism",
            fix="take a pack_length that is a multiple of cp·tp (2·cp·tp for zigzag), or --no-sequence-parallel",
        )
    start = place.tensor_rank * (total // parts) if parts > 1 else 0
    end = start + total // parts
    sides: dict[str, Has] = {}
    for side, has in share.sides.items():
        if isinstance(has, Refused):
            sides[side] = has
            continue
        wanted = [name for name in ("positions", "input_ids", "position_ids") if name in has]
        sides[side] = {name: _split(side, has[name], place, start, end) for name in wanted}
    origin = share.origin[start:end]
    return Step(
        name="slice",
        depth=share.depth,
        sides=sides,
        origin=origin,
        differences=differences_of("slice", share.depth, sides, origin=origin),
        view=None,
        note=f"places {start:,}..{end:,} of the share",
    )


def _split(side: str, tensor: torch.Tensor, place: RankPlace, start: int, end: int) -> torch.Tensor:
    """Return a contiguous part; production's and Megatron-LM's side use megatron-core's own split of the first dimension."""
    if side not in ("production", "megatron_lm") or not place.sequence_parallel:
        return tensor[start:end]
    from megatron.core.tensor_parallel import mappings  # noqa: PLC0415

    group = _Group(size=place.tp, rank=place.tensor_rank)
    split: torch.Tensor = mappings._split_along_first_dim(tensor, group)  # noqa: SLF001 - the witness
    return split


class _Group:
    """Process group for megatron-core where nothing is sent."""

    def __init__(self, *, size: int, rank: int) -> None:
        self.size = lambda: size
        self.rank = lambda: rank


def view_of(step: Step, row: Findings) -> Findings | None:
    """Return the four tensors of the sides at a step as findings by place, so that screen and page can show their surroundings."""
    if step.origin is None or len(step.origin) == 0 or int(step.origin.max()) >= len(row.map.conversation_at):
        return None
    sides = []
    for side in row.built:
        has = step.sides.get(side.name)
        if has is None or isinstance(has, Refused):
            continue
        if (
            "position_ids" not in has
            and side.row.position_ids is not None
            and len(has["input_ids"]) == len(step.origin)
        ):
            # Online the model is given none: those of the row, then.
            has = {**has, "position_ids": side.row.position_ids.reshape(-1)[step.origin]}
        if any(name not in has for name in TENSORS):
            continue
        tensors = {name: has[name].reshape(-1) for name in TENSORS}
        sides.append(Side(name=side.name, version=side.version, row=_as_row(tensors, step.origin, row.map)))
    if not sides:
        return None
    compared = compare(sides)
    return dataclasses.replace(
        row,
        sides=tuple(sides),
        map=_sliced(row.map, step.origin),
        pairs=compared.pairs,
        listed=compared.listed,
        differing=compared.differing,
        flaws={},
    )


def _as_row(tensors: Mapping[str, torch.Tensor], origin: torch.Tensor, row_map: RowMap) -> Row:
    """Return boundaries by place: where the conversation changes. A place at which the row is left and entered again further on is not a boundary."""
    at = torch.from_numpy(row_map.conversation_at)[origin]
    inner = (at.diff() != 0).nonzero().reshape(-1) + 1
    ends = torch.tensor([0, *inner.tolist(), len(origin)], dtype=torch.int32)
    named: dict[str, Any] = {**tensors}
    return Row(**named, cu_seqlens=ends, max_seqlen=int(ends.diff().max()))


def _sliced(row_map: RowMap, origin: torch.Tensor) -> RowMap:
    index = origin.numpy()
    at = row_map.conversation_at[index]
    conversations = []
    for each in row_map.conversations:
        places = np.flatnonzero(at == each.number)
        if each.start is not None and len(places):
            conversations.append(dataclasses.replace(each, start=int(places[0]), end=int(places[-1]) + 1))
        else:
            conversations.append(dataclasses.replace(each, start=0 if each.start is not None else None, end=0))
    return RowMap(
        conversations=tuple(conversations),
        conversation_at=at,
        turn_at=row_map.turn_at[index],
        padded=row_map.padded[index],
        padding_known=row_map.padding_known,
    )


def _followed(steps: Sequence[Step], at: int | None, row: Findings) -> int | None:
    """Return the position to follow: the requested one, the first difference, or the first trained position of this rank."""
    if not row.built:
        return None
    if at is not None:
        if not 0 <= at < row.length:
            raise problem(
                f"the row has positions 0 to {row.length - 1}, there is no {at}", where="--at", fix="give one of them"
            )
        return at
    # What this rank holds comes before what only the whole row has.
    for step in sorted(steps, key=lambda each: each.name not in ("share", "slice", "weights")):
        placed = next((found.position for found in step.differences if found.position is not None), None)
        if placed is not None:
            return placed
    held = [step.origin for step in steps if step.name in ("share", "slice") and step.origin is not None]
    share = min(held, key=len, default=None)
    mask = row.built[0].row.token_mask
    assert mask is not None
    own = torch.arange(row.length) if share is None else share
    trained = (mask.reshape(-1)[own] != 0).nonzero().reshape(-1)
    return int(own[trained[0] if len(trained) else 0])
