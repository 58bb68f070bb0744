"""Set-up refusals on what megatron-core is told: contradictions, overlap, precision, and its own word (SPEC R-SETUP-6, R-SETUP-12 to 14)."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from production.errors import PackproofError
from production.training.config.checks_setup import Setup
from production.training.config.options import Kind, converted, dtype, option_class, quiet
from production.training.config.refusal import SetupRefused
from production.training.config.settings import (
    FROM_LAYOUT,
    ddp_options,
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
"""Fields of TransformerConfig that a key of the job says."""
_ONLY_WHERE_SET = {
    "fp8",
    "fp8_recipe",
    "fp8_param",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
}
"""Of those, the ones whose key may stay silent: then what is passed on by name holds."""

_KERNELS = re.compile(r"transformer.?engine|\bTE\b|\bapex\b|deepep|hybridep|flash.?attn", re.IGNORECASE)
"""How megatron-core names what it misses."""


def check_contradictions(setup: Setup) -> Iterator[SetupRefused]:
    """An option passed on by name that says otherwise than the job's own key for it (R-SETUP-6)."""
    job = setup.job
    passed_on = converted("transformer", job.megatron.transformer)
    silent = dataclasses.replace(job.megatron, transformer={})
    own = transformer_options(dataclasses.replace(job, policy=dataclasses.replace(job.policy, megatron_cfg=silent)))
    own |= {name: getattr(job.megatron, name) for name in FROM_LAYOUT}
    own["pipeline_dtype"] = dtype(job.megatron.pipeline_dtype or job.policy.precision)
    own.setdefault("fp16", False)
    for name, value in passed_on.items():
        key = FROM_LAYOUT.get(name) or _OWN.get(name)
        if key is None or (name in _ONLY_WHERE_SET and name not in own) or own.get(name) == value:
            continue
        what = f"{name} {_shown(value)} contradicts {job.where(key)}, which makes it {_shown(own.get(name))}"
        full = f"{_MEGATRON}.transformer.{name}"
        yield setup.refuse("contradiction", full, what, f"take {name} out and set {key}")
    if job.megatron.pipeline_dtype not in {None, job.policy.precision}:
        what = f"stages that send {job.megatron.pipeline_dtype}, where parameters are {job.policy.precision}"
        yield setup.refuse(
            "contradiction", f"{_MEGATRON}.pipeline_dtype", what, "leave it out: it follows the precision"
        )
    yield from _check_optimizer_pairs(setup)


def check_overlap(setup: Setup) -> Iterator[SetupRefused]:
    """Overlap of communication that cannot be had with packed rows, multi-token depths or this optimizer (R-SETUP-12)."""
    job, given = setup.job, setup.job.megatron.transformer
    key = f"{_MEGATRON}.transformer.overlap_moe_expert_parallel_comm"
    if given.get("overlap_moe_expert_parallel_comm"):
        with_what = "packed rows and multi-token prediction" if multi_token_depths(job) else "packed rows"
        what = f"1F1B overlap of expert communication with {with_what}, which upstream cannot do"
        yield setup.refuse("overlap", key, what, "set it to false")
    if given.get("delay_wgrad_compute") and not given.get("overlap_moe_expert_parallel_comm"):
        key = f"{_MEGATRON}.transformer.delay_wgrad_compute"
        yield setup.refuse("overlap", key, "it needs the 1F1B overlap, which is refused", "set it to false")
    ddp = job.megatron.distributed_data_parallel_config
    if ddp.get("overlap_param_gather") and not (uses_distributed_optimizer(job) and ddp.get("overlap_grad_reduce")):
        what = "overlapped parameter gather without the distributed optimizer and overlapped gradient reduction"
        mend = f"set {_MEGATRON}.optimizer.use_distributed_optimizer and {_DDP}.overlap_grad_reduce to true"
        yield setup.refuse("overlap", f"{_DDP}.overlap_param_gather", what, mend)
    if ddp.get("average_in_collective") and job.loss.normalization != "mean_of_means":
        what = f"averages in the collective, where {job.loss.normalization} needs the sum"
        yield setup.refuse("overlap", f"{_DDP}.average_in_collective", what, "set it to false")


def check_precision(setup: Setup) -> Iterator[SetupRefused]:
    """Precisions that the optimizer or the device cannot take (R-SETUP-13)."""
    job, optimizer = setup.job, setup.job.megatron.optimizer
    precision, key = job.policy.precision, "policy.precision"
    if precision == "float64":
        if uses_distributed_optimizer(job):
            what, mend = (
                "float64 with the distributed optimizer, which refuses it",
                "take float32, or the plain optimizer",
            )
            yield setup.refuse("float64", f"{_MEGATRON}.optimizer.use_distributed_optimizer", what, mend)
        if optimizer.get("clip_grad", 1.0) > 0:
            what = "float64 with clipping, whose norm megatron-core keeps in float32 (its default clips at 1.0)"
            mend = f"set {_MEGATRON}.optimizer.clip_grad to 0.0, or take float32"
            yield setup.refuse("float64", f"{_MEGATRON}.optimizer.clip_grad", what, mend)
    fp8_key = f"{_MEGATRON}.fp8_cfg.enabled" if job.megatron.fp8_cfg.enabled else f"{_MEGATRON}.transformer.fp8"
    is_fp8 = job.megatron.fp8_cfg.enabled or job.megatron.transformer.get("fp8") is not None
    if is_fp8 and precision != "bfloat16":
        yield setup.refuse("fp8", fp8_key, f"fp8 with {precision} parameters", "set policy.precision to bfloat16")
    if setup.device == "cpu":
        if precision == "bfloat16":
            what = "bfloat16 on the CPU, which trains in float32 or float64"
            yield setup.refuse("device", key, what, "set policy.precision to float32, or cluster.device to cuda")
        if is_fp8:
            yield setup.refuse("device", fp8_key, "fp8 on the CPU", "set it to false, or cluster.device to cuda")
        if job.model.attention_dropout > 0:
            what = f"attention dropout {job.model.attention_dropout} on the CPU, whose attention has none"
            yield setup.refuse("device", "model.attention_dropout", what, "set it to 0 (hidden_dropout is there)")
        if job.model.normalization != "RMSNorm":
            what = f"{job.model.normalization} on the CPU, whose norm is an RMSNorm"
            yield setup.refuse("device", "model.normalization", what, "set it to RMSNorm")


def check_megatron(setup: Setup) -> Iterator[SetupRefused]:
    """What the installed megatron-core itself says against its configurations (R-SETUP-14).

    Its kind is `not_installed` where only a kernel that this machine lacks stands against it.
    """
    job = setup.job
    with quiet():
        from production.model import transformer_config  # noqa: PLC0415 - imports megatron-core's models

    try:
        with quiet():
            transformer_config(model_settings(job, job.model.vocab_size or 1), sizes(job))
    except PackproofError as error:
        mend = "change the option that it names, or the layout"
        yield setup.refuse(_kind(error.what), f"{_MEGATRON}.transformer", error.what, mend)
    yield from _built(setup, "optimizer", optimizer_options(job))
    yield from _built(setup, "distributed_data_parallel_config", ddp_options(job))


def _built(setup: Setup, kind: Kind, options: dict[str, Any]) -> Iterator[SetupRefused]:
    try:
        with quiet():
            option_class(kind)(**options)
    except (AssertionError, ValueError, TypeError, RuntimeError, ImportError) as error:
        what = f"megatron-core refuses it: {error}"
        yield setup.refuse(_kind(what), f"{_MEGATRON}.{kind}", what, "change the option that it names")


def _kind(what: str) -> str:
    """Whether megatron-core misses a kernel package here, or refuses what it is told."""
    is_here = importlib.util.find_spec("transformer_engine") is not None
    return "not_installed" if _KERNELS.search(what) and not is_here else "megatron"


def _check_optimizer_pairs(setup: Setup) -> Iterator[SetupRefused]:
    """Options of the optimizer that the data parallelism, the precision or the policy also say."""
    job = setup.job
    optimizer, ddp = job.megatron.optimizer, job.megatron.distributed_data_parallel_config
    is_distributed, is_bfloat16 = uses_distributed_optimizer(job), job.policy.precision == "bfloat16"
    given = f"{_MEGATRON}.optimizer"
    gather = "overlap_param_gather"
    pairs = (
        (f"{_DDP}.use_distributed_optimizer", ddp.get("use_distributed_optimizer"), f"{given}.use_distributed_optimizer", is_distributed),
        (f"{given}.{gather}", optimizer.get(gather), f"{_DDP}.{gather}", ddp.get(gather, False)),
        (f"{given}.bf16", optimizer.get("bf16"), "policy.precision", is_bfloat16),
        (f"{given}.fp16", optimizer.get("fp16"), "policy.precision", False),
        (f"{given}.clip_grad", optimizer.get("clip_grad"), "policy.max_grad_norm", job.policy.max_grad_norm),
    )  # fmt: skip
    for key, value, other, expected in pairs:
        if value is not None and expected is not None and value != expected:
            what = f"{_shown(value)} contradicts {job.where(other)}, which makes it {_shown(expected)}"
            yield setup.refuse("contradiction", key, what, f"take it out, or change {other}")
    if "fp8_recipe" in optimizer and not job.megatron.fp8_cfg.enabled:
        key, what = f"{_MEGATRON}.optimizer.fp8_recipe", "an fp8 recipe for an optimizer without fp8"
        yield setup.refuse("contradiction", key, what, f"take it out, or switch {_MEGATRON}.fp8_cfg on")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).removeprefix("torch.")
