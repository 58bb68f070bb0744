"""Declare the policy: model name, tokenizer, batch sizes, precision, and megatron-core's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Section `policy.tokenizer`."""

    name: str
    """Folder or Hugging Face name; derived from `policy.model_name` where only that is set."""
    chat_template: str | None = "default"
    """`default`: the tokenizer's own. Else a template in Jinja, or the path of a `.jinja` file. None is refused on the online path: NeMo-RL then joins
    the contents of all messages without their roles."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """Section of a NeMo-RL part that this job does not have: the section may stand in a file, but only switched off."""

    enabled: bool = False
    """Only false."""


@dataclass(frozen=True, kw_only=True)
class DynamicBatching:
    """Section `policy.dynamic_batching`, which this job does not have."""

    enabled: bool = False
    """Only false: a row is one microbatch."""
    train_mb_tokens: int | None = None
    """Not read."""
    sequence_length_round: int | None = None
    """Not read."""


@dataclass(frozen=True, kw_only=True)
class SequencePacking:
    """Section `policy.sequence_packing`: the online path's packing of ordinary conversations."""

    enabled: bool = False
    """Whether conversations are packed per global batch: `openai_format` needs it. Packed rows take both values, which mean the same
    for them: NeMo-RL's Megatron set-up demands true for cp > 1."""
    train_mb_tokens: int | None = None
    """Tokens of a bin; None: derived, `policy.max_total_sequence_length`."""
    algorithm: Literal[
        "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
    ] = "modified_first_fit_decreasing"
    """Packer of docs/SPEC.md#packing."""
    sequence_length_round: int | None = None
    """Not read, as in NeMo-RL: lengths are rounded up to `make_sequence_length_divisible_by`."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Section `policy.megatron_cfg.scheduler`: megatron-core's OptimizerParamScheduler, in steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Course of the learning rate after warm-up."""
    lr_decay_iters: int | None = None
    """Steps until `min_lr` is reached, warm-up included; None: derived, the steps of the job."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_init: float = 0.0
    """Learning rate that warm-up begins at."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] | None = None
    """Course of the final decay under WSD."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the final decay under WSD."""
    start_weight_decay: float | None = None
    """Weight decay at the first step; None: derived, the optimizer's."""
    end_weight_decay: float | None = None
    """Weight decay at the last step; None: derived, the optimizer's."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the weight decay over the steps of the run, as in Megatron-LM: `lr_decay_iters` has no say in it."""


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Section `policy.megatron_cfg.fp8_cfg`, on CUDA only; passes on to megatron-core's options of these names."""

    enabled: bool = False
    """Whether matrix products are in fp8."""
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    """Format."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = "blockwise"
    """Scaling; decides what the online path pads a row to (docs/SPEC.md#online-path)."""
    fp8_param: bool = False
    """Whether parameters are kept in fp8."""


@dataclass(frozen=True, kw_only=True)
class MegatronCfg:
    """Section `policy.megatron_cfg`. Any field of megatron-core's TransformerConfig may also stand here by name: it is moved to `transformer`."""

    enabled: bool = True
    """Only true: megatron-core is the one backend."""
    tensor_model_parallel_size: int = 1
    """Ranks that share a layer's weights."""
    context_parallel_size: int = 1
    """Ranks that share a row."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer; inside data, context and tensor parallelism."""
    expert_tensor_parallel_size: int = 1
    """Ranks that share one expert's weights."""
    sequence_parallel: bool | None = None
    """Whether norms and dropout are shared along the row over the tensor parallel ranks; None: derived, true exactly with tensor parallelism.
    Only that: the model of this job always does so."""
    pipeline_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """Dtype in which stages send activations; None: derived, `policy.precision`. Only that."""
    activation_checkpointing: bool = False
    """NeMo-RL's word for full recomputation, uniform, one layer at a time."""
    use_fused_linear_logprobs: bool = False
    """NeMo-RL's fused head and loss: only false, the loss is the model's."""
    defer_fp32_logits: bool = False
    """NeMo-RL's late cast of logits: only false, the cross entropy is in float32 as Megatron-LM's."""
    freeze_moe_router: bool = False
    """NeMo-RL's frozen router: only false, but for a model without experts, which has no router."""
    empty_unused_memory_level: int = 0
    """Not read: NeMo-RL empties CUDA's cache between generation and training."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set before CUDA starts."""
    mtp_num_layers: int | None = None
    """Depths of multi-token prediction; None or 0: none."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean multi-token loss."""
    mtp_use_repeated_layer: bool = False
    """Whether one layer serves all depths."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig, by name."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's OptimizerConfig, by name; `lr` is required."""
    scheduler: Scheduler = Scheduler()
    """Course of learning rate and weight decay."""
    distributed_data_parallel_config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's DistributedDataParallelConfig, by name."""
    fp8_cfg: Fp8 = Fp8()
    """Low precision, on CUDA."""
    peft: Switch = Switch()
    """Adapters: only switched off."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Section `policy`."""

    tokenizer: Tokenizer
    """The tokenizer."""
    train_global_batch_size: int
    """Rows (online: conversations) of one step, over all data-parallel ranks."""
    max_total_sequence_length: int
    """Pack length `P` in tokens; online: the longest bin."""
    model_name: str | None = None
    """Hugging Face name of the model; read only where the weights come from there, and for the tokenizer where it has no name."""
    train_micro_batch_size: int = 1
    """Rows of a microbatch; only 1."""
    precision: Literal["float32", "float64", "bfloat16"] = "bfloat16"
    """Of parameters and activations; on CPU only the first two."""
    make_sequence_length_divisible_by: int | None = None
    """Online: multiple to which each sequence is padded; None: derived, the domain factor (2 x cp, x tp with sequence
    parallelism).
    """
    max_grad_norm: float | None = None
    """NeMo-RL's word for the optimizer's `clip_grad`; None: the optimizer's."""
    megatron_cfg: MegatronCfg = MegatronCfg()
    """Options of megatron-core."""
    dynamic_batching: DynamicBatching = DynamicBatching()
    """Only switched off."""
    sequence_packing: SequencePacking = SequencePacking()
    """The online path's packing."""
    dtensor_cfg: Switch = Switch()
    """NeMo-RL's other backend: only switched off."""
    draft: Switch = Switch()
    """NeMo-RL's draft model: only switched off."""
    router_replay: Switch = Switch()
    """NeMo-RL's replay of router choices: only switched off."""
    delegate_pack_to_model: bool = False
    """NeMo-RL's models that pack inside their own forward pass: only false."""
    split_training: bool = False
    """NeMo-RL's training call in pieces (begin, microbatch, finish): only false."""
    offload_optimizer_for_logprob: bool = False
    """NeMo-RL's option for its other algorithms: only false."""
