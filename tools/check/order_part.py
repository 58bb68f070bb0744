"""Part `order`: the first and last steps of an epoch, the wrap into the next one and a resume, as the job's sampler deals them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from equivalence.cases.order import OrderCase
from equivalence.checks.input.order import check_order
from production.files.source import open_source
from production.parallel.sizes import ParallelSizes
from production.training.config import Dataset, Job, order_settings, sizes
from production.training.order_settings import OrderSettings
from tools.check.progress import Progress
from tools.check.result import Finding, PartResult
from tools.check.target import Target
from tools.counted import counted

STEPS = 4
"""Steps that are compared at each place."""
MOST_ROWS = 200_000
"""Rows of a source beyond which the reference, which lists an epoch, is asked for a smaller source of the same remainder."""
WITNESSES = ("reference", "production", "megatron_lm's samplers, where they have such an order")


def check_job_order(target: Target, *, progress: Progress) -> PartResult:
    """Compare which row each data-parallel rank gets, on both sides and with the installed samplers."""
    started = time.monotonic()
    job = target.job
    result = PartResult(name="order", witnesses=WITNESSES)
    layout: ParallelSizes = sizes(job)
    settings = order_settings(job, layout.data(target.ranks))
    rows = _rows(job, target, settings)
    smaller = tuple(_smaller(count, settings.global_batch_size) for count in rows)
    if smaller != rows:
        result.not_shown.append(
            f"the order of {', '.join(f'{each:,}' for each in rows)} rows was compared on {', '.join(f'{each:,}' for each in smaller)} rows, "
            "which leave the same remainder in the last batch"
        )
    places = dict(_places(smaller, settings))
    progress.start(f"the order of rows at {len(places)} places")
    for number, (place, consumed) in enumerate(places.items()):
        progress.update(number, len(places), "places")
        found = check_order(_case(smaller, settings, consumed))
        result.compared += STEPS
        result.findings += [
            Finding(
                what=f"{each.left} and {each.right} deal other rows: {each.differences[0].tensor} at {each.differences[0].position} is "
                f"{each.differences[0].left} and {each.differences[0].right}",
                where=f"{place} (after {consumed} steps)",
                fix="report it with the job's data section: order, last_batch, seed and weights",
            )
            for each in found.findings
        ]
    result.status = "differs" if result.findings else "equal"
    result.summary = f"{settings.kind}, last batch {settings.last_batch}: {', '.join(places)} compared on {counted(settings.data_parallel_size, 'data-parallel rank')}"
    if settings.last_batch == "drop" and settings.weights is None and (left := rows[0] % settings.global_batch_size):
        result.notes.append(
            f"{left} of {counted(rows[0], 'row')} {'fills' if left == 1 else 'fill'} no global batch and {'is' if left == 1 else 'are'} never fed (last_batch: drop)"
        )
    result.numbers = {"places": places, "rows": list(rows)}
    result.seconds = time.monotonic() - started
    return result


def _rows(job: Job, target: Target, settings: OrderSettings) -> tuple[int, ...]:
    """Return the rows of each source as the job opens them: every file of a blend for itself, else all as one."""
    training = [each for each in target.datasets if any(key.startswith("data.train") for key in each.keys)]
    if settings.weights is None:
        return (sum(each.fed for each in training),)
    return tuple(_rows_of_file(job, dataset, file.path) for dataset in job.data.train for file in dataset.data_path)


def _rows_of_file(job: Job, dataset: Dataset, path: str) -> int:
    with open_source(
        path, chat_key=dataset.chat_key, on_bad_row=dataset.on_bad_row, cache_folder=job.data.cache_folder
    ) as source:
        return len(source)


def _smaller(rows: int, global_batch_size: int) -> int:
    if rows <= MOST_ROWS:
        return rows
    batches = max(MOST_ROWS // global_batch_size, 2 * STEPS)
    return batches * global_batch_size + rows % global_batch_size


def _places(rows: tuple[int, ...], settings: OrderSettings) -> Iterator[tuple[str, int]]:
    """Yield what is compared, and the steps that are consumed before."""
    whole = settings.run_steps or max(sum(rows) // settings.global_batch_size, 1)
    yield "first steps", 0
    if whole > STEPS:
        yield "a resume in the middle", whole // 2
    # Two steps before the end and as many behind it: the wrap, the dropped rows or the end of the job.
    yield "last steps of the epoch and what follows", max(whole - STEPS // 2, 0)


def _case(rows: tuple[int, ...], settings: OrderSettings, consumed_steps: int) -> OrderCase:
    return OrderCase(rows=rows, steps=STEPS, consumed_steps=consumed_steps, **dataclasses.asdict(settings))
