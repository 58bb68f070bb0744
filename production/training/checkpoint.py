"""Checkpoints that are there whole or not at all: written beside, checked over, then renamed; verified byte by byte before they are read.

megatron-core's dist_checkpointing writes and reads the tensors. docs/checkpoints.md says which optimizer holds in which layout.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import distributed

from production.errors import PackproofError
from production.training.engine import Engine
from production.weights import unwrap

MANIFEST = "packproof.json"
_NAME = re.compile(r"step_(\d{8})")
_CHUNK = 1 << 22


class CheckpointRefused(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A checkpoint that cannot be trusted, or is not one of this job."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the tensors: the last file to be written."""

    step: int
    """Steps that were taken."""
    consumed_samples: int
    fingerprint: dict[str, Any]
    """Of data and order (`identity.fingerprint`), with the layout."""
    config: dict[str, Any]
    """The resolved job."""
    metrics: dict[str, float]
    """What the best checkpoints are chosen by."""
    has_optimizer: bool
    sharding_type: str
    files: dict[str, list[int]]
    """Size and xxh3-64 of each file, by its path in the folder."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a job in one folder that all ranks see."""

    folder: Path
    keep: int | None
    """How many stay; None: all."""
    metric: str | None = None
    """What the best are chosen by; None keeps the newest. The newest always stays."""
    higher_is_better: bool = False
    with_optimizer: bool = True
    sharding_type: str = "dp_reshardable"

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
        """Write one. Collective over the world; it appears whole or not at all."""
        final, work = self.folder / _name(step), self.folder / f".{_name(step)}.writing"
        if _is_first():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
        distributed.barrier()
        state = _sharded_state(
            engine, with_optimizer=self.with_optimizer, sharding_type=self.sharding_type, loading=False
        )
        dist_checkpointing.save(state, str(work), content_metadata=_metadata(self.sharding_type))
        distributed.barrier()
        if _is_first():
            manifest = Manifest(
                step=step,
                consumed_samples=consumed_samples,
                fingerprint=dict(fingerprint),
                config=dict(config),
                metrics=dict(metrics),
                has_optimizer=self.with_optimizer,
                sharding_type=self.sharding_type,
                files={
                    str(path.relative_to(work)): _digest(path) for path in sorted(work.rglob("*")) if path.is_file()
                },
            )
            _write(work / MANIFEST, msgspec.json.encode(manifest))
            shutil.rmtree(final, ignore_errors=True)
            work.rename(final)
            _sync(self.folder)
            self._drop_old()
        distributed.barrier()
        return final

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

    def _drop_old(self) -> None:
        for path in self.folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)  # of a run that was killed while it wrote
        if self.keep is None:
            return
        _newest, *others = self.whole()[::-1]
        if self.metric is not None:
            worst = float("-inf") if self.higher_is_better else float("inf")
            others.sort(
                key=lambda path: read_manifest(path).metrics.get(self.metric or "", worst),
                reverse=self.higher_is_better,
            )
        for path in others[self.keep - 1 :]:
            gone = path.with_name(f".{path.name}.removing")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def restore(path: Path, engine: Engine, manifest: Manifest) -> None:
    """Load weights, optimizer, schedule and random states, so that the run goes on to the bit. Collective over the world.

    Verify the files first (`verify`). Raises CheckpointRefused for one without optimizer.
    """
    if not manifest.has_optimizer:
        raise CheckpointRefused(
            what="it was written without the optimizer's state",
            where=str(path),
            mend="start from its weights (model.initial=megatron, model.initial_path), or set checkpointing.resume=false",
        )
    with torch.no_grad():
        _allocate(engine.optimizer)
        wanted = _sharded_state(engine, with_optimizer=True, sharding_type=manifest.sharding_type, loading=True)
        state = dist_checkpointing.load(wanted, str(path))
        unwrap(engine.model).load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        _set_steps(engine.optimizer)
        engine.scheduler.load_state_dict(state["scheduler"])
        _set_random(state["random"])


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """The weights alone, of a checkpoint of any layout; call it before an optimizer is made, which keeps copies."""
    inner = unwrap(model)
    with torch.no_grad():
        state = dist_checkpointing.load({"model": inner.sharded_state_dict()}, str(path))
        inner.load_state_dict(state["model"])


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
    except (OSError, msgspec.MsgspecError) as error:
        fault = f"{MANIFEST} cannot be read ({error})"
    faults: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(faults, fault)
    if found := next((each for each in faults if each), None):
        raise CheckpointRefused(
            what=f"the checkpoint is damaged: {found}",
            where=str(path),
            mend="move it away, and the job goes on from the one before; or set checkpointing.resume=false",
        )
    assert manifest is not None
    return manifest


def read_manifest(path: Path) -> Manifest:
    """What stands beside the tensors of one checkpoint."""
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)


def _sharded_state(engine: Engine, *, with_optimizer: bool, sharding_type: str, loading: bool) -> dict[str, Any]:
    model = unwrap(engine.model).sharded_state_dict(metadata=_metadata(sharding_type))
    state: dict[str, Any] = {"model": model, "random": _random()}
    if with_optimizer:
        state["optimizer"] = engine.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=_metadata(sharding_type)
        )
        state["scheduler"] = engine.scheduler.state_dict()
    return state


def _set_steps(optimizer: Any) -> None:
    """A step count of its own for each parameter, as saved: where torch's Adam serves, megatron-core 0.19.2 leaves it wrong.

    It loads one tensor for all parameters, which torch then counts up once for each of them, and not at all where the state
    was allocated before (`dp_reshardable`). The saved count stands in the groups.
    """
    for each in _single(optimizer):
        for group in each.optimizer.param_groups:
            saved = group.pop("step", None)
            for parameter in group["params"]:
                state = each.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone() if saved is None else torch.tensor(float(saved))


def _single(optimizer: Any) -> list[Any]:
    """The optimizers of a chain; megatron-core has one for dense and one for expert parameters."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _allocate(optimizer: Any) -> None:
    """Give a distributed optimizer that has not stepped its state, which is then loaded over: torch's Adam has none before."""
    for each in _single(optimizer):
        if hasattr(each, "_init_optimizer_states_with_dummy_values") and not each.optimizer.state:
            each._init_optimizer_states_with_dummy_values()  # noqa: SLF001 - what megatron-core itself calls for other formats


def _metadata(sharding_type: str) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": sharding_type,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _random() -> ShardedObject:
    """The random states of this rank, under its number."""
    states = {
        "torch": torch.get_rng_state(),
        "tracked": dict(get_cuda_rng_tracker().get_states()),
        "cuda": torch.cuda.get_rng_state(),
    }
    return ShardedObject("random", states, (distributed.get_world_size(),), (distributed.get_rank(),))


def _set_random(states: Mapping[str, Any]) -> None:
    get_cuda_rng_tracker().set_states(states["tracked"])
    torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])


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
