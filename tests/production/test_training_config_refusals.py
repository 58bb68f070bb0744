"""What must not run is refused before any model is built (SPEC R-SETUP-6 to R-SETUP-18): each with what, where and how to fix it."""

import dataclasses
import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from production.tokens.fingerprint import fingerprint_tokenizer
from production.tokens.folder import load_folder
from production.training.config import Data, SetupRefused, load, notes, packed_otherwise, refusals, validate
from production.training.config import validation as validation_module

BASE = Path(__file__).parent / "jobs" / "base.yaml"
TOKENIZER = Path(__file__).parents[2] / "examples" / "tokenizers" / "nemotron-mini"
MEGATRON = "policy.megatron_cfg"
OPTIMIZER = f"{MEGATRON}.optimizer"
DDP = f"{MEGATRON}.distributed_data_parallel_config"
TRANSFORMER = f"{MEGATRON}.transformer"
ONLINE = [
    "data.train.dataset_name=openai_format",
    "policy.sequence_packing.enabled=true",
    "loss.normalization=global_valid_tokens",
]
EXPERTS = ["model.num_moe_experts=4", "model.moe_ffn_hidden_size=64"]
PLAIN = f"{OPTIMIZER}.use_distributed_optimizer=false"
PACKED = "{dataset_name: megatron_sft_packed, data_path: x}"
CHAT = "{dataset_name: openai_format, data_path: x}"


def found(overrides, world_size=1, device=None):
    return [(each.kind, each.key) for each in refusals(load(BASE, overrides), world_size, device=device)]


def test_the_base_that_all_refusals_are_shown_on_is_itself_not_refused():
    job = load(BASE)
    assert refusals(job, 1) == []
    validate(job, 2)


SWITCHED_ON = [
    "policy.dtensor_cfg.enabled", "policy.dynamic_batching.enabled", "policy.draft.enabled", "policy.router_replay.enabled",
    "policy.delegate_pack_to_model", "policy.split_training", "policy.offload_optimizer_for_logprob",
    f"{MEGATRON}.peft.enabled", f"{MEGATRON}.use_fused_linear_logprobs", f"{MEGATRON}.defer_fp32_logits",
    "sft.only_unmask_final", "logger.swanlab_enabled",
    f"{TRANSFORMER}.moe_enable_routing_replay", f"{TRANSFORMER}.hybrid_context_parallel", f"{TRANSFORMER}.mtp_standalone",
    f"{TRANSFORMER}.heterogeneous_block_specs", f"{TRANSFORMER}.moe_token_dropping", f"{DDP}.use_megatron_fsdp",
    f"{DDP}.use_custom_fsdp",
]  # fmt: skip


@pytest.mark.parametrize("key", SWITCHED_ON)
def test_a_part_that_this_job_does_not_have_must_be_switched_off(key):
    assert found([f"{key}=true"]) == [("switched_on", key)]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("virtual_pipeline_model_parallel_size", "2"), ("hierarchical_context_parallel_sizes", "[2, 2]"),
        ("max_seqlen_per_dp_cp_rank", "8"), ("mtp_hybrid_override_pattern", "M"),
    ],
)  # fmt: skip
def test_an_option_of_megatron_core_for_an_absent_part_is_refused(option, value):
    assert found([f"{TRANSFORMER}.{option}={value}"]) == [("switched_on", f"{TRANSFORMER}.{option}")]


REFUSED = [
    # R-SETUP-6
    ([f"{TRANSFORMER}.context_parallel_size=2"], 1, "contradiction", f"{TRANSFORMER}.context_parallel_size"),
    ([f"{MEGATRON}.num_layers=3"], 1, "contradiction", f"{MEGATRON}.num_layers"),
    ([f"{TRANSFORMER}.params_dtype=bfloat16"], 1, "contradiction", f"{TRANSFORMER}.params_dtype"),
    ([f"{TRANSFORMER}.bf16=true"], 1, "contradiction", f"{TRANSFORMER}.bf16"),
    ([f"{TRANSFORMER}.fp16=true"], 1, "contradiction", f"{TRANSFORMER}.fp16"),
    ([f"{TRANSFORMER}.pipeline_dtype=bfloat16"], 1, "contradiction", f"{TRANSFORMER}.pipeline_dtype"),
    ([f"{TRANSFORMER}.calculate_per_token_loss=false"], 1, "contradiction", f"{TRANSFORMER}.calculate_per_token_loss"),
    (["loss.normalization=mean_of_means", f"{TRANSFORMER}.calculate_per_token_loss=true"], 1, "contradiction",
     f"{TRANSFORMER}.calculate_per_token_loss"),
    ([f"{MEGATRON}.activation_checkpointing=true", f"{TRANSFORMER}.recompute_granularity=selective"], 1, "contradiction",
     f"{TRANSFORMER}.recompute_granularity"),
    ([f"{DDP}.use_distributed_optimizer=false"], 1, "contradiction", f"{DDP}.use_distributed_optimizer"),
    ([f"{OPTIMIZER}.overlap_param_gather=true"], 1, "contradiction", f"{OPTIMIZER}.overlap_param_gather"),
    ([f"{OPTIMIZER}.bf16=true"], 1, "contradiction", f"{OPTIMIZER}.bf16"),
    ([f"{OPTIMIZER}.fp16=true"], 1, "contradiction", f"{OPTIMIZER}.fp16"),
    ([f"{OPTIMIZER}.clip_grad=1.0", "policy.max_grad_norm=0.5"], 1, "contradiction", f"{OPTIMIZER}.clip_grad"),
    ([f"{OPTIMIZER}.fp8_recipe=delayed"], 1, "contradiction", f"{OPTIMIZER}.fp8_recipe"),
    ([f"{MEGATRON}.pipeline_dtype=bfloat16"], 1, "contradiction", f"{MEGATRON}.pipeline_dtype"),
    # R-SETUP-7
    ([f"{MEGATRON}.enabled=false"], 1, "backend", f"{MEGATRON}.enabled"),
    # R-SETUP-8
    ([f"{MEGATRON}.tensor_model_parallel_size=0"], 1, "layout", f"{MEGATRON}.tensor_model_parallel_size"),
    ([f"{MEGATRON}.context_parallel_size=2"], 3, "world_size", f"{MEGATRON}.context_parallel_size"),
    ([], 0, "world_size", f"{MEGATRON}.tensor_model_parallel_size"),
    (["cluster.num_nodes=2", "cluster.gpus_per_node=4"], 4, "world_size", "cluster.num_nodes"),
    ([*EXPERTS, f"{MEGATRON}.expert_model_parallel_size=4"], 2, "expert_parallel_size", f"{MEGATRON}.expert_model_parallel_size"),
    ([*EXPERTS, f"{MEGATRON}.expert_tensor_parallel_size=4"], 2, "expert_parallel_size", f"{MEGATRON}.expert_model_parallel_size"),
    ([f"{MEGATRON}.expert_model_parallel_size=2"], 2, "expert_parallel_size", f"{MEGATRON}.expert_model_parallel_size"),
    ([f"{MEGATRON}.expert_tensor_parallel_size=2"], 2, "expert_parallel_size", f"{MEGATRON}.expert_tensor_parallel_size"),
    (["model.num_moe_experts=3", f"{MEGATRON}.expert_model_parallel_size=2"], 2, "expert_parallel_size",
     f"{MEGATRON}.expert_model_parallel_size"),
    (["model.num_query_groups=1", f"{MEGATRON}.tensor_model_parallel_size=2"], 2, "heads", "model.num_query_groups"),
    (["model.vocab_size=4097", f"{MEGATRON}.tensor_model_parallel_size=2"], 2, "vocab_size", "model.vocab_size"),
    ([f"{MEGATRON}.sequence_parallel=true"], 1, "sequence_parallel", f"{MEGATRON}.sequence_parallel"),
    ([f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.sequence_parallel=false"], 2, "sequence_parallel",
     f"{MEGATRON}.sequence_parallel"),
    # R-SETUP-9
    (["policy.train_micro_batch_size=2"], 1, "micro_batch_size", "policy.train_micro_batch_size"),
    (["sft.val_micro_batch_size=2"], 1, "micro_batch_size", "sft.val_micro_batch_size"),
    (["policy.train_global_batch_size=6", "sft.val_global_batch_size=8"], 4, "global_batch_size", "policy.train_global_batch_size"),
    (["policy.train_global_batch_size=0", "sft.val_global_batch_size=8"], 1, "global_batch_size", "policy.train_global_batch_size"),
    (["sft.val_global_batch_size=6"], 4, "global_batch_size", "sft.val_global_batch_size"),
    (["data.train.dataset_name=openai_format", "loss.normalization=global_valid_tokens"], 1, "sequence_packing",
     "policy.sequence_packing.enabled"),
    ([*ONLINE[:2], "loss.normalization=per_token"], 1, "online_normalization", "loss.normalization"),
    # R-SETUP-10
    ([f"data.validation={CHAT}"], 1, "mixed_datasets", "data.validation.dataset_name"),
    ([f"data.train=[{PACKED}, {CHAT}]"], 1, "mixed_datasets", "data.train[1].dataset_name"),
    ([f"data.train=[{PACKED}, {PACKED}]"], 1, "two_packed_datasets", "data.train[1].dataset_name"),
    ([f"data.validation=[{PACKED}, {PACKED}]"], 1, "two_packed_datasets", "data.validation[1].dataset_name"),
    (["data.train=[]"], 1, "no_data", "data.train"),
    (["data.train.megatron_sft_context_parallel_size=2"], 1, "context_parallel_size", "data.train.megatron_sft_context_parallel_size"),
    (["data.default.megatron_sft_context_parallel_size=2"], 1, "context_parallel_size",
     "data.train.megatron_sft_context_parallel_size"),
    (["data.default.megatron_sft_prompt_format=null"], 1, "prompt_format", "data.train.megatron_sft_prompt_format"),
    (["data.train.megatron_sft_prompt_format=default", "data.train.semantics=nemo-rl-direct"], 1, "prompt_format",
     "data.train.megatron_sft_prompt_format"),
    (["data.train.megatron_sft_assistant_prefix_len=-1"], 1, "prefix", "data.train.megatron_sft_assistant_prefix_len"),
    (["data.train.megatron_sft_prompt_format=identity", "data.train.megatron_sft_assistant_prefix_len=3"], 1, "prefix",
     "data.train.megatron_sft_assistant_prefix_len"),
    (["data.train.semantics=megatron-lm-0.20"], 1, "semantics", "data.train.semantics"),
    (["data.train.data_path=[{path: x, weight: 1}, y]"], 1, "weights", "data.train.data_path"),
    (["data.train.data_path=[{path: x, weight: 0.0}]", "sft.max_num_epochs=null", "data.last_batch=wrap"], 1, "order",
     "data.train.data_path"),
    (["data.train.data_path=[{path: x, weight: 1}]", "sft.max_num_epochs=null"], 1, "order", "data.last_batch"),
    (["data.train.data_path=[{path: x, weight: 1}]", "data.last_batch=wrap"], 1, "order", "sft.max_num_epochs"),
    (["data.order=megatron-cyclic"], 1, "order", "data.last_batch"),
    (["data.order=megatron-cyclic", "data.last_batch=wrap"], 1, "order", "sft.max_num_epochs"),
    (["data.shuffle=true", "data.order=sequential"], 1, "order", "data.order"),
    (["data.num_workers=-1"], 1, "order", "data.num_workers"),
    (["data.prefetch=0"], 1, "order", "data.prefetch"),
    # R-SETUP-11
    (["policy.max_total_sequence_length=2046", f"{MEGATRON}.context_parallel_size=2"], 2, "pack_length",
     "policy.max_total_sequence_length"),
    (["policy.max_total_sequence_length=2052", f"{MEGATRON}.context_parallel_size=2", f"{MEGATRON}.tensor_model_parallel_size=2"], 4,
     "pack_length", "policy.max_total_sequence_length"),
    (["policy.max_total_sequence_length=0"], 1, "pack_length", "policy.max_total_sequence_length"),
    (["policy.max_total_sequence_length=2056", "cluster.device=cuda", "policy.precision=bfloat16", f"{TRANSFORMER}.fp8=e4m3"], 1,
     "pack_length", "policy.max_total_sequence_length"),
    ([*ONLINE, "policy.make_sequence_length_divisible_by=2", f"{MEGATRON}.context_parallel_size=2"], 2, "divisible_by",
     "policy.make_sequence_length_divisible_by"),
    ([*ONLINE, "policy.sequence_packing.train_mb_tokens=4096"], 1, "bin", "policy.sequence_packing.train_mb_tokens"),
    ([*ONLINE, "data.max_input_seq_length=4096"], 1, "bin", "data.max_input_seq_length"),
    ([*ONLINE, "policy.sequence_packing.train_mb_tokens=100", "policy.make_sequence_length_divisible_by=8",
      "data.max_input_seq_length=100"], 1, "bin", "data.max_input_seq_length"),
    # R-SETUP-12
    ([*EXPERTS, f"{TRANSFORMER}.overlap_moe_expert_parallel_comm=true", f"{MEGATRON}.mtp_num_layers=1"], 1, "overlap",
     f"{TRANSFORMER}.overlap_moe_expert_parallel_comm"),
    ([f"{TRANSFORMER}.delay_wgrad_compute=true"], 1, "overlap", f"{TRANSFORMER}.delay_wgrad_compute"),
    ([f"{DDP}.overlap_param_gather=true"], 1, "overlap", f"{DDP}.overlap_param_gather"),
    ([f"{DDP}.overlap_param_gather=true", f"{DDP}.overlap_grad_reduce=true", PLAIN], 1, "overlap", f"{DDP}.overlap_param_gather"),
    ([f"{DDP}.average_in_collective=true"], 1, "overlap", f"{DDP}.average_in_collective"),
    # R-SETUP-13
    (["policy.precision=float64", f"{OPTIMIZER}.clip_grad=0.0"], 1, "float64", f"{OPTIMIZER}.use_distributed_optimizer"),
    (["policy.precision=float64", PLAIN], 1, "float64", f"{OPTIMIZER}.clip_grad"),
    (["policy.precision=bfloat16"], 1, "device", "policy.precision"),
    (["cluster.device=cuda", f"{MEGATRON}.fp8_cfg.enabled=true"], 1, "fp8", f"{MEGATRON}.fp8_cfg.enabled"),
    (["model.normalization=LayerNorm"], 1, "device", "model.normalization"),
    (["model.attention_dropout=0.1"], 1, "device", "model.attention_dropout"),
    # R-SETUP-14
    ([f"{TRANSFORMER}.recompute_granularity=full"], 1, "megatron", f"{TRANSFORMER}.recompute_granularity"),
    ([f"{DDP}.num_buckets=2", f"{DDP}.bucket_size=8"], 1, "megatron", f"{DDP}.num_buckets"),
    ([f"{TRANSFORMER}.use_cpu_initialization=false"], 1, "megatron", f"{TRANSFORMER}.use_cpu_initialization"),
    # R-SETUP-15
    (["sft.max_num_steps=null", "sft.max_num_epochs=null"], 1, "endless", "sft.max_num_steps"),
    (["sft.max_num_steps=0"], 1, "size", "sft.max_num_steps"),
    (["sft.seed=-1", "data.seed=0"], 1, "size", "sft.seed"),
    (["logger.report_period=0"], 1, "size", "logger.report_period"),
    (["sft.val_global_batch_size=0"], 1, "size", "sft.val_global_batch_size"),
    (["cluster.num_nodes=0"], 1, "size", "cluster.num_nodes"),
    (["logger.dump_batch_steps=[0]"], 1, "size", "logger.dump_batch_steps"),
    (["logger.dump_batch_steps=[20, 21]"], 1, "size", "logger.dump_batch_steps"),
    ([*ONLINE, "data.max_input_seq_length=0"], 1, "size", "data.max_input_seq_length"),
    ([*ONLINE, "policy.make_sequence_length_divisible_by=0"], 1, "size", "policy.make_sequence_length_divisible_by"),
    ([*ONLINE, "policy.sequence_packing.train_mb_tokens=0"], 1, "size", "policy.sequence_packing.train_mb_tokens"),
    (["logger.peak_teraflops=0"], 1, "size", "logger.peak_teraflops"),
    (['logger.log_dir=""'], 1, "no_folder", "logger.log_dir"),
    (["sft.seed=9999999999999999999"], 1, "size", "sft.seed"),
    (["sft.val_period=5"], 1, "no_validation", "sft.val_period"),
    (["sft.val_at_start=true"], 1, "no_validation", "sft.val_at_start"),
    (["sft.val_at_end=true"], 1, "no_validation", "sft.val_at_end"),
    # R-SETUP-16
    ([f"{OPTIMIZER}.lr=0.0"], 1, "schedule", f"{OPTIMIZER}.lr"),
    ([f"{OPTIMIZER}.min_lr=0.1"], 1, "schedule", f"{OPTIMIZER}.min_lr"),
    ([f"{MEGATRON}.scheduler.lr_decay_style=cosine"], 1, "schedule", f"{MEGATRON}.scheduler.lr_decay_style"),
    ([f"{MEGATRON}.scheduler.lr_decay_style=WSD", f"{OPTIMIZER}.min_lr=0.0"], 1, "schedule", f"{MEGATRON}.scheduler.lr_decay_style"),
    ([f"{MEGATRON}.scheduler.lr_decay_style=cosine", f"{OPTIMIZER}.min_lr=0.0", "sft.max_num_steps=null"], 1, "schedule",
     f"{MEGATRON}.scheduler.lr_decay_iters"),
    ([f"{MEGATRON}.scheduler.lr_warmup_init=0.1"], 1, "schedule", f"{MEGATRON}.scheduler.lr_warmup_init"),
    ([f"{MEGATRON}.scheduler.lr_warmup_iters=20"], 1, "schedule", f"{MEGATRON}.scheduler.lr_warmup_iters"),
    ([f"{MEGATRON}.scheduler.start_weight_decay=0.1", f"{MEGATRON}.scheduler.end_weight_decay=0.2"], 1, "schedule",
     f"{MEGATRON}.scheduler.end_weight_decay"),
    ([f"{MEGATRON}.scheduler.start_weight_decay=0.1"], 1, "schedule", f"{MEGATRON}.scheduler.start_weight_decay"),
    ([f"{MEGATRON}.scheduler.end_weight_decay=0.1"], 1, "schedule", f"{MEGATRON}.scheduler.end_weight_decay"),
    ([f"{MEGATRON}.scheduler.start_weight_decay=0.1", f"{OPTIMIZER}.weight_decay=0.05",
      f"{MEGATRON}.scheduler.weight_decay_incr_style=linear"], 1, "schedule", f"{MEGATRON}.scheduler.start_weight_decay"),
    ([f"{MEGATRON}.scheduler.start_weight_decay=-0.1", f"{MEGATRON}.scheduler.weight_decay_incr_style=linear"], 1, "schedule",
     f"{MEGATRON}.scheduler.start_weight_decay"),
    # R-SETUP-17
    (["checkpointing.save_period=0"], 1, "checkpoint", "checkpointing.save_period"),
    (["checkpointing.keep_top_k=0"], 1, "checkpoint", "checkpointing.keep_top_k"),
    (["checkpointing.metric_name=loss"], 1, "checkpoint", "checkpointing.metric_name"),
    (["checkpointing.metric_name=val:loss"], 1, "checkpoint", "checkpointing.metric_name"),
    (["checkpointing.metric_name=val:val_loss"], 1, "checkpoint", "checkpointing.metric_name"),
    (["model.tie_embeddings=true", f"{MEGATRON}.mtp_num_layers=1", f"{MEGATRON}.pipeline_model_parallel_size=2", PLAIN], 2,
     "checkpoint", "model.tie_embeddings"),
    (["checkpointing.checkpoint_must_save_by=4h"], 1, "checkpoint", "checkpointing.checkpoint_must_save_by"),
    (["checkpointing.checkpoint_must_save_by=4h", "checkpointing.enabled=false"], 1, "checkpoint",
     "checkpointing.checkpoint_must_save_by"),
    (['checkpointing.checkpoint_must_save_by="0:4:0:0"', "checkpointing.enabled=false"], 1, "checkpoint",
     "checkpointing.checkpoint_must_save_by"),
    (["checkpointing.optimizer_format=fully_sharded_model_space"], 1, "checkpoint", "checkpointing.optimizer_format"),
    ([f"{MEGATRON}.pipeline_model_parallel_size=2"], 2, "checkpoint", f"{OPTIMIZER}.use_distributed_optimizer"),
    # R-SETUP-18
    (["model.hidden_size=null", "model.initial=huggingface", "policy.model_name=some/model"], 1, "shape", "model.hidden_size"),
    (["model.num_layers=null"], 1, "shape", "model.num_layers"),
    (["model.architecture=hybrid"], 1, "shape", "model.hybrid_layer_pattern"),
    (['model.hybrid_layer_pattern="*-"'], 1, "shape", "model.hybrid_layer_pattern"),
    (["model.architecture=hybrid", 'model.hybrid_layer_pattern="*-/*-"', f"{MEGATRON}.mtp_num_layers=2"], 1, "shape",
     f"{MEGATRON}.mtp_num_layers"),
    (["model.architecture=hybrid", 'model.hybrid_layer_pattern="*-*"'], 1, "shape", "model.num_layers"),
    (["model.hidden_dropout=1.0"], 1, "shape", "model.hidden_dropout"),
    (["model.num_attention_heads=3"], 1, "shape", "model.num_attention_heads"),
    (["model.num_query_groups=3"], 1, "shape", "model.num_query_groups"),
    (["model.kv_channels=5"], 1, "shape", "model.rotary_percent"),
    (["model.rotary_percent=0.2"], 1, "shape", "model.rotary_percent"),
    (["model.rotary_percent=0.0"], 1, "size", "model.rotary_percent"),
    (["model.num_layers=-1"], 1, "size", "model.num_layers"),
    (["model.ffn_hidden_size=0"], 1, "size", "model.ffn_hidden_size"),
    ([*EXPERTS, "model.moe_router_topk=5"], 1, "shape", "model.moe_router_topk"),
    ([f"{OPTIMIZER}.adam_beta1=1.0"], 1, "size", f"{OPTIMIZER}.adam_beta1"),
    ([f"{OPTIMIZER}.adam_eps=-1.0e-8"], 1, "size", f"{OPTIMIZER}.adam_eps"),
    ([f"{OPTIMIZER}.clip_grad=-1.0"], 1, "size", f"{OPTIMIZER}.clip_grad"),
    ([f"{OPTIMIZER}.weight_decay=-0.1"], 1, "size", f"{OPTIMIZER}.weight_decay"),
    ([f"{OPTIMIZER}.optimizer=adamx"], 1, "no_package", f"{OPTIMIZER}.optimizer"),
    (["model.initial=megatron"], 1, "start", "model.initial_path"),
    (["model.initial=huggingface"], 1, "start", "model.initial_path"),
    (["model.initial_path=weights"], 1, "start", "model.initial_path"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "kind", "key"), REFUSED, ids=lambda value: str(value)[:60])
def test_r_setup_6_to_18_impossible_jobs_are_refused_at_their_key(overrides, world_size, kind, key):
    job = load(BASE, overrides)
    found_here = refusals(job, world_size)
    assert [(each.kind, each.key) for each in found_here] == [(kind, key)]
    with pytest.raises(SetupRefused) as caught:
        validate(job, world_size)
    error = caught.value
    assert error.what
    assert error.fix
    assert error.where == job.where(key)


def test_the_table_of_refusals_reaches_every_check():
    assert len(validation_module._CHECKS) == 20
    kinds = {kind for _, _, kind, _ in REFUSED}
    assert len(kinds) >= 30


def test_the_place_of_a_refusal_is_the_line_that_set_the_value(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("policy:\n  megatron_cfg:\n    transformer:\n      context_parallel_size: 2\n", encoding="utf-8")
    (refusal,) = refusals(load([BASE, path]), 1)
    assert refusal.where == f"{TRANSFORMER}.context_parallel_size ({path}:4)"


def test_all_refusals_of_several_faults_are_reported_together():
    both = found(["policy.train_micro_batch_size=2", f"{MEGATRON}.enabled=false", "model.hidden_size=null"])
    assert both == [
        ("backend", f"{MEGATRON}.enabled"),
        ("micro_batch_size", "policy.train_micro_batch_size"),
        ("shape", "model.hidden_size"),
    ]


def test_a_warm_up_longer_than_the_decay_names_both_values_and_their_sources():
    (derived,) = refusals(load(BASE, [f"{MEGATRON}.scheduler.lr_warmup_iters=20"]), 1)
    key = f"{MEGATRON}.scheduler.lr_decay_iters"
    told = "must be below lr_decay_iters, 20, which counts the warm-up too"
    assert f"{told} ({key} (derived from " in str(derived)
    assert "got 20. To fix it: " in str(derived)
    assert str(derived).endswith(f"To fix it: set it below 20, or {key} above 20")
    (given,) = refusals(load(BASE, [f"{MEGATRON}.scheduler.lr_warmup_iters=4", f"{key}=4"]), 1)
    assert f"below lr_decay_iters, 4, which counts the warm-up too ({key} (override '{key}=4')" in str(given)
    (negative,) = refusals(load(BASE, [f"{MEGATRON}.scheduler.lr_warmup_iters=-1"]), 1)
    assert "must be at least 0, got -1. To fix it: give 0 or more" in str(negative)


def test_a_refusal_names_the_default_of_an_unset_weight_decay():
    key = f"{MEGATRON}.scheduler.start_weight_decay"
    (unset,) = refusals(load(BASE, [f"{key}=0.1"]), 1)
    assert (
        unset.what
        == f"weight decay must stay constant (weight_decay_incr_style constant), got 0.1 to 0.01 (megatron-core's default of {OPTIMIZER}.weight_decay)"
    )
    (derived,) = refusals(load(BASE, [f"{key}=0.1", f"{OPTIMIZER}.weight_decay=0.05"]), 1)
    assert (
        derived.what
        == f"weight decay must stay constant (weight_decay_incr_style constant), got 0.1 to 0.05 ({OPTIMIZER}.weight_decay)"
    )
    assert found([f"{key}=0.001", f"{MEGATRON}.scheduler.weight_decay_incr_style=cosine"]) == []


ACCEPTED = [
    ([f"{TRANSFORMER}.context_parallel_size=1", f"{TRANSFORMER}.num_layers=2", f"{TRANSFORMER}.params_dtype=float32"], 1),
    ([*ONLINE, "policy.make_sequence_length_divisible_by=16"], 2),
    ([*ONLINE, f"{MEGATRON}.mtp_num_layers=2", "loss.mtp_weights=rows"], 2),
    # R-SETUP-9: NeMo-RL's Megatron set-up demands true for cp > 1 also of packed rows.
    (["policy.sequence_packing.enabled=true", f"{MEGATRON}.context_parallel_size=2"], 2),
    (["policy.sequence_packing.enabled=true", "policy.sequence_packing.sequence_length_round=64"], 1),
    (["policy.sequence_packing.enabled=false", f"{MEGATRON}.context_parallel_size=2"], 2),
    (["policy.precision=float64", PLAIN, f"{OPTIMIZER}.clip_grad=0.0"], 1),
    ([f"{MEGATRON}.pipeline_model_parallel_size=2", PLAIN], 2),
    ([f"{MEGATRON}.pipeline_model_parallel_size=2", "checkpointing.enabled=false"], 2),
    ([*EXPERTS, f"{MEGATRON}.expert_model_parallel_size=2", f"{MEGATRON}.tensor_model_parallel_size=2"], 4),
    ([f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.mtp_num_layers=2"], 1),
    (["model.architecture=hybrid", 'model.hybrid_layer_pattern="*-*-/*-/*-"', "model.num_layers=null"], 1),
    (["data.train.data_path=[{path: x, weight: 0.5}, {path: y, weight: 0.5}]", "sft.max_num_epochs=null", "data.last_batch=wrap"], 1),
    (["loss.normalization=mean_of_means", f"{DDP}.average_in_collective=true"], 1),
    (["cluster.device=cuda", "policy.precision=bfloat16", f"{MEGATRON}.fp8_cfg.enabled=true"], 1),
    (["model.initial=huggingface", "policy.model_name=some/model"], 1),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size"), ACCEPTED, ids=lambda value: str(value)[:60])
def test_possible_jobs_are_not_refused(overrides, world_size):
    assert found(overrides, world_size) == []


def test_a_kernel_missing_here_is_only_a_note_for_a_job_that_runs_elsewhere():
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.fail("this test is written for a machine without Transformer Engine: give it another missing kernel")
    overrides = [f"{OPTIMIZER}.use_precision_aware_optimizer=true"]
    elsewhere = load(BASE, [*overrides, "cluster.device=cuda"])
    assert refusals(elsewhere, 1) == []
    assert len(notes(elsewhere, 1)) == 1
    here = load(BASE, overrides)
    assert [each.kind for each in refusals(here, 1)] == ["not_installed"]
    assert notes(here, 1) == []


def test_fp8_needs_a_gpu_as_bfloat16_does():
    assert found(["policy.precision=bfloat16", f"{MEGATRON}.fp8_cfg.enabled=true"]) == [
        ("device", "policy.precision"),
        ("device", f"{MEGATRON}.fp8_cfg.enabled"),
    ]


def test_the_machines_device_decides_if_the_configuration_says_auto():
    job = load(BASE, ["cluster.device=auto", "policy.precision=bfloat16"])
    assert refusals(job, 1) == []
    assert [each.key for each in refusals(job, 1, device="cpu")] == ["policy.precision"]


def test_a_job_that_was_not_read_from_a_file_is_validated_all_the_same():
    job = load(BASE)
    two = Data(train=job.data.train * 2)
    (refusal,) = refusals(dataclasses.replace(job, data=dataclasses.replace(two, order="sequential"), sources={}), 1)
    assert refusal.kind == "two_packed_datasets"


def test_r_setup_21_rows_packed_for_other_settings_are_noted(tmp_path):
    file = tmp_path / "rows.jsonl.packed"
    file.write_text("[]\n")
    manifest = tmp_path / "rows.jsonl.packed.manifest.json"
    job = load(
        BASE,
        [f"data.train.data_path={file}", "policy.max_total_sequence_length=1024", f"policy.tokenizer.name={TOKENIZER}"],
    )
    assert packed_otherwise(job) == []
    settings = {"pack_length": 2048, "prompt_format": "nemotron-nano-v2", "context_parallel_size": 1}
    manifest.write_text(json.dumps({"settings": settings, "output": {"bytes": 3}}))
    (told,) = packed_otherwise(job)
    assert told.startswith(f"data.train.data_path: {file} was packed for pack_length 2048 (its manifest says so), ")
    assert (
        "and is trained with 1024 (policy.max_total_sequence_length): what lies behind that in a row is cut off" in told
    )
    settings |= {"pack_length": 512, "context_parallel_size": 2}
    manifest.write_text(json.dumps({"settings": settings, "output": {"bytes": 3}}))
    (told,) = packed_otherwise(job)  # a row for cp 2 does for 1
    assert told.endswith("and is trained with 1024 (policy.max_total_sequence_length)")
    both = dataclasses.replace(job, data=dataclasses.replace(job.data, validation=job.data.train))
    assert packed_otherwise(both) == [f"data.train.data_path, data.validation{told.removeprefix('data.train')}"]
    files = {
        name: hashlib.sha256((TOKENIZER / name).read_bytes()).hexdigest()
        for name in ("tokenizer.json", "tokenizer_config.json")
    }
    settings["pack_length"] = 1024
    for changed, words in (
        ({}, None),
        ({"tokenizer.json": "0"}, "tokenizer.json is not"),
        ({"merges.txt": "0"}, "merges.txt is not"),
    ):
        said = {"settings": settings, "output": {"bytes": 3}, "tokenizer": {"files": files | changed}}
        manifest.write_text(json.dumps(said))
        found = packed_otherwise(job)
        assert len(found) == (words is not None)
        assert (
            words is None
            or f"packed with another tokenizer than policy.tokenizer.name {TOKENIZER}: {words}" in found[0]
        )
    fingerprint = fingerprint_tokenizer(load_folder(TOKENIZER)).to_json()
    shifted = {**fingerprint, "probes": fingerprint["probes"] | {"newlines": [1, 2, 3]}}
    for of_tokenizer, words in (
        (
            {"files": files | {"tokenizer.json": "0"}, "fingerprint": fingerprint},
            None,
        ),  # other files, the same tokenizer
        ({"fingerprint": fingerprint}, None),
        ({"fingerprint": shifted}, "The probe text 'newlines'"),
        ({"fingerprint": {}}, "cannot be read"),
    ):
        manifest.write_text(json.dumps({"settings": settings, "output": {"bytes": 3}, "tokenizer": of_tokenizer}))
        found = packed_otherwise(job)
        assert len(found) == (words is not None), of_tokenizer.keys()
        assert words is None or words in found[0]
    manifest.write_text("[" * 100_000)
    (told,) = packed_otherwise(job)
    assert "the manifest cannot be read" in told
    assert "move it away" in told


def test_a_batch_that_is_only_derived_is_refused_once_where_nothing_is_validated():
    job = load(BASE, ["policy.train_global_batch_size=6"])
    assert not job.data.validation
    assert [each.key for each in refusals(job, 4)] == ["policy.train_global_batch_size"]


def test_a_refusal_on_the_cpu_names_the_value_that_works():
    (backend,) = refusals(load(BASE, [f"{TRANSFORMER}.attention_backend=flash"]), 1)
    assert "set it to its default, auto" in backend.fix
    (dropout,) = refusals(load(BASE, ["model.attention_dropout=0.1"]), 1)
    assert "set it to 0 (0.1 is Megatron-LM's default" in dropout.fix
