"""A job is read from YAML (SPEC R-SETUP-1 to R-SETUP-5): what is wrong is named with its dotted key, its line and the nearest valid one."""

import re
from pathlib import Path

import pytest

from production.errors import PackproofError
from production.training.config import ConfigRefused, DataFile, load

JOBS = Path(__file__).parent / "jobs"
BASE = JOBS / "base.yaml"
PULL_REQUEST = JOBS / "pull_request_3380.yaml"


def written(tmp_path, text, name="job.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(paths, overrides=()):
    with pytest.raises(ConfigRefused) as caught:
        load(paths, overrides)
    return caught.value


def test_the_pull_requests_yaml_is_accepted_as_it_stands():
    text = PULL_REQUEST.read_text(encoding="utf-8")
    assert "megatron_sft_context_parallel_size: ${policy.megatron_cfg.context_parallel_size}" in text
    job = load([BASE, PULL_REQUEST], ["policy.megatron_cfg.context_parallel_size=4"])
    train, validation = job.data.train[0], job.data.validation[0]
    assert train.data_path == (DataFile(path="/path/to/train.jsonl.packed"),)
    assert validation.data_path == (DataFile(path="/path/to/validation.jsonl.packed"),)
    for dataset in (train, validation):
        assert dataset.dataset_name == "megatron_sft_packed"
        assert dataset.chat_key == "messages"
        assert dataset.megatron_sft_prompt_format == "identity"
        assert dataset.megatron_sft_pad_token == "<unk>"
        assert dataset.megatron_sft_assistant_prefix_len == 0
        assert dataset.megatron_sft_context_parallel_size == 4
        assert dataset.semantics == "megatron-lm-0.19"
    assert job.policy.train_micro_batch_size == 1
    assert job.megatron.enabled
    assert not job.sft.only_unmask_final


def test_the_pull_requests_yaml_over_the_published_comparison_takes_its_layout():
    published = Path("examples/jobs/published-comparison.yaml")
    job = load([published, PULL_REQUEST])
    assert job.data.train[0].megatron_sft_context_parallel_size == 16
    assert job.policy.max_total_sequence_length == 262_144


def test_alone_the_pull_requests_yaml_names_all_that_it_leaves_open():
    error = refused(PULL_REQUEST)
    assert error.kind == "missing"
    for key in ("policy.tokenizer.name", "policy.train_global_batch_size", "policy.max_total_sequence_length"):
        assert key in error.what
    assert "policy.megatron_cfg.optimizer.lr" in error.what


@pytest.mark.parametrize(
    ("text", "key", "nearest", "line"),
    [
        ("policy:\n  megatron_cfg:\n    context_paralell_size: 2\n", "policy.megatron_cfg.context_paralell_size",
         "policy.megatron_cfg.context_parallel_size", 3),
        ("sft:\n  max_steps: 3\n", "sft.max_steps", "sft.max_num_steps", 2),
        ("seed: 3\n", "seed", "sft.seed", 1),
        ("policies: {}\n", "policies", "policy", 1),
        ("data:\n  train:\n    datapath: a\n", "data.train.datapath", "data.train.data_path", 3),
        ("data:\n  train:\n  - dataset_name: megatron_sft_packed\n    data_path: a\n    chatkey: b\n", "data.train[0].chatkey",
         "data.train[0].chat_key", 5),
        ("policy:\n  megatron_cfg:\n    optimizer:\n      adam_beta_1: 0.9\n", "policy.megatron_cfg.optimizer.adam_beta_1",
         "policy.megatron_cfg.optimizer.adam_beta1", 4),
        ("policy:\n  megatron_cfg:\n    transformer:\n      qk_layer_norm: true\n",
         "policy.megatron_cfg.transformer.qk_layer_norm", "policy.megatron_cfg.transformer.qk_layernorm", 4),
        ("policy:\n  megatron_cfg:\n    distributed_data_parallel_config:\n      overlap_grad_reduction: true\n",
         "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduction",
         "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce", 4),
        ("logger:\n  wandb: {projct: a}\n", "logger.wandb.projct", "logger.wandb.project", 2),
        # megatron-core's options, as the published file writes them
        *[
            (f"policy:\n  megatron_cfg:\n    {name[:-1]}: 1\n", f"policy.megatron_cfg.{name[:-1]}", f"policy.megatron_cfg.{name}", 3)
            for name in ("recompute_granularity", "recompute_modules", "moe_router_dtype", "moe_router_load_balancing_type",
                         "moe_aux_loss_coeff", "moe_token_dispatcher_type", "batch_p2p_comm")
        ],
        # a key of that very name elsewhere, however alike its neighbors are
        ("policy:\n  megatron_cfg:\n    overlap_grad_reduce: true\n", "policy.megatron_cfg.overlap_grad_reduce",
         "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce", 3),
        ("policy:\n  megatron_cfg:\n    lr: 1.0e-5\n", "policy.megatron_cfg.lr", "policy.megatron_cfg.optimizer.lr", 3),
        ("sft:\n  lr: 1.0e-5\n", "sft.lr", "policy.megatron_cfg.optimizer.lr", 2),
        ("policy:\n  sequence_parallel: true\n", "policy.sequence_parallel", "policy.megatron_cfg.sequence_parallel", 2),
        ("policy:\n  optimizer:\n    lr: 1.0e-5\n", "policy.optimizer", "policy.megatron_cfg.optimizer", 2),
        ("policy:\n  megatron_cfg:\n    optimizer:\n      overlap_grad_reduce: true\n",
         "policy.megatron_cfg.optimizer.overlap_grad_reduce",
         "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce", 4),
        ("model:\n  heads: 4\n", "model.heads", "model.num_attention_heads", 2),
        ("polcy:\n  precision: float32\n", "polcy", "policy", 1),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_valid_one(tmp_path, text, key, nearest, line):
    path = written(tmp_path, text)
    error = refused([BASE, path])
    assert (error.kind, error.key) == ("unknown_key", key)
    assert error.where == f"{key} ({path}:{line})"
    assert error.what.endswith(f"the nearest is {nearest}")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("polcy.precision=float32", "polcy"),
        ("policy.optimizer.lr=1", "policy.optimizer"),
        ("data.train[0].x=1", "data.train"),
    ],
)
def test_values_of_an_override_name_the_override_as_their_place(tmp_path, override, key):
    path = written(tmp_path, "data:\n  train: [{dataset_name: megatron_sft_packed, data_path: a}]\n")
    error = refused([BASE, path], [override])
    assert error.kind == "unknown_key"
    assert error.where.startswith(key)
    assert error.where.endswith(f" (override '{override}')")


def test_r_setup_1_all_unknown_keys_are_named_at_once_each_with_its_place_and_the_nearest(tmp_path):
    path = written(tmp_path, "sft:\n  max_steps: 3\npolcy: {}\ndata:\n  train:\n    datapath: a\npolicy:\n  megatron_cfg:\n"
                             "    batch_p2p_com: true\n    optimizer: {adam_beta_1: 0.9}\n")  # fmt: skip
    error = refused([BASE, path], ["sft.sed=1"])
    near = {
        "sft.max_steps": ("sft.max_num_steps", f"{path}:2"),
        "polcy": ("policy", f"{path}:3"),
        "data.train.datapath": ("data.train.data_path", f"{path}:6"),
        "policy.megatron_cfg.batch_p2p_com": ("policy.megatron_cfg.batch_p2p_comm", f"{path}:9"),
        "policy.megatron_cfg.optimizer.adam_beta_1": ("policy.megatron_cfg.optimizer.adam_beta1", f"{path}:10"),
        "sft.sed": ("sft.seed", "override 'sft.sed=1'"),
    }
    assert error.kind == "unknown_key"
    assert set(error.where.split(", ")) == {f"{key} ({place})" for key, (_, place) in near.items()}
    for key, (like, _) in near.items():
        assert re.search(rf"(^|; ){re.escape(key)} is not [^;]*; the nearest is {re.escape(like)}(;|$)", error.what)
    assert error.fix.startswith("write ")
    assert error.fix.endswith(", or take them out")


def test_a_wrong_value_of_an_option_is_reported_under_the_files_key():
    key = "policy.megatron_cfg.recompute_granularity"
    error = refused(BASE, [f"{key}=partial"])
    assert (error.key, error.where) == (key, f"{key} (override '{key}=partial')")


@pytest.mark.parametrize(
    ("override", "kind", "said"),
    [
        ("policy.train_global_batch_size=8.0", "wrong_type", "a whole number"),
        ("policy.train_global_batch_size=true", "wrong_type", "a whole number"),
        ("policy.train_global_batch_size=eight", "wrong_type", "a whole number"),
        ("policy.megatron_cfg.mtp_loss_scaling_factor=little", "wrong_type", "a number"),
        ("logger.peak_teraflops=.nan", "wrong_type", "nan"),
        ("policy.model_name=7", "wrong_type", '"7" in quotes'),
        ("sft.val_at_start=1", "wrong_type", "true or false"),
        ("sft.max_num_steps=None", "wrong_type", "null"),
        ("sft=3", "wrong_type", "a section"),
        ("data.train.data_path=7", "wrong_type", "a list of paths"),
        ("data.train.data_path=[]", "wrong_type", "a list of paths"),
        ("data.train.data_path=[{weight: 1}]", "missing", "data.train.data_path[0].path"),
        ("policy.precision=float23", "no_choice", "float32"),
        ("loss.name=MyLoss", "no_choice", "NLLLossFn"),
        ("data.train.megatron_sft_prompt_format=nemotron-nano-v3", "no_choice", "nemotron-nano-v2"),
        ("data.train.dataset_name=squadron", "no_choice", "megatron_sft_packed"),
        ("policy.megatron_cfg.transformer.recompute_granularity=partial", "wrong_type", "one of full, selective"),
        ("policy.megatron_cfg.transformer.window_size=[1]", "wrong_type", "a list"),
        ("policy.megatron_cfg.transformer.attention_backend=fused_", "wrong_type", "one of flash, fused"),
        ("policy.megatron_cfg.transformer.activation_func=gelu", "wrong_type", "a function"),
        ("policy.megatron_cfg.transformer.init_method_std=true", "wrong_type", "a number"),
        ("policy.megatron_cfg.optimizer.main_grads_dtype=fp32", "wrong_type", "float32"),
        ("policy.megatron_cfg.optimizer.lr=fast", "wrong_type", "a number"),
        ("policy.megatron_cfg.optimizer=adam", "wrong_type", "mapping"),
        ("policy.megatron_cfg.env_vars={NAME: 0}", "wrong_type", "in quotes"),
        ("policy.precision=no", "bare_word", "quotes"),
        ("sft.val_at_start=off", "bare_word", "true or false"),
        ("policy.tokenizer.name=???", "missing", "policy.tokenizer.name"),
        ("data.seed=${sft.sed}", "interpolation", "sft.seed"),
        ("sft.seed=${data.default}", "wrong_type", "a whole number"),
        ("data.cache_folder=${oc.env:PACKPROOF_NO_SUCH_VARIABLE}", "interpolation", "PACKPROOF_NO_SUCH_VARIABLE"),
        ("data.cache_folder=${unclosed", "interpolation", "unclosed"),
        ("data.cache_folder=${policy.tokenizer}", "wrong_type", "a word"),
        ("+policy.precision=float32", "override", "no plus"),
        ("policy.precision", "override", "key=value"),
        ("data.train[3].data_path=a", "override", "entry 3"),
        ("data.train.data_path=[a", "override", "quotes"),
        ("policy.megatron_cfg.transformer.context_parallel_size=", "wrong_type", "a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_the_expected_type(override, kind, said):
    error = refused(BASE, [override])
    assert error.kind == kind
    assert said in str(error)
    assert override in error.where or error.kind == "missing"
    assert error.fix


def test_r_setup_3_two_interpolations_that_lead_to_each_other_are_refused():
    assert refused(BASE, ["sft.seed=${data.seed}", "data.seed=${sft.seed}"]).kind == "interpolation"


@pytest.mark.parametrize(
    ("text", "kind", "line", "said"),
    [
        ("sft:\n  seed: 1\n  val_period: 2\n  seed: 3\n", "duplicate_key", 4, ":2"),
        ("sft:\n  seed: 1\npolicy: {}\nsft:\n  seed: 2\n", "duplicate_key", 4, ":1"),
        ("logger:\n  wandb_enabled: no\n", "bare_word", 2, "others for false"),
        ("policy:\n  model_name: On\n", "bare_word", 2, "others for true"),
        ("sft:\n  <<: {seed: 1}\n", "no_yaml", 2, "merge keys"),
        ("sft:\n  seed: [1\n", "no_yaml", 3, "must be YAML"),
        ("- sft\n", "no_yaml", None, "must be a mapping"),
        ("a\nb: c: d\n", "no_yaml", 2, "must be YAML"),
        ("defaults: [3]\n", "wrong_type", 1, "must be a path or a list of paths"),
        ("defaults: not-there.yaml\n", "no_file", None, "not-there.yaml"),
        ("defaults: job.yaml\n", "defaults", None, "must not name itself"),
    ],
)
def test_r_setup_2_yaml_that_readers_disagree_on_is_refused_with_its_line(tmp_path, text, kind, line, said):
    path = written(tmp_path, text)
    error = refused([BASE, path])
    assert error.kind == kind
    assert said in str(error)
    if line is not None:
        assert f"{path}:{line}" in error.where


def test_quoted_words_and_numbers_keep_their_type(tmp_path):
    text = (
        'policy:\n  model_name: "no"\n  megatron_cfg:\n    optimizer: {lr: 1e-5, adam_eps: 1.0e-8}\n'
        'sft:\n  seed: 0\ndata:\n  cache_folder: "007"\nlogger:\n  wandb: {name: 010, entity: 1:30, project: 2026-01-01}\n'
        'checkpointing:\n  checkpoint_must_save_by: 00:03:30:00\n  metric_name: "val:loss"\n  keep_top_k: ~\n'
    )
    job = load([BASE, written(tmp_path, text)])
    assert (job.policy.model_name, job.data.cache_folder) == ("no", "007")
    assert job.megatron.optimizer["lr"] == 1e-5
    # YAML 1.1 would read 8, 90 and a date.
    assert (job.logger.wandb.name, job.logger.wandb.entity, job.logger.wandb.project) == ("010", "1:30", "2026-01-01")
    assert job.checkpointing.checkpoint_must_save_by == "00:03:30:00"
    assert job.checkpointing.keep_top_k is None


def test_r_setup_3_later_layers_replace_earlier_ones_and_every_value_names_its_source(tmp_path):
    written(tmp_path, "defaults: grand.yaml\nsft: {seed: 2, val_batches: 3}\n", "base.yaml")
    written(tmp_path, "sft:\n  seed: 1\n  val_batches: 1\n  max_num_steps: 9\n", "grand.yaml")
    top = written(tmp_path, "defaults: [base.yaml]\nsft:\n  seed: 4\n")
    job = load([BASE, top], ["policy.megatron_cfg.mtp_num_layers=1"])
    assert (job.sft.seed, job.sft.val_batches, job.sft.max_num_steps) == (4, 3, 9)
    assert job.where("sft.seed") == f"sft.seed ({top}:3)"
    assert job.where("sft.val_batches") == f"sft.val_batches ({tmp_path / 'base.yaml'}:2)"
    assert job.where("sft.max_num_steps") == f"sft.max_num_steps ({tmp_path / 'grand.yaml'}:4)"
    assert job.where("data.seed") == "data.seed (derived from sft.seed)"
    assert job.where("sft.val_period") == "sft.val_period (default)"
    assert job.sources["policy.megatron_cfg.mtp_num_layers"].kind == "override"


def test_a_value_that_replaces_a_section_takes_the_places_inside_it_along():
    job = load([BASE, PULL_REQUEST], ["data.validation=null"])
    assert job.data.validation == ()
    assert not [key for key in job.sources if key.startswith("data.validation.")]


def test_r_setup_5_values_that_are_not_set_are_derived():
    job = load(BASE, ["policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.context_parallel_size=2",
                      "policy.max_grad_norm=0.5", "policy.tokenizer.name=???", "policy.model_name=a/b",
                      "policy.megatron_cfg.optimizer.weight_decay=0.1", "data.shuffle=true", "sft.seed=7"])  # fmt: skip
    assert job.policy.tokenizer.name == "a/b"
    assert job.sft.val_global_batch_size == 8
    assert (job.data.seed, job.data.order) == (7, "shuffle")
    assert job.data.max_input_seq_length == job.policy.sequence_packing.train_mb_tokens == 2048
    assert job.policy.make_sequence_length_divisible_by == 8  # 2 x cp 2 x tp 2
    assert job.megatron.sequence_parallel is True
    assert job.megatron.pipeline_dtype == "float32"
    assert job.megatron.optimizer["clip_grad"] == 0.5
    assert job.megatron.scheduler.lr_decay_iters == 20
    assert (job.megatron.scheduler.start_weight_decay, job.megatron.scheduler.end_weight_decay) == (0.1, 0.1)
    assert job.data.train[0].megatron_sft_context_parallel_size == 2


def test_r_setup_4_megatron_cores_options_may_stand_in_megatron_cfg_but_not_twice():
    key = "policy.megatron_cfg"
    job = load(BASE, [f"{key}.moe_router_dtype=fp32", f"{key}.transformer.qk_layernorm=true"])
    assert job.megatron.transformer == {"moe_router_dtype": "fp32", "qk_layernorm": True}
    assert job.sources[f"{key}.transformer.moe_router_dtype"].kind == "override"
    error = refused(BASE, [f"{key}.qk_layernorm=true", f"{key}.transformer.qk_layernorm=true"])
    assert error.kind == "set_twice"


def test_a_dataset_overrides_the_defaults_and_a_list_can_hold_several(tmp_path):
    text = (
        "data:\n  default: {semantics: strict, megatron_sft_pad_token: a}\n  train:\n"
        "  - {dataset_name: openai_format, data_path: [x, {path: y, weight: 2}], megatron_sft_pad_token: b}\n"
        "  - {dataset_name: openai_format, data_path: z, semantics: nemo-rl-direct}\n"
    )
    path = written(tmp_path, text)
    first, second = (job := load([BASE, path])).data.train
    assert (first.semantics, first.megatron_sft_pad_token) == ("strict", "b")
    assert (second.semantics, second.megatron_sft_pad_token) == ("nemo-rl-direct", "a")
    assert [(file.path, file.weight) for file in first.data_path] == [("x", None), ("y", 2.0)]
    assert job.where("data.train[1].megatron_sft_pad_token") == f"data.train[1].megatron_sft_pad_token ({path}:2)"


def test_files_of_nemo_rl_may_multiply_and_keep_sections_that_are_switched_off():
    job = load(BASE, ["policy.dtensor_cfg={enabled: false, _v2: true, tensor_parallel_size: 4}",
                      "policy.sequence_packing.train_mb_tokens=${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}",
                      "policy.megatron_cfg.peft={enabled: false, dim: 8}"])  # fmt: skip
    assert job.policy.sequence_packing.train_mb_tokens == 2048
    assert not job.policy.dtensor_cfg.enabled


def test_every_refusal_is_one_of_packproofs_and_its_message_has_all_three_parts():
    error = refused(BASE, ["sft.sed=1"])
    assert isinstance(error, PackproofError)
    assert re.fullmatch(
        r"sft\.sed \(override .*\): .* nearest is sft\.seed\. To fix it: write sft\.seed, or .*", str(error)
    )
