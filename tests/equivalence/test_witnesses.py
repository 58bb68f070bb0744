"""A witness of another version lies beside the project, is imported by a process of its own, and says which files it is made of."""

import json
import sys
from pathlib import Path

import pytest

from equivalence.errors import InputError
from equivalence.subjects import RowSettings, load
from equivalence.subjects.protocol import Refusal, Row
from equivalence.witnesses import store
from equivalence.witnesses.comparison import compare, differing_fields, recorded_cases
from equivalence.witnesses.serve import check_whole, preset_of
from tools.witness.__main__ import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKPROOF_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkout(tmp_path):
    dataset = tmp_path / "checkout" / "megatron" / "training" / "datasets" / "sft_dataset.py"
    dataset.parent.mkdir(parents=True)
    dataset.write_text("")
    return tmp_path / "checkout"


def fake_pip(monkeypatch, *, has_dataset=True):
    """In place of pip: write what a wheel holds, and keep what was asked for."""
    asked = []

    def install(target, *words):
        asked.append(words)
        place = target / "megatron" / "training" / "datasets"
        place.mkdir(parents=True, exist_ok=True)
        if has_dataset:
            (place / "sft_dataset.py").write_text("")

    monkeypatch.setattr(store, "_install", install)
    return asked


def test_a_version_is_installed_without_shared_packages_and_found_by_name(monkeypatch, capsys):
    asked = fake_pip(monkeypatch)
    assert main(["add", "megatron-core==0.18.2"]) == 0
    assert asked == [("--no-deps", "megatron-core==0.18.2")]
    made = store.find("0.18.2")
    assert not made.own_transformers
    assert Path(made.root).is_dir()
    assert made.command.startswith(sys.executable)
    assert main(["list"]) == 0
    assert "megatron_lm@0.18.2" in capsys.readouterr().out
    assert main(["remove", "0.18.2"]) == 0
    assert store.witnesses() == []


def test_a_version_that_needs_transformers_4_gets_its_own(monkeypatch):
    asked = fake_pip(monkeypatch)
    assert store.add("megatron-core==0.17.1").own_transformers
    assert asked[1] == ("transformers>=4.57,<5",)


def test_a_checkout_is_a_witness_and_stays_when_the_witness_goes(checkout):
    assert main(["add", "main", "--source", str(checkout)]) == 0
    assert store.find("main").root == str(checkout)
    store.remove("main")
    assert checkout.is_dir()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["add", "megatron-core"], "must name a version"),
        (["add", "megatron-core==0.16.1"], "ships no"),
        (["add", "a/b", "--source", "."], "a name must be"),
        (["add", "main", "--source", "."], "has no megatron"),
        (["remove", "0.18.2"], "there is no witness"),
        (["compare", "0.18.2"], "packproof witness add megatron-core==0.18.2"),
    ],
)
def test_a_requirement_that_cannot_be_a_witness_is_refused_and_leaves_nothing(words, told, monkeypatch, capsys):
    fake_pip(monkeypatch, has_dataset=False)
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert store.witnesses() == []


def test_a_witness_is_not_made_twice(monkeypatch):
    fake_pip(monkeypatch)
    store.add("megatron-core==0.18.2")
    with pytest.raises(InputError, match="remove it first"):
        store.add("megatron-core==0.18.2")


def test_a_mixture_of_two_versions_is_refused_with_each_file(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    halves = {"megatron.core": str(own / "core.py"), "megatron.training": str(other / "training.py")}
    with pytest.raises(RuntimeError, match="both must come from") as caught:
        check_whole(own, halves)
    assert str(other / "training.py") in str(caught.value)
    check_whole(tmp_path, halves)


def test_the_installed_megatron_lm_is_not_used_for_another_version():
    subject = load("megatron_lm")
    assert subject.covers(RowSettings(pack_length=8, prompt_format="identity", semantics="megatron-lm-main"))
    assert not subject.covers(RowSettings(pack_length=8, prompt_format="identity", semantics="megatron-lm-0.18"))
    assert [preset_of(each) for each in ("0.17.1", "0.18.2", "0.19.2", "0.20.0rc0")] == [
        "megatron-lm-0.17", "megatron-lm-0.18", "megatron-lm-0.19", "megatron-lm-main",
    ]  # fmt: skip


def test_a_comparison_names_the_fields_in_which_rows_differ():
    cases = recorded_cases()[::8]
    reference = load("reference")
    verdicts = {each.preset: each for each in compare(reference, "megatron-lm-0.18", reference, cases=cases)}
    assert verdicts["megatron-lm-0.18"].equal == len(cases)
    assert "target_ids" in verdicts["megatron-lm-main"].fields
    assert "target_ids" in verdicts["megatron-lm-main"].text


def test_refusals_differ_by_kind_and_by_side():
    row = Row(refusal=Refusal(kind="bad_text"))
    assert differing_fields(row, row) == []
    assert differing_fields(row, Row(refusal=Refusal(kind="bad_content"))) == [
        "refused as bad_text, not as bad_content"
    ]
    assert differing_fields(row, Row()) == ["refused as bad_text by the witness alone"]
    assert differing_fields(Row(), row) == ["refused as bad_text by the preset alone"]


def test_a_record_holds_where_the_witness_came_from(checkout):
    store.add("fork", source=checkout)
    (record,) = store.folder().glob("*/witness.json")
    assert json.loads(record.read_text())["made_of"] == str(checkout)


@pytest.mark.parametrize("record", ["{", "[]", "null", '{"x": 1}'])
def test_a_damaged_record_of_a_witness_is_refused_by_name(record, tmp_path):
    path = tmp_path / "cache" / "witnesses" / "own" / "witness.json"
    path.parent.mkdir(parents=True)
    path.write_text(record)
    with pytest.raises(InputError, match=r"own/witness\.json is no record of a witness .*: delete "):
        store.witnesses()
