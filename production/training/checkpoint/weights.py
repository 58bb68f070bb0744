"""Load only the weights of a checkpoint of any layout, of this job or of Megatron-LM, as the start of a new run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import distributed

from production.model.weights import unwrap
from production.online.padded_batch import round_up
from production.training.checkpoint.manager import load_state
from production.training.checkpoint.manifest import MANIFEST, CheckpointRefused, verify

_NO_WEIGHT = re.compile(r"(^|\.)(optimizer\.|_extra_state|rng_state|rerun_state|random$|common_state)")
"""Names in a checkpoint that are not weights."""


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Load weights into this rank's part of the model. Collective over the world.

    Call it before an optimizer is made, which keeps copies. A checkpoint of a job is verified byte by byte first; a
    checkpoint of Megatron-LM (`torch_dist`) has no checksums. Raises CheckpointRefused for a damaged checkpoint, for
    another shape or vocabulary, and for weights that the model does not have. Two differences are allowed: a model
    without multi-token depths leaves out the weights of the depths, and padding rows of a vocabulary that tensor
    parallelism adds are filled with zeros.
    """
    if is_checkpoint(path) and (path / MANIFEST).is_file():
        verify(path)
    elif not is_checkpoint(path) or not check_is_distributed_checkpoint(str(path)):
        raise not_one(path)
    inner = unwrap(model)
    with torch.no_grad():
        wanted = inner.sharded_state_dict()
        _check_names(path, wanted)
        inner.load_state_dict(load_state({"model": wanted}, path)["model"])


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder may be a Megatron-LM checkpoint: a job's has a manifest, and no other is named like a
    job's.
    """
    if (path / MANIFEST).is_file():
        return True
    return (path / "metadata.json").is_file() and not path.name.lstrip(".").startswith("step_")


def not_one(path: Path) -> CheckpointRefused:
    """Return the error for a path that is not a checkpoint directory."""
    inner = sorted(each.name for each in path.glob("step_*") if is_checkpoint(each)) if path.is_dir() else []
    newest = f", such as {path / inner[-1]}" if inner else ""
    return CheckpointRefused(
        what="the folder must be a whole checkpoint, and has neither packproof.json nor the metadata of megatron-core's torch_dist format",
        where=str(path),
        fix=f"give the folder of one checkpoint itself (step_NNNNNNNN, or Megatron-LM's iter_NNNNNNN){newest}",
    )


def _check_names(path: Path, wanted: Mapping[str, Any]) -> None:
    """Refuse weights that would be left out silently, such as an untied output layer for a tied model, or rows of a
    layer.
    """
    everyone: list[dict[str, tuple[int, int] | None]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(everyone, _names(wanted))
    model = {name: rows for names in everyone for name, rows in names.items()}
    found = dist_checkpointing.load_tensors_metadata(str(path))
    stored = {name for name in found if not _NO_WEIGHT.search(name)}
    has_depths = any(name.startswith("mtp.") for name in model)
    left = sorted(name for name in stored - model.keys() if has_depths or not name.startswith("mtp."))
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise CheckpointRefused(
            what=f"the checkpoint holds weights that the model does not have: {', '.join(left[:3])}{more}",
            where=str(path),
            fix="set section `model` to the checkpoint's shape (tie_embeddings, architecture, experts, biases)",
        )

    for name in sorted(stored & model.keys()):
        _check_rows(path, name, stored=int(found[name].global_shape[0]), model=model[name])


def _check_rows(path: Path, name: str, *, stored: int, model: tuple[int, int] | None) -> None:
    """Refuse another vocabulary: megatron-core cuts surplus rows, and leaves missing rows zero."""
    if model is None:
        return
    rows, ranks = model
    needed = round_up(stored, ranks)
    if rows != needed:
        raise CheckpointRefused(
            what=f"the model's vocabulary must have the checkpoint's {stored} rows, got {rows} ({name}): rows would be "
            f"{'cut off' if rows < stored else 'left zero'}",
            where=str(path),
            fix=f"set model.vocab_size to {needed}, the checkpoint's"
            + (f" padded to a multiple of tensor_model_parallel_size {ranks}" if needed != stored else ""),
        )


def _names(wanted: Mapping[str, Any]) -> dict[str, tuple[int, int] | None]:
    """Return rows and sharing ranks by name, for tensors that megatron-core also loads in another size; None for the
    others.
    """
    found: dict[str, tuple[int, int] | None] = {}
    for entry in wanted.values():
        pieces = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        for piece in pieces:
            if isinstance(piece, ShardedTensor):
                sized = piece.allow_shape_mismatch
                found[piece.key] = (piece.global_shape[0], piece.axis_fragmentations[0]) if sized else None
    return found
