"""What of the machine would end a run later is refused before anything is built (SPEC R-SETUP-20): folders, packages."""

import importlib.util
from pathlib import Path

import pytest
import training_job_worlds as jobs
from rich.console import Console

from production.errors import PackproofError
from production.training.__main__ import main
from production.training.config import check_machine, load, missing_files
from production.training.distributed import launch
from production.training.metrics.loggers import JsonLines, Record
from production.training.metrics.summary import close_run

FOLDERS = [
    "checkpointing.checkpoint_dir",
    "logger.log_dir",
    "logger.tensorboard.log_dir",
    "data.cache_folder",
    "data.cache_dir",
]


@pytest.fixture
def job(tmp_path):
    """The small job's file, with its folders in a folder of the test."""

    def write(**changes):
        changes = {"logger.tensorboard_enabled": True, "data.cache_folder": str(tmp_path / "cache")} | changes
        return str(jobs.write_job(tmp_path, jobs.write_rows(tmp_path / "rows.jsonl"), **changes))

    return write


def refused(path, *overrides):
    return [(each.kind, each.key) for each in check_machine(load(path, overrides))]


def test_r_setup_20_folders_that_are_not_there_yet_are_made_and_left_empty(job, tmp_path):
    assert refused(job()) == []
    for name in ("checkpoints", "logs/tensorboard", "cache"):
        assert list((tmp_path / name).iterdir()) == []


@pytest.mark.parametrize("key", FOLDERS)
@pytest.mark.parametrize("is_above", [False, True], ids=["a file", "below a file"])
def test_a_file_where_a_folder_should_be_is_named_with_key_and_fix(job, tmp_path, key, is_above):
    (tmp_path / "taken").write_text("")
    folder = tmp_path / "taken" / "below" if is_above else tmp_path / "taken"
    (refusal,) = check_machine(load(job(), [f"{key}={folder}"]))
    assert (refusal.kind, refusal.key) == ("no_folder", key)
    assert str(folder) in refusal.what
    assert "is not a folder" in refusal.what
    assert key in refusal.where
    assert "give a folder" in refusal.fix


@pytest.mark.parametrize("key", FOLDERS)
def test_a_folder_that_nobody_may_write_to_is_refused(job, key):
    (refusal,) = check_machine(load(job(), [f"{key}=/proc/self/packproof"]))
    assert (refusal.kind, refusal.key) == ("no_folder", key)
    assert "/proc/self/packproof cannot be written to" in refusal.what


def test_a_file_for_a_folder_or_a_folder_for_a_file_below_the_logs_is_refused(job, tmp_path):
    path = job()
    assert refused(path) == []
    (tmp_path / "logs" / "dumps").write_text("")
    assert refused(path) == [("no_folder", "logger.log_dir")]
    (tmp_path / "logs" / "dumps").unlink()
    (tmp_path / "logs" / "metrics.jsonl").mkdir()
    assert refused(path) == [("no_folder", "logger.log_dir")]


def test_a_job_that_does_not_save_needs_no_folder_for_it(job, tmp_path):
    (tmp_path / "checkpoints").write_text("")
    assert refused(job(), "checkpointing.enabled=false") == []


def test_the_command_prints_all_refusals_and_ends_with_2_before_anything_is_built(job, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    taken = [f"{key}={tmp_path / 'taken'}" for key in ("checkpointing.checkpoint_dir", "logger.log_dir")]
    assert main(["--config", job(), *taken]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[:2] for line in printed[:2]] == [
        ["refused:", "logger.log_dir"],
        ["refused:", "checkpointing.checkpoint_dir"],
    ]
    assert printed[2] == "2 reasons against this job"


def test_a_dry_run_reports_a_file_in_the_place_of_a_folder_and_creates_no_folder(job, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["--config", job(), "--dry-run", f"checkpointing.checkpoint_dir={tmp_path / 'taken' / 'x'}"]) == 0
    assert (
        f"note: {tmp_path / 'taken' / 'x'} cannot be made: {tmp_path / 'taken'} is not a folder"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("override", "module", "key"),
    [
        ("logger.wandb_enabled=true", "wandb", "logger.wandb_enabled"),
        ("logger.mlflow_enabled=true", "mlflow", "logger.mlflow_enabled"),
        ("logger.tensorboard_enabled=true", "tensorboard", "logger.tensorboard_enabled"),
        ("model.initial=huggingface", "megatron.bridge", "model.initial"),
    ],
)
def test_a_package_that_an_option_needs_and_that_is_not_installed_is_refused(job, monkeypatch, override, module, key):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    assert refused(job(**{"logger.tensorboard_enabled": False}), override) == [("no_package", key)]


def test_a_chat_template_that_does_not_exist_is_refused_with_the_files(job):
    (refusal,) = missing_files(load(job(), ["policy.tokenizer.chat_template=/not/there.jinja"]))
    assert (refusal.kind, refusal.key) == ("no_file", "policy.tokenizer.chat_template")


def test_ranks_that_cannot_connect_say_so(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PackproofError) as refused:
        launch._join("gloo", 5)
    assert "rank 0 of 2: the ranks did not find each other within 5 s" in str(refused.value)
    assert "MASTER_ADDR" in str(refused.value)


def test_a_line_that_a_full_disk_does_not_take_names_the_file():
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(PackproofError) as refused:
        lines.log(Record(kind="end", step=1, values={"reason": "finished"}))
    lines.close()
    assert str(refused.value).startswith("/dev/full: a run's numbers cannot be written: No space left on device")


def test_a_line_of_which_a_disk_takes_a_part_at_a_time_is_written_whole(tmp_path):
    class Slow:
        """A file that takes five bytes at a time."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(data[:5])

        def close(self):
            self.file.close()

    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines._file = Slow(lines._file)
    lines.log(Record(kind="end", step=12, values={"reason": "finished"}))
    lines.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.startswith('{"kind": "end", "step": 12, "time": ')
    assert text.endswith(', "reason": "finished"}\n')


def test_a_run_that_is_done_does_not_fail_by_its_summary(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("of something else\n")
    assert close_run(tmp_path, Console(width=500)) is None
    assert f"no summary or picture: {tmp_path / 'metrics.jsonl'}, line 1" in capsys.readouterr().out
