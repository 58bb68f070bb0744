"""Open what a job is checked with: its tokenizer, and each packed dataset once, however many splits name it."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence.subjects.protocol import RowSettings
from equivalence.subjects.tokenizers import load_folder
from production.errors import PackproofError
from production.files.source import PackedSource, open_source
from production.rows import builder
from production.tokens.message_keys import MessageKeys
from production.training.config import Dataset, Job, row_settings
from production.training.data.token_fit import message_keys
from production.training.data.tokenizer import load_tokenizer, vocabulary_size


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckedDataset:
    """One packed dataset of the job."""

    keys: tuple[str, ...]
    """Dotted keys of the splits that read these rows alike, such as `data.train`."""
    dataset: Dataset
    source: PackedSource
    """Every line is a row here, also those that the job skips: rows are numbered as an inspection numbers them."""
    fed: int
    """Rows that the job itself counts: fewer where it skips lines that cannot be read."""
    settings: builder.RowSettings
    """Production's settings of its rows."""
    subject_settings: RowSettings
    """The same for subjects of the comparison."""
    message_keys: MessageKeys
    """Checks on keys of messages that no row honours."""

    @property
    def names(self) -> str:
        """Return the files, as the job names them."""
        return ", ".join(file.path for file in self.dataset.data_path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A job that can be opened."""

    job: Job
    ranks: int
    tokenizer: Any
    """The job's transformers tokenizer; it lies in a folder, since Megatron-LM reads one."""
    datasets: tuple[CheckedDataset, ...]
    """Training rows first."""
    vocabulary: int
    """Rows of the embedding: an id from here on cannot be fed."""

    @property
    def train(self) -> CheckedDataset:
        """Return the training rows."""
        return self.datasets[0]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of tokenizers with a template of their own; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="packproof-check-tokenizer-")


def open_target(job: Job, ranks: int) -> Target:
    """Open tokenizer and files of a packed job. Raises PackproofError for one that cannot be opened."""
    if not job.is_packed:
        raise PackproofError(
            what="the job must train on packed rows, which a check compares, and it takes the online path (chat files)",
            where=job.where("data.train"),
            fix="pack the file (packproof pack) and check that job, or run packproof equivalence, whose checks cover the online path",
        )
    tokenizer = load_tokenizer(job)
    if job.policy.tokenizer.chat_template is not None:
        # Megatron-LM reads a folder, which must have the job's template.
        folder = tempfile.mkdtemp(dir=_folder().name)
        tokenizer.save_pretrained(folder)
        tokenizer = load_folder(Path(folder))
    return Target(
        job=job,
        ranks=ranks,
        tokenizer=tokenizer,
        datasets=tuple(_datasets(job, tokenizer)),
        vocabulary=vocabulary_size(job, tokenizer),
    )


def _datasets(job: Job, tokenizer: Any) -> Sequence[CheckedDataset]:
    found: dict[Dataset, list[str]] = {}
    for split, datasets in (("train", job.data.train), ("validation", job.data.validation)):
        for index, dataset in enumerate(datasets):
            alike = dataclasses.replace(
                dataset, data_path=tuple(dataclasses.replace(each, weight=None) for each in dataset.data_path)
            )
            if dataset.is_packed:
                found.setdefault(alike, []).append(job.dataset_key(split, index))
    opened = []
    for dataset, keys in found.items():
        settings = row_settings(job, dataset)
        opened.append(
            CheckedDataset(
                keys=tuple(keys),
                dataset=dataset,
                source=open_source(
                    [file.path for file in dataset.data_path],
                    chat_key=dataset.chat_key,
                    cache_folder=job.data.cache_folder,
                ),
                fed=_rows_fed(job, dataset),
                settings=settings,
                subject_settings=RowSettings(
                    pack_length=settings.pack_length,
                    prompt_format=settings.prompt_format,
                    context_parallel_size=settings.context_parallel_size,
                    semantics=dataset.semantics,
                    pad_token=settings.pad_token,
                    assistant_prefix_len=settings.assistant_prefix_len,
                ),
                message_keys=message_keys(dataset, settings, tokenizer),
            )
        )
    return opened


def _rows_fed(job: Job, dataset: Dataset) -> int:
    with open_source(
        [file.path for file in dataset.data_path],
        chat_key=dataset.chat_key,
        on_bad_row=dataset.on_bad_row,
        cache_folder=job.data.cache_folder,
    ) as source:
        return len(source)
