"""Shrink a training step that differs: to the cheapest layout that still shows it, then fewer and shorter rows, then
a plainer model.

Greedy, one change at a time, since each try opens worlds: some tens of tries in the time it is given.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from equivalence.cases.result import CheckResult
from equivalence.cases.step import ModelCase
from equivalence.generators.models import domain_factor
from production.errors import PackproofError
from production.parallel.sizes import ParallelSizes

SHRINK_SECONDS = 45.0

Results = list[CheckResult]


def shrink(
    case: ModelCase, results: Results, check: Callable[[ModelCase], Results], *, seconds: float = SHRINK_SECONDS
) -> tuple[ModelCase, Results]:
    """Return the smallest case found that differs in the same way (`signature`), with what its checks gave."""
    asked = signature(results)
    until = time.monotonic() + seconds
    tried = {case.to_json()}
    progress = True
    while progress:
        progress = False
        for simpler in simpler_cases(case):
            if time.monotonic() > until:
                return case, results
            if (key := simpler.to_json()) in tried:
                continue
            tried.add(key)
            found = check(simpler)
            if signature(found) & asked:
                case, results, progress = simpler, found, True
                break
    return case, results


def signature(results: Results) -> frozenset[tuple[str, object]]:
    """Return the checks that differ, and how a rank failed, so that one fault is not shrunk into another."""
    return frozenset(
        (result.check, each.left if each.kind == "failed" else None)
        for result in results
        for finding in result.findings
        for each in finding.differences[:1]
    )


def simpler_cases(case: ModelCase) -> Iterator[ModelCase]:
    """Yield cases a step simpler, the cheapest first; all of them can run."""
    for changed in itertools.chain(_layouts(case), _rows(case), _plainer(case)):
        if _can_run(changed):
            yield changed


def _layouts(case: ModelCase) -> Iterator[ModelCase]:
    sizes = {each.name: getattr(case.sizes, each.name) for each in dataclasses.fields(ParallelSizes)}
    everything = {**sizes, "data_size": case.data_size}
    ones = dict.fromkeys(everything, 1)
    large = [name for name, size in everything.items() if size > 1]
    yield _with_layout(case, ones)
    for pair in itertools.chain(itertools.combinations(large, 1), itertools.combinations(large, 2)):
        yield _with_layout(case, ones | dict.fromkeys(pair, 2))
        yield _with_layout(case, ones | {name: everything[name] for name in pair})
    for name in large:
        yield _with_layout(case, everything | {name: everything[name] // 2})


def _with_layout(case: ModelCase, wanted: dict[str, int]) -> ModelCase:
    sizes = ParallelSizes(**{name: size for name, size in wanted.items() if name != "data_size"})
    if (sizes, wanted["data_size"]) == (case.sizes, case.data_size):
        return case
    return dataclasses.replace(case, sizes=sizes, data_size=wanted["data_size"])


def _rows(case: ModelCase) -> Iterator[ModelCase]:
    count, dp = len(case.rows), case.data_size
    for keep in {dp, count // 2 - count // 2 % dp, count - dp}:
        if 0 < keep < count:
            yield _with_rows(case, [*range(keep)])
            yield _with_rows(case, [*range(count - keep, count)])
    unit = math.lcm(domain_factor(case.sizes), case.multiple)
    for length in (unit, 2 * unit, case.pack_length // 2 - case.pack_length // 2 % unit, case.pack_length - unit):
        if 0 < length < case.pack_length:
            yield _cut(case, length)
    if not case.lengths:
        if len({len(row) for row in case.rows}) == 1:  # every segment as short as it can be, the last as the row needs
            short = 2 * case.sizes.context if case.sizes.context > 1 else 1
            least = [short] * (len(case.rows[0]) - 1)
            last = -(-(sum(least) + short) // unit) * unit - sum(least)
            yield dataclasses.replace(case, rows=((*least, last),) * count)
        halves = tuple((row[0], sum(row[1:])) if len(row) > 2 else row for row in case.rows)
        yield dataclasses.replace(case, rows=halves)
        yield dataclasses.replace(case, rows=tuple((sum(row),) for row in case.rows))
    yield dataclasses.replace(case, trained=())
    yield dataclasses.replace(case, masked=(1.0,) * count)


def _with_rows(case: ModelCase, kept: list[int]) -> ModelCase:
    def some(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[row] for row in kept) if values else ()

    return dataclasses.replace(
        case, rows=some(case.rows), masked=some(case.masked), trained=some(case.trained), lengths=some(case.lengths)
    )


def _cut(case: ModelCase, length: int) -> ModelCase:
    rows, lengths = [], []
    for number, row in enumerate(case.rows):
        ends = [min(end, length) for end in itertools.accumulate(row)]
        rows.append(tuple(b - a for a, b in itertools.pairwise([0, *ends]) if b > a))
        true = case.lengths[number] if case.lengths else ()
        lengths.append(tuple(min(each, segment) for each, segment in zip(true, rows[-1], strict=False)))
    return dataclasses.replace(case, rows=tuple(rows), lengths=tuple(lengths) if case.lengths else ())


def _plainer(case: ModelCase) -> Iterator[ModelCase]:
    shape = case.shape
    for changes in (
        {"depths": 0, "repeated": False},
        {"depths": max(0, shape.depths - 1)},
        {"experts": 0, "dense_layers": 0, "pattern": shape.pattern.replace("E", "-")},
        {"architecture": "gpt", "pattern": ""},
        {"layers": case.sizes.pipeline, "dense_layers": 0},
        {"pattern": shape.pattern[:2] * case.sizes.pipeline} if shape.pattern else {},
        {"dense_layers": 0},
        {"repeated": False},
        {"tied": False},
        {"gated": False, "activation": "gelu"},
        {"rotary_percent": 1.0},
    ):
        yield dataclasses.replace(case, shape=dataclasses.replace(shape, **changes))
    yield dataclasses.replace(case, mtp_weights="rank")
    yield dataclasses.replace(case, mtp="tables")
    if case.check != "paths":
        yield dataclasses.replace(case, normalization="per_token")


def _can_run(case: ModelCase) -> bool:
    """Return whether a changed field leaves the other fields valid."""
    shape, sizes = case.shape, case.sizes
    try:
        sizes.data(case.world_size)
    except PackproofError:
        return False
    unit = 2 * sizes.context if sizes.context > 1 else 1
    layers = shape.layers if shape.architecture == "gpt" else len(shape.pattern) // 2
    return (
        len(case.rows) % case.data_size == 0
        and case.pack_length % domain_factor(sizes) == 0
        and all(segment % unit == 0 for row in case.rows for segment in row)
        and (case.check != "leaks" or max(map(len, case.rows)) > 1)
        and (sizes.expert == 1 or shape.experts > 0)
        and layers % sizes.pipeline == 0
        and (layers > 0 or shape.architecture == "gpt")
        and not (shape.tied and shape.depths and sizes.pipeline > 1)
    )
