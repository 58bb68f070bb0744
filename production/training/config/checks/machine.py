"""Refuse a machine that cannot run the job: folders that cannot be written, missing packages (SPEC R-SETUP-20)."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from production.training.config.checks.setup import Setup
from production.training.config.refusal import SetupRefused
from production.training.config.schema.job import Job

_PACKAGES = {
    "logger.tensorboard_enabled": ("tensorboard", "tensorboard"),
    "logger.wandb_enabled": ("wandb", "wandb (packproof[wandb])"),
    "logger.mlflow_enabled": ("mlflow", "mlflow-skinny (packproof[mlflow])"),
}
"""Switches to the module that they need, and the package of the module."""


def missing_packages(job: Job) -> list[SetupRefused]:
    """Return the packages that a run of this job needs and this machine lacks: refusals of a run, notes of a dry run."""
    return [*_missing_packages(Setup(job=job, world_size=1, device=None))]


def held_checkpoints(job: Job) -> list[SetupRefused]:
    """Return checkpoints and locks of another run in the job's folders, without writing: notes of a dry run."""
    setup, found = Setup(job=job, world_size=1, device=None), []
    folder, key = Path(job.checkpointing.checkpoint_dir), "checkpointing.checkpoint_dir"
    if job.checkpointing.enabled and not job.checkpointing.resume and any(folder.glob("step_*/packproof.json")):
        fix = "give a folder of its own to a new run, or set checkpointing.resume to true"
        found.append(
            setup.refuse(
                "checkpoint",
                key,
                f"{folder} must hold no checkpoint of another run where checkpointing.resume is false",
                fix,
            )
        )
    places = {"logger.log_dir": Path(job.logger.log_dir)} | ({key: folder} if job.checkpointing.enabled else {})
    for each, place in places.items():
        if (place / ".packproof.lock").exists():
            what = f"{place} is locked by a run that writes to it, or by a run that was killed"
            found.append(
                setup.refuse(
                    "locked", each, what, "wait until that run has ended, or give this run a folder of its own"
                )
            )
    return found


def check_machine(job: Job) -> list[SetupRefused]:
    """Refuse a machine on which a run would fail later: folders are made and written to here, which a dry run must
    not do.
    """
    setup = Setup(job=job, world_size=1, device=None)
    return [*_missing_packages(setup), *_unwritable(setup)]


def check_writable(job: Job) -> list[SetupRefused]:
    """Return the folders of `check_machine` that cannot be made, without writing: notes of a dry run."""
    setup = Setup(job=job, world_size=1, device=None)
    found: list[SetupRefused] = []
    for key, folder in _folders(job).items():
        near = _nearest(folder)
        if not (near.is_dir() and os.access(near, os.W_OK | os.X_OK)) and not _is_told(folder, found, job):
            found.append(_no_folder(setup, key, folder, "cannot be written to", near))
    return found


def _folders(job: Job) -> dict[str, Path]:
    """Return dotted key and folder of everything that a run writes to."""
    logs = Path(job.logger.log_dir)
    found = {"logger.log_dir": logs}
    if job.logger.tensorboard_enabled:
        found["logger.tensorboard.log_dir"] = logs / job.logger.tensorboard.log_dir
    if job.checkpointing.enabled:
        found["checkpointing.checkpoint_dir"] = Path(job.checkpointing.checkpoint_dir)
    if job.data.cache_folder is not None:
        found["data.cache_folder"] = Path(job.data.cache_folder)
    if job.data.cache_dir is not None:
        found["data.cache_dir"] = Path(job.data.cache_dir)
    return found


def _unwritable(setup: Setup) -> list[SetupRefused]:
    found: list[SetupRefused] = []
    for key, folder in _folders(setup.job).items():
        if _is_told(folder, found, setup.job):
            continue
        # Dumps lie below the logs; what of them is there already must be a folder and a file.
        inner = [folder / "dumps"] if key == "logger.log_dir" and (folder / "dumps").exists() else []
        try:
            for each in (folder, *inner):
                each.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=each) as file:
                    file.write(b"packproof")
                    file.flush()
            own = [folder / name for name in ("metrics.jsonl", ".packproof.lock")]
            found += [  # a pipe would be waited for without end
                setup.refuse("no_folder", key, f"{each} must be a regular file", "move it away")
                for each in own
                if each.exists() and not each.is_file()
            ]
            if not found and key == "logger.log_dir" and (folder / "metrics.jsonl").exists():
                (folder / "metrics.jsonl").open("ab").close()
        except OSError as error:
            place = Path(error.filename) if isinstance(error.filename, str) else folder
            found.append(_no_folder(setup, key, folder, f"cannot be written to ({error.strerror or error})", place))
    return found


def _is_told(folder: Path, found: list[SetupRefused], job: Job) -> bool:
    """Return whether a folder above it is refused already."""
    folders = _folders(job)
    return any(folders[each.key] in folder.parents for each in found)


def _no_folder(setup: Setup, key: str, folder: Path, why: str, place: Path) -> SetupRefused:
    near = _nearest(place)
    if near != folder and not near.is_dir():
        why = f"cannot be made: {near} is not a folder"
    elif folder.exists() and not folder.is_dir():
        why = "is not a folder"
    fix = "give a folder that this machine can write to, with room on its disk; the job creates a folder that does not exist"
    return setup.refuse("no_folder", key, f"{folder} {why}", fix)


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next((each for each in (folder, *folder.absolute().parents) if os.path.lexists(each)), Path("/"))


def _missing_packages(setup: Setup) -> Iterator[SetupRefused]:
    for key, (module, package) in _PACKAGES.items():
        if getattr(setup.job.logger, key.rpartition(".")[2]) and importlib.util.find_spec(module) is None:
            what, fix = f"{package} is not installed", "install it, or set this to false"
            yield setup.refuse("no_package", key, what, fix)
    if setup.job.model.initial == "huggingface" and not has_bridge():
        what = "Megatron-Bridge is not installed"
        fix = "install the extra `bridge` (package megatron-bridge; it needs CUDA), or start from a megatron-core checkpoint"
        yield setup.refuse("no_package", "model.initial", what, f"{fix} (model.initial=megatron)")


def has_bridge() -> bool:
    """Return whether Megatron-Bridge is installed."""
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:
        return False
