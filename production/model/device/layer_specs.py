"""Choose a model's modules: Transformer Engine's on CUDA where it is installed, megatron-core's own with the segment
attention elsewhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import multi_token_prediction as upstream_mtp
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from production.errors import PackproofError
from production.model.device.attention import SegmentAttention
from production.model.device.norm import RMSNorm

TORCH_LETTERS = "*-E"
"""Layers of a hybrid pattern for which torch's modules exist: attention, MLP, experts."""
TRANSFORMER_ENGINE_LETTERS = "MG"
"""Layers that only Transformer Engine has: Mamba, gated delta net. Latent attention (`+`, `D`) is not built."""


class SegmentSpecProvider(LocalSpecProvider):  # type: ignore[misc] # megatron-core has no types
    """Provides megatron-core's own modules, but for attention within segments and a norm that takes sequence
    parallelism.
    """

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:  # noqa: ARG002, FBT001, FBT002
        """Return `RMSNorm`, which refuses another kind by its config."""
        return RMSNorm

    def core_attention(self) -> type:
        """Return `SegmentAttention`."""
        return SegmentAttention


def uses_transformer_engine() -> bool:
    """Return whether models are made of Transformer Engine's modules: with CUDA, where it is installed."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def gpt_specs(config: TransformerConfig) -> tuple[Any, Any]:
    """Return the layers of a GPTModel on this stage, and its multi-token prediction block, or None without one."""
    if uses_transformer_engine():
        block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    else:
        count, offset = get_num_layers_to_build(config), get_transformer_layer_offset(config)
        layers = [_gpt_layer(config, is_moe=is_moe) for is_moe in _moe_layers(config)]
        block = TransformerBlockSubmodules(layer_specs=layers[offset : offset + count], layer_norm=RMSNorm)
    if not config.mtp_num_layers:
        return block, None
    if uses_transformer_engine():
        last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, use_transformer_engine=True)[-1]
        return block, gpt_layer_specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=True)
    # Of the whole model's last layer, so that it is the same on a stage that has no decoder layer.
    last = _gpt_layer(config, is_moe=_moe_layers(config)[-1])
    return block, gpt_layer_specs.get_gpt_mtp_block_spec_for_backend(config, last, SegmentSpecProvider())


def hybrid_spec(config: TransformerConfig, pattern: str) -> ModuleSpec:
    """Return the layers of a HybridModel: attention `*`, MLP `-`, experts `E`; Mamba `M` and gated delta net `G` with
    Transformer Engine.

    Raises PackproofError for other letters of `pattern`, which megatron-core would take for layers that do nothing.
    """
    _check_letters(config, pattern)
    if uses_transformer_engine():
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec  # noqa: PLC0415

        return hybrid_stack_spec
    provider = SegmentSpecProvider()
    is_moe = config.num_moe_experts is not None
    depth = upstream_mtp.get_mtp_layer_spec_for_backend(mtp_model_layer_spec=None, backend=provider)
    return ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=RMSNorm, self_attention=_attention(config), self_attn_bda=get_bias_dropout_add
                ),
            ),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=_feed_forward(config, is_moe=False)),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=_feed_forward(config, is_moe=True))
            if is_moe
            else IdentityOp,
            mtp_block_spec=ModuleSpec(
                module=upstream_mtp.MultiTokenPredictionBlock,
                submodules=upstream_mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[depth]),
            ),
        ),
    )


@contextlib.contextmanager
def hybrid_norm() -> Iterator[None]:
    """Let HybridModel be built where Transformer Engine is absent: its stack names Transformer Engine's norm itself."""
    if uses_transformer_engine():
        yield
        return
    upstream = hybrid_block.TENorm
    hybrid_block.TENorm = RMSNorm
    try:
        yield
    finally:
        hybrid_block.TENorm = upstream


def _check_letters(config: TransformerConfig, pattern: str) -> None:
    letters = TORCH_LETTERS + (TRANSFORMER_ENGINE_LETTERS if uses_transformer_engine() else "")
    absent = set(pattern) - set(letters) - set("|/")
    if config.num_moe_experts is None:
        absent |= set(pattern) & {"E"}
    if absent:
        raise PackproofError(
            what=f"the pattern must not have the layers {', '.join(sorted(absent))}, which are not available here, got {pattern}",
            where="model.hybrid_layer_pattern",
            fix="write * (attention), - (MLP) or E (experts, with num_moe_experts); M and G need Transformer Engine on CUDA",
        )


def _gpt_layer(config: TransformerConfig, *, is_moe: bool) -> ModuleSpec:
    feed_forward = _feed_forward(config, is_moe=is_moe)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=feed_forward.mlp,
            mlp_bda=get_bias_dropout_add,
            # Names in a checkpoint are those that Transformer Engine's fused layers have, so that either loads it.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                **({} if is_moe else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}),
            },
        ),
    )


def _attention(config: TransformerConfig) -> ModuleSpec:
    provider = SegmentSpecProvider()
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _feed_forward(config: TransformerConfig, *, is_moe: bool) -> TransformerLayerSubmodules:
    mlp = gpt_layer_specs.get_mlp_module_spec_for_backend(
        backend=SegmentSpecProvider(),
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    return TransformerLayerSubmodules(pre_mlp_layernorm=RMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add)


def _moe_layers(config: TransformerConfig) -> list[bool]:
    """Return which layers of the whole model have experts."""
    layers, frequency = config.num_layers, config.moe_layer_freq
    if config.num_moe_experts is None:
        return [False] * layers
    found = [number % frequency == 0 for number in range(layers)] if isinstance(frequency, int) else list(frequency)
    if len(found) != layers:
        raise PackproofError(
            what=f"moe_layer_freq must have one entry for each of the {layers} layers, got {len(found)}",
            where="transformer.moe_layer_freq",
            fix="give a number n (every nth layer has experts) or a list of 0 and 1, one for each layer",
        )
    return [bool(each) for each in found]
