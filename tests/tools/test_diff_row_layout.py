"""Where diff_row says that things stand: conversations, turns, padding, and texts of tokens."""

import unicodedata

import pytest
from diff_row_fakes import REFERENCE, conversation, many
from rich.cells import cell_len

from equivalence.generators.tokenizers import load
from equivalence.subjects import RowSettings
from tools.diff_row.row.layout import map_row
from tools.diff_row.tokens import TokenTexts, fit, visible


def mapped(messages, tokenizer="word", **settings):
    settings = RowSettings(**{"pack_length": 32, "prompt_format": "identity", **settings})
    row = REFERENCE.build_row(messages, load(tokenizer), settings)
    return row, map_row(messages, load(tokenizer), settings, None if row.refusal else row)


def test_turns_by_position():
    _, found = mapped(conversation(0, (1, 2, 3)))
    assert [found.place(position) for position in range(7)] == [
        "0·0 system", "0·1 user", "0·1 user", "0·2 assistant", "0·2 assistant", "0·2 assistant", "0 padding",
    ]  # fmt: skip


@pytest.mark.parametrize("prompt_format", ["nemotron-nano-v2", "nemotron-h-aligned"])
def test_turns_are_those_of_the_reference(prompt_format):
    settings = RowSettings(pack_length=200, prompt_format=prompt_format)
    tokenizer = load("nemotron-mini")
    messages = [*many(3), {"role": "user", "content": "日本語 ünï 👩‍👩‍👧"}, {"role": "assistant", "content": "ok"}]
    built = REFERENCE.build(messages, tokenizer, settings)
    found = map_row(messages, tokenizer, settings, REFERENCE.build_row(messages, tokenizer, settings))
    checked = 0
    for number, segment in enumerate(built.segments):
        for index, turn in enumerate(segment.turns):
            for position in range(segment.start + turn.start, segment.start + turn.end):
                assert (found.conversation_at[position], found.turn_at[position]) == (number, index)
                checked += 1
    assert checked > 60
    assert found.padded.tolist() == built.is_padding[:-1]


def test_a_chat_template_tells_its_turns_where_it_can():
    _, found = mapped(conversation(0), tokenizer="word", prompt_format="default")
    assert {found.role(position) for position in range(3)} <= {"system", None}
    _, raising = mapped([{"role": "tool", "content": "w1"}], tokenizer="raising", prompt_format="default")
    assert raising.conversations[0].tokens is None


def test_states_and_counts_are_those_of_the_report():
    messages = [{"role": "system", "content": ""}, *many(3), {"role": "system", "content": ""}, *many(2)]
    for length in (8, 10, 20, 21, 64):
        row, found = mapped(messages, pack_length=length, context_parallel_size=2)
        states = [conversation.state for conversation in found.conversations]
        assert len(states) == row.report["conversations"] == 7
        assert states.count("truncated") == row.report["truncated"]
        assert sum(c.padding or 0 for c in found.conversations) == row.report["padding_tokens"]
        assert sum(c.trained or 0 for c in found.conversations) == row.report["trained_tokens"]
        assert states[0] == "empty"


def test_a_refused_row_still_lists_its_conversations():
    _, found = mapped([*many(2)], semantics="strict,lost_conversations=refuse", pack_length=4)
    assert [conversation.state for conversation in found.conversations] == ["not built", "not built"]
    assert [conversation.tokens for conversation in found.conversations] == [10, 10]


def test_a_broken_row_does_not_break_the_map():
    for messages in ([{"content": "w1"}], ["w1"], [{"role": "system"}], [{"role": "user", "content": "\ud800"}], []):
        settings = RowSettings(pack_length=8, prompt_format="nemotron-nano-v2")
        assert len(map_row(messages, load("word"), settings, None).conversation_at) == 0


@pytest.mark.parametrize(
    "text", ["\u0301", "\u202e", "\n\t\r", "\x1b[0m", "\u200d", "שלום", "\ufe0f", "🇩🇪", "\u3000", "\ud800"]
)
def test_visible_texts_hide_nothing_and_have_a_width(text):
    shown = visible(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Zl", "Zp", "Cs", "Co"}
    assert [character for character in shown if unicodedata.category(character) == "Cf"] in ([], ["\u200e"])
    assert cell_len(shown) >= 1
    assert cell_len(fit(shown, 12)) == 12
    assert cell_len(fit(shown * 20, 7)) == 7


def test_special_tokens_bytes_and_what_is_no_id():
    mini, word = TokenTexts(load("nemotron-mini")), TokenTexts(load("word"))
    ids = load("nemotron-mini")("日 本", add_special_tokens=False)["input_ids"]
    assert any("\\x" in mini.text(token) for token in ids)
    assert not any("\ufffd" in mini.text(token) for token in ids)
    assert word.text(0) == "<unk>"
    assert word.text(12) == "'w0'"
    assert word.text(-100) == "ignored"
    assert word.text(10**9) == "(no such id)"
    assert TokenTexts(None).text(7) == ""
