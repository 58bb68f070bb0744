"""Named tensors of several sides, compared pair by pair to the bit: what checks of layouts share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding

Side = Mapping[str, torch.Tensor] | str
"""A side's tensors by name, or the kind that it refuses with."""

MOST_DIFFERENCES = 20
"""Largest number of printed differences of one pair."""


def compare_sides(check: str, sides: Mapping[str, Side]) -> CheckResult:
    """Compare all pairs in the names that both have; a pair that shares no name is a finding, since it compared nothing."""
    findings = []
    for left, right in itertools.combinations(sides, 2):
        if differences := _differences(sides[left], sides[right]):
            findings.append(Finding(left=left, right=right, differences=differences[:MOST_DIFFERENCES]))
    kinds = {side if isinstance(side, str) else None for side in sides.values()}
    return CheckResult(check=check, findings=findings, refused=kinds.pop() if len(kinds) == 1 else None)


def _differences(left: Side, right: Side) -> list[Difference]:
    if isinstance(left, str) or isinstance(right, str):
        kinds = [side if isinstance(side, str) else None for side in (left, right)]
        if kinds[0] == kinds[1]:
            return []
        return [Difference(tensor="refusal", position=None, left=kinds[0], right=kinds[1], kind="refusal")]
    shared = [name for name in left if name in right]
    if not shared:
        return [Difference(tensor="names", position=None, left=sorted(left), right=sorted(right), kind="other")]
    return [difference for name in shared for difference in _compare(name, left[name], right[name])]


def _compare(name: str, left: torch.Tensor, right: torch.Tensor) -> list[Difference]:
    if left.dtype != right.dtype or left.shape != right.shape:
        described = [f"{side.dtype} {tuple(side.shape)}" for side in (left, right)]
        return [Difference(tensor=name, position=None, left=described[0], right=described[1], kind="dtype_or_shape")]
    if torch.equal(left, right):  # the usual answer, in one operation
        return []
    differ = left != right
    values = zip(differ.nonzero().tolist(), left[differ].tolist(), right[differ].tolist(), strict=True)
    return [
        Difference(
            tensor=name, position=place[0] if len(place) == 1 else tuple(place) or None, left=a, right=b, kind="other"
        )
        for place, a, b in values
    ]
