"""Refuse impossible layers: letters of a hybrid pattern, and divisions of layers among pipeline stages (SPEC
R-SETUP-18).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from production.library_warnings import quiet_libraries
from production.training.config.checks.setup import Setup
from production.training.config.refusal import SetupRefused

_TRANSFORMER = "policy.megatron_cfg.transformer"
_PATTERN = "model.hybrid_layer_pattern"
_OF_A_GPT = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "moe_layer_freq",
)
"""Options that a hybrid pattern itself expresses, and that HybridModel does not read."""
_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def check_pattern(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse a hybrid pattern that megatron-core cannot read, with absent layers, or with other stages than the
    layout has (R-SETUP-18).
    """
    pattern = setup.job.model.hybrid_layer_pattern
    if pattern is None:
        return
    with quiet_libraries():
        from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern  # noqa: PLC0415 - heavy
    try:
        parsed = parse_hybrid_pattern(pattern)
    except ValueError as error:
        yield setup.refuse(
            "shape",
            _PATTERN,
            f"megatron-core refuses the pattern: {error}",
            "write one letter for each layer, such as *-*-/*-",
        )
        return
    if not parsed.main_pattern or parsed.mtp_num_depths != pattern.count("/"):
        what = f"must have a layer before the first / and after each /, got {pattern!r}"
        yield setup.refuse("shape", _PATTERN, what, "write the layers of each part, or take the / out")
        return
    for name in _OF_A_GPT:
        if setup.job.megatron.transformer.get(name):
            what = f"must not be set for a hybrid model, got {setup.job.megatron.transformer[name]}: {_PATTERN} sets its layers and stages"
            yield setup.refuse(
                "contradiction",
                f"{_TRANSFORMER}.{name}",
                what,
                f"take it out, and write the layers and stages into {_PATTERN}",
            )
    yield from _check_letters(setup, pattern)
    yield from _check_segments(setup, parsed.main_pattern)


def check_stages(setup: Setup, config: Any) -> Iterator[SetupRefused]:
    """Refuse a division of a GPT's layers among stages that megatron-core or this schedule cannot run (R-SETUP-18)."""
    with quiet_libraries():
        from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: PLC0415 - heavy
    key = f"{_TRANSFORMER}.pipeline_model_parallel_layout"
    stages = config.pipeline_model_parallel_size
    if config.virtual_pipeline_model_parallel_size is not None:
        what = f"must have one stage for each of the {stages} pipeline ranks, got {stages * config.virtual_pipeline_model_parallel_size}: this job does not interleave stages"
        yield setup.refuse("switched_on", key, what, f"write {stages} stages")
    elif config.mtp_standalone:
        what = "the multi-token depths must be on the stage of the loss, got another stage"
        yield setup.refuse("switched_on", key, what, "put the depths on the last stage")
    elif setup.job.model.hybrid_layer_pattern is None and config.pipeline_model_parallel_layout is None:
        try:
            for stage in range(stages):
                get_num_layers_to_build(config, pp_rank=stage)
        except (AssertionError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            fix = f"make it a multiple of {stages}, or share the layers out with {_TRANSFORMER}.{_UNEVEN[0]}"
            yield setup.refuse("shape", "model.num_layers", f"megatron-core refuses these stages: {error}", fix)


def _check_letters(setup: Setup, pattern: str) -> Iterator[SetupRefused]:
    with quiet_libraries():
        from production.model.device.layer_specs import TORCH_LETTERS, TRANSFORMER_ENGINE_LETTERS  # noqa: PLC0415 - heavy
    letters = set(pattern) - set("|/")
    absent = letters - set(TORCH_LETTERS + TRANSFORMER_ENGINE_LETTERS)
    if absent:
        what = f"must not have the layers {', '.join(sorted(absent))} (latent attention), which this job does not have, got {pattern!r}"
        yield setup.refuse("shape", _PATTERN, what, "write * for attention")
    if "E" in letters and setup.job.model.num_moe_experts is None:
        yield setup.refuse(
            "shape",
            _PATTERN,
            f"must have no expert layer (E) without model.num_moe_experts, got {pattern!r}",
            "set model.num_moe_experts",
        )
    kernels = ", ".join(sorted(letters & set(TRANSFORMER_ENGINE_LETTERS)))
    if kernels and setup.device == "cpu":
        what = f"must not have the layers {kernels} on the CPU, where they do nothing, got {pattern!r}"
        yield setup.refuse("device", _PATTERN, what, f"write layers of {TORCH_LETTERS}, or set cluster.device to cuda")
    elif kernels and setup.device == "cuda" and importlib.util.find_spec("transformer_engine") is None:
        what = f"the layers {kernels} need Transformer Engine (the extra `te`), which is not installed"
        yield setup.refuse("not_installed", _PATTERN, what, f"install it, or write layers of {TORCH_LETTERS}")


def _check_segments(setup: Setup, main: str) -> Iterator[SetupRefused]:
    """Refuse segments beyond the ranks, whose layers megatron-core would leave out."""
    stages, segments = setup.job.megatron.pipeline_model_parallel_size, main.split("|")
    uneven = [name for name in _UNEVEN if setup.job.megatron.transformer.get(name) is not None]
    if len(segments) > 1 and (len(segments) != stages or uneven):
        wanted = f"must have 1 stage or {stages}, one for each pipeline rank" + (
            f", and not beside {uneven[0]}" if uneven else ""
        )
        fix = f"write {stages - 1} of |, or no |" + (f", and take {uneven[0]} out" if uneven else "")
        yield setup.refuse("shape", _PATTERN, f"{wanted}, got {len(segments)}", fix)
    elif len(segments) < 2 and not uneven and len(main) % max(stages, 1):
        what = f"must have a multiple of {stages} layers, one part for each pipeline stage, got {len(main)}"
        yield setup.refuse(
            "shape", _PATTERN, what, f"write {stages - 1} of | between stages, or a multiple of {stages} layers"
        )
