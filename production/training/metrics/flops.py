"""Compute model FLOPs of a step by Megatron-LM's formula, with attention counted over segments, not over the row's
length.

A row of 262,144 tokens in segments of 1,024 costs 256 times less attention than one segment; counting its row length
would raise the reported MFU by that factor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from production.errors import PackproofError

FORWARD_AND_BACKWARD = 3
"""Passes of a product: once forward and twice backward; recomputation does not count."""
MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """Sizes that give the cost of a model's matrix products (R-WORK-1), without embedding look-up, norms, softmax and
    router.
    """

    hidden_size: int
    """Channels of a token between layers."""
    vocab_size: int
    """Columns of the output layer, padding included."""
    attention_layers: int
    """Attention layers, those of multi-token prediction included, as in the next two."""
    dense_layers: int
    """Layers with one feed-forward network."""
    expert_layers: int = 0
    """Layers with experts."""
    query_size: int
    """Heads times the size of a head."""
    key_value_size: int
    """Groups of keys times the size of a head."""
    ffn_hidden_size: int
    """Inner channels of a dense layer's feed-forward network."""
    is_gated: bool = False
    """Whether feed-forward networks have three products (SwiGLU), not two."""
    has_output_gate: bool = False
    """Whether attention's output is gated by one more projection."""
    experts_per_token: int = 0
    """Routed experts that a token goes through."""
    expert_ffn_hidden_size: int = 0
    """Inner channels of one routed expert."""
    shared_expert_ffn_hidden_size: int = 0
    """Inner channels of the shared expert; 0 without a shared expert."""
    expert_latent_size: int | None = None
    """Size that routed experts work in, if not the hidden size."""
    depths: int = 0
    """D of multi-token prediction: each has one projection from 2·hidden and the output layer once more."""

    @property
    def per_token(self) -> int:
        """Return the floating-point operations per token, forward and backward."""
        hidden, products = self.hidden_size, 3 if self.is_gated else 2
        if self.expert_latent_size is None:
            routed = products * self.expert_ffn_hidden_size * self.experts_per_token * hidden
        else:
            routed = products * self.expert_ffn_hidden_size * self.experts_per_token * self.expert_latent_size
            routed += 2 * hidden * self.expert_latent_size
        shared = products * self.shared_expert_ffn_hidden_size * hidden
        gate = self.query_size if self.has_output_gate else 0
        attention = hidden * (2 * self.query_size + 2 * self.key_value_size + gate)
        # 3·hidden: Megatron-LM counts the norms of a depth, though no others.
        depths = self.depths * (2 * hidden * hidden + 3 * hidden)
        multiplications = (
            self.attention_layers * attention
            + self.dense_layers * products * self.ffn_hidden_size * hidden
            + self.expert_layers * (routed + shared)
            + depths
            + (1 + self.depths) * hidden * self.vocab_size
        )
        return FORWARD_AND_BACKWARD * MULTIPLY_ADD * multiplications

    @property
    def per_square(self) -> int:
        """Return the floating-point operations per Σ L² over segments: two products of L × L, half of each masked."""
        return FORWARD_AND_BACKWARD * MULTIPLY_ADD * self.attention_layers * self.query_size

    def __call__(self, tokens: int, square_sum: int) -> float:
        """Return the floating-point operations of `tokens` and squared segment lengths, both without padding."""
        return float(self.per_token * tokens + self.per_square * square_sum)


def work_of(config: Any, *, vocab_size: int, hybrid_layer_pattern: str | None = None) -> ModelWork:
    """Return the work of a model of megatron-core's TransformerConfig `config`; `vocab_size` counts the padded output
    layer.

    Raises PackproofError for a model that the formula does not cover (layers of state-space models), whose TFLOP/s
    are then not reported. Attention is SelfAttention, as in every model that `production.model.model` builds.
    """
    depths = config.mtp_num_layers or 0
    if hybrid_layer_pattern is None:
        attention, dense, experts = _layers(config, depths)
    else:
        attention, dense, experts = _hybrid_layers(hybrid_layer_pattern)
        depths = hybrid_layer_pattern.count("/")
    return ModelWork(
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        attention_layers=attention,
        dense_layers=dense,
        expert_layers=experts,
        query_size=config.kv_channels * config.num_attention_heads,
        key_value_size=config.kv_channels * (config.num_query_groups or config.num_attention_heads),
        ffn_hidden_size=config.ffn_hidden_size,
        is_gated=config.gated_linear_unit,
        has_output_gate=bool(getattr(config, "attention_output_gate", False)),
        experts_per_token=config.moe_router_topk if experts else 0,
        expert_ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        shared_expert_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0,
        expert_latent_size=getattr(config, "moe_latent_size", None),
        depths=depths,
    )


def segment_squares(cu_seqlens: torch.Tensor, padding_tokens: int) -> int:
    """Return Σ L² over the segments of one row (R-WORK-2); `cu_seqlens` is [K] int32 on the host.

    Padding is subtracted at the end of the row, where all padding lies at cp 1. At cp > 1 each segment has up to 2·cp
    - 1 positions of its own padding, which are counted as if they lay at the end too: the error of the sum is as
    large, out of thousands.
    """
    lengths: list[int] = cu_seqlens.diff().tolist()
    for place in reversed(range(len(lengths))):
        taken = min(padding_tokens, lengths[place])
        lengths[place] -= taken
        padding_tokens -= taken
        if not padding_tokens:
            break
    return sum(length * length for length in lengths)


def peak_tflops(device: torch.device | str) -> float | None:
    """Return the device's dense bf16 peak in TFLOP/s by its name; None on CPU and for a device that the table lacks."""
    if torch.device(device).type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Return the peak of a device of this name, such as `NVIDIA H100 80GB HBM3`; None for a slice of a device (MIG)."""
    words = re.split(r"[ -]+", name.removeprefix("NVIDIA "))
    if "MIG" in words:
        return None
    key = (words[0], next((word for word in words if word in ("PCIe", "PCIE", "NVL")), ""))
    return PEAKS.get(key, PEAKS.get((words[0], "")) if words[0] in ONE_PEAK else None)


PEAKS: dict[tuple[str, str], float] = {
    ("A10", ""): 125.0,
    ("A30", ""): 165.0,
    ("A40", ""): 149.7,
    ("A100", ""): 312.0,
    ("A800", ""): 312.0,
    ("L4", ""): 121.0,
    ("L40", ""): 181.0,
    ("L40S", ""): 362.0,
    ("H20", ""): 148.0,
    ("H100", ""): 989.5,
    ("H100", "PCIe"): 756.5,
    ("H100", "NVL"): 835.5,
    ("H800", ""): 989.5,
    ("H200", ""): 989.5,
    ("H200", "NVL"): 835.5,
    ("GH200", ""): 989.5,
    ("B200", ""): 2250.0,
    ("B300", ""): 2250.0,
    ("GB200", ""): 2500.0,
    ("GB300", ""): 2500.0,
}
"""Dense bf16 TFLOP/s of NVIDIA's data sheets by model and board (R-WORK-3): half of the published figure with
sparsity.
"""
ONE_PEAK = frozenset({"A10", "A30", "A40", "A100", "A800", "L4", "L40", "L40S"})
"""Models whose boards all have the same peak."""


def _layers(config: Any, depths: int) -> tuple[int, int, int]:
    """Return attention, dense and expert layers; a depth has a layer like the last one."""
    if config.num_moe_experts is None:
        return config.num_layers + depths, config.num_layers + depths, 0
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        pattern = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    else:
        pattern = list(frequency)
    experts = sum(pattern) + depths * pattern[-1]
    return config.num_layers + depths, config.num_layers + depths - experts, experts


def _hybrid_layers(pattern: str) -> tuple[int, int, int]:
    main, *rest = pattern.split("/")
    letters = "".join([main, *rest]).replace("|", "")
    if other := sorted(set(letters) - set("*-E")):
        raise PackproofError(
            what=f"layers {', '.join(other)} of the pattern {pattern} have no count of FLOPs",
            where="model.hybrid_layer_pattern",
            fix="do without TFLOP/s and MFU: nothing else needs the count",
        )
    return letters.count("*"), letters.count("-"), letters.count("E")
