"""Collect all that is against a job, and all that its user should know, without a machine and without a process group
(SPEC R-SETUP-19).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from production.errors import PackproofError
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
from production.training.data.first_lines import FirstLines, look
from production.training.data.token_checks import dry_run_tokens
from production.training.data.tokenizer import check_tokenizer, load_tokenizer
from production.training.distributed.environment import started_ranks


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
    first lines are examined where the configuration alone is not refused. Raises PackproofError for a `WORLD_SIZE` of
    the environment that is not a number.
    """
    ranks = planned_ranks(job) if world_size is None else world_size
    asked = job
    if world_size is not None and (job.cluster.ranks or 0) > 0:
        asked = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, num_nodes=None))
    found: list[PackproofError] = [*refusals(asked, ranks)]
    of_tokens: list[str] = []
    of_lines = FirstLines()
    if not found:  # else what the rows are made with may be no setting at all
        found, of_tokens = dry_run_tokens(job)
    if not found:
        of_lines = _first_lines(job)
        found = of_lines.refusals
    absent = [
        *missing_files(job),
        *check_tokenizer(job),
        *missing_packages(job),
        *check_writable(job),
        *held_checkpoints(job),
    ]
    return DryRun(
        ranks=ranks,
        refusals=found,
        absent=absent,
        notes=[*notes(asked, ranks), *packed_otherwise(job), *of_tokens, *of_lines.notes],
    )


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


def _first_lines(job: Job) -> FirstLines:
    """Return the refusals and notes of the files' first lines; conversations are checked where the tokenizer can be
    loaded.
    """
    tokenizer = None
    folder = Path(job.policy.tokenizer.name or "")
    if not job.is_packed and job.policy.tokenizer.name and folder.is_dir():
        with contextlib.suppress(PackproofError):  # told by `check_tokenizer`
            tokenizer = load_tokenizer(job)
    return look(job, tokenizer)
