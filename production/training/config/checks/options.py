"""Refuse options of megatron-core for absent parts, absent kernels, or values that do not fit (SPEC R-SETUP-7, 13,
18).
"""

from __future__ import annotations

import enum
import importlib.util
import json
from collections.abc import Iterator, Mapping

from production.library_warnings import quiet_libraries
from production.training.config.checks.setup import Setup
from production.training.config.keys import PASSED_ON
from production.training.config.megatron_options import Kind, converted, option_defaults
from production.training.config.refusal import SetupRefused, nearest
from production.training.config.settings import uses_distributed_optimizer
from production.training.config.unsupported_options import (
    ALLOWED_VALUES,
    FORBIDDEN_VALUES,
    NEEDS_CUDA,
    NEEDS_TRANSFORMER_ENGINE,
    PACKAGES,
    RECOMPUTED_BY_TRANSFORMER_ENGINE,
    UNSUPPORTED_OPTIONS,
)

_MEGATRON = "policy.megatron_cfg"
_TRANSFORMER = f"{_MEGATRON}.transformer"
_TRANSFORMER_ENGINE = ("transformer_engine", "Transformer Engine (the extra `te`)")


def check_unsupported(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse options that turn on a part which this job does not have (R-SETUP-7)."""
    with quiet_libraries():
        from production.model.model import NOT_BUILT  # noqa: PLC0415 - imports megatron-core's models

    for kind in PASSED_ON:
        parts: Mapping[str, str] = {**UNSUPPORTED_OPTIONS[kind], **(NOT_BUILT if kind == "transformer" else {})}
        for key, name, part in _turned_on(setup, kind, parts):
            yield setup.refuse("switched_on", key, f"this job does not have {part}", f"take {name} out")
    for name, words in FORBIDDEN_VALUES.items():
        for word in words.keys() & set(_words(setup, name)):
            key, what = f"{_TRANSFORMER}.{name}", f"this job does not have {words[word]}"
            yield setup.refuse("switched_on", key, what, f"take {name} out")
    if setup.job.megatron.transformer.get("perform_initialization") is False and setup.job.model.initial == "scratch":
        key = f"{_TRANSFORMER}.perform_initialization"
        what = "must be true where model.initial is scratch, got false: nothing else sets the weights"
        yield setup.refuse("start", key, what, "take it out, or set model.initial to megatron or huggingface")


def check_kernels(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse options that act only on CUDA or in a kernel package, where that is absent (R-SETUP-13)."""
    for kind in PASSED_ON:
        for key, _, part in _turned_on(setup, kind, NEEDS_CUDA[kind]):
            if setup.device == "cpu":
                yield _on_the_cpu(setup, key, part)
    for key, name, part in _turned_on(setup, "transformer", NEEDS_TRANSFORMER_ENGINE):
        default = option_defaults("transformer")[name]
        # A key that another file sets cannot be taken out by an override, and null is another value than the default.
        fix = f"take it out or set it to its default, {_as_yaml(default)}"
        yield from _missing(setup, key, part, *_TRANSFORMER_ENGINE, fix=fix)
    thrown_away = [each for each in _words(setup, "recompute_modules") if each in RECOMPUTED_BY_TRANSFORMER_ENGINE]
    if thrown_away and setup.job.megatron.transformer.get("recompute_granularity") == "selective":
        part = f"recomputation of outputs ({', '.join(thrown_away)})"
        yield from _missing(setup, f"{_TRANSFORMER}.recompute_modules", part, *_TRANSFORMER_ENGINE)
    yield from _check_modules(setup)
    yield from _check_dispatcher(setup)
    for name, package in PACKAGES.items():
        if setup.job.megatron.transformer.get(name) and setup.device == "cuda":
            yield from _missing(setup, f"{_TRANSFORMER}.{name}", name, *package)


def check_values(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse option values that do not fit the model or each other, at which megatron-core fails late or never
    (R-SETUP-18).
    """
    job = setup.job
    for name, words in ALLOWED_VALUES.items():
        for word in _words(setup, name):
            if word not in words:
                what = f"must be one of {', '.join(words)}, got {word!r}; the nearest is {nearest(word, words)}"
                yield setup.refuse("no_choice", f"{_TRANSFORMER}.{name}", what, f"write one of {', '.join(words)}")
    yield from _check_experts(setup)
    yield from _check_recomputation(setup)
    for name in ("init_method_std", "embedding_init_method_std"):
        spread = job.megatron.transformer.get(name)
        if spread is not None and spread < 0:
            yield setup.refuse("size", f"{_TRANSFORMER}.{name}", f"must be at least 0, got {spread}", "give 0 or more")
    if job.megatron.optimizer.get("optimizer") == "sgd" and uses_distributed_optimizer(job):
        what = "must be adam with the distributed optimizer, which shards no other state, got sgd"
        fix = f"set it to adam, or use the plain optimizer ({_MEGATRON}.optimizer.use_distributed_optimizer=false)"
        yield setup.refuse("optimizer", f"{_MEGATRON}.optimizer.optimizer", what, fix)
    if job.megatron.transformer.get("cross_entropy_loss_fusion") and not job.is_packed:
        what = "must be false on the online path, got true: the loss is computed outside the model there"
        yield setup.refuse("switched_on", f"{_TRANSFORMER}.cross_entropy_loss_fusion", what, "take it out")
    narrow = {
        f"{_MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32": job.megatron.distributed_data_parallel_config,
        f"{_TRANSFORMER}.fp32_residual_connection": job.megatron.transformer,
    }
    for key, given in narrow.items():
        if job.policy.precision == "float64" and given.get(key.rpartition(".")[2]):
            yield setup.refuse(
                "float64",
                key,
                "must be false with policy.precision float64, got true",
                "take it out, or set policy.precision to float32",
            )


def _check_recomputation(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse impossible recomputation: megatron-core loops forever on 0 layers, and fails late on more layers than
    there are.
    """
    given, key = setup.job.megatron.transformer, f"{_TRANSFORMER}.recompute_num_layers"
    count = given.get("recompute_num_layers")
    if count is None:
        return
    layers, stages = setup.job.model.num_layers, max(1, setup.job.megatron.pipeline_model_parallel_size)
    most = None if layers is None else max(1, layers // stages)
    if count < 1 or (most is not None and count > most):
        what = (
            "must be at least 1"
            + ("" if most is None else f" and at most {most}, the layers of a stage")
            + f", got {count}"
        )
        yield setup.refuse("size", key, what, "give 1 or more" + ("" if most is None else f", up to {most}"))


def _check_experts(setup: Setup) -> Iterator[SetupRefused]:
    given, model = setup.job.megatron.transformer, setup.job.model
    frequency, layers = given.get("moe_layer_freq", 1), model.num_layers
    is_list = isinstance(frequency, list)
    if (is_list and (layers not in {None, len(frequency)} or set(frequency) - {0, 1})) or (
        not is_list and frequency < 1
    ):
        what = f"must be a number of at least 1, or a list of 0 and 1 for the {layers} layers, got {frequency}"
        fix = "give a number n (every nth layer has experts) or a list of 0 and 1, one for each layer"
        yield setup.refuse("shape", f"{_TRANSFORMER}.moe_layer_freq", what, fix)
    if given.get("moe_apply_probs_on_input") and model.moe_router_topk != 1:
        what = f"must be false where model.moe_router_topk is {model.moe_router_topk}, got true: megatron-core allows it for 1 expert a token"
        yield setup.refuse(
            "shape",
            f"{_TRANSFORMER}.moe_apply_probs_on_input",
            what,
            "set it to false, or set model.moe_router_topk to 1",
        )
    limited, ranks = given.get("moe_router_topk_limited_devices") or 0, setup.job.megatron.expert_model_parallel_size
    if limited > ranks:
        what = f"must be at most the {ranks} expert parallel ranks, got {limited}"
        yield setup.refuse("shape", f"{_TRANSFORMER}.moe_router_topk_limited_devices", what, f"give at most {ranks}")


def _turned_on(setup: Setup, kind: Kind, parts: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield dotted key, name and part of each option of `parts` with a value other than megatron-core's default."""
    passed_on, defaults = converted(kind, getattr(setup.job.megatron, kind)), option_defaults(kind)
    for name, value in passed_on.items():
        if name in parts and value != defaults[name]:
            yield f"{_MEGATRON}.{kind}.{name}", name, parts[name]


def _check_modules(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse model keys that need Transformer Engine's modules where torch's are used, and the reverse."""
    model = setup.job.model
    if model.attention_dropout > 0:
        yield from _missing(
            setup,
            "model.attention_dropout",
            "attention dropout (hidden_dropout is there)",
            *_TRANSFORMER_ENGINE,
            fix="set it to 0 (0.1 is Megatron-LM's default, and the CPU runs 0 alone)",
        )
    if model.normalization != "RMSNorm":
        part = f"{model.normalization} (torch's norm is an RMSNorm)"
        yield from _missing(setup, "model.normalization", part, *_TRANSFORMER_ENGINE)
    if setup.job.megatron.transformer.get("transformer_impl") == "local" and setup.device == "cuda":
        key = f"{_TRANSFORMER}.transformer_impl"
        what = "must not be local on CUDA, where the job uses Transformer Engine's modules if it is installed"
        yield setup.refuse("device", key, what, "take transformer_impl out")


def _check_dispatcher(setup: Setup) -> Iterator[SetupRefused]:
    given, megatron = setup.job.megatron.transformer, setup.job.megatron
    if given.get("moe_token_dispatcher_type") != "flex":
        return
    key = f"{_TRANSFORMER}.moe_token_dispatcher_type"
    backend = given.get("moe_flex_dispatcher_backend", "deepep")
    package = _TRANSFORMER_ENGINE if backend == "ncclep" else ("deep_ep", "DeepEP")
    yield from _missing(setup, key, f"the flex dispatcher ({backend})", *package)
    if megatron.tensor_model_parallel_size * megatron.expert_model_parallel_size == 1 and backend != "hybridep":
        what = f"must not be flex ({backend}) with tp 1 x ep 1, where a rank has no other rank to send tokens to"
        yield setup.refuse("expert_parallel_size", key, what, "set it to alltoall, or raise expert parallelism")


def _missing(
    setup: Setup, key: str, part: str, module: str, package: str, *, fix: str = "take it out"
) -> Iterator[SetupRefused]:
    """Return why a kernel is missing: always on the CPU; on CUDA without the package, a note where the job runs
    elsewhere (`validation.notes`). `fix` is the way out on the CPU.
    """
    if setup.device == "cpu":
        yield _on_the_cpu(setup, key, part, fix)
    elif setup.device == "cuda" and importlib.util.find_spec(module) is None:
        yield setup.refuse(
            "not_installed",
            key,
            f"{part} needs {package}, which is not installed",
            f"install {package}, or take this out",
        )


def _on_the_cpu(setup: Setup, key: str, part: str, fix: str = "take it out") -> SetupRefused:
    return setup.refuse("device", key, f"{part} is not available on the CPU", f"{fix}, or set cluster.device to cuda")


def _as_yaml(value: object) -> str:
    """Return an option's value as a YAML file writes it: the name of an enumeration's member, null, true."""
    if isinstance(value, enum.Enum):
        return value.name
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else str(value)


def _words(setup: Setup, name: str) -> list[str]:
    """Return the words of an option of `transformer`, one or a list."""
    given = setup.job.megatron.transformer.get(name)
    return [] if given is None else [given] if isinstance(given, str) else list(given)
