"""Faults of what a job is fed: guards that look at too little, counts that round, ids that are cut on their way from a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from equivalence.mutants.layout_mutant import LayoutMutant
from production.tokens.turn_tokens import IGNORE_INDEX


def _all_but_the_last(sound: Any) -> Any:
    """Drop the last row or segment."""
    return lambda fields, *rest: sound(fields[:-1] or fields, *rest)


def _whole_rows_only(_: Any) -> Any:
    def check(fields: Sequence[dict[str, Any]], size: int) -> None:
        from production.rows.guards import _refused  # noqa: PLC0415 - the fault stands in its place

        for index, row in enumerate(fields):
            if row["context_parallel_size"] != size:
                raise _refused("context_parallel_size", index, "", "")
            if size > 1 and len(row["input_ids"]) % (2 * size):
                raise _refused("indivisible_segment", index, "", "")

    return check


def _trained_targets_only(_: Any) -> Any:
    def check(fields: Sequence[dict[str, Any]], _: int | None) -> None:
        from production.rows.guards import _refused  # noqa: PLC0415 - the fault stands in its place

        for index, row in enumerate(fields):
            if ((row["token_mask"] != 0) & (row["target_ids"] == IGNORE_INDEX)).any():
                raise _refused("target_mask", index, "", "")

    return check


def _ids_of_16_bits(sound: Any) -> Any:
    def to_wire(data: Any, item: Any) -> Any:
        wire = dict(sound(data, item))
        return wire | {"input_ids": wire["input_ids"].astype(np.uint16).astype(np.int64)}

    return to_wire


def _two_limbs(_: Any) -> Any:
    from production.training.metrics.token_counts import _NAMES, LIMB_BITS, LIMBS, RowCounts  # noqa: PLC0415 - of this fault alone

    def of_limbs(limbs: Sequence[float]) -> RowCounts:
        numbers = {
            name: sum(int(limbs[at * LIMBS + limb]) << LIMB_BITS * limb for limb in range(2))
            for at, name in enumerate(_NAMES)
        }
        return RowCounts(**numbers)

    return staticmethod(of_limbs)


def _float32_sum(_: Any) -> Any:
    def count_trained(batch: Any) -> torch.Tensor:
        found: torch.Tensor = (batch.token_mask.sum(dim=1) * batch.sample_mask).sum().double()
        return found

    return count_trained


def _restored_late(sound: Any) -> Any:
    """Hand out the rows that were read ahead before the restore."""

    def restore(loader: Any, consumed_samples: int) -> None:
        if loader._prefetcher is None:  # noqa: SLF001 - the fault
            sound(loader, consumed_samples)

    return restore


def _mutant(name: str, story: str, target: str, wrong: Callable[[Any], Any], first: str) -> LayoutMutant:
    return LayoutMutant(name=name, story=story, target=target, wrong=wrong, first=first)


FEED_MUTANTS = (
    _mutant("guard_of_all_but_the_last", "the last row of a batch is not guarded", "production.rows.guards:_check_boundaries", _all_but_the_last, "guards"),
    _mutant("guard_of_whole_rows", "cp is asked of the row's length, not of its segments", "production.rows.guards:_check_context_parallel", _whole_rows_only, "guards"),
    _mutant("guard_of_trained_targets", "a target that should train and does not passes", "production.rows.guards:_check_target_mask", _trained_targets_only, "guards"),
    _mutant("ids_of_16_bits", "ids are sent from workers in 16 bits", "production.training.data.dataset:PackedData.to_wire", _ids_of_16_bits, "loader"),
    _mutant("two_limbs", "counts beyond 2**24 lose their upper bits on their way between ranks", "production.training.metrics.token_counts:RowCounts.of_limbs", _two_limbs, "loader"),
    _mutant("restored_late", "a loader that goes back hands out what it has read ahead", "production.training.data.loader:Loader.restore", _restored_late, "loader"),
    _mutant("divisor_in_float32", "trained targets are counted in float32", "production.rows.batch:count_trained", _float32_sum, "dp_sharding"),
)  # fmt: skip
"""Each shows on data alone."""
