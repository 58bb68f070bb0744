"""Make a case smaller while it still shows the same fault: fewer conversations, fewer tokens, shorter rows, less parallelism."""

from __future__ import annotations

from typing import Any, Callable, Iterator

from packproof.cases import Case

MOST_CALLS = 300
"""Calls of the packing function for one case; what is small enough by then is told."""


def shrink(case: Case, shows: Callable[[Case], Any | None]) -> tuple[Case, Any | None]:
    """Return the smallest case found for which `shows` returns something, and what it returned (None if not even the given one does)."""
    small = case.changed()
    found = shows(small)
    calls = 1
    progress = found is not None
    while progress and calls < MOST_CALLS:
        progress = False
        for candidate in _smaller(small):
            calls += 1
            again = shows(candidate)
            if again is not None:
                small, found, progress = candidate, again, True
                break
            if calls >= MOST_CALLS:
                break
    return small, found


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases that are a step smaller, the largest steps first. No step makes a case that a preset must refuse."""
    conversations = list(case.conversations)
    for size in (1, 2, 3, 4):
        if size < case.context_parallel_size:
            yield _fitted(case.changed(context_parallel_size=size), case.pack_length)
    if len(conversations) > 1:
        for number in range(len(conversations)):
            fewer = case.changed(conversations=tuple(conversations[:number] + conversations[number + 1 :]))
            yield fewer
            saved = _padded(len(conversations[number]["tokens"]), case)
            if saved and case.pack_length > saved:
                yield fewer.changed(pack_length=case.pack_length - saved)
    for number, each in enumerate(conversations):
        length = len(each["tokens"])
        for start, end in ((0, length // 2), (length // 2, length), (0, length - 1), (1, length)):
            if 0 < end - start < length:
                cut = {name: values[start:end] for name, values in each.items()}
                shorter = case.changed(conversations=(*conversations[:number], cut, *conversations[number + 1 :]))
                yield shorter
                saved = _padded(length, case) - _padded(end - start, case)
                if saved and case.pack_length > saved:  # a row that is full stays full
                    yield shorter.changed(pack_length=case.pack_length - saved)
    for pack_length in _shorter(case):
        yield case.changed(pack_length=pack_length)


def _shorter(case: Case) -> list[int]:
    granularity = case.granularity
    longest = max([_padded(len(each["tokens"]), case) for each in case.conversations], default=0)
    halved = case.pack_length // 2 // granularity * granularity
    return [
        each
        for each in (longest, halved, case.pack_length - granularity)
        if longest <= each < case.pack_length and each > 0
    ]


def _padded(length: int, case: Case) -> int:
    return -(-length // case.granularity) * case.granularity


def _fitted(case: Case, pack_length: int) -> Case:
    granularity = case.granularity
    return case.changed(pack_length=max(granularity, -(-pack_length // granularity) * granularity))
