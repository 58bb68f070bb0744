"""A resumed job is the job that was never stopped, to the bit; what is not that job is refused with both values named."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import training_job_worlds as jobs
from transformers import AutoTokenizer

from equivalence.workers import CaseFailed
from production.files.source import open_source
from production.semantics import DEFAULT_PRESET, PRESETS
from production.training.data.fingerprint import tokenizer_identity

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

MEGATRON = "policy.megatron_cfg"
MTP = {f"{MEGATRON}.mtp_num_layers": 2, f"{MEGATRON}.mtp_use_repeated_layer": True}
DISTRIBUTED = {f"{MEGATRON}.optimizer.use_distributed_optimizer": True}
EXPERTS = {"model.num_moe_experts": 2, "model.moe_ffn_hidden_size": 16}
OVERLAP = {
    f"{MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce": True,
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": True,
}


def split(dimension):
    return {f"{MEGATRON}.{dimension}_parallel_size": 2}


CELLS = {
    "dp 2, distributed optimizer, depths": DISTRIBUTED | MTP,
    "dp 2, distributed optimizer, overlapped": DISTRIBUTED | OVERLAP,
    "tp 2, distributed optimizer, depths": split("tensor_model") | DISTRIBUTED | MTP,
    "cp 2, plain optimizer, depths, recomputed": split("context")
    | MTP
    | {f"{MEGATRON}.activation_checkpointing": True},
    "pp 2, plain optimizer, depths": split("pipeline_model") | MTP,
    "ep 2, distributed optimizer, experts": split("expert_model") | DISTRIBUTED | EXPERTS,
}


def resumed(folder, rows, changes, *, first=2, last=4, workers=(1, 2, 0)):
    """Payloads: never stopped, stopped after `first` steps, gone on; each with another number of workers."""
    whole, parts = jobs.write_job(folder / "whole", rows, **changes), jobs.write_job(folder / "parts", rows, **changes)
    length = [f"{MEGATRON}.scheduler.lr_decay_iters={last}"]
    return [
        {"config": str(path), "overrides": [*length, f"sft.max_num_steps={steps}", f"data.num_workers={count}"]}
        for path, steps, count in zip((whole, parts, parts), (last, first, last), workers, strict=True)
    ]


@pytest.mark.parametrize("cell", CELLS)
def test_a_resumed_job_gives_the_losses_of_one_that_was_never_stopped(world, rows, tmp_path, cell):
    payload = resumed(tmp_path, rows, CELLS[cell])
    for whole, first, rest in world(2, "train_in_turn", payload):
        assert list(first["losses"]) == [1, 2], first
        assert list(rest["losses"]) == [3, 4], rest
        assert whole["losses"] == first["losses"] | rest["losses"]


SCHEDULE = {
    f"{MEGATRON}.optimizer.min_lr": 1e-4,
    f"{MEGATRON}.scheduler.lr_decay_style": "cosine",
    f"{MEGATRON}.scheduler.lr_warmup_iters": 2,
    f"{MEGATRON}.scheduler.lr_decay_iters": 6,
    f"{MEGATRON}.scheduler.start_weight_decay": 0.01,
    f"{MEGATRON}.scheduler.end_weight_decay": 0.4,
    f"{MEGATRON}.scheduler.weight_decay_incr_style": "linear",
}


def test_a_resumed_job_goes_on_with_its_learning_rate_and_its_growing_weight_decay(world, rows, tmp_path):
    """Stopped by a signal, since another number of steps would be another course of the weight decay."""
    whole, stopped, gone_on = resumed(tmp_path, rows, SCHEDULE, first=6, last=6)
    stopped |= {"step": 2, "happens": "asks_to_end"}
    ((never, first, rest),) = world(1, "weight_decays_in_turn", [whole, stopped, gone_on])
    assert (first[0]["reason"], [*first[0]["losses"]]) == ("signal", [1, 2])
    assert [*rest[0]["losses"]] == [3, 4, 5, 6]
    assert never[0]["losses"] == first[0]["losses"] | rest[0]["losses"]
    # R-TRAIN-1 to 3 by hand: a warm-up of two steps, a quarter of a cosine a step, a sixth of the way a step.
    falls = [1e-4 + (2e-3 - 1e-4) * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    rates = [each[3] for part in (first, rest) for each in part[0]["losses"].values()]
    assert rates == pytest.approx([0.0, 1e-3, *falls], rel=1e-12)
    assert first[1] + rest[1] == pytest.approx([0.01 + 0.39 * step / 6 for step in range(6)], rel=1e-12)
    assert never[1] == first[1] + rest[1]


def test_a_job_can_be_resumed_after_any_step(world, rows, tmp_path):
    changes = MTP | EXPERTS | {"checkpointing.save_period": 1, "checkpointing.keep_top_k": None}
    whole = resumed(tmp_path / "any", rows, changes)[0]
    (before,) = world(1, "train", whole)
    kept = sorted((tmp_path / "any" / "whole" / "checkpoints").iterdir())
    assert [path.name for path in kept] == [f"step_0000000{step}" for step in (1, 2, 3, 4)]
    for step in (3, 2, 1):
        kept.pop().rename(tmp_path / f"away_{step}")
        (again,) = world(1, "train", whole)
        assert again["losses"] == {each: before["losses"][each] for each in range(step + 1, 5)}
        for path in (tmp_path / "any" / "whole" / "checkpoints").iterdir():
            if path not in kept:
                path.rename(tmp_path / f"again_{step}_{path.name}")


REDUCE, GATHER = (
    f"{MEGATRON}.distributed_data_parallel_config.overlap_{name}" for name in ("grad_reduce", "param_gather")
)
FREE = {
    "loader, places, length, reports, validations, saving": (
        "shared",
        [
            "data.num_workers=2", "data.prefetch=32", "data.train.data_path={moved}", "sft.max_num_steps=4",
            "data.validation={{dataset_name: megatron_sft_packed, data_path: {moved}}}",
            "sft.val_period=1", "checkpointing.save_period=1", "checkpointing.keep_top_k=1", "cluster.timeout_seconds=100",
        ],
    ),
    "recomputation": ("shared", [f"{MEGATRON}.activation_checkpointing=true"]),
    "overlapped gather, distributed optimizer": ("shared", [f"{GATHER}=true"]),
    "overlap, plain optimizer": ("plain", [f"{REDUCE}=true"]),
}  # fmt: skip
"""The table of docs/checkpoints.md: what may change at a resume."""


def test_options_that_may_change_at_a_resume_change_no_number_and_the_optimizers_buckets_may_not_change(
    world, rows, tmp_path
):
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(rows.read_bytes())
    length = [f"{MEGATRON}.scheduler.lr_decay_iters=4"]
    # Buckets of 2,000 parameters: the small model has several, as a large one has.
    buckets = {f"{MEGATRON}.distributed_data_parallel_config.bucket_size": 2000}
    bases = {"shared": DISTRIBUTED | MTP | buckets | {REDUCE: True}, "plain": MTP | buckets}
    payload = []
    for name, changes in bases.items():
        for folder, steps in (("whole", 3), ("first", 2)):
            config = jobs.write_job(tmp_path / name / folder, rows, **changes)
            payload.append({"config": str(config), "overrides": [*length, f"sft.max_num_steps={steps}"]})
    cases = FREE | {"other buckets": ("shared", [f"{REDUCE}=false"])}
    for number, (base, overrides) in enumerate(cases.values()):
        first, copy = tmp_path / base / "first", tmp_path / f"copy_{number}"
        more = [each.format(moved=moved) for each in overrides]
        places = [f"checkpointing.checkpoint_dir={copy}", f"logger.log_dir={tmp_path / f'logs_{number}'}"]
        resumed = {"config": str(first / "job.yaml"), "overrides": [*length, "sft.max_num_steps=3", *places, *more]}
        payload.append(resumed | {"copy": (str(first / "checkpoints"), str(copy))})
    for found in world(2, "train_from_copies", payload):
        whole = {"shared": found[0]["losses"], "plain": found[2]["losses"]}
        *resumed, refused = found[4:]
        for (case, (base, _)), each in zip(FREE.items(), resumed, strict=True):
            assert each["losses"][3] == whole[base][3], case
            assert list(each["losses"]) == ([3, 4] if "length" in case else [3])
        assert refused["kind"] == "ResumeRefused"
        assert "overlap_grad_reduce: saved true, now (not there)" in refused["refused"]
        assert "the distributed optimizer's state is saved by the buckets" in refused["refused"]


@pytest.fixture(scope="module")
def stopped(world, rows, tmp_path_factory):
    """A job of dp 2 with a checkpoint after its first step."""
    folder = tmp_path_factory.mktemp("stopped")
    config = jobs.write_job(folder, rows, **DISTRIBUTED)
    world(2, "train", {"config": str(config), "overrides": ["sft.max_num_steps=1"]})
    return config


def semantics(name, other):
    """Of a preset, as JSON, the fields in which it differs from another."""
    one, two = (dataclasses.asdict(PRESETS[each]) for each in (name, other))
    return json.dumps({field: one[field] for field in one if one[field] != two[field]}, sort_keys=True)


STRICT = f"semantics: saved {semantics(DEFAULT_PRESET, 'strict')}, now {semantics('strict', DEFAULT_PRESET)}"
REFUSED = {
    "another dp size and layout": ([f"{MEGATRON}.tensor_model_parallel_size=2"], "data_parallel_size: saved 2, now 1"),
    "another pack length": (["policy.max_total_sequence_length=128"], "pack_length: saved 64, now 128"),
    "another preset": (["data.default.semantics=strict"], STRICT),
    "another global batch size": (["policy.train_global_batch_size=2"], "global_batch_size: saved 4, now 2"),
    "another learning rate": ([f"{MEGATRON}.optimizer.lr=0.5"], "optimizer.lr: saved 0.002, now 0.5"),
    "another shape": (["model.hidden_size=32"], "model.hidden_size: saved 16, now 32"),
    "another order": (["data.shuffle=true"], 'order: saved "sequential", now "shuffle"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_resume_of_something_else_is_refused_with_both_values(world, stopped, case):
    overrides, named = REFUSED[case]
    for found in world(2, "train", {"config": str(stopped), "overrides": overrides}):
        assert found["kind"] == "ResumeRefused", found
        assert named in found["refused"]


def test_another_number_of_ranks_is_refused_with_both_values(world, stopped):
    (found,) = world(1, "train", {"config": str(stopped)})
    assert found["kind"] == "ResumeRefused", found
    assert "data_parallel_size: saved 2, now 1" in found["refused"]
    assert "world_size: saved 2, now 1" in found["refused"]
    assert "start as many ranks as before" in found["refused"]


def test_another_file_or_tokenizer_is_refused_at_a_resume_with_both_values(world, rows, stopped, tmp_path):
    other = jobs.write_rows(tmp_path / "other.jsonl", rows=jobs.ROWS - 2, first=5)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for path in Path(jobs.TOKENIZER).iterdir():
        (tokenizer / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<SPECIAL_10>"}))
    files = [f"{count} rows (fingerprint {open_source(path).fingerprint[:8]})" for path, count in ((rows, jobs.ROWS), (other, jobs.ROWS - 2))]  # fmt: skip
    identities = [tokenizer_identity(AutoTokenizer.from_pretrained(path)) for path in (jobs.TOKENIZER, tokenizer)]
    assert len(set(files)) == len(set(identities)) == 2
    for override, named in (
        (f"data.train.data_path={other}", "files: saved {}, now {}".format(*files)),
        (f"policy.tokenizer.name={tokenizer}", 'tokenizer: saved "{}", now "{}"'.format(*identities)),
    ):
        payload = {"config": str(stopped), "overrides": [override]}
        for found in world(2, "train", payload):
            assert found["kind"] == "ResumeRefused", found
            assert named in found["refused"], found["refused"]
            told = "Its eos_token was" in found["refused"]
            assert told == override.startswith("policy.tokenizer"), found["refused"]


def test_ranks_that_read_different_files_do_not_begin(world, rows, tmp_path):
    other = jobs.write_rows(tmp_path / "other.jsonl", first=5)
    configs = [str(jobs.write_job(tmp_path / path.stem, path)) for path in (rows, other)]
    for found in world(2, "unlike", {"configs": configs}):
        assert "files differ" in found["refused"]
        assert "rank 0 and rank 1" in found["refused"]


def test_a_new_run_does_not_write_into_another_runs_checkpoints(world, stopped):
    payload = {"config": str(stopped), "overrides": ["checkpointing.resume=false"]}
    for found in world(2, "train", payload):
        assert "the folder must hold no checkpoint" in found["refused"]


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(world, rows, tmp_path):
    changes = DISTRIBUTED | {"checkpointing.save_period": 1}
    whole, _, rest = resumed(tmp_path, rows, changes)
    with pytest.raises(CaseFailed, match="rank 0"):
        world(2, "train_killed_in_save", rest | {"killed_at": 2})
    checkpoints = tmp_path / "parts" / "checkpoints"
    left = [".packproof.lock", ".step_00000002.writing", "step_00000001"]
    assert sorted(path.name for path in checkpoints.iterdir()) == left
    both = world(2, "train_in_turn", [whole, rest])
    for never_stopped, gone_on in both:
        assert gone_on["losses"] == {step: never_stopped["losses"][step] for step in (2, 3, 4)}
    assert not list(checkpoints.glob(".*"))


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        ("pipeline_model", None, {}),
        ("tensor_model", None, {}),
        (None, "tensor_model", {}),
        ("expert_model", None, EXPERTS | DISTRIBUTED),
        (None, "expert_model", EXPERTS),
        ("tensor_model", "expert_model", EXPERTS | DISTRIBUTED),
    ],
)
def test_weights_of_a_checkpoint_start_a_run_in_another_layout(world, rows, tmp_path, before, after, more):
    changes = MTP | {"sft.max_num_steps": 1} | more
    saved = jobs.write_job(tmp_path / "saved", rows, **changes | (split(before) if before else {}))
    started = jobs.write_job(tmp_path / "started", rows, **changes | (split(after) if after else {}))
    size = 2 if before else 1
    ended = world(size, "weights", {"config": str(saved), "after": True})
    start = [
        "model.initial=megatron",
        f"model.initial_path={tmp_path / 'saved' / 'checkpoints' / 'step_00000001'}",
    ]
    begun = world(2 if after else 1, "weights", {"config": str(started), "overrides": start})
    assert begun[0][0]["step"] == 1
    assert jobs.together(ended) == jobs.together(begun)


FULLY = DISTRIBUTED | {"checkpointing.optimizer_format": "fully_reshardable"}
ONLINE = {
    "data.train.dataset_name": "openai_format",
    "policy.sequence_packing.enabled": True,
    "policy.make_sequence_length_divisible_by": 4,
    "loss.normalization": "global_valid_tokens",
}
TENSOR, CONTEXT, STAGES, SHARED = map(split, ("tensor_model", "context", "pipeline_model", "expert_model"))
BY_ROWS = {"loss.mtp_weights": "rows"}
RESHARDED = {
    "dp 1 to 2, dp_reshardable": (1, {}, 2, {}, DISTRIBUTED | MTP),
    "dp 2 to 1, dp_reshardable": (2, {}, 1, {}, DISTRIBUTED | MTP),
    "cp 1 to 2, dp_reshardable": (1, {}, 2, CONTEXT, DISTRIBUTED | MTP | BY_ROWS),
    "cp 2 to 1, plain": (2, CONTEXT, 1, {}, MTP | BY_ROWS),
    "1 to tp 2, experts, plain": (1, {}, 2, TENSOR, MTP | EXPERTS),
    "pp 2 to 1, plain": (2, STAGES, 1, {}, MTP),
    "1 to pp 2, experts, plain": (1, {}, 2, STAGES, MTP | EXPERTS),
    "ep 2 to 1, plain": (2, SHARED, 1, {}, MTP | EXPERTS),
    "dp 2 to ep 2, plain": (2, {}, 2, SHARED, MTP | EXPERTS),
    "1 to ep 2, fully_reshardable": (1, {}, 2, SHARED, FULLY | MTP | EXPERTS),
    "tp 2 to pp 2, fully_reshardable": (2, TENSOR, 2, STAGES, FULLY | MTP),
    "pp 2 to 1, experts, fully_reshardable": (2, STAGES, 1, {}, FULLY | MTP | EXPERTS),
    "online, 1 to dp 2, plain": (1, {}, 2, {}, ONLINE),
    "online, 1 to tp 2, fully_reshardable": (1, {}, 2, TENSOR, ONLINE | FULLY | MTP),
    "online, cp 2 to pp 2, plain": (2, CONTEXT, 2, STAGES, ONLINE),
    "online, dp 2 to ep 1, experts, plain": (2, SHARED, 2, {}, ONLINE | EXPERTS),
}
"""Name to ranks and layout before, ranks and layout after, and what both have."""
UNCHANGED = {"model.hidden_dropout": 0.0, "checkpointing.save_period": 2, "checkpointing.keep_top_k": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of the small job, by path: rows that were packed with room for cp 2, and conversations."""
    folder = tmp_path_factory.mktemp("data")
    direct = jobs.write_rows(folder / "rows.jsonl")
    said = {"settings": {"context_parallel_size": 2, "pack_length": jobs.PACK_LENGTH}}
    (folder / "rows.jsonl.manifest.json").write_text(json.dumps(said))
    return {"direct": direct, "online": jobs.write_chat(folder / "chat.jsonl")}


def gone_on(folder, name, layout, *more):
    """The job of a finished run in another layout, from a copy of the run's checkpoint after two steps."""
    copy = folder / f"{name} copied {len(more)}"
    shutil.copytree(folder / name / "checkpoints" / "step_00000002", copy / "step_00000002")
    unset = {
        f"{MEGATRON}.{each}_parallel_size": 1 for each in ("tensor_model", "context", "pipeline_model", "expert_model")
    }
    places = [f"checkpointing.checkpoint_dir={copy}", f"logger.log_dir={copy}_logs"]
    changes = [f"{key}={value}" for key, value in (unset | layout).items()]
    return {"config": str(folder / name / "job.yaml"), "overrides": [*places, *changes, *more]}


def test_a_resume_in_another_layout_goes_on_with_the_numbers_of_the_layout_that_it_had(world, data, tmp_path):
    """Sums over ranks add up in another order, and nothing else differs: bounds are those of float32 over 64 positions.

    The norm is one over all weights, of which tensor parallel ranks add up parts.
    """
    before = {1: [], 2: []}
    for name, (size, layout, _, _, changes) in RESHARDED.items():
        file = data["online" if "online" in name else "direct"]
        config = jobs.write_job(tmp_path / name, file, **UNCHANGED | changes | layout)
        before[size].append((name, {"config": str(config)}))
    whole = {}
    for size, payload in before.items():
        whole |= zip(
            (name for name, _ in payload), world(size, "train_in_turn", [each for _, each in payload])[0], strict=True
        )
    for size in (2, 1):
        cases = {name: case for name, case in RESHARDED.items() if case[2] == size}
        payload = []
        for name, (_, _, _, layout, _) in cases.items():
            payload += [gone_on(tmp_path, name, layout), gone_on(tmp_path, name, layout, "checkpointing.reshard=true")]
        found = world(size, "train_in_turn", payload)[0]
        for name, refused, rest in zip(cases, found[::2], found[1::2], strict=True):
            assert list(whole[name]["losses"]) == [1, 2, 3, 4], (name, whole[name])
            assert refused["kind"] == "ResumeRefused", name
            assert list(rest.get("losses", ())) == [3, 4], (name, rest)
            for step in (3, 4):
                (loss, depths, norm, rate), before = rest["losses"][step], whole[name]["losses"][step]
                assert loss == pytest.approx(before[0], rel=2e-6), (name, step)
                assert depths == pytest.approx(before[1], rel=2e-6), (name, step)
                assert norm == pytest.approx(before[2], rel=2e-5), (name, step)
                assert rate == before[3]


def test_a_resume_in_another_layout_is_refused_where_each_rank_draws(world, stopped):
    payload = {"config": str(stopped), "overrides": ["checkpointing.reshard=true"]}
    (found,) = world(1, "train", payload)
    assert found["kind"] == "CheckpointRefused"
    assert "hidden_dropout draws on each rank for itself" in found["refused"]
