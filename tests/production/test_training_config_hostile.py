"""Bad input ends with a refusal that names its place and never with a traceback: files, values, paths, environment."""

import json
import tracemalloc

import pytest
import training_job_worlds as jobs

from production.errors import PackproofError
from production.training.__main__ import main
from production.training.config import ConfigRefused, load, missing_files, plan
from production.training.config.keys import nearest_key
from production.training.config.plan_job import _groups
from production.training.distributed.environment import check_environment, started_ranks, threads

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES = {
    "an alias inside itself": ("sft: &a\n  seed: *a\n", "an alias must not contain itself"),
    "a list inside itself": ("data: &a [*a]\n", "an alias must not contain itself"),
    "aliases of aliases": (LAUGHS, "at most 100,000 values"),
    "deep lists": ("sft: " + "[" * 900 + "]" * 900, "nested at most 64 levels deep"),
    "deep mappings": ("sft: " + "{a: " * 100 + "1" + "}" * 100, "nested at most 64 levels deep"),
    "NUL in a path": ('data:\n  train:\n    data_path: "a\\0b"\n', "must not contain NUL or half of a surrogate pair"),
    "half a pair in a path": ('logger:\n  log_dir: "a\\ud800"\n', "must not contain NUL or half of a surrogate pair"),
    "half a pair in a key": ('sft:\n  "a\\udc80": 1\n', "must not contain NUL or half of a surrogate pair"),
    "NUL in defaults": ('defaults: "a\\0b"\n', "must not contain NUL or half of a surrogate pair"),
    "a number of 5,000 digits": (f"sft:\n  seed: {'9' * 5000}\n", "at most 100 digits, got 5000"),
    "a word a billion times": ("logger:\n  log_dir: ${mul:abcd,1000000000}\n", "mul must have two numbers"),
    "an empty interpolation": ("logger:\n  log_dir: ${}\n", "cannot be resolved"),
    "5 MiB": ("# " + "x" * (5 << 20), "at most 4 MiB"),
    "a list": ("- 1\n", "must be a mapping of sections"),
    "a section that is a word": ("policy: fast\n", "must be a section, got"),
    "a section that is empty": ("policy:\n", "must be a section, got"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_not_a_configuration_is_refused_with_its_line(tmp_path, capsys, case):
    text, told = FILES[case]
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["--config", str(path), "--dry-run"]) == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert str(path) in printed or "a\\x00b" in printed


@pytest.mark.parametrize("text", ["a\\0b", "\\ud800"])
def test_an_override_with_characters_that_no_path_can_have_is_refused(tmp_path, text):
    config = jobs.write_job(tmp_path, tmp_path / "none")
    with pytest.raises(ConfigRefused, match="must not contain NUL or half of a surrogate pair"):
        load(config, [f'logger.log_dir="{text}"'])


def test_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder_are_refused(tmp_path, capsys):
    (tmp_path / "a.jinja").mkdir()
    weights = tmp_path / "weights"
    weights.write_text("")
    changes = {"policy.tokenizer.chat_template": str(tmp_path / "a.jinja"), "model.initial": "megatron", "model.initial_path": str(weights)}  # fmt: skip
    job = load(jobs.write_job(tmp_path / "job", tmp_path, **changes))
    told = {each.key: each.what for each in missing_files(job)}
    assert told == {
        "data.train.data_path": f"{tmp_path} must be a file, got a folder",
        "policy.tokenizer.chat_template": f"{tmp_path / 'a.jinja'} must be a file, got a folder",
        "model.initial_path": f"{weights} must be the folder of a checkpoint, got a file",
    }
    assert main(["--config", str(tmp_path), "--dry-run"]) == 2
    assert "cannot be read: it is a folder" in capsys.readouterr().err


ENVIRONMENTS = {
    "empty": ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
    "a word": ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
    "none": ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
    "digits of another script": ({"WORLD_SIZE": "٤"}, "WORLD_SIZE"),
    "no rank": ({"WORLD_SIZE": "2"}, "RANK"),
    "no size": ({"RANK": "0"}, "WORLD_SIZE"),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    "a rank beyond": ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK"),
    "a port that is none": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "y"}, "MASTER_PORT"),
    "a local rank that is none": ({"LOCAL_RANK": "first"}, "LOCAL_RANK"),
    "threads that are none": ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS"),
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_an_environment_that_is_half_a_launchers_is_refused_by_name(monkeypatch, case):
    variables, named = ENVIRONMENTS[case]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PackproofError) as refused:
        check_environment()
    assert named in refused.value.where


def test_the_first_level_of_a_list_of_threads_counts_and_a_launcher_is_not_needed(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for said, expected in (("4,2", 4), ("", 1), (" 3 ", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert threads() == expected
    check_environment()
    assert started_ranks() is None


def test_a_dry_run_counts_ranks_without_listing_them(tmp_path):
    job = load(jobs.write_job(tmp_path, tmp_path / "none", **{"policy.train_global_batch_size": 1 << 24}))
    tracemalloc.start()
    planned = plan(job, 1 << 24)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert planned.groups["dp"][0][-1] == (1 << 24) - 1
    assert most < 4 << 20
    assert f"… {(1 << 24) - 1} ({1 << 24} ranks)" in planned.text()


def test_a_world_of_a_trillion_ranks_is_refused_and_not_planned(tmp_path, capsys):
    config = str(jobs.write_job(tmp_path, tmp_path / "none"))
    assert main(["--config", config, "--dry-run", "--world-size", str(10**12)]) == 2
    assert "the number of ranks must be at most 16777216, got 1000000000000" in capsys.readouterr().err


def test_groups_are_those_of_megatron_cores_own_generator(tmp_path):
    from megatron.core.parallel_state import RankGenerator

    keys = ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
    for tensor, context, pipeline, expert, expert_tensor in ((2, 2, 2, 4, 1), (1, 2, 1, 2, 2), (4, 1, 2, 1, 4)):
        sizes = dict(zip(keys, (tensor, context, pipeline, expert, expert_tensor), strict=True))
        job = load(
            jobs.write_job(tmp_path, tmp_path / "none"),
            [f"policy.megatron_cfg.{name}_parallel_size={size}" for name, size in sizes.items()],
        )
        world = 32
        data, expert_data = world // (tensor * context * pipeline), world // (expert * expert_tensor * pipeline)
        order = "tp-cp-ep-dp-pp"
        dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
        experts = RankGenerator(tp=expert_tensor, ep=expert, dp=expert_data, pp=pipeline, cp=1, order=order)
        expected = {name.replace("-cp", " x cp"): dense.get_ranks(name) for name in ("tp", "cp", "dp", "dp-cp", "pp")}
        expected |= {"ep": experts.get_ranks("ep"), "edp": experts.get_ranks("dp")}
        assert _groups(job, data, expert_data) == {
            name: (tuple(next(group for group in groups if 0 in group)), len(groups))
            for name, groups in expected.items()
        }


@pytest.mark.parametrize(("full", "near"), [("data.split", None), ("data.packing", None), ("qqq", None), ("sft.sed", "sft.seed")])  # fmt: skip
def test_a_hint_names_a_key_only_where_one_is_near(full, near):
    assert nearest_key(full, full.rpartition(".")[0]) == near


def test_the_fix_for_a_key_unlike_any_other_is_to_take_it_out(tmp_path):
    path = jobs.write_job(tmp_path, tmp_path / "none")
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"data": values["data"] | {"split": "train"}}))
    with pytest.raises(ConfigRefused) as refused:
        load(path)
    assert refused.value.what == "data.split is not a key of a job"
    assert refused.value.fix.startswith("take it out")


def test_a_dry_run_reports_the_refusals_of_a_run(tmp_path, capsys):
    rows = jobs.write_rows(tmp_path / "rows.jsonl")
    config = str(jobs.write_job(tmp_path, rows, **{"model.initial": "huggingface", "model.initial_path": "some/model", "checkpointing.resume": False}))  # fmt: skip
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000001" / "packproof.json").write_text("{}")
    (tmp_path / "checkpoints" / ".packproof.lock").write_text("{}")
    assert main(["--config", config, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "note: Megatron-Bridge is not installed" in printed
    assert "must hold no checkpoint of another run" in printed
    assert "is locked by a run that writes to it, or by a run that was killed" in printed
    assert "but for the notes above" in printed
