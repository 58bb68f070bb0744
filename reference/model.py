"""A small transformer on one process that computes what megatron-core's GPTModel and HybridModel compute on a packed row (docs/SPEC.md#model).
It takes their weights by name, unsharded; quadratic in a segment, so for rows of hundreds of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.model_layers import (
    EXACT,
    FLOAT32,
    CrossEntropy,
    Rounding,
    Row,
    Weights,
    attention,
    experts,
    linear,
    mlp,
    norm,
)
from reference.model_shape import Shape
from reference.multi_token import shift

__all__ = ["EXACT", "FLOAT32", "Losses", "Model", "Rounding", "Shape"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """Results of a row before any mask or weight is applied."""

    tokens: list[Tensor]
    """Cross entropy of each position, `[P]`, float32: first the model's own, then one for each MTP depth, against the labels of that depth. R-MODEL-8, R-MODEL-9."""
    auxiliary: list[Tensor]
    """Load-balancing losses, scalars that already hold their coefficient, one for each run of a router. R-MODEL-7."""
    router_gap: float
    """Smallest gap, over all routers and tokens, between the score of a chosen expert and of an expert that was not chosen; infinite without a router.
    If the gap is within rounding, another side may choose another expert. R-MODEL-6."""


class Model:
    """The transformer with its weights, which gather gradients. R-MODEL-1 to R-MODEL-9."""

    def __init__(self, shape: Shape, weights: Weights, rounding: Rounding) -> None:
        """Use `from_tensors`."""
        self.shape, self.weights, self.rounding = shape, weights, rounding

    @classmethod
    def from_tensors(cls, shape: Shape, named: Mapping[str, Tensor], *, rounding: Rounding = FLOAT32) -> Model:
        """Return a model of copies of tensors, named as `named_parameters()` of the megatron-core model at tp = pp = ep = 1. R-MODEL-1.

        A router's buffer `expert_bias` may be among the tensors. All tensors have one floating dtype, in which the model computes except for
        `rounding` (R-MODEL-10). Raises ValueError for a missing or unused name, or for several dtypes.
        """
        if len(dtypes := {tensor.dtype for name, tensor in named.items() if not _is_buffer(name)}) != 1:
            raise ValueError(f"the weights must have one dtype, got {dtypes}; cast them to one")
        model = cls(shape, Weights({name: _leaf(name, tensor) for name, tensor in named.items()}), rounding)
        # One token reads every weight, also those of all experts.
        model.logits(torch.zeros(1, dtype=torch.int64), [0, 1])
        if unused := sorted(set(model.weights) - model.weights.read):
            raise ValueError(f"the model does not use {', '.join(unused)}; correct the shape, or remove these tensors")
        return model

    def logits(self, input_ids: Tensor, cu_seqlens: Sequence[int]) -> list[Tensor]:
        """Return logits `[P, V]` of the model and of each MTP depth, for ids `[P]` and boundaries from 0 to P. R-MODEL-9."""
        return self._run(input_ids, self._row(cu_seqlens))

    def losses(self, input_ids: Tensor, target_ids: Tensor, cu_seqlens: Sequence[int]) -> Losses:
        """Return per-token losses at every depth, for ids and shifted labels `[P]`, int64. The caller applies masks and weights. R-MODEL-8, R-MODEL-9."""
        row = self._row(cu_seqlens)
        logits = self._run(input_ids, row)
        tokens = [
            CrossEntropy.apply(row.rounding(scores), shift(target_ids, row.cu_seqlens, depth))
            for depth, scores in enumerate(logits)
        ]
        gap = min(row.gaps, default=float("inf"))
        return Losses(tokens=tokens, auxiliary=row.auxiliary, router_gap=gap)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Return the gradient of a scalar for each parameter by name, in the parameter's shape and dtype; 0 if the scalar does not depend on the parameter."""
        leaves = {name: leaf for name, leaf in self.weights.named.items() if leaf.requires_grad}
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    def _run(self, input_ids: Tensor, row: Row) -> list[Tensor]:
        if row.cu_seqlens[-1] != len(input_ids):
            raise ValueError(
                f"cu_seqlens must end at {len(input_ids)}, the tokens of the row, got {row.cu_seqlens[-1]}"
            )
        states = [self._decoder(self._embed(input_ids), row)]
        for depth in range(1, self.shape.mtp_num_layers + 1):
            states.append(self._next_depth(states[-1], input_ids, depth, row))
        return [self._head(state) for state in states]

    def _row(self, cu_seqlens: Sequence[int]) -> Row:
        boundaries = [int(boundary) for boundary in cu_seqlens]
        if boundaries[0] != 0 or boundaries != sorted(boundaries):
            raise ValueError(f"cu_seqlens must begin at 0 and never fall, got {boundaries}")
        return Row(cu_seqlens=boundaries, rounding=self.rounding)

    def _embed(self, input_ids: Tensor) -> Tensor:
        return self.weights["embedding.word_embeddings.weight"][input_ids]  # [P, hidden]

    def _head(self, hidden: Tensor) -> Tensor:
        """Return the logits by the output layer that all depths share; if tied, the layer is the embedding, whose gradient is the sum of both uses. R-MODEL-9."""
        tied = self.shape.share_embeddings_and_output_weights
        return hidden @ self.weights["embedding.word_embeddings.weight" if tied else "output_layer.weight"].T

    def _decoder(self, hidden: Tensor, row: Row) -> Tensor:
        if self.shape.hybrid_layer_pattern is not None:
            hidden = self._hybrid("decoder", self.shape.main_pattern, hidden, row)
            return norm(self.weights, ["decoder.final_norm."], hidden, self.shape)
        for layer in range(self.shape.num_layers):
            hidden = self._layer(f"decoder.layers.{layer}", hidden, row)
        return norm(self.weights, ["decoder.final_layernorm."], hidden, self.shape)

    def _hybrid(self, name: str, pattern: str, hidden: Tensor, row: Row) -> Tensor:
        """Run one sublayer for each symbol of the pattern. R-MODEL-1."""
        for layer, symbol in enumerate(pattern):
            sublayer = self._attention if symbol == "*" else self._feed_forward
            hidden = sublayer(f"{name}.layers.{layer}", hidden, row)
        return hidden

    def _layer(self, name: str, hidden: Tensor, row: Row) -> Tensor:
        return self._feed_forward(name, self._attention(name, hidden, row), row)

    def _attention(self, name: str, hidden: Tensor, row: Row) -> Tensor:
        names = [f"{name}.input_layernorm.", f"{name}.self_attention.linear_qkv.layer_norm_"]
        normed = norm(self.weights, names, hidden, self.shape)
        return hidden + attention(self.weights, f"{name}.self_attention", normed, self.shape, row)

    def _feed_forward(self, name: str, hidden: Tensor, row: Row) -> Tensor:
        names = [f"{name}.pre_mlp_layernorm.", f"{name}.mlp.linear_fc1.layer_norm_"]
        normed = norm(self.weights, names, hidden, self.shape)
        if f"{name}.mlp.router.weight" in self.weights:
            return hidden + experts(self.weights, f"{name}.mlp", normed, self.shape, row)
        return hidden + mlp(self.weights, f"{name}.mlp", normed, self.shape)

    def _next_depth(self, hidden: Tensor, input_ids: Tensor, depth: int, row: Row) -> Tensor:
        """Return the state `[P, hidden]` at `depth`, from the state at the previous depth and the tokens `depth` positions ahead. R-MODEL-9."""
        repeated = self.shape.mtp_use_repeated_layer
        name = f"mtp.layers.{0 if repeated else depth - 1}"
        token = norm(self.weights, [f"{name}.enorm."], self._embed(shift(input_ids, row.cu_seqlens, depth)), self.shape)
        before = norm(self.weights, [f"{name}.hnorm."], hidden, self.shape)
        hidden = linear(self.weights, f"{name}.eh_proj", torch.cat((token, before), -1))
        earlier = len(row.auxiliary)
        if self.shape.hybrid_layer_pattern is not None:
            hidden = self._hybrid(f"{name}.mtp_model_layer", self.shape.depth_pattern, hidden, row)
        else:
            hidden = self._layer(f"{name}.mtp_model_layer", hidden, row)
            if repeated:  # a HybridModel does not know that its router is one of MTP. R-MODEL-7
                row.auxiliary[earlier:] = [loss / self.shape.mtp_num_layers for loss in row.auxiliary[earlier:]]
        return norm(self.weights, [f"{name}.final_layernorm."], hidden, self.shape)


def _is_buffer(name: str) -> bool:
    return name.endswith(".expert_bias")


def _leaf(name: str, tensor: Tensor) -> Tensor:
    """Return a copy that collects gradients; a buffer collects none."""
    return tensor.detach().clone().requires_grad_(not _is_buffer(name))
