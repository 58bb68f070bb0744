"""The command line of the suite: its exit codes, its reports, and that a counterexample is small and comes first next time."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from equivalence.__main__ import main
from equivalence.cases import store
from equivalence.cases.row import read_case

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
    code, report = run(tmp_path, "--job", "rows", shard="3/30", **options)  # its first differences are of plain classes
    assert code == 1
    found = [each for each in report["differences"] if each["check"] == "rows"]
    assert found
    assert found[0]["command"] == (
        f"python -m tools.diff_row --case {found[0]['path']} --sides reference,wrong_subjects:TrainsBoundaryPadding"
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
    assert f"python -m tools.diff_row --case {first['where']}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sample", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--subjects", "reference,wrong_subjects:Witness"], "libwitness.so"),
        (["--subjects", "reference,nobody"], "no subject is called 'nobody'"),
        (["--subjects", "reference"], "at least two sides"),
        (["--shard", "5/4"], "--shard 5/4"),
        (
            ["--semantics", "megatron-lm-0.20"],
            "must begin with a preset, got 'megatron-lm-0.20'; the nearest is 'megatron-lm-0.19'",
        ),
        (["--semantics", "strict,row_end=any"], "row_end"),
        (["--formats", "identiy"], "no format is called 'identiy'; the nearest is 'identity'"),
        (["--cp", "1,two"], "each size must be a number from 1, got 'two'"),
        (["--tokenizer", "nothing", "--sample", __file__], "no tokenizer is called 'nothing'"),
    ],
)
def test_bad_input_or_a_witness_that_cannot_be_loaded_exits_2_and_is_named(options, said, tmp_path, capsys):
    assert main([*SMALL, "--subjects", "reference,production", "--out", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.worlds
def test_the_report_lists_training_steps_with_their_stand_ins(tmp_path, capsys):
    steps = [path for path, _ in store.replay(kinds=["models"])]
    replayed = steps[0]
    assert main(["replay", str(replayed)]) == 0
    assert "models equal, third_witness equal" in capsys.readouterr().out.replace("\n", " ")
    code = main([*SMALL[:-1], "--out", str(tmp_path), "--subjects", "reference,production", "--job", "corpus"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0
    assert sum(each["cases"] for each in report["layouts"]) == len(steps)
    assert all(each["third_witness"] for each in report["layouts"])
    assert {"CUDA", "norm", "core attention", "driver"} <= report["third_witness"]["stand_ins"].keys()
    assert "roll_tensor" in report["third_witness"]["upstream"]
    assert {each["check"] for each in report["checks"]} == {"corpus", "models", "third_witness", "invariance"}
    page = (tmp_path / "report.html").read_text()
    assert "Training steps by layout" in page
    assert "production.model.device.attention" in page
    assert "training steps by layout" in capsys.readouterr().out


def packed(folder, rows, **says):
    """The first rows of the example, with a manifest that says what they were packed for."""
    example = Path(__file__).parents[2] / "examples" / "packed" / "sample.jsonl.packed"
    path = folder / "mine.jsonl"
    path.write_bytes(b"".join(example.read_bytes().splitlines(keepends=True)[:rows]))
    manifest = {"pack_length": 2048, **says, "output": {"bytes": path.stat().st_size}}
    (folder / "mine.jsonl.manifest.json").write_text(json.dumps(manifest))
    return path


OWN = {"prompt_format": "nemotron-h-aligned", "context_parallel_size": 2, "semantics": "megatron-lm-main"}


def run_on(sample, out, *options, subjects="reference,production,megatron_lm"):
    given = ["run", "--sample", str(sample), "--workers", "1", "--no-models", "--out", str(out), "--subjects", subjects]
    code = main([*given, *options])
    return code, json.loads((out / "report.json").read_text())


def test_every_row_of_a_file_comes_first_in_the_settings_of_its_manifest(tmp_path, capsys):
    sample = packed(tmp_path, 9, **OWN)
    code, report = run_on(sample, tmp_path / "out", "--job", "own nemotron")
    assert code == 0
    assert report["size"] == "tiny", "the size that is taken unless another is given"
    own = report["own_settings"]
    assert (own["rows"], own["compared"], own["differing"]) == (9, 9, 0)
    assert own["settings"].items() >= (OWN | {"pack_length": 2048}).items()
    assert set(own["origins"].values()) == {"manifest"}
    (check,) = [each for each in report["checks"] if each["check"] == "own"]
    assert (check["format"], check["rows"]) == ("nemotron-h-aligned", 9)
    assert report["witnessed"]["megatron_lm"]["nemotron-h-aligned"] >= 9
    assert report["cpu_seconds_by_check"].keys() == {each["check"] for each in report["checks"]}
    assert report["cpu_seconds_by_check"]["own"] > 0
    screen = " ".join(capsys.readouterr().out.split())
    assert (
        "9 of 9 rows in their own settings (nemotron-h-aligned, cp 2, megatron-lm-main, 2,048 tokens as its manifest says)"
        in screen
    )


def test_settings_that_contradict_the_manifest_are_refused_except_another_cp(tmp_path, capsys):
    sample = packed(tmp_path, 2, **OWN)
    for options in (["--pack-length", "1024"], ["--formats", "identity"]):
        assert main(["run", "--sample", str(sample), "--out", str(tmp_path / "out"), *options]) == 2
        assert "was packed for" in capsys.readouterr().err
    given = ["--cp", "4", "--semantics", "strict", "--job", "own nemotron"]
    code, report = run_on(sample, tmp_path / "out", *given, subjects="reference,production")
    assert code == 0
    assert report["own_settings"]["settings"].items() >= {"context_parallel_size": 4, "semantics": "strict"}.items()
    assert report["own_settings"]["compared"] == 2
    assert [each["rows"] for each in report["checks"] if each["check"] == "own"] == [2]


def test_a_subject_of_one_format_is_judged_by_it_and_the_rest_is_left_out_and_counted(tmp_path, capsys):
    sample = packed(tmp_path, 3, **OWN)
    both = "reference,wrong_subjects:OneFormat"
    code, report = run_on(sample, tmp_path / "out", "--shard", "1/12", subjects=both)
    assert code == 0, report["differences"] + report["errors"]
    assert {each["format"] for each in report["checks"] if each["check"] not in ("divergences", "smallest")} == {
        "nemotron-h-aligned"
    }
    assert any("of generated rows: settings that wrong does not take" in each for each in report["left_out"])
    assert any("they hold production, which is not among the subjects" in each for each in report["left_out"])
    assert "left out:" in capsys.readouterr().out
    code, report = run_on(
        sample, tmp_path / "out", "--shard", "1/8", "--formats", "nemotron-h-aligned", "--cp", "1,2", "--semantics", "strict",
        subjects=both,
    )  # fmt: skip
    assert code == 0, report["differences"] + report["errors"]
    assert {each["format"] for each in report["checks"]} == {"nemotron-h-aligned"}
    assert "walks between presets: --semantics restricts them" in report["left_out"]


def test_a_dict_that_lacks_a_tensor_is_a_difference_that_names_it(tmp_path):
    code, report = run_on(
        packed(tmp_path, 2, **OWN), tmp_path / "out", "--job", "sample", subjects="reference,wrong_subjects:Halved"
    )
    assert code == 1
    said = report["differences"][0]["first"]["right"]
    assert "the dict that build_row returned has unknown keys labels and lacks target_ids" in said


def test_a_fault_that_depends_on_earlier_cases_is_reported_as_such(tmp_path, capsys):
    both = "reference,wrong_subjects:Remembers"
    code, report = run(tmp_path, "--job", "rows combining", subjects=both, shard="1/1")
    assert code == 1
    (found, *_) = report["differences"]
    assert found["alone"] == "equal"
    assert "--job 'rows combining" in found["together"], "a job's title, by which the run finds the case again"
    screen = " ".join(capsys.readouterr().out.split())
    assert "alone this case is equal: it needs others before it" in screen
    assert found["together"] in screen
    assert "--job" in found["together"]


def test_a_saved_case_that_cannot_be_read_exits_2(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "half.json").write_text('{"schema": 1, "mess')
    assert main([*SMALL, "--subjects", "reference,production", "--out", str(tmp_path)]) == 2
    assert "half.json" in capsys.readouterr().err


def test_a_subject_that_raises_is_a_difference_with_its_line_and_the_smallest_row_that_makes_it(tmp_path):
    code, report = run(tmp_path, "--job", "rows", subjects="reference,wrong_subjects:Raises", shard="3/30")
    assert code == 1
    assert report["errors"] == []
    found = next(each for each in report["differences"] if each["check"] == "rows")
    assert (found["right"], found["first"]["class"], found["alone"]) == ("wrong", "raised", "different")
    assert "RuntimeError: thirteen is too many" in found["first"]["right"]
    assert "wrong_subjects.py:" in found["first"]["right"]
    assert len(read_case(Path(found["path"])).messages) < 25, "shrunk"


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
