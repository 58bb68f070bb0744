"""The one door of a run: everything for which this job is not run on this machine, whoever starts it (SPEC section 18)."""

from __future__ import annotations

from torch import distributed

from production.errors import PackproofError
from production.training.config import Job, device_here, missing_files, refusals, unready
from production.training.environment import check_environment
from production.training.tokenizer import unloadable


def reasons_against(job: Job, world_size: int) -> list[PackproofError]:
    """Find all reasons why `job` must not run here on `world_size` ranks; none: it may, and its folders are made.

    Folders are made and written to where nothing else is against the job alone.
    """
    try:
        if not distributed.is_initialized():  # else the ranks have found each other, however they were started
            check_environment()
        device = device_here(job)
    except PackproofError as error:
        return [error]
    found = [*refusals(job, world_size, device=device), *missing_files(job), *unloadable(job)]
    return found or [*unready(job)]
