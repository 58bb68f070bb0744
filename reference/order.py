"""Say in plain code which row comes when: epochs, shuffling, cyclic runs, blends and the last batch (docs/SPEC.md#order)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

Sample = tuple[int, int, int]
"""Source, row within the source and epoch of the source, all counted from 0."""

MOST_SOURCES = 7
"""Largest number of weights that numpy adds from left to right; numpy adds more weights in another order."""


class OrderError(ValueError):
    """Error for an order that is impossible; names the reason and the fix."""


def epoch_rows(rows: int, *, kind: str, seed: int | None, source: int, epoch: int) -> list[int]:
    """Return the rows of one epoch of one source, in order. R-ORDER-1, R-ORDER-4."""
    if kind == "sequential":
        return list(range(rows))
    if kind == "shuffle" and seed is not None:
        return sorted(range(rows), key=lambda row: mix(mix(mix(mix(seed) ^ source) ^ epoch) ^ row))
    raise OrderError(f"order must be sequential, or shuffle with a seed, got {kind!r} with the seed {seed}")


def mix(value: int) -> int:
    """Return SplitMix64 of a 64-bit word; the mapping is one to one, so no two rows share a key. R-ORDER-4."""
    word = 2**64
    value = (value + 0x9E3779B97F4A7C15) % word
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % word
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % word
    return value ^ (value >> 31)


def one_source(
    rows: int,
    *,
    kind: str,
    seed: int | None,
    global_batch_size: int,
    last_batch: str,
    max_epochs: int | None = None,
    source: int = 0,
) -> Iterator[Sample]:
    """Sample after sample, epoch after epoch. R-ORDER-1, R-ORDER-3, R-ORDER-4."""
    if last_batch != "wrap" and rows < global_batch_size:
        raise OrderError(
            f"a source needs at least {global_batch_size} rows, one global batch, got {rows}; set wrap, or lower global_batch_size"
        )
    given = 0
    for epoch in itertools.count():
        is_over = max_epochs is not None and epoch >= max_epochs
        for place, row in enumerate(epoch_rows(rows, kind=kind, seed=seed, source=source, epoch=epoch)):
            if is_over and given % global_batch_size == 0:
                return  # the last batch is full
            if last_batch != "wrap" and place >= rows // global_batch_size * global_batch_size:
                if last_batch == "stop":
                    return
                break
            yield source, row, epoch
            given += 1


def cyclic(rows: int, *, run_samples: int, data_parallel_size: int, is_sharded: bool) -> Iterator[Sample]:
    """Yield the samples of a whole run in one permutation of its `run_samples` numbers, as Megatron-LM's driver draws them. R-ORDER-5.

    Sample i is row i % rows of epoch i // rows, so epochs mix. If `is_sharded`, all ranks apply one permutation,
    each to its own run of samples.
    """
    if run_samples % data_parallel_size:
        raise OrderError(
            f"the samples of a run must be a multiple of the {data_parallel_size} data-parallel ranks, got {run_samples}; give a global batch that dp divides"
        )
    share = run_samples // data_parallel_size if is_sharded else run_samples
    for number in torch.randperm(share, generator=torch.Generator().manual_seed(0)).tolist():
        # Sharded, the ranks draw alike, each from its own run of samples.
        for first in range(0, run_samples, share):
            epoch, row = divmod(first + number, rows)
            yield 0, row, epoch


def blend(rows: Sequence[int], weights: Sequence[float], *, kind: str, seed: int | None) -> Iterator[Sample]:
    """Yield samples of the sources, each from the source that lags furthest behind its weight. R-ORDER-6."""
    if len(weights) > MOST_SOURCES:
        raise OrderError(
            f"a blend must have at most {MOST_SOURCES} sources, up to which numpy adds the weights in their order, got {len(weights)}"
        )
    total = 0.0
    for weight in weights:  # not sum(), which rounds otherwise
        total += weight
    streams = [
        one_source(count, kind=kind, seed=seed, global_batch_size=1, last_batch="wrap", source=source)
        for source, count in enumerate(rows)
    ]
    taken = [0] * len(rows)
    for number in itertools.count():
        lags = [weight / total * max(number, 1) - count for weight, count in zip(weights, taken, strict=True)]
        source = lags.index(max(lags))  # of equal ones the first
        taken[source] += 1
        yield next(streams[source])


def global_batches(samples: Iterator[Sample], global_batch_size: int, consumed_samples: int) -> Iterator[list[Sample]]:
    """Yield the global batches that come after `consumed` samples. R-ORDER-2."""
    if consumed_samples % global_batch_size:
        raise OrderError(
            f"consumed_samples must be a multiple of {global_batch_size}, the global batch size, got {consumed_samples}"
        )
    rest = itertools.islice(samples, consumed_samples, None)
    while batch := list(itertools.islice(rest, global_batch_size)):
        yield batch
