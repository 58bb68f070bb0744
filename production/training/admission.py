"""Decide whether a job may run on this machine, whoever starts the job (docs/spec-setup.md)."""

from __future__ import annotations

import psutil
import torch
from torch import distributed

from production.errors import PackproofError
from production.training.config import Job, check_machine, device_here, missing_files, refusals, sizes
from production.training.config.sizing import memory_of_a_rank
from production.training.data.tokenizer import check_tokenizer
from production.training.distributed.environment import check_environment


def reasons_against(job: Job, world_size: int) -> list[PackproofError]:
    """Return all reasons why `job` must not run here on `world_size` ranks; with no reason, make the job's folders.

    Folders are made and written to where nothing else is against the job alone.
    """
    found: list[PackproofError] = []
    try:
        if not distributed.is_initialized():  # else the ranks have found each other, however they were started
            check_environment()
    except PackproofError as error:
        found.append(error)
    try:
        device = device_here(job)
    except PackproofError as error:
        return [*found, error]
    found += [*refusals(job, world_size, device=device), *missing_files(job), *check_tokenizer(job)]
    return found or [*oversized(job, world_size, device), *check_machine(job)]


def oversized_here(job: Job, world_size: int) -> list[PackproofError]:
    """Return why this machine has too little memory for the job: a note of a dry run, which may be meant for another
    machine.
    """
    try:
        device = device_here(job)
    except PackproofError:
        return []
    return [
        PackproofError(what=f"a run on this machine would be refused: {each.what}", where=each.where, fix=each.fix)
        for each in oversized(job, world_size, device)
    ]


def oversized(job: Job, world_size: int, device: str) -> list[PackproofError]:
    """Refuse a model of which one rank's weights, gradients and optimizer alone are more than the machine has."""
    layout = sizes(job)
    memory = memory_of_a_rank(
        job,
        data_parallel_size=layout.data(world_size),
        expert_data_parallel_size=world_size // (layout.expert * layout.expert_tensor * layout.pipeline),
    )
    if device == "cuda":
        there = int(torch.cuda.get_device_properties(0).total_memory)
    else:
        there = int(psutil.virtual_memory().total)
    needed = 0 if memory is None else memory.weights + memory.gradients + memory.optimizer
    if needed <= there:
        return []
    return [
        PackproofError(
            what=f"one rank's weights, gradients and optimizer must fit into the {there >> 30:,} GiB of the {device} here, got {needed >> 30:,} GiB",
            where=job.where("model.hidden_size"),
            fix="give the model's real sizes, or share it over more ranks (tensor_model_parallel_size, pipeline_model_parallel_size)",
        )
    ]
