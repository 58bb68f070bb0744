"""Check leaks: the contents of one conversation of a row reach no other conversation through attention, shifts, shards or counts (R-MODEL-13).

Production is compared with itself: with other tokens in one segment, with NaN in it, and with each segment in a row of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult
from equivalence.cases.step import batch_of
from equivalence.checks.steps.invariance import ranks_of
from equivalence.checks.steps.models import ROUTER_TIE, bits, compare_gradients, near, paired, result, shapes_of
from equivalence.expectations.step import Expected, expect
from equivalence.trainers.production_step import GivenRows, ModelCase, RankOutcome, given, gradients
from production.rows.batch import Batch
from reference.context_parallel import owned_positions

RUN = "equivalence.trainers.production_step:run"
Run = Callable[[str, Any], list[RankOutcome]]
"""Runs a target on every rank of a world that entered the case's layout."""


def check_leaks(case: ModelCase, run: Run) -> CheckResult:
    """Compare four steps of one layout: unchanged, one segment changed, one segment poisoned, and one conversation at a time.

    In a dense model, losses and gradients outside of the changed segment stay equal to the bit. With experts, whose matrix products change
    their number of rows, they stay within R-MODEL-11's bounds, and so do conversations one at a time.
    """
    rows = watched_rows(case)
    base = given(case, rows)
    plain = run(RUN, base)
    expected = expect(base, shapes_of(gradients(plain)))
    if expected.is_tie:
        return CheckResult(check="leaks", refused=ROUTER_TIE)
    changed = run(RUN, given(case, [_changed(case, number, row) for number, row in enumerate(rows)]))
    differences, touched = _outside(case, "other tokens", plain, changed, expected)
    if case.shape.experts:
        differences += compare_gradients(gradients(plain), gradients(changed), expected.gradient_bounds)
    else:
        for name, each in gradients(plain).items():
            differences += bits(f"other tokens: gradient of {name}", each, gradients(changed)[name])
    fired = {"segments that change their own losses": touched}
    if not case.shape.tied:
        poisoned = run(RUN, given(case, rows, poisoned=case.shape.vocab_size - 1))
        found, spread = _outside(case, "NaN", plain, poisoned, expected, is_poison=True)
        differences += found
        fired["segments that NaN fills"] = spread
    differences += _alone(case, base, plain, expected, run)
    checked = result("leaks", "as it is", case.layout, differences)
    return CheckResult(check="leaks", findings=checked.findings, fired=fired)


def segment_to_change(case: ModelCase, row: int) -> int:
    """Return the segment of a row to change."""
    return (case.seed + row) % len(case.rows[row])


def watched_rows(case: ModelCase) -> list[Batch]:
    """Return the rows as batches of one row: the segment that will change trains nothing, and the last id occurs only at the segment's start."""
    batch, poison = case.batch(), case.shape.vocab_size - 1
    rows = []
    for number, lengths in enumerate(case.rows):
        ids, mask = batch.input_ids[number : number + 1].clone(), batch.token_mask[number : number + 1].clone()
        start, end = _bounds(case, number)
        ids[ids == poison] = 0
        ids[0, start] = poison
        mask[0, start:end] = 0
        rows.append(batch_of([lengths], ids, batch.target_ids[number : number + 1], mask))
    return rows


def _bounds(case: ModelCase, row: int) -> tuple[int, int]:
    return list(itertools.pairwise(case.boundaries[row]))[segment_to_change(case, row)]


def _changed(case: ModelCase, number: int, row: Batch) -> Batch:
    """Return the batch with other ids and labels in the segment that may change."""
    start, end = _bounds(case, number)
    ids, targets = row.input_ids.clone(), row.target_ids.clone()
    ids[0, start:end] = (ids[0, start:end] + 1) % case.shape.vocab_size
    targets[0, start:end] = (targets[0, start:end] + 1) % case.shape.vocab_size
    return dataclasses.replace(row, input_ids=ids, target_ids=targets)


def _outside(
    case: ModelCase,
    what: str,
    plain: Sequence[RankOutcome],
    changed: Sequence[RankOutcome],
    expected: Expected,
    *,
    is_poison: bool = False,
) -> tuple[list[Difference], int]:
    """Return the differences outside of the changed segments, and in how many (rank, row) the change shows inside,
    without which nothing was tried.
    """
    differences: list[Difference] = []
    shown = 0
    for row in range(len(case.rows)):
        start, end = _bounds(case, row)
        for one, other in zip(ranks_of(case, row, plain), ranks_of(case, row, changed), strict=True):
            place = one.place
            owned = torch.tensor(owned_positions(case.boundaries[row], place.context_rank, place.context_size))
            inside = (owned >= start) & (owned < end)
            microbatch = row // case.data_size
            where = f"{what}: row {row} on rank {place.rank} depth"
            pairs = paired(where, one.token_losses[microbatch], other.token_losses[microbatch], differences)
            for number, (name, a, b) in enumerate(pairs):
                outer = f"{name}, outside of positions {start} to {end}"
                differences += (
                    near(outer, a[~inside], b[~inside], expected.token_bound)
                    if case.shape.experts
                    else bits(outer, a[~inside], b[~inside])
                )
                if number == 0:
                    shows = bool(b[inside].isnan().all()) if is_poison else not torch.equal(a[inside], b[inside])
                    shown += shows
                    if not shows:
                        differences.append(
                            Difference(
                                tensor=f"{name}, within positions {start} to {end}",
                                position=None,
                                left="a change that shows",
                                right="none",
                                kind="other",
                            )
                        )
    return differences, shown


def _alone(
    case: ModelCase, base: GivenRows, plain: Sequence[RankOutcome], expected: Expected, run: Run
) -> list[Difference]:
    """Compare each segment as a row of its own; the last segment repeats, untrained, up to a multiple of dp."""
    places = [(row, number) for row, lengths in enumerate(case.rows) for number in range(len(lengths))]
    rows = [_segment(case, base.given[row], row, number) for row, number in places]
    while len(rows) % case.data_size:
        rows.append(dataclasses.replace(rows[-1], token_mask=torch.zeros_like(rows[-1].token_mask)))
    alone = run(RUN, given(case, rows))
    differences: list[Difference] = []
    for place, (row, number) in enumerate(places):
        for one in ranks_of(case, row, plain):
            (other,) = [
                each
                for each in alone
                if each.place.is_last_stage
                and each.place.data_rank == place % case.data_size
                and (each.place.context_rank, each.place.tensor_rank) == (one.place.context_rank, one.place.tensor_rank)
            ]
            size = case.sizes.context
            before, length = sum(case.rows[row][:number]) // size, case.rows[row][number] // size
            where = f"alone: row {row} segment {number} on rank {one.place.rank} depth"
            packed = [each[before : before + length] for each in one.token_losses[row // case.data_size]]
            for name, a, b in paired(where, packed, other.token_losses[place // case.data_size], differences):
                differences += near(name, a, b, expected.token_bound)
    # With depths upstream weighs by each row's own counts, which one conversation at a time has others of.
    if not case.shape.depths and case.normalization != "mean_of_means":
        differences += compare_gradients(gradients(plain), gradients(alone), expected.gradient_bounds)
    return differences


def _segment(case: ModelCase, batch: Batch, row: int, number: int) -> Batch:
    start, end = list(itertools.pairwise(case.boundaries[row]))[number]
    return batch_of(
        [[end - start]], batch.input_ids[:, start:end], batch.target_ids[:, start:end], batch.token_mask[:, start:end]
    )
