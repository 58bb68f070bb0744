"""A seed decides what is drawn, and nothing else does."""

import importlib

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from equivalence.errors import InputError
from equivalence.generators.draws import each_drawn


def test_constants_of_modules_that_happen_to_be_imported_change_no_draw(tmp_path, monkeypatch):
    def drawn():
        values = []
        each_drawn(st.lists(st.integers(0, 10**9), min_size=5), values.append, number=3, examples=100)
        return values

    before = drawn()
    (tmp_path / "full_of_numbers.py").write_text(f"NUMBERS = {[*range(123_456_000, 123_457_000)]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_numbers")
    plain = []

    @seed(3)
    @settings(max_examples=100, database=None)
    @given(st.lists(st.integers(0, 10**9), min_size=20))
    def by_itself(values):
        plain.extend(values)

    by_itself()
    assert any(123_456_000 <= value < 123_457_000 for value in plain), "Hypothesis by itself draws them"
    assert drawn() == before


def test_a_hypothesis_that_keeps_its_constants_elsewhere_is_refused(monkeypatch):
    monkeypatch.delattr(providers, "CONSTANTS_CACHE")
    with pytest.raises(InputError, match=r"CONSTANTS_CACHE has moved.*constraints\.txt"):
        each_drawn(st.integers(), lambda _: None, number=0, examples=1)
