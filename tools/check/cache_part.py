"""Build the row cache of a job before it starts (`--cache`): every row of training and validation, as the loader's workers
would build and store it.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from production.errors import PackproofError
from production.files.source import PackedSource
from production.parallel.sizes import RankCoordinates
from production.training.config import Job
from production.training.data.batch_stream import BatchStream
from production.training.data.dataset import BadRow, PackedData
from production.training.data.order import Sample
from production.training.data.row_cache import RowCache
from tools.check.progress import Progress
from tools.check.result import CACHE, Finding, PartResult
from tools.check.scan import processes_for
from tools.check.target import Target
from tools.counted import counted
from tools.inspect_rows.scan import runs_of
from tools.ordered_pool import run_in_order

KEY = "data.cache_dir"


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Rows of a run that are refused."""

    refused: Counter[str]
    """Refusals that are stored, by kind."""
    left_out: Counter[str]
    """Rows of which nothing can be stored, such as lines that cannot be read, by kind."""
    unexpected: str = ""
    """The first fault that is neither: of packproof or of the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    """The rows of one source and its cache."""

    data: PackedData
    source: int
    """Number of the source among those of `data`."""
    files: PackedSource
    cache: RowCache

    def build(self, rows_of_run: tuple[int, int]) -> _Outcome:
        """Prepare the rows from the first number to before the second; each that is not stored yet is built and stored."""
        outcome = _Outcome(refused=Counter(), left_out=Counter())
        for rows in itertools.batched(range(*rows_of_run), self.data.group):
            samples = [Sample(source=self.source, row=row, epoch=0) for row in rows]
            for row, found in zip(rows, self.data.prepare(samples), strict=True):
                if not isinstance(found, PackproofError):
                    continue
                kind = found.kind if isinstance(found, BadRow) else "unexpected"
                if kind == "unexpected" and not outcome.unexpected:
                    outcome = dataclasses.replace(outcome, unexpected=str(found))
                (outcome.left_out if self.cache.get(row) is None else outcome.refused)[kind] += 1
        return outcome


@dataclass(kw_only=True)
class _Totals:
    """Outcomes of all runs of one cache."""

    reached: int = 0
    """Rows that were prepared."""
    refused: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    unexpected: str = ""

    def add(self, outcome: _Outcome, reached: int) -> None:
        """Add the outcome of a run that ends before row `reached`."""
        self.reached = reached
        self.refused += outcome.refused
        self.left_out += outcome.left_out
        self.unexpected = self.unexpected or outcome.unexpected


def check_cache_dir(job: Job) -> None:
    """Raise PackproofError for a job that keeps no rows: without `data.cache_dir`, or on the online path."""
    if not job.is_packed:
        raise PackproofError(
            what="--cache must be given for packed rows, and this job takes the online path (chat files), whose rows are not cached",
            where=job.where("data.train"),
            fix="leave --cache out, or pack the file (packproof pack) and check that job",
        )
    if job.data.cache_dir is None:
        raise PackproofError(
            what="must be set for --cache, got null: the job keeps no rows",
            where=job.where(KEY),
            fix="add data.cache_dir=DIR, a folder that the job's nodes can read and write, here and in the job's YAML",
        )


def build_cache(target: Target, *, processes: int | None, deadline: float, progress: Progress) -> PartResult:
    """Build every row that is not stored yet, up to `deadline` (seconds of Python's monotonic clock).

    Rows are prepared and stored by the loader's own code, under the job's own keys; whoever else builds the same rows meanwhile,
    and whatever ends the building, leaves whole rows. Raises PackproofError for what a job refuses at its start.
    """
    started = time.monotonic()
    result = PartResult(name=CACHE, status="cached")
    job = dataclasses.replace(target.job, data=dataclasses.replace(target.job.data, num_workers=0))
    numbers = []
    with BatchStream(job, _one_rank(target)) as stream:
        tasks = list(_tasks(stream))
        before = [task.cache.stored() for task in tasks]
        for task, stored in zip(tasks, before, strict=True):
            names = ", ".join(str(each["file"]) for each in _described(task.files))
            progress.start(f"rows of {names} into the row cache")
            totals = _run(task, processes, deadline, progress)
            numbers.append(_numbers(task, names, stored, totals))
            result.notes += _notes(numbers[-1])
            result.findings += _findings(task, names, totals, target.job)
    if result.findings:
        result.status = "not cached"
    rows, now = (sum(each[name] for each in numbers) for name in ("stored", "stored_now"))
    size = sum(each["bytes"] for each in numbers)
    result.compared = 0
    result.summary = f"{counted(rows, 'row')} stored in {job.data.cache_dir} ({size:,} bytes), {now:,} of them now"
    result.numbers = {"folder": job.data.cache_dir, "caches": numbers}
    result.seconds = time.monotonic() - started
    return result


def _one_rank(target: Target) -> RankCoordinates:
    """Return the place of a rank that would prepare all rows: rows do not depend on the place."""
    return RankCoordinates(
        rank=0, world_size=1, tensor_rank=0, context_rank=0, context_size=target.train.settings.context_parallel_size,
        data_rank=0, data_size=1, pipeline_rank=0, pipeline_size=1,
    )  # fmt: skip


def _tasks(stream: BatchStream) -> Iterator[_Task]:
    """Yield each cache of the job once, however many splits read it."""
    known = set()
    for _, sources, data in stream.packed_data():
        for number, (source, cache) in enumerate(zip(sources, data.caches, strict=True)):
            if cache.path not in known:
                known.add(cache.path)
                yield _Task(data=data, source=number, files=source, cache=cache)


def _run(task: _Task, processes: int | None, deadline: float, progress: Progress) -> _Totals:
    totals, rows = _Totals(), task.cache.rows
    if time.monotonic() > deadline:
        return totals
    runs = run_in_order(task.build, runs_of(task.files, rows), processes_for([task.files], processes))
    for (_, behind), outcome in runs:
        totals.add(outcome, behind)
        progress.update(behind, rows, "rows")
        if time.monotonic() > deadline:
            break
    return totals


def _described(source: PackedSource) -> Sequence[dict[str, Any]]:
    files: Any = source.describe()["files"]
    return list(files)


def _numbers(task: _Task, names: str, stored_before: int, totals: _Totals) -> dict[str, Any]:
    cache = task.cache
    return {
        "files": names,
        "folder": str(cache.path),
        "rows": cache.rows,
        "stored": (stored := cache.stored()),
        "stored_now": stored - stored_before,
        "bytes": cache.size_bytes(),
        "refused": dict(totals.refused),
        "left_out": dict(totals.left_out),
    }


def _notes(numbers: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{numbers['files']}: {numbers['stored']:,} of {counted(numbers['rows'], 'row')} stored, {numbers['bytes']:,} bytes in {numbers['folder']}"
    )
    for name, what in (("refused", "stored as refused"), ("left_out", "refused before they are built, and not stored")):
        if numbers[name]:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(numbers[name].items()))
            yield f"{numbers['files']}: {counted(sum(numbers[name].values()), 'row')} {what}: {kinds}"


def _findings(task: _Task, names: str, totals: _Totals, job: Job) -> Iterator[Finding]:
    """Yield each reason why the job would build rows itself."""
    cache = task.cache
    if totals.unexpected:
        yield Finding(what=f"a row was not built: {totals.unexpected}", where=names)
    if totals.reached < cache.rows:
        yield Finding(
            what=f"{totals.reached:,} of {counted(cache.rows, 'row')} were reached before the budget was spent",
            where=names,
            fix="run the check again, which builds only the rows that are not stored, or give a longer --budget",
        )
        return
    missing = cache.rows - cache.stored() - totals.left_out.total()
    if missing > 0:
        yield Finding(
            what=f"{counted(missing, 'row')} found no room, and the job would build them each time",
            where=f"{job.where(KEY)} {job.data.cache_dir}",
            fix=f"raise data.cache_limit_gb (now {job.data.cache_limit_gb:g}), free some disk, or name another folder",
        )
