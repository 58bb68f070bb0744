"""NeMo-RL's SFT recipes on the Megatron backend resolve: keys without effect are listed, others are refused by name (SPEC R-SETUP-24)."""

from pathlib import Path

import pytest
import yaml

from production.training.__main__ import main
from production.training.config import ConfigRefused, load, refusals, without_effect
from production.training.config.nemo_rl_keys import ANY, NEMO_RL_KEYS
from production.training.config.yaml_reader import PART

BASE = Path(__file__).parent / "jobs" / "base.yaml"
MEGATRON = "policy.megatron_cfg"

RECIPE = {
    "checkpointing.checkpoint_dir": "results/sft", "checkpointing.checkpoint_must_save_by": None, "checkpointing.enabled": True,
    "checkpointing.higher_is_better": False, "checkpointing.keep_top_k": 3, "checkpointing.metric_name": "val:val_loss",
    "checkpointing.save_optimizer": True, "checkpointing.save_period": 10, "cluster.segment_size": None, "data.add_bos": True,
    "data.add_eos": True, "data.add_generation_prompt": True, "data.default.megatron_sft_assistant_prefix_len": None,
    "data.default.megatron_sft_context_parallel_size": "${policy.megatron_cfg.context_parallel_size}",
    "data.default.megatron_sft_pad_token": None, "data.default.megatron_sft_prompt_format": "identity",
    "data.default.processor": "sft_processor", "data.default.prompt_file": None, "data.default.system_prompt_file": None,
    "data.max_input_seq_length": "${policy.max_total_sequence_length}", "data.num_workers": 1, "data.shuffle": True,
    "data.train.output_key": "generated_solution", "data.train.seed": "${sft.seed}", "data.train.split": "train_1M",
    "data.train.split_validation_size": 0.0, "logger.gpu_monitoring.collection_interval": 10,
    "logger.gpu_monitoring.flush_interval": 10, "logger.log_dir": "logs", "logger.mlflow.experiment_name": "sft-dev",
    "logger.mlflow.run_name": "sft-dev-${data.train.dataset_name}", "logger.mlflow.tracking_uri": "uri", "logger.mlflow_enabled": False,
    "logger.monitor_gpus": True, "logger.swanlab.name": "sft-dev-${data.train.dataset_name}", "logger.swanlab.project": "sft-dev",
    "logger.swanlab_enabled": False, "logger.tensorboard.log_dir": "tb_logs", "logger.tensorboard_enabled": True,
    "logger.wandb.name": "run", "logger.wandb.project": "nemo-rl", "logger.wandb_enabled": True, "policy.dtensor_cfg._v2": True,
    "policy.dtensor_cfg.automodel_kwargs": {}, "policy.dtensor_cfg.enabled": False, "policy.dtensor_cfg.tensor_parallel_size": 1,
    "policy.dtensor_cfg.lora_cfg.enabled": False, "policy.dynamic_batching.enabled": False,
    "policy.dynamic_batching.sequence_length_round": 64,
    "policy.dynamic_batching.train_mb_tokens": "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}",
    "policy.make_sequence_length_divisible_by": "${policy.megatron_cfg.tensor_model_parallel_size}", "policy.max_grad_norm": 1.0,
    "policy.max_total_sequence_length": 4096, f"{MEGATRON}.activation_checkpointing": False, f"{MEGATRON}.apply_rope_fusion": False,
    f"{MEGATRON}.bias_activation_fusion": True, f"{MEGATRON}.checkpoint.async_save": False,
    f"{MEGATRON}.checkpoint.ckpt_assume_constant_structure": False, f"{MEGATRON}.context_parallel_size": 1,
    f"{MEGATRON}.cuda_graph_impl": "none", f"{MEGATRON}.cuda_graph_modules": [], f"{MEGATRON}.cuda_graph_warmup_steps": 3,
    f"{MEGATRON}.defer_fp32_logits": False,
    f"{MEGATRON}.distributed_data_parallel_config.data_parallel_sharding_strategy": "optim_grads_params",
    f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32": False,
    f"{MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce": True,
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": True,
    f"{MEGATRON}.distributed_data_parallel_config.use_custom_fsdp": False, f"{MEGATRON}.empty_unused_memory_level": 1,
    f"{MEGATRON}.enabled": True, f"{MEGATRON}.env_vars": {}, f"{MEGATRON}.expert_model_parallel_size": 1,
    f"{MEGATRON}.expert_tensor_parallel_size": 1, f"{MEGATRON}.fine_grained_activation_offloading": False,
    f"{MEGATRON}.force_reconvert_from_hf": False, f"{MEGATRON}.fp8_cfg.enabled": False, f"{MEGATRON}.fp8_cfg.fp8": "e4m3",
    f"{MEGATRON}.fp8_cfg.fp8_param": False, f"{MEGATRON}.fp8_cfg.fp8_recipe": "blockwise", f"{MEGATRON}.freeze_moe_router": True,
    f"{MEGATRON}.fused_linear_logprobs_chunk_size": 256, f"{MEGATRON}.gradient_accumulation_fusion": False,
    f"{MEGATRON}.moe_enable_deepep": False, f"{MEGATRON}.moe_per_layer_logging": False, f"{MEGATRON}.moe_permute_fusion": False,
    f"{MEGATRON}.moe_router_bias_update_rate": 0.0, f"{MEGATRON}.moe_router_dtype": "fp64",
    f"{MEGATRON}.moe_router_load_balancing_type": "none", f"{MEGATRON}.moe_shared_expert_overlap": False,
    f"{MEGATRON}.moe_token_dispatcher_type": "alltoall", f"{MEGATRON}.num_layers_in_first_pipeline_stage": None,
    f"{MEGATRON}.num_layers_in_last_pipeline_stage": None, f"{MEGATRON}.offload_modules": None,
    f"{MEGATRON}.optimizer.adam_beta1": 0.9, f"{MEGATRON}.optimizer.adam_beta2": 0.98, f"{MEGATRON}.optimizer.adam_eps": 1e-8,
    f"{MEGATRON}.optimizer.bf16": False, f"{MEGATRON}.optimizer.clip_grad": "${policy.max_grad_norm}",
    f"{MEGATRON}.optimizer.fp16": False, f"{MEGATRON}.optimizer.lr": 2e-5, f"{MEGATRON}.optimizer.min_lr": 2e-5,
    f"{MEGATRON}.optimizer.optimizer": "adam", f"{MEGATRON}.optimizer.optimizer_cpu_offload": False,
    f"{MEGATRON}.optimizer.optimizer_offload_fraction": 0.0, f"{MEGATRON}.optimizer.params_dtype": "bfloat16",
    f"{MEGATRON}.optimizer.sgd_momentum": 0.9, f"{MEGATRON}.optimizer.use_distributed_optimizer": True,
    f"{MEGATRON}.optimizer.use_precision_aware_optimizer": False, f"{MEGATRON}.optimizer.weight_decay": 0.01,
    f"{MEGATRON}.peft.dim": 8, f"{MEGATRON}.peft.enabled": False, f"{MEGATRON}.peft.lora_dtype": "None",
    f"{MEGATRON}.pipeline_dtype": "${policy.precision}", f"{MEGATRON}.pipeline_model_parallel_size": 1,
    f"{MEGATRON}.recompute_granularity": "full", f"{MEGATRON}.recompute_modules": None,
    f"{MEGATRON}.scheduler.end_weight_decay": f"${{{MEGATRON}.optimizer.weight_decay}}", f"{MEGATRON}.scheduler.lr_decay_iters": 1000,
    f"{MEGATRON}.scheduler.lr_decay_style": "constant", f"{MEGATRON}.scheduler.lr_warmup_init": 1e-11,
    f"{MEGATRON}.scheduler.lr_warmup_iters": 10, f"{MEGATRON}.scheduler.start_weight_decay": f"${{{MEGATRON}.optimizer.weight_decay}}",
    f"{MEGATRON}.scheduler.weight_decay_incr_style": "constant", f"{MEGATRON}.sequence_parallel": False,
    f"{MEGATRON}.tensor_model_parallel_size": 1, f"{MEGATRON}.use_fused_linear_logprobs": False,
    f"{MEGATRON}.use_fused_weighted_squared_relu": False, f"{MEGATRON}.use_gloo_process_groups": False,
    "policy.model_name": "meta-llama/Llama-3.1-8B", "policy.offload_optimizer_for_logprob": False,
    "policy.optimizer.kwargs.lr": 5e-6, "policy.optimizer.name": "torch.optim.AdamW",
    "policy.sequence_packing.algorithm": "modified_first_fit_decreasing", "policy.sequence_packing.enabled": True,
    "policy.sequence_packing.microbatch_order": "packer", "policy.sequence_packing.sequence_length_round": 64,
    "policy.sequence_packing.train_mb_tokens": "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}",
    "policy.tokenizer.chat_template": "default", "policy.tokenizer.chat_template_kwargs": None, "policy.train_global_batch_size": 512,
    "policy.train_micro_batch_size": 1, "sft.max_num_epochs": 1, "sft.max_num_steps": 250, "sft.only_unmask_final": False,
    "sft.seed": 42, "sft.val_at_end": False, "sft.val_at_start": True, "sft.val_batches": 8, "sft.val_global_batch_size": 32,
    "sft.val_micro_batch_size": 1, "sft.val_period": 10,
}  # fmt: skip
"""Keys of NeMo-RL's SFT recipes with the Megatron backend, `defaults` merged; float32, and without kernels, as the base is for the CPU."""

LLAMA = ["model.activation=silu", "model.gated_linear_unit=true"]
OWN = [
    "model.initial=scratch", *LLAMA, "data.train={dataset_name: openai_format, data_path: train.jsonl}", "data.train.output_key=null",
    "data.validation={dataset_name: openai_format, data_path: validation.jsonl}", "data.default.megatron_sft_prompt_format=null",
]  # fmt: skip
"""What a user says beside a recipe: files of conversations, and that weights are drawn."""


@pytest.fixture
def recipe(tmp_path):
    """Write the recipe over the base, which it names by `defaults`."""
    values: dict = {"defaults": str(BASE.resolve())}
    for key, value in RECIPE.items():
        *parents, name = PART.findall(key)
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_r_setup_24_a_recipe_of_all_keys_resolves_on_the_online_path(recipe):
    job = load(recipe, OWN)
    assert refusals(job, 1) == []
    assert job.loss.normalization == "global_valid_tokens"
    assert job.sources["loss.normalization"].kind == "derived"
    assert job.policy.sequence_packing.train_mb_tokens == 4096


def test_a_recipe_of_all_keys_resolves_on_packed_rows(recipe):
    job = load(
        recipe,
        ["model.initial=scratch", *LLAMA, "data.validation={dataset_name: megatron_sft_packed, data_path: v.packed}"],
    )
    assert refusals(job, 1) == []
    assert (job.is_packed, job.loss.normalization) == (True, "per_token")
    assert "data.add_bos" in without_effect(job)


def test_every_key_without_effect_is_listed_once_with_its_reason(recipe, capsys):
    job = load(recipe, OWN)
    expected = {
        "policy.optimizer", "policy.tokenizer.chat_template_kwargs", "policy.sequence_packing.microbatch_order",
        f"{MEGATRON}.checkpoint", f"{MEGATRON}.force_reconvert_from_hf", f"{MEGATRON}.fused_linear_logprobs_chunk_size",
        f"{MEGATRON}.use_gloo_process_groups", "data.train.split", "data.train.output_key", "data.train.seed",
        "data.train.split_validation_size", "data.default.prompt_file", "data.default.system_prompt_file", "data.default.processor",
        "logger.swanlab", "logger.gpu_monitoring", "cluster.segment_size", f"{MEGATRON}.recompute_granularity",
        "policy.dtensor_cfg", "policy.dynamic_batching", f"{MEGATRON}.peft", "logger.monitor_gpus",
        f"{MEGATRON}.empty_unused_memory_level", f"{MEGATRON}.freeze_moe_router", "policy.sequence_packing.sequence_length_round",
        f"{MEGATRON}.optimizer.params_dtype",
    }  # fmt: skip
    assert set(without_effect(job)) == expected
    assert main(["--config", str(recipe), "--dry-run", *OWN]) == 0
    screen = capsys.readouterr().out
    assert "accepted without effect\n" in screen
    for key, why in without_effect(job).items():
        (line,) = [each for each in screen.splitlines() if key in each.partition(": ")[0].replace(",", "").split()]
        assert line.endswith(f": {why}")


def test_a_job_without_such_keys_lists_none(capsys):
    assert without_effect(load(BASE)) == {}
    main(["--config", str(BASE), "--dry-run"])
    assert "without effect" not in capsys.readouterr().out


REFUSED = [
    ("policy.tokenizer.chat_template_kwargs={enable_thinking: true}", "policy.tokenizer.chat_template_kwargs", "chat_template"),
    ("policy.hf_config_overrides={rope_scaling: {rope_type: yarn}}", "policy.hf_config_overrides", "YaRN"),
    ("policy.sequence_packing.microbatch_order=largest_first", "policy.sequence_packing.microbatch_order", "write packer"),
    ("data.train.split_validation_size=0.05", "data.train.split_validation_size", "data.validation"),
    ("data.train.max_samples=100000", "data.train.max_samples", "head -n"),
    ("data.default.prompt_file=examples/prompts/math.txt", "data.default.prompt_file", "into the messages"),
    ("data.default.system_prompt_file=a.txt", "data.default.system_prompt_file", "first message"),
    ("data.default.processor=math_hf_data_processor", "data.default.processor", "sft_processor"),
    ("data.train.dataset_name=OpenMathInstruct-2", "data.train.dataset_name", "openai_format"),
    ("data.train.dataset_name=my.module.Dataset", "data.train.dataset_name", "openai_format"),
    ("policy.tokenizer.chat_template=null", "policy.tokenizer.chat_template", "write default"),
    (f"{MEGATRON}.peft.enabled=true", f"{MEGATRON}.peft.enabled", "to false"),
    (f"{MEGATRON}.use_fused_linear_logprobs=true", f"{MEGATRON}.use_fused_linear_logprobs", "to false"),
    ("policy.train_micro_batch_size=2", "policy.train_micro_batch_size", "to 1"),
    ("policy.sequence_packing.enabled=false", "policy.sequence_packing.enabled", "to true"),
    ("model.num_moe_experts=4", f"{MEGATRON}.freeze_moe_router", "to false"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "key", "fix"), REFUSED)
def test_parts_of_a_recipe_that_the_job_lacks_are_refused_by_name(recipe, override, key, fix):
    found = {each.key: each for each in refusals(load(recipe, [*OWN, override]), 1)}
    assert key in found
    assert fix in found[key].fix
    assert found[key].where.startswith(key)


def test_an_optimizer_section_unlike_nemo_rls_is_an_unknown_key(recipe):
    with pytest.raises(ConfigRefused, match=r"policy\.optimizer is not a key"):
        load(recipe, [*OWN, "policy.optimizer={lr: 0.1}", "policy.optimizer.name=adam"])


def test_every_key_of_the_table_with_a_refused_value_has_a_test():
    refused = {key.rpartition(".")[2] for key, each in NEMO_RL_KEYS.items() if ANY not in each.harmless}
    assert refused <= {key.rpartition(".")[2] for _, key, _ in REFUSED}


def test_a_model_name_alone_does_not_say_where_weights_come_from(recipe):
    found = [each.key for each in refusals(load(recipe, OWN[1:]), 1)]
    assert found == ["model.initial"]


def test_a_configuration_that_is_refused_is_not_printed_as_if_it_were_whole(recipe, capsys):
    assert main(["--config", str(recipe), "--print-config", *OWN, "data.train.max_samples=5"]) == 2
    assert "max_samples" in capsys.readouterr().err


def test_full_recomputation_of_a_recipe_waits_for_its_switch(recipe):
    assert "recompute_granularity" not in load(recipe, OWN).megatron.transformer
    kept = load(recipe, [*OWN, f"{MEGATRON}.recompute_method=uniform", f"{MEGATRON}.recompute_num_layers=1"])
    assert kept.megatron.transformer["recompute_granularity"] == "full"
