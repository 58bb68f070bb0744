"""Where a resume in another layout is refused, and what a dry run says of a resume: without a model and without ranks."""

import json

import pytest
import training_job_worlds as jobs

from production.training.__main__ import main
from production.training.checkpoint.manifest import CheckpointRefused, Manifest, sealed
from production.training.config import load
from production.training.data.fingerprint import ResumeRefused, fed_identity
from production.training.data.tokenizer import load_tokenizer
from production.training.layout_change import check_going_on
from production.training.run_identity import identity

MEGATRON = "policy.megatron_cfg"
TENSOR, CONTEXT, STAGES, SHARED = (
    {f"{MEGATRON}.{name}_parallel_size": 2} for name in ("tensor_model", "context", "pipeline_model", "expert_model")
)
DISTRIBUTED = {f"{MEGATRON}.optimizer.use_distributed_optimizer": True}
DEPTHS = {f"{MEGATRON}.mtp_num_layers": 1}
EXPERTS = {"model.num_moe_experts": 2, "model.moe_ffn_hidden_size": 16}
ONLINE = {
    "data.train.dataset_name": "openai_format",
    "policy.sequence_packing.enabled": True,
    "policy.make_sequence_length_divisible_by": 4,
    "loss.normalization": "global_valid_tokens",
}
BASE = {"model.hidden_dropout": 0.0, "checkpointing.reshard": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    direct, plain = jobs.write_rows(folder / "rows.jsonl"), jobs.write_rows(folder / "plain.jsonl")
    said = {"settings": {"context_parallel_size": 2, "pack_length": jobs.PACK_LENGTH}}
    (folder / "rows.jsonl.manifest.json").write_text(json.dumps(said))
    return {"direct": direct, "plain": plain, "online": jobs.write_chat(folder / "chat.jsonl")}


@pytest.fixture(scope="module")
def tokenizer(files, tmp_path_factory):
    return load_tokenizer(load(jobs.write_job(tmp_path_factory.mktemp("job"), files["direct"])))


def job_of(folder, file, changes):
    return load(jobs.write_job(folder, file, **changes))


def described(job, tokenizer, ranks, *, sharding="dp_reshardable"):
    """A manifest of the job on so many ranks."""
    model = job.megatron
    replica = model.tensor_model_parallel_size * model.context_parallel_size * model.pipeline_model_parallel_size
    files = [{"fingerprint": "0" * 32, "rows": jobs.ROWS}]
    fed = fed_identity(job, files, tokenizer=tokenizer, data_parallel_size=ranks // replica)
    return Manifest(
        step=2, consumed_samples=8, config={}, metrics={}, has_optimizer=True, sharding_type=sharding, files={}, run="one",
        fingerprint=identity(job, fed, world_size=ranks, vocab_size=4096, run_steps=4),
    )  # fmt: skip


REFUSED = {
    "dropout": ({"model.hidden_dropout": 0.1}, {}, "direct", "hidden_dropout draws on each rank for itself"),
    "sharded order": (
        {"data.order": "megatron-cyclic-sharded", "data.last_batch": "wrap"}, {}, "direct",
        "the order megatron-cyclic-sharded shares rows out",
    ),
    "rows without a manifest": ({}, CONTEXT, "plain", "only a manifest that says that"),
    "a mean of means": ({"loss.normalization": "mean_of_means"}, CONTEXT, "direct", "averages over each rank's share of a row"),
    "depths weighed by rank": (DEPTHS, CONTEXT, "direct", "loss.mtp_weights rank weighs depths"),
    "depths of bins": (ONLINE | DEPTHS, {}, "online", "losses of depths are averaged by bin"),
    "padding of experts": (EXPERTS, CONTEXT, "direct", "padding rows have, which is dealt to experts"),
    "bins of experts": (ONLINE | EXPERTS, TENSOR, "online", "padding rows have, which is dealt to experts"),
    "capacity": (
        EXPERTS | {f"{MEGATRON}.transformer.moe_expert_capacity_factor": 1.0}, SHARED, "direct",
        "moe_expert_capacity_factor drops tokens",
    ),
    "global balancing": (
        EXPERTS | {f"{MEGATRON}.transformer.moe_router_load_balancing_type": "global_aux_loss"}, {}, "direct",
        "global_aux_loss balances over",
    ),
    "tp of dp_reshardable": (DISTRIBUTED, TENSOR, "direct", "only other data and context sizes can read"),
    "pp of dp_reshardable": (DISTRIBUTED, STAGES, "direct", "only other data and context sizes can read"),
}  # fmt: skip
"""Name to what both have, the new layout, the file, and the reason. From one rank to two."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_on_which_a_number_or_the_checkpoint_depends_is_refused_with_both_sizes(
    tmp_path, files, tokenizer, name
):
    changes, layout, file, reason = REFUSED[name]
    saved = described(job_of(tmp_path / "saved", files[file], BASE | changes), tokenizer, 1)
    job = job_of(tmp_path / "now", files[file], BASE | changes | layout)
    now = described(job, tokenizer, 2).fingerprint
    with pytest.raises(CheckpointRefused) as caught:
        check_going_on(job, saved, now)
    assert reason in caught.value.what
    assert "world_size (saved 1, now 2)" in caught.value.what
    assert "start" in caught.value.fix
    unasked = job_of(tmp_path / "unasked", files[file], BASE | changes | layout | {"checkpointing.reshard": False})
    with pytest.raises(ResumeRefused, match="world_size: saved 1, now 2"):
        check_going_on(unasked, saved, now)
    assert check_going_on(job, saved, saved.fingerprint) is False


def test_buckets_that_grow_with_the_ranks_bind_a_checkpoint_to_their_number(tmp_path, files, tokenizer):
    config = f"{MEGATRON}.distributed_data_parallel_config"
    changes = BASE | DISTRIBUTED | {f"{config}.overlap_grad_reduce": True, "policy.train_global_batch_size": 256}
    job = job_of(tmp_path / "job", files["direct"], changes | {"data.last_batch": "wrap"})
    few, more, many = (described(job, tokenizer, ranks) for ranks in (2, 32, 64))
    assert check_going_on(job, few, more.fingerprint) is True
    with pytest.raises(CheckpointRefused, match="sizes the buckets"):
        check_going_on(job, few, many.fingerprint)
    fully = described(job, tokenizer, 2, sharding="fully_reshardable")
    assert check_going_on(job, fully, many.fingerprint) is True


def test_options_that_share_the_same_work_out_may_change_with_the_layout(tmp_path, files, tokenizer):
    saved = described(job_of(tmp_path / "saved", files["direct"], BASE), tokenizer, 1)
    uneven = {f"{MEGATRON}.transformer.num_layers_in_first_pipeline_stage": 1}
    job = job_of(tmp_path / "now", files["direct"], BASE | STAGES | uneven)
    assert check_going_on(job, saved, described(job, tokenizer, 2).fingerprint) is True


@pytest.fixture
def dry_run(tmp_path, files, tokenizer, capsys):
    """What a dry run says beside a checkpoint of the same job on two ranks: status and both streams."""
    config = jobs.write_job(tmp_path, files["direct"], **BASE | {"checkpointing.reshard": False})
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"12345")

    def run(*overrides, **manifest):
        saved = described(load(config), tokenizer, 2)
        fields = (
            {name: getattr(saved, name) for name in saved.__struct_fields__} | {"files": {"weights": [5, 0]}} | manifest
        )
        (checkpoint / "packproof.json").write_bytes(sealed(Manifest(**fields)))
        status = main(["--config", str(config), "--dry-run", "--world-size", "2", *overrides])
        return status, *capsys.readouterr()

    return run


def test_a_dry_run_names_the_checkpoint_from_which_the_run_would_resume(dry_run, tmp_path):
    status, out, _ = dry_run()
    assert status == 0
    assert f"the run goes on from {tmp_path / 'checkpoints' / 'step_00000002'} (step 2, run one)" in out
    assert not list(tmp_path.rglob("*.index*"))


@pytest.mark.parametrize(
    ("overrides", "manifest", "said"),
    [
        ([f"{MEGATRON}.optimizer.lr=0.5"], {}, "optimizer.lr: saved 0.002, now 0.5"),
        ([f"{MEGATRON}.tensor_model_parallel_size=2"], {}, "data_parallel_size: saved 2, now 1"),
        ([], {"fingerprint": {}}, "does not say which files its run read"),
        ([], {"has_optimizer": False}, "written without the optimizer's state"),
        ([], {"files": {"weights": [5, 0], "gone": [1, 0]}}, "gone is missing"),
        ([], {"files": {"weights": [6, 0]}}, "weights was changed after it was written"),
    ],
)
def test_a_dry_run_refuses_a_resume_that_the_run_would_refuse(dry_run, overrides, manifest, said):
    status, _, err = dry_run(*overrides, **manifest)
    assert (status, said in err) == (2, True), err
    assert "To fix it" in err
    assert "1 reason against this job on 2 ranks" in err


def test_a_dry_run_notes_that_this_machine_has_too_little_memory(dry_run):
    status, out, _ = dry_run("model.hidden_size=16384", "model.num_layers=400", "checkpointing.enabled=false")
    assert status == 0
    assert "a run on this machine would be refused: one rank's weights, gradients and optimizer must fit into" in out
