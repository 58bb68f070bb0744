"""Read and fill a rank's parameters as parts of the whole model's, by megatron-core's sharding metadata, so that
layouts share one set of weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from production.errors import PackproofError


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """Holds one rank's part of one tensor of the whole model."""

    name: str
    """The parameter's name in the unsharded model (tp, pp and ep 1), as its `named_parameters` has it."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    part: tuple[slice, ...]
    """Place of this rank's values in the whole tensor."""
    values: torch.Tensor
    """This rank's values, of any shape and dtype, a view: writing changes the model."""
    is_main: bool
    """Whether this rank counts: of several with the same part, one does."""


def shards(
    model: torch.nn.Module, *, of: Callable[[torch.nn.Parameter], torch.Tensor] | None = None
) -> Iterator[Shard]:
    """Return the parts of this rank's model; `of` takes something else of any shape that a parameter has, such as its
    gradient.
    """
    inner = unwrap(model)
    parameters = dict(inner.named_parameters())
    for local_name, entry in inner.sharded_state_dict().items():
        if local_name not in parameters:
            continue  # buffers and Transformer Engine's extra state are no weights
        parameter = parameters[local_name]
        values = parameter.data if of is None else of(parameter)
        name = _global_name(inner, local_name)
        for piece in _pieces(dataclasses.replace(entry, data=values)):
            extra = piece.prepend_axis_num
            offsets, sizes = piece.global_offset[extra:], piece.local_shape
            yield Shard(
                name=name,
                shape=tuple(piece.global_shape[extra:]),
                part=tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)),
                values=piece.data,
                is_main=not any(piece.replica_id) if isinstance(piece.replica_id, tuple) else piece.replica_id == 0,
            )


@torch.no_grad()
def fill(model: torch.nn.Module, whole: Callable[[str, tuple[int, ...]], torch.Tensor]) -> None:
    """Set this rank's weights from the whole model's, which `whole` gives by name and shape: [shape], of any dtype.

    Call it before an optimizer is made, which keeps copies. Raises PackproofError for a tensor of another shape.
    """
    for shard in shards(model):
        tensor = whole(shard.name, shard.shape)
        if tuple(tensor.shape) != shard.shape:
            raise PackproofError(
                what=f"must have the shape {list(shard.shape)}, got {list(tensor.shape)}",
                where=f"weight {shard.name}",
                fix="give the whole tensor of a model of the same shape",
            )
        shard.values.copy_(tensor[shard.part])


def drawn(seed: int, *, scale: float = 0.02) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
    """Return weights of any shape by name from a seed, the same in every layout: float64, norms around 1, others
    around 0.
    """

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_mix(seed, name))
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values + 1 if "norm" in name and name.endswith("weight") else values

    return draw


def assemble(
    parts: Mapping[str, list[tuple[tuple[int, ...], tuple[slice, ...], torch.Tensor]]],
) -> dict[str, torch.Tensor]:
    """Return whole tensors of any shape from the parts of all ranks: shape, part and values by name.

    Raises PackproofError for a missing part.
    """
    whole = {}
    for name, pieces in parts.items():
        shape, dtype = pieces[0][0], pieces[0][2].dtype
        tensor, covered = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.int32)
        for _, part, values in pieces:
            tensor[part] = values
            covered[part] += 1
        if not bool((covered == 1).all()):
            raise PackproofError(
                what=f"every value must come from one rank, got {int((covered == 0).sum())} values from no rank and {int((covered > 1).sum())} from several",
                where=f"weight {name}",
                fix="give the main parts of all ranks of one model",
            )
        whole[name] = tensor
    return whole


def unwrap(model: torch.nn.Module) -> Any:
    """Return the model within its wrappers (DDP, mixed precision)."""
    while not hasattr(model, "sharded_state_dict") or hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def _pieces(entry: Any) -> Iterator[ShardedTensor]:
    """Return the pieces of a factory, such as that of a gated MLP's two halves, which gives several."""
    if isinstance(entry, ShardedTensorFactory):
        entry = entry.build()
    if isinstance(entry, ShardedTensor):
        yield entry
        return
    for each in entry.values() if isinstance(entry, dict) else entry:
        yield from _pieces(each)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def _global_name(model: Any, name: str) -> str:
    """Return the name with the layer's number in the whole model instead of the stage's, and the expert's instead of
    the rank's.
    """
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"  # the last stage's copy, where the first has the embedding
    if match := _LAYER.match(name):
        number = model.decoder.layers[int(match[1])].layer_number - 1
        name = f"decoder.layers.{number}.{name[match.end() :]}"
    if match := _EXPERT.search(name):
        here = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        number = parallel_state.get_expert_model_parallel_rank() * here + int(match[1])
        name = f"{name[: match.start()]}.local_experts.{number}.{name[match.end() :]}"
    return name


def _mix(seed: int, name: str) -> int:
    """Return a seed of its own for each name, the same everywhere."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")
