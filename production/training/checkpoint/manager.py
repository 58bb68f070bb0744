"""Checkpoints that are there whole or not at all: written beside, checked over, then renamed; verified byte by byte before they are read.

megatron-core's dist_checkpointing writes and reads the tensors. docs/checkpoints.md says which optimizer holds in which layout.
"""

from __future__ import annotations

import contextlib
import math
import re
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
from production.training.checkpoint.manifest import MANIFEST, CheckpointRefused, Manifest, digest, read_manifest, sealed
from production.training.checkpoint.megatron_state import (
    allocate,
    metadata,
    not_finite,
    results_in_this_process,
    set_random,
    set_steps,
    sharded_state,
)
from production.training.engine import Engine
from production.training.metrics.versions import versions

_NAME = re.compile(r"step_(\d{8})")
_Fault = tuple[str, str]
"""What is wrong and how to mend it."""
_ROOM = "make room or lower checkpointing.keep_top_k, then start the job again: it goes on from its newest checkpoint"
_NUMBERS = (
    "lower the learning rate or change the optimizer's numbers (adam_eps, clip_grad), then start the job again: it goes on from its "
    "newest checkpoint"
)


class CheckpointFailed(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A checkpoint could not be written; those before it are as they were."""


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
        run: str = "",
        trained_tokens: int | None = None,
        skipped_rows: int | None = None,
        allowed: Callable[[], None] = lambda: None,
    ) -> Path:
        """Write one. Collective over the world; it appears whole or not at all.

        `run` names the run that it is of; `allowed` raises PackproofError on the first rank where the folder is no longer this run's.
        Raises CheckpointFailed on all ranks: for a full disk, for weights or a state of the optimizer that are no numbers, and for a
        checkpoint of another run that stands in its place.
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
        """Size and hash of each rank's own files, which it alone reads: one rank would read a large checkpoint for longer than others wait."""
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
        """Refuse the place of a whole checkpoint of another run; one of this run is made again."""
        if (final / MANIFEST).is_file() and (not run or read_manifest(final).run != run):
            raise CheckpointRefused(
                what=f"{final.name} is there already, of another run",
                where=str(self.folder),
                mend="give this run a folder of its own (checkpointing.checkpoint_dir), or move that checkpoint away",
            )

    def _first_does(self, part: Callable[[], None], work: Path | None) -> None:
        """A part of saving that is the first rank's, for which the others wait; all raise where it fails."""
        fault: _Fault | None = None
        if _is_first():
            try:
                part()
            except OSError as error:
                fault = told(error, self.folder), _ROOM
            except PackproofError as error:
                fault = f"{error.where}: {error.what}", error.mend
        self._all_agree(fault, work)

    def _all_agree(self, fault: _Fault | None, work: Path | None) -> None:
        faults: list[_Fault | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(faults, fault)
        for rank, each in enumerate(faults):
            if each is not None:
                raise self._failed(f"rank {rank}: {each[0]}", work, mend=each[1])

    def _failed(self, fault: str, work: Path | None, *, mend: str = _ROOM) -> CheckpointFailed:
        """The error; room is made at once, since a disk that is full stays so."""
        if _is_first() and work is not None:
            shutil.rmtree(work, ignore_errors=True)
        newest = max(self.whole(), default=None, key=_step)
        before = "no checkpoint was written before" if newest is None else f"the one before, {newest}, is as it was"
        return CheckpointFailed(
            what=f"{fault}; {before}",
            where=f"saving a checkpoint to {self.folder}",
            mend=mend,
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

    def _drop_old(self, run: str) -> None:
        """Remove what is left of a run that was killed while it wrote, and checkpoints beyond those kept; never one of another run."""
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
    """Load weights, optimizer, schedule and random states, so that the run goes on to the bit. Collective over the world.

    Verify the files first (`manifest.verify`). Raises CheckpointRefused for one without optimizer.
    """
    _restore(path, engine, manifest, with_random=True)


def restore_resharded(path: Path, engine: Engine, manifest: Manifest) -> None:
    """Load all but the random states, of which ranks that are laid out otherwise have none. Collective and raises as `restore`."""
    _restore(path, engine, manifest, with_random=False)


def _restore(path: Path, engine: Engine, manifest: Manifest, *, with_random: bool) -> None:
    """Load weights, optimizer and schedule, and random states where asked for."""
    if not manifest.has_optimizer:
        raise CheckpointRefused(
            what="it was written without the optimizer's state",
            where=str(path),
            mend="start from its weights in a new folder (model.initial=megatron, model.initial_path, checkpointing.checkpoint_dir)",
        )
    with torch.no_grad(), engine.settled():
        allocate(engine.optimizer)
        wanted = sharded_state(engine, with_optimizer=True, sharding_type=manifest.sharding_type, loading=True)
        if not with_random:
            del wanted["random"]
        state = load_state(wanted, path)
        unwrap(engine.model).load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        set_steps(engine.optimizer)
        engine.scheduler.load_state_dict(state["scheduler"])
        if with_random:
            set_random(state["random"])


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


def _files(work: Path, hashes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Size and hash of every file below the folder by its path: as its rank found them, the few others as they are read here."""
    names = sorted(str(path.relative_to(work)) for path in work.rglob("*") if path.is_file())
    return {name: hashes[name] if name in hashes else digest(work / name) for name in names}


def _reasons(error: CheckpointException) -> str | None:
    """What ranks could not do, of the rank that was told."""
    return next((f"of rank {rank}, {type(each[0]).__name__}: {each[0]}" for rank, each in error.failures.items()), None)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _is_first() -> bool:
    return distributed.get_rank() == 0
