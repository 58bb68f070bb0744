"""Checkpoints that are there whole or not at all: written beside, checked over, then renamed; verified byte by byte before they are read.

megatron-core's dist_checkpointing writes and reads the tensors. docs/checkpoints.md says which optimizer holds in which layout.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from production.errors import PackproofError
from production.training.checkpoint_state import (
    allocate,
    metadata,
    results_in_this_process,
    set_random,
    set_steps,
    sharded_state,
)
from production.training.engine import Engine
from production.weights import unwrap

MANIFEST = "packproof.json"
_NAME = re.compile(r"step_(\d{8})")
_CHUNK = 1 << 22


class CheckpointRefused(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A checkpoint that cannot be trusted, or is not one of this job."""


class CheckpointFailed(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A checkpoint could not be written; those before it are as they were."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the tensors: the last file to be written."""

    step: int
    """Steps that were taken."""
    consumed_samples: int
    """Rows of all of them."""
    fingerprint: dict[str, Any]
    """What the run is (`start.identity`)."""
    config: dict[str, Any]
    """The resolved job."""
    metrics: dict[str, float | None]
    """What the best checkpoints are chosen by; None for what is no number, which JSON lacks."""
    has_optimizer: bool
    """Whether it can be resumed."""
    sharding_type: str
    """megatron-core's name for how the distributed optimizer's state is laid out."""
    files: dict[str, list[int]]
    """Size and xxh3-64 of each file, by its path in the folder."""
    checksum: int = 0
    """xxh3-64 of this manifest with a 0 here."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a job in one folder that all ranks see."""

    folder: Path
    """Where they lie."""
    keep: int | None
    """How many stay; None: all."""
    metric: str | None = None
    """What the best are chosen by; None keeps the newest. The newest always stays."""
    higher_is_better: bool = False
    """Which way `metric` is read."""
    with_optimizer: bool = True
    """Whether a job can be resumed from them."""
    sharding_type: str = "dp_reshardable"
    """megatron-core's name for how the distributed optimizer's state is laid out."""

    def save(
        self,
        engine: Engine,
        *,
        step: int,
        consumed_samples: int,
        fingerprint: Mapping[str, Any],
        config: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> Path:
        """Write one. Collective over the world; it appears whole or not at all. Raises CheckpointFailed on all ranks, such as for a full disk."""
        final, work = self.folder / _name(step), self.folder / f".{_name(step)}.writing"

        def begin() -> None:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)

        def end() -> None:
            manifest = Manifest(
                step=step,
                consumed_samples=consumed_samples,
                fingerprint=dict(fingerprint),
                config=dict(config),
                metrics={name: value if math.isfinite(value) else None for name, value in metrics.items()},
                has_optimizer=self.with_optimizer,
                sharding_type=self.sharding_type,
                files={
                    str(path.relative_to(work)): _digest(path) for path in sorted(work.rglob("*")) if path.is_file()
                },
            )
            _write(work / MANIFEST, msgspec.json.encode(_sealed(manifest)))
            if final.exists():
                _remove(final)
            work.rename(final)
            _sync(self.folder)

        self._first_does(begin, work)
        with engine.settled(), results_in_this_process() as errors:
            state = sharded_state(
                engine, with_optimizer=self.with_optimizer, sharding_type=self.sharding_type, loading=False
            )
            try:
                dist_checkpointing.save(state, str(work), content_metadata=metadata(self.sharding_type))
            except CheckpointException as error:  # which torch raises on every rank, with the reasons on the first
                self._all_agree(str(errors[0]) if errors else None, work)
                self._all_agree(_reasons(error), work)
                raise self._failed(str(error), work) from error
            except (OSError, CheckpointingException) as error:  # of this rank alone: the others learn it from its end
                raise self._failed(str(error), work) from error
        self._first_does(end, work)
        if _is_first():
            self._drop_old()
        return final

    def _first_does(self, part: Callable[[], None], work: Path) -> None:
        """A part of saving that is the first rank's, for which the others wait; all raise where it fails."""
        fault = None
        if _is_first():
            try:
                part()
            except OSError as error:
                fault = str(error)
        self._all_agree(fault, work)

    def _all_agree(self, fault: str | None, work: Path) -> None:
        faults: list[str | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(faults, fault)
        for rank, each in enumerate(faults):
            if each is not None:
                raise self._failed(f"rank {rank}: {each}", work)

    def _failed(self, fault: str, work: Path) -> CheckpointFailed:
        """The error; room is made at once, since a disk that is full stays so."""
        if _is_first():
            shutil.rmtree(work, ignore_errors=True)
        newest = max(self.whole(), default=None, key=_step)
        before = "no checkpoint was written before" if newest is None else f"the one before, {newest}, is as it was"
        return CheckpointFailed(
            what=f"{fault}; {before}",
            where=f"saving a checkpoint to {self.folder}",
            mend="make room or lower checkpointing.keep_top_k, then start the job again: it goes on from its newest checkpoint",
        )

    def newest(self) -> Path | None:
        """The newest whole one; None where there is none. The same on all ranks."""
        found = [max(self.whole(), default=None, key=_step) if _is_first() else None]
        distributed.broadcast_object_list(found, src=0)
        return found[0]

    def whole(self) -> list[Path]:
        """All that were written to their end, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
        return sorted(found, key=_step)

    def incomplete(self) -> list[Path]:
        """Folders of checkpoints that lack what is written last: never read, never removed."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.glob("step_*") if path.is_dir() and not (path / MANIFEST).is_file())

    def _rank(self, path: Path) -> tuple[bool, float]:
        """Best first; one whose metric was not measured or is no number comes last."""
        assert self.metric is not None
        try:
            value = read_manifest(path).metrics.get(self.metric)
        except CheckpointRefused:
            value = None
        if value is None:
            return True, 0.0
        return False, -value if self.higher_is_better else value

    def _drop_old(self) -> None:
        for path in self.folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)  # of a run that was killed while it wrote
        if self.keep is None:
            return
        _newest, *others = self.whole()[::-1]
        if self.metric is not None:
            others.sort(key=self._rank)
        for path in others[self.keep - 1 :]:
            _remove(path)


def restore(path: Path, engine: Engine, manifest: Manifest) -> None:
    """Load weights, optimizer, schedule and random states, so that the run goes on to the bit. Collective over the world.

    Verify the files first (`verify`). Raises CheckpointRefused for one without optimizer.
    """
    if not manifest.has_optimizer:
        raise CheckpointRefused(
            what="it was written without the optimizer's state",
            where=str(path),
            mend="start from its weights in a new folder (model.initial=megatron, model.initial_path, checkpointing.checkpoint_dir)",
        )
    with torch.no_grad(), engine.settled():
        allocate(engine.optimizer)
        wanted = sharded_state(engine, with_optimizer=True, sharding_type=manifest.sharding_type, loading=True)
        state = load_state(wanted, path)
        unwrap(engine.model).load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        set_steps(engine.optimizer)
        engine.scheduler.load_state_dict(state["scheduler"])
        set_random(state["random"])


def verify(path: Path) -> Manifest:
    """Read the manifest and hold every file against it; all ranks share the work. Raises CheckpointRefused on all of them."""
    fault: str | None = None
    manifest = None
    try:
        manifest = read_manifest(path)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        for name in list(manifest.files)[rank::size]:
            if not (path / name).is_file():
                fault = f"{name} is missing"
            elif _digest(path / name) != manifest.files[name]:
                fault = f"{name} is not as it was written"
            if fault:
                break
    except CheckpointRefused as error:
        fault = error.what
    except OSError as error:
        fault = str(error)
    faults: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(faults, fault)
    if found := next((each for each in faults if each), None):
        raise _damaged(f"the checkpoint is damaged: {found}", path)
    assert manifest is not None
    return manifest


def read_manifest(path: Path) -> Manifest:
    """What stands beside the tensors of one checkpoint. Raises CheckpointRefused where it cannot be read or is not as it was written."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(f"{MANIFEST} cannot be read ({error})", path) from error
    if _sealed(manifest) != manifest:
        raise _damaged(f"{MANIFEST} is not as it was written", path)
    return manifest


def load_state(wanted: dict[str, Any], path: Path) -> dict[str, Any]:
    """What is wanted, by megatron-core's loading. Collective. Raises CheckpointRefused where it has another shape."""
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(path))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        reasons = getattr(error, "failures", {})
        first = next((str(each[0]) for each in reasons.values()), str(error))
        raise CheckpointRefused(
            what=f"megatron-core cannot load it: {first.splitlines()[0] if first else type(error).__name__}",
            where=str(path),
            mend="give a checkpoint of a model of the same shape",
        ) from error
    return loaded


def _sealed(manifest: Manifest) -> Manifest:
    bare = msgspec.structs.replace(manifest, checksum=0)
    return msgspec.structs.replace(manifest, checksum=xxhash.xxh3_64_intdigest(msgspec.json.encode(bare)))


def _damaged(what: str, path: Path) -> CheckpointRefused:
    return CheckpointRefused(what=what, where=str(path), mend="move it away: the job then goes on from the one before")


def _reasons(error: CheckpointException) -> str | None:
    """What ranks could not do, of the rank that was told."""
    return next((f"of rank {rank}, {type(each[0]).__name__}: {each[0]}" for rank, each in error.failures.items()), None)


def _remove(path: Path) -> None:
    """Out of sight at once, then gone."""
    gone = path.with_name(f".{path.name}.removing")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _is_first() -> bool:
    return distributed.get_rank() == 0


def _digest(path: Path) -> list[int]:
    hashed = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
        return [file.tell(), hashed.intdigest()]


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
