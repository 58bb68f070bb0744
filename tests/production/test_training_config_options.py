"""megatron-core's options pass through by name, and those that would train something else here, or fail while the model is built, are refused first
(SPEC R-SETUP-7, R-SETUP-13, R-SETUP-14, R-SETUP-18)."""

import enum
import importlib.util
import types
import typing
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from production.errors import PackproofError
from production.model.device.layer_specs import hybrid_spec
from production.model.model import NOT_BUILT, ModelSettings, transformer_config
from production.parallel.sizes import ParallelSizes
from production.training.config import ddp_options, load, notes, optimizer_options, refusals
from production.training.config.megatron_options import option_defaults, option_fields
from production.training.config.unsupported_options import (
    ALLOWED_VALUES,
    FORBIDDEN_VALUES,
    NEEDS_CUDA,
    NEEDS_TRANSFORMER_ENGINE,
    UNSUPPORTED_OPTIONS,
)

BASE = Path(__file__).parent / "jobs" / "base.yaml"
MEGATRON = "policy.megatron_cfg"
OPTIMIZER = f"{MEGATRON}.optimizer"
DDP = f"{MEGATRON}.distributed_data_parallel_config"
TRANSFORMER = f"{MEGATRON}.transformer"
EXPERTS = ["model.num_moe_experts=4", "model.moe_ffn_hidden_size=64"]
PLAIN = f"{OPTIMIZER}.use_distributed_optimizer=false"
FLOAT64 = ["policy.precision=float64", PLAIN, f"{OPTIMIZER}.clip_grad=0.0"]
CUDA = ["cluster.device=cuda", "policy.precision=bfloat16"]
STAGES = [f"{MEGATRON}.pipeline_model_parallel_size=2", PLAIN]
ONLINE = [
    "data.train.dataset_name=openai_format",
    "policy.sequence_packing.enabled=true",
    "loss.normalization=global_valid_tokens",
]


def hybrid(pattern):
    return ["model.architecture=hybrid", f'model.hybrid_layer_pattern="{pattern}"', "model.num_layers=null"]


def found(overrides, world_size=1):
    return [(each.kind, each.key) for each in refusals(load(BASE, overrides), world_size)]


def other_value(kind, name):
    """As a file writes it: one that the annotation takes and that is not megatron-core's default."""
    return _other(option_fields(kind)[name], option_defaults(kind)[name])


def _other(hint, default):
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _other(next(each for each in arguments if each is not type(None)), default)
    if origin is typing.Literal:
        return next(each for each in arguments if each != default)
    if origin in (list, tuple):
        return "[1, 1]"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(each.name for each in hint if each is not default)
    return {bool: str(not default).lower(), int: "2", float: "0.5", str: "x", torch.dtype: "float64"}[hint]


REFUSED = [
    ("switched_on", kind, name)
    for kind, parts in UNSUPPORTED_OPTIONS.items() for name in (*parts, *(NOT_BUILT if kind == "transformer" else ()))
] + [
    ("device", kind, name)
    for kind, parts in NEEDS_CUDA.items() for name in (*parts, *(NEEDS_TRANSFORMER_ENGINE if kind == "transformer" else ()))
]  # fmt: skip


@pytest.mark.parametrize(("refused", "kind", "name"), REFUSED, ids=str)
def test_an_option_that_nothing_here_would_act_on_is_refused_at_its_key(refused, kind, name):
    key, value = f"{MEGATRON}.{kind}.{name}", other_value(kind, name)
    job = load(BASE, [f"{key}={value}"])
    (error,) = refusals(job, 1)
    assert (error.kind, error.key, error.where) == (refused, key, f"{key} (override '{key}={value}')")
    assert error.what
    assert error.fix
    default = option_defaults(kind)[name]
    assert default is None or isinstance(default, bool | int | float | str | enum.Enum)
    written = "null" if default is None else str(getattr(default, "name", default))
    written = written.lower() if isinstance(default, bool) else written.replace("inf", ".inf")
    assert refusals(load(BASE, [f"{key}={written}"]), 1) == []


def test_options_that_were_once_taken_and_trained_something_else_are_in_those_tables():
    taken = {
        "multi_latent_attention", "experimental_attention_variant", "use_mup", "loss_scale", "qk_l2_norm", "gtp_weight_remat_size",
        "tp_comm_overlap", "use_te_rng_tracker", "mrope_section", "apply_residual_connection_post_layernorm", "cuda_graph_impl",
        "grad_norm_skip_threshold", "num_distributed_optimizer_instances", "window_size", "attention_backend", "cpu_offloading",
    }  # fmt: skip
    assert taken <= {name for _, _, name in REFUSED}
    for overrides in (
        [f"{TRANSFORMER}.multi_latent_attention=true"],
        [f"{TRANSFORMER}.use_mup=true"],
        [f"{OPTIMIZER}.loss_scale=8.0"],
    ):
        for device in ([], CUDA):
            assert [kind for kind, _ in found([*overrides, *device])] == ["switched_on"]


def test_every_listed_option_exists_in_the_installed_megatron_core():
    for kind, parts in (*UNSUPPORTED_OPTIONS.items(), *NEEDS_CUDA.items()):
        assert set(parts) <= set(option_fields(kind))
    of_transformer = {*NOT_BUILT, *FORBIDDEN_VALUES, *ALLOWED_VALUES, *NEEDS_TRANSFORMER_ENGINE}
    assert of_transformer <= set(option_fields("transformer"))
    # Each was looked at: who acts on it, and whether that is called here. An upgrade that brings others wants them looked at too.
    counts = {kind: len(option_fields(kind)) for kind in UNSUPPORTED_OPTIONS}
    assert counts == {"transformer": 305, "optimizer": 63, "distributed_data_parallel_config": 38}


def test_an_option_is_refused_under_the_key_and_at_the_line_that_the_file_has_it(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("policy:\n  megatron_cfg:\n    mtp_num_layers: 1\n    window_size: [8, 0]\n", encoding="utf-8")
    (error,) = refusals(load([BASE, path]), 1)
    assert (error.key, error.where) == (f"{MEGATRON}.window_size", f"{MEGATRON}.window_size ({path}:4)")
    assert error.what == "attention with a sliding window is not available on the CPU"


WRONG = [
    # words that megatron-core would take for none of those it knows
    ([*EXPERTS, f"{TRANSFORMER}.moe_router_load_balancing_type=aux_los"], 1, "no_choice", f"{TRANSFORMER}.moe_router_load_balancing_type"),
    ([f"{TRANSFORMER}.cp_comm_type=[p2p, a2o]"], 1, "no_choice", f"{TRANSFORMER}.cp_comm_type"),
    ([f"{TRANSFORMER}.cp_comm_type=a2a+p2p"], 1, "switched_on", f"{TRANSFORMER}.cp_comm_type"),
    ([f"{TRANSFORMER}.transformer_impl=inference_optimized"], 1, "switched_on", f"{TRANSFORMER}.transformer_impl"),
    # what the job's own keys say
    ([f"{TRANSFORMER}.mtp_num_layers=1"], 1, "contradiction", f"{TRANSFORMER}.mtp_num_layers"),
    ([f"{TRANSFORMER}.mtp_loss_scaling_factor=0.5"], 1, "contradiction", f"{TRANSFORMER}.mtp_loss_scaling_factor"),
    ([f"{TRANSFORMER}.mtp_use_repeated_layer=true"], 1, "contradiction", f"{TRANSFORMER}.mtp_use_repeated_layer"),
    ([f"{TRANSFORMER}.is_hybrid_model=true"], 1, "contradiction", f"{TRANSFORMER}.is_hybrid_model"),
    # values that do not fit
    ([f"{TRANSFORMER}.perform_initialization=false"], 1, "start", f"{TRANSFORMER}.perform_initialization"),
    ([*EXPERTS, f"{TRANSFORMER}.moe_layer_freq=[1]"], 1, "shape", f"{TRANSFORMER}.moe_layer_freq"),
    ([*EXPERTS, f"{TRANSFORMER}.moe_layer_freq=[1, 2]"], 1, "shape", f"{TRANSFORMER}.moe_layer_freq"),
    ([*EXPERTS, f"{TRANSFORMER}.moe_layer_freq=0"], 1, "shape", f"{TRANSFORMER}.moe_layer_freq"),
    ([*EXPERTS, f"{TRANSFORMER}.moe_apply_probs_on_input=true"], 1, "shape", f"{TRANSFORMER}.moe_apply_probs_on_input"),
    ([*EXPERTS, f"{TRANSFORMER}.moe_router_topk_limited_devices=2"], 1, "shape", f"{TRANSFORMER}.moe_router_topk_limited_devices"),
    ([f"{OPTIMIZER}.optimizer=sgd"], 1, "optimizer", f"{OPTIMIZER}.optimizer"),
    ([*ONLINE, f"{TRANSFORMER}.cross_entropy_loss_fusion=true"], 1, "switched_on", f"{TRANSFORMER}.cross_entropy_loss_fusion"),
    ([*FLOAT64, f"{DDP}.grad_reduce_in_fp32=true"], 1, "float64", f"{DDP}.grad_reduce_in_fp32"),
    ([*FLOAT64, f"{TRANSFORMER}.fp32_residual_connection=true"], 1, "float64", f"{TRANSFORMER}.fp32_residual_connection"),
    ([f"{TRANSFORMER}.recompute_granularity=selective", f"{TRANSFORMER}.recompute_modules=[mlp, layernorm]"], 1, "device",
     f"{TRANSFORMER}.recompute_modules"),
    ([*EXPERTS, f"{TRANSFORMER}.moe_token_dispatcher_type=flex", f"{MEGATRON}.expert_model_parallel_size=2"], 2, "device",
     f"{TRANSFORMER}.moe_token_dispatcher_type"),
    ([*CUDA, *EXPERTS, f"{TRANSFORMER}.moe_token_dispatcher_type=flex"], 1, "expert_parallel_size", f"{TRANSFORMER}.moe_token_dispatcher_type"),
    ([*CUDA, f"{TRANSFORMER}.transformer_impl=local"], 1, "device", f"{TRANSFORMER}.transformer_impl"),
    # layers and stages
    ([*STAGES, "model.num_layers=3"], 2, "shape", "model.num_layers"),
    ([f'{TRANSFORMER}.pipeline_model_parallel_layout="Et|tL"'], 1, "switched_on", f"{TRANSFORMER}.pipeline_model_parallel_layout"),
    ([*STAGES, f"{MEGATRON}.mtp_num_layers=1", "model.num_layers=3", f'{TRANSFORMER}.pipeline_model_parallel_layout="Etttm|L"'], 2, "switched_on",
     f"{TRANSFORMER}.pipeline_model_parallel_layout"),
    (hybrid("*-|*-"), 1, "shape", "model.hybrid_layer_pattern"),
    ([*STAGES, *hybrid("*-|*-|*-|*-")], 2, "shape", "model.hybrid_layer_pattern"),
    ([*STAGES, *hybrid("*-|*-"), f"{TRANSFORMER}.num_layers_in_first_pipeline_stage=2"], 2, "shape", "model.hybrid_layer_pattern"),
    ([*STAGES, *hybrid("*-*")], 2, "shape", "model.hybrid_layer_pattern"),
    (hybrid("*-/"), 1, "shape", "model.hybrid_layer_pattern"),
    (hybrid("*-/*-/-*"), 1, "shape", "model.hybrid_layer_pattern"),
    (hybrid("*x"), 1, "shape", "model.hybrid_layer_pattern"),
    (hybrid("*E"), 1, "shape", "model.hybrid_layer_pattern"),
    (hybrid("+-"), 1, "shape", "model.hybrid_layer_pattern"),
    (hybrid("*M"), 1, "device", "model.hybrid_layer_pattern"),
    ([*hybrid("*E"), *EXPERTS, f"{TRANSFORMER}.moe_layer_freq=2"], 1, "contradiction", f"{TRANSFORMER}.moe_layer_freq"),
    ([*hybrid("*-"), f'{TRANSFORMER}.pipeline_model_parallel_layout="EttL"'], 1, "contradiction",
     f"{TRANSFORMER}.pipeline_model_parallel_layout"),
    # megatron-core's own word, at the option that it is about
    ([f"{TRANSFORMER}.cuda_graph_modules=x"], 1, "megatron", f"{TRANSFORMER}.cuda_graph_modules"),
    ([f"{TRANSFORMER}.softmax_scale=0.5", f"{TRANSFORMER}.recompute_granularity=selective", f"{TRANSFORMER}.recompute_modules=[x]"], 1,
     "megatron", f"{TRANSFORMER}.recompute_modules"),
    ([f"{OPTIMIZER}.main_grads_dtype=bfloat16"], 1, "megatron", f"{OPTIMIZER}.main_grads_dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "kind", "key"), WRONG, ids=lambda value: str(value)[:70])
def test_a_value_that_would_fail_or_train_something_else_is_refused_at_its_key(overrides, world_size, kind, key):
    job = load(BASE, overrides)
    (error,) = refusals(job, world_size)
    assert (error.kind, error.key) == (kind, key)
    assert error.where == job.where(key)
    assert error.what
    assert error.fix


RIGHT = [
    ([f"{TRANSFORMER}.softmax_scale=0.25", f"{TRANSFORMER}.qk_layernorm=true", f"{TRANSFORMER}.attention_output_gate=true"], 1),
    ([f"{TRANSFORMER}.cross_entropy_loss_fusion=true", f"{TRANSFORMER}.rotary_interleaved=true", f"{TRANSFORMER}.no_rope_freq=2"], 1),
    ([f"{TRANSFORMER}.cp_comm_type=p2p", f"{TRANSFORMER}.transformer_impl=local", f"{TRANSFORMER}.mtp_num_layers=null"], 1),
    ([*EXPERTS, f"{TRANSFORMER}.moe_router_load_balancing_type=[aux_loss, seq_aux_loss]", f"{TRANSFORMER}.moe_aux_loss_coeff=[0.1, 0.1]"], 1),
    ([*EXPERTS, f"{TRANSFORMER}.moe_layer_freq=[0, 1]", f"{TRANSFORMER}.moe_grouped_gemm=true", f"{TRANSFORMER}.moe_permute_fusion=false"], 1),
    ([f"{TRANSFORMER}.recompute_granularity=selective", f"{TRANSFORMER}.recompute_modules=[core_attn, mlp]"], 1),
    ([f"{DDP}.data_parallel_sharding_strategy=optim_grads_params", f"{DDP}.use_custom_fsdp=false"], 1),
    ([f"{OPTIMIZER}.optimizer=sgd", PLAIN], 1),
    ([f"{TRANSFORMER}.perform_initialization=false", "model.initial=megatron", "model.initial_path=weights"], 1),
    ([*STAGES, "model.num_layers=3", f"{TRANSFORMER}.num_layers_in_first_pipeline_stage=2"], 2),
    ([*STAGES, f'{TRANSFORMER}.pipeline_model_parallel_layout="Et|tL"'], 2),
    ([*STAGES, *hybrid("*-|*-*-/*-")], 2),
    ([*hybrid("*E/*E"), *EXPERTS, f"{TRANSFORMER}.is_hybrid_model=true"], 1),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size"), RIGHT, ids=lambda value: str(value)[:70])
def test_supported_options_are_passed_to_megatron_core(overrides, world_size):
    assert found(overrides, world_size) == []


def test_a_kernel_package_that_is_missing_is_a_note_where_the_job_runs_elsewhere():
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.fail("this test is written for a machine without Transformer Engine: give it another missing kernel")
    flex = [*EXPERTS, f"{TRANSFORMER}.moe_token_dispatcher_type=flex", f"{MEGATRON}.expert_model_parallel_size=2"]
    for overrides, told in (
        ([f"{TRANSFORMER}.window_size=[8, 0]"], "sliding window needs Transformer Engine"),
        (["model.attention_dropout=0.1"], "attention dropout (hidden_dropout is there) needs Transformer Engine"),
        (["model.normalization=LayerNorm"], "LayerNorm (torch's norm is an RMSNorm) needs Transformer Engine"),
        (hybrid("*M"), "the layers M need Transformer Engine"),
        (flex, "the flex dispatcher (deepep) needs DeepEP"),
        ([f"{TRANSFORMER}.gradient_accumulation_fusion=true"], "gradient_accumulation_fusion needs apex"),
    ):
        job = load(BASE, [*CUDA, *overrides])
        assert refusals(job, 2) == []
        (note,) = notes(job, 2)
        assert told in note
    assert refusals(load(BASE, [*CUDA, f"{DDP}.nccl_ub=true", f"{TRANSFORMER}.enable_autocast=true"]), 1) == []


def test_parameters_in_fp8_are_gathered_in_fp8_without_which_none_would_be_updated():
    fp8 = [*CUDA, f"{MEGATRON}.fp8_cfg.enabled=true", f"{MEGATRON}.fp8_cfg.fp8_param=true"]
    key = f"{DDP}.fp8_param_gather"
    assert ddp_options(load(BASE, fp8))["fp8_param_gather"] is True
    assert "fp8_param_gather" not in ddp_options(load(BASE, fp8[:-1]))
    assert found([*fp8, f"{key}=true"]) == found(fp8) == []
    assert optimizer_options(load(BASE, fp8))["fp8_recipe"] == "blockwise"  # the section's own default
    assert "fp8_recipe" not in optimizer_options(load(BASE, CUDA))
    assert found([*fp8, f"{OPTIMIZER}.fp8_recipe=delayed"]) == [("contradiction", f"{OPTIMIZER}.fp8_recipe")]
    assert found([*fp8, f"{OPTIMIZER}.fp8_recipe=blockwise"]) == []
    assert found([*fp8, f"{key}=false"]) == found([*fp8[:-1], f"{key}=true"]) == [("contradiction", key)]


def test_a_bare_assertion_of_megatron_core_is_reported_by_its_condition():
    job = load(BASE, [*CUDA, f"{MEGATRON}.fine_grained_activation_offloading=true"])
    (error,) = refusals(job, 1)
    assert (
        error.where
        == f"{MEGATRON}.fine_grained_activation_offloading (override '{MEGATRON}.fine_grained_activation_offloading=true')"
    )
    assert "assert self.offload_modules is not None and len(self.offload_modules) > 0" in error.what


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_model_is_not_made_of_other_modules_than_its_options_ask_for(name):
    value = option_defaults("transformer")[name]
    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    accepted = ModelSettings(vocab_size=8, max_sequence_length=8, transformer={**shape, name: value})
    assert transformer_config(accepted, ParallelSizes()).num_layers == 2
    asked = True if value is False else "dsa" if name == "experimental_attention_variant" else [1, 1]
    with pytest.raises(PackproofError, match="this model does not have") as caught:
        ModelSettings(vocab_size=8, max_sequence_length=8, transformer={**shape, name: asked})
    assert caught.value.where == f"model.transformer.{name}"


@pytest.mark.parametrize("pattern", ["*M", "*E", "*G/*-"])
def test_a_hybrid_model_has_no_layers_that_do_nothing(pattern, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, normalization="RMSNorm")
    with pytest.raises(PackproofError, match="which are not available here"):
        hybrid_spec(config, pattern)
    assert hybrid_spec(config, "*-/*-") is not None
