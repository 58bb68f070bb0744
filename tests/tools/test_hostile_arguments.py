"""Whatever a flag or a file holds: one clear error, status 2, no traceback and no end of waiting."""

import importlib
import json
import os
from pathlib import Path

import pytest

from production.files.file_state import read_regular
from production.training.__main__ import main
from production.training.config import check_machine, load

ROOT = Path(__file__).parents[2]
ROW = [
    str(ROOT / "examples" / "packed" / "sample.jsonl.packed"), "--row", "17", "--sides", "reference,production",
    "--tokenizer", str(ROOT / "examples" / "tokenizers" / "nemotron-mini"),
]  # fmt: skip


@pytest.fixture
def end(capsys):
    """How a command ends: it must be with status 2 and a few lines, of which none is of a traceback."""

    def run(module, *arguments):
        try:
            status = importlib.import_module(module).main([str(each) for each in arguments])
        except SystemExit as stopped:
            status = stopped.code
        said = capsys.readouterr()
        assert (status, "Traceback" in said.err) == (2, False), said.err
        assert 0 < len(said.err) < 4000
        return said.err

    return run


@pytest.fixture
def endless(tmp_path):
    """Files that would be read for ever, or that nobody can decode."""
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "folder.json").mkdir()
    names = ("pipe.json", "deep.json", "loop.json", "folder.json", "nothing.json", "a\0b.json")
    return [*(tmp_path / name for name in names), Path("/dev/zero")]


def test_a_pipe_or_device_in_place_of_a_case_is_refused(end, endless):
    for path in endless:
        end("equivalence.__main__", "replay", path)
        end("tools.diff_row.__main__", "--case", path, "--sides", "reference,production")


def test_a_pipe_or_device_in_place_of_a_recorded_run_is_refused(end, endless):
    for path in endless:
        end("tools.compare_runs.__main__", "recorded", path, path)


def test_rows_of_a_simulation_that_are_no_file_with_an_end_are_refused(end, endless):
    for path in endless:
        end("tools.simulate.__main__", "--file", path)


def test_a_pipe_or_device_in_place_of_a_manifest_is_refused(end, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    os.mkfifo(tmp_path / "rows.jsonl.manifest.json")
    assert "no regular file" in end("tools.diff_row.__main__", file, *ROW[1:])


@pytest.mark.parametrize(
    ("flag", "value"), [("--depth", 1 << 32), ("--dp", 10**22), ("--cp", 10**30), ("--depth", -1), ("--rank", 10**40)]
)
def test_numbers_that_no_layout_has_are_refused(end, flag, value):
    assert flag in end("tools.diff_row.__main__", *ROW, flag, value)


@pytest.mark.parametrize("flag", ["--depths", "--dp", "--cp", "--pack-length", "--rows"])
def test_a_simulation_refuses_numbers_that_no_job_has(end, flag):
    assert "must be at most" in end("tools.simulate.__main__", "--tp", "1", flag, 1 << 40)


def test_a_name_that_is_not_text_is_refused(end, tmp_path):
    for module, arguments in (
        ("tools.simulate.__main__", ("--dp", "1", "--html", tmp_path / "a\ud800b")),
        ("tools.build_tokenizer", (tmp_path / "a\ud800b",)),
        ("tools.diff_row.__main__", (*ROW, "--html", tmp_path / "a\ud800b")),
    ):
        assert "\\ud800" in end(module, *arguments)


def test_a_file_is_read_up_to_a_size(tmp_path):
    file = tmp_path / "big"
    file.write_bytes(bytes(2048))
    assert len(read_regular(file, most_bytes=2048)) == 2048
    with pytest.raises(OSError, match="it has more than"):
        read_regular(file, most_bytes=2047)


def test_a_pipe_or_device_in_place_of_a_configuration_or_template_is_refused(end, endless, tmp_path):
    for path in endless:
        end("production.training.__main__", "--config", path, "--dry-run")
    job = ROOT / "examples" / "jobs" / "small-cpu.yaml"
    os.mkfifo(tmp_path / "pipe.jinja")
    run = [f"policy.tokenizer.chat_template={tmp_path / 'pipe.jinja'}", f"logger.log_dir={tmp_path / 'logs'}"]
    assert main(["--config", str(job), "--dry-run", *run]) in (0, 2)


@pytest.mark.parametrize("name", ["metrics.jsonl", ".packproof.lock"])
def test_a_pipe_among_a_runs_files_is_refused_before_it_is_waited_for(tmp_path, name):
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / name)
    job = load(
        ROOT / "examples" / "jobs" / "small-cpu.yaml",
        [f"logger.log_dir={tmp_path / 'logs'}", f"checkpointing.checkpoint_dir={tmp_path / 'c'}"],
    )
    assert [f"{name} must be a regular file" in each.what for each in check_machine(job)] == [True]
