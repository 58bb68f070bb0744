"""Run one process of a training job, started by torchrun: `python -m production.training --config job.yaml
[--dry-run] [--print-config] key=value …`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from production import exits
from production.errors import PackproofError
from production.library_warnings import quiet_process
from production.training.admission import reasons_against
from production.training.certificate import without_certificate
from production.training.checkpoint.lock import FolderLocked
from production.training.checkpoint.manifest import CheckpointRefused
from production.training.config import Job, SetupRefused, load, packed_otherwise, plan, print_config, without_effect
from production.training.data.fingerprint import ResumeRefused
from production.training.distributed.environment import started_ranks
from production.training.distributed.heartbeat import REPORTED_ELSEWHERE
from production.training.dry_run import examine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job, or print its plan. Exit status: 0 the job is done, 1 the run failed, 2 the configuration was
    refused.
    """
    quiet_process()
    options = _parser().parse_intermixed_args(arguments)
    if options.print_config or options.dry_run:
        return exits.run(lambda _: _start(options), arguments)
    return _start(options)


def _start(options: argparse.Namespace) -> int:
    dumped = [f"logger.dump_batch_steps={sorted(set(options.dump_batch))}"] if options.dump_batch else []
    try:
        job = load(options.config, [*options.overrides, *dumped])
    except PackproofError as error:
        return _refuse([error])
    if options.print_config:
        print(print_config(job), end="")
        if job.unsupported and not options.dry_run:  # the printed file lacks what the keys asked for
            return _refuse(job.unsupported, " against this job")
    if options.dry_run:
        return _dry_run(job, options.world_size)
    return 0 if options.print_config else _run(job)


def _dry_run(job: Job, world_size: int | None) -> int:
    """Validate at any world size, with no machine and no process group, and print the plan.

    A size that is asked for stands in place of the nodes and processes that the cluster section says; the plan tells so.
    """
    try:
        found = examine(job, world_size)
    except PackproofError as error:
        return _refuse([error])
    on = f"on {found.ranks} rank{'' if found.ranks == 1 else 's'}"
    if found.refusals:
        return _refuse(found.refusals, f" against this job {on}")
    print(plan(job, found.ranks).text(), end="")
    print(_listed(without_effect(job)), end="")
    told = [*(each.what for each in found.absent), *found.notes]
    for note in told:
        print(f"note: {note}")
    print(f"nothing against this job {on}" + (", but for the notes above" if told else ""))
    return 0


def _run(job: Job) -> int:
    """Refuse what must not run, on every rank alike and before anything is started, then run the job."""
    try:
        ranks = started_ranks() or 1
        found = reasons_against(job, ranks)
    except PackproofError as error:
        return _refuse([error])
    if found:
        return _refuse(found, " against this job")
    if os.environ.get("RANK", "0") == "0":
        for note in [*packed_otherwise(job), *without_certificate(job, ranks)]:
            print(f"note: {note}", file=sys.stderr)
    os.environ.update(job.megatron.env_vars)
    # Imported here: reading a configuration needs neither torch.distributed nor a model.
    from production.training.trainer import run  # noqa: PLC0415

    try:
        run(job)
    except (SetupRefused, CheckpointRefused, ResumeRefused, FolderLocked) as error:
        # What only the tokenizer, the first rows and the job's folders tell, on every rank alike.
        return _refuse([error])
    except PackproofError as error:
        return _fail(error)
    except Exception as error:
        _tell_torchrun(f"{type(error).__name__}: {error}")  # Python prints the traceback
        raise
    return 0


def _fail(error: PackproofError) -> int:
    """Print an error that a user can fix without a traceback."""
    _tell_torchrun(f"failed: {error}")
    if REPORTED_ELSEWHERE not in getattr(error, "__notes__", ()):
        print(f"failed: {error}", file=sys.stderr)
    return 1


def _tell_torchrun(message: str) -> None:
    """Give torchrun the message, so that torchrun's own report, which cannot be suppressed, ends with the message."""
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # the message itself is printed in any case
            Path(report).write_text(json.dumps({"message": said}))


def _listed(keys: Mapping[str, str]) -> str:
    """Return the keys without effect as lines: keys of one reason stand together."""
    by_reason: dict[str, list[str]] = {}
    for key, why in keys.items():
        by_reason.setdefault(why, []).append(key)
    lines = [f"  {', '.join(each)}: {why}\n" for why, each in by_reason.items()]
    return "".join(["accepted without effect\n", *lines]) if lines else ""


def _refuse(found: Sequence[PackproofError], against: str = "") -> int:
    _tell_torchrun(f"refused: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))
    if os.environ.get("RANK", "0") == "0":
        for refusal in found:
            print(f"refused: {refusal}", file=sys.stderr)
        if against:
            print(f"{len(found)} reason{'s' if len(found) > 1 else ''}{against}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m production.training",
        description="Train (SFT) on packed rows, or on chat files that are packed during training.",
    )
    parser.add_argument(
        "--config", action="append", required=True, help="YAML file; several are laid over each other in order"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration with the source of each value"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="validate the job and print its plan, without its machines and without a process group",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        help="ranks of a dry run, in place of the cluster section; default: WORLD_SIZE, else the cluster section, else one replica",
    )
    parser.add_argument(
        "--dump-batch",
        type=int,
        action="append",
        default=[],
        metavar="STEP",
        help="dump the batch that each rank feeds in this step",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, such as policy.precision=float32")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
