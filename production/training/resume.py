"""Begin a run from nothing, from weights, or from its newest checkpoint, where the job's identity has stayed the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from production.errors import PackproofError
from production.parallel.sizes import RankCoordinates
from production.training.checkpoint.manager import Checkpoints, restore, restore_resharded
from production.training.checkpoint.manifest import RESHARDABLE, CheckpointRefused, Manifest, verify
from production.training.checkpoint.weights import load_weights
from production.training.config import Job
from production.training.config.settings import uses_distributed_optimizer
from production.training.data.fingerprint import MISSING, option
from production.training.engine import Engine


def checkpoints_of(job: Job) -> Checkpoints:
    """Return the manager of the job's checkpoints."""
    given = job.checkpointing
    return Checkpoints(
        folder=Path(given.checkpoint_dir),
        keep=given.keep_top_k,
        metric=given.metric_name,
        higher_is_better=given.higher_is_better,
        with_optimizer=given.save_optimizer,
        # The plain optimizer's state has the names of the whole model's weights, which any layout can read.
        sharding_type=given.optimizer_format if uses_distributed_optimizer(job) else RESHARDABLE,
    )


def found_checkpoint(job: Job, checkpoints: Checkpoints) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint with every byte verified.

    Raises CheckpointRefused for a damaged one, and for any checkpoint if the job must begin a new run.
    """
    if not job.checkpointing.enabled:
        return None
    path = checkpoints.newest()
    if path is None:
        return None
    if not job.checkpointing.resume:
        raise CheckpointRefused(
            what=f"the folder must hold no checkpoint where checkpointing.resume is false, got {path.name} as the newest",
            where=job.where("checkpointing.checkpoint_dir"),
            fix="give a new run a folder of its own, or move the checkpoints away, or set checkpointing.resume=true",
        )
    return path, verify(path)


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
                what=f"all ranks must have the same rows and settings, and {', '.join(differing)} differ ({_apart(differing, first, other)})",
                where=f"rank 0 and rank {rank}",
                fix="give all ranks the same configuration, the same files and the same tokenizer (a shared folder, or equal copies)",
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
