"""Write the first record of a run, and open the loggers that get it."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import xxhash
from torch import distributed

from production.training.checkpoint.manifest import Manifest
from production.training.config import Job, sizes
from production.training.config.schema.sections import Mlflow
from production.training.distributed.launch import Launched
from production.training.metrics.loggers import (
    Loggers,
    LoggerSettings,
    MlflowSettings,
    Value,
    WandbSettings,
    open_loggers,
)
from production.training.metrics.versions import versions


def run_name(manifest: Manifest | None) -> str:
    """Return the run's name, the same on all ranks: that of the checkpoint it continues, or one that is drawn now."""
    named = [secrets.token_hex(6)] if manifest is None or not manifest.run else [manifest.run]
    distributed.broadcast_object_list(named, src=0)
    return named[0]


def config_hash(job: Job) -> str:
    """Return 16 hex digits of the resolved configuration: equal exactly where every value is."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(job.describe(), order="sorted"))


def open_run_loggers(
    job: Job,
    rank: Launched,
    *,
    run: str,
    finished_steps: int,
    skipped_rows: int,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Loggers:
    """Open the job's loggers on the first rank, none on the others. Raises PackproofError where one cannot start.

    `notes` are further facts of the run's first record, by name.
    """
    given, place = job.logger, rank.place
    wandb = WandbSettings(**dataclasses.asdict(given.wandb), run_id=run) if given.wandb_enabled else None
    settings = LoggerSettings(
        folder=Path(given.log_dir),
        tensorboard=given.tensorboard.log_dir if given.tensorboard_enabled else None,
        wandb=wandb,
        mlflow=_mlflow(given.mlflow, run) if given.mlflow_enabled else None,
    )
    facts: dict[str, Value] = {
        "run": run,
        "config_hash": config_hash(job),
        "world_size": place.world_size,
        "data_parallel_size": place.data_size,
        "device": str(rank.device),
        "normalization": job.loss.normalization,
        **{f"{name}_parallel_size": size for name, size in dataclasses.asdict(sizes(job)).items()},
        "rows_skipped": skipped_rows,
        **{f"version_of_{name}": version for name, version in versions().items()},
        **notes,
    }
    return open_loggers(settings, rank=place.rank, run=facts, finished_steps=finished_steps)


def _mlflow(given: Mlflow, run: str) -> MlflowSettings:
    return MlflowSettings(
        experiment=given.experiment_name, run_name=given.run_name, tracking_uri=given.tracking_uri, run=run
    )
