"""Translate a job to the command line of Megatron-LM's driver, and hold the way back (`packproof from-megatron-lm`) to the same job."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from production.errors import PackproofError
from production.model.model import transformer_config
from production.training.config import Job, ddp_options, load, multi_token_depths, optimizer_options, sizes
from production.training.config.megatron_options import option_defaults, quiet
from production.training.config.settings import model_settings, order_settings, row_settings
from tools.compare_runs.driver.source import SCRIPT
from tools.from_megatron_lm.arguments import PASSED_ON
from tools.from_megatron_lm.job_yaml import yaml_text
from tools.from_megatron_lm.reading import defaults, parser, read_words
from tools.from_megatron_lm.translate import translate

ON_CPU: Mapping[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""Arguments that a rank without CUDA needs; none of them changes what is trained."""
REPORTED: Mapping[str, Any] = {
    "log_interval": 1,
    "tensorboard_log_interval": 1,
    "eval_iters": 0,
    "eval_interval": 1_000_000_000,  # which Megatron-LM divides by all the same
    "create_attention_mask_in_dataloader": False,
    "num_workers": 0,
    "ckpt_format": "torch_dist",
    "no_save_optim": True,
    "no_save_rng": True,
}
"""Arguments of a run that is compared: every step is reported, nothing is validated, and only weights are saved."""
_KERNELS = "policy.megatron_cfg.transformer.transformer_impl"
"""An option that chooses among kernels; on CPU neither program looks at the job's."""
_ACTIVATIONS = ("gelu", "silu", "squared_relu")
_UNDER_OTHER_NAMES = {
    "average_in_collective": "ddp_average_in_collective",
    "num_buckets": "ddp_num_buckets",
    "bucket_size": "ddp_bucket_size",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
}
"""Option of DistributedDataParallelConfig to the driver's argument."""
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_OF_LOADERS = {"sequential": ("single", True), "megatron-cyclic": ("cyclic", False), "megatron-cyclic-sharded": ("cyclic", True)}  # fmt: skip


def command_line(job: Job, *, vocab_size: int, save: Path, start: Path | None = None) -> list[str]:
    """Return the words behind `pretrain_gpt.py` that train the job and save its last weights below `save`.

    `vocab_size` is the number of rows of the embedding, `start` a folder of Megatron-LM's whose newest checkpoint has the first weights; None
    draws them. Raises PackproofError where the job asks for something that the driver
    has no argument for.
    """
    _refuse_what_it_lacks(job)
    steps = job.sft.max_num_steps
    values = {**_model(job, vocab_size), **_layout(job), **_schedule(job), **_data(job), **_options(job)}
    saved = {"save": str(save), "save_interval": steps}
    if start is not None:
        saved |= {"load": str(start), "finetune": True}
    return words({**values, **ON_CPU, **REPORTED, **saved})


def words(values: Mapping[str, Any]) -> list[str]:
    """Return the command line of these values, by the names of Megatron-LM's parser; what is its default is left out."""
    found: list[str] = []
    for name, value in values.items():
        if _plain(value) != _plain(defaults()[name]):
            found += _words_of(name, _plain(value))
    return found


def what_is_trained(job: Job, *, vocab_size: int, data_parallel_size: int) -> dict[str, Any]:
    """Return every setting of a job that decides a number of its training, defaults filled in, by a readable name."""
    model = model_settings(job, vocab_size)
    optimizer, ddp = optimizer_options(job), ddp_options(job)
    schedule = dataclasses.asdict(job.megatron.scheduler)
    dataset = job.data.train[0]
    found = {
        **{f"model.{name}": value for name, value in vars(model).items() if name != "transformer"},
        # As megatron-core completes it: a width that is left out is another option's.
        **_named("transformer", vars(transformer_config(model, sizes(job)))),
        **_named("optimizer", {**option_defaults("optimizer"), **optimizer}),
        **_named("distributed_data_parallel_config", {**option_defaults("distributed_data_parallel_config"), **ddp}),
        **{f"policy.megatron_cfg.scheduler.{name}": value for name, value in schedule.items()},
        "the layout of ranks": sizes(job),
        "data.order": order_settings(job, data_parallel_size),
        "data.train": row_settings(job, dataset),
        "data.train.data_path": [(each.path, each.weight) for each in dataset.data_path],
        "policy.tokenizer.name": job.policy.tokenizer.name,
        "loss.normalization": job.loss.normalization,
        "sft.max_num_steps": job.sft.max_num_steps,
        "sft.seed": job.sft.seed,
    }
    del found[_KERNELS]
    return {name: _comparable(value) for name, value in found.items() if not _is_drawing(value)}


def job_of(arguments: Sequence[str], folder: Path) -> Job:
    """Return the job that `packproof from-megatron-lm` reads from a command line. Raises PackproofError where it refuses an argument."""
    found = translate(read_words([SCRIPT, *arguments], name="the driver's command line"))
    if found.refused:
        argument, fix = found.refused[0]
        raise PackproofError(what=f"from-megatron-lm refuses {argument}", where="the driver's command line", fix=fix)
    path = folder / "job.yaml"
    path.write_text(yaml_text(found, "the driver's command line"), encoding="utf-8")
    return load(path, [])


def round_trip_differences(job: Job, arguments: Sequence[str], *, vocab_size: int, world_size: int) -> list[str]:
    """Return the settings that the command line does not carry: those that differ in the job that is read back from it, in words."""
    with tempfile.TemporaryDirectory(prefix="packproof-driver-") as folder:
        back = job_of(arguments, Path(folder))
    data_parallel_size = sizes(job).data(world_size)
    with quiet():
        wanted, found = (
            what_is_trained(each, vocab_size=vocab_size, data_parallel_size=data_parallel_size) for each in (job, back)
        )
    return [f"{name} is {wanted[name]!r}, there {found[name]!r}" for name in wanted if wanted[name] != found[name]]


def _named(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {f"policy.megatron_cfg.{kind}.{name}": value for name, value in options.items()}


def _comparable(value: Any) -> Any:
    """Return a value in which 1, 1.0 and a list of 1 alone are the same, as megatron-core takes them, but True and 1 are not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, list | tuple):
        found = [_comparable(each) for each in value]
        return found[0] if len(found) == 1 else found
    return value


def _is_drawing(value: Any) -> bool:
    """Return whether a value is a function that draws weights, made anew for each config from options that are compared themselves."""
    return callable(value) and getattr(value, "__name__", "") not in _ACTIVATIONS


def _refuse_what_it_lacks(job: Job) -> None:
    dataset = job.data.train[0]
    lacks = {
        "policy.sequence_packing.enabled": "rows that are packed as they come" if not job.is_packed else "",
        "data.train.chat_key": f"the key {dataset.chat_key}" if dataset.chat_key != "messages" else "",
        "data.train.on_bad_row": "rows that are left out" if dataset.on_bad_row != "error" else "",
        "data.order": f"the order {job.data.order}" if job.data.order not in _OF_LOADERS else "",
        "model.architecture": "HybridModel, which pretrain_hybrid.py trains" if job.model.architecture != "gpt" else "",
        "model.initial": "a start from Hugging Face's weights" if job.model.initial == "huggingface" else "",
        "model.hidden_dropout": "dropout, which either program draws from states of its own"
        if job.model.hidden_dropout
        else "",
        "policy.precision": f"precision {job.policy.precision} on CPU" if job.policy.precision != "float32" else "",
        "sft.seed": "a seed below 1" if job.sft.seed < 1 else "",
    }
    for key, what in lacks.items():
        if what:
            raise PackproofError(
                what=f"{what} cannot be compared with Megatron-LM's driver",
                where=job.where(key),
                fix="set another value to compare the two programs, or leave out --megatron-source",
            )


def _model(job: Job, vocab_size: int) -> dict[str, Any]:
    model, megatron = job.model, job.megatron
    found: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": model.num_query_groups is not None,
        "num_query_groups": model.num_query_groups or defaults()["num_query_groups"],
        # Megatron-LM's own default is another one where the MLP is gated.
        "ffn_hidden_size": model.ffn_hidden_size or 4 * (model.hidden_size or 0),
        "kv_channels": model.kv_channels,
        "normalization": model.normalization,
        "swiglu": model.activation == "silu" and model.gated_linear_unit,
        "squared_relu": model.activation == "squared_relu",
        "add_bias_linear": model.add_bias_linear,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "vocab_size": vocab_size,
        "make_vocab_size_divisible_by": 1,
    }
    fused = bool(megatron.transformer.get("bias_activation_fusion", False))
    found["bias_swiglu_fusion" if found["swiglu"] else "bias_gelu_fusion"] = fused
    if model.num_moe_experts is not None:
        found |= {
            "num_experts": model.num_moe_experts,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size or found["ffn_hidden_size"],
            "moe_router_topk": model.moe_router_topk,
            "moe_token_dispatcher_type": megatron.transformer.get("moe_token_dispatcher_type", "alltoall"),
            "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        }
    if multi_token_depths(job):
        for name in ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_use_repeated_layer"):
            found[name] = getattr(megatron, name)
    return found


def _layout(job: Job) -> dict[str, Any]:
    megatron, transformer = job.megatron, job.megatron.transformer
    return {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "sequence_parallel": bool(megatron.sequence_parallel),
        "decoder_first_pipeline_num_layers": transformer.get("num_layers_in_first_pipeline_stage"),
        "decoder_last_pipeline_num_layers": transformer.get("num_layers_in_last_pipeline_stage"),
    }


def _schedule(job: Job) -> dict[str, Any]:
    found = dataclasses.asdict(job.megatron.scheduler)
    if found["lr_decay_style"] != "WSD":
        found = {name: value for name, value in found.items() if not name.startswith("lr_wsd_")}
    if found["weight_decay_incr_style"] == "constant":  # Megatron-LM then takes --weight-decay, and no other
        del found["start_weight_decay"], found["end_weight_decay"]
    return found


def _data(job: Job) -> dict[str, Any]:
    dataset = job.data.train[0]
    weights = [each.weight for each in dataset.data_path]
    blended = [word for each in dataset.data_path for word in (str(each.weight), each.path)]
    loader, is_sharded = _OF_LOADERS[job.data.order or "sequential"]
    return {
        "sft": True,
        "train_iters": job.sft.max_num_steps,
        "seed": job.sft.seed,
        "global_batch_size": job.policy.train_global_batch_size,
        "micro_batch_size": 1,
        "seq_length": job.policy.max_total_sequence_length,
        "max_position_embeddings": job.policy.max_total_sequence_length,
        "calculate_per_token_loss": job.loss.normalization != "mean_of_means",
        "tokenizer_type": "SFTTokenizer",
        "tokenizer_model": job.policy.tokenizer.name,
        "sft_tokenizer_prompt_format": dataset.megatron_sft_prompt_format,
        "train_data_path": [each.path for each in dataset.data_path] if None in weights else blended,
        "dataloader_type": loader,
        "data_sharding": is_sharded,
        "distributed_timeout_minutes": max(1, job.cluster.timeout_seconds // 60),
    }


def _options(job: Job) -> dict[str, Any]:
    """Return megatron-core's options under the driver's names: all that have an argument, at the job's values."""
    optimizer = {**option_defaults("optimizer"), **optimizer_options(job)}
    found = {name: optimizer[name] for name in sorted(PASSED_ON["optimizer"]) if name in optimizer}
    if not optimizer["optimizer_cpu_offload"]:
        del found["optimizer_offload_fraction"]
    if not str(optimizer["optimizer"]).startswith("muon"):
        found = {name: value for name, value in found.items() if not name.startswith("muon_")}
    if found.get("min_lr") is None:
        found["min_lr"] = 0.0
    ddp = {**option_defaults("distributed_data_parallel_config"), **ddp_options(job)}
    given = job.megatron.distributed_data_parallel_config
    found |= {name: given[name] for name in sorted(PASSED_ON["distributed_data_parallel_config"]) if name in given}
    found |= {argument: ddp[option] for option, argument in _UNDER_OTHER_NAMES.items()}
    transformer = job.megatron.transformer
    found |= {name: transformer[name] for name in sorted(PASSED_ON["transformer"]) if name in transformer}
    found["attention_softmax_in_fp32"] = transformer.get("attention_softmax_in_fp32", True)
    if job.megatron.activation_checkpointing:
        found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if type(value).__name__ == "dtype":
        name = str(value).removeprefix("torch.")
        return _DTYPES.get(name, name)
    return list(value) if isinstance(value, tuple) else value


def _words_of(name: str, value: Any) -> list[str]:
    """Return the words that give an argument a value. Raises PackproofError where no option of the parser can."""
    for action in parser()._actions:  # noqa: SLF001 - no public list
        if action.dest != name:
            continue
        flag = action.option_strings[0]
        if isinstance(action, argparse.BooleanOptionalAction):
            return [flag if value else f"--no-{flag.removeprefix('--')}"]
        if action.nargs == 0 and action.const == value:
            return [flag]
        if action.nargs != 0 and value is not None:
            if isinstance(value, list) and action.nargs is None:  # one word, such as [1,0]
                return [flag, str(value).replace(" ", "")]
            return [flag, *(str(each) for each in (value if isinstance(value, list) else [value]))]
    raise PackproofError(
        what=f"the driver has no argument that sets {name} to {value!r}",
        where="the job",
        fix="set another value to compare the two programs",
    )
