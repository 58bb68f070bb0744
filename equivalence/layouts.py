"""Layouts of the main job: drawn rows are cut, shifted, packed and made microbatches and losses by every side, and shrunk where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from equivalence.checks.context_parallel import check_context_parallel
from equivalence.checks.guards import check_guards
from equivalence.checks.loader import check_loader
from equivalence.checks.loss import check_cross_entropy, check_loss, check_online_loss, world_of_one
from equivalence.checks.meeting import check_meeting
from equivalence.checks.microbatches import check_direct_microbatches, check_online_microbatches
from equivalence.checks.multi_token import check_multi_token
from equivalence.checks.order import check_order
from equivalence.checks.packed_files import check_packed_files
from equivalence.checks.packing import check_packing
from equivalence.checks.result import CheckResult
from equivalence.checks.shares import check_shares
from equivalence.generators.choices import Choices, RandomChoices, drawn
from equivalence.generators.draws import each_drawn
from equivalence.generators.files import draw_files
from equivalence.generators.guards import draw_guards
from equivalence.generators.layouts import BinsCase, CutCase, DepthCase, draw_bins, draw_cut, draw_depths
from equivalence.generators.loader import draw_loader
from equivalence.generators.online import draw_cross_entropy, draw_direct, draw_loss, draw_meeting, draw_online
from equivalence.generators.orders import draw_order, draw_shares
from equivalence.plan import LAYOUT_CHECKS


@dataclass(frozen=True, kw_only=True)
class LayoutCheck[Case]:
    """One check of layouts."""

    draw: Callable[[Choices], Case]
    """Draws a case."""
    check: Callable[[Case], CheckResult]
    """Takes it on all sides."""


def _cut(case: CutCase) -> CheckResult:
    return check_context_parallel(case.row.tensors, case.row.cu_seqlens, case.row.size, layout=case.layout)


def _shifted(case: DepthCase) -> CheckResult:
    return check_multi_token(case.row.tensors, case.row.cu_seqlens, case.row.size, case.depths)


def _packed(case: BinsCase) -> CheckResult:
    return check_packing(case.lengths, case.capacity, order=case.order, data_parallel_size=case.data_parallel_size)


LAYOUTS: Mapping[str, LayoutCheck[Any]] = {
    "context_parallel": LayoutCheck(draw=draw_cut, check=_cut),
    "multi_token": LayoutCheck(draw=draw_depths, check=_shifted),
    "packing": LayoutCheck(draw=draw_bins, check=_packed),
    "direct_microbatches": LayoutCheck(draw=draw_direct, check=check_direct_microbatches),
    "online_microbatches": LayoutCheck(draw=draw_online, check=check_online_microbatches),
    "meeting": LayoutCheck(draw=draw_meeting, check=check_meeting),
    "loss": LayoutCheck(draw=draw_loss, check=check_loss),
    "online_loss": LayoutCheck(draw=draw_loss, check=check_online_loss),
    "cross_entropy": LayoutCheck(draw=draw_cross_entropy, check=lambda case: check_cross_entropy(*case)),
    "order": LayoutCheck(draw=draw_order, check=check_order),
    "shares": LayoutCheck(draw=draw_shares, check=check_shares),
    "guards": LayoutCheck(draw=draw_guards, check=check_guards),
    "loader": LayoutCheck(draw=draw_loader, check=check_loader),
    "packed_files": LayoutCheck(draw=draw_files, check=check_packed_files),
}
"""By the names in `plan.LAYOUT_CHECKS`."""
assert LAYOUTS.keys() == set(LAYOUT_CHECKS)


class _Differs(Exception):  # noqa: N818 - no error: what a draw showed
    """Ends a search; no AssertionError, which a check may raise itself."""


def draw_layouts(
    check: str, *, number: int, examples: int, plain: int = 0, shrink: bool = True
) -> Iterator[tuple[CheckResult, str]]:
    """Yield the results of `plain` draws of random numbers and of `examples` of Hypothesis, all from the seed `number`.

    Only the last one differs if any does, and comes with what it was drawn as: `shrink` makes a draw of Hypothesis small, and of plain
    draws the shortest one that differs is taken.
    """
    results: list[tuple[CheckResult, str]] = []
    smallest: list[tuple[CheckResult, str]] = []
    draw, checked = LAYOUTS[check].draw, LAYOUTS[check].check

    def make(choices: Choices) -> tuple[CheckResult, str]:
        case = draw(choices)
        result = checked(case)
        return result, "" if result.equal else f"{case}"  # tensors take long to print

    def example(found: tuple[CheckResult, str]) -> None:
        if not found[0].equal:
            smallest[:] = [found]
            raise _Differs
        if not smallest:
            results.append(found)

    # One world for all draws: a draw of its own takes five times as long to make one as to be checked.
    with world_of_one() if check == "cross_entropy" else nullcontext():
        for place in range(plain):
            found = make(RandomChoices(number, place))
            (results if found[0].equal else smallest).append(found)
            if smallest and not shrink:
                break
        if smallest:
            smallest[:] = [min(smallest, key=lambda found: len(found[1]))]
        elif examples:
            with suppress(_Differs):
                each_drawn(drawn(make), example, number=number, examples=examples, shrink=shrink)
    yield from results
    yield from smallest
