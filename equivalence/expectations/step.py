"""Compute the reference's training step in one layout: token losses of every rank, reports, gradients, and the bounds of R-MODEL-11."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from equivalence.cases.step import ModelCase, ModelShape
from reference import batches as reference_batches
from reference import loss as reference_loss
from reference import multi_token
from reference.context_parallel import owned_positions
from reference.model import Model, Shape
from reference.model_bounds import bounds

MTP_SCALING_FACTOR = 0.1
"""megatron-core's default `mtp_loss_scaling_factor`."""
TIE = 2.0**-20
"""A gap between router scores, which are at most 1 and rounded to float32 in a few steps, that rounding may close."""

Shapes = Mapping[str, tuple[int, ...]]
"""Of the whole model's parameters, by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """Reference's results of a case for every rank, with the bounds of R-MODEL-11."""

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

    @property
    def is_tie(self) -> bool:
        """Return whether a router's gap is within rounding."""
        return self.router_gap <= TIE


def expect(case: ModelCase, shapes: Shapes) -> Expected:
    """Run the reference's step: the whole model on one process, row by row; return each rank's part of the results."""
    step = Step(case)
    named = step.named(shapes)
    limits = bounds(step.shape, named, step.run)
    tokens = limits.found_tokens
    depths = case.shape.depths
    per_row = list(itertools.batched(tokens, depths + 1))
    token_losses = [
        [[per_row[row][depth][step.owned[row][cp]] for depth in range(depths + 1)] for row in step.rows_of[dp]]
        for dp, cp in step.ranks
    ]
    first = step.of_depth(0)
    if case.mtp_weights == "rows":  # then each row's own counts are reported too, as if one rank had it
        losses_of = [[[per_row[row][k] for row in rows] for rows in step.rows_of] for k in range(1, depths + 1)]
        masks_of = [[[step.masks[row][k] for row in rows] for rows in step.rows_of] for k in range(1, depths + 1)]
    else:
        losses_of = [[[each[k] for each in rank] for rank in token_losses] for k in range(1, depths + 1)]
        masks_of = [step.of_depth(k) for k in range(1, depths + 1)]
    return Expected(
        token_losses=token_losses,
        reported=float(reference_loss.training_loss([[each[0] for each in rank] for rank in token_losses], first)),
        mtp_reported=reference_loss.multi_token_losses(losses_of, masks_of) if depths else torch.zeros(0),
        valid_tokens=float(step.valid),
        gradients=limits.found_gradients,
        token_bound=max(limits.tokens),
        gradient_bounds=limits.gradients,
        gradient_norm_bound=limits.gradient_norm,
        router_gap=min(step.gaps),
    )


class Step:
    """A case as the reference reads it: masks and weights of every rank's tokens, and how a model is run over the rows."""

    def __init__(self, case: ModelCase) -> None:
        count, data_size, context = len(case.rows), case.data_size, case.sizes.context
        self.case, self.batch, self.boundaries = case, case.batch(), case.boundaries
        self.shape = reference_shape(case.shape, case.sizes.pipeline)
        self.rows_of = [reference_batches.rows_of_rank(range(count), rank, data_size) for rank in range(data_size)]
        self.ranks = list(itertools.product(range(data_size), range(context)))
        """(dp, cp), cp fastest."""
        self.owned = [[owned_positions(cu, rank, context) for rank in range(context)] for cu in self.boundaries]
        self.masks = [self._depth_masks(row) for row in range(count)]
        """[row][depth]."""
        self.shares = [
            [[mask[self.owned[row][cp]] for mask in self.masks[row]] for row in self.rows_of[dp]]
            for dp, cp in self.ranks
        ]
        """[rank][microbatch][depth]: this rank's share of the masks."""
        self.valid = torch.tensor(reference_batches.valid_tokens(self.batch.token_mask, self.batch.sample_mask))
        self.weights = self._weights()
        """Weight of each token's loss in the gradient, [rank][microbatch][depth]."""
        self.gaps: list[float] = []

    def of_depth(self, depth: int) -> list[list[torch.Tensor]]:
        """Return the masks of one depth, [rank][microbatch]."""
        return [[microbatch[depth] for microbatch in rank] for rank in self.shares]

    @functools.cached_property
    def whole_weights(self) -> list[torch.Tensor]:
        """Return the weight of each position of each row as [row] of [D + 1, P], equal in all layouts that train the same."""
        whole = [torch.zeros(len(masks), len(masks[0]), dtype=torch.float64) for masks in self.masks]
        for (dp, cp), of_rank in zip(self.ranks, self.weights, strict=True):
            for row, of_row in zip(self.rows_of[dp], of_rank, strict=True):
                whole[row][:, self.owned[row][cp]] = torch.stack([each.double() for each in of_row])
        return whole

    def named(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Return the whole model's weights."""
        draw = self.case.weights()
        return {name: draw(name, shape) for name, shape in shapes.items()}

    def run(self, model: Model) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return token losses row by row and depth by depth, and the scalar whose gradient is the step's gradient."""
        tokens, objective = [], torch.zeros((), dtype=torch.float64)
        for row, boundaries in enumerate(self.boundaries):
            losses = model.losses(self.batch.input_ids[row], self.batch.target_ids[row], boundaries)
            self.gaps.append(losses.router_gap)
            tokens += losses.tokens
            objective = objective + (torch.stack(losses.tokens).double() * self.whole_weights[row]).sum()
        return tokens, objective

    def _depth_masks(self, row: int) -> list[torch.Tensor]:
        mask = self.batch.token_mask[row]
        depths = range(1, self.case.shape.depths + 1)
        return [mask, *(multi_token.shift(mask, self.boundaries[row], depth) for depth in depths)]

    def _weights(self) -> list[list[list[torch.Tensor]]]:
        case, context = self.case, self.case.sizes.context
        main = reference_loss.token_weights(
            case.normalization, self.of_depth(0), context_parallel_size=context, valid_tokens=self.valid
        )
        if not case.shape.depths:
            return [[[each] for each in rank] for rank in main]
        deeper = reference_loss.multi_token_weights(
            case.normalization,
            self.shares,
            scaling_factor=MTP_SCALING_FACTOR,
            context_parallel_size=context,
            rows=case.mtp_weights == "rows",
            valid_tokens=self.valid if case.normalization == "global_valid_tokens" else None,
        )
        return [
            [[each, *depths] for each, depths in zip(rank, further, strict=True)]
            for rank, further in zip(main, deeper, strict=True)
        ]


def reference_shape(shape: ModelShape, pipeline_size: int) -> Shape:
    """Return the reference's description of the same model."""
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
