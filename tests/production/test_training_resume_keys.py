"""Each key of what a run is: another configuration or other files change it, and a resume with these is refused by its name (R-ORDER-8)."""

import json
from pathlib import Path

import pytest
import training_job_worlds as jobs

from equivalence.generators import tokenizers
from production.parallel.sizes import RankCoordinates
from production.tokens.fingerprint import TokenizerFingerprint
from production.training.checkpoint.manifest import Manifest
from production.training.config import load
from production.training.data.batch_stream import BatchStream
from production.training.data.fingerprint import ResumeRefused, check_resume
from production.training.layout_change import check_going_on
from production.training.run_identity import identity

MEGATRON = "policy.megatron_cfg"
SCHEDULER = f"{MEGATRON}.scheduler"
TRAINED = "data.train[0].data_path"
PLACE = {
    "rank": 0, "world_size": 2, "tensor_rank": 0, "context_rank": 0, "context_size": 1, "data_rank": 0, "data_size": 2,
    "pipeline_rank": 0, "pipeline_size": 1,
}  # fmt: skip
COMMON = {
    "policy.tokenizer.name": str(tokenizers.folder("word")),
    "data.num_workers": 0,
    "model.num_query_groups": 2,
    "model.kv_channels": 8,
    "model.num_moe_experts": 2,
    "model.moe_ffn_hidden_size": 16,
    f"{MEGATRON}.mtp_num_layers": 1,
    f"{MEGATRON}.transformer.moe_aux_loss_coeff": 0.01,
    f"{MEGATRON}.optimizer.min_lr": 1e-4,
    f"{MEGATRON}.optimizer.weight_decay": 0.1,
    f"{MEGATRON}.distributed_data_parallel_config.bucket_size": 100,
    f"{SCHEDULER}.lr_decay_style": "WSD",
    f"{SCHEDULER}.lr_decay_iters": 8,
    f"{SCHEDULER}.lr_wsd_decay_style": "linear",
    f"{SCHEDULER}.lr_wsd_decay_iters": 2,
    f"{SCHEDULER}.end_weight_decay": 0.2,
    f"{SCHEDULER}.weight_decay_incr_style": "linear",
}
ONLINE = {
    "data.train.dataset_name": "openai_format",
    "policy.sequence_packing.enabled": True,
    "loss.normalization": "global_valid_tokens",
}


def files(*names, weights=(None, None)):
    """Paths in this order, each with its weight."""
    return {TRAINED: [{"path": name, "weight": weight} for name, weight in zip(names, weights, strict=True)]}


BLEND = {"data.shuffle": True, "data.seed": 5, "data.last_batch": "wrap", "sft.max_num_epochs": None}
CYCLIC = {"data.order": "megatron-cyclic", "data.last_batch": "wrap", "sft.max_num_epochs": None}
OF_ROWS = {
    "files": {
        "files end to end in another order": files("b", "a"),
        "the same rows, one of them changed": files("a", "changed"),
        "one file twice": files("a", "a"),
        "lines that are skipped where they are bad": {"data.train[0].on_bad_row": "skip"},
        "a blend's files in another order": BLEND | files("b", "a", weights=(0.7, 0.3)),
    },
    "tokenizer": {"another folder": {"policy.tokenizer.name": str(tokenizers.folder("huge-words"))}},
    "semantics": {"another preset": {"data.train[0].semantics": "strict"}},
    "prompt_format": {"another": {"data.train[0].megatron_sft_prompt_format": "identity"}},
    "pad_token": {"one of its own": {"data.train[0].megatron_sft_pad_token": "<pad>"}},
    "assistant_prefix_len": {"one of its own": {"data.train[0].megatron_sft_assistant_prefix_len": 1, "data.train[0].allow_format_misfit": True}},
    "pack_length": {"longer": {"policy.max_total_sequence_length": 128}},
    "context_parallel_size": {"2": {f"{MEGATRON}.context_parallel_size": 2, "data.train[0].megatron_sft_context_parallel_size": 2}},
    "data_parallel_size": {"1": {"place": {"data_size": 1}}},
    "global_batch_size": {"2": {"policy.train_global_batch_size": 2}},
    "order": {"shuffled": {"data.shuffle": True, "data.seed": 5}, "as Megatron-LM's": CYCLIC},
    "last_batch": {"wrap": {"data.last_batch": "wrap"}, "stop": {"data.last_batch": "stop"}},
    "seed": {"another": {"data.shuffle": True, "data.seed": 6}},
    "weights": {
        "a blend": BLEND | files("a", "b", weights=(0.7, 0.3)),
        "weights the other way round": BLEND | files("a", "b", weights=(0.3, 0.7)),
        "weights in the last place": BLEND | files("a", "b", weights=(0.7, 0.30000000000000004)),
    },
    "run_steps": {"a longer run, which is permuted as one": CYCLIC | {"sft.max_num_steps": 9}},
    "tensor_parallel_size": {"2": {f"{MEGATRON}.tensor_model_parallel_size": 2}},
    "pipeline_parallel_size": {"2": {f"{MEGATRON}.pipeline_model_parallel_size": 2}},
    "expert_parallel_size": {"2": {f"{MEGATRON}.expert_model_parallel_size": 2}},
    "expert_tensor_parallel_size": {"2": {f"{MEGATRON}.expert_tensor_parallel_size": 2}},
    "path": {"online": {**{key.replace("train.", "train[0]."): value for key, value in ONLINE.items()}}},
}  # fmt: skip
"""What decides the rows: changes of the configuration by key."""
BEFORE = {
    "run_steps": CYCLIC,
    "seed": {"data.shuffle": True, "data.seed": 5},
    **dict.fromkeys(
        ("weights the other way round", "weights in the last place", "a blend's files in another order"),
        BLEND | files("a", "b", weights=(0.7, 0.3)),
    ),
}
"""What the run began with where that is not the plain job: by key, or by the name of the change."""
OF_THE_REST = {
    "world_size": {"place": {"world_size": 4}},
    "precision": {"policy.precision": "float64"},
    "model.architecture": {"model.architecture": "hybrid"},
    "model.vocab_size": {"vocab_size": 64},
    "model.tie_embeddings": {"model.tie_embeddings": True},
    "model.rotary_base": {"model.rotary_base": 500},
    "model.rotary_percent": {"model.rotary_percent": 0.5},
    "model.num_layers": {"model.num_layers": 4},
    "model.hidden_size": {"model.hidden_size": 32},
    "model.num_attention_heads": {"model.num_attention_heads": 4},
    "model.num_query_groups": {"model.num_query_groups": 1},
    "model.ffn_hidden_size": {"model.ffn_hidden_size": 64},
    "model.kv_channels": {"model.kv_channels": 4},
    "model.normalization": {"model.normalization": "LayerNorm"},
    "model.activation": {"model.activation": "silu"},
    "model.gated_linear_unit": {"model.gated_linear_unit": True},
    "model.add_bias_linear": {"model.add_bias_linear": True},
    "model.hidden_dropout": {"model.hidden_dropout": 0.0},
    "model.attention_dropout": {"model.attention_dropout": 0.1},
    "model.num_moe_experts": {"model.num_moe_experts": 4},
    "model.moe_ffn_hidden_size": {"model.moe_ffn_hidden_size": 32},
    "model.moe_router_topk": {"model.moe_router_topk": 1},
    "multi_token.mtp_num_layers": {f"{MEGATRON}.mtp_num_layers": 2},
    "multi_token.mtp_loss_scaling_factor": {f"{MEGATRON}.mtp_loss_scaling_factor": 0.3},
    "multi_token.mtp_use_repeated_layer": {f"{MEGATRON}.mtp_use_repeated_layer": True},
    "transformer.moe_aux_loss_coeff": {f"{MEGATRON}.transformer.moe_aux_loss_coeff": 0.02},
    "optimizer.optimizer": {f"{MEGATRON}.optimizer.optimizer": "sgd"},
    "optimizer.lr": {f"{MEGATRON}.optimizer.lr": 1e-2},
    "optimizer.min_lr": {f"{MEGATRON}.optimizer.min_lr": 1e-5},
    "optimizer.clip_grad": {f"{MEGATRON}.optimizer.clip_grad": 0.5},
    "optimizer.weight_decay": {f"{MEGATRON}.optimizer.weight_decay": 0.05},
    "scheduler.lr_decay_style": {f"{SCHEDULER}.lr_decay_style": "cosine"},
    "scheduler.lr_decay_iters": {f"{SCHEDULER}.lr_decay_iters": 9},
    "scheduler.lr_warmup_iters": {f"{SCHEDULER}.lr_warmup_iters": 1},
    "scheduler.lr_warmup_init": {f"{SCHEDULER}.lr_warmup_init": 1e-4},
    "scheduler.lr_wsd_decay_style": {f"{SCHEDULER}.lr_wsd_decay_style": "cosine"},
    "scheduler.lr_wsd_decay_iters": {f"{SCHEDULER}.lr_wsd_decay_iters": 3},
    "scheduler.start_weight_decay": {f"{SCHEDULER}.start_weight_decay": 0.05},
    "scheduler.end_weight_decay": {f"{SCHEDULER}.end_weight_decay": 0.3},
    "scheduler.weight_decay_incr_style": {f"{SCHEDULER}.weight_decay_incr_style": "cosine"},
    "scheduler.weight_decay_steps": {"run_steps": 9},
    "distributed_data_parallel_config.bucket_size": {f"{MEGATRON}.distributed_data_parallel_config.bucket_size": 200},
    "sequence_packing.enabled": {"policy.sequence_packing.enabled": False},
    "sequence_packing.train_mb_tokens": {"policy.sequence_packing.train_mb_tokens": 128},
    "sequence_packing.algorithm": {"policy.sequence_packing.algorithm": "concatenative"},
    "sequence_packing.make_sequence_length_divisible_by": {"policy.make_sequence_length_divisible_by": 4},
    "sequence_packing.max_input_seq_length": {"data.max_input_seq_length": 32},
    "chat.add_bos": {"data.add_bos": False},
    "chat.add_eos": {"data.add_eos": False},
    "chat.tool_key": {"data.train[0].tool_key": "functions"},
    "loss.name": {"loss.name": None},
    "loss.normalization": {"loss.normalization": "mean_of_means"},
    "loss.mtp_weights": {"loss.mtp_weights": "rows"},
    "fp8.enabled": {f"{MEGATRON}.fp8_cfg.enabled": True},
    "fp8.fp8": {f"{MEGATRON}.fp8_cfg.fp8": "hybrid"},
    "fp8.fp8_recipe": {f"{MEGATRON}.fp8_cfg.fp8_recipe": "delayed"},
    "fp8.fp8_param": {f"{MEGATRON}.fp8_cfg.fp8_param": True},
}
"""One change for each key that decides no row."""
ONE_WORD = ("loss.name",)
"""Keys of which a configuration knows one value alone: another version's checkpoint may hold another."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("keys")
    for name, first in (("a", 0), ("b", 50)):
        jobs.write_rows(found / f"{name}.jsonl", first=first)
        jobs.write_chat(found / f"{name}.chat.jsonl")
    text = (found / "b.jsonl").read_text()
    (found / "changed.jsonl").write_text(text.replace(jobs.WORDS[0], jobs.WORDS[1], 1))
    return found


def now(feed, job, changes):
    place = RankCoordinates(**PLACE | changes.get("place", {}))
    vocabulary, steps = changes.get("vocab_size", 4096), changes.get("run_steps", 8)
    return identity(job, feed.identity(), world_size=place.world_size, vocab_size=vocabulary, run_steps=steps)


def job_of(folder, changes, *, online=False):
    given = {TRAINED: [{"path": "a"}, {"path": "b"}]} | changes
    given[TRAINED] = [
        {**each, "path": str(folder / f"{each['path']}{'.chat' if online else ''}.jsonl")} for each in given[TRAINED]
    ]
    base = jobs.write_job(
        folder / ("online" if online else "direct"), folder / "a.jsonl", **COMMON | (ONLINE if online else {})
    )
    overrides = {"data.train": [json.loads(base.read_text())["data"]["train"]]} | given
    return load(base, [f"{key}={json.dumps(value)}" for key, value in overrides.items() if key not in OTHERWISE])


OTHERWISE = ("place", "vocab_size", "run_steps")


def identity_of(folder, changes, *, online=False):
    job = job_of(folder, changes, online=online)
    with BatchStream(job, RankCoordinates(**PLACE | changes.get("place", {}))) as feed:
        return now(feed, job, changes)


def expect_refusal(saved, other, key):
    with pytest.raises(ResumeRefused) as caught:
        check_resume(json.loads(json.dumps(saved)), other)
    assert key in caught.value.differing, (key, caught.value.what)
    assert f"{key}: saved" in caught.value.what


@pytest.fixture(scope="module")
def begun(folder):
    """What runs of both paths are."""
    return {online: identity_of(folder, {}, online=online) for online in (False, True)}


def test_every_key_of_a_runs_identity_has_a_case(folder, begun):
    keys = {*begun[False], *begun[True], *identity_of(folder, CYCLIC)}
    assert keys == {*OF_ROWS, *OF_THE_REST}
    assert len(keys) > 70


@pytest.mark.parametrize("key", OF_ROWS)
def test_r_order_8_a_resume_with_other_rows_is_refused_by_the_name_of_the_key(folder, begun, key):
    for name, changes in OF_ROWS[key].items():
        before = BEFORE.get(name, BEFORE.get(key))
        saved = begun[False] if before is None else identity_of(folder, before)
        other = identity_of(folder, changes, online=key == "path")
        expect_refusal(saved, other, key)
        check_resume(saved, saved)


def test_a_resume_with_another_model_optimizer_schedule_or_loss_is_refused_by_its_name(folder, begun):
    jobs_of = {online: job_of(folder, {}, online=online) for online in (False, True)}
    feeds = {online: BatchStream(job, RankCoordinates(**PLACE)) for online, job in jobs_of.items()}
    try:
        for key, changes in OF_THE_REST.items():
            online = key.startswith(("sequence_packing.", "chat."))
            if key in ONE_WORD:
                other = begun[online] | {key: "another"}
            else:
                other = now(feeds[online], job_of(folder, changes, online=online), changes)
            expect_refusal(begun[online], other, key)
    finally:
        for feed in feeds.values():
            feed.close()


def test_a_constant_rate_has_a_warm_up_of_its_own_and_no_decay_that_could_differ(folder):
    """A rate that does not decay still rises: another warm-up is another run."""
    constant = {f"{SCHEDULER}.lr_decay_style": "constant", f"{SCHEDULER}.lr_warmup_iters": 2}
    saved = identity_of(folder, constant)
    expect_refusal(
        saved, identity_of(folder, constant | {f"{SCHEDULER}.lr_warmup_iters": 3}), "scheduler.lr_warmup_iters"
    )
    check_resume(saved, identity_of(folder, constant | {f"{SCHEDULER}.lr_decay_iters": 9}))


def test_a_file_under_another_name_is_the_same_file(folder, begun):
    (folder / "copy.jsonl").write_bytes((folder / "a.jsonl").read_bytes())
    check_resume(begun[False], identity_of(folder, files("copy", "b")))


def test_a_resume_with_another_tokenizer_names_the_text_whose_ids_shifted():
    """Where the fingerprints are equal, a definition that a library writes otherwise is no difference."""
    job = load(Path(__file__).resolve().parents[2] / "examples" / "jobs" / "small-cpu.yaml")
    parts = {"version": 1, "digest": "a" * 32, "definition": "b" * 32, "chat_template": None, "special_tokens": {}, "vocab_size": 9}  # fmt: skip
    saved = TokenizerFingerprint(**parts, probes={"digits": [1, 2]})
    other = TokenizerFingerprint(**parts | {"digest": "c" * 32}, probes={"digits": [1, 3]})

    def manifest(tokenizer):
        return Manifest(
            step=1, consumed_samples=1, fingerprint={"tokenizer": "old"}, config={}, metrics={}, has_optimizer=True,
            sharding_type="", files={}, tokenizer=tokenizer,
        )  # fmt: skip

    assert not check_going_on(job, manifest(saved.to_json()), {"tokenizer": "new"}, saved)
    with pytest.raises(ResumeRefused, match="The probe text 'digits'"):
        check_going_on(job, manifest(saved.to_json()), {"tokenizer": "new"}, other)
    with pytest.raises(ResumeRefused, match='tokenizer: saved "old", now "new"'):  # an older checkpoint
        check_going_on(job, manifest({}), {"tokenizer": "new"}, saved)
