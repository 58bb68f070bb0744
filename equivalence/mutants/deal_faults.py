"""Faults of dealing: which rows and bins a data-parallel rank takes, in which order, and what a validation batch is filled up with."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from equivalence.generators.models import Layout
from equivalence.mutants.layout_mutant import LayoutMutant
from production.parallel.sizes import ParallelSizes

DP2 = Layout(sizes=ParallelSizes(), data_size=2)


def _block_of_rows(sound: Any) -> Any:
    del sound

    def take_rank(batch: Any, *, rank: int, size: int) -> Any:
        own = len(batch.sample_mask) // size
        names = [field.name for field in dataclasses.fields(batch)]
        part = {name: getattr(batch, name)[rank * own : (rank + 1) * own] for name in names}
        return dataclasses.replace(batch, **part)

    return take_rank


def _padded_in_shards(sound: Any) -> Any:
    def pad_validation(batch: Any, *, size: int) -> Any:
        padded, count = sound(batch, size=size), len(batch.sample_mask)
        # The row that stands a stride before is the last of the rank that takes this place.
        places = [place if place < count else max(place - size, 0) for place in range(len(padded.sample_mask))]
        names = [field.name for field in dataclasses.fields(batch) if field.name != "sample_mask"]
        return dataclasses.replace(padded, **{name: getattr(padded, name)[places] for name in names})

    return pad_validation


def _filler_weighs(sound: Any) -> Any:
    def pad_validation(batch: Any, *, size: int) -> Any:
        padded = sound(batch, size=size)
        return dataclasses.replace(padded, sample_mask=torch.ones_like(padded.sample_mask))

    return pad_validation


def _first_target_uncounted(sound: Any) -> Any:
    def count_trained(batch: Any) -> torch.Tensor:
        counted: torch.Tensor = sound(dataclasses.replace(batch, token_mask=batch.token_mask[:, 1:]))
        return counted

    return count_trained


def _block_of_bins(sound: Any) -> Any:
    del sound

    def take_rank(bins: list[list[int]], *, rank: int, size: int) -> list[list[int]]:
        own = len(bins) // size
        return bins[rank * own : (rank + 1) * own]

    return take_rank


def _bins_as_they_are(sound: Any) -> Any:
    del sound
    return lambda bins, multiple_of: bins  # noqa: ARG005 - as it is called


def _epochs_alike(sound: Any) -> Any:
    return lambda rows, *, seed, source, epoch: sound(rows, seed=seed, source=source, epoch=0 * epoch)


def _full_steps_only(sound: Any) -> Any:
    def total_steps(order: Any) -> Any:
        steps, settings = sound.fget(order), order.settings
        if steps is None or settings.max_epochs is None or order.samples_per_epoch is None:
            return steps
        return min(steps, settings.max_epochs * order.samples_per_epoch // settings.global_batch_size)

    return property(total_steps)


DEAL_MUTANTS = (
    LayoutMutant(
        name="rows_in_blocks",
        story="a rank takes rows that follow each other instead of every dp-th",
        target="production.rows.batch:take_rank",
        wrong=_block_of_rows,
        first="dp_sharding",
        layout=DP2,
    ),
    LayoutMutant(
        name="validation_padded_in_shards",
        story="a validation batch is filled up after it was dealt, by each rank with its own last row",
        target="production.rows.batch:pad_validation",
        wrong=_padded_in_shards,
        first="dp_sharding",
    ),
    LayoutMutant(
        name="validation_filler_counts",
        story="the rows that fill a validation batch up are counted",
        target="production.rows.batch:pad_validation",
        wrong=_filler_weighs,
        first="dp_sharding",
    ),
    LayoutMutant(
        name="divisor_without_first_target",
        story="the direct path's divisor counts as the online path's does, from the second token on",
        target="production.rows.batch:count_trained",
        wrong=_first_target_uncounted,
        first="dp_sharding",
    ),
    LayoutMutant(
        name="bins_in_blocks",
        story="a rank takes bins that follow each other",
        target="production.online.packing:take_rank",
        wrong=_block_of_bins,
        first="packing",
    ),
    LayoutMutant(
        name="bin_count_not_raised",
        story="the number of bins is not a multiple of dp",
        target="production.online.packing:raise_bin_count",
        wrong=_bins_as_they_are,
        first="packing",
        raises=("PackproofError",),
    ),
    LayoutMutant(
        name="epochs_alike",
        story="the shuffle is seeded without the epoch",
        target="production.training.data.order:shuffled",
        wrong=_epochs_alike,
        first="order",
    ),
    LayoutMutant(
        name="last_step_uncounted",
        story="the step that wraps into one epoch more is no step of the job, which ends before it",
        target="production.training.data.order:Order.total_steps",
        wrong=_full_steps_only,
        first="order",
    ),
)
"""Each is seen on data alone; the first one in training steps as well."""
