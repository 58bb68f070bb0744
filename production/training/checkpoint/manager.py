"""Save and restore checkpoints, each of which is either complete or absent.

A checkpoint is written to a folder beside its place, checked, then renamed, and is verified byte by byte before it is
read. megatron-core's dist_checkpointing writes and reads the tensors. docs/checkpoints.md says which optimizer holds
in which layout.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from production.errors import PackproofError
from production.model.weights import unwrap
from production.training.checkpoint.files import check_written, make_way, remove, sync, told, write
from production.training.checkpoint.manifest import (
    MANIFEST,
    CheckpointRefused,
    Manifest,
    check_optimizer,
    digest,
    read_manifest,
    sealed,
    whole_checkpoints,
)
from production.training.checkpoint.megatron_state import (
    allocate,
    metadata,
    not_finite,
    results_in_this_process,
    set_random,
    set_steps,
    sharded_state,
    single_optimizers,
)
from production.training.checkpoint.resharding import lay_out, structure_of, without_steps
from production.training.engine import Engine
from production.training.metrics.versions import versions

_Fault = tuple[str, str]
"""The fault and the fix."""
_ROOM = "make room or lower checkpointing.keep_top_k, then start the job again: it resumes from its newest checkpoint"
_NUMBERS = (
    "lower the learning rate or change the optimizer's numbers (adam_eps, clip_grad), then start the job again: it goes on from its "
    "newest checkpoint"
)


class CheckpointFailed(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Manages the checkpoints of a job in one folder that all ranks see."""

    folder: Path
    """Folder of the checkpoints."""
    keep: int | None
    """Number of checkpoints kept; None keeps all."""
    metric: str | None = None
    """Metric by which the best checkpoints are chosen; None keeps the newest. The newest checkpoint is always kept."""
    higher_is_better: bool = False
    """Whether a higher `metric` is better."""
    with_optimizer: bool = True
    """Whether the optimizer is saved, so that a job can be resumed."""
    sharding_type: str = "dp_reshardable"
    """megatron-core's name for the layout of the distributed optimizer's state."""

    def save(
        self,
        engine: Engine,
        *,
        step: int,
        consumed_samples: int,
        fingerprint: Mapping[str, Any],
        config: Mapping[str, Any],
        metrics: Mapping[str, float],
        run: str = "",
        trained_tokens: int | None = None,
        skipped_rows: int | None = None,
        tokenizer: Mapping[str, Any] | None = None,
        allowed: Callable[[], None] = lambda: None,
    ) -> Path:
        """Save a checkpoint, complete or not at all. Collective over the world.

        `run` names the run that saves, `tokenizer` is the fingerprint of its tokenizer; `allowed` raises PackproofError on the first rank where the folder no longer
        belongs to this run. Raises CheckpointFailed on all ranks: for a full disk, for NaN or infinity in weights or
        optimizer state, and for a checkpoint of another run in the same place.
        """
        final, work = self.folder / _name(step), self.folder / f".{_name(step)}.writing"
        fault = not_finite(engine)
        self._all_agree(None if fault is None else (fault, _NUMBERS), None)

        def ready() -> None:
            allowed()
            self._check_free(final, run)

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
                files=_files(work, hashes),
                run=run,
                trained_tokens=trained_tokens,
                skipped_rows=skipped_rows,
                tokenizer=dict(tokenizer or {}),
                versions=versions(),
            )
            check_written(work)
            write(work / MANIFEST, sealed(manifest))
            ready()
            make_way(final)
            work.rename(final)
            sync(self.folder)

        self._first_does(ready, None)  # what lies there may be another run's, and stays
        hashes: dict[str, list[int]] = {}
        self._first_does(begin, work)
        with engine.settled(), results_in_this_process() as errors:
            state = sharded_state(
                engine, with_optimizer=self.with_optimizer, sharding_type=self.sharding_type, loading=False
            )
            try:
                dist_checkpointing.save(state, str(work), content_metadata=metadata(self.sharding_type))
            except CheckpointException as error:  # which torch raises on every rank, with the reasons on the first
                self._all_agree((told(errors[0], self.folder), _ROOM) if errors else None, work)
                reasons = _reasons(error)
                self._all_agree(None if reasons is None else (reasons, _ROOM), work)
                raise self._failed(told(error, self.folder), work) from error
            except (OSError, CheckpointingException) as error:  # of this rank alone: the others learn it from its end
                raise self._failed(told(error, self.folder), work) from error
        hashes |= self._hash_together(work)
        self._first_does(end, work)
        if _is_first():
            self._drop_old(run)
        return final

    def _hash_together(self, work: Path) -> dict[str, list[int]]:
        """Return size and hash of each rank's own files.

        Each rank reads its own: one rank would read a large checkpoint for longer than the others wait.
        """
        mine: dict[str, list[int]] = {}
        fault: _Fault | None = None
        try:
            mine = {path.name: digest(path) for path in work.glob(f"__{distributed.get_rank()}_*.distcp")}
        except OSError as error:
            fault = told(error, self.folder), _ROOM
        self._all_agree(fault, work)
        everyone: list[dict[str, list[int]]] = [{}] * distributed.get_world_size()
        distributed.all_gather_object(everyone, mine)
        return {name: found for each in everyone for name, found in each.items()}

    def _check_free(self, final: Path, run: str) -> None:
        """Refuse to replace a complete checkpoint of another run; a checkpoint of this run is saved again."""
        if (final / MANIFEST).is_file() and (not run or read_manifest(final).run != run):
            raise CheckpointRefused(
                what=f"{final.name} exists already and belongs to another run",
                where=str(self.folder),
                fix="give this run a folder of its own (checkpointing.checkpoint_dir), or move that checkpoint away",
            )

    def _first_does(self, part: Callable[[], None], work: Path | None) -> None:
        """Do a part of saving on the first rank while the others wait; all ranks raise where that part fails."""
        fault: _Fault | None = None
        if _is_first():
            try:
                part()
            except OSError as error:
                fault = told(error, self.folder), _ROOM
            except PackproofError as error:
                fault = f"{error.where}: {error.what}", error.fix
        self._all_agree(fault, work)

    def _all_agree(self, fault: _Fault | None, work: Path | None) -> None:
        faults: list[_Fault | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(faults, fault)
        for rank, each in enumerate(faults):
            if each is not None:
                raise self._failed(f"rank {rank}: {each[0]}", work, fix=each[1])

    def _failed(self, fault: str, work: Path | None, *, fix: str = _ROOM) -> CheckpointFailed:
        """Return the error and free the space at once, since a full disk stays full otherwise."""
        if _is_first() and work is not None:
            shutil.rmtree(work, ignore_errors=True)
        newest = next(iter(self.whole()[::-1]), None)
        before = "no checkpoint was written before" if newest is None else f"the one before, {newest}, is as it was"
        return CheckpointFailed(
            what=f"{fault}; {before}",
            where=f"saving a checkpoint to {self.folder}",
            fix=fix,
        )

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, the same on all ranks; None where no complete checkpoint exists."""
        found = [next(iter(self.whole()[::-1]), None) if _is_first() else None]
        distributed.broadcast_object_list(found, src=0)
        return found[0]

    def whole(self) -> list[Path]:
        """Return all complete checkpoints, oldest first."""
        return whole_checkpoints(self.folder)

    def incomplete(self) -> list[Path]:
        """Return incomplete checkpoint folders, which lack the manifest and are never read and never removed."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.glob("step_*") if path.is_dir() and not (path / MANIFEST).is_file())

    def _rank(self, path: Path) -> tuple[bool, float]:
        """Return the sort key that puts the best first; a missing or non-finite metric comes last."""
        assert self.metric is not None
        try:
            value = read_manifest(path).metrics.get(self.metric)
        except CheckpointRefused:
            value = None
        if value is None:
            return True, 0.0
        return False, -value if self.higher_is_better else value

    def _drop_old(self, run: str) -> None:
        """Remove remains of a run that was killed while writing, and checkpoints beyond `keep`; never a checkpoint of
        another run.
        """
        for path in self.folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)
        if self.keep is None:
            return
        _newest, *others = self.whole()[::-1]
        if self.metric is not None:
            others.sort(key=self._rank)
        for path in others[self.keep - 1 :]:
            with contextlib.suppress(CheckpointRefused):  # a damaged one may be of anyone
                if read_manifest(path).run in {"", run}:
                    remove(path)


def restore(path: Path, engine: Engine, manifest: Manifest) -> None:
    """Load weights, optimizer, schedule and random states, so that the run continues bit for bit. Collective over the
    world.

    Verify the files first (`manifest.verify`). Raises CheckpointRefused for a checkpoint without optimizer.
    """
    _restore(path, engine, manifest, with_random=True)


def restore_resharded(path: Path, engine: Engine, manifest: Manifest) -> None:
    """Load everything but the random states, which a layout of another size does not have.

    Collective; raises as `restore`.
    """
    _restore(path, engine, manifest, with_random=False)


def _restore(path: Path, engine: Engine, manifest: Manifest, *, with_random: bool) -> None:
    """Load weights, optimizer and schedule, and the random states where asked for."""
    check_optimizer(path, manifest)
    with torch.no_grad(), engine.settled():
        allocate(engine.optimizer)
        wanted = sharded_state(engine, with_optimizer=True, sharding_type=manifest.sharding_type, loading=True)
        if not with_random:
            del wanted["random"]
        own = None if with_random else structure_of(wanted["optimizer"])
        state = load_state(wanted, path)
        unwrap(engine.model).load_state_dict(state["model"])
        optimizer = state["optimizer"] if own is None else lay_out(own, state["optimizer"])
        with without_steps(single_optimizers(engine.optimizer)):
            engine.optimizer.load_state_dict(optimizer)
        set_steps(engine.optimizer)
        engine.scheduler.load_state_dict(state["scheduler"])
        if with_random:
            set_random(state["random"])


def load_state(wanted: dict[str, Any], path: Path) -> dict[str, Any]:
    """Load the requested state through megatron-core. Collective.

    Raises CheckpointRefused where a tensor has another shape.
    """
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(path))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        reasons = getattr(error, "failures", {})
        first = next((str(each[0]) for each in reasons.values()), str(error))
        raise CheckpointRefused(
            what=f"megatron-core cannot load the checkpoint: {first.splitlines()[0] if first else type(error).__name__}",
            where=str(path),
            fix="give a checkpoint of a model of the same shape",
        ) from error
    return loaded


def _files(work: Path, hashes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return size and hash of every file below the folder by path; each rank hashed its own files, the rest is hashed
    here.
    """
    names = sorted(str(path.relative_to(work)) for path in work.rglob("*") if path.is_file())
    return {name: hashes[name] if name in hashes else digest(work / name) for name in names}


def _reasons(error: CheckpointException) -> str | None:
    """Return what ranks could not do, from the rank that failed."""
    return next((f"of rank {rank}, {type(each[0]).__name__}: {each[0]}" for rank, each in error.failures.items()), None)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _is_first() -> bool:
    return distributed.get_rank() == 0
