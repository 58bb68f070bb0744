"""Check recorded outcomes in the main job: which outcomes a job takes, what each is compared with, and the case that a
difference saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from equivalence.cases.data import DataCase
from equivalence.cases.result import CheckResult
from equivalence.cases.row import RowCase, expectation
from equivalence.checks.rows.recorded import (
    CHECK,
    check_recorded_batch,
    check_recorded_conversation,
    check_recorded_packing,
    check_recorded_partition,
    check_recorded_row,
)
from equivalence.checks.rows.rows import covers
from equivalence.recorded import outcomes
from equivalence.recorded.outcomes import RecordedRow
from equivalence.runner.counters import Tally, differing
from equivalence.subjects import BUILT_IN
from equivalence.subjects.protocol import Subject

MOST_DIFFERING = 3
"""Differing outcomes that a job shows; further ones are counted, since more of the same would end the run before its other jobs."""
_DATA: dict[str, tuple[Callable[[], Sequence[Any]], Callable[[Any], CheckResult]]] = {
    "packings": (outcomes.packings, check_recorded_packing),
    "partitions": (outcomes.partitions, check_recorded_partition),
    "batches": (outcomes.batches, check_recorded_batch),
    "conversations": (outcomes.conversations, check_recorded_conversation),
}


def run(name: str, places: range, sides: Sequence[Subject], tally: Tally) -> None:
    """Hold the outcomes at these places to what `name` says: packings, partitions, batches, conversations, or rows of the preset of that name.

    All but rows are held to both sides whoever builds rows. The installed Megatron-LM is no side of recorded rows:
    every other check of rows runs it, at ten times the cost of the others.
    """
    differed = 0
    for result, prompt_format, where, case in _checked(name, places, sides, tally):
        tally.count(result, prompt_format)
        differed += not result.equal
        if not result.equal and differed <= MOST_DIFFERING:
            tally.differences += differing(result, prompt_format=prompt_format, where=where, case=case().to_json())


def _checked(
    name: str, places: range, sides: Sequence[Subject], tally: Tally
) -> Iterator[tuple[CheckResult, str, str, Callable[[], DataCase | RowCase]]]:
    """Yield each result with its prompt format, where it stands, and what makes its case."""
    if name in _DATA:
        read, check = _DATA[name]
        for outcome in read()[places.start : places.stop]:
            yield check(outcome), "any", f"{CHECK} {name}: {outcome}", partial(_data_case, name, outcome)
        return
    for row in outcomes.rows(name)[places.start : places.stop]:
        settings = row.case.settings
        ours = [side for side in sides if side.name != "megatron_lm" and covers(side, settings)]
        # Rows that the user's own side does not take say nothing of it.
        own = [side for side in sides if side.name not in BUILT_IN]
        if own and not any(side in ours for side in own):
            for side in own:
                tally.left_out[side.name, CHECK] += 1
        elif ours:
            yield check_recorded_row(row, ours), settings.prompt_format, row.case.origin, partial(_row_case, name, row)


def _data_case(name: str, outcome: Any) -> DataCase:
    """Return an outcome as the case that replays it."""
    return DataCase(check=CHECK, value=outcome, origin=f"{CHECK} {name}")


def _row_case(name: str, row: RecordedRow) -> DataCase | RowCase:
    """Return a row that expects what was recorded; where only the exception's class is known, the outcome as it stands."""
    return _data_case(name, row) if row.outcome is None else row.case.with_(expected=expectation(row.outcome))
