"""A run of some steps in one layout against the reference's training loop (R-TRAIN): losses, gradient norms and weights within R-TRAIN-9, rates exactly.
And the distributed optimizer against the plain one (R-TRAIN-10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult
from equivalence.checks.steps.models import bits, difference, near, result
from equivalence.expectations.step import TIE, reference_shape
from equivalence.trainers.production_run import TrainingCase, TrainingOutcome
from equivalence.trainers.production_step import known
from production.training.metrics.step_numbers import StepNumbers
from reference.trainer import Stepped
from reference.trainer_bounds import Trained
from reference.trainer_bounds import train as train_reference

ROUTER_TIE = "router_tie"
"""Kind of a refused comparison: a router chose by a gap within rounding at some step."""
TIES = {"float64": TIE, "float32": 2.0**-16}
"""Such a gap: in float32 the states that are scored are rounded too, layer by layer."""
UNIT = 2.0**-24


def expect_training(case: TrainingCase, shapes: Mapping[str, tuple[int, ...]]) -> Trained:
    """Run the reference's trainer on the case, from weights by name in these shapes; return the run with its bounds."""
    draw = case.model.weights()
    named = {name: draw(name, shape) for name, shape in shapes.items()}
    batches: list[Any] = [case.at(step).batch() for step in range(case.steps)]
    shape = reference_shape(case.model.shape, case.model.sizes.pipeline)
    return train_reference(shape, named, case.reference_settings(), batches, dtype=case.dtype)


def trains_alike(case: TrainingCase) -> bool:
    """Return whether every layout trains the same, so that one run of the reference serves all of them (R-LOSS-2 to
    R-LOSS-6).
    """
    model = case.model
    return model.normalization != "mean_of_means" and (not model.shape.depths or model.mtp_weights == "rows")


def check_trainer(case: TrainingCase, outcomes: Sequence[TrainingOutcome], expected: Trained) -> CheckResult:
    """Compare production's run, one outcome for each rank, with the reference's run. Refuse as `router_tie` if rounding chose an expert."""
    if expected.router_gap <= TIES[case.precision]:
        return CheckResult(check="trainer", refused=ROUTER_TIE)
    differences: list[Difference] = []
    for outcome in outcomes:
        differences += _numbers(outcome, expected)
    ours, theirs = expected.weights, whole_weights(outcomes)
    for name in sorted(ours.keys() ^ theirs.keys()):
        sides = [f"a weight {name}" if name in side else None for side in (ours, theirs)]
        differences.append(difference(f"weight {name}", None, *sides))
    for name in sorted(ours.keys() & theirs.keys()):
        differences += near_in_norm(name, ours[name], theirs[name], expected.weight_bounds[name])
    return result("trainer", "reference", "production", differences)


def check_distributed(
    case: TrainingCase,
    plain: Sequence[TrainingOutcome],
    distributed: Sequence[TrainingOutcome],
    expected: Trained | None = None,
) -> CheckResult:
    """Compare the distributed optimizer with the plain one in the same layout: R-TRAIN-10.

    The comparison is to the bit if `equal_to_the_bit` says so, else within the bounds of `expected`, which must then be given.
    """
    if equal_to_the_bit(case):
        differences = [
            *bits("losses", _reported(plain), _reported(distributed)),
            *_weights_to_the_bit(whole_weights(plain), whole_weights(distributed)),
        ]
        bounds = [8 * UNIT * _norm(each) for each in plain[0].numbers]  # the one sum of many parts, in another order
    else:
        assert expected is not None
        if expected.router_gap <= TIES[case.precision]:
            return CheckResult(check="distributed_optimizer", refused=ROUTER_TIE)
        differences, bounds = [], expected.norm_bounds
        for step, pair in enumerate(zip(_reported(plain), _reported(distributed), strict=True)):
            bounds_of = (expected.loss_bounds[step], *expected.depth_bounds[step])
            for depth, (one_loss, other_loss) in enumerate(zip(*pair, strict=True)):
                name = f"loss of step {step}" if depth == 0 else f"loss of depth {depth} of step {step}"
                differences += _near(name, float(one_loss), float(other_loss), bounds_of[depth])
        left, right = whole_weights(plain), whole_weights(distributed)
        for name in sorted(left):
            differences += near_in_norm(name, left[name], right[name], expected.weight_bounds[name])
    for one, other in zip(plain, distributed, strict=True):
        for step, bound in enumerate(bounds):
            name = f"rank {one.place.rank} gradient norm of step {step}"
            differences += _near(name, _norm(one.numbers[step]), _norm(other.numbers[step]), bound)
        left_rates, right_rates = ([each.learning_rate for each in side.numbers] for side in (one, other))
        if left_rates != right_rates:
            name = f"rank {one.place.rank} learning rates"
            differences.append(difference(name, None, str(left_rates), str(right_rates)))
    return result("distributed_optimizer", "plain", "distributed", differences)


def equal_to_the_bit(case: TrainingCase) -> bool:
    """Return whether each gradient is a sum over at most two replicas, which has one order, and no norm, which has
    many, scales it.
    """
    sizes = case.model.sizes
    replicas = [case.model.data_size * sizes.context]
    if case.model.shape.experts:
        replicas.append(case.model.world_size // (sizes.pipeline * sizes.expert * sizes.expert_tensor))
    return max(replicas) <= 2 and not case.clip_gradient


def whole_weights(outcomes: Sequence[TrainingOutcome]) -> dict[str, torch.Tensor]:
    """Assemble the whole model's weights by name from the parts of all ranks."""
    from production.model.weights import assemble  # noqa: PLC0415 - megatron-core

    parts: dict[str, list[Any]] = {}
    for part in (part for each in outcomes for part in each.weights):
        place = tuple(slice(*bounds) for bounds in part.part)
        parts.setdefault(part.name, []).append((part.shape, place, part.values))
    return assemble(parts)


def _reported(outcomes: Sequence[TrainingOutcome]) -> torch.Tensor:
    """Return the losses of each step and depth [steps, 1 + D] float64, which every rank must report."""
    numbers = outcomes[0].numbers
    return torch.tensor([[known(each.loss), *map(known, each.mtp_losses)] for each in numbers], dtype=torch.float64)


def _norm(numbers: StepNumbers) -> float:
    return float(numbers.gradient_norm or 0.0)


def _numbers(outcome: TrainingOutcome, expected: Trained) -> list[Difference]:
    where, differences = f"rank {outcome.place.rank}", []
    if len(outcome.numbers) != len(expected.steps):
        return [difference(f"{where} reported steps", None, len(expected.steps), len(outcome.numbers))]
    for step, (each, found) in enumerate(zip(expected.steps, outcome.numbers, strict=True)):
        name = f"{where} loss of step {step}"
        differences += _near(name, each.loss, known(found.loss), expected.loss_bounds[step])
        differences += _depths(where, step, each, found, expected)
        name = f"{where} gradient norm of step {step}"
        differences += _near(name, each.gradient_norm, _norm(found), expected.norm_bounds[step])
        if found.learning_rate != each.learning_rate:
            name = f"{where} learning rate of step {step}"
            differences.append(difference(name, None, each.learning_rate, found.learning_rate))
        wrong = set(outcome.weight_decays[step]) - {0.0, each.weight_decay}
        if wrong:
            name = f"{where} weight decay of step {step}"
            differences.append(difference(name, None, each.weight_decay, str(sorted(wrong))))
    return differences


def _depths(where: str, step: int, wanted: Stepped, found: StepNumbers, expected: Trained) -> list[Difference]:
    reported = [found.mtp_losses, found.mtp_token_losses, found.mtp_empty_shares]
    if any(len(each) != len(wanted.depths) for each in reported):
        numbers = [len(each) for each in reported]
        return [difference(f"{where} depths", None, len(wanted.depths), str(numbers))]
    differences = []
    for place, (depth, loss, by_tokens, empty) in enumerate(zip(wanted.depths, *reported, strict=True)):
        name = f"{where} loss of depth {place + 1} of step {step}"
        differences += _near(name, depth.loss, known(loss), expected.depth_bounds[step][place])
        bound = expected.token_depth_bounds[step][place]
        differences += _near(f"{name}, by token", depth.token_loss, known(by_tokens), bound)
        if empty != depth.empty_shares:
            name = f"{where} empty shares of depth {place + 1} of step {step}"
            differences.append(difference(name, None, depth.empty_shares, empty))
    return differences


def _near(name: str, left: float, right: float, bound: float) -> list[Difference]:
    return near(name, torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64), bound)


def near_in_norm(name: str, left: torch.Tensor, right: torch.Tensor, bound: float) -> list[Difference]:
    """Compare two tensors within `bound` in norm."""
    if left.shape != right.shape or left.dtype != right.dtype:
        sides = [f"{side.dtype} {tuple(side.shape)}" for side in (left, right)]
        return [difference(f"weight {name}", None, *sides)]
    off = (left.double() - right.double()).nan_to_num(nan=torch.inf)
    if float(off.norm()) <= bound:
        return []
    place = tuple(int(i) for i in torch.unravel_index(off.abs().argmax(), left.shape))
    said = f"{float(right[place])!r}, {float(off.norm()):.3g} away in norm, {bound:.3g} allowed"
    return [difference(f"weight {name}", place, float(left[place]), said)]


def _weights_to_the_bit(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> list[Difference]:
    if left.keys() != right.keys():
        return [difference("names of weights", None, *(str(sorted(side)) for side in (left, right)))]
    return [found for name in sorted(left) for found in bits(f"weight {name}", left[name], right[name])]
