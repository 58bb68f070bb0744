"""`compare_runs live`: Megatron-LM's own pieces and packproof on the same file, weights, layout and schedule, interleaved in one run.

    python -m tools.compare_runs live --config examples/jobs/small-cpu.yaml --layout cp2 --html live.html
    python -m tools.compare_runs live --config examples/jobs/small-cpu.yaml --layout cp2 --megatron-source ../Megatron-LM

With --megatron-source Megatron-LM's side is its own driver script, `pretrain_gpt.py` of that source tree, unmodified; then one program runs
after the other, on CPU. On CPU it forks its ranks, up to eight; under torchrun (GPUs) it is one of them. Exit status: 0 equal as
asked, 1 not, 2 bad input.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from equivalence.cases.step import layout_name
from equivalence.errors import InputError, SuiteError
from equivalence.workers import Deadlines, open_world, preload
from equivalence.workers.launched import run_launched
from production.errors import PackproofError
from production.exits import CANNOT_RUN
from production.training.config import Job, device_here, load, missing_files, multi_token_depths, refusals, sizes
from tools.compare_runs.comparison import Comparison, Window, compare
from tools.compare_runs.recorded import broken_limits, deliver
from tools.compare_runs.run import Run, mean

MODULES = ("tools.compare_runs.live_rank", "transformers.models.auto.tokenization_auto")
"""Modules that ranks need beside megatron-core."""
ENTER, TARGET = "tools.compare_runs.live_rank:entered", "tools.compare_runs.live_rank:run_both"
ALIKE = (
    "checkpointing.enabled=false",
    "data.shuffle=false",
    "data.order=sequential",
    "data.last_batch=wrap",
    "data.num_workers=0",
    "sft.max_num_epochs=null",
    "sft.val_period=0",
    "sft.val_at_start=false",
    "sft.val_at_end=false",
)
"""Settings under which the two systems do the same work, laid over the job's file; overrides of the command line come after them."""
TIMED = (
    "timed: from cleared gradients to updated weights, begun together after a barrier, the slowest rank's; rows were fetched "
    "before and numbers read after, on both sides"
)
UNTIMED = "not timed: the two programs ran one after the other"
_DAY = 86_400.0
_DIMENSIONS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the command line."""

    config: tuple[Path, ...]
    """The job's YAML file; several are laid over each other in order."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Overrides of the job, such as policy.max_total_sequence_length=512."""
    steps: int = 20
    """Steps that both systems take."""
    window: str | None = None
    """Steps that times and differences are taken over; not given: from the third on."""
    layout: str | None = None
    """Such as tp2,cp2,dp2: sizes of tp, cp, pp, dp, ep, etp; what it does not name is the job's, and dp 1."""
    normalization: Literal["per_token", "mean_of_means", "global_valid_tokens"] | None = None
    """Divisor of losses; by default the job's. Megatron-LM has no global_valid_tokens: it then runs per_token."""
    megatron_source: Path | None = None
    """Source tree of Megatron-LM, of the installed megatron-core's minor version: its pretrain_gpt.py is the other side."""
    keep: Path | None = None
    """With --megatron-source: an empty folder in which the driver's log and command line, the job and all checkpoints are kept."""
    html: Annotated[Path | None, tyro.conf.arg(aliases=["--picture"])] = None
    """Write a self-contained page with pictures of both systems there."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Write all numbers there."""
    most_loss_difference: Annotated[float | None, tyro.conf.arg(aliases=["--max-loss-difference"])] = None
    """Exit with 1 where losses, multi-token losses or gradient norms differ by more than this at any step. Not given: 0 on
    CPU; on CUDA nothing is judged."""
    most_time_ratio: float | None = None
    """Exit with 1 where packproof's step time over Megatron-LM's may exceed this: its paired 95 % bound does."""


def main(arguments: Sequence[str]) -> int:
    """Run both, compare, print, write; exit status 0: as asked, 1: a limit does not hold, 2: bad input."""
    options = tyro.cli(Arguments, args=arguments, prog="packproof compare-runs live", description=__doc__)
    try:
        torch.set_num_threads(1)  # before a fork, and so that all ranks are alike
        preload(*MODULES)
        job, world_size = _job(options)
        limit = _limit(options, job)
        window = Window.parse(options.window or f"{min(3, options.steps)}-{options.steps}")
        if window.first > options.steps:
            raise InputError(
                f"no step of {window} is among the {options.steps} that are taken: choose --window or --steps"
            )
        if options.megatron_source is not None:
            measured: Any = _measure_driver(job, world_size, options)
        else:
            measured = _measure(job, world_size)
        if measured is None:
            return 0  # another rank tells
        runs, weights = _runs(job, world_size, measured), measured.unequal_weights
        comparison = compare(*runs, window)
        broken = [
            *broken_limits(comparison, most_loss_difference=None, most_time_ratio=options.most_time_ratio),
            *(() if limit is None else _unequal(comparison, limit, weights)),
        ]
        more = {"live": _document(options, job, world_size, runs, measured)}
        deliver(comparison, broken=broken, html=options.html, json_file=options.json_file, more=more)
    except (SuiteError, PackproofError, OSError) as error:
        print(f"packproof compare-runs: {error}", file=sys.stderr)
        return CANNOT_RUN
    return 1 if broken or not comparison.all_finite else 0


def _job(options: Arguments) -> tuple[Job, int]:
    """Return the job that both systems run, and its number of ranks."""
    layout, data_size = _layout(options.layout)
    normalization = [] if options.normalization is None else [f"loss.normalization={options.normalization}"]
    given = [*ALIKE, f"sft.max_num_steps={options.steps}", *normalization, *layout, *options.overrides]
    job = load([str(path) for path in options.config], given)
    world_size = int(os.environ.get("WORLD_SIZE", "0")) or sizes(job).of_a_replica * data_size
    device = device_here(job)
    for refusal in (*refusals(job, world_size, device=device), *missing_files(job)):
        raise refusal
    if device == "cuda" and "RANK" not in os.environ:
        raise InputError("the job runs on CUDA: start this command with torchrun, or set cluster.device=cpu")
    return job, world_size


def _layout(text: str | None) -> tuple[list[str], int]:
    """Return the layout as overrides, and dp."""
    overrides, data_size = [], 1
    for part in [] if text is None else text.replace(",", " ").split():
        found = re.fullmatch(r"(tp|cp|pp|dp|ep|etp)=?(\d+)", part)
        if found is None:
            raise InputError(f"--layout {text}: say sizes such as tp2,cp2,pp1,dp2,ep1")
        name, size = found[1], int(found[2])
        if name == "dp":
            data_size = size
        else:
            overrides.append(f"policy.megatron_cfg.{_DIMENSIONS[name]}={size}")
    return overrides, data_size


def _limit(options: Arguments, job: Job) -> float | None:
    """Return the largest accepted difference. Raises InputError if the systems differ by design and no limit is given."""
    unlike = []
    if job.loss.normalization == "global_valid_tokens":
        unlike.append("global_valid_tokens, which Megatron-LM does not have")
    if job.loss.mtp_weights != "rank" and multi_token_depths(job):
        unlike.append("multi-token losses weighed by rows, where Megatron-LM weighs by rank")
    if unlike and options.most_loss_difference is None:
        raise InputError(
            f"{'; '.join(unlike)}: the two systems round elsewhere. Say --most-loss-difference, or compare like with like "
            "(--normalization per_token or mean_of_means, loss.mtp_weights=rank)"
        )
    if options.most_loss_difference is None and device_here(job) == "cpu":
        return 0.0
    return options.most_loss_difference


def _measure(job: Job, world_size: int) -> Any:
    """Return `live_rank.Measured` of all ranks together; None on a rank that does not report."""
    from tools.compare_runs.live_rank import together  # noqa: PLC0415 - megatron-core

    if "RANK" in os.environ:
        is_cuda = device_here(job) == "cuda"
        if is_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        (found,) = run_launched(
            TARGET, [job], enter=ENTER, entry=job, deadline_s=_DAY, backend="nccl" if is_cuda else "gloo"
        )
        return None if found is None else together(found)
    read_ahead(job)
    with open_world(world_size, enter=ENTER, entry=job, deadlines=Deadlines(case_s=_DAY, idle_s=60.0)) as world:
        return together(world.run(TARGET, job))


def _measure_driver(job: Job, world_size: int, options: Arguments) -> Any:
    """Return `driver.run.Measured`. Raises InputError where the driver cannot be started like this."""
    if device_here(job) != "cpu" or "RANK" in os.environ:
        raise InputError(
            "--megatron-source runs on CPU ranks that are forked here: set cluster.device=cpu, without torchrun"
        )
    from tools.compare_runs.driver.run import measure  # noqa: PLC0415 - megatron-core

    assert options.megatron_source is not None
    return measure(job, world_size, source=options.megatron_source, keep=options.keep)


def read_ahead(job: Job) -> None:
    """Have this process open the file and the tokenizer, so that ranks forked from it need not."""
    from equivalence.subjects.megatron_lm import training_dataset  # noqa: PLC0415 - megatron-core
    from tools.compare_runs.live_systems import baseline_rows  # noqa: PLC0415

    path, settings = baseline_rows(job)
    training_dataset(path, job.policy.tokenizer.name, settings, samples=1)


def _runs(job: Job, world_size: int, measured: Any) -> tuple[Run, Run]:
    where = f"{world_size} ranks, {layout_name(sizes(job), sizes(job).data(world_size))}, {device_here(job)}"
    remarks: dict[str, list[str]] = {name: [] for name in measured.series}
    first, second = measured.series
    if measured.is_interleaved:
        remarks = {name: [_rows_took(series)] for name, series in measured.series.items()}
    remarks[first] += [f"stand-in for {what}: {why}" for what, why in measured.stand_ins.items()]
    if job.loss.normalization == "global_valid_tokens":
        remarks[first].append("divides per token, as it has no global_valid_tokens")
    remarks[second].append(TIMED if measured.is_interleaved else UNTIMED)
    return tuple(
        Run(name=name, source="run here", place=where, series=measured.series[name], remarks=remarks[name])
        for name in (first, second)
    )  # type: ignore[return-value] # two of them


def _rows_took(series: dict[str, dict[int, float]]) -> str:
    return f"rows of a step were there after {mean(list(series['data_seconds'].values())):.4f} s on average"


def _unequal(comparison: Comparison, limit: float, weights: Sequence[str]) -> list[str]:
    """Return everything that differs by more than the limit; with a limit of 0 also the weights after the last step."""
    broken = []
    first, second = comparison.runs
    for name in sorted({*first.series} & {*second.series}):
        if name.endswith("_seconds"):
            continue
        mine, theirs = first.series[name], second.series[name]
        gaps = {step: abs(theirs[step] - mine[step]) for step in sorted({*mine} & {*theirs})}
        wrong = {step: gap for step, gap in gaps.items() if not gap <= limit}
        if wrong:
            worst = max(wrong.values(), key=lambda gap: math.inf if math.isnan(gap) else gap)
            broken.append(
                f"{name} differs at {len(wrong)} of {len(gaps)} steps, first at {min(wrong)}, by up to {worst:.3g}"
            )
        if missing := {*mine} ^ {*theirs}:
            broken.append(f"{name} is missing at a step of one of the two")
            if name == "loss" and missing == _trains_nothing(comparison):
                broken.append("there every target is masked: Megatron-LM reports 0 / 0, packproof no loss (R-LOSS-7)")
    broken += [f"only one of the two reports {name}" for name in sorted({*first.series} ^ {*second.series})]
    if weights and limit == 0:
        broken.append(f"{len(weights)} weights differ after the last step, such as {weights[0]}")
    return broken


def _trains_nothing(comparison: Comparison) -> set[int]:
    """Return the steps at which neither system trained a token, where the first reported NaN and the second no loss."""
    first, second = (run.series for run in comparison.runs)
    return {
        step
        for step, loss in first["loss"].items()
        if math.isnan(loss)
        and step not in second["loss"]
        and all(series.get("trained_tokens", {}).get(step) == 0 for series in (first, second))
    }


def _document(options: Arguments, job: Job, world_size: int, runs: tuple[Run, Run], measured: Any) -> dict[str, Any]:
    return {
        "config": [str(path) for path in options.config],
        "overrides": [*ALIKE, *options.overrides],
        "layout": layout_name(sizes(job), sizes(job).data(world_size)),
        "ranks": world_size,
        "steps": options.steps,
        "normalization": job.loss.normalization,
        "multi_token_depths": multi_token_depths(job),
        "device": device_here(job),
        "stand_ins": dict(measured.stand_ins),
        "upstream": list(measured.upstream),
        "unequal_weights": list(measured.unequal_weights),
        "series": {run.name: {name: list(values.items()) for name, values in run.series.items()} for run in runs},
    }
