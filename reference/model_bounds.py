"""Bound the distance of another correct side from the reference's model, by the effect of rounding on the reference itself (docs/SPEC.md#model).
Computing the bounds costs one run without rounding and three noisy runs. They hold only for the row and the weights that were run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.model import EXACT, FLOAT32, Model, Rounding, Shape

UNIT = 2.0**-24
"""Largest relative change of a number that is rounded to float32."""
NOISY_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The largest differences that rounding explains. R-MODEL-11."""

    tokens: list[float]
    """For each tensor of token losses, of any token in it."""
    gradients: dict[str, float]
    """For each parameter, of the norm of the difference."""
    gradient_norm: float
    """Of the norm over all parameters."""
    found_tokens: list[Tensor]
    """Results of the reference with megatron-core's roundings: the token losses that `tokens` bounds."""
    found_gradients: dict[str, Tensor]
    """The same of the gradients."""


def bounds(
    shape: Shape, named: Mapping[str, Tensor], run: Callable[[Model], tuple[Sequence[Tensor], Tensor]]
) -> Bounds:
    """Return bounds for the results of `run` on a model: tensors of token losses, and the scalar whose gradient is compared. R-MODEL-11.

    Raises ValueError for weights that are not float64.
    """
    if any(tensor.dtype != torch.float64 for name, tensor in named.items() if not name.endswith(".expert_bias")):
        raise ValueError("the weights must be float64, from which bounds are taken; cast them")
    exact_tokens, exact = _result(Model.from_tensors(shape, named, rounding=EXACT), run)
    models = [Model.from_tensors(shape, named, rounding=FLOAT32)]
    for seed in range(NOISY_RUNS):
        noise = torch.Generator().manual_seed(seed)
        models.append(Model.from_tensors(shape, named, rounding=Rounding(float32=True, noise=noise)))
    rounded = [_result(model, run) for model in models]
    whole = sum(float(gradient.square().sum()) for gradient in exact.values()) ** 0.5
    tokens = [
        3 * max(float((tokens[place].double() - losses.double()).abs().max()) for tokens, _ in rounded)
        + 3 * UNIT * float(losses.abs().max())
        for place, losses in enumerate(exact_tokens)
    ]
    gradients = {
        name: 3 * max(float((found[name] - gradient).norm()) for _, found in rounded)
        + 3 * UNIT * float(gradient.norm())
        + 2.0**-50 * whole  # what float64 itself rounds, where contributions cancel
        for name, gradient in exact.items()
    }
    found_tokens, found_gradients = rounded[0]
    return Bounds(
        tokens=tokens,
        gradients=gradients,
        gradient_norm=sum(each**2 for each in gradients.values()) ** 0.5,
        found_tokens=found_tokens,
        found_gradients=found_gradients,
    )


def _result(
    model: Model, run: Callable[[Model], tuple[Sequence[Tensor], Tensor]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    tokens, loss = run(model)
    return [each.detach() for each in tokens], model.gradients(loss)
