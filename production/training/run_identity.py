"""Name everything that decides a number of a run, by which a resume is compared with the run that it continues
(SPEC R-ORDER-8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from production.training.config import Job
from production.training.config.settings import uses_distributed_optimizer
from production.training.data.fingerprint import BUCKETS

_FREE = ("recompute", "overlap", "log_", "barrier", "timers")
"""Prefixes of options that change no number except by the order of summation."""


def identity(
    job: Job, fed: Mapping[str, Any], *, world_size: int, vocab_size: int, run_steps: int | None
) -> dict[str, Any]:
    """Return everything that decides a number of the run, flat, by readable names; a resume is compared with it.

    `fed` is what decides the rows (`data.fingerprint.fed_identity`).

    The length of the run (except where its weight decay grows over it), the periods of reports, validations and
    saves, recomputation and overlap are not part of it. Overlapped reduction is part of it with the distributed
    optimizer, whose state may be saved by the buckets that it makes.
    """
    megatron, model = job.megatron, dataclasses.asdict(job.model)
    parts = {
        "model": {**model, "initial": None, "initial_path": None, "vocab_size": vocab_size},
        "multi_token": {
            name: getattr(megatron, name)
            for name in ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_use_repeated_layer")
        },
        "transformer": megatron.transformer,
        "optimizer": megatron.optimizer,
        "scheduler": _schedule(job, run_steps),
        "distributed_data_parallel_config": megatron.distributed_data_parallel_config,
        **({} if job.is_packed else {"sequence_packing": _packing(job), "chat": _chat(job)}),
        "loss": dataclasses.asdict(job.loss),
        "fp8": dataclasses.asdict(megatron.fp8_cfg),
    }
    flat = {
        f"{part}.{name}": value
        for part, values in parts.items()
        for name, value in values.items()
        if value is not None and not name.startswith(_FREE)
    }
    if uses_distributed_optimizer(job) and megatron.distributed_data_parallel_config.get("overlap_grad_reduce"):
        flat[BUCKETS] = True
    return {**fed, "world_size": world_size, "precision": job.policy.precision, **flat}


def _schedule(job: Job, run_steps: int | None) -> dict[str, Any]:
    """Return the schedule's identity; where nothing decays or grows, its length has no meaning and may change."""
    schedule = dataclasses.asdict(job.megatron.scheduler)
    if job.megatron.scheduler.lr_decay_style == "constant":
        schedule["lr_decay_iters"] = None
    grows = job.megatron.scheduler.weight_decay_incr_style != "constant"
    return schedule | {"weight_decay_steps": run_steps if grows else None}


def _packing(job: Job) -> dict[str, Any]:
    """Return everything that decides which conversations of the online path share a row, and how the row is padded."""
    return {
        **dataclasses.asdict(job.policy.sequence_packing),
        "make_sequence_length_divisible_by": job.policy.make_sequence_length_divisible_by,
        "max_input_seq_length": job.data.max_input_seq_length,
    }


def _chat(job: Job) -> dict[str, Any]:
    """Return everything that decides a conversation's tokens on the online path; options that are off are left out,
    as in older runs.
    """
    data = job.data
    found = {name: getattr(data, name) for name in ("add_bos", "add_eos", "add_generation_prompt")}
    return {name: True for name, is_on in found.items() if is_on} | {"tool_key": data.train[0].tool_key}
