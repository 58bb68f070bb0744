"""Faults put into production on purpose: each is found, each check finds some, and the suite's own failures are seen."""

import dataclasses
from pathlib import Path

import pytest

from equivalence.mutants.matrix import CHECKS, Kills, failures, kill_matrix
from equivalence.mutants.row_faults import ROW_MUTANTS, Mutant
from equivalence.subjects import load

SAMPLE = (Path(__file__).parents[2] / "examples" / "packed" / "sample.jsonl.packed", 241)


@pytest.mark.parametrize("mutant", ROW_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_found(mutant):
    (kills,) = kill_matrix([mutant], sample=SAMPLE, first_only=True)
    assert failures([kills], checks=()) == []


def test_every_check_finds_a_fault():
    shift = [mutant for mutant in ROW_MUTANTS if mutant.name == "shift_twice"]
    matrix = list(kill_matrix(shift, sample=SAMPLE))
    assert failures(matrix) == []
    assert set(matrix[0].found) == set(CHECKS)


def test_a_survivor_and_an_idle_check_are_failures():
    kills = Kills(mutant="none", story="nothing is wrong", found=dict.fromkeys(CHECKS, 0))
    assert failures([kills])[0] == "no check finds none: nothing is wrong"
    assert len(failures([kills])) == 1 + len(CHECKS)


def test_production_without_a_fault_is_not_found(monkeypatch):
    sound = Mutant(name="shift_twice", story="")
    monkeypatch.setattr("equivalence.mutants.row_faults.ROW_MUTANTS", (sound,))
    monkeypatch.setattr("equivalence.mutants.matrix.ROW_MUTANTS", (sound,))
    monkeypatch.setattr("equivalence.mutants.matrix.CHECKS", ("corpus", "smallest"))
    monkeypatch.setattr("equivalence.mutants.subjects._BY_NAME", {"shift_twice": sound})
    monkeypatch.setattr("equivalence.runner.job_runners.subject", load)  # the faulty one may be cached under this name
    (kills,) = kill_matrix([sound], sample=None)
    assert kills.survives


def test_a_fault_can_be_named_as_a_side():
    side = load("equivalence.mutants.subjects:no_shift")
    assert side.name == "no_shift"
    assert len({mutant.name for mutant in ROW_MUTANTS}) == len(ROW_MUTANTS) > 12
    with pytest.raises(ValueError, match="has no 'nothing'"):
        load("equivalence.mutants.subjects:nothing")
    assert dataclasses.is_dataclass(side)
