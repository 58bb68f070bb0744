"""Bound the distance of another correct trainer after some steps, by the effect of rounding on the reference's trainer (docs/SPEC.md#training-step).
Computing the bounds costs one run without rounding and three noisy runs. They hold only for the run that was bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.model import EXACT, FLOAT32, Model, Rounding, Shape
from reference.model_bounds import NOISY_RUNS, UNIT
from reference.trainer import GlobalBatch, Settings, Stepped, Trainer, rows_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A run of the reference, and how far another side may be from it. R-TRAIN-9."""

    steps: list[Stepped]
    weights: dict[str, Tensor]
    """After the last step, by name."""
    moved: dict[str, float]
    """The norm of what each weight has changed by."""
    loss_bounds: list[float]
    """For each step, of the reported loss."""
    depth_bounds: list[tuple[float, ...]]
    """For each step, of what is reported of each depth."""
    token_depth_bounds: list[tuple[float, ...]]
    """For each step, of each depth's loss by token."""
    balancing_bounds: list[float]
    """For each step, of the routers' balancing loss."""
    norm_bounds: list[float]
    """For each step, of the gradient's norm."""
    weight_bounds: dict[str, float]
    """For each weight, of the norm of the difference."""
    router_gap: float
    """The least of all runs (R-MODEL-6)."""
    validations: dict[int, float]
    """By the number of steps taken before, the losses of validations."""
    validation_bounds: dict[int, float]
    """Of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """Results of one run."""

    steps: list[Stepped]
    validations: dict[int, float]
    weights: dict[str, Tensor]


def train(
    shape: Shape,
    named: Mapping[str, Tensor],
    settings: Settings,
    batches: Sequence[GlobalBatch],
    *,
    dtype: torch.dtype = torch.float64,
    validations: Mapping[int, Sequence[GlobalBatch]] | None = None,
) -> Trained:
    """Train in `dtype`, float64 or float32, on one global batch a step, with the bounds of R-TRAIN-9.

    `validations` gives the global batches of the validation after each number of steps. Raises ValueError for another dtype.
    """
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype must be float32 or float64, between which bounds are taken, got {dtype}")
    start = {name: tensor.to(dtype) for name, tensor in named.items()}

    def run(rounding: Rounding, weights: Mapping[str, Tensor]) -> _Run:
        trainer = Trainer(Model.from_tensors(shape, weights, rounding=rounding), settings)
        steps, found = [], {}
        for number in range(len(batches) + 1):
            if validations and number in validations:
                found[number] = trainer.validate(validations[number])
            if number < len(batches):
                steps.append(trainer.step(batches[number]))
        return _Run(steps=steps, validations=found, weights=trainer.weights())

    exact = run(EXACT, {name: tensor.double() for name, tensor in start.items()})
    rounded = run(FLOAT32, start)
    runs = [rounded]
    for seed in range(NOISY_RUNS):
        noise = torch.Generator().manual_seed(seed)
        moved = start if dtype == torch.float64 else {name: _moved(each, noise) for name, each in start.items()}
        runs.append(run(Rounding(float32=True, noise=noise), moved))
    return _bounded(
        start, exact, runs, trained=max(_trained(batch) for batch in batches), validations=validations or {}
    )


def _bounded(
    start: Mapping[str, Tensor],
    exact: _Run,
    runs: Sequence[_Run],
    *,
    trained: float,
    validations: Mapping[int, Sequence[GlobalBatch]],
) -> Trained:
    """Return the first of `runs` with the bounds that all runs give; `trained` is the largest number of tokens that a step adds."""
    rounded = runs[0]
    change = {name: float((each - start[name]).double().norm()) for name, each in rounded.weights.items()}

    def of_loss(found: float, others: Sequence[float], tokens: float) -> float:
        return 3 * max(abs(other - found) for other in others) + (3 + tokens) * UNIT * found

    return Trained(
        steps=rounded.steps,
        weights=rounded.weights,
        moved=change,
        loss_bounds=[
            of_loss(each.loss, [other.steps[place].loss for other in runs], trained)
            for place, each in enumerate(exact.steps)
        ],
        depth_bounds=[
            tuple(
                of_loss(loss, [other.steps[place].mtp_losses[depth] for other in runs], trained)
                for depth, loss in enumerate(each.mtp_losses)
            )
            for place, each in enumerate(exact.steps)
        ],
        token_depth_bounds=[
            tuple(
                of_loss(depth.token_loss, [other.steps[place].depths[number].token_loss for other in runs], trained)
                for number, depth in enumerate(each.depths)
            )
            for place, each in enumerate(exact.steps)
        ],
        balancing_bounds=[
            of_loss(each.balancing_loss, [other.steps[place].balancing_loss for other in runs], trained)
            for place, each in enumerate(exact.steps)
        ],
        norm_bounds=[
            3 * max(abs(other.steps[place].gradient_norm - each.gradient_norm) for other in runs)
            + 7 * UNIT * each.gradient_norm
            for place, each in enumerate(exact.steps)
        ],
        weight_bounds={
            name: 3 * max(float((other.weights[name].double() - each).norm()) for other in runs)
            + 3 * UNIT * change[name]
            + len(exact.steps) * 2.0**-50 * float(each.norm())
            for name, each in exact.weights.items()
        },
        router_gap=min(step.router_gap for each in (exact, *runs) for step in each.steps),
        validations=rounded.validations,
        validation_bounds={
            number: of_loss(
                loss, [other.validations[number] for other in runs], sum(map(_trained, validations[number]))
            )
            for number, loss in exact.validations.items()
        },
    )


def _trained(batch: GlobalBatch) -> float:
    return sum(float(row.mask.sum()) for row in rows_of(batch))


def _moved(tensor: Tensor, noise: torch.Generator) -> Tensor:
    """Move each number up or down by one unit in its last float32 place, so that in float32 every sum rounds differently."""
    signs = torch.randint(0, 2, tensor.shape, generator=noise) * 2 - 1
    return tensor * (1 + signs.to(tensor.dtype) * 2.0**-23)
