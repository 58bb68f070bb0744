"""Declare the shape of the model: enough to build the model from nothing, beside megatron-core's own options by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Model:
    """Section `model`. Fields of one name with megatron-core's TransformerConfig mean what they mean there."""

    initial: Literal["scratch", "megatron", "huggingface"] = "scratch"
    """Where the weights come from: drawn from `sft.seed`, a megatron-core checkpoint, or one of Hugging Face through Megatron-Bridge."""
    initial_path: str | None = None
    """Folder of the megatron-core checkpoint (`megatron`), or folder or name of the Hugging Face one (`huggingface`; None: `policy.model_name`)."""
    architecture: Literal["gpt", "hybrid"] = "gpt"
    """megatron-core's GPTModel or its successor HybridModel."""
    hybrid_layer_pattern: str | None = None
    """Layers of a hybrid model, such as `*-*-/*-/*-` (after each slash one multi-token depth); required for `hybrid`, refused for `gpt`."""
    vocab_size: int | None = None
    """Rows of the embedding; None: derived from the tokenizer when the job begins, padded to a multiple of tensor parallelism."""
    tie_embeddings: bool = False
    """Whether the output head is the embedding."""
    rotary_base: int = 10_000
    """Base of the rotary position embedding."""
    rotary_percent: float = 1.0
    """Share of a head's width that turns, in (0, 1]."""
    num_layers: int | None = None
    """Layers of the decoder, without multi-token depths; required (`hybrid`: derived from the pattern)."""
    hidden_size: int | None = None
    """Width of a token; required."""
    num_attention_heads: int | None = None
    """Query heads; required."""
    num_query_groups: int | None = None
    """Key and value heads; None: as many as query heads."""
    ffn_hidden_size: int | None = None
    """Width of the MLP; None: megatron-core's 4 x hidden_size."""
    kv_channels: int | None = None
    """Width of a head; None: hidden_size / num_attention_heads."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of norm; the CPU norm that takes sequence parallelism is an RMSNorm."""
    activation: Literal["gelu", "silu", "squared_relu"] = "gelu"
    """Function of the MLP; megatron-core's `activation_func`, which a file cannot hold."""
    gated_linear_unit: bool = False
    """Whether the MLP is gated (with `silu`: SwiGLU)."""
    add_bias_linear: bool = False
    """Whether linear layers have a bias."""
    hidden_dropout: float = 0.0
    """Share of hidden activations dropped in training, in [0, 1)."""
    attention_dropout: float = 0.0
    """Share of attention weights dropped in training, in [0, 1)."""
    num_moe_experts: int | None = None
    """Experts of a mixture layer; None: dense. Other `moe_` options: by name in `policy.megatron_cfg`."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert's MLP; None: ffn_hidden_size."""
    moe_router_topk: int = 2
    """Experts that a token goes to."""
