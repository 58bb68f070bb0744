"""Layouts of the main job: drawn rows are cut, shifted, packed and made microbatches and losses by every side, and shrunk where they differ."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from equivalence.blame import is_of_production, raised, told
from equivalence.checks.context_parallel import check_context_parallel
from equivalence.checks.loss import check_cross_entropy, check_loss, check_online_loss
from equivalence.checks.meeting import check_meeting
from equivalence.checks.microbatches import check_direct_microbatches, check_online_microbatches
from equivalence.checks.multi_token import check_multi_token
from equivalence.checks.order import check_order
from equivalence.checks.packing import check_packing
from equivalence.checks.result import CheckResult
from equivalence.checks.shares import check_shares
from equivalence.data_cases import DataCase
from equivalence.errors import CaseError
from equivalence.generators.draws import each_drawn
from equivalence.generators.layouts import CutRow, cut_rows, sequences
from equivalence.generators.online import cross_entropies, direct_cases, loss_cases, meeting_cases, online_cases
from equivalence.generators.orders import order_cases, shares_cases
from equivalence.plan import LAYOUT_CHECKS
from equivalence.registry import CHECKS
from equivalence.search import CouldNotRun
from equivalence.subjects.protocol import Subject


@dataclass(frozen=True, kw_only=True)
class LayoutCheck[Case]:
    """One check of layouts."""

    cases: st.SearchStrategy[Case]
    """Draws a case."""
    check: Callable[[Case], CheckResult]
    """Takes it on all sides."""


def _cut(case: tuple[CutRow, str]) -> CheckResult:
    row, layout = case
    return check_context_parallel(row.tensors, row.cu_seqlens, row.size, layout=layout)


def _shifted(case: tuple[CutRow, int]) -> CheckResult:
    row, depths = case
    return check_multi_token(row.tensors, row.cu_seqlens, row.size, depths)


@st.composite
def _bins(draw: st.DrawFn) -> tuple[list[int], int, list[int], int]:
    (lengths, capacity), size = draw(sequences()), draw(st.integers(1, 5))
    return lengths, capacity, draw(st.permutations(range(len(lengths)))), size


def _packed(case: tuple[list[int], int, list[int], int]) -> CheckResult:
    lengths, capacity, order, size = case
    return check_packing(lengths, capacity, order=order, data_parallel_size=size)


LAYOUTS: Mapping[str, LayoutCheck[Any]] = {
    "context_parallel": LayoutCheck(cases=st.tuples(cut_rows(), st.sampled_from(["zigzag", "contiguous"])), check=_cut),
    "multi_token": LayoutCheck(cases=st.tuples(cut_rows(), st.integers(0, 3)), check=_shifted),
    "packing": LayoutCheck(cases=_bins(), check=_packed),
    "direct_microbatches": LayoutCheck(cases=direct_cases(), check=check_direct_microbatches),
    "online_microbatches": LayoutCheck(cases=online_cases(), check=check_online_microbatches),
    "meeting": LayoutCheck(cases=meeting_cases(), check=check_meeting),
    "loss": LayoutCheck(cases=loss_cases(), check=check_loss),
    "online_loss": LayoutCheck(cases=loss_cases(), check=check_online_loss),
    "cross_entropy": LayoutCheck(cases=cross_entropies(), check=lambda case: check_cross_entropy(*case)),
    "order": LayoutCheck(cases=order_cases(), check=check_order),
    "shares": LayoutCheck(cases=shares_cases(), check=check_shares),
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
    check: str, *, number: int, examples: int, shrink: bool = True
) -> Iterator[tuple[CheckResult, DataCase]]:
    """Yield the results of `examples` draws from the seed `number`, each with its case; the last one differs if any does.

    `shrink` makes one that differs small. Raises CouldNotRun with the smallest case on which a witness or the suite itself raised.
    """
    results: list[tuple[CheckResult, DataCase]] = []
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
            results.append((result, case))

    with suppress(_Differs, CouldNotRun):
        each_drawn(LAYOUTS[check].cases, example, number=number, examples=examples, shrink=shrink)
    yield from results
    if failed:
        raise failed[-1]
    yield from smallest
