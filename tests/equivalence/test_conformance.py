"""The suite's own sides under the conformance levels, and the test vectors against what makes them."""

import dataclasses
import sys
from pathlib import Path

import pytest

from equivalence.conformance import layouts, vectors, witnesses
from equivalence.errors import InputError
from equivalence.generators import tokenizers
from equivalence.subjects import load
from packproof.cases import FOLDER, drawn_cases, load_vectors, manifest, read_lines
from packproof.judging import conformance_of
from tools import conformance

MEGATRON_COLUMN = {
    **dict.fromkeys(("L1", "L4", "L9", "L10"), ("yes", "")),
    **dict.fromkeys(("L2", "L3", "L5", "L7"), ("no", "")),
    "L6": ("no", "only at cp > 1"),
    "L8": ("no", "only where 2·cp does not divide the pack length"),
}
"""Megatron-LM 0.19: the by-value mask, labels across boundaries, empty segments, padding that trains, conversations that a full row loses."""


def column(name, preset, cases):
    pack, conventions = witnesses.load(name)
    report = conformance_of(pack, cases, subject=name, conventions=conventions, preset=preset, smallest=False)
    assert report.undeclared == {}
    return {each.level.name: (each.status, each.note) for each in report.levels}


@pytest.mark.parametrize("side", witnesses.SIDES)
def test_every_side_of_megatron_lm_comes_out_as_megatron_lm(side):
    cases = [*load_vectors()[::3], *drawn_cases(30)]
    assert column(side, "megatron-lm-0.19", cases) == MEGATRON_COLUMN


@pytest.mark.parametrize("side", ["reference", "production"])
def test_the_strict_preset_passes_every_level(side):
    cases = [*load_vectors()[::3], *drawn_cases(30)]
    assert set(column(f"{side}@strict", "strict", cases).values()) == {("yes", "")}


def test_nemo_rls_direct_path_misses_the_by_value_mask_alone():
    cases = [*load_vectors()[::2], *drawn_cases(30)]
    found = column("reference@nemo-rl-direct", "nemo-rl-direct", cases)
    assert [name for name, (status, _) in found.items() if status != "yes"] == ["L2"]


def test_messages_become_exactly_the_tokens_and_what_trains():
    settings = witnesses.settings_for("strict", 64, 0, 1)
    tokenizer = tokenizers.load(witnesses.TOKENIZER)
    for case in drawn_cases(40):
        (each, *_) = case.conversations
        row = load("reference").build(witnesses.messages_of(each), tokenizer, settings)
        length = len(each["tokens"])
        assert row.input_ids.tolist()[:length] == each["tokens"]
        assert [int(mask) for mask in row.token_mask.tolist()[: length - 1]] == each["trained"][1:]
    with pytest.raises(InputError, match="token 5000 has no word"):
        witnesses.messages_of({"tokens": [5000], "trained": [1]})


def test_the_checked_in_vectors_are_what_the_three_sides_build_today():
    part = layouts.cases()[5::31]
    lines = read_lines(FOLDER, "vectors.jsonl")
    messages = read_lines(FOLDER, "messages.jsonl")
    assert manifest()["cases"] == len(layouts.cases()) == len(lines)
    made = vectors.generate(part)
    assert len(made) > 8
    for case in made:
        number = int(case.id.split("-")[1])
        assert vectors.line_of(case).rstrip("\n") == lines[number]
        assert vectors.messages_line(case).rstrip("\n") == messages[number]


def test_the_same_cases_give_the_same_bytes(tmp_path):
    cases = [dataclasses.replace(case, set="valid") for case in layouts.cases()[:4]]
    for name in ("a", "b"):
        vectors.write(tmp_path / name, cases)
    for file in ("vectors.jsonl.gz", "messages.jsonl.gz", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_no_vector_is_written_where_the_sides_differ(monkeypatch):
    from equivalence.subjects import production

    build = production.Production.build_row

    def wrong(self, *arguments):
        row = build(self, *arguments)
        row.input_ids[0] += 1
        return row

    monkeypatch.setattr(production.Production, "build_row", wrong)
    with pytest.raises(vectors.VectorError, match=r"v1-0000 under megatron-lm-0\.19: the sides differ"):
        vectors.generate(layouts.cases()[:1])


def test_an_adapter_in_another_process_is_judged_like_a_function(capsys):
    adapter = Path(__file__).parents[1] / "subject" / "adapter.py"
    options = [
        "--subject",
        f'exec:{sys.executable} "{adapter}"',
        "--sets",
        "valid",
        "--drawn",
        "5",
        "--preset",
        "strict",
    ]
    assert conformance.main([*options, "--level", "L9"]) == 0
    assert "reaches L9" in capsys.readouterr().out


def test_l10_is_about_the_semantics_that_a_subject_declares_unless_a_preset_is_given(capsys):
    example = Path(__file__).parents[2] / "examples" / "adapters" / "plain_packer.py"
    case = '{"conversations":[{"tokens":[8,9],"trained":[0,1]}],"pack_length":4,"context_parallel_size":1,"pad_id":0,"eos_id":2}'
    for subject in (f'exec:{sys.executable} "{example}"', "reference@strict"):
        few = ["--subject", subject, "--case", case, "--level", "L1"]
        conformance.main(few)
        assert "held to strict\n" in capsys.readouterr().out
        conformance.main([*few, "--semantics", "megatron-lm-0.19"])
        assert "held to megatron-lm-0.19\n" in capsys.readouterr().out


def test_a_side_of_the_suite_is_a_subject_and_an_unknown_one_is_reported(capsys):
    assert (
        conformance.main(["--subject", "reference@strict", "--preset", "strict", "--level", "L10", "--drawn", "5"]) == 0
    )
    assert conformance.main(["--subject", "megatron_lm@strict"]) == 2
    assert "megatron_lm cannot be a witness of 'strict'" in capsys.readouterr().err
    assert conformance.main(["--subject", "reference@stict"]) == 2
