"""A job does not mislead and does not destroy: what trained nothing has no loss, what is not a number is not saved, what is another run's stays."""

import json

import pytest
import training_job_worlds as jobs

from production.training.checkpoint.lock import FolderLock
from production.training.checkpoint.manifest import read_manifest
from production.training.metrics.loggers import read_records
from production.training.metrics.summary import summarize

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

MEGATRON = "policy.megatron_cfg"
MASKED = {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": jobs.words(3, 5)}]}


def write_lines(path, lines):
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + "\n")
    return path


def whole(number):
    return {"messages": [*jobs.conversation(2 * number), *jobs.conversation(2 * number + 1)]}


def validated(path):
    return {"data.validation.dataset_name": "megatron_sft_packed", "data.validation.data_path": str(path)}


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """What came of several small jobs of one rank, by name, with what each printed and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    masked = write_lines(folder / "masked.jsonl", [MASKED] * 4)
    partly = write_lines(folder / "partly.jsonl", [*[MASKED] * 4, *map(whole, range(8))])
    bad = write_lines(folder / "bad.jsonl", [*map(whole, range(6)), "{", *map(whole, range(6, 12))])
    each_step = {"checkpointing.save_period": 1}
    best = {"checkpointing.metric_name": "train:loss", "checkpointing.keep_top_k": 2}
    depths = {f"{MEGATRON}.mtp_num_layers": 2}
    several = {
        "partly": (partly, each_step | best | depths | validated(masked) | {"sft.val_period": 2}),
        "masked": (masked, each_step | {"sft.max_num_steps": 2}),
        "nan": (write_lines(folder / "whole.jsonl", map(whole, range(8))), each_step | {f"{MEGATRON}.optimizer.adam_eps": 0.0, "sft.max_num_steps": 1}),
        "skipped": (bad, {"data.default.on_bad_row": "skip", "sft.max_num_steps": 1} | validated(bad) | {"sft.val_at_end": True}),
    }  # fmt: skip
    payload = [
        {"config": str(jobs.write_job(folder / name, data, **changes))} for name, (data, changes) in several.items()
    ]
    (results,) = world(1, "told", [*payload, {"config": payload[-1]["config"], "overrides": ["sft.max_num_steps=2"]}])
    return dict(zip([*several, "gone on"], results, strict=True)), folder


def test_a_step_or_a_validation_that_trains_nothing_has_no_loss_in_records_pictures_and_table(alone):
    results, folder = alone
    found, printed = results["partly"]
    steps, validations = (jobs.records(folder / "partly", kind) for kind in ("step", "validation"))
    assert [each["step"] for each in steps if "loss" in each] == [2, 3]
    assert [each["step"] for each in steps if "mtp_1_loss" in each] == [2, 3]
    assert [each["all_masked"] for each in steps] == [True, False, False, True]
    assert [(each["step"], each["all_masked"], "validation_loss" in each) for each in validations] == [
        (2, True, False),
        (4, True, False),
    ]
    summary = summarize(read_records(folder / "partly" / "logs" / "metrics.jsonl"))
    assert [step for step, _ in summary.losses] == [2, 3]
    assert (summary.untrained, summary.validation_losses) == ([1, 4], [])
    assert found["losses"][1][:2] == (None, (None, None))
    assert "validation after step 2: nothing in it is trained, so it has no loss" in printed


def test_a_step_that_trained_nothing_is_never_the_best_checkpoint(alone):
    _, folder = alone
    kept = sorted((folder / "partly" / "checkpoints").iterdir())
    measured = {path.name[-1]: read_manifest(path).metrics for path in kept}
    assert sorted(measured) == ["3", "4"], "the best of those with a loss, and the newest"
    assert "train:loss" in measured["3"]
    assert not measured["4"]


def test_a_depths_loss_by_token_is_that_of_megatron_core_where_no_share_is_without_a_target(alone):
    """With one microbatch a share, both are means over the same tokens but for how microbatches weigh."""
    _, folder = alone
    second, third = (each for each in jobs.records(folder / "partly", "step") if "loss" in each)
    for step in (second, third):
        for depth in (1, 2):
            assert step[f"mtp_{depth}_empty_shares"] == 0
            assert step[f"mtp_{depth}_loss_by_tokens"] == pytest.approx(step[f"mtp_{depth}_loss"], rel=1e-3)
            assert step[f"mtp_{depth}_loss_by_tokens"] != step[f"mtp_{depth}_loss"]


def test_a_run_in_which_nothing_trains_ends_with_an_error_that_names_the_file(alone):
    results, folder = alone
    found, _ = results["masked"]
    assert found["kind"] == "NothingTrained"
    assert "no token was trained in any of 2 steps" in found["refused"]
    assert "data.train.data_path" in found["refused"]
    (end,) = jobs.records(folder / "masked", "end")
    assert end["reason"] == "nothing trained"
    assert [path.name[-1] for path in (folder / "masked" / "checkpoints").iterdir()] == ["1"], "not saved as the last"


def test_weights_that_are_no_numbers_are_not_saved(alone):
    """Adam without epsilon divides 0 by 0 where a weight has no gradient, while the loss of that step is one."""
    results, folder = alone
    found, _ = results["nan"]
    assert found["kind"] == "CheckpointFailed", found
    assert "rank 0: weight " in found["refused"]
    assert "is not finite" in found["refused"]
    assert "adam_eps" in found["refused"]
    assert not list((folder / "nan" / "checkpoints").iterdir())


def test_lines_that_are_left_out_are_reported_in_console_records_and_checkpoint(alone):
    results, folder = alone
    for name in ("skipped", "gone on"):
        found, printed = results[name]
        assert "step" in found, found
        assert "data.train: 1 lines are left out (on_bad_row: skip): line 7 of " in printed
        assert "data.validation: 1 lines are left out" in printed
    assert [each["rows_skipped"] for each in jobs.records(folder / "skipped", "run")] == [1, 1]
    assert {each["rows_skipped"] for each in jobs.records(folder / "skipped", "validation")} == {1}
    assert {read_manifest(path).skipped_rows for path in (folder / "skipped" / "checkpoints").iterdir()} == {1}


def test_without_a_progress_bar_the_first_step_and_saves_are_still_printed(alone):
    results, folder = alone
    checkpoints = folder / "skipped" / "checkpoints"
    _, first = results["skipped"]
    assert f"no checkpoint in {checkpoints}: beginning at step 0" in first
    assert f"saved {checkpoints / 'step_00000001'}" in first
    assert "step 1/" not in first
    assert f"going on from {checkpoints / 'step_00000001'} (step 1" in results["gone on"][1]


def test_records_carry_time_run_versions_and_the_configurations_hash_and_a_run_keeps_its_name(alone):
    _, folder = alone
    first, second = jobs.records(folder / "skipped", "run")
    names = {read_manifest(path).run for path in (folder / "skipped" / "checkpoints").iterdir()}
    assert names == {first["run"]} == {second["run"]}
    assert first["config_hash"] != second["config_hash"], "one has another length"
    assert first["version_of_megatron-core"].startswith("0.19")
    assert first["time"] <= second["time"]
    (other,) = jobs.records(folder / "masked", "run")
    assert other["run"] != first["run"]


def test_a_checkpoint_of_another_run_is_not_replaced(world, rows, tmp_path):
    config = str(jobs.write_job(tmp_path, rows, **{"checkpointing.save_period": 1}))
    checkpoints = tmp_path / "checkpoints"
    payload = {"config": config, "folder": str(checkpoints)}
    (found,) = world(1, "train_beside_another", payload)
    assert found["kind"] == "CheckpointFailed"
    assert "step_00000002 exists already and belongs to another run" in found["refused"]
    assert read_manifest(checkpoints / "step_00000002").run == "another"


def test_a_checkpoint_of_which_a_file_vanished_is_not_called_whole(world, rows, tmp_path):
    config = str(jobs.write_job(tmp_path, rows, **{"checkpointing.save_period": 1}))
    (found,) = world(1, "train_disturbed_in_save", {"config": config})
    assert found["kind"] == "CheckpointFailed"
    assert "the checkpoint is not complete after it was written: " in found["refused"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_job_does_not_start_in_a_folder_that_another_run_holds(world, rows, tmp_path):
    config = str(jobs.write_job(tmp_path, rows))
    with FolderLock(tmp_path / "checkpoints", key="it"):
        for found in world(2, "train", {"config": config}):
            assert found["kind"] == "FolderLocked"
            assert "checkpointing.checkpoint_dir" in found["refused"]
            assert "writes to it" in found["refused"]
