"""A training step on a real model, in one layout: token losses, reports and every parameter's gradient against the reference (R-MODEL, R-LOSS).

Models run in float64; where megatron-core rounds to float32 the reference does, and R-MODEL-11 says how far apart that may
bring them. Megatron-LM's own data path is held to the bit: it runs the same model (`compare_outcomes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from equivalence.checks.result import CheckResult, Finding
from equivalence.compare import Difference
from equivalence.models import ModelCase, ModelShape, RankOutcome, gradients
from production.weights import drawn
from reference import batches as reference_batches
from reference import loss as reference_loss
from reference import multi_token
from reference.context_parallel import owned_positions
from reference.model import Model, Shape
from reference.model_bounds import bounds

MTP_SCALING_FACTOR = 0.1
"""megatron-core's default `mtp_loss_scaling_factor`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """What the reference makes of a case, for every rank, with the bounds of R-MODEL-11."""

    token_losses: list[list[list[torch.Tensor]]]
    """[rank of dp x cp][microbatch][depth] is [n]; ranks count cp fastest."""
    reported: float
    mtp_reported: torch.Tensor
    """[D]."""
    valid_tokens: float
    gradients: dict[str, torch.Tensor]
    token_bound: float
    gradient_bounds: dict[str, float]
    gradient_norm_bound: float
    router_gap: float
    """R-MODEL-6: where it is within rounding, the other side may rightly choose another expert."""


def check_model(case: ModelCase, outcomes: Sequence[RankOutcome]) -> CheckResult:
    """Production's outcomes, one for each rank of the world, against the reference."""
    found = gradients(outcomes)
    expected = expect(
        case, {name: tuple(each.shape) for name, each in found.items()}, data_size=outcomes[0].place.data_size
    )
    differences = [
        *_token_losses(expected, outcomes),
        *_reports(expected, outcomes),
        *_gradients(expected, found, outcomes),
    ]
    return _result("models", "reference", "production", differences)


def compare_outcomes(
    check: str, left: str, lefts: Sequence[RankOutcome], right: str, rights: Sequence[RankOutcome]
) -> CheckResult:
    """Two paths through the same model in the same layout, rank by rank: everything equal to the bit."""
    differences = []
    for one, other in zip(lefts, rights, strict=True):
        where = f"rank {one.place.rank}"
        for number, (a, b) in enumerate(zip(one.token_losses, other.token_losses, strict=True)):
            for depth, (x, y) in enumerate(zip(a, b, strict=True)):
                differences += _bits(f"{where} microbatch {number} depth {depth} token losses", x, y)
        for number, (x, y) in enumerate(zip(one.reports, other.reports, strict=True)):
            differences += _bits(f"{where} microbatch {number} reported", x, y)
        if one.mtp_losses is not None and other.mtp_losses is not None:
            differences += _bits(f"{where} reported of each depth", one.mtp_losses, other.mtp_losses)
        theirs = {(part.name, part.part): part.values for part in other.gradients}
        for part in one.gradients:
            differences += _bits(f"{where} gradient of {part.name}", part.values, theirs[part.name, part.part])
    return _result(check, left, right, differences)


def expect(case: ModelCase, shapes: Mapping[str, tuple[int, ...]], *, data_size: int) -> Expected:
    """The reference's step: the whole model on one process, row by row, and what each rank of the layout is to see of it."""
    draw = drawn(case.seed, scale=case.weight_scale)
    named = {name: draw(name, shape) for name, shape in shapes.items()}
    batch = case.batch()
    count, context = len(case.rows), case.sizes.context
    boundaries = [[0, *itertools.accumulate(row)] for row in case.rows]
    masks = [_depth_masks(batch.token_mask[row], boundaries[row], case.shape.depths) for row in range(count)]
    owned = [[owned_positions(cu, rank, context) for rank in range(context)] for cu in boundaries]
    rows_of = [reference_batches.rows_of_rank(range(count), rank, data_size) for rank in range(data_size)]
    ranks = list(itertools.product(range(data_size), range(context)))
    # [rank][microbatch][depth]: this rank's share of the masks.
    shares = [[[mask[owned[row][cp]] for mask in masks[row]] for row in rows_of[dp]] for dp, cp in ranks]
    first = [[microbatch[0] for microbatch in rank] for rank in shares]
    valid = torch.tensor(reference_batches.valid_tokens(batch.token_mask, batch.sample_mask))
    weights = _weights(case, shares, first, valid)
    gaps: list[float] = []

    def run(model: Model) -> tuple[list[torch.Tensor], torch.Tensor]:
        tokens, objective = [], torch.zeros((), dtype=torch.float64)
        for row in range(count):
            losses = model.losses(batch.input_ids[row], batch.target_ids[row], boundaries[row])
            gaps.append(losses.router_gap)
            dp, microbatch = row % data_size, row // data_size
            for depth, each in enumerate(losses.tokens):
                tokens.append(each)
                for cp in range(context):
                    weight = weights[ranks.index((dp, cp))][microbatch][depth]
                    objective = objective + (each[owned[row][cp]].double() * weight).sum()
        return tokens, objective

    shape = reference_shape(case.shape, case.sizes.pipeline)
    limits = bounds(shape, named, run)
    model = Model.from_tensors(shape, named)
    tokens, objective = run(model)
    per_row = list(itertools.batched([each.detach() for each in tokens], case.shape.depths + 1))
    token_losses = [
        [[per_row[row][depth][owned[row][cp]] for depth in range(case.shape.depths + 1)] for row in rows_of[dp]]
        for dp, cp in ranks
    ]
    depths = range(1, case.shape.depths + 1)
    if case.mtp_weights == "rows":  # then each row's own counts are reported too, as if one rank had it
        losses_of = [[[per_row[row][depth] for row in rows] for rows in rows_of] for depth in depths]
        masks_of = [[[masks[row][depth] for row in rows] for rows in rows_of] for depth in depths]
    else:
        losses_of = [[[each[depth] for each in rank] for rank in token_losses] for depth in depths]
        masks_of = [[[each[depth] for each in rank] for rank in shares] for depth in depths]
    return Expected(
        token_losses=token_losses,
        reported=float(
            reference_loss.training_loss([[each[0] for each in rank] for rank in token_losses], first)
        ),
        mtp_reported=reference_loss.multi_token_losses(losses_of, masks_of) if case.shape.depths else torch.zeros(0),
        valid_tokens=float(valid),
        gradients=model.gradients(objective),
        token_bound=max(limits.tokens),
        gradient_bounds=limits.gradients,
        gradient_norm_bound=limits.gradient_norm,
        router_gap=min(gaps),
    )


def reference_shape(shape: ModelShape, pipeline_size: int) -> Shape:
    """The reference's description of the same model."""
    pattern = shape.hybrid_layer_pattern(pipeline_size)
    return Shape(
        num_layers=shape.layers if pattern is None else len(shape.pattern),
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.hidden_size // shape.heads,
        hybrid_layer_pattern=pattern,
        share_embeddings_and_output_weights=shape.tied,
        activation=shape.activation,
        gated_linear_unit=shape.gated,
        rotary_percent=shape.rotary_percent,
        mtp_num_layers=shape.depths,
        mtp_use_repeated_layer=shape.repeated,
        moe_router_topk=shape.topk,
    )


def _weights(
    case: ModelCase,
    shares: Sequence[Sequence[Sequence[torch.Tensor]]],
    first: Sequence[Sequence[torch.Tensor]],
    valid: torch.Tensor,
) -> list[list[list[torch.Tensor]]]:
    """What each token's loss weighs in the gradient, [rank][microbatch][depth]."""
    context = case.sizes.context
    counted = valid if case.normalization == "global_valid_tokens" else None
    main = reference_loss.token_weights(case.normalization, first, context_parallel_size=context, valid_tokens=valid)
    if not case.shape.depths:
        return [[[each] for each in rank] for rank in main]
    deeper = reference_loss.multi_token_weights(
        case.normalization,
        shares,
        scaling_factor=MTP_SCALING_FACTOR,
        context_parallel_size=context,
        rows=case.mtp_weights == "rows",
        valid_tokens=counted,
    )
    return [
        [[each, *depths] for each, depths in zip(rank, further, strict=True)]
        for rank, further in zip(main, deeper, strict=True)
    ]


def _depth_masks(mask: torch.Tensor, boundaries: Sequence[int], depths: int) -> list[torch.Tensor]:
    return [mask, *(multi_token.shift(mask, boundaries, depth) for depth in range(1, depths + 1))]


def _token_losses(expected: Expected, outcomes: Sequence[RankOutcome]) -> list[Difference]:
    differences = []
    for each in outcomes:
        if not each.place.is_last_stage:
            continue
        rank = each.place.data_rank * each.place.context_size + each.place.context_rank
        for number, (ours, theirs) in enumerate(zip(expected.token_losses[rank], each.token_losses, strict=True)):
            for depth, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                name = f"rank {each.place.rank} microbatch {number} depth {depth} token losses"
                differences += _near(name, a, b, expected.token_bound)
    return differences


def _reports(expected: Expected, outcomes: Sequence[RankOutcome]) -> list[Difference]:
    last = [each for each in outcomes if each.place.is_last_stage and each.place.tensor_rank == 0]
    total = torch.stack([report for each in last for report in each.reports]).sum(dim=0)
    reported = total[0] / total[1].clamp(min=1)
    # A mean of token losses is no further off than the worst of them, and float32 sums of n terms round n times.
    bound = expected.token_bound + expected.valid_tokens * 2.0**-24 * max(expected.reported, 1.0)
    differences = _near("reported loss", torch.tensor(expected.reported).double(), reported.double(), bound)
    for each in outcomes:
        if each.valid_tokens != expected.valid_tokens:
            name = f"rank {each.place.rank} valid tokens"
            differences += [_difference(name, None, expected.valid_tokens, each.valid_tokens)]
        if each.mtp_losses is not None:
            name = f"rank {each.place.rank} reported of each depth"
            differences += _near(name, expected.mtp_reported.double(), each.mtp_losses.double(), bound)
    return differences


def _gradients(
    expected: Expected, found: Mapping[str, torch.Tensor], outcomes: Sequence[RankOutcome]
) -> list[Difference]:
    differences = []
    for name in sorted(expected.gradients.keys() ^ found.keys()):
        sides = [f"a gradient of {name}" if name in side else None for side in (expected.gradients, found)]
        differences.append(_difference(f"gradient of {name}", None, *sides))
    for name, ours in expected.gradients.items():
        if name in found:
            off = float((ours - found[name]).norm())
            if not off <= expected.gradient_bounds[name]:
                place = tuple(int(i) for i in torch.unravel_index((ours - found[name]).abs().argmax(), ours.shape))
                said = f"{float(found[name][place])!r}, {off:.3g} away in norm, {expected.gradient_bounds[name]:.3g} allowed"
                differences.append(_difference(f"gradient of {name}", place, float(ours[place]), said))
    norm = sum(float(each.square().sum()) for each in expected.gradients.values()) ** 0.5
    # megatron-core keeps the norm in float32.
    bound = expected.gradient_norm_bound + 4 * 2.0**-24 * norm
    for each in outcomes:
        name = f"rank {each.place.rank} gradient norm"
        differences += _near(name, torch.tensor(norm).double(), torch.tensor(each.gradient_norm).double(), bound)
    return differences


def _near(name: str, left: torch.Tensor, right: torch.Tensor, bound: float) -> list[Difference]:
    if left.shape != right.shape:
        return [_difference(name, None, tuple(left.shape), tuple(right.shape))]
    off = (left.double() - right.double()).abs()
    if not left.numel() or bool((off <= bound).all()):
        return []
    place = int(off.nan_to_num(nan=torch.inf).reshape(-1).argmax())
    said = f"{float(right.reshape(-1)[place])!r}, more than {bound:.3g} away"
    return [_difference(name, place if left.ndim else None, float(left.reshape(-1)[place]), said)]


def _bits(name: str, left: torch.Tensor, right: torch.Tensor) -> list[Difference]:
    if left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right):
        return []
    if left.shape != right.shape or left.dtype != right.dtype:
        sides = [f"{side.dtype} {tuple(side.shape)}" for side in (left, right)]
        return [_difference(name, None, *sides)]
    place = int((left != right).reshape(-1).nonzero()[0])
    return [_difference(name, place, float(left.reshape(-1)[place]), float(right.reshape(-1)[place]))]


def _difference(name: str, position: int | tuple[int, ...] | None, left: object, right: object) -> Difference:
    return Difference(tensor=name, position=position, left=left, right=right, klass="other")


def _result(check: str, left: str, right: str, differences: list[Difference]) -> CheckResult:
    findings = [Finding(left=left, right=right, differences=differences)] if differences else []
    return CheckResult(check=check, findings=findings)
