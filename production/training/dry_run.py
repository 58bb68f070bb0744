"""Collect all that is against a job, and all that its user should know, without a machine and without a process group
(SPEC R-SETUP-19).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from production.errors import PackproofError
from production.files.file_state import is_there
from production.training.admission import oversized_here
from production.training.certificate import KEY, certificate_outlook
from production.training.config import (
    Job,
    check_writable,
    held_checkpoints,
    missing_files,
    missing_packages,
    notes,
    packed_otherwise,
    refusals,
)
from production.training.data.first_rows import check_first_rows, count_first_rows
from production.training.data.tokenizer import check_tokenizer, load_tokenizer
from production.training.distributed.environment import started_ranks
from production.training.resume_outlook import resume_outlook


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Holds the outcome of a dry run."""

    ranks: int
    """Ranks that the job was examined for."""
    refusals: Sequence[PackproofError]
    """Reasons why the job must not run anywhere."""
    absent: Sequence[PackproofError]
    """Files, packages and folders that the job needs and that this machine lacks."""
    notes: Sequence[str]
    """Facts that change no verdict and that a user should know."""


def examine(job: Job, world_size: int | None = None) -> DryRun:
    """Examine a job on `world_size` ranks, or on as many as `planned_ranks` finds. Nothing is written.

    A size that is asked for stands in place of the nodes and processes that the cluster section gives. Tokens and
    first lines are examined where the configuration alone is not refused; so is the certificate that the job names, as
    a run examines it. Raises PackproofError for a `WORLD_SIZE` of
    the environment that is not a number.
    """
    ranks = planned_ranks(job) if world_size is None else world_size
    asked = job
    if world_size is not None and (job.cluster.ranks or 0) > 0:
        asked = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, num_nodes=None))
    if found := refusals(asked, ranks):  # else what the rows are made with may be no setting at all
        return DryRun(ranks=ranks, refusals=found, absent=[], notes=[])
    tokenizer = _tokenizer(job)
    first = check_first_rows(job, tokenizer)
    refused, notes_on_resume = resume_outlook(job, ranks, tokenizer)
    told_already = {each.what for each in first.refusals}
    of_certificate, notes_on_certificate = certificate_outlook(job, tokenizer, ranks)
    refused = [*refused, *(each for each in of_certificate if each.what not in told_already)]
    absent = [
        *(each for each in missing_files(job) if each.key != KEY),  # a certificate that is not here is refused
        *check_tokenizer(job),
        *missing_packages(job),
        *check_writable(job),
        *held_checkpoints(job),
        *oversized_here(job, ranks),
    ]
    told = [*notes(asked, ranks), *packed_otherwise(job), *notes_on_resume, *notes_on_certificate]
    told += [note.text for note in first.token_notes] + first.notes
    told += count_first_rows(job, tokenizer) if tokenizer is not None else _unchecked(job)
    return DryRun(ranks=ranks, refusals=[*first.refusals, *refused], absent=absent, notes=told)


def planned_ranks(job: Job) -> int:
    """Return the number of processes that torchrun started, else the cluster section's number, else one replica of
    the model.
    """
    if (started := started_ranks()) is not None:
        return started
    if job.cluster.ranks is not None:
        return job.cluster.ranks
    megatron = job.megatron
    return megatron.tensor_model_parallel_size * megatron.context_parallel_size * megatron.pipeline_model_parallel_size


def _tokenizer(job: Job) -> Any | None:
    """Return the tokenizer where it is on this machine and can be loaded; `check_tokenizer` tells why it cannot."""
    if job.policy.tokenizer.name and is_there(job.policy.tokenizer.name):
        with contextlib.suppress(PackproofError):
            return load_tokenizer(job)
    return None


def _unchecked(job: Job) -> list[str]:
    if check_tokenizer(job):
        return []
    name = job.policy.tokenizer.name
    return [f"not checked here: whether the prompt format fits the tokenizer {name}, which is not on this machine"]
