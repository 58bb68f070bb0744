"""The registry: each entry shows in its smallest row, on every side, exactly as predicted; a wrong one is found."""

import dataclasses
import itertools

import pytest
import torch

from equivalence.checks.input.files import LAYERS, check_file_layers
from equivalence.checks.rows.divergences import check_divergences, check_smallest, label
from equivalence.divergences.registry import REGISTRY, steps_between
from equivalence.generators.tokenizers import load
from equivalence.subjects import BUILT_IN, RowSettings
from equivalence.subjects import load as load_subject
from reference.semantics import PRESETS, Semantics

SUBJECTS = [load_subject(name) for name in BUILT_IN]


@pytest.mark.parametrize("entry", REGISTRY, ids=label)
def test_r_diverge_1_an_entry_shows_in_its_smallest_row(entry):
    result = check_smallest(entry, load(entry.tokenizer), SUBJECTS)
    assert result.findings == []
    assert result.fired == {label(entry): 1}


@pytest.mark.parametrize("entry", REGISTRY, ids=label)
def test_r_diverge_1_an_entry_that_predicts_wrongly_is_found(entry):
    wrong = dataclasses.replace(entry, predict=lambda facts: facts.outcome)
    assert check_smallest(wrong, load(entry.tokenizer), SUBJECTS).findings


def test_r_diverge_1_a_prediction_off_by_one_position_is_found():
    (entry,) = [entry for entry in REGISTRY if entry.field == "boundary_label"]

    def off_by_one(facts):
        row = entry.predict(facts)
        return dataclasses.replace(row, target_ids=torch.roll(row.target_ids, 1))

    assert check_smallest(dataclasses.replace(entry, predict=off_by_one), load("word"), SUBJECTS).findings


def test_every_pair_of_presets_is_joined_by_entries():
    for left, right in itertools.permutations(PRESETS, 2):
        fields = [
            field.name
            for field in dataclasses.fields(Semantics)
            if getattr(PRESETS[left], field.name) != getattr(PRESETS[right], field.name)
        ]
        assert [step.entry.field for step in steps_between(left, right)] == fields


def test_every_field_has_an_entry_for_every_pair_of_its_values():
    seen = {(entry.field, frozenset((entry.permissive, entry.strict))) for entry in REGISTRY}
    for field, values in (
        (field.name, {getattr(p, field.name) for p in PRESETS.values()}) for field in dataclasses.fields(Semantics)
    ):
        for pair in itertools.combinations(sorted(values), 2):
            assert (field, frozenset(pair)) in seen


def test_a_field_without_an_entry_is_an_error(monkeypatch):
    monkeypatch.setattr("equivalence.divergences.registry.REGISTRY", ())
    with pytest.raises(LookupError, match="the registry has no entry for identity_prompt"):
        steps_between("megatron-lm-0.19", "megatron-lm-main")


ROWS = [
    [("system", "w0 "), ("user", "w1 "), ("assistant", "w2 zzz w3 ")] * 2,
    [("system", "w0 "), ("user", "w1 "), ("assistant", "w2 "), ("system", ""), ("assistant", "w2"), ("user", "w3")],
    [("user", "w0"), ("Assistant", "w1"), ("tool", "w2"), ("critic", "w3")],
]


@pytest.mark.parametrize(("left", "right"), list(itertools.permutations(PRESETS, 2)))
def test_rows_with_several_divergences_at_once(left, right):
    for turns, prompt_format, cp in itertools.product(ROWS, ("identity", "nemotron-nano-v2"), (1, 2)):
        messages = [{"role": role, "content": content} for role, content in turns]
        settings = RowSettings(pack_length=8, prompt_format=prompt_format, context_parallel_size=cp)
        assert check_divergences(messages, load("word"), settings, SUBJECTS, presets=(left, right)).findings == []


def test_file_layers_are_as_registered(tmp_path):
    results = list(check_file_layers(tmp_path))
    assert len(results) == len(LAYERS) > 20
    assert [(layer.name, result.findings) for layer, result in results if not result.equal] == []
    assert sum(layer.diverges for layer in LAYERS) > 15
    assert all(bool(layer.why) is layer.diverges for layer in LAYERS)
