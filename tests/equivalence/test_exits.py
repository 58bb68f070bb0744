"""Exit statuses mean what they say, whatever the terminal can show and whoever reads the output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from equivalence.__main__ import main
from production import exits

ROOT = Path(__file__).parents[2]
SAMPLE = [
    "examples/packed/sample.jsonl.packed",
    "--row",
    "3",
    "--tokenizer",
    "nemotron-mini",
    "--sides",
    "reference,production",
]


def diff_row(*arguments, **how):
    environment = {**os.environ, **how.pop("env", {})}
    command = [sys.executable, "-W", "ignore", "-m", "tools.diff_row", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False, **how)


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"}])
def test_equal_rows_are_equal_also_where_the_terminal_lacks_characters(env):
    done = diff_row(*SAMPLE, env=env)
    assert done.returncode == 0, done.stderr


def test_a_case_nested_too_deep_is_bad_input(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert diff_row("--case", str(tmp_path / "deep.json")).returncode == 2


def test_a_closed_pipe_is_not_a_difference():
    command = [sys.executable, "-W", "ignore", "-m", "tools.diff_row", *SAMPLE]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    running.stdout.close()
    assert running.wait(120) == exits.PIPE_CLOSED


def test_a_fault_of_the_tool_itself_is_no_result(capsys):
    def broken(_):
        raise RecursionError

    assert exits.run(broken) == exits.CANNOT_RUN
    assert "RecursionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--shard", "100000/100000"], ["--rows", "0"], ["--workers", "0"], ["--pack-length", "0"]]
)
def test_a_run_that_compares_nothing_is_not_equal(arguments, tmp_path):
    assert main(["run", "--size", "tiny", "--sample", "none", "--out", str(tmp_path), *arguments]) == 2


def test_an_impossible_output_folder_is_reported_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["run", "--size", "tiny", "--out", str(tmp_path / "file")]) == 2
    assert "choose another place" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("tools", ["--help"]),
        ("tools.simulate", ["--dp", "2"]),
        ("production.training", ["--config", "examples/jobs/small-cpu.yaml", "--print-config"]),
    ],
)
def test_a_reader_that_goes_away_and_a_full_disk_leave_no_traceback(module, arguments):
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    read, write = os.pipe()
    os.close(read)
    with Path("/dev/full").open("wb") as full:
        for out, status in ((write, exits.PIPE_CLOSED), (full.fileno(), exits.CANNOT_RUN)):
            done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, timeout=120, check=False)
            assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr
    os.close(write)
