"""Part `config`: every set-up refusal of the job, all at once, as a dry run finds them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from production.errors import PackproofError
from production.training.config import Job
from production.training.dry_run import DryRun, examine
from tools.check.result import Finding, PartResult
from tools.counted import counted


def check_config(job: Job, world_size: int | None) -> tuple[PartResult, DryRun]:
    """Examine the job. PackproofError for a `WORLD_SIZE` of the environment that is not a number."""
    started = time.monotonic()
    found = examine(job, world_size)
    # A dry run only notes what this machine lacks; a check needs the file and the tokenizer here.
    needed = [each for each in found.absent if getattr(each, "kind", "no_file") == "no_file"]
    result = PartResult(
        name="config",
        compared=1,
        witnesses=("the checks of a dry run, megatron-core's own among them",),
        findings=_told_once([*found.refusals, *needed]),
        notes=list(dict.fromkeys(found.notes)),
        not_shown=[f"{each.where}: {each.what}" for each in found.absent if each not in needed],
    )
    result.status = "refused" if result.findings else "equal"
    faults = len(result.findings)
    result.summary = (
        f"{counted(faults, 'reason')} against this job on {counted(found.ranks, 'rank')}"
        if faults
        else f"nothing against this job on {counted(found.ranks, 'rank')}"
    )
    result.numbers = {"ranks": found.ranks}
    result.seconds = time.monotonic() - started
    return result, found


def _told_once(errors: Sequence[PackproofError]) -> list[Finding]:
    """Return the errors as findings; a file that two splits read is told once."""
    found: dict[tuple[str, str], Finding] = {}
    for each in errors:
        place = each.where.partition(" (")[0]
        key = (each.what, place if ", line " in place or ", byte " in place else each.where)
        found.setdefault(key, Finding(what=each.what, where=each.where, fix=each.fix))
    return list(found.values())
