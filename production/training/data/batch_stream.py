"""Feed a job's ranks: turn files into the microbatches of each step, on the direct path and on the online path."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from production.errors import PackproofError
from production.files.source import Location, PackedSource, SkippedRow, open_source
from production.online.bins import Padding
from production.online.chat import ChatTokenizer
from production.online.padded_batch import PaddedBatch
from production.parallel.sizes import RankCoordinates
from production.rows.batch import Batch
from production.rows.builder import RowSettings
from production.rows.guards import BatchSettings
from production.training.config import (
    Dataset,
    Job,
    chat_settings,
    multi_token_depths,
    order_settings,
    row_settings,
)
from production.training.data.dataset import ConversationBatch, ConversationData, PackedData, Recipe, row_facts
from production.training.data.fingerprint import described, fed_identity
from production.training.data.first_rows import check_first_rows
from production.training.data.loader import Loader, LoaderSettings, Prepared
from production.training.data.online_bins import bin_settings, pack_bins
from production.training.data.order import Order, Sample, ValidationOrder
from production.training.data.row_cache import RowCache
from production.training.data.token_fit import message_keys
from production.training.data.tokenizer import load_tokenizer
from production.training.metrics.token_counts import RowCounts
from production.training.step import split_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """Holds one step of one data-parallel rank, on the host."""

    microbatches: list[Batch | PaddedBatch]
    """Rows of the direct path, bins of the online one."""
    padding: Padding | None
    """Padding of the online path in this step; None on the direct path."""
    counts: RowCounts
    """Token counts of this rank's rows."""
    conversations_masked_out: int
    """Conversations of the whole global batch that were too long (R-ONLINE-8); 0 on the direct path."""
    samples: tuple[Sample, ...]
    """This rank's rows; online, all conversations of the global batch."""
    consumed_samples: int
    """Samples that the whole job has consumed after this step."""
    wait_seconds: float
    """Seconds spent waiting for the loader."""


class BatchStream:
    """Stream training steps and validations of a job on one rank.

    Context manager. Enter it before building the model, because loader workers are forked; leaving it stops the
    workers.
    """

    def __init__(self, job: Job, place: RankCoordinates, *, consumed_samples: int = 0) -> None:
        """Open the files, the tokenizer and the loaders. Raises PackproofError for files that cannot be fed."""
        self._job, self._place = job, place
        self._caches: dict[str, RowCache] = {}
        self.skipped_in_validation: list[SkippedRow] = []
        """Rows that the last validation skipped; `skipped` has those of training."""
        self.tokenizer = load_tokenizer(job)
        found = check_first_rows(job, self.tokenizer)
        for refusal in found.refusals:
            raise refusal
        self.notes = found.notes
        self.token_notes = found.token_notes
        """Notes on the tokens of all rows, whatever the rows hold (docs/spec-tokens.md)."""
        self._train = train = _as_one(job)
        self.sources = _open(job, train, apart=any(file.weight is not None for file in train.data_path))
        self._rows = row_settings(job, train)
        self._bins = bin_settings(job, place.data_size, tokenizer=self.tokenizer)
        self._order_settings = order_settings(job, place.data_size)
        _check_enough(job, [len(source) for source in self.sources])
        self.order = Order([len(source) for source in self.sources], self._order_settings)
        self._loader: Loader[Any, Any] = Loader(
            self._recipe(train, self.sources),
            self.order,
            share=(place.data_rank, place.data_size) if job.is_packed else None,
            settings=self._loader_settings(job.policy.train_global_batch_size),
            consumed_samples=consumed_samples,
        )
        self.notes += map(_stored, self._caches.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the loader's workers, and let go of the row caches."""
        self._loader.close()
        for cache in self._caches.values():
            cache.close()

    @property
    def total_steps(self) -> int | None:
        """Return the steps until `max_num_epochs` are done; None without an end."""
        return self.order.total_steps

    @property
    def left_over(self) -> int:
        """Return the rows left over where the job stops because no global batch is full (`last_batch: stop`,
        R-ORDER-3), else 0.
        """
        return self.order.dropped_per_epoch if self._order_settings.last_batch == "stop" else 0

    def identity(self) -> dict[str, Any]:
        """Return everything that decides what each rank is fed, with the layout; a resume is compared with it
        (R-ORDER-8).
        """
        files, data = described(self.sources), self._place.data_size
        return fed_identity(self._job, files, tokenizer=self.tokenizer, data_parallel_size=data)

    def provenance(self) -> dict[str, Any]:
        """Return plain values from which the same rows are rebuilt from the same files; `batch_dump` keeps them
        beside the batches.
        """
        job, dataset = self._job, self._job.data.train[0]
        is_own_template = job.policy.tokenizer.chat_template not in {None, "default"}
        return {
            "tokenizer": job.policy.tokenizer.name,
            "chat_template": self.tokenizer.chat_template if is_own_template else None,
            "chat_key": dataset.chat_key,
            "rows": dataclasses.asdict(self._rows) | {"semantics": dataset.semantics},
            "bins": None if job.is_packed else dataclasses.asdict(self._bins),
            "chat": None
            if job.is_packed
            else dataclasses.asdict(chat_settings(job, dataset)) | {"tool_key": dataset.tool_key},
        }

    @property
    def skipped(self) -> list[SkippedRow]:
        """Return the lines of the training files that `on_bad_row: skip` leaves out."""
        return [row for source in self.sources for row in source.skipped]

    def locate(self, sample: Sample) -> Location:
        """Return the location of a sample's row."""
        return self.sources[sample.source].locate(sample.row)

    def steps(self) -> Iterator[StepBatch]:
        """Yield one step after the other, from the job's position to the end of its epochs."""
        for prepared in self._loader:
            yield self._step_batch(prepared)

    def rebuild_step(self, consumed_samples: int) -> StepBatch:
        """Build the step after the given number of samples again: the batches of a step are not kept."""
        dataset = self._job.data.train[0]
        settings = dataclasses.replace(self._loader_settings(self._job.policy.train_global_batch_size), workers=0)
        share = (self._place.data_rank, self._place.data_size) if self._job.is_packed else None
        recipe = self._recipe(dataset, self.sources)
        # An order of its own: the other one is planned ahead with, by a thread that does not end meanwhile.
        order = Order(self.order.rows, self._order_settings)
        with Loader(recipe, order, share=share, settings=settings, consumed_samples=consumed_samples) as loader:
            return self._step_batch(next(loader))

    def validation(self) -> Iterator[StepBatch]:
        """Yield the global batches of one validation, the same each time."""
        job = self._job
        self.skipped_in_validation = []
        for dataset in job.data.validation:
            sources = _open(job, dataset, apart=False)
            self.skipped_in_validation += [row for source in sources for row in source.skipped]
            rows = sum(map(len, sources))
            size = job.sft.val_global_batch_size or job.policy.train_global_batch_size
            wanted = None if job.sft.val_batches is None else job.sft.val_batches * size
            order = ValidationOrder(
                rows=rows,
                global_batch_size=size,
                data_parallel_size=self._place.data_size,
                limit=None if wanted is None or wanted >= rows else wanted,
            )
            share = (self._place.data_rank, self._place.data_size) if job.is_packed else None
            settings = dataclasses.replace(self._loader_settings(size), workers=0)
            with Loader(self._recipe(dataset, sources), order, share=share, settings=settings) as loader:
                for prepared in loader:
                    yield self._step_batch(prepared)

    def packed_data(self) -> Iterator[tuple[Dataset, Sequence[PackedSource], PackedData]]:
        """Yield the packed rows of training, then of each validation, with their files, prepared as by the loader's workers.

        The rows are not prepared yet. With `data.cache_dir` their row caches are those of the job, and preparing a row stores it.
        """
        job = self._job
        splits = [(self._train, self.sources), *((each, _open(job, each, apart=False)) for each in job.data.validation)]
        for dataset, sources in splits:
            recipe = self._recipe(dataset, sources)
            if isinstance(recipe, PackedData):
                yield dataset, sources, recipe

    def _recipe(self, dataset: Dataset, sources: Sequence[PackedSource]) -> Recipe[Any, Any]:
        job, settings = self._job, row_settings(self._job, dataset)
        if not dataset.is_packed:
            chat = ChatTokenizer(tokenizer=self.tokenizer, settings=chat_settings(job, dataset))
            return ConversationData(
                sources=sources,
                tokenize=lambda line: chat.tokenize([line])[0],
                tokenize_many=chat.tokenize,
                tool_key=dataset.tool_key,
                keys=message_keys(dataset, settings, self.tokenizer),
            )
        from production.rows.builder import RowBuilder  # noqa: PLC0415 - only here is its pad id asked for

        pad = RowBuilder(tokenizer=self.tokenizer, settings=settings).pad_token_id
        guards = BatchSettings(
            context_parallel_size=self._place.context_size,
            data_parallel_size=self._place.data_size,
            global_batch_size=job.policy.train_global_batch_size,
            multi_token_prediction=multi_token_depths(job) > 0,
            pad_token_id=pad,
        )
        return PackedData(
            sources=sources,
            tokenizer=self.tokenizer,
            settings=settings,
            guards=guards,
            keys=message_keys(dataset, settings, self.tokenizer),
            caches=self._caches_of(dataset, settings, sources),
        )

    def _caches_of(
        self, dataset: Dataset, settings: RowSettings, sources: Sequence[PackedSource]
    ) -> tuple[RowCache, ...]:
        """Return the row cache of each source, opened once; none without `data.cache_dir`."""
        data = self._job.data
        if data.cache_dir is None:
            return ()
        found = []
        for source in sources:
            facts = row_facts(source, self.tokenizer, settings, ignored=dataset.ignore_keys)
            key = json.dumps(facts, sort_keys=True)
            if key not in self._caches:
                self._caches[key] = RowCache(
                    Path(data.cache_dir), facts=facts, rows=len(source), limit_bytes=int(data.cache_limit_gb * 1e9)
                )
            found.append(self._caches[key])
        return tuple(found)

    def _loader_settings(self, global_batch_size: int) -> LoaderSettings:
        """Return the loader's settings: `data.prefetch` counts microbatches, the loader counts global batches."""
        share = max(1, global_batch_size // self._place.data_size)
        return LoaderSettings(
            workers=self._job.data.num_workers,
            prefetch=max(1, -(-self._job.data.prefetch // share)),
            pin_memory=torch.cuda.is_available() and self._job.cluster.device != "cpu",
        )

    def _step_batch(self, prepared: Prepared[Batch | ConversationBatch]) -> StepBatch:
        batch, counts, padding, masked_out = prepared.batch, prepared.counts, None, 0
        microbatches: list[Batch | PaddedBatch]
        if isinstance(batch, Batch):
            microbatches = [*split_rows(batch)]
        else:
            own = pack_bins(batch, self._bins, data_rank=self._place.data_rank)
            microbatches, padding, counts = [*own.padded_batches], own.padding, own.counts
            masked_out = batch.masked_out
        return StepBatch(
            microbatches=microbatches,
            padding=padding,
            counts=counts,
            conversations_masked_out=masked_out,
            samples=prepared.samples,
            consumed_samples=prepared.consumed_samples,
            wait_seconds=prepared.wait_seconds,
        )


def _check_enough(job: Job, rows: Sequence[int]) -> None:
    """Refuse files of fewer rows than one global batch, unless the next epoch fills the batch."""
    size = job.policy.train_global_batch_size
    if job.data.last_batch == "wrap" or len(rows) != 1 or rows[0] >= size:
        return
    paths = [file.path for dataset in job.data.train for file in dataset.data_path]
    unit = "rows" if job.is_packed else "conversations"
    raise PackproofError(
        what=f"the data must hold at least {size} {unit}, one global batch ({job.where('policy.train_global_batch_size')}; "
        f"{job.where('data.last_batch')}: {job.data.last_batch}), got {rows[0]}",
        where=f"data.train.data_path: {', '.join(paths)}",
        fix=f"give more {unit}, set policy.train_global_batch_size to {rows[0]} or less, or data.last_batch to wrap",
    )


def _as_one(job: Job) -> Dataset:
    """Join the training datasets end to end. Raises PackproofError where their lines are not read alike."""
    first, *others = job.data.train
    for number, other in enumerate(others, 1):
        if dataclasses.replace(other, data_path=first.data_path) != first:
            raise PackproofError(
                what="every training dataset must have the settings of the first (chat_key, on_bad_row and so on), and this one has others",
                where=f"data.train[{number}]",
                fix="give all training datasets the same settings, as one dataset of several files",
            )
    return dataclasses.replace(first, data_path=tuple(file for each in job.data.train for file in each.data_path))


def _stored(cache: RowCache) -> str:
    return f"row cache {cache.path}: {cache.stored():,} of {cache.rows:,} rows are stored"


def _open(job: Job, dataset: Dataset, *, apart: bool) -> list[PackedSource]:
    paths = [file.path for file in dataset.data_path]
    groups = [[path] for path in paths] if apart else [paths]
    sources = [
        open_source(
            group,
            chat_key=dataset.chat_key,
            on_bad_row=dataset.on_bad_row,
            cache_folder=job.data.cache_folder,
            verify=job.data.verify_files,
            takes_tool_calls=not dataset.is_packed,
        )
        for group in groups
    ]
    if dataset.is_packed:
        for source in sources:
            source.check_manifests()
    return sources
