"""Build megatron-core's GPTModel or HybridModel from a config: dense or with experts, multi-token prediction, rotary
positions.

The models are megatron-core's own, unmodified; only their modules are chosen (`device.layer_specs`).

Reference: `reference/model.py`.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from production.errors import PackproofError
from production.model.device.layer_specs import gpt_specs, hybrid_norm, hybrid_spec
from production.parallel.sizes import ParallelSizes

DERIVED = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "pipeline_dtype",
    "use_cpu_initialization",
)
"""Fields of megatron-core's TransformerConfig that follow from the layout and the device; a config that names them is refused."""

NOT_BUILT: Mapping[str, str] = {
    "multi_latent_attention": "latent attention: its layers are those of SelfAttention",
    "experimental_attention_variant": "another attention: its layers are those of SelfAttention",
    "qk_l2_norm": "an L2 norm of queries and keys: qk_layernorm is there",
    "fused_single_qkv_rope": "fused rotation of queries and keys, which megatron-core has for rows that are not packed",
    "mrope_section": "rotary positions of several axes",
    "apply_residual_connection_post_layernorm": "residuals from behind the norm, which nothing of the installed megatron-core reads",
    "use_grouped_gemm_for_dense_mlp": "grouped products of dense layers",
    "heterogeneous_block_specs": "blocks of several shapes",
}
"""Fields of TransformerConfig that megatron-core takes, and that the modules this model is made of would not act on or fail at."""

Architecture = Literal["gpt", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Holds a model's shape.

    Raises PackproofError where megatron-core has no such option, it follows from the layout, or is one of NOT_BUILT.
    """

    vocab_size: int
    """Rows of the embedding; must be a multiple of tp."""
    max_sequence_length: int
    """Tokens a row has."""
    architecture: Architecture = "gpt"
    """`gpt` is GPTModel, `hybrid` HybridModel, its successor."""
    hybrid_layer_pattern: str | None = None
    """Of `hybrid`: a letter a layer (`*` attention, `-` MLP, `E` experts), `/` before each multi-token prediction layer, `|` between stages."""
    tie_embeddings: bool = False
    """Whether the output layer is the embedding."""
    rotary_percent: float = 1.0
    """Share of a head's channels that turn, 0 to 1."""
    rotary_base: int = 10_000
    """Base of the rotary frequencies."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig by name, without DERIVED."""

    def __post_init__(self) -> None:
        """Refuse a shape that contradicts itself before anything is built."""
        known = {each.name: each.default for each in dataclasses.fields(TransformerConfig)}
        for name, value in self.transformer.items():
            told = {"where": f"model.transformer.{name}", "fix": "leave it out"}
            if name not in known:
                told["fix"] = "see megatron-core's TransformerConfig for its fields"
                raise PackproofError(what=f"{name} is not a field of TransformerConfig", **told)
            if name in DERIVED:
                raise PackproofError(what=f"{name} must not be set: it follows from the layout of ranks", **told)
            if name in NOT_BUILT and value != known[name]:
                raise PackproofError(what=f"this model does not have {NOT_BUILT[name]}", **told)
        if (self.architecture == "hybrid") != (self.hybrid_layer_pattern is not None):
            raise PackproofError(
                what=f"must {'be set' if self.architecture == 'hybrid' else 'not be set'} for the architecture {self.architecture}, got {self.hybrid_layer_pattern!r}",
                where="model.hybrid_layer_pattern",
                fix="give a pattern to the architecture hybrid only",
            )

    @property
    def mtp_num_layers(self) -> int:
        """Return D, the depths of multi-token prediction."""
        if self.hybrid_layer_pattern is not None:
            return self.hybrid_layer_pattern.count("/")
        return self.transformer.get("mtp_num_layers") or 0


def transformer_config(settings: ModelSettings, sizes: ParallelSizes) -> TransformerConfig:
    """Return megatron-core's config of this model in this layout.

    Raises PackproofError with megatron-core's own objection.
    """
    given = dict(settings.transformer)
    if settings.hybrid_layer_pattern is not None:
        main = settings.hybrid_layer_pattern.split("/")[0].replace("|", "")
        # As Megatron-LM's driver says it: the last projections of its layers are then drawn wider, by the root of two.
        given = {"num_layers": len(main), "is_hybrid_model": True, **given}
        if settings.mtp_num_layers:
            given = {"mtp_num_layers": settings.mtp_num_layers, **given}
    given.setdefault("normalization", "RMSNorm")
    given.setdefault("params_dtype", torch.float32)
    given |= {
        "tensor_model_parallel_size": sizes.tensor,
        "context_parallel_size": sizes.context,
        "pipeline_model_parallel_size": sizes.pipeline,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": sizes.tensor > 1,
        "pipeline_dtype": given["params_dtype"],
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    try:
        return TransformerConfig(**given)
    except (AssertionError, ValueError, TypeError, KeyError, NotImplementedError, ImportError) as error:
        raise PackproofError(
            what=f"megatron-core refuses this model: {reason_of(error)}",
            where="model.transformer",
            fix="change the field that the message names, or the layout",
        ) from error


def reason_of(error: BaseException) -> str:
    """Return megatron-core's objection; the condition that does not hold, where megatron-core asserts without a
    message.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return str(error) or (frames[-1].line if frames else "") or type(error).__name__


def build_model(settings: ModelSettings, sizes: ParallelSizes) -> torch.nn.Module:
    """Return the part of the model that this rank holds, on its device, in `params_dtype`; needs the parallel state
    (`production.parallel.sizes`).

    Weights are drawn from torch's generator, or on CUDA from megatron-core's tracked ones
    (`model_parallel_cuda_manual_seed`); `production.model.weights` fills them otherwise. Raises PackproofError as `transformer_config`,
    and for letters of a hybrid pattern that no module is there for.
    """
    config = transformer_config(settings, sizes)
    options = {
        "vocab_size": settings.vocab_size,
        "max_sequence_length": settings.max_sequence_length,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": settings.tie_embeddings,
        "position_embedding_type": "rope",
        "rotary_percent": settings.rotary_percent,
        "rotary_base": settings.rotary_base,
    }
    if settings.hybrid_layer_pattern is not None:
        with hybrid_norm():
            model = HybridModel(
                config,
                hybrid_spec(config, settings.hybrid_layer_pattern),
                hybrid_layer_pattern=settings.hybrid_layer_pattern,
                **options,
            )
    else:
        block, prediction = gpt_specs(config)
        model = GPTModel(config, block, mtp_block_spec=prediction, **options)
    model = model.to(config.params_dtype)
    if torch.cuda.is_available():
        model = model.cuda()
    wrapped: torch.nn.Module = Float16Module(config, model) if config.fp16 or config.bf16 else model
    return wrapped
