"""Check packing on the online path: both sides fill the same bins in the same order (R-PACK).

The third side is recorded (`equivalence/checks/rows/recorded.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from equivalence.cases.result import CheckResult
from equivalence.checks.cuts.pairs import Side, compare_sides
from production.errors import PackproofError
from production.online import packing as production
from reference import packing as reference

_Bins = list[list[int]]


def check_packing(
    lengths: Sequence[int], capacity: int, *, order: Sequence[int], data_parallel_size: int
) -> CheckResult:
    """Pack `lengths` by every packer and raise the number of bins for `data_parallel_size` ranks, on both sides.

    `order` is what first fit goes by: each side shuffles for itself (R-PACK-3).
    """

    def theirs() -> dict[str, _Bins]:
        packed = {name: pack(lengths, capacity) for name, pack in reference.PACKERS.items()}
        return packed | {"first_fit": reference.first_fit(order, lengths, capacity)}

    def ours() -> dict[str, _Bins]:
        packed = {name: pack(lengths, capacity) for name, pack in production.PACKERS.items()}
        return packed | {"first_fit": production.first_fit(lengths, capacity, order=order)}

    size = data_parallel_size
    sides = {
        "reference": _side(theirs, reference.raise_bin_count, reference.bins_of_rank, size),
        "production": _side(
            ours,
            production.raise_bin_count,
            lambda bins, rank, of: production.take_rank(bins, rank=rank, size=of),
            size,
        ),
    }
    return compare_sides("packing", sides)


def _side(
    pack: Callable[[], dict[str, _Bins]],
    raise_bin_count: Callable[[_Bins, int], _Bins],
    take_rank: Callable[[_Bins, int, int], _Bins],
    size: int,
) -> Side:
    found: dict[str, torch.Tensor] = {}
    try:
        packed = pack()
    except (PackproofError, reference.PackingError):
        return "sequence"
    for name, bins in packed.items():
        found[name] = _tensor(bins)
        try:
            raised = raise_bin_count(bins, size)
        except (PackproofError, reference.PackingError):
            found[f"{name}: too few sequences"] = torch.tensor([size])
            found[f"{name}, raised"] = torch.zeros(0)
            continue
        found[f"{name}, raised"] = _tensor(raised)
        for rank in range(size):
            found[f"{name}, rank {rank}"] = _tensor(take_rank(raised, rank, size))
    return found


def _tensor(bins: _Bins) -> torch.Tensor:
    """Return the bins one after the other as a tensor, with -1 behind each bin."""
    return torch.tensor([index for each in bins for index in (*each, -1)], dtype=torch.int64)
