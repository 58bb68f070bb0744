"""Begin a run from nothing, from weights, or from its newest checkpoint, where the job's identity has stayed the
same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from production.errors import PackproofError
from production.parallel.sizes import RankCoordinates
from production.tokens.fingerprint import TokenizerFingerprint, differences_from_json
from production.training.checkpoint.manager import Checkpoints, restore, restore_resharded
from production.training.checkpoint.manifest import CheckpointRefused, Manifest, verify
from production.training.checkpoint.weights import load_weights
from production.training.config import Job
from production.training.config.settings import uses_distributed_optimizer
from production.training.data.batch_stream import BatchStream
from production.training.data.fingerprint import BUCKETS, MISSING, ResumeRefused, check_resume, option
from production.training.engine import Engine

_FREE = ("recompute", "overlap", "log_", "barrier", "timers")
"""Prefixes of options that change no number except by the order of summation."""


def checkpoints_of(job: Job) -> Checkpoints:
    """Return the manager of the job's checkpoints."""
    given = job.checkpointing
    return Checkpoints(
        folder=Path(given.checkpoint_dir),
        keep=given.keep_top_k,
        metric=given.metric_name,
        higher_is_better=given.higher_is_better,
        with_optimizer=given.save_optimizer,
        sharding_type=given.optimizer_format,
    )


def found_checkpoint(job: Job, checkpoints: Checkpoints) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint with every byte verified.

    Raises CheckpointRefused for a damaged one, and for any where the job is to begin anew.
    """
    if not job.checkpointing.enabled:
        return None
    path = checkpoints.newest()
    if path is None:
        return None
    if not job.checkpointing.resume:
        raise CheckpointRefused(
            what=f"the folder has checkpoints of another run, the newest {path.name}",
            where=job.where("checkpointing.checkpoint_dir"),
            mend="give a folder of its own to a run that begins anew, or move them away, or set checkpointing.resume=true",
        )
    return path, verify(path)


def identity(
    job: Job, feed: BatchStream, place: RankCoordinates, *, vocab_size: int, run_steps: int | None
) -> dict[str, Any]:
    """Return everything that decides a number of the run, flat, by readable names; a resume is compared with it.

    The length of the run (except where its weight decay grows over it), the periods of reports, validations and
    saves, recomputation and overlap are not part of it. Overlapped reduction is part of it where the optimizer's
    state is saved by buckets.
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
    if _has_buckets(job) and megatron.distributed_data_parallel_config.get("overlap_grad_reduce"):
        flat[BUCKETS] = True
    return {**feed.identity(), "world_size": place.world_size, "precision": job.policy.precision, **flat}


def _has_buckets(job: Job) -> bool:
    """Return whether the optimizer's state is saved bucket by bucket: megatron-core makes several only where their
    reduction overlaps.
    """
    return uses_distributed_optimizer(job) and job.checkpointing.optimizer_format == "dp_reshardable"


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


_OF_THE_WORLD = ("world_size", "data_parallel_size")


def check_going_on(job: Job, manifest: Manifest, now: Mapping[str, Any], tokenizer: TokenizerFingerprint) -> bool:
    """Compare this run with the one that a checkpoint was saved by; return True where it continues in another layout
    (`checkpointing.reshard`).

    Consumed samples alone decide the order of rows, and weights and optimizer are laid out anew. A rank's random
    draws are not, and bins of the online path and the order `megatron-cyclic-sharded` depend on the data-parallel
    size. Raises ResumeRefused for keys that may not differ; of a tokenizer it says which probe text has other ids.
    """
    saved: Mapping[str, Any] = manifest.fingerprint
    told: list[str] = []
    if manifest.tokenizer:
        told = differences_from_json(manifest.tokenizer, tokenizer, name="the checkpoint")
        if not told:  # the same tokenizer, though a library may write its definition otherwise now
            saved = {**saved, "tokenizer": now.get("tokenizer")}
    try:
        return _check_going_on(job, saved, now)
    except ResumeRefused as error:
        if not told or "tokenizer" not in error.differing:
            raise
        what = f"{error.what}. {' '.join(told)}"
        raise ResumeRefused(what=what, where=error.where, mend=error.mend, differing=error.differing) from None


def _check_going_on(job: Job, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if not job.checkpointing.reshard or not job.is_packed or job.data.order == "megatron-cyclic-sharded":
        check_resume(saved, now)
        return False
    free = _OF_THE_WORLD if uses_distributed_optimizer(job) else (*_OF_THE_WORLD, "tensor_parallel_size")
    changed = check_resume(saved, now, free=free)
    draws = [name for name in ("hidden_dropout", "attention_dropout") if getattr(job.model, name) > 0]
    draws += [name for name in ("moe_input_jitter_eps",) if job.megatron.transformer.get(name)]
    if changed and draws:
        raise CheckpointRefused(
            what=f"{', '.join(changed)} differ, and {', '.join(draws)} draws on each rank for itself: nobody can go on with those draws",
            where=job.where("checkpointing.reshard"),
            mend="start as many ranks in the layout as before, or start a new run from the weights (model.initial: megatron)",
        )
    return bool(changed)


def _chat(job: Job) -> dict[str, Any]:
    """Return everything that decides a conversation's tokens on the online path; options that are off are left out,
    as in older runs.
    """
    data = job.data
    found = {name: getattr(data, name) for name in ("add_bos", "add_eos", "add_generation_prompt")}
    return {name: True for name, is_on in found.items() if is_on} | {"tool_key": data.train[0].tool_key}


def check_same(identity: Mapping[str, Any], place: RankCoordinates) -> None:
    """Refuse ranks that read different rows: nothing is broadcast later. One exchange, before the model is built.

    Raises PackproofError that names the difference and the rank.
    """
    everyone: list[Mapping[str, Any] | None] = [None] * place.world_size
    distributed.all_gather_object(everyone, dict(identity))
    first = everyone[0]
    assert first is not None
    for rank, other in enumerate(everyone):
        assert other is not None
        differing = [key for key in {**first, **other} if first.get(key, MISSING) != other.get(key, MISSING)]
        if differing:
            raise PackproofError(
                what=f"ranks are not told the same: {', '.join(differing)} differ ({_apart(differing, first, other)})",
                where=f"rank 0 and rank {rank}",
                mend="give all ranks the same configuration, the same files and the same tokenizer (a shared folder, or equal copies)",
            )


def _apart(differing: Sequence[str], first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first three differing keys with both values, as a configuration names them."""
    told = (
        f"{option(key)}: {str(first.get(key, MISSING))[:80]} and {str(other.get(key, MISSING))[:80]}"
        for key in differing[:3]
    )
    return "; ".join(told)


def build(
    job: Job,
    place: RankCoordinates,
    *,
    vocab_size: int,
    found: tuple[Path, Manifest] | None,
    run_steps: int | None = None,
    is_resharded: bool = False,
) -> Engine:
    """Build model, optimizer and schedule: as the checkpoint left them, or with the weights that the job begins with.

    `run_steps` has the meaning that it has in `Engine`.
    """
    if found is not None:
        engine = Engine(job, place, vocab_size=vocab_size, run_steps=run_steps)
        (restore_resharded if is_resharded else restore)(found[0], engine, found[1])
        return engine
    prepare = None if job.model.initial == "scratch" else lambda model: _load(job, model)
    return Engine(job, place, vocab_size=vocab_size, prepare=prepare, run_steps=run_steps)


def _load(job: Job, model: torch.nn.Module) -> None:
    if job.model.initial == "huggingface":
        from production.training.checkpoint.huggingface import load_huggingface  # noqa: PLC0415 - an extra

        load_huggingface(model, job.model.initial_path or job.policy.model_name or "")
        return
    assert job.model.initial_path is not None
    load_weights(Path(job.model.initial_path), model)
