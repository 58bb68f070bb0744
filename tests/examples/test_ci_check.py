"""The guide to a CI check is followed from an empty folder: an environment without packproof, its own commands, the results it promises."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tools.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "ci-check.md"


def guide_commands():
    """The guide's commands, in order, with the checkout's path in them."""
    found = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line.replace("CHECKOUT", str(ROOT))) for text in found for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder after section 2: an environment that holds nothing, the copied file, the adapter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    setup = [words for words in guide_commands() if words[0] in ("python", "cp")]
    assert len(setup) == 3
    for words in setup:
        subprocess.run([sys.executable if words[0] == "python" else words[0], *words[1:]], check=True)
    return tmp_path


def commands_of(name):
    return [words[1:] for words in guide_commands() if words[:2] == ["packproof", name]]


def declared(folder, old, new):
    """Change a word of the adapter, which must be there."""
    path = folder / "my_adapter.py"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_environment_of_the_guide_holds_no_packproof(folder):
    for module in ("equivalence", "packproof", "torch", "numpy"):
        found = subprocess.run(
            [str(folder / "yours/bin/python"), "-I", "-c", f"import {module}"], capture_output=True, check=False
        )
        assert b"ModuleNotFoundError" in found.stderr


def test_the_guides_adapter_reaches_its_level_and_the_report_is_junit(folder, capsys):
    first, in_ci = commands_of("conformance")
    assert main(first) == 0
    assert "reaches L7" in capsys.readouterr().out
    assert main([*in_ci, "--drawn", "5"]) == 0
    assert "<testsuite" in (folder / "conformance.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "level"),
    [
        ("if trains and at else IGNORE", "if trains else IGNORE", "L3"),
        ('row["position_ids"] += range(needed)', 'row["position_ids"] += range(1, needed + 1)', "L4"),
        ('row["cu_seqlens"].append(len(row["input_ids"]))', "pass", "L5"),
    ],
    ids=["trains across boundaries", "positions from 1", "lost boundaries"],
)
def test_a_wrong_packer_misses_its_level(folder, old, new, level, capsys):
    declared(folder, old, new)
    (first, _) = commands_of("conformance")
    assert main([*first, "--drawn", "0"]) == 1
    assert re.search(rf"does not reach L7: .*\b{level}\b", " ".join(capsys.readouterr().out.split()))


def run_rows(*options):
    """The guide's run, a part of it that takes seconds; returns the exit status and the report."""
    (words,) = commands_of("equivalence")
    small = ["--size", "tiny", "--workers", "1", "--job", "own nemotron", "--shard", "1/4", *options]
    code = main([*words, *small])
    return code, json.loads(Path("build/equivalence/report.json").read_text(encoding="utf-8"))


def test_the_guides_rows_are_equal_to_the_bit_and_those_that_do_not_fit_are_counted(folder):
    assert folder.is_dir()
    code, report = run_rows()
    assert code == 0, report["differences"] + report["errors"]
    assert sum(check["equal"] for check in report["checks"]) > 40
    assert any("plain_packer" in each for each in report["left_out"])


def test_an_undeclared_convention_is_reported_as_undeclared(folder, capsys):
    declared(folder, 'CONVENTIONS = {"shift": "model", "pad_label": "ignore"}', "CONVENTIONS = {}")
    code, report = run_rows("--shard", "1/8")
    assert code == 1
    (kind,) = {each["first"]["right"] for each in report["differences"]}
    assert "a convention that the adapter does not declare" in kind
    assert "conventions={'shift': 'model', 'pad_label': 'ignore'}" in kind
    printed = capsys.readouterr().out
    assert "differs by a convention" in printed
    assert "a row or a refusal" not in printed, "nothing was raised"
    assert "raised" not in printed
    assert sum(each["count"] for each in report["alike"]) + len(report["differences"]) > 20


def test_the_guides_diff_row_shows_one_row_of_both(folder, capsys):
    assert folder.is_dir()
    (words,) = commands_of("diff-row")
    assert main(words) == 0
    assert "plain_packer" in capsys.readouterr().out
