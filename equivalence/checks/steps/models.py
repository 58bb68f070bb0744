"""Check a training step on a real model in one layout: token losses, reports and every parameter's gradient against the reference (R-MODEL, R-LOSS).

Models run in float64. Where megatron-core rounds to float32 the reference rounds too, and R-MODEL-11 bounds the difference.
Megatron-LM's own data path runs the same model and is compared to the bit (`compare_outcomes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.expectations.step import Expected, expect, reference_shape
from equivalence.trainers.production_step import COUNTED, GUESSED, MEASURED, ModelCase, RankOutcome, gradients

__all__ = ["check_model", "compare_outcomes", "expect", "reference_shape"]

ROUTER_TIE = "router_tie"
"""Kind of a refused comparison: the reference's router chose by a gap within rounding."""


def check_model(case: ModelCase, outcomes: Sequence[RankOutcome], *, expected: Expected | None = None) -> CheckResult:
    """Compare production's outcomes, one for each rank of the world, with the reference.

    The case is refused as `router_tie` if the reference's router chose by a gap within rounding (R-MODEL-6), because nothing can be compared then.
    """
    found = gradients(outcomes)
    expected = expected or expect(case, shapes_of(found))
    if expected.is_tie:
        return CheckResult(check="models", refused=ROUTER_TIE)
    differences = [
        *_token_losses(expected, outcomes),
        *_reports(expected, outcomes),
        *_shared(expected, outcomes),
        *_gradients(expected, found, outcomes),
    ]
    return result("models", "reference", "production", differences)


def compare_outcomes(
    check: str, left: str, lefts: Sequence[RankOutcome], right: str, rights: Sequence[RankOutcome]
) -> CheckResult:
    """Compare two paths through the same model in the same layout, rank by rank, to the bit."""
    differences: list[Difference] = []
    for one, other in zip(lefts, rights, strict=True):
        where = f"rank {one.place.rank}"
        for name, here, there in paired(f"{where} microbatch", one.token_losses, other.token_losses, differences):
            for depth, a, b in paired(f"{name} depth", here, there, differences):
                differences += bits(f"{depth} token losses", a, b)
        for name, x, y in paired(f"{where} microbatch", one.reports, other.reports, differences):
            differences += bits(f"{name} reported", x, y)
        differences += _reported_alike(where, one, other)
        sides = [{(part.name, part.part): part.values for part in side.gradients} for side in (one, other)]
        for name, part in sorted(sides[0].keys() ^ sides[1].keys()):
            has = [f"has {part}" if (name, part) in side else None for side in sides]
            differences.append(difference(f"{where} gradient of {name}", None, *has))
        for key in sides[0].keys() & sides[1].keys():
            differences += bits(f"{where} gradient of {key[0]}", sides[0][key], sides[1][key])
        if one.gradient_norm != other.gradient_norm:
            differences.append(difference(f"{where} gradient norm", None, one.gradient_norm, other.gradient_norm))
    return result(check, left, right, differences)


def shapes_of(found: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name."""
    return {name: tuple(each.shape) for name, each in found.items()}


def paired[Value](
    name: str, left: Sequence[Value], right: Sequence[Value], differences: list[Difference]
) -> Iterator[tuple[str, Value, Value]]:
    """Yield both sides' values with a name for each pair; different lengths are a difference."""
    if len(left) != len(right):
        differences.append(difference(f"{name}: how many", None, len(left), len(right)))
    for number, (a, b) in enumerate(zip(left, right, strict=False)):
        yield f"{name} {number}", a, b


def compare_gradients(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], limits: Mapping[str, float]
) -> list[Difference]:
    """Compare gradients by name, each within its bound in norm."""
    differences = []
    for name in sorted(ours.keys() ^ theirs.keys()):
        sides = [f"a gradient of {name}" if name in side else None for side in (ours, theirs)]
        differences.append(difference(f"gradient of {name}", None, *sides))
    for name in ours.keys() & theirs.keys():
        left, right = ours[name], theirs[name]
        if left.shape != right.shape:
            differences.append(difference(f"gradient of {name}", None, tuple(left.shape), tuple(right.shape)))
            continue
        off = float((left - right).norm())
        if not off <= limits[name]:
            worst = (left - right).abs().nan_to_num(nan=torch.inf).argmax()
            place = tuple(int(i) for i in torch.unravel_index(worst, left.shape))
            said = f"{float(right[place])!r}, {off:.3g} away in norm, {limits[name]:.3g} allowed"
            differences.append(difference(f"gradient of {name}", place, float(left[place]), said))
    return differences


def _token_losses(expected: Expected, outcomes: Sequence[RankOutcome]) -> list[Difference]:
    differences: list[Difference] = []
    for each in outcomes:
        if not each.place.is_last_stage:
            continue
        rank = each.place.data_rank * each.place.context_size + each.place.context_rank
        where = f"rank {each.place.rank} microbatch"
        for name, ours, theirs in paired(where, expected.token_losses[rank], each.token_losses, differences):
            for depth, a, b in paired(f"{name} depth", ours, theirs, differences):
                differences += near(f"{depth} token losses", a, b, expected.token_bound)
    return differences


def _reports(expected: Expected, outcomes: Sequence[RankOutcome]) -> list[Difference]:
    # A mean of token losses is no further off than the worst of them, and float32 sums of n terms round n times.
    bound = expected.token_bound + expected.valid_tokens * 2.0**-24 * max(expected.reported, 1.0)
    differences: list[Difference] = []
    for each in outcomes:
        if each.reported is not None:
            left, right = (torch.tensor(side, dtype=torch.float64) for side in (expected.reported, each.reported))
            differences += near(f"rank {each.place.rank} reported loss", left, right, bound)
        if each.valid_tokens != expected.valid_tokens:
            name = f"rank {each.place.rank} valid tokens"
            differences += [difference(name, None, expected.valid_tokens, each.valid_tokens)]
        if each.mtp_losses is not None:
            name = f"rank {each.place.rank} reported of each depth"
            differences += near(name, expected.mtp_reported.double(), each.mtp_losses.double(), bound)
    return differences


def _shared(expected: Expected, outcomes: Sequence[RankOutcome]) -> list[Difference]:
    """Compare the numbers of which each rank puts in its part: positions once for each data-parallel rank, the rest of the last stage."""
    differences: list[Difference] = []
    depths = len(expected.mtp_reported)
    rates = {f"acceptance_rate of depth {depth}": 100.0 * GUESSED[0] / GUESSED[1] for depth in range(1, depths + 1)}
    for each in outcomes:
        if each.shared is None:
            continue
        microbatches = len(expected.token_losses[0]) * each.place.data_size
        wanted = {"router_loss": MEASURED, "tokens": COUNTED * microbatches, **rates}
        for name in wanted.keys() | each.shared.keys():
            if wanted.get(name) != each.shared.get(name):
                where = f"rank {each.place.rank} reported {name}"
                differences.append(difference(where, None, wanted.get(name), each.shared.get(name)))
    return differences


def _reported_alike(where: str, one: RankOutcome, other: RankOutcome) -> list[Difference]:
    """Compare both reports on a rank, to the bit; where nothing is trained Megatron-LM reports NaN and production 0
    (R-LOSS-7).
    """
    differences: list[Difference] = []
    if one.mtp_losses is not None and other.mtp_losses is not None:
        differences += bits(f"{where} reported of each depth", one.mtp_losses, other.mtp_losses)
    if one.reported is not None and other.reported is not None:
        trains = one.valid_tokens > 0
        left, right = (0.0 if not trains and math.isnan(side) else side for side in (one.reported, other.reported))
        if left != right:
            differences.append(difference(f"{where} reported loss", None, left, right))
    return differences


def _gradients(
    expected: Expected, found: Mapping[str, torch.Tensor], outcomes: Sequence[RankOutcome]
) -> list[Difference]:
    differences = compare_gradients(expected.gradients, found, expected.gradient_bounds)
    norm = sum(float(each.square().sum()) for each in expected.gradients.values()) ** 0.5
    # megatron-core keeps the norm in float32.
    bound = expected.gradient_norm_bound + 4 * 2.0**-24 * norm
    for each in outcomes:
        name = f"rank {each.place.rank} gradient norm"
        differences += near(name, torch.tensor(norm).double(), torch.tensor(each.gradient_norm).double(), bound)
    return differences


def near(name: str, left: torch.Tensor, right: torch.Tensor, bound: float) -> list[Difference]:
    """Compare two tensors within `bound` at every element; NaN is a difference."""
    if left.shape != right.shape:
        return [difference(name, None, tuple(left.shape), tuple(right.shape))]
    off = (left.double() - right.double()).abs()
    if not left.numel() or bool((off <= bound).all()):
        return []
    place = int(off.nan_to_num(nan=torch.inf).reshape(-1).argmax())
    said = f"{float(right.reshape(-1)[place])!r}, more than {bound:.3g} away"
    return [difference(name, place if left.ndim else None, float(left.reshape(-1)[place]), said)]


def bits(name: str, left: torch.Tensor, right: torch.Tensor) -> list[Difference]:
    """Compare two tensors to the bit, with dtype and shape."""
    if left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right):
        return []
    if left.shape != right.shape or left.dtype != right.dtype:
        sides = [f"{side.dtype} {tuple(side.shape)}" for side in (left, right)]
        return [difference(name, None, *sides)]
    place = int((left != right).reshape(-1).nonzero()[0])
    return [difference(name, place, float(left.reshape(-1)[place]), float(right.reshape(-1)[place]))]


def difference(name: str, position: int | tuple[int, ...] | None, left: object, right: object) -> Difference:
    """Return one difference of a step."""
    return Difference(tensor=name, position=position, left=left, right=right, kind="other")


def result(check: str, left: str, right: str, differences: list[Difference]) -> CheckResult:
    """Return the result of a check of two sides."""
    findings = [Finding(left=left, right=right, differences=differences)] if differences else []
    return CheckResult(check=check, findings=findings)
