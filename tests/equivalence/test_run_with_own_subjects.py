"""A run with a subject of one's own: it goes on where every row differs, and tells each kind of difference with a count."""

import json
import sys
from pathlib import Path

import pytest

from equivalence.__main__ import main
from equivalence.runner import known
from tools.diff_row.__main__ import main as diff_row

ADAPTER = Path(__file__).with_name("faulty_adapter.py")
SAMPLE = Path(__file__).parents[2] / "examples" / "packed" / "sample.jsonl.packed"
OPTIONS = [
    "run",
    "--size",
    "tiny",
    "--rows-only",
    "--workers",
    "1",
    "--formats",
    "identity",
    "--semantics",
    "megatron-lm-0.19",
]


def run(out, *options, subjects):
    code = main([*OPTIONS, "--out", str(out), "--subjects", subjects, *options])
    return code, json.loads((out / "report.json").read_text())


def external(fault):
    return f"exec:{sys.executable} {ADAPTER} {fault}"


def test_a_subject_that_differs_in_every_row_is_compared_to_the_end(tmp_path, capsys):
    options = ["--job", "rows", "--sample", "none", "--shard", "1/6"]
    code, report = run(tmp_path, *options, subjects="reference,wrong_subjects:TrainsBoundaryPadding")
    assert code == 1
    assert not report["stopped_early"]
    (check,) = [each for each in report["checks"] if each["check"] == "rows"]
    kinds = {
        (each["left"], each["right"], each["first"]["class"], each["first"]["tensor"]) for each in report["differences"]
    }
    shown, counted = len(report["differences"]), sum(each["count"] for each in report["alike"])
    assert check["differing"] > 20, "where a run ended before"
    assert shown + counted == check["differing"]
    assert shown <= known.MOST_SHOWN * len(kinds)
    assert f"{check['differing']} differing cases of {len(kinds)} kind" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"and {max(each['count'] for each in report['alike']):,} more that were counted" in page
    assert known._SHOWN is None, "the next run shows all again"


def test_rows_only_runs_only_checks_of_rows_and_batches(tmp_path):
    code, report = run(tmp_path, "--sample", "none", "--shard", "1/40", subjects="reference,production")
    assert code == 0, report["errors"]
    assert {each["check"] for each in report["checks"]} <= {"corpus", "rows", "batches"}
    assert "checks of data, training steps and runs: --rows-only" in report["left_out"]


def test_an_external_subject_has_its_own_name_in_a_run_and_collates_nothing(tmp_path):
    subjects = f'reference,production,exec:"{external("none").removeprefix("exec:")}"'
    code, report = run(tmp_path, "--shard", "1/10", "--job", "batches", "--sample", "none", subjects=subjects)
    assert code == 0, "the batches of the other two are equal"
    assert report["witnesses"][2]["called"] == "faulty_adapter"
    assert any("of batches: settings that faulty_adapter does not take" in each for each in report["left_out"])


def test_an_exception_of_an_external_subject_is_a_difference_and_shown_by_a_command(tmp_path):
    options = ["--shard", "1/10", "--job", "rows", "--sample", "none"]
    code, report = run(tmp_path, *options, subjects=f"reference,{external('raises')}")
    assert code == 1
    raised = [each for each in report["differences"] if each["first"]["class"] == "raised"]
    assert raised
    assert "raised KeyError: 'role' (at " in raised[0]["first"]["right"]
    assert external("raises") in raised[0]["command"]


def test_a_subject_that_cannot_start_ends_the_run_with_its_stderr(tmp_path, capsys):
    assert main([*OPTIONS, "--out", str(tmp_path), "--subjects", f"reference,{external('crash_at_start')}"]) == 2
    told = capsys.readouterr().err
    assert "ended with exit status 3" in told
    assert "no module named nothing" in told


def test_two_subjects_of_one_name_are_refused(tmp_path, capsys):
    subjects = f"{external('none')},{external('counts')}"
    assert main([*OPTIONS, "--out", str(tmp_path), "--subjects", subjects]) == 2
    assert "calls itself 'faulty_adapter' as another subject does" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "code", "told"), [("none", 1, "faulty_adapter"), ("crash_at_start", 2, "no module named nothing")]
)
def test_diff_row_takes_an_external_side(fault, code, told, capsys):
    tokenizer = SAMPLE.parents[1] / "tokenizers" / "nemotron-mini"
    options = [str(SAMPLE), "--row", "17", "--tokenizer", str(tokenizer), "--json"]
    assert diff_row([*options, "--sides", f"reference,{external(fault)}"]) == code
    captured = capsys.readouterr()
    assert told in captured.out + captured.err
    if code == 1:
        assert [side["name"] for side in json.loads(captured.out)["sides"]] == ["reference", "faulty_adapter"]
