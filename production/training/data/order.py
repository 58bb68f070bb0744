"""Decide which row comes when (docs/SPEC.md#order): `consumed_samples` alone gives the next row, on every rank alike and
without a message.

A shuffled epoch costs 8 bytes and 0.2 µs a row when the epoch begins; a cyclic run costs 8 bytes a sample of the
whole run; a blend is replayed from its start at a resume, 0.4 µs a sample.

Reference: `reference/order.py`, R-ORDER-1 to 7.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from production.errors import PackproofError
from production.training.order_settings import OrderSettings, order_refused

_WORD = (1 << 64) - 1


class Sample(NamedTuple):
    """Names one row of one epoch of one source."""

    source: int
    """Source, 0-based, in the order given."""
    row: int
    """0-based row of that source."""
    epoch: int
    """Epoch, 0-based: how often the source was completed before."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """Holds the samples of one step, of all data-parallel ranks."""

    step: int
    """0-based."""
    samples: tuple[Sample, ...]
    """Samples in order; their number is a multiple of dp."""
    weights: tuple[float, ...]
    """The sample mask: 0.0 for a row that only fills a validation batch (R-BATCH-4)."""
    consumed_samples: int
    """Samples consumed after this step, including earlier steps."""

    def of_rank(self, rank: int, size: int) -> tuple[tuple[Sample, ...], tuple[float, ...]]:
        """Return samples and weights of data-parallel rank `rank` of `size`, one microbatch each (R-BATCH-3).

        Raises PackproofError where `size` does not divide them.
        """
        if not 0 <= rank < size or len(self.samples) % size:
            raise PackproofError(
                what=f"must be from 0 to {size - 1} for {size} ranks that divide the {len(self.samples)} samples, got {rank}",
                where="data-parallel rank",
                fix="give a rank from 0 to dp - 1 and a global batch that dp divides",
            )
        return self.samples[rank::size], self.weights[rank::size]


class Order:
    """Orders the samples of every step of a job. Use it from one thread."""

    def __init__(self, rows: Sequence[int], settings: OrderSettings) -> None:
        """Order sources of `rows` rows each. Raises PackproofError where the settings do not fit the rows."""
        self.settings = settings
        self.rows = tuple(rows)
        _check_rows(self.rows, settings)
        self.samples_per_epoch = self._samples_per_epoch()
        """Samples of an epoch; None for a blend."""
        self.dropped_per_epoch = 0 if self.samples_per_epoch is None else self.rows[0] - self.samples_per_epoch
        """Rows of an epoch that are never fed."""
        self.total_samples = self._total_samples()
        """Samples until `max_epochs` or `run_steps` are done, or until `stop` ends the job; None without an end."""
        self._permutations: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._run = self._permute_run() if settings.run_steps is not None else None
        self._blend = None if settings.weights is None else _Blend(settings.weights)
        self._last: GlobalBatch | None = None  # a blend that is asked for it again would begin from its start

    @property
    def total_steps(self) -> int | None:
        """Return the global batches until `max_epochs` or `run_steps` are done; None without an end."""
        return None if self.total_samples is None else self.total_samples // self.settings.global_batch_size

    def batch_at(self, consumed_samples: int) -> GlobalBatch | None:
        """Return the global batch that comes after the given number of samples; None at the end.

        Raises PackproofError inside a global batch (R-ORDER-2).
        """
        size = self.settings.global_batch_size
        if consumed_samples < 0 or consumed_samples % size:
            what = f"must be a multiple of the global batch size, {size}, got {consumed_samples}"
            raise order_refused(what, "consumed_samples", "resume with the global batch size that the run had")
        if self.total_samples is not None and consumed_samples >= self.total_samples:
            return None
        end = consumed_samples + size
        if self._last is None or self._last.consumed_samples != end:
            found = self._blended(consumed_samples) if self._blend else self._of_source(consumed_samples, end)
            self._last = GlobalBatch(
                step=consumed_samples // size, samples=tuple(found), weights=(1.0,) * size, consumed_samples=end
            )
        return self._last

    def _samples_per_epoch(self) -> int | None:
        if self.settings.weights is not None:
            return None
        rows, settings = self.rows[0], self.settings
        return rows if settings.last_batch == "wrap" else rows - rows % settings.global_batch_size

    def _total_samples(self) -> int | None:
        if self.settings.run_steps is not None:
            return self.settings.run_steps * self.settings.global_batch_size
        if self.settings.last_batch == "stop" and self.dropped_per_epoch:
            return self.samples_per_epoch
        if self.settings.max_epochs is None or self.samples_per_epoch is None:
            return None
        samples, size = self.settings.max_epochs * self.samples_per_epoch, self.settings.global_batch_size
        return samples + -samples % size

    def _of_source(self, start: int, end: int) -> Iterator[Sample]:
        assert self.samples_per_epoch is not None
        for number in range(start, end):
            drawn = number if self._run is None else int(self._run[number])
            epoch, place = divmod(drawn, self.samples_per_epoch)
            yield Sample(0, self._row(0, epoch, place), epoch)

    def _blended(self, start: int) -> Iterator[Sample]:
        assert self._blend is not None
        for source, number in self._blend.take(start, self.settings.global_batch_size):
            epoch, place = divmod(number, self.rows[source])
            yield Sample(source, self._row(source, epoch, place), epoch)

    def _row(self, source: int, epoch: int, place: int) -> int:
        if self.settings.kind != "shuffle":
            return place
        if (permutation := self._permutations.get((source, epoch))) is None:
            # A global batch may reach into the next epoch: the last one is kept beside it.
            kept = [key for key in self._permutations if key[0] == source and key[1] != epoch - 1]
            for key in kept:
                del self._permutations[key]
            permutation = self._permutations[source, epoch] = self._permute(source, epoch)
        return int(permutation[place])

    def _permute(self, source: int, epoch: int) -> NDArray[np.int64]:
        assert self.settings.seed is not None
        return shuffled(self.rows[source], seed=self.settings.seed, source=source, epoch=epoch)

    def _permute_run(self) -> NDArray[np.int64]:
        """Return the numbers of all samples of a cyclic run in the order in which they are drawn (R-ORDER-5)."""
        assert self.total_samples is not None
        if self.settings.kind == "megatron-cyclic":
            return _torch_permutation(self.total_samples)
        ranks = self.settings.data_parallel_size
        share = self.total_samples // ranks
        # Rank r draws from its own run of samples; its t-th one is sample t·dp + r of all ranks.
        return (_torch_permutation(share)[:, None] + np.arange(ranks) * share).reshape(-1)


class ValidationOrder:
    """Orders the rows of a validation, the same each time: the first rows in order, the last batch filled up for dp
    (R-BATCH-4).
    """

    def __init__(self, *, rows: int, global_batch_size: int, data_parallel_size: int, limit: int | None = None) -> None:
        """Order the first `limit` of `rows` rows, or all. Raises PackproofError where there are fewer."""
        sizes = {"rows": rows, "global_batch_size": global_batch_size, "data_parallel_size": data_parallel_size}
        for name, size in (sizes | ({} if limit is None else {"limit": limit})).items():
            if size < 1:
                raise order_refused(f"must be at least 1, got {size}", f"validation {name}", "give at least 1")
        if limit is not None and limit > rows:
            what = f"must be at most the {rows} rows of the source, got {limit}: validation takes no row twice"
            raise order_refused(what, "validation limit", "lower it, or leave it out for all rows")
        if global_batch_size % data_parallel_size:
            what = f"must be a multiple of data_parallel_size, {data_parallel_size}, got {global_batch_size}"
            raise order_refused(what, "validation global_batch_size", "make it a multiple of data_parallel_size")
        self.total_samples = rows if limit is None else limit
        self._size, self._ranks = global_batch_size, data_parallel_size

    @property
    def total_steps(self) -> int:
        """Return the number of global batches of the validation."""
        return -(-self.total_samples // self._size)

    def batch_at(self, consumed_samples: int) -> GlobalBatch | None:
        """Return the global batch that comes after the given number of samples; None at the end (R-ORDER-7)."""
        if consumed_samples >= self.total_samples:
            return None
        end = min(consumed_samples + self._size, self.total_samples)
        rows = list(range(consumed_samples, end))
        missing = -len(rows) % self._ranks
        return GlobalBatch(
            step=consumed_samples // self._size,
            samples=tuple(Sample(0, row, 0) for row in rows + rows[-1:] * missing),
            weights=(1.0,) * len(rows) + (0.0,) * missing,
            consumed_samples=end,
        )


def shuffled(rows: int, *, seed: int, source: int, epoch: int) -> NDArray[np.int64]:
    """Return the rows of one epoch in the order `shuffle`, [rows] int64 (R-ORDER-4); no library's generator is used,
    so the order never changes.
    """
    base = _mixed(_mixed(_mixed(seed) ^ source) ^ epoch)
    keys = np.arange(rows, dtype=np.uint64) ^ np.uint64(base)
    keys += np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys)  # mixing is one to one, so no two are equal


class _Blend:
    """Maps a blend's sample index to (source, index within that source)."""

    def __init__(self, weights: tuple[float, ...]) -> None:
        given = np.array(weights, dtype=np.float64)
        self._weights: list[float] = (given / np.sum(given)).tolist()  # as megatron.core.datasets.utils.normalize
        self._counts = [0] * len(weights)
        self._next = 0

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return source and index within the source of samples `start` to before `start + count`."""
        if start < self._next:
            self._counts, self._next = [0] * len(self._weights), 0
        for _ in itertools.islice(self._draw(), start - self._next):
            pass
        return list(itertools.islice(self._draw(), count))

    def _draw(self) -> Iterator[tuple[int, int]]:
        weights, counts = self._weights, self._counts
        others = range(1, len(weights))
        while True:
            number = max(self._next, 1)
            chosen, most = 0, weights[0] * number - counts[0]
            for source in others:
                error = weights[source] * number - counts[source]
                if error > most:
                    chosen, most = source, error
            taken = counts[chosen]
            counts[chosen] += 1
            self._next += 1
            yield chosen, taken


def _check_rows(rows: tuple[int, ...], settings: OrderSettings) -> None:
    weights = settings.weights
    if len(rows) != (1 if weights is None else len(weights)):
        have = "one source without weights" if weights is None else f"{len(weights)} sources, one for each weight"
        fix = "give one weight for each source, or open the files end to end as one source"
        raise order_refused(f"there must be {have}, got {len(rows)} sources", "weights", fix)
    if min(rows) < 1:
        raise order_refused(
            f"must have at least one row, got {min(rows)}", f"source {rows.index(min(rows))}", "leave the source out"
        )
    size = settings.global_batch_size
    if settings.last_batch != "wrap" and rows[0] < size:
        what = f"a source needs at least {size} rows, one global batch, got {rows[0]}"
        raise order_refused(what, "last_batch", "set it to wrap, or lower global_batch_size")


def _mixed(value: int) -> int:
    """Return SplitMix64 of one word."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _torch_permutation(count: int) -> NDArray[np.int64]:
    """Return what Megatron-LM's random sampler draws in its first pass, which is as long as the run."""
    permutation: NDArray[np.int64] = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
    return permutation
