"""The command line of the suite: its exit codes, its reports, and that a counterexample is small and comes first next time."""

import json
from html.parser import HTMLParser

import pytest

from equivalence.__main__ import main
from equivalence.cases import read_case
from equivalence.corpus import store

SMALL = ["--size", "tiny", "--sample", "none", "--workers", "1", "--no-models"]


def run(out, *options, subjects="reference,production", shard="1/80"):
    code = main([*SMALL, "--out", str(out), "--subjects", subjects, "--shard", shard, *options])
    return code, json.loads((out / "report.json").read_text())


def test_equal_sides_exit_0_and_leave_reports_that_parse(tmp_path):
    code, report = run(tmp_path, shard="1/20")
    assert code == 0
    assert report["verdict"] == "equal"
    assert report["generated"]["rows"] >= 50
    assert report["generated"]["messages_per_row"] >= 10
    assert not any(check["differing"] for check in report["checks"])
    assert {"megatron-core", "torch", "transformers"} <= report["versions"].keys()
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    page = (tmp_path / "report.html").read_text()
    parser.feed(page)
    assert ("main", {}) in tags
    assert not [tag for tag, attributes in tags if tag in ("script", "link", "img") or "src" in attributes], (
        "self-contained"
    )
    assert "http" not in page


def test_the_same_seed_draws_the_same_rows_on_any_number_of_workers(tmp_path):
    one = run(tmp_path / "1", "--workers", "1")[1]
    two = run(tmp_path / "2", "--workers", "2")[1]
    other = run(tmp_path / "3", "--seed", "1")[1]
    same = ("checks", "refusals", "classes", "divergences")
    assert [one[name] for name in same] == [two[name] for name in same]
    assert one["classes"] != other["classes"]


def test_a_wrong_side_exits_1_and_its_counterexample_is_small_and_replayed_first(tmp_path, capsys):
    options = {"subjects": "reference,wrong_subjects:TrainsBoundaryPadding"}
    code, report = run(tmp_path, shard="18/30", **options)
    assert code == 1
    found = [each for each in report["differences"] if each["check"] == "rows"]
    assert found
    assert found[0]["command"] == (
        f"packproof-diff-row --case {found[0]['path']} --sides reference,wrong_subjects:TrainsBoundaryPadding"
    )
    cases = [read_case(path) for path in sorted((tmp_path / "corpus").iterdir())]
    assert len(cases) == len({each["path"] for each in found})
    small = [case for case in cases if len(case.messages) <= 6]
    assert small, "two conversations show it"
    plain = [case for case in small if {str(message["content"]).strip() for message in case.messages} <= {"w0", ""}]
    assert plain, "a class that is none of the contents' leaves nothing in them"
    assert all(case.settings.pack_length <= 64 for case in plain)
    capsys.readouterr()

    code, again = run(tmp_path, shard="1/400", **options)
    assert code == 1
    first = again["differences"][0]
    assert first["check"] == "corpus"
    assert first["where"].startswith(str(tmp_path / "corpus"))
    assert f"packproof-diff-row --case {first['where']}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sample", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--subjects", "reference,wrong_subjects:Witness"], "libwitness.so"),
        (["--subjects", "reference,nobody"], "no subject is called 'nobody'"),
        (["--subjects", "reference"], "at least two sides"),
        (["--shard", "5/4"], "--shard 5/4"),
        (["--tokenizer", "nothing", "--sample", __file__], "no tokenizer is called 'nothing'"),
    ],
)
def test_bad_input_or_a_witness_that_cannot_be_loaded_exits_2_and_is_named(options, said, tmp_path, capsys):
    assert main([*SMALL, "--subjects", "reference,production", "--out", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.xdist_group("gloo")
def test_training_steps_are_in_the_report_with_what_stands_in(tmp_path, capsys):
    from equivalence import model_cases

    replayed = next(path for path, _ in model_cases.replay())
    assert main(["replay", str(replayed)]) == 0
    assert "models equal, third_witness equal" in capsys.readouterr().out.replace("\n", " ")
    # Of a run's jobs the second replays the shipped steps.
    code = main([*SMALL[:-1], "--out", str(tmp_path), "--subjects", "reference,production", "--shard", "2/1000"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0
    assert sum(each["cases"] for each in report["layouts"]) == len(list(model_cases.replay()))
    assert all(each["third_witness"] for each in report["layouts"])
    assert {"CUDA", "norm", "core attention", "driver"} <= report["third_witness"]["stand_ins"].keys()
    assert "roll_tensor" in report["third_witness"]["upstream"]
    assert {each["check"] for each in report["checks"]} == {"models", "third_witness", "invariance"}
    page = (tmp_path / "report.html").read_text()
    assert "Training steps by layout" in page
    assert "production.device.attention" in page
    assert "training steps by layout" in capsys.readouterr().out


def test_a_saved_case_that_cannot_be_read_exits_2(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "half.json").write_text('{"schema": 1, "mess')
    assert main([*SMALL, "--subjects", "reference,production", "--out", str(tmp_path)]) == 2
    assert "half.json" in capsys.readouterr().err


def test_a_side_that_raises_exits_2_with_the_smallest_row_that_makes_it(tmp_path):
    code, report = run(tmp_path, subjects="reference,wrong_subjects:Raises", shard="18/30")
    assert code == 2
    assert "thirteen is too many" in report["errors"][0]
    assert report["errors"][0].count('"role"') < 25, "shrunk"


def test_a_worker_that_dies_exits_2_and_does_not_hang(tmp_path):
    code, report = run(tmp_path, "--workers", "2", subjects="reference,wrong_subjects:Dies")
    assert code == 2
    assert "worker process ended" in report["errors"][0]


def test_ctrl_c_exits_130_and_reports_what_ran(tmp_path):
    code, report = run(tmp_path, subjects="reference,wrong_subjects:Interrupted")
    assert code == 130
    assert report["verdict"] == "interrupted"
    assert sum(check["rows"] for check in report["checks"]) > 0


def test_promote_moves_a_case_among_the_permanent_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "SAVED", tmp_path / "saved")
    path, case = next(store.replay(store.Path(store.__file__).parent / "saved"))
    fresh = store.save(case, "why", folder=tmp_path / "fresh")
    assert fresh == store.save(case, "why", folder=tmp_path / "fresh"), "the same case is one file"
    assert path != fresh
    assert main(["promote", str(fresh), "--name", "a-case"]) == 0
    assert not fresh.exists()
    assert read_case(tmp_path / "saved" / "a-case.json").messages == case.messages
    for name in ("a-case", "No Name"):
        again = store.save(case, "why", folder=tmp_path / "fresh")
        assert main(["promote", str(again), "--name", name]) == 2
    assert "choose another name" in capsys.readouterr().err
