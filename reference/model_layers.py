"""The layers of the small transformer, each with the arithmetic of megatron-core 0.19 (docs/SPEC.md#model). Loops over segments
and experts: an expert reads every token and is weighted 0 where it was not chosen, so no token's result depends on another's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from reference.model_shape import Shape

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,  # the exact one: megatron-core's *fused* bias and gelu is the tanh approximation
    "silu": functional.silu,
    "squared_relu": lambda hidden: functional.relu(hidden).square(),
}
ROUTER_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}


class Weights(Mapping[str, Tensor]):
    """Named tensors that remember which of them were read."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named = dict(named)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of that name; ValueError if there is none."""
        if name not in self.named:
            raise ValueError(f"the weights lack {name}; give every parameter of the unsharded megatron-core model")
        self.read.add(name)
        return self.named[name]

    def __contains__(self, name: object) -> bool:
        return name in self.named

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Stands in for megatron-core's roundings to float32, in the cross entropy and the router. R-MODEL-10."""

    float32: bool
    """Whether there is one at all."""
    noise: torch.Generator | None = None
    """If given, each number is first moved by half a unit in its last float32 place, up or down as it draws."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor, rounded; the gradient has the tensor's own dtype."""
        if self.noise is not None:
            signs = torch.randint(0, 2, tensor.shape, generator=self.noise) * 2 - 1
            tensor = tensor * (1 + signs.to(tensor.dtype) * 2**-24)
        return tensor.float() if self.float32 else tensor


FLOAT32 = Rounding(float32=True)
EXACT = Rounding(float32=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """Facts about the row that the layers need."""

    cu_seqlens: Sequence[int]
    """Boundaries, from 0 to P."""
    rounding: Rounding
    """Rounding of megatron-core to float32."""
    auxiliary: list[Tensor] = field(default_factory=list)
    """Load-balancing losses, one for each run of a router; the routers append to the list. R-MODEL-7."""
    gaps: list[float] = field(default_factory=list)
    """Smallest gap in each router between the score of the last chosen expert and of the best expert that was not chosen; the routers append to the list. R-MODEL-6."""


def linear(weights: Weights, name: str, hidden: Tensor) -> Tensor:
    """Return `hidden · weightᵀ + bias` for `hidden [P, in]` and `weight [out, in]`, with the bias `[out]` if the weights have one. R-MODEL-1."""
    result = hidden @ weights[f"{name}.weight"].T
    return result + weights[f"{name}.bias"] if f"{name}.bias" in weights else result


def norm(weights: Weights, names: Sequence[str], hidden: Tensor, shape: Shape) -> Tensor:
    """Apply RMSNorm or LayerNorm over the last dimension, in float32 or wider, and cast back. R-MODEL-2.

    `names` are prefixes under which the weight may be stored: its own module's, or the prefix of the linear that it is fused with.
    """
    name = next((name for name in names if f"{name}weight" in weights), names[0])
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    if shape.normalization == "LayerNorm":
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + shape.layernorm_epsilon)
    gain = weights[f"{name}weight"] + 1 if shape.layernorm_zero_centered_gamma else weights[f"{name}weight"]
    if shape.normalization == "LayerNorm":
        return (scaled * gain + weights[f"{name}bias"]).to(hidden.dtype)
    return (scaled * gain).to(hidden.dtype)


def rotate(heads: Tensor, cu_seqlens: Sequence[int], shape: Shape) -> Tensor:
    """Apply the rotary embedding to `[P, heads, channels]`; positions restart with each segment, whatever `position_ids` say. R-MODEL-3.

    The angles, their cosine and sine are float32 in every precision.
    """
    width = shape.rotary_channels
    turned, rest = heads[..., :width], heads[..., width:]
    position = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(cu_seqlens)])
    frequency = 1.0 / (shape.rotary_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    angle = torch.outer(position.float(), frequency)  # [P, width / 2]
    if shape.rotary_interleaved and shape.hybrid_layer_pattern is None:
        angle = angle.repeat_interleave(2, -1)  # f0 f0 f1 f1 …, pairs are neighbors
    else:  # HybridModel lays the angles out so even where its pairs are neighbors
        angle = torch.cat((angle, angle), -1)  # f0 f1 … f0 f1 …
    if shape.rotary_interleaved:
        quarter = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    else:
        quarter = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
    cosine, sine = angle.cos().to(heads.dtype)[:, None], angle.sin().to(heads.dtype)[:, None]  # [P, 1, width]
    return torch.cat((turned * cosine + quarter * sine, rest), -1)


def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """Apply causal attention within each segment to queries, keys and values, each `[P, heads, channels]`. R-MODEL-4."""
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    parts = []
    # Split, not sliced: the gradient of each slice would be as long as the row.
    for q, k, v in zip(*(torch.split(each, lengths) for each in (query, key, value)), strict=True):
        scores = torch.einsum("qhc,khc->hqk", q, k) / query.shape[-1] ** 0.5
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        share = scores.masked_fill(later, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khc->qhc", share, v))
    return torch.cat(parts)


def attention(weights: Weights, name: str, hidden: Tensor, shape: Shape, row: Row) -> Tensor:
    """Apply self-attention to `[P, hidden]`. `linear_qkv` holds, for each query group, its query heads, one key and one value. R-MODEL-4."""
    groups, channels = shape.num_query_groups, shape.kv_channels
    queries = shape.num_attention_heads // groups  # per group
    mixed = linear(weights, f"{name}.linear_qkv", hidden).view(-1, groups, queries + 2, channels)
    query, key, value = mixed[:, :, :queries].flatten(1, 2), mixed[:, :, queries], mixed[:, :, queries + 1]
    if shape.qk_layernorm:
        query = norm(weights, [f"{name}.q_layernorm."], query, shape)
        key = norm(weights, [f"{name}.k_layernorm."], key, shape)
    query, key = rotate(query, row.cu_seqlens, shape), rotate(key, row.cu_seqlens, shape)
    key, value = (
        heads.repeat_interleave(queries, 1) for heads in (key, value)
    )  # query head n reads group n // queries
    return linear(weights, f"{name}.linear_proj", attend(query, key, value, row.cu_seqlens).flatten(1))


def activate(hidden: Tensor, shape: Shape) -> Tensor:
    """Apply the activation; if gated, the first half of the channels is the gate: `[P, 2·ffn]` to `[P, ffn]`. R-MODEL-5."""
    function = ACTIVATIONS[shape.activation]
    if not shape.gated_linear_unit:
        return function(hidden)
    gate, line = hidden.chunk(2, -1)
    return function(gate) * line


def mlp(weights: Weights, name: str, hidden: Tensor, shape: Shape) -> Tensor:
    """Apply the feed-forward network to `[P, hidden]`. R-MODEL-5."""
    return linear(weights, f"{name}.linear_fc2", activate(linear(weights, f"{name}.linear_fc1", hidden), shape))


def route(weights: Weights, name: str, hidden: Tensor, shape: Shape, row: Row) -> tuple[Tensor, Tensor]:
    """Return the logits and the weights of the chosen experts, both `[P, experts]`; the weight of an expert that was not chosen is 0. R-MODEL-6."""
    dtype = ROUTER_DTYPES[shape.moe_router_dtype] or hidden.dtype
    if dtype == torch.float32 and not row.rounding.float32:
        dtype = hidden.dtype
    logits = hidden.to(dtype) @ weights[f"{name}.weight"].to(dtype).T
    if f"{name}.bias" in weights:
        logits = logits + weights[f"{name}.bias"].to(dtype)
    count = shape.moe_router_topk
    if shape.moe_router_score_function == "sigmoid":
        score = row.rounding(logits).sigmoid()
        wanted = score + row.rounding(weights[f"{name}.expert_bias"]) if f"{name}.expert_bias" in weights else score
        chosen = wanted.topk(count, -1).indices
        share = score.gather(-1, chosen)
        share = share / (share.sum(-1, keepdim=True) + 1e-20) if count > 1 else share
    elif shape.moe_router_pre_softmax:
        wanted = row.rounding(logits).softmax(-1)
        share, chosen = wanted.topk(count, -1)
    else:
        wanted = logits
        best, chosen = wanted.topk(count, -1)
        share = row.rounding(best).softmax(-1)
    if count < logits.shape[-1]:
        nearest = wanted.detach().topk(count + 1, -1).values[:, -2:]
        row.gaps.append(float((nearest[:, 0] - nearest[:, 1]).min()))
    if shape.moe_router_topk_scaling_factor:
        share = share * shape.moe_router_topk_scaling_factor
    return logits, torch.zeros_like(logits).scatter(-1, chosen, share.to(logits.dtype))


def balance(logits: Tensor, shape: Shape, row: Row) -> Tensor:
    """Return the load-balancing loss of one router over the whole row, a scalar with its coefficient. R-MODEL-7."""
    if shape.moe_router_score_function == "sigmoid":
        score = row.rounding(logits).sigmoid()
        score = score / (score.sum(-1, keepdim=True) + 1e-20)
    else:
        score = row.rounding(logits).softmax(-1)
    tokens, experts = logits.shape
    chosen = score.topk(shape.moe_router_topk, -1).indices
    load = torch.zeros_like(logits, dtype=torch.int64).scatter(-1, chosen, 1).sum(0)  # tokens of each expert
    scale = experts * shape.moe_aux_loss_coeff / (shape.moe_router_topk * tokens * tokens)
    return (score.sum(0) * load).sum() * scale


def experts(weights: Weights, name: str, hidden: Tensor, shape: Shape, row: Row) -> Tensor:
    """Apply the routed experts to `[P, hidden]`, and add the shared expert if the model has one. The weight multiplies between the two linears. R-MODEL-6."""
    logits, share = route(weights, f"{name}.router", hidden, shape, row)
    if shape.moe_aux_loss_coeff:
        row.auxiliary.append(balance(logits, shape, row))
    total = torch.zeros_like(hidden)
    for expert in range(logits.shape[-1]):
        part = share[:, expert, None]  # [P, 1]
        inner = activate(expert_linear(weights, f"{name}.experts", "linear_fc1", expert, hidden, 1), shape)
        inner = (inner * part).to(hidden.dtype)
        total = total + expert_linear(weights, f"{name}.experts", "linear_fc2", expert, inner, part).to(hidden.dtype)
    if f"{name}.shared_experts.linear_fc1.weight" in weights:
        shared = mlp(weights, f"{name}.shared_experts", hidden, shape)
        if f"{name}.shared_experts.gate_weight" in weights:
            shared = shared * (hidden @ weights[f"{name}.shared_experts.gate_weight"].T).sigmoid()
        total = total + shared
    return total


def expert_linear(weights: Weights, name: str, part: str, expert: int, hidden: Tensor, share: Tensor | int) -> Tensor:
    """Apply one expert's linear, its bias times the token's weight: `local_experts.N.linear_fc1`, or grouped `linear_fc1.weightN`. R-MODEL-6."""
    alone, grouped = f"{name}.local_experts.{expert}.{part}.", f"{name}.{part}."
    if f"{grouped}weight{expert}" in weights:
        weight, bias = f"{grouped}weight{expert}", f"{grouped}bias{expert}"
    else:
        weight, bias = f"{alone}weight", f"{alone}bias"
    result = hidden @ weights[weight].T
    return result + weights[bias] * share if bias in weights else result


class CrossEntropy(torch.autograd.Function):
    """Per-token losses of logits `[P, V]`, and their gradient, with the steps of the vocabulary-parallel kernel. R-MODEL-8."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_ids: Tensor) -> Tensor:
        """Return `log Σ exp(logits - max) - (logits - max)[target]`; for a target outside the vocabulary (-100) the last term is 0."""
        logits = logits - logits.max(-1, keepdim=True).values
        known = (target_ids >= 0) & (target_ids < logits.shape[-1])
        index = target_ids.where(known, 0)[:, None]
        target = logits.gather(-1, index)[:, 0].where(known, 0)
        exponentials = logits.exp()
        total = exponentials.sum(-1)
        ctx.save_for_backward(exponentials / total[:, None], index, known)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """Return `(softmax - one at the target) · upstream`, in the dtype of the logits."""
        softmax, index, known = ctx.saved_tensors
        gradient = softmax.scatter_add(-1, index, -known[:, None].to(softmax.dtype))
        return gradient * upstream[0][:, None], None
