"""A plain training loop on one process: gradient of a global batch, clipping, AdamW, schedule, as megatron-core takes a step in any layout (docs/SPEC.md#training-step).
Row after row through the small transformer, so for models of some thousand weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.batches import Batch, rows_of_rank
from reference.context_parallel import owned_positions
from reference.loss import (
    empty_shares,
    multi_token_losses,
    multi_token_weights,
    online_weights,
    token_losses_of_depths,
    token_weights,
    training_loss,
)
from reference.model import Model
from reference.multi_token import shift
from reference.trainer_schedule import Schedule

__all__ = ["AdamW", "Objective", "Schedule", "Settings", "Stepped", "Trainer", "clip", "decays", "global_norm"]

GlobalBatch = Batch | Sequence[Batch]
"""Rows of one length together, or a batch for each length (the bins of the online path), in order."""
CLIP_EPSILON = 1e-6
"""Term that clipping adds to the norm."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training run. Raises ValueError for dp or cp below 1."""

    schedule: Schedule
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    clip_gradient: float = 0.0
    """The largest norm of the whole gradient; 0: it is not clipped."""
    normalization: str = "per_token"
    """Divisor of token losses, one of loss.NORMALIZATIONS."""
    mtp_weights: str = "rank"
    """Tokens by which a depth is weighted: those of the `rank`, or of the `rows` (R-LOSS-6)."""
    mtp_scaling_factor: float = 0.1
    data_parallel_size: int = 1
    """dp of the layout that is mirrored: some normalizations divide by each rank's own tokens."""
    context_parallel_size: int = 1
    """cp of the layout that is mirrored."""
    is_online: bool = False
    """Whether the rows are squeezed bins, whose tokens are divided by the count and 1e-8 (R-LOSS-5); needs `global_valid_tokens`."""

    def __post_init__(self) -> None:
        """Refuse sizes below 1, and the online path with another normalization."""
        if min(self.data_parallel_size, self.context_parallel_size) < 1:
            raise ValueError(
                f"dp and cp must be at least 1, got dp {self.data_parallel_size}, cp {self.context_parallel_size}"
            )
        if self.is_online and self.normalization != "global_valid_tokens":
            raise ValueError(f"normalization must be global_valid_tokens on the online path, got {self.normalization}")


@dataclass(frozen=True, kw_only=True)
class DepthReport:
    """The reports of one depth of multi-token prediction in a step. R-LOSS-10."""

    loss: float
    """Megatron-LM's number, a mean of means over the shares."""
    token_loss: float
    """All targets' losses over their number; 0 without targets."""
    empty_shares: float
    """Fraction of the shares that have no target."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """Result of a global batch: the objective whose gradient is taken, and the reports."""

    value: Tensor
    """The scalar whose gradient is the step's."""
    reported: float
    """The step's loss: all trained tokens' losses over their number (R-LOSS-7)."""
    depths: tuple[DepthReport, ...]
    """Reports of each depth of multi-token prediction (R-LOSS-10)."""
    balancing_loss: float
    """Of the routers, without its coefficient, a mean over rows and layers with experts; 0 without such a loss."""
    router_gap: float
    """The least over all rows (R-MODEL-6)."""


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """The numbers of one step."""

    loss: float
    """Before the update."""
    depths: tuple[DepthReport, ...]
    """Reports of each depth."""
    balancing_loss: float
    """Reported load-balancing losses of the routers, without the coefficient."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    weight_decay: float
    router_gap: float

    @property
    def mtp_losses(self) -> tuple[float, ...]:
        """Return Megatron-LM's number for each depth."""
        return tuple(depth.loss for depth in self.depths)


@dataclass(kw_only=True)
class AdamW:
    """One weight's moments, which begin at 0."""

    first: Tensor
    second: Tensor
    updates: int = 0

    def update(
        self, weight: Tensor, gradient: Tensor, *, learning_rate: float, weight_decay: float, settings: Settings
    ) -> Tensor:
        """Return the weight after one more update. R-TRAIN-5."""
        self.updates += 1
        weight = weight * (1 - learning_rate * weight_decay)  # decoupled: the moments do not see it
        self.first = self.first + (1 - settings.beta1) * (gradient - self.first)
        self.second = settings.beta2 * self.second + (1 - settings.beta2) * gradient.square()
        first_bias = 1 - math.pow(settings.beta1, self.updates)
        second_bias = 1 - math.pow(settings.beta2, self.updates)
        scale = self.second.sqrt() / math.sqrt(second_bias) + settings.epsilon
        return weight - learning_rate / first_bias * self.first / scale


class Trainer:
    """A model and its optimizer. R-TRAIN-1 to R-TRAIN-7."""

    def __init__(self, model: Model, settings: Settings) -> None:
        """Train `model` in place. Raises ValueError for a load-balancing loss under `mean_of_means`, of which no rule speaks."""
        if model.shape.moe_aux_loss_coeff and settings.normalization == "mean_of_means":
            raise ValueError("moe_aux_loss_coeff must be 0 with mean_of_means; set it to 0")
        self.model, self.settings = model, settings
        self.steps = 0
        """Taken so far."""
        self._moments = {
            name: AdamW(first=torch.zeros_like(weight), second=torch.zeros_like(weight))
            for name, weight in model.weights.named.items()
            if weight.requires_grad
        }

    def weights(self) -> dict[str, Tensor]:
        """Copies of all that is trained, by name."""
        return {name: self.model.weights.named[name].detach().clone() for name in self._moments}

    def step(self, batch: GlobalBatch) -> Stepped:
        """Train on one global batch, its rows in order. R-TRAIN-7."""
        settings, schedule = self.settings, self.settings.schedule
        learning_rate = schedule.learning_rate_at(self.steps)
        weight_decay = schedule.weight_decay_at(self.steps)
        objective = global_objective(self.model, batch, settings)
        gradients = self.model.gradients(objective.value)
        norm = global_norm(gradients)
        if settings.clip_gradient > 0:
            gradients = clip(gradients, norm, settings.clip_gradient)
        with torch.no_grad():
            for name, moments in self._moments.items():
                weight = self.model.weights.named[name]
                after = moments.update(
                    weight,
                    gradients[name],
                    learning_rate=learning_rate,
                    weight_decay=weight_decay if decays(name, weight) else 0.0,
                    settings=settings,
                )
                weight.copy_(after)
        self.steps += 1
        return Stepped(
            loss=objective.reported,
            depths=objective.depths,
            balancing_loss=objective.balancing_loss,
            gradient_norm=norm,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            router_gap=objective.router_gap,
        )

    def train(self, batches: Iterable[GlobalBatch]) -> list[Stepped]:
        """Take one step for each global batch."""
        return [self.step(batch) for batch in batches]

    def validate(self, batches: Sequence[GlobalBatch]) -> float:
        """Return the loss of a validation over some global batches: all trained tokens' losses over their number (R-LOSS-7)."""
        rows = [row for batch in batches for row in rows_of(batch)]
        with torch.no_grad():
            losses = [self.model.losses(row.input_ids, row.target_ids, row.boundaries).tokens[0] for row in rows]
        return float(training_loss([losses], [[row.mask for row in rows]]))


def decays(name: str, weight: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: not to biases, and not to parameters of one dimension, such as a norm's weight. R-TRAIN-4."""
    return weight.ndim != 1 and not name.endswith(".bias")


def global_norm(gradients: Mapping[str, Tensor]) -> float:
    """Return the norm over all gradients, a tied gradient once, added in float64. R-TRAIN-6."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def clip(gradients: Mapping[str, Tensor], norm: float, most: float) -> dict[str, Tensor]:
    """Scale all gradients down by one factor if their norm exceeds `most`. R-TRAIN-6."""
    factor = most / (norm + CLIP_EPSILON)
    return {name: gradient * factor if factor < 1.0 else gradient for name, gradient in gradients.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedRow:
    """A row as a step reads it."""

    input_ids: Tensor
    """[P]."""
    target_ids: Tensor
    """[P]."""
    mask: Tensor
    """[P] float32: the token mask times the row's weight."""
    boundaries: list[int]
    """From 0 to P."""


def rows_of(batch: GlobalBatch) -> list[TrainedRow]:
    """Return the rows of a global batch, in order."""
    return [
        TrainedRow(
            input_ids=part.input_ids[row],
            target_ids=part.target_ids[row],
            mask=part.token_mask[row] * part.sample_mask[row],
            boundaries=part.packed_cu_seqlens[row, :entries].tolist(),
        )
        for part in (batch if isinstance(batch, Sequence) else [batch])
        for row, entries in enumerate(part.packed_cu_seqlens_lengths.tolist())
    ]


def global_objective(model: Model, batch: GlobalBatch, settings: Settings) -> Objective:
    """Return the objective of a step: token losses of all rows and depths, each times its weight, and the balancing losses. R-TRAIN-8."""
    rows, depths = rows_of(batch), model.shape.mtp_num_layers
    masks = [[shift(row.mask, row.boundaries, depth) for depth in range(depths + 1)] for row in rows]
    shares = _Shares(settings, [row.boundaries for row in rows], masks)
    valid = torch.tensor(sum(float(row.mask.sum()) for row in rows))
    weights = shares.weights(valid)
    value, losses, gap = torch.zeros((), dtype=torch.float64), [], float("inf")
    balancing = 0.0
    for row, given in enumerate(rows):
        found = model.losses(given.input_ids, given.target_ids, given.boundaries)
        gap = min(gap, found.router_gap)
        losses.append([of_tokens.detach() for of_tokens in found.tokens])
        for depth, of_tokens in enumerate(found.tokens):
            for owned, weight in zip(shares.owned[row], weights[row], strict=True):
                value = value + (of_tokens[owned].double() * weight[depth]).sum()
        for balance in found.auxiliary:  # R-MODEL-7: times the row's tokens, and divided as a token's loss is
            value = value + balance.double() * len(given.input_ids) / torch.clamp(valid, min=1)
            balancing += float(balance.detach()) / model.shape.moe_aux_loss_coeff / len(found.auxiliary) / len(rows)
    reported = training_loss([[each[0] for each in losses]], [[of_depths[0] for of_depths in masks]])
    return Objective(
        value=value,
        reported=float(reported),
        depths=shares.reported(losses),
        balancing_loss=balancing,
        router_gap=gap,
    )


@dataclass(eq=False)
class _Shares:
    """Masks as the ranks of dp x cp hold them, and what each token weighs."""

    settings: Settings
    boundaries: list[list[int]]
    masks: list[list[Tensor]]
    """[row][depth] is [P]."""
    owned: list[list[list[int]]] = field(init=False)
    """[row][cp rank] are the positions that it owns."""

    def __post_init__(self) -> None:
        context = self.settings.context_parallel_size
        self.owned = [[owned_positions(each, rank, context) for rank in range(context)] for each in self.boundaries]

    @property
    def ranks(self) -> list[tuple[list[int], int]]:
        """Return the rows and the cp rank of each rank of dp x cp, cp fastest."""
        data, context = self.settings.data_parallel_size, self.settings.context_parallel_size
        dealt = [rows_of_rank(range(len(self.masks)), rank, data) for rank in range(data)]
        return list(itertools.product(dealt, range(context)))

    def held(self, whole: list[list[Tensor]]) -> list[list[list[Tensor]]]:
        """Return each rank's share of [row][depth] [P], as [rank][microbatch][depth]."""
        return [[[each[self.owned[row][cp]] for each in whole[row]] for row in rows] for rows, cp in self.ranks]

    def reported(self, losses: list[list[Tensor]]) -> tuple[DepthReport, ...]:
        """Return the reports of each depth, from token losses [row][depth] [P]; with weights by rows each row is one share. R-LOSS-10."""
        if self.settings.mtp_weights == "rows":
            of_ranks = [rows for rows, cp in self.ranks if cp == 0]
            held, masks = ([[whole[row] for row in rows] for rows in of_ranks] for whole in (losses, self.masks))
        else:
            held, masks = self.held(losses), self.held(self.masks)
        depths = range(1, len(self.masks[0]))
        if not depths:
            return ()
        shares = [[[[each[depth] for each in rank] for rank in side] for depth in depths] for side in (held, masks)]
        reports = zip(
            multi_token_losses(*shares).tolist(),
            token_losses_of_depths(*shares).tolist(),
            empty_shares(shares[1]),
            strict=True,
        )
        return tuple(DepthReport(loss=loss, token_loss=token, empty_shares=empty) for loss, token, empty in reports)

    def weights(self, valid: Tensor) -> list[list[list[Tensor]]]:
        """Return weights of the tokens of [row][cp rank][depth], [n] float64. R-LOSS-2 to R-LOSS-6."""
        settings, context = self.settings, self.settings.context_parallel_size
        held, ranks = self.held(self.masks), self.ranks
        of_tokens = [[of_depths[0] for of_depths in rank] for rank in held]
        main = (
            online_weights(of_tokens, valid)
            if settings.is_online
            else token_weights(settings.normalization, of_tokens, context_parallel_size=context, valid_tokens=valid)
        )
        deeper = [[[] for _ in rank] for rank in held] if len(self.masks[0]) == 1 else self._deeper(held, valid)
        found: list[list[list[Tensor]]] = [[[] for _ in range(context)] for _ in self.masks]
        for number, (rows, cp) in enumerate(ranks):
            for microbatch, row in enumerate(rows):
                found[row][cp] = [main[number][microbatch], *deeper[number][microbatch]]
        return found

    def _deeper(self, held: list[list[list[Tensor]]], valid: Tensor) -> list[list[list[Tensor]]]:
        settings = self.settings
        return multi_token_weights(
            settings.normalization,
            held,
            scaling_factor=settings.mtp_scaling_factor,
            context_parallel_size=settings.context_parallel_size,
            rows=settings.mtp_weights == "rows",
            valid_tokens=valid if settings.normalization == "global_valid_tokens" else None,
        )
