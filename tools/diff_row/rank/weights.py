"""Compute the weight of each token of the share in the gradient of a step, in all three normalizations (R-LOSS-2 to R-LOSS-4).

The reference has its formula. Production and Megatron-LM have the gradient of production's loss through megatron-core's own schedule, after
data parallelism and the division by tokens. All dp x cp ranks of the global batch run in this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from equivalence.subjects import Row
from reference import loss as reference
from tools.diff_row.errors import problem
from tools.diff_row.rank.backends import Cut, walk
from tools.diff_row.rank.steps import Has, RankFindings, Refused, Step, StepDifference

ROUNDINGS = 16
"""Operations on a weight that may round on either side, as the checks of losses allow; float32 where a count's inverse is float32."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The rows of a global batch in sequential order (R-ORDER-1), of which one is looked at."""

    rows: Mapping[str, Sequence[Row]]
    """Each side's, in order."""
    first: int
    """The first one's number in the file."""
    number: int
    """Place of the row that is looked at."""

    @property
    def size(self) -> int:
        """G, the global batch size."""
        return len(next(iter(self.rows.values())))


def weights_step(
    findings: RankFindings, batch: GlobalBatch, subjects: Mapping[str, Any], *, depths_left_out: bool
) -> Step:
    """Return the weights of the share's tokens. Raises BadInput for a row of another data-parallel rank."""
    place, share = findings.place, findings.share
    if share is None or share.origin is None:
        raise problem(
            "no share was made, so there are no weights", where="--stop-at weights", fix="correct the cut first"
        )
    if batch.number % place.dp != place.data_rank:
        other = place.rank + (batch.number % place.dp - place.data_rank) * place.tp * place.cp
        raise problem(
            f"row {batch.first + batch.number} is fed to dp rank {batch.number % place.dp} in sequential order, and rank {place.rank} is dp {place.data_rank}",
            where="--rank",
            fix=f"take --rank {other}",
        )
    sides: dict[str, Has] = {}
    for side, rows in batch.rows.items():
        masks = _masks(side, rows, findings, subjects.get(side))
        if isinstance(masks, Refused):
            sides[side] = masks
            continue
        here = place.data_rank * place.cp + place.context_rank
        make = _from_gradients if side in ("production", "megatron_lm") else _from_formula
        sides[side] = {
            name: make(name, masks, place.cp)[here][batch.number // place.dp] for name in reference.NORMALIZATIONS
        }
    last = batch.first + batch.size - 1
    note = f"global batch: row{'s' if batch.size > 1 else ''} {batch.first}{f'..{last}' if batch.size > 1 else ''} of the file (from 0), {batch.size // place.dp} microbatch{'es' if batch.size > place.dp else ''} on each of dp {place.dp}"
    if depths_left_out:
        note += "; of the main loss, losses at depths are weighed elsewhere (R-LOSS-6)"
    return Step(
        name="weights",
        depth=0,
        sides=sides,
        origin=share.origin,
        differences=_differences(sides, share.origin),
        view=None,
        note=note,
    )


def _masks(side: str, rows: Sequence[Row], findings: RankFindings, subject: Any) -> list[list[torch.Tensor]] | Refused:
    """Return `[rank][microbatch]` masks of the shares, ranks over dp x cp, cp fastest."""
    place = findings.place
    found: list[list[torch.Tensor]] = []
    for rank in range(place.dp * place.cp):
        cut = Cut(rank=rank % place.cp, size=place.cp, layout=findings.layout, depths=0)
        found.append([])
        for row in rows[rank // place.cp :: place.dp]:
            if row.refusal is not None:
                return Refused(kind=row.refusal.kind, message=f"a row of the global batch: {row.refusal.message}")
            has = walk(side, row, cut, subject)[1]["share"]
            if isinstance(has, Refused):
                return has
            found[-1].append(has["token_mask"])
    return found


def _from_formula(name: str, masks: list[list[torch.Tensor]], size: int) -> list[list[torch.Tensor]]:
    valid = torch.tensor(float(sum(mask.sum() for rank in masks for mask in rank)), dtype=torch.float64)
    return reference.token_weights(name, masks, context_parallel_size=size, valid_tokens=valid)


def _from_gradients(name: str, masks: list[list[torch.Tensor]], size: int) -> list[list[torch.Tensor]]:
    """Return weights as the gradient of losses that are all 1, because a token's loss does not change its own weight."""
    from equivalence.checks.cuts.schedule import finalized, gradient_of, loss_settings, schedule  # noqa: PLC0415 - heavy
    from equivalence.generators.online import LossCase  # noqa: PLC0415
    from production.loss import direct_loss  # noqa: PLC0415

    losses = [[torch.ones(mask.shape, dtype=torch.float64) for mask in rank] for rank in masks]
    case = LossCase(normalization=name, size=size, losses=losses, masks=masks, boundaries=[], depths=0)  # type: ignore[arg-type] # one of them
    settings = loss_settings(case, case.normalization)
    valid = torch.stack([mask.sum(dtype=torch.float64) for rank in masks for mask in rank]).sum()
    count = torch.zeros((), dtype=torch.int32)
    found: list[list[torch.Tensor]] = []
    for rank in masks:
        found.append([])
        for mask in rank:
            leaf = torch.ones(1, mask.numel(), dtype=torch.float64, requires_grad=True)
            returned = direct_loss(leaf, target_mask=mask[None], settings=settings, global_valid_tokens=valid)
            torch.autograd.backward(schedule(returned, case, case.normalization, count))
            found[-1].append(gradient_of(leaf)[0])
    return finalized(found, case, count)


def _differences(sides: Mapping[str, Has], origin: torch.Tensor) -> tuple[StepDifference, ...]:
    """Return the differences beyond rounding; name a constant factor between the two sides."""
    found = []
    (base, left), *others = sides.items()
    for side, right in others:
        if isinstance(left, Refused) or isinstance(right, Refused):
            continue
        for name in left:
            ours, theirs = left[name].double(), right[name].double()
            eps = torch.finfo(torch.float32 if name == "per_token" else torch.float64).eps
            differ = ~((ours - theirs).abs() <= ROUNDINGS * eps * ours.abs())
            if ours.shape != theirs.shape or not bool(differ.any()):
                continue
            first = int(differ.nonzero()[0])
            found.append(
                StepDifference(
                    left=base,
                    right=side,
                    tensor=name,
                    count=int(differ.sum()),
                    place=first,
                    position=int(origin[first]),
                    right_position=None,
                    left_value=ours[first].item(),
                    right_value=theirs[first].item(),
                    cause=_factor(ours, theirs),
                )
            )
    return tuple(found)


def _factor(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    weighs = ours != 0
    ratios = theirs[weighs] / ours[weighs]
    if len(ratios) and bool((theirs[~weighs] == 0).all()) and bool((ratios - ratios[0]).abs().max() < 1e-6):
        return f"all weigh {ratios[0].item():.6g} times as much"
    return "another mask" if bool(((ours != 0) != (theirs != 0)).any()) else "differs"
