"""Check invariance: a global batch gives the same results in every layout and order of microbatches, except through Megatron-LM's normalizations.

Where a normalization depends on the layout, the reference predicts the difference. The check requires the predicted difference, and requires that it is not zero (R-MODEL-12).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult
from equivalence.checks.steps.models import ROUTER_TIE, compare_gradients, near, paired, result, shapes_of
from equivalence.expectations.step import Expected, Step, expect
from equivalence.generators.models import VARIES
from equivalence.trainers.production_step import ModelCase, RankOutcome, gradients
from reference.context_parallel import owned_positions


def check_invariance(
    case: ModelCase, outcomes: Sequence[RankOutcome], one_rank: Sequence[RankOutcome], expected: Expected
) -> CheckResult:
    """Compare the outcomes of a layout with the outcomes of the same case on one rank; `expected` belongs to the layout.

    Token losses and the reported loss always agree within R-MODEL-11's bounds. So do gradients if each token weighs the same in both layouts.
    Otherwise gradients differ by the reference's prediction, within the same bounds, and the prediction exceeds the bounds.
    """
    if expected.is_tie:
        return CheckResult(check="invariance", refused=ROUTER_TIE)
    differences = compare_tokens(case, outcomes, one_rank[0], expected.token_bound)
    alone, found = gradients(one_rank), gradients(outcomes)
    varies = weights_differ(case, case.on_one_rank())
    if varies:
        other = expect(case.on_one_rank(), shapes_of(found))
        apart = {name: expected.gradients[name] - each for name, each in other.gradients.items()}
        amount = sum(float(each.square().sum()) for each in apart.values()) ** 0.5
        if not amount > expected.gradient_norm_bound:
            said = f"{amount:.3g}, within the bound {expected.gradient_norm_bound:.3g}"
            differences.append(_difference("what the layout changes", "more than rounding", said))
        alone = {name: each + apart[name] for name, each in alone.items() if name in apart}
        # Each side is within its own bound of the reference: an expert may serve no trained token in one layout, and round nothing.
        limits = {name: each + other.gradient_bounds[name] for name, each in expected.gradient_bounds.items()}
        differences += compare_gradients(alone, found, limits)
    else:
        differences += compare_gradients(alone, found, expected.gradient_bounds)
    checked = result("invariance", "one rank", case.layout, differences)
    return CheckResult(check="invariance", findings=checked.findings, fired={VARIES: int(varies)})


def check_order(
    outcomes: Sequence[RankOutcome],
    reordered: Sequence[RankOutcome],
    order: Sequence[int],
    case: ModelCase,
    expected: Expected,
) -> CheckResult:
    """Compare the same rows in another order, where `order[i]` is the row at place i: results of a row do not depend on other rows."""
    if expected.is_tie:
        return CheckResult(check="invariance", refused=ROUTER_TIE)
    differences: list[Difference] = []
    rows, again = rows_of(case, outcomes), rows_of(case, reordered)
    for place, row in enumerate(order):
        for (name, here), (_, there) in zip(rows[row], again[place], strict=True):
            for depth, a, b in paired(f"{name} depth", here, there, differences):
                differences += near(f"{depth} token losses", a, b, expected.token_bound)
    differences += compare_gradients(gradients(outcomes), gradients(reordered), expected.gradient_bounds)
    return result("invariance", "in order", "in another order", differences)


def compare_tokens(
    case: ModelCase, outcomes: Sequence[RankOutcome], one_rank: RankOutcome, bound: float
) -> list[Difference]:
    """Compare each rank's token losses with the same positions of one rank's whole rows."""
    differences: list[Difference] = []
    for row, of_row in enumerate(rows_of(case, outcomes)):
        whole = one_rank.token_losses[row]
        for (name, losses), each in zip(of_row, ranks_of(case, row, outcomes), strict=True):
            owned = owned_positions(case.boundaries[row], each.place.context_rank, each.place.context_size)
            for depth, a, b in paired(f"{name} depth", whole, losses, differences):
                differences += near(f"{depth} token losses", a[owned], b, bound)
    return differences


def rows_of(case: ModelCase, outcomes: Sequence[RankOutcome]) -> list[list[tuple[str, list[torch.Tensor]]]]:
    """Return, for each row of the global batch, its token losses on every rank that has the row, with a name."""
    return [
        [
            (f"row {row} on rank {each.place.rank}", each.token_losses[row // case.data_size])
            for each in ranks_of(case, row, outcomes)
        ]
        for row in range(len(case.rows))
    ]


def ranks_of(case: ModelCase, row: int, outcomes: Sequence[RankOutcome]) -> list[RankOutcome]:
    """Return the ranks of the last stage that share a row."""
    return [each for each in outcomes if each.place.is_last_stage and each.place.data_rank == row % case.data_size]


def weights_differ(case: ModelCase, other: ModelCase) -> bool:
    """Return whether the weight of any token differs between two layouts of one global batch by more than rounding."""
    for left, right in zip(Step(case).whole_weights, Step(other).whole_weights, strict=True):
        if not torch.allclose(left, right, rtol=1e-5, atol=0.0):
            return True
    return False


def _difference(name: str, left: object, right: object) -> Difference:
    return Difference(tensor=name, position=None, left=left, right=right, kind="other")
