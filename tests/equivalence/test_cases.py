"""A case survives its JSON, whatever its messages hold."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equivalence.cases.row import CaseError, RowCase, differs_from_expected, read_case
from equivalence.generators import tokenizers
from equivalence.subjects import PROMPT_FORMATS, Refusal, Row, RowSettings, load

# Any code point, halves of surrogate pairs too.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SETTINGS = st.builds(
    RowSettings,
    pack_length=st.integers(1, 1 << 20),
    prompt_format=st.sampled_from(PROMPT_FORMATS),
    context_parallel_size=st.integers(1, 64),
    semantics=st.sampled_from(["strict", "megatron-lm-0.19,row_ends=any"]),
    pad_token=st.none() | TEXT,
    assistant_prefix_len=st.none() | st.just(0),
)
CASES = st.builds(
    RowCase,
    messages=st.lists(JSON, max_size=4).map(tuple),
    settings=SETTINGS,
    tokenizer=st.sampled_from(tokenizers.names()),
    labels=st.lists(st.sampled_from(["length_p", "emoji"]), max_size=2).map(tuple),
    note=TEXT,
    origin=TEXT,
    expected=st.none() | st.just({"refusal": "empty_row"}) | st.just({"input_ids": [1, 2], "max_seqlen": 2}),
)


@given(CASES)
@settings(deadline=None, max_examples=200)
def test_a_case_survives_its_json(case):
    text = case.to_json()
    assert RowCase.from_json(text) == case
    assert text.isascii(), "lone surrogates are escaped, so any file can hold it"
    assert RowCase.from_json(text).to_json() == text, "stable in git"
    assert json.loads(text)["schema"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "schema 'list'"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "mesages": []}', "unknown keys mesages"),
        ('{"schema": 1, "messages": "hello"}', "no list of messages"),
        ('{"schema": 1, "messages": []}', "a case needs messages, settings and tokenizer"),
        ('{"schema": 1, "messages": [], "tokenizer": "word", "settings": {"pack_length": 0}}', "at least 1"),
    ],
)
def test_a_file_that_is_not_a_case_gives_an_error_with_place_and_fault(text, said, tmp_path):
    (tmp_path / "it.json").write_text(text)
    with pytest.raises(CaseError, match=r"it\.json") as error:
        read_case(tmp_path / "it.json")
    assert said in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CaseError, match=r"gone\.json"):
        read_case(tmp_path / "gone.json")


def test_a_case_with_expected_values_compares_the_row_with_them():
    row = load("reference").build_row(
        [{"role": "system", "content": "w0 w1"}],
        tokenizers.load("word"),
        RowSettings(prompt_format="identity", pack_length=2),
    )
    assert differs_from_expected(row, {"input_ids": [12, 13], "token_mask": [1.0, 0.0], "max_seqlen": 2}) == []
    (wrong,) = differs_from_expected(row, {"input_ids": [12, 14]})
    assert (wrong.tensor, wrong.left, wrong.right) == ("input_ids", [12, 14], [12, 13])
    (wrong,) = differs_from_expected(row, {"refusal": "empty_row"})
    assert (wrong.tensor, wrong.left, wrong.right) == ("refusal", "empty_row", None)
    refused = Row(refusal=Refusal(kind="role_order"))
    (wrong,) = differs_from_expected(refused, {"input_ids": [12]})
    assert (wrong.tensor, wrong.left, wrong.right) == ("refusal", None, "role_order")
    assert differs_from_expected(refused, {"refusal": "role_order"}) == []
