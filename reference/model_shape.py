"""Describe a model beside its weights: the fields of megatron-core's configuration that change its results (docs/SPEC.md#model)."""

from __future__ import annotations

from dataclasses import dataclass

NORMS = ("RMSNorm", "LayerNorm")
SCORES = ("softmax", "sigmoid")
LAYERS = "*-E"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Fields bear megatron-core's names; sizes that the weights tell are not asked for. R-MODEL-1.

    Raises ValueError for what the reference does not know.
    """

    num_layers: int
    """Layers of a GPTModel, or symbols of the pattern of a HybridModel, without MTP."""
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Channels of one attention head."""
    hybrid_layer_pattern: str | None = None
    """None: GPTModel. Else HybridModel: `*` attention, `-` MLP, `E` MoE, and after each `/` the same pattern for one MTP depth; `|` separates pipeline stages."""
    share_embeddings_and_output_weights: bool = False
    normalization: str = "RMSNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    qk_layernorm: bool = False
    activation: str = "gelu"
    """`gelu`, `silu` or `squared_relu`."""
    gated_linear_unit: bool = False
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    mtp_num_layers: int = 0
    """Depths of multi-token prediction."""
    mtp_use_repeated_layer: bool = False
    """One MTP layer serves all depths."""
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_topk_scaling_factor: float | None = None
    moe_router_dtype: str | None = None
    """`fp32`, `fp64`, or None for the dtype of the weights."""
    moe_aux_loss_coeff: float = 0.0
    """Of the load-balancing type `aux_loss`; 0: none is computed."""

    def __post_init__(self) -> None:
        """Refuse what no rule speaks of."""
        known = {
            "normalization": (self.normalization, NORMS),
            "moe_router_score_function": (self.moe_router_score_function, SCORES),
            "activation": (self.activation, ("gelu", "silu", "squared_relu")),
            "moe_router_dtype": (self.moe_router_dtype, (None, "fp32", "fp64")),
        }
        for name, (value, choices) in known.items():
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, which the reference covers, got {value!r}")
        if self.num_attention_heads % self.num_query_groups != 0:
            raise ValueError(
                f"num_query_groups must divide num_attention_heads, {self.num_attention_heads}, got {self.num_query_groups}"
            )
        if self.rotary_channels % 2 != 0:
            raise ValueError(f"the rotary channels must be an even number, got {self.rotary_channels}")
        if self.hybrid_layer_pattern is None:
            return
        main, *depths = self.hybrid_layer_pattern.split("/")
        if set(main + "".join(depths)) - set(LAYERS + "|") or len(set(depths)) > 1 or "|" in "".join(depths):
            raise ValueError(
                f"hybrid_layer_pattern must be of {LAYERS} with one pattern for all depths, got {self.hybrid_layer_pattern!r}"
            )
        if (len(main.replace("|", "")), len(depths)) != (self.num_layers, self.mtp_num_layers):
            raise ValueError(
                f"hybrid_layer_pattern {self.hybrid_layer_pattern!r} does not have {self.num_layers} layers and {self.mtp_num_layers} depths"
            )

    @property
    def rotary_channels(self) -> int:
        """Return the number of leading channels of a head that are rotated. R-MODEL-3."""
        return int(self.kv_channels * self.rotary_percent) if self.rotary_percent < 1 else self.kv_channels

    @property
    def main_pattern(self) -> str:
        """Return the layer letters of a HybridModel that stand before its MTP depths."""
        return (self.hybrid_layer_pattern or "").split("/")[0].replace("|", "")

    @property
    def depth_pattern(self) -> str:
        """Return the layer letters of one MTP depth of a HybridModel."""
        return (self.hybrid_layer_pattern or "").rpartition("/")[2]
