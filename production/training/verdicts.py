"""Build the errors and notes of a run whose data or losses make it end, each with a fix."""

from __future__ import annotations

from collections.abc import Sequence

from production.errors import PackproofError
from production.files.source import SkippedRow
from production.training.config import Job
from production.training.metrics.step_numbers import StepNumbers


class NotFinite(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A loss or a gradient norm is NaN or infinite; the batch of that step was dumped."""


class NothingTrained(PackproofError):  # noqa: N818 - reads as the verdict it is
    """Every target of the run is masked: its losses would measure nothing, and its weights would only decay."""


def not_finite(numbers: StepNumbers, fed: str) -> NotFinite:
    """Return the error for a step whose loss or gradient norm is not finite; `fed` says where the step's batch was
    dumped.
    """
    loss = "no loss" if numbers.loss is None else f"loss {numbers.loss}"
    return NotFinite(
        what=f"loss and gradient norm must be finite, got {loss}, gradient norm {numbers.gradient_norm}",
        where=f"step {numbers.step}, {fed}",
        fix="compare those rows with the reference's (packproof-diff-row --fed with that folder), lower the learning rate, or "
        "leave the rows out; the newest checkpoint is from an earlier step",
    )


def nothing_trained(job: Job, steps: int, consumed_samples: int) -> NothingTrained:
    """Return the error for a run in which no step trained a token."""
    return NothingTrained(
        what=f"no token was trained in any of {steps} steps: every target of their {consumed_samples} "
        f"{'rows' if job.is_packed else 'conversations'} is masked",
        where=job.where(f"{job.dataset_key('train', 0)}.data_path"),
        fix="look at a row (packproof-diff-row) and at its trained tokens: give the prompt format, chat key and assistant prefix "
        "that the file was written for, or another file",
    )


def left_out(split: str, rows: Sequence[SkippedRow]) -> str:
    """Name lines that `on_bad_row: skip` leaves out, which would otherwise go unnoticed."""
    first = ", ".join(f"line {row.line} of {row.file} ({row.kind})" for row in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return f"data.{split}: {len(rows)} lines are left out (on_bad_row: skip): {first}{more}"
