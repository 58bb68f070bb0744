"""Read the beginning and the end of each of a job's files once, for everything that is checked before a run.

Nothing is written: no index is built, so that a dry run can read too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from production.errors import BadInput
from production.files.file_state import is_there
from production.files.head import cut_end, first_records
from production.files.manifest import Manifest, check_output, read_manifest
from production.training.config import Dataset, Job

FIRST_ROWS = 32
"""Rows of each file that are read."""
HASHED_BYTES = 1 << 24
"""Bytes of a file that is compared with its manifest as a whole; with `data.verify_files` every file is."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Holds what was read of one file."""

    key: str
    """Dotted configuration key of the file's dataset."""
    dataset: Dataset
    """The dataset."""
    path: str
    """The file, as the configuration names it."""
    rows: tuple[tuple[int, dict[str, Any]], ...]
    """Line number, from 1, and record of the first rows that can be read."""
    manifest: Manifest | None
    """The manifest beside the file; None without one, and where it cannot be read."""
    fault: BadInput | None
    """Why the file cannot be read as the run would read it, or is not its manifest's; None where nothing is seen."""


def read_heads(job: Job) -> list[Head]:
    """Return what can be seen of each file of the job; files that are not there are left out."""
    return [
        _read(job, key, dataset, file.path)
        for key, dataset in datasets(job)
        for file in dict.fromkeys(dataset.data_path)
        if is_there(file.path)
    ]


def datasets(job: Job) -> Iterator[tuple[str, Dataset]]:
    """Yield key and settings of each dataset, those of validation after those of training."""
    for split, several in (("train", job.data.train), ("validation", job.data.validation)):
        for index, dataset in enumerate(several):
            yield job.dataset_key(split, index), dataset


def _read(job: Job, key: str, dataset: Dataset, path: str) -> Head:
    skip = dataset.on_bad_row == "skip"
    rows: list[tuple[int, dict[str, Any]]] = []
    manifest, fault = None, None
    try:
        manifest = read_manifest(Path(path))
        fault = None if skip else cut_end(path, dataset.chat_key)
    except BadInput as error:
        fault = error
    try:
        records = first_records(path, FIRST_ROWS, dataset.chat_key, skip=skip, takes_tool_calls=not dataset.is_packed)
        for record in records:  # those before a fault stay
            rows.append(record)  # noqa: PERF402
        if fault is None and manifest is not None and dataset.is_packed:
            check_output(Path(path), manifest, most_bytes=_UNBOUNDED if job.data.verify_files else HASHED_BYTES)
    except BadInput as error:
        fault = fault or error
    return Head(key=key, dataset=dataset, path=path, rows=tuple(rows), manifest=manifest, fault=fault)


_UNBOUNDED = 1 << 62
