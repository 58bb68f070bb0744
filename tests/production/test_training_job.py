"""The training job in forked worlds: what it reports, feeds, saves, and how it ends."""

import itertools
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
import training_job_worlds as jobs
from safetensors.torch import load_file

from equivalence.workers import CaseFailed

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

MEGATRON = "policy.megatron_cfg"
MTP = {f"{MEGATRON}.mtp_num_layers": 2, f"{MEGATRON}.mtp_use_repeated_layer": True}
DISTRIBUTED = {f"{MEGATRON}.optimizer.use_distributed_optimizer": True}
EXPERTS = {"model.num_moe_experts": 2, "model.moe_ffn_hidden_size": 16}
CONTEXT = {f"{MEGATRON}.context_parallel_size": 2}
PIPELINE = {f"{MEGATRON}.pipeline_model_parallel_size": 2}
UNSAVED = {"checkpointing.enabled": False}
DDP = f"{MEGATRON}.distributed_data_parallel_config"


@pytest.fixture
def train(world, rows, tmp_path):
    """Runs jobs that differ from the small one so; what came of each on rank 0."""

    def run(size, *several, data=rows, target="train_in_turn"):
        payload = [
            {"config": str(jobs.write_job(tmp_path / f"job_{number}", data, **changes))}
            for number, changes in enumerate(several)
        ]
        if target != "train_in_turn":
            return world(size, target, payload[0])
        return world(size, "train_in_turn", payload)[0]

    return run


RECOMPUTED = {
    "full, with depths": (MTP, {f"{MEGATRON}.activation_checkpointing": True}),
    "selective, with depths": (MTP, {f"{MEGATRON}.recompute_granularity": "selective"}),
    "selective experts, with depths": (
        MTP | EXPERTS,
        {f"{MEGATRON}.recompute_granularity": "selective", f"{MEGATRON}.recompute_modules": ["moe"]},
    ),
}


@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputed_activations_give_the_same_losses(train, case):
    """To the bit, but for experts after the first step: docs/checkpoints.md says so of a resume."""
    changes, recomputed = RECOMPUTED[case]
    without, with_it = train(1, UNSAVED | changes, UNSAVED | changes | recomputed)
    assert len(without["losses"]) == 4
    for step, (loss, depths, norm, rate) in with_it["losses"].items():
        other_loss, other_depths, other_norm, other_rate = without["losses"][step]
        # Around recomputed experts autograd adds the parts of a gradient in another order. That moves weights by far less than a
        # float32 loss can show, so a later loss may be rounded the other way: by one unit in its last place, and no more.
        has_experts = EXPERTS.items() <= changes.items()
        unit = 2.0**-23 if has_experts and step > 1 else 0
        assert (loss, *depths) == pytest.approx((other_loss, *other_depths), rel=unit, abs=0)
        assert norm == pytest.approx(other_norm, rel=1e-6 if has_experts else 0, abs=0)
        assert rate == other_rate


def test_overlapped_reduction_and_gather_give_the_same_losses(train):
    changes = UNSAVED | DISTRIBUTED | MTP
    overlapped = {f"{DDP}.overlap_grad_reduce": True, f"{DDP}.overlap_param_gather": True}
    without, reduced, gathered = train(2, changes, changes | {f"{DDP}.overlap_grad_reduce": True}, changes | overlapped)
    assert len(without["losses"]) == 4
    assert reduced["losses"] == without["losses"]
    assert gathered["losses"] == without["losses"]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_validation_changes_nothing_of_the_training(train, rows, overlapped):
    changes = UNSAVED | MTP | DISTRIBUTED
    if overlapped:
        changes |= {f"{DDP}.overlap_grad_reduce": True, f"{DDP}.overlap_param_gather": True}
    validated = {
        "data.validation.dataset_name": "megatron_sft_packed",
        "data.validation.data_path": str(rows),
        "sft.val_period": 1,
        "sft.val_at_start": True,
    }
    without, with_it = train(2, changes, changes | validated)
    assert with_it["losses"] == without["losses"]


def test_the_validation_loss_does_not_depend_on_dp(train, tmp_path):
    seven = jobs.write_rows(tmp_path / "seven.jsonl", rows=7, first=3)
    changes = UNSAVED | {
        "sft.max_num_steps": 1,
        "data.validation.dataset_name": "megatron_sft_packed",
        "data.validation.data_path": str(seven),
        "sft.val_at_start": True,
    }
    losses = []
    for size in (1, 2):
        train(size, changes)
        *_, last = jobs.records(tmp_path / "job_0", "validation")
        losses.append(last["validation_loss"])
    assert losses[0] > 0
    # Sums in float32 in another order: two roundings of at most 7 rows' sums.
    assert losses[0] == pytest.approx(losses[1], rel=2e-7)


def test_a_report_of_several_steps_gives_the_numbers_of_each(train):
    each, together = train(2, UNSAVED | MTP, UNSAVED | MTP | {"logger.report_period": 3})
    assert list(together["losses"]) == [1, 2, 3, 4]
    for step, (loss, depths, norm, rate) in together["losses"].items():
        # Reported together, ranks' sums are added in another order.
        assert (loss, *depths) == pytest.approx((each["losses"][step][0], *each["losses"][step][1]), rel=2e-7)
        assert (norm, rate) == each["losses"][step][2:]


COUNTED = {
    "dense, with depths": (1, MTP),
    "cp 2, with depths": (2, MTP | CONTEXT),
    "ep 2, with depths": (2, MTP | EXPERTS | {f"{MEGATRON}.expert_model_parallel_size": 2}),
}


OF_EXPERTS = {
    "aten::_local_scalar_dense in megatron/core/tensor_parallel/mappings.py:forward",
    "tolist in production/model/device/shim.py:all_to_all_single",
}
"""megatron-core's dispatcher of experts needs to know on the host how many tokens go to which rank, in every layer that has them: on
CUDA it reads that once a layer, here where the numbers are used. Nothing of packproof, and not to be had without."""


@pytest.fixture
def counted(world, rows, tmp_path):
    """The waits of the steps of jobs of so many microbatches a rank, by rank."""

    def run(size, changes, *microbatches, reads=False):
        replicas = 1 if CONTEXT.items() <= changes.items() else size
        payload = []
        for count in microbatches:
            batch = {"policy.train_global_batch_size": count * replicas, "sft.max_num_steps": 2}
            config = jobs.write_job(tmp_path / f"job_{count}", rows, **UNSAVED | changes | batch)
            payload.append({"config": str(config), "reads": reads})
        found = world(size, "counted_in_turn", payload)
        assert len(found) == size
        for outcome, waits, objects in itertools.chain(*found):
            assert len(outcome["losses"]) == len(waits) == 2, outcome
            assert objects == []
        return [[waits for _, waits, _ in each] for each in found]

    return run


@pytest.mark.parametrize("case", COUNTED)
def test_a_step_waits_for_the_device_as_often_with_one_microbatch_as_with_four(counted, case):
    size, changes = COUNTED[case]
    for one, four in counted(size, changes, 1, 4):
        for step in (0, 1):
            more = {place for place, count in four[step].items() if count != one[step].get(place, 0)}
            assert more == (OF_EXPERTS if EXPERTS.items() <= changes.items() else set())


def test_the_count_of_waits_sees_each_way_to_read_the_device(counted):
    ((steps,),) = counted(1, MTP, 3, reads=True)
    expected = Counter(name for name, _ in jobs.READS_OF_A_MICROBATCH for _ in range(3))
    assert len(steps) == 2
    for waits in steps:
        assert {
            place.partition(" in ")[0]: count for place, count in waits.items() if "_microbatches" in place
        } == expected


def test_steps_send_no_objects(train):
    for found, _, objects in train(2, UNSAVED | PIPELINE | MTP, target="counted"):
        assert len(found["losses"]) == 4
        assert objects == []


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"sft.max_num_epochs": 2, "sft.max_num_steps": None}, 4),
        ({"sft.max_num_epochs": 2, "sft.max_num_steps": None, "data.last_batch": "wrap"}, 5),
        ({"sft.max_num_epochs": 2, "sft.max_num_steps": 3}, 3),
    ],
)
def test_epochs_end_a_job(train, changes, steps):
    (found,) = train(1, UNSAVED | {"policy.train_global_batch_size": 5} | changes)
    assert (found["reason"], found["step"]) == ("finished", steps)


def test_several_files_are_read_end_to_end_and_blends_by_weight(train, tmp_path):
    parts = [jobs.write_rows(tmp_path / f"{first}.jsonl", rows=6, first=2 * first) for first in (0, 6)]
    blend = {
        "data.train.data_path": [
            {"path": str(path), "weight": weight} for path, weight in zip(parts, (3, 1), strict=True)
        ],
        "data.last_batch": "wrap",
        "logger.dump_batch_steps": [1],
    }
    one, several, blended = train(
        1, UNSAVED, UNSAVED | {"data.train.data_path": [str(each) for each in parts]}, UNSAVED | blend
    )
    assert several["losses"] == one["losses"]
    assert len(blended["losses"]) == 4
    (told,) = (tmp_path / "job_2").rglob("rank_0.rows.json")
    files = [Path(each["file"]).name for each in json.loads(told.read_text())["rows"]]
    assert sorted(files) == ["0.jsonl", "0.jsonl", "0.jsonl", "6.jsonl"]


def test_a_dump_holds_what_each_rank_fed(train, tmp_path):
    left = tmp_path / "job_0" / "logs" / "dumps" / "step_00000002" / "rank_2.rows.json"  # by a run of more ranks
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    train(2, UNSAVED | {f"{MEGATRON}.context_parallel_size": 2, "logger.dump_batch_steps": [2], "sft.max_num_steps": 2})
    (folder,) = (tmp_path / "job_0").rglob("step_00000002")
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank_{rank}.{kind}" for rank in (0, 1) for kind in ("rows.json", "safetensors")
    ]
    told = [json.loads((folder / f"rank_{rank}.rows.json").read_text()) for rank in (0, 1)]
    assert told[0]["rows"] == told[1]["rows"]
    assert [each["line"] for each in told[0]["rows"]] == [5, 6, 7, 8]
    fed = [load_file(folder / f"rank_{rank}.safetensors") for rank in (0, 1)]
    for number in range(4):
        row = fed[0][f"microbatch_{number}.row.input_ids"].flatten().tolist()
        shares = [each[f"microbatch_{number}.share.input_ids"].flatten().tolist() for each in fed]
        assert len(row) == jobs.PACK_LENGTH
        assert sorted(shares[0] + shares[1]) == sorted(row)
        assert shares[0] != shares[1]


def test_a_signal_on_one_rank_saves_and_ends_all(world, rows, tmp_path):
    config = jobs.write_job(tmp_path, rows)
    payload = {"config": str(config), "step": 2, "rank": 1, "happens": "asks_to_end"}
    for found in world(2, "train_disturbed", payload):
        assert (found["reason"], found["step"]) == ("signal", 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    (end,) = jobs.records(tmp_path, "end")
    assert end["reason"] == "signal"


def test_a_report_has_the_devices_own_times_of_each_step_and_of_every_stage(world, rows, tmp_path):
    config = jobs.write_job(tmp_path, rows, **UNSAVED | PIPELINE | {"logger.report_period": 3})
    payload = {"config": str(config), "shares": [0.75, 0.25], "memory": [900.0, 100.0]}
    for found, reads in world(2, "train_behind", payload):
        assert list(found["losses"]) == [1, 2, 3, 4]
        assert reads == 2 * 4  # the step's time and the rank's own share of it, once each
    steps = jobs.records(tmp_path, "step")
    assert [each["step_seconds"] for each in steps] == [1.0] * 4
    for each in steps:
        # Rank 0 holds the first stage, which knows no loss.
        assert (each["slowest_rank"], each["slowest_rank_pp"], each["slowest_rank_behind_seconds"]) == (0, 0, 0.25)
        assert (each["memory_mebibytes"], each["memory_rank"]) == (900.0, 0)


def test_a_validation_that_a_signal_cut_off_is_made_up_for(world, rows, tmp_path):
    validated = {
        "data.validation.dataset_name": "megatron_sft_packed",
        "data.validation.data_path": str(rows),
        "sft.val_period": 2,
    }
    config = str(jobs.write_job(tmp_path, rows, **validated))
    world(1, "train_disturbed", {"config": config, "step": 2, "happens": "asks_to_end"})
    assert not jobs.records(tmp_path, "validation")
    world(1, "train", {"config": config})
    assert [each["step"] for each in jobs.records(tmp_path, "validation")] == [2, 4]


def test_a_resume_does_not_repeat_the_validation_of_the_checkpoint_that_it_starts_from(world, rows, tmp_path):
    validated = {
        "data.validation.dataset_name": "megatron_sft_packed",
        "data.validation.data_path": str(rows),
        "sft.val_period": 2,
        "checkpointing.save_period": 2,
    }
    config = str(jobs.write_job(tmp_path, rows, **validated))
    world(1, "train", {"config": config})
    logged = jobs.records(tmp_path, "validation")
    assert [each["step"] for each in logged] == [2, 4]
    # A job that was killed after its second step has the checkpoint of that step as its newest.
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000004")
    world(1, "train", {"config": config})
    assert [each["step"] for each in jobs.records(tmp_path, "validation")] == [2, 4, 4]
    assert jobs.records(tmp_path, "validation")[2]["validation_loss"] == logged[1]["validation_loss"]


def test_the_time_to_save_by_ends_a_job_with_a_checkpoint(train, tmp_path):
    (found,) = train(1, {"checkpointing.checkpoint_must_save_by": "0:0:0:0"})
    assert (found["reason"], found["step"]) == ("time limit", 1)
    assert [path.name for path in (tmp_path / "job_0" / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_loss_that_is_not_a_number_stops_the_job_with_its_batch(world, rows, tmp_path):
    config = jobs.write_job(tmp_path, rows, **{"logger.report_period": 10, "checkpointing.save_period": 3})
    payload = {"config": str(config), "step": 2, "happens": "poisons"}
    for found in world(2, "train_disturbed", payload):
        assert found["kind"] == "NotFinite"
        assert "loss nan" in found["refused"]
        assert "step 2" in found["refused"]
    (folder,) = (tmp_path / "logs" / "dumps").iterdir()
    assert folder.name == "step_00000002"
    lines = [
        each["line"] for rank in (0, 1) for each in json.loads((folder / f"rank_{rank}.rows.json").read_text())["rows"]
    ]
    assert sorted(lines) == [5, 6, 7, 8]
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_rank_that_stops_is_named_with_its_reason_by_those_that_wait(world, rows, tmp_path):
    config = jobs.write_job(tmp_path, rows)
    payload = {"config": str(config), "step": 2, "rank": 1, "happens": "stops", "folder": str(tmp_path)}
    with pytest.raises(CaseFailed):
        world(2, "train_disturbed_apart", payload, after_failure_s=60)
    waiting, stopped = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert stopped["refused"].startswith("line 7: a row that cannot be")
    assert waiting["kind"] == "RankLost"
    assert "rank 1 stopped: line 7: a row that cannot be" in waiting["refused"]


@pytest.mark.parametrize("depths", [{}, MTP | CONTEXT], ids=["dp", "cp, with depths"])
def test_the_online_path_trains_and_resumes(world, tmp_path, depths):
    chat = jobs.write_chat(tmp_path / "chat.jsonl")
    changes = {
        "data.train.dataset_name": "openai_format",
        "policy.sequence_packing.enabled": True,
        "data.default.megatron_sft_prompt_format": None,
        "loss.normalization": "global_valid_tokens",
        f"{MEGATRON}.scheduler.lr_decay_iters": 4,
        **depths,
        "data.validation.dataset_name": "openai_format",
        "data.validation.data_path": str(chat),
        "sft.val_period": 2,
    }
    config = str(jobs.write_job(tmp_path / "online", chat, **changes))
    parts = str(jobs.write_job(tmp_path / "parts", chat, **changes))
    payload = [
        {"config": config},
        {"config": parts, "overrides": ["sft.max_num_steps=2", "data.num_workers=2"]},
        {"config": parts, "overrides": ["data.num_workers=0"]},
    ]
    found = world(2, "train_in_turn", payload)
    assert len(found) == 2
    for whole, first, rest in found:
        assert "refused" not in whole | first | rest, (whole, first, rest)
        assert list(rest["losses"]) == [3, 4]
        assert whole["losses"] == first["losses"] | rest["losses"]
        for _, of_depths, _, _ in whole["losses"].values():
            assert len(of_depths) == (2 if depths else 0)
            assert all(math.isfinite(each) and each > 0 for each in of_depths)
    assert [each["step"] for each in jobs.records(tmp_path / "online", "validation")] == [2, 4]


def test_the_online_path_refuses_another_normalization(train, tmp_path):
    chat = jobs.write_chat(tmp_path / "chat.jsonl")
    online = {"data.train.dataset_name": "openai_format", "policy.sequence_packing.enabled": True}
    (refused,) = train(1, online | {"loss.normalization": "per_token"}, data=chat)
    assert "loss.normalization" in refused["refused"]
