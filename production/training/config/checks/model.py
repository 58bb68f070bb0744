"""Refuse numbers of model and optimizer that would only fail where they are used (SPEC R-SETUP-18)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from production.training.config.checks.setup import Setup
from production.training.config.refusal import SetupRefused

_OPTIMIZER = "policy.megatron_cfg.optimizer"
_SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels", "vocab_size",
    "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "rotary_base",
)  # fmt: skip
_MANY, _WIDE = 1 << 16, (1 << 31) - 1
"""The most layers, depths or experts, and the largest width, that anything is counted with before a model is built."""
_COUNTED = ("num_layers", "num_moe_experts")
_OF_TORCH = ("adam", "sgd")
"""Optimizers that megatron-core runs without a further package."""


def check_model(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse sizes that do not fit each other: heads, groups, channels, experts (R-SETUP-18)."""
    model = setup.job.model
    # 0 layers, width or heads are no shape at all, and refused as such.
    small = [
        name
        for name in _SIZES
        if (size := getattr(model, name)) is not None and (size < 0 or (size == 0 and name not in _SIZES[:3]))
    ]
    for name in small:
        yield setup.refuse("size", f"model.{name}", f"must be at least 1, got {getattr(model, name)}", "give 1 or more")
    sizes = {f"model.{name}": (getattr(model, name), _MANY if name in _COUNTED else _WIDE) for name in _SIZES}
    sizes["policy.megatron_cfg.mtp_num_layers"] = (setup.job.megatron.mtp_num_layers, _MANY)
    for key, (size, most) in sizes.items():
        if size is not None and size > most:
            yield setup.refuse("size", key, f"must be at most {most}, got {size}", f"give {most} or less")
    if not 0 < model.rotary_percent <= 1:
        what = (
            f"must be above 0 and at most 1, got {model.rotary_percent}: it is the part of a head's channels that turns"
        )
        yield setup.refuse("size", "model.rotary_percent", what, "give a number above 0, up to 1")
    elif not small and model.hidden_size and model.num_attention_heads:
        yield from _check_heads(setup, model.hidden_size, model.num_attention_heads)
    if model.num_moe_experts and model.moe_router_topk > model.num_moe_experts:
        what = f"must be at most model.num_moe_experts, {model.num_moe_experts}, got {model.moe_router_topk}"
        yield setup.refuse("shape", "model.moe_router_topk", what, f"give at most {model.num_moe_experts}")


def check_optimizer(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse impossible numbers of the optimizer (R-SETUP-18)."""
    given = setup.job.megatron.optimizer
    bounds = {
        "adam_beta1": (0, 1, "in [0, 1)"),
        "adam_beta2": (0, 1, "in [0, 1)"),
        "adam_eps": (0, None, "0 or more"),
        "weight_decay": (0, None, "0 or more"),
        "clip_grad": (0, None, "0 (no clipping) or more"),
    }
    for name, (least, below, fix) in bounds.items():
        value = given.get(name)
        if isinstance(value, int | float) and (value < least or (below is not None and value >= below)):
            yield setup.refuse(
                "size", f"{_OPTIMIZER}.{name}", f"must be {fix}, got {value}", f"give a number that is {fix}"
            )
    name = str(given.get("optimizer", "adam"))
    if name not in _OF_TORCH and importlib.util.find_spec("emerging_optimizers") is None:
        what = f"must be one of {', '.join(_OF_TORCH)}, got {name!r}: any other optimizer needs the package emerging-optimizers, which is not installed"
        fix = f"choose one of {', '.join(_OF_TORCH)}, or install that package"
        yield setup.refuse("no_package", f"{_OPTIMIZER}.optimizer", what, fix)
    if setup.job.sft.seed >= 1 << 62:
        yield setup.refuse(
            "size", "sft.seed", f"must be below 2**62, got {setup.job.sft.seed}", "give a seed below 2**62"
        )
    peak = setup.job.logger.peak_teraflops
    if peak is not None and peak <= 0:
        yield setup.refuse(
            "size",
            "logger.peak_teraflops",
            f"must be above 0, got {peak}",
            "give the device's peak in teraflops, or leave it out",
        )


def _check_heads(setup: Setup, width: int, heads: int) -> Iterator[SetupRefused]:
    model = setup.job.model
    if model.kv_channels is None and width % heads:
        what = f"must divide model.hidden_size, {width}, got {heads}"
        yield setup.refuse(
            "shape",
            "model.num_attention_heads",
            what,
            "give a number of heads that divides model.hidden_size, or set model.kv_channels",
        )
        return
    groups, channels = model.num_query_groups or heads, model.kv_channels or width // heads
    if heads % groups:
        what = f"must divide model.num_attention_heads, {heads}, got {groups}"
        yield setup.refuse(
            "shape", "model.num_query_groups", what, "give a number of groups that divides model.num_attention_heads"
        )
    turning = int(channels * model.rotary_percent)
    if turning % 2 or not turning:
        what = f"must turn an even number of a head's {channels} channels, at least 2, got {turning}"
        fix = (
            "choose model.hidden_size, num_attention_heads, kv_channels and rotary_percent so that an even number does"
        )
        yield setup.refuse("shape", "model.rotary_percent", what, fix)
