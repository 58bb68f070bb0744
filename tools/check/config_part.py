"""Part `config`: every set-up refusal of the job, all at once, as a dry run finds them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from production.errors import PackproofError
from production.files.faults import FIXES
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
    result.numbers = {"ranks": found.ranks}
    _sum_up(result)
    result.seconds = time.monotonic() - started
    return result, found


def refuse(result: PartResult, error: PackproofError | OSError) -> Finding | None:
    """Add what a later step found against the job to the configuration's result; return None where the result has it already."""
    finding = _finding(error) if isinstance(error, PackproofError) else Finding(what=str(error))
    if any(each.what == finding.what for each in result.findings):
        return None
    result.findings.append(finding)
    _sum_up(result)
    return finding


def _sum_up(result: PartResult) -> None:
    faults, ranks = len(result.findings), counted(result.numbers["ranks"], "rank")
    result.status = "refused" if faults else "equal"
    result.summary = f"{counted(faults, 'reason') if faults else 'nothing'} against this job on {ranks}"


def _finding(error: PackproofError) -> Finding:
    """Return an error as a finding; a fault of a file's line begins with its kind."""
    kind = getattr(error, "kind", "")
    is_of_line = kind in FIXES and (", line " in error.where or ", byte " in error.where)
    return Finding(what=f"{kind}: {error.what}" if is_of_line else error.what, where=error.where, fix=error.fix)


def _told_once(errors: Sequence[PackproofError]) -> list[Finding]:
    """Return the errors as findings; a file that two splits read is told once."""
    found: dict[tuple[str, str], Finding] = {}
    for each in errors:
        place = each.where.partition(" (")[0]
        key = (each.what, place if ", line " in place or ", byte " in place else each.where)
        found.setdefault(key, _finding(each))
    return list(found.values())
