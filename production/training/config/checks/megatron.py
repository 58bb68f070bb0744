"""Refuse options that contradict the job or megatron-core: overlap, precision, and megatron-core's own checks (SPEC
R-SETUP-6, R-SETUP-12 to 14).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any

from production.errors import PackproofError
from production.library_warnings import quiet_libraries
from production.training.config.checks.layers import check_stages
from production.training.config.checks.setup import Setup
from production.training.config.megatron_options import Kind, converted, dtype, option_class
from production.training.config.refusal import SetupRefused
from production.training.config.schema.job import Job
from production.training.config.settings import (
    FROM_LAYOUT,
    ddp_options,
    fp8_recipe,
    has_fp8_parameters,
    model_settings,
    multi_token_depths,
    optimizer_options,
    sizes,
    transformer_options,
    uses_distributed_optimizer,
)

_MEGATRON = "policy.megatron_cfg"
_DDP = f"{_MEGATRON}.distributed_data_parallel_config"
_OWN = {
    "params_dtype": "policy.precision",
    "bf16": "policy.precision",
    "fp16": "policy.precision",
    "calculate_per_token_loss": "loss.normalization",
    "activation_func": "model.activation",
    "moe_router_topk": "model.moe_router_topk",
    "is_hybrid_model": "model.architecture",
    "mtp_num_layers": f"{_MEGATRON}.mtp_num_layers",
    "mtp_loss_scaling_factor": f"{_MEGATRON}.mtp_loss_scaling_factor",
    "mtp_use_repeated_layer": f"{_MEGATRON}.mtp_use_repeated_layer",
    "fp8": f"{_MEGATRON}.fp8_cfg.fp8",
    "fp8_recipe": f"{_MEGATRON}.fp8_cfg.fp8_recipe",
    "fp8_param": f"{_MEGATRON}.fp8_cfg.fp8_param",
    "recompute_granularity": f"{_MEGATRON}.activation_checkpointing",
    "recompute_method": f"{_MEGATRON}.activation_checkpointing",
    "recompute_num_layers": f"{_MEGATRON}.activation_checkpointing",
    **{
        name: f"model.{name}"
        for name in (
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels",
            "normalization", "gated_linear_unit", "add_bias_linear", "hidden_dropout", "attention_dropout",
            "num_moe_experts", "moe_ffn_hidden_size",
        )
    },
}  # fmt: skip
"""Fields of TransformerConfig to the job's key that sets them."""
_ONLY_WHERE_SET = {
    "fp8",
    "fp8_recipe",
    "fp8_param",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
}
"""Keys of those that may be absent: then the option passed on by name holds."""

_KERNELS = re.compile(r"transformer.?engine|\bTE\b|\bapex\b|deepep|hybridep|flash.?attn", re.IGNORECASE)
"""Pattern of the kernel packages in megatron-core's messages."""


def check_contradictions(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse an option passed on by name that contradicts the job's own key (R-SETUP-6)."""
    job = setup.job
    passed_on = converted("transformer", job.megatron.transformer)
    own = transformer_options(_with_megatron(job, transformer={}))
    own |= {name: getattr(job.megatron, name) for name in FROM_LAYOUT}
    own["pipeline_dtype"] = dtype(job.megatron.pipeline_dtype or job.policy.precision)
    own.setdefault("fp16", False)
    own["mtp_num_layers"] = multi_token_depths(job) or None
    own["mtp_loss_scaling_factor"] = job.megatron.mtp_loss_scaling_factor
    own["mtp_use_repeated_layer"] = job.megatron.mtp_use_repeated_layer
    own["is_hybrid_model"] = job.model.architecture == "hybrid"
    for name, value in passed_on.items():
        key = FROM_LAYOUT.get(name) or _OWN.get(name)
        if key is None or (name in _ONLY_WHERE_SET and name not in own) or own.get(name) == value:
            continue
        what = f"{name} {_shown(value)} contradicts {job.where(key)}, which makes it {_shown(own.get(name))}"
        full = f"{_MEGATRON}.transformer.{name}"
        yield setup.refuse("contradiction", full, what, f"take {name} out and set {key}")
    if job.megatron.pipeline_dtype not in {None, job.policy.precision}:
        what = f"must be policy.precision, {job.policy.precision}, got {job.megatron.pipeline_dtype}"
        yield setup.refuse(
            "contradiction", f"{_MEGATRON}.pipeline_dtype", what, "leave it out: it follows the precision"
        )
    yield from _check_optimizer_pairs(setup)


def check_overlap(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse overlap of communication that packed rows, multi-token depths or this optimizer do not allow
    (R-SETUP-12).
    """
    job, given = setup.job, setup.job.megatron.transformer
    key = f"{_MEGATRON}.transformer.overlap_moe_expert_parallel_comm"
    if given.get("overlap_moe_expert_parallel_comm"):
        with_what = "packed rows and multi-token prediction" if multi_token_depths(job) else "packed rows"
        what = f"must be false with {with_what}, got true: megatron-core cannot overlap expert communication there"
        yield setup.refuse("overlap", key, what, "set it to false")
    if given.get("delay_wgrad_compute") and not given.get("overlap_moe_expert_parallel_comm"):
        key = f"{_MEGATRON}.transformer.delay_wgrad_compute"
        yield setup.refuse(
            "overlap",
            key,
            "must be false, got true: it needs overlap_moe_expert_parallel_comm, which this job does not have",
            "set it to false",
        )
    ddp = job.megatron.distributed_data_parallel_config
    if ddp.get("overlap_param_gather") and not (uses_distributed_optimizer(job) and ddp.get("overlap_grad_reduce")):
        what = "must be false without the distributed optimizer and overlap_grad_reduce, got true"
        fix = f"set it to false, or set {_MEGATRON}.optimizer.use_distributed_optimizer and {_DDP}.overlap_grad_reduce to true"
        yield setup.refuse("overlap", f"{_DDP}.overlap_param_gather", what, fix)
    if ddp.get("average_in_collective") and job.loss.normalization != "mean_of_means":
        what = f"must be false with loss.normalization {job.loss.normalization}, which needs the sum of the gradients, got true"
        yield setup.refuse("overlap", f"{_DDP}.average_in_collective", what, "set it to false")


def check_precision(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse precisions that the optimizer or the device cannot take (R-SETUP-13)."""
    job, optimizer = setup.job, setup.job.megatron.optimizer
    precision, key = job.policy.precision, "policy.precision"
    if precision == "float64":
        if uses_distributed_optimizer(job):
            what, fix = (
                "must be false with policy.precision float64, which the distributed optimizer refuses, got true",
                "set it to false, or set policy.precision to float32",
            )
            yield setup.refuse("float64", f"{_MEGATRON}.optimizer.use_distributed_optimizer", what, fix)
        if optimizer.get("clip_grad", 1.0) > 0:
            got = optimizer.get("clip_grad", "megatron-core's default of 1.0")
            what = f"must be 0.0 with policy.precision float64, got {got}: megatron-core keeps the norm for clipping in float32"
            fix = f"set {_MEGATRON}.optimizer.clip_grad to 0.0, or set policy.precision to float32"
            yield setup.refuse("float64", f"{_MEGATRON}.optimizer.clip_grad", what, fix)
    fp8_key = f"{_MEGATRON}.fp8_cfg.enabled" if job.megatron.fp8_cfg.enabled else f"{_MEGATRON}.transformer.fp8"
    is_fp8 = job.megatron.fp8_cfg.enabled or job.megatron.transformer.get("fp8") is not None
    if is_fp8 and precision != "bfloat16":
        what = f"fp8 needs policy.precision bfloat16, got {precision}"
        yield setup.refuse("fp8", fp8_key, what, "set policy.precision to bfloat16, or turn fp8 off")
    if setup.device == "cpu":
        if precision == "bfloat16":
            what = "must be float32 or float64 on the CPU, got bfloat16"
            yield setup.refuse("device", key, what, "set policy.precision to float32, or cluster.device to cuda")
        if is_fp8:
            what, fix = "fp8 must be off on the CPU", "turn fp8 off, or set cluster.device to cuda"
            yield setup.refuse("device", fp8_key, what, fix)


def check_megatron(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse a configuration that the installed megatron-core itself rejects (R-SETUP-14).

    The refusal's kind is `not_installed` where only a kernel that this machine lacks stands against the
    configuration.
    """
    with quiet_libraries():
        from production.model.model import transformer_config  # noqa: PLC0415 - imports megatron-core's models

    def of_the_model(job: Job) -> Any:
        return transformer_config(model_settings(job, job.model.vocab_size or 1), sizes(job))

    refused = list(_made(setup, "transformer", of_the_model))
    yield from refused
    if not refused:
        with quiet_libraries():
            yield from check_stages(setup, of_the_model(setup.job))
    yield from _made(setup, "optimizer", lambda job: option_class("optimizer")(**optimizer_options(job)))
    ddp: Kind = "distributed_data_parallel_config"
    yield from _made(setup, ddp, lambda job: option_class(ddp)(**ddp_options(job)))


def _made(setup: Setup, kind: Kind, make: Callable[[Job], Any]) -> Iterator[SetupRefused]:
    error = _error(make, setup.job)
    if error is None:
        return
    from production.model.model import reason_of  # noqa: PLC0415 - as above

    what = error.what if isinstance(error, PackproofError) else f"megatron-core refuses it: {reason_of(error)}"
    name = _blamed(setup.job, kind, make, what)
    key = f"{_MEGATRON}.{kind}" + (f".{name}" if name else "")
    fix = (
        f"take {name} out, or change the option that contradicts it"
        if name
        else "change the option that it names, or the layout"
    )
    yield setup.refuse(_kind(what), key, what, fix)


def _error(make: Callable[[Job], Any], job: Job) -> Exception | None:
    try:
        with quiet_libraries():
            make(job)
    except Exception as error:  # noqa: BLE001 - whatever its own checks stumble over is a value that it cannot take
        return error
    return None


def _blamed(job: Job, kind: Kind, make: Callable[[Job], Any], what: str) -> str | None:
    """Return the option without which megatron-core accepts the rest; of several, the first that megatron-core names."""
    given = getattr(job.megatron, kind)
    alone = [
        name
        for name in given
        if _error(make, _with_megatron(job, **{kind: {each: value for each, value in given.items() if each != name}}))
        is None
    ]
    return min(alone, key=lambda name: what.find(name) if name in what else len(what), default=None)


def _with_megatron(job: Job, **changes: Any) -> Job:
    megatron = dataclasses.replace(job.megatron, **changes)
    return dataclasses.replace(job, policy=dataclasses.replace(job.policy, megatron_cfg=megatron))


def _kind(what: str) -> str:
    """Return whether megatron-core misses a kernel package here, or rejects an option."""
    is_here = importlib.util.find_spec("transformer_engine") is not None
    return "not_installed" if _KERNELS.search(what) and not is_here else "megatron"


def _check_optimizer_pairs(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse options of the optimizer that contradict the data parallelism, the precision or the policy."""
    job = setup.job
    optimizer, ddp = job.megatron.optimizer, job.megatron.distributed_data_parallel_config
    is_distributed, is_bfloat16 = uses_distributed_optimizer(job), job.policy.precision == "bfloat16"
    given = f"{_MEGATRON}.optimizer"
    gather = "overlap_param_gather"
    pairs = (
        (f"{_DDP}.use_distributed_optimizer", ddp.get("use_distributed_optimizer"), f"{given}.use_distributed_optimizer", is_distributed),
        (f"{given}.{gather}", optimizer.get(gather), f"{_DDP}.{gather}", ddp.get(gather, False)),
        (f"{_DDP}.fp8_param_gather", ddp.get("fp8_param_gather"), f"{_MEGATRON}.fp8_cfg.fp8_param", has_fp8_parameters(job)),
        (f"{given}.bf16", optimizer.get("bf16"), "policy.precision", is_bfloat16),
        (f"{given}.fp16", optimizer.get("fp16"), "policy.precision", False),
        (f"{given}.clip_grad", optimizer.get("clip_grad"), "policy.max_grad_norm", job.policy.max_grad_norm),
    )  # fmt: skip
    for key, value, other, expected in pairs:
        if value is not None and expected is not None and value != expected:
            what = f"{_shown(value)} contradicts {job.where(other)}, which makes it {_shown(expected)}"
            yield setup.refuse("contradiction", key, what, f"take it out, or change {other}")
    recipe = fp8_recipe(job)
    if optimizer.get("fp8_recipe") not in {None, recipe}:
        key = f"{given}.fp8_recipe"
        wanted = f"must be the model's recipe, {recipe}" if recipe else "must not be set for a model without fp8"
        yield setup.refuse("contradiction", key, f"{wanted}, got {optimizer['fp8_recipe']}", "take it out")


def _shown(value: Any) -> str:
    return (
        "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value).removeprefix("torch.")
    )
