"""Run the layout jobs: every side cuts, shifts and packs drawn rows, and makes microbatches and losses of them;
differences are shrunk.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from equivalence.cases.data import DataCase
from equivalence.cases.result import CheckResult
from equivalence.checks.blame import is_of_production, raised, told
from equivalence.checks.cuts.context_parallel import check_context_parallel
from equivalence.checks.cuts.direct_vs_online import check_meeting
from equivalence.checks.cuts.dp_sharding import check_shares
from equivalence.checks.cuts.loss import check_cross_entropy, check_loss, check_online_loss, world_of_one
from equivalence.checks.cuts.microbatches import check_direct_microbatches, check_online_microbatches
from equivalence.checks.cuts.multi_token import check_multi_token
from equivalence.checks.cuts.packing import check_packing
from equivalence.checks.input.loader import check_loader
from equivalence.checks.input.order import check_order
from equivalence.checks.input.packed_files import check_packed_files
from equivalence.checks.registry import CHECKS
from equivalence.checks.rows.guards import check_guards
from equivalence.errors import CaseError
from equivalence.generators.choices import Choices, RandomChoices, drawn
from equivalence.generators.draws import each_drawn
from equivalence.generators.files import draw_files
from equivalence.generators.guards import draw_guards
from equivalence.generators.layouts import BinsCase, CutCase, DepthCase, draw_bins, draw_cut, draw_depths
from equivalence.generators.loader import draw_loader
from equivalence.generators.online import draw_cross_entropy, draw_direct, draw_loss, draw_meeting, draw_online
from equivalence.generators.orders import draw_order, draw_shares
from equivalence.runner.plan import LAYOUT_CHECKS
from equivalence.runner.search import CouldNotRun
from equivalence.subjects.protocol import Subject


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
    "direct_vs_online": LayoutCheck(draw=draw_meeting, check=check_meeting),
    "loss": LayoutCheck(draw=draw_loss, check=check_loss),
    "online_loss": LayoutCheck(draw=draw_loss, check=check_online_loss),
    "cross_entropy": LayoutCheck(draw=draw_cross_entropy, check=lambda case: check_cross_entropy(*case)),
    "order": LayoutCheck(draw=draw_order, check=check_order),
    "dp_sharding": LayoutCheck(draw=draw_shares, check=check_shares),
    "guards": LayoutCheck(draw=draw_guards, check=check_guards),
    "loader": LayoutCheck(draw=draw_loader, check=check_loader),
    "packed_files": LayoutCheck(draw=draw_files, check=check_packed_files),
}
"""By the names of the registry's checks on data."""
assert LAYOUTS.keys() == set(LAYOUT_CHECKS)


class _Differs(Exception):  # noqa: N818 - no error: what a draw showed
    """Ends a search; no AssertionError, which a check may raise itself."""


def check_data(case: DataCase) -> CheckResult:
    """Take a case on all sides. An exception of production is a difference; CouldNotRun holds one of a witness or of the suite."""
    if case.check not in LAYOUTS:
        raise CaseError(f"no check on data is called {case.check!r}; choose one of {', '.join(LAYOUTS)}")
    try:
        return LAYOUTS[case.check].check(case.value)
    except Exception as error:
        if not is_of_production(error):
            raise CouldNotRun(case, told(error)) from error
        return CheckResult(check=case.check, findings=[raised("production", error, expected="a result")])


def check_saved(case: DataCase, sides: Sequence[Subject]) -> list[CheckResult]:
    """Replay a saved case, whoever builds rows."""
    del sides
    check = CHECKS.get(case.check)
    if check is not None and check.replay:
        module, _, function = check.replay.partition(":")
        return [getattr(importlib.import_module(module), function)(case.value)]
    return [check_data(case)]


def draw_layouts(
    check: str, *, number: int, examples: int, plain: int = 0, shrink: bool = True
) -> Iterator[tuple[CheckResult, DataCase | None]]:
    """Yield the results of `plain` draws of random numbers and of `examples` of Hypothesis, all from the seed `number`.

    Only the last one differs if any does, and comes with its case: `shrink` makes a draw of Hypothesis small, and of plain draws the
    shortest one that differs is taken. Raises CouldNotRun with the smallest case on which a witness or the suite itself raised.
    """
    results: list[CheckResult] = []
    smallest: list[tuple[CheckResult, DataCase]] = []
    failed: list[CouldNotRun] = []

    def example(value: Any) -> None:
        case = DataCase(check=check, value=value)
        try:
            result = check_data(case)
        except CouldNotRun as error:
            failed[:] = [error]
            raise
        if not result.equal:
            smallest[:] = [(result, case)]
            raise _Differs
        if not smallest:
            results.append(result)

    # One world for all draws: a draw of its own takes five times as long to make one as to be checked.
    with world_of_one() if check == "cross_entropy" else nullcontext(), suppress(_Differs, CouldNotRun):
        _plain(check, example, smallest, number=number, examples=plain, shrink=shrink)
        if examples and not smallest:
            each_drawn(drawn(LAYOUTS[check].draw), example, number=number, examples=examples, shrink=shrink)
    for result in results:
        yield result, None
    if failed:
        raise failed[-1]
    yield from smallest


def _plain(
    check: str,
    example: Callable[[Any], None],
    smallest: list[tuple[CheckResult, DataCase]],
    *,
    number: int,
    examples: int,
    shrink: bool,
) -> None:
    """Draw plain random values; leave the shortest that differs in `smallest`, or with `shrink` off the first."""
    differing: list[tuple[CheckResult, DataCase]] = []
    for place in range(examples):
        smallest.clear()
        with suppress(_Differs):
            example(LAYOUTS[check].draw(RandomChoices(number, place)))
        differing += smallest
        if differing and not shrink:
            break
    smallest[:] = [min(differing, key=lambda found: len(str(found[1])))] if differing else []
