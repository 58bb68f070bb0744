"""How far another correct side may be from the reference's trainer after some steps, taken from what rounding does to the trainer itself (SPEC section 21).
Costs one run without rounding and three noisy ones beside the run that is compared, and holds for that very run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.batches import Batch
from reference.model import EXACT, FLOAT32, Model, Rounding, Shape
from reference.model_bounds import NOISY_RUNS, UNIT
from reference.trainer import Settings, Stepped, Trainer


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
    norm_bounds: list[float]
    """For each step, of the gradient's norm."""
    weight_bounds: dict[str, float]
    """For each weight, of the norm of the difference."""
    router_gap: float
    """The least of all runs (R-MODEL-6)."""


def train(
    shape: Shape,
    named: Mapping[str, Tensor],
    settings: Settings,
    batches: Sequence[Batch],
    *,
    dtype: torch.dtype = torch.float64,
) -> Trained:
    """Train in `dtype`, float64 or float32, on one global batch a step, with the bounds of R-TRAIN-9.

    Raises ValueError for another dtype.
    """
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"bounds are taken between float32 and float64, not in {dtype}")
    start = {name: tensor.to(dtype) for name, tensor in named.items()}

    def run(rounding: Rounding, weights: Mapping[str, Tensor]) -> tuple[list[Stepped], dict[str, Tensor]]:
        trainer = Trainer(Model.from_tensors(shape, weights, rounding=rounding), settings)
        steps = trainer.train(batches)
        return steps, trainer.weights()

    exact_steps, exact = run(EXACT, {name: tensor.double() for name, tensor in start.items()})
    steps, weights = run(FLOAT32, start)
    runs = [(steps, weights)]
    for seed in range(NOISY_RUNS):
        noise = torch.Generator().manual_seed(seed)
        moved = start if dtype == torch.float64 else {name: _moved(each, noise) for name, each in start.items()}
        runs.append(run(Rounding(float32=True, noise=noise), moved))
    change = {name: float((weights[name] - start[name]).double().norm()) for name in weights}
    trained = max(float(batch.token_mask.sum()) for batch in batches)
    return Trained(
        steps=steps,
        weights=weights,
        moved=change,
        loss_bounds=[
            3 * max(abs(other[place].loss - each.loss) for other, _ in runs) + (3 + trained) * UNIT * each.loss
            for place, each in enumerate(exact_steps)
        ],
        norm_bounds=[
            3 * max(abs(other[place].gradient_norm - each.gradient_norm) for other, _ in runs)
            + 7 * UNIT * each.gradient_norm
            for place, each in enumerate(exact_steps)
        ],
        weight_bounds={
            name: 3 * max(float((other[name].double() - each).norm()) for _, other in runs)
            + 3 * UNIT * change[name]
            + len(steps) * 2.0**-50 * float(each.norm())
            for name, each in exact.items()
        },
        router_gap=min(step.router_gap for taken, _ in [(exact_steps, exact), *runs] for step in taken),
    )


def _moved(tensor: Tensor, noise: torch.Generator) -> Tensor:
    """Each number moved by one unit in its last float32 place, up or down: where all is float32, every sum then rounds otherwise."""
    signs = torch.randint(0, 2, tensor.shape, generator=noise) * 2 - 1
    return tensor * (1 + signs.to(tensor.dtype) * 2.0**-23)
