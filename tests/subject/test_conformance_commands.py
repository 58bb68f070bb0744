"""The commands `conformance`, `vectors` and `judge`: screens, files, exit statuses, and the checks of what they read."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import packers
import pytest

from packproof import answers, cases
from packproof.__main__ import main
from packproof.declared import Declared
from packproof.judging import call

SUBJECT = Path(__file__).resolve().parents[2] / "subject"
FEW = ("--sets", "valid", "--drawn", "10", "--preset", "strict")


def test_the_level_that_is_asked_for_decides_the_exit_status(capsys):
    ask = ("conformance", "--subject", "packers:leak", *FEW)
    assert main([*ask, "--level", "L2"]) == 0
    assert "packers:leak reaches L2." in capsys.readouterr().out
    assert main([*ask, "--level", "L3"]) == 1
    screen = capsys.readouterr().out
    assert "packers:leak does not reach L3: L3 (no)." in screen
    again = re.search(r"add --case '(.*)'", screen).group(1)
    assert main(["conformance", "--subject", "packers:leak", "--case", again, "--level", "L3"]) == 1
    assert main(["conformance", "--subject", "packers:right", "--case", again, "--level", "L3"]) == 0


def test_the_preset_is_what_the_function_declares_unless_one_is_given(capsys, monkeypatch):
    few = ["conformance", "--subject", "packers:right", "--sets", "none", "--drawn", "2", "--level", "L1"]
    for semantics, preset in ((None, "megatron-lm-0.19"), (["my-own", "strict"], "strict")):
        monkeypatch.setattr(packers.right, "semantics", semantics, raising=False)
        assert main(few) == 0
        assert f"held to {preset}\n" in capsys.readouterr().out
    assert main([*few, "--preset", "nemo-rl-direct"]) == 0
    assert "held to nemo-rl-direct\n" in capsys.readouterr().out
    declared = Declared(level="L1", preset="megatron-lm-0.17")
    monkeypatch.setattr(packers.right, "packproof_conformance", declared, raising=False)
    assert main(few) == 0
    assert "held to megatron-lm-0.17\n" in capsys.readouterr().out


def test_the_help_names_the_presets(capsys):
    with pytest.raises(SystemExit):
        main(["conformance", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--semantics" in text
    assert "megatron-lm-0.17" in text
    assert "what the subject declares as its semantics" in text


def test_the_report_is_written_in_three_forms(tmp_path, capsys):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "markdown")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    assert main(["conformance", "--subject", "packers:positions_go_on", *FEW, *options]) == 1
    report = json.loads(files["json"].read_text())
    missed = [each for each in report["levels"] if each["result"] == "no" and each["level"] != "L10"]
    assert [each["level"] for each in missed] == ["L4"]
    assert missed[0]["miss"]["case"]["conversations"]
    assert report["reached"] is False
    suite = ET.parse(files["junit"]).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("10", "1")
    assert suite.find("testcase/failure").text.startswith("L4")
    assert "| L4 | positions restart | no |" in files["markdown"].read_text()
    capsys.readouterr()
    assert main(["conformance", "--subject", "packers:right", *FEW, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["reached"] is True


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--subject", "packers"], "--subject must be module:function"),
        (["--subject", "packers:no_such"], "has no function 'no_such'"),
        (["--subject", "no_such_module:f"], "cannot be imported"),
        (["--subject", "raises_at_import:f"], "raised ZeroDivisionError at import"),
        (["--subject", "packers:lacks_a_library"], "the subject cannot run here: No module named 'no_such_library'"),
        (["--subject", "packers:right", "--level", "L12"], "choose one of L1"),
        (["--subject", "packers:right", "--preset", "stict"], "--preset must be one of"),
        (["--subject", "packers:right", "--convention", "shift"], "NAME=VALUE"),
        (["--subject", "packers:right", "--convention", "shift=modle"], "did you mean 'model'"),
        (
            ["--subject", "packers:right", "--sets", "vald"],
            "--sets must list only valid, divergent, refused or none, got vald",
        ),
        (["--subject", "packers:right", "--sets", "none", "--drawn", "0"], "no case is left"),
        (["--subject", "packers:right", "--case", "{"], "--case is not JSON"),
        (["--subject", "packers:right", "--case", "{}"], "--case is not a case"),
    ],
)
def test_bad_input_is_reported_in_one_line(options, told, capsys):
    assert main(["conformance", *options]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_answers_in_a_file_are_judged_as_the_function_is(tmp_path, capsys):
    assert main(["vectors", str(tmp_path)]) == 0
    assert "281 cases" in capsys.readouterr().out
    asked = cases.load_vectors(tmp_path)
    assert asked == cases.load_vectors()
    file = tmp_path / "answers.jsonl"
    answers.write_answers(file, [(case, call(packers.right, case)) for case in asked], packers.CONVENTIONS)
    assert main(["judge", str(file), "--level", "L9", "--preset", "strict"]) == 0
    assert "reaches L9" in capsys.readouterr().out
    answers.write_answers(file, [(case, call(packers.one_segment, case)) for case in asked], packers.CONVENTIONS)
    assert main(["judge", str(file), "--vectors", str(tmp_path), "--level", "L5"]) == 1
    assert "does not reach L5: L5 (no)" in capsys.readouterr().out


def test_one_case_is_counted_as_one(tmp_path):
    (tmp_path / "answers.jsonl").write_text("")
    with pytest.raises(cases.VectorsError, match="answers 0 of 1 case; the first"):
        answers.read_answers(tmp_path / "answers.jsonl", cases.load_vectors()[:1])


def test_answers_that_leave_a_case_out_or_cannot_be_read_are_refused(tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    for text, told in (
        ('{"id": "v1-0000", "packs": []}\n', "answers 1 of 281 cases; the first without an answer is v1-0001"),
        ('{"id": "v1-9999", "packs": []}\n', "line 1: no case has the id 'v1-9999'"),
        ('{"id": "v1-0000", "packs": []}\n' * 2, "line 2: id 'v1-0000' is there twice"),
        ('{"id": "v1-0000"}\n', "needs either `packs` or `refused`"),
        ("[]\n", "line 1 must be an object"),
        ("{\n", "line 1 is not JSON"),
    ):
        file.write_text(text)
        assert main(["judge", str(file)]) == 2
        assert told in capsys.readouterr().err
    assert main(["judge", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_vectors_that_were_changed_are_refused(tmp_path, capsys):
    main(["vectors", str(tmp_path)])
    path = tmp_path / "vectors.jsonl"
    path.write_text(path.read_text().replace('"pad_id":0', '"pad_id":1', 1))
    capsys.readouterr()
    assert main(["judge", str(path), "--vectors", str(tmp_path)]) == 2
    assert "is not the file that manifest.json names" in capsys.readouterr().err
    about = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**about, "format": 2}))
    assert main(["judge", str(path), "--vectors", str(tmp_path)]) == 2
    assert "has format 2, this packproof reads 1" in capsys.readouterr().err


def test_the_vectors_are_small_and_cover_every_layout():
    files = list(cases.FOLDER.glob("*.gz"))
    assert sum(len(gzip.decompress(path.read_bytes())) for path in files) <= 5_000_000
    found = cases.load_vectors()
    assert {case.set for case in found} == set(cases.SETS)
    assert {case.context_parallel_size for case in found} == {1, 2, 3, 4, 8}
    assert {case.meta["depths"] for case in found} == {0, 1, 2, 3}
    assert len({case.id for case in found}) == len(found)
    messages = [json.loads(line) for line in cases.read_lines(cases.FOLDER, "messages.jsonl")]
    assert [each["id"] for each in messages] == [case.id for case in found]


def test_the_small_package_needs_the_standard_library_alone():
    code = (
        "import sys; from packproof.__main__ import main; import packproof\n"
        "status = main(['conformance', '--subject', 'packers:right', '--sets', 'valid', '--preset', 'strict', '--level', 'L9'])\n"
        "assert status == 0, status\n"
        "assert not {'torch', 'numpy', 'equivalence', 'pytest'} & set(sys.modules)\n"
    )
    environment = {"PYTHONPATH": f"{SUBJECT}:{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
