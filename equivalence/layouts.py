"""Layouts of the main job: drawn rows are cut, shifted, packed and made microbatches and losses by every side, and shrunk where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from hypothesis import strategies as st

from equivalence.checks.context_parallel import check_context_parallel
from equivalence.checks.loss import check_cross_entropy, check_loss, check_online_loss
from equivalence.checks.meeting import check_meeting
from equivalence.checks.microbatches import check_direct_microbatches, check_online_microbatches
from equivalence.checks.multi_token import check_multi_token
from equivalence.checks.order import check_order
from equivalence.checks.packing import check_packing
from equivalence.checks.result import CheckResult
from equivalence.checks.shares import check_shares
from equivalence.generators.draws import each_drawn
from equivalence.generators.layouts import CutRow, cut_rows, sequences
from equivalence.generators.online import cross_entropies, direct_cases, loss_cases, meeting_cases, online_cases
from equivalence.generators.orders import order_cases, shares_cases
from equivalence.plan import LAYOUT_CHECKS


@st.composite
def _cuts(draw: st.DrawFn) -> tuple[CheckResult, str]:
    row, layout = draw(cut_rows()), draw(st.sampled_from(["zigzag", "contiguous"]))
    result = check_context_parallel(row.tensors, row.cu_seqlens, row.size, layout=layout)
    return result, f"{_where(row)} layout={layout}"


@st.composite
def _depths(draw: st.DrawFn) -> tuple[CheckResult, str]:
    row, depths = draw(cut_rows()), draw(st.integers(0, 3))
    return check_multi_token(row.tensors, row.cu_seqlens, row.size, depths), f"{_where(row)} depths={depths}"


@st.composite
def _bins(draw: st.DrawFn) -> tuple[CheckResult, str]:
    (lengths, capacity), size = draw(sequences()), draw(st.integers(1, 5))
    order = draw(st.permutations(range(len(lengths))))
    result = check_packing(lengths, capacity, order=order, data_parallel_size=size)
    return result, f"lengths={lengths} capacity={capacity} order={order} dp={size}"


@st.composite
def _checked[Case](
    draw: st.DrawFn, cases: st.SearchStrategy[Case], check: Callable[[Case], CheckResult]
) -> tuple[CheckResult, str]:
    case = draw(cases)
    return check(case), f"{case}"


_DRAWN = {
    "context_parallel": _cuts(),
    "multi_token": _depths(),
    "packing": _bins(),
    "direct_microbatches": _checked(direct_cases(), check_direct_microbatches),
    "online_microbatches": _checked(online_cases(), check_online_microbatches),
    "meeting": _checked(meeting_cases(), check_meeting),
    "loss": _checked(loss_cases(), check_loss),
    "online_loss": _checked(loss_cases(), check_online_loss),
    "cross_entropy": _checked(cross_entropies(), lambda case: check_cross_entropy(*case)),
    "order": _checked(order_cases(), check_order),
    "shares": _checked(shares_cases(), check_shares),
}
assert _DRAWN.keys() == set(LAYOUT_CHECKS)


class _Differs(Exception):  # noqa: N818 - no error: what a draw showed
    """Ends a search; no AssertionError, which a check may raise itself."""


def draw_layouts(check: str, *, number: int, examples: int, shrink: bool = True) -> Iterator[tuple[CheckResult, str]]:
    """The results of `examples` draws from the seed `number`, each with what it was drawn as; the last one differs if any does.

    `shrink` makes one that differs small.
    """
    results: list[tuple[CheckResult, str]] = []
    smallest: list[tuple[CheckResult, str]] = []

    def example(drawn: tuple[CheckResult, str]) -> None:
        if not drawn[0].equal:
            smallest[:] = [drawn]
            raise _Differs
        if not smallest:
            results.append(drawn)

    with suppress(_Differs):
        each_drawn(_DRAWN[check], example, number=number, examples=examples, shrink=shrink)
    yield from results
    yield from smallest


def _where(row: CutRow) -> str:
    return f"cu_seqlens={row.cu_seqlens} cp={row.size}"
