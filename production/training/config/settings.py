"""Convert a job into the settings of each part: model, layout of ranks, rows, order, megatron-core's options."""

from __future__ import annotations

from typing import Any

import torch

from production.online.chat import ChatSettings
from production.parallel.sizes import ParallelSizes
from production.rows.builder import RowSettings
from production.semantics import parse
from production.training.config.megatron_options import converted, dtype
from production.training.config.schema.data import Dataset
from production.training.config.schema.job import Job
from production.training.order_settings import OrderSettings

_ACTIVATIONS = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
_SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels",
    "normalization", "gated_linear_unit", "add_bias_linear", "hidden_dropout", "attention_dropout",
    "num_moe_experts", "moe_ffn_hidden_size",
)  # fmt: skip
"""Fields of section `model` that megatron-core's TransformerConfig has under the same name."""
FROM_LAYOUT = {
    "tensor_model_parallel_size": "policy.megatron_cfg.tensor_model_parallel_size",
    "context_parallel_size": "policy.megatron_cfg.context_parallel_size",
    "pipeline_model_parallel_size": "policy.megatron_cfg.pipeline_model_parallel_size",
    "expert_model_parallel_size": "policy.megatron_cfg.expert_model_parallel_size",
    "expert_tensor_parallel_size": "policy.megatron_cfg.expert_tensor_parallel_size",
    "sequence_parallel": "policy.megatron_cfg.sequence_parallel",
    "pipeline_dtype": "policy.megatron_cfg.pipeline_dtype",
}
"""Fields of TransformerConfig that follow from the layout, to the job's key for them: they never reach `transformer_options`."""


def sizes(job: Job) -> ParallelSizes:
    """Return the layout of ranks."""
    return ParallelSizes(
        tensor=job.megatron.tensor_model_parallel_size,
        context=job.megatron.context_parallel_size,
        pipeline=job.megatron.pipeline_model_parallel_size,
        expert=job.megatron.expert_model_parallel_size,
        expert_tensor=job.megatron.expert_tensor_parallel_size,
    )


def row_settings(job: Job, dataset: Dataset) -> RowSettings:
    """Return the settings of a dataset's rows (online: conversations).

    PackproofError as RowSettings and `semantics.parse`.
    """
    return RowSettings(
        pack_length=job.policy.max_total_sequence_length,
        prompt_format=dataset.megatron_sft_prompt_format or "default",
        context_parallel_size=dataset.megatron_sft_context_parallel_size,
        semantics=parse(dataset.semantics),
        pad_token=dataset.megatron_sft_pad_token,
        assistant_prefix_len=dataset.megatron_sft_assistant_prefix_len,
    )


def chat_settings(job: Job, dataset: Dataset) -> ChatSettings:
    """Return the settings that turn conversations of the online path into tokens. PackproofError as ChatSettings."""
    data = job.data
    return ChatSettings(
        prompt_format=dataset.megatron_sft_prompt_format or "default",
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        add_generation_prompt=data.add_generation_prompt,
        on_unjoined_pieces=data.on_unjoined_pieces,
        max_length=data.max_input_seq_length or job.policy.max_total_sequence_length,
        on_long_conversation=data.on_long_conversation,
    )


def order_settings(job: Job, data_parallel_size: int) -> OrderSettings:
    """Return the order of the training rows. PackproofError as OrderSettings.

    Each file with a weight is a source of its own; without weights all files are one source, end to end.
    """
    files = [file for dataset in job.data.train for file in dataset.data_path]
    weights = tuple(file.weight for file in files if file.weight is not None)
    return OrderSettings(
        kind=job.data.order or "sequential",
        last_batch=job.data.last_batch,
        global_batch_size=job.policy.train_global_batch_size,
        data_parallel_size=data_parallel_size,
        seed=job.data.seed if job.data.order == "shuffle" else None,
        max_epochs=job.sft.max_num_epochs,
        run_steps=job.sft.max_num_steps if (job.data.order or "").startswith("megatron-cyclic") else None,
        weights=weights or None,
    )


def transformer_options(job: Job) -> dict[str, Any]:
    """Return the fields of megatron-core's TransformerConfig that the job sets, as megatron-core takes them.

    Fields that follow from the layout (`production.model.model.DERIVED`) are left out. Options passed on by name come
    last, but `validate` refuses an option that contradicts a key of the job (SPEC R-SETUP-6).
    """
    model, megatron = job.model, job.megatron
    found: dict[str, Any] = {name: value for name in _SHAPE if (value := getattr(model, name)) is not None}
    found["activation_func"] = _activation(model.activation)
    found["params_dtype"] = dtype(job.policy.precision)
    found["bf16"] = job.policy.precision == "bfloat16"
    found["calculate_per_token_loss"] = job.loss.normalization != "mean_of_means"
    if model.num_moe_experts is not None:
        found["moe_router_topk"] = model.moe_router_topk
        found["moe_token_dispatcher_type"] = "alltoall"  # megatron-core's default cannot do expert parallelism
    if multi_token_depths(job):
        if megatron.mtp_num_layers:  # else the hybrid pattern says it
            found["mtp_num_layers"] = megatron.mtp_num_layers
        found["mtp_loss_scaling_factor"] = megatron.mtp_loss_scaling_factor
        found["mtp_use_repeated_layer"] = megatron.mtp_use_repeated_layer
    if megatron.activation_checkpointing:
        found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if megatron.fp8_cfg.enabled:
        found |= {name: getattr(megatron.fp8_cfg, name) for name in ("fp8", "fp8_recipe", "fp8_param")}
    passed_on = converted("transformer", megatron.transformer)
    return found | {name: value for name, value in passed_on.items() if name not in FROM_LAYOUT}


def model_settings(job: Job, vocab_size: int) -> Any:
    """Return the job's `production.model.model.ModelSettings`, for `vocab_size` rows of the embedding.

    PackproofError as there.
    """
    from production.model.model import ModelSettings  # noqa: PLC0415 - imports megatron-core's models

    return ModelSettings(
        vocab_size=vocab_size,
        max_sequence_length=job.policy.max_total_sequence_length,
        architecture=job.model.architecture,
        hybrid_layer_pattern=job.model.hybrid_layer_pattern,
        tie_embeddings=job.model.tie_embeddings,
        rotary_percent=job.model.rotary_percent,
        rotary_base=job.model.rotary_base,
        transformer=transformer_options(job),
    )


def optimizer_options(job: Job) -> dict[str, Any]:
    """Return the fields of megatron-core's OptimizerConfig that the job sets: precision, and options passed on by
    name.

    The recipe of fp8 is the model's, as in Megatron-LM: the distributed optimizer treats parameters of delayed
    scaling otherwise.
    """
    given = converted("optimizer", job.megatron.optimizer)
    derived: dict[str, Any] = {"bf16": job.policy.precision == "bfloat16", "params_dtype": dtype(job.policy.precision)}
    if "min_lr" not in given and job.megatron.scheduler.lr_decay_style == "constant":
        derived["min_lr"] = 0.0
    if (recipe := fp8_recipe(job)) is not None:
        derived["fp8_recipe"] = recipe
    # A params_dtype of the files is left out: megatron-core's optimizers read none, and NeMo-RL's files often have another.
    return {**derived, **given, "params_dtype": derived["params_dtype"]}


def ddp_options(job: Job) -> dict[str, Any]:
    """Return the fields of megatron-core's DistributedDataParallelConfig that the job sets; the optimizer says
    whether it is distributed.

    Parameters in fp8 are also gathered in fp8, for which Megatron-LM has one flag: the distributed optimizer would
    otherwise update no parameter.
    """
    given = converted("distributed_data_parallel_config", job.megatron.distributed_data_parallel_config)
    derived = {"use_distributed_optimizer": uses_distributed_optimizer(job)}
    if has_fp8_parameters(job):
        derived["fp8_param_gather"] = True
    return {**derived, **given}


def fp8_recipe(job: Job) -> str | None:
    """Return the scaling of the model's products in fp8; None without fp8."""
    model = transformer_options(job)
    return None if model.get("fp8") is None else model.get("fp8_recipe", "delayed")


def has_fp8_parameters(job: Job) -> bool:
    """Return whether parameters are kept in fp8."""
    fp8 = job.megatron.fp8_cfg
    return (fp8.enabled and fp8.fp8_param) or bool(job.megatron.transformer.get("fp8_param", False))


def uses_distributed_optimizer(job: Job) -> bool:
    """Return whether the optimizer's state is shared over the data-parallel ranks; megatron-core's default is that it
    is not.
    """
    return bool(job.megatron.optimizer.get("use_distributed_optimizer", False))


def multi_token_depths(job: Job) -> int:
    """Return D, the depths of multi-token prediction."""
    pattern = job.model.hybrid_layer_pattern
    return pattern.count("/") if pattern is not None else job.megatron.mtp_num_layers or 0


def _activation(name: str) -> Any:
    if name == "squared_relu":
        from megatron.core.activations import squared_relu  # noqa: PLC0415

        return squared_relu
    return _ACTIVATIONS[name]
