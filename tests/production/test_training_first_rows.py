"""R-SETUP-22: the first lines of a job's files, looked at before a run and in a dry run."""

import gzip
import json
from pathlib import Path

import pytest

from equivalence.generators import tokenizers
from production.training.__main__ import main
from production.training.config import load
from production.training.data.first_rows import check_first_rows

BASE = Path(__file__).parent / "jobs" / "base.yaml"
TOKENIZER = Path(__file__).parents[2] / "examples" / "tokenizers" / "nemotron-mini"
ONLINE = [
    "data.train.dataset_name=openai_format",
    "policy.sequence_packing.enabled=true",
    "loss.normalization=global_valid_tokens",
    "data.train.megatron_sft_prompt_format=identity",
]
SYSTEM, USER, ANSWER = (
    {"role": "system", "content": ""},
    {"role": "user", "content": "w1 "},
    {"role": "assistant", "content": "w2 "},
)
ONE, SEVERAL = [SYSTEM, USER, ANSWER], [SYSTEM, USER, ANSWER, SYSTEM, USER, ANSWER]
NOTE_ON_LONG = "is cut to a stub that trains nothing"


@pytest.fixture
def looked(tmp_path):
    """Looks at a job over a file of these rows; gives what is refused and what is noted."""

    def at(rows, *overrides, name="rows.jsonl", tokenizer=None, manifest=False):
        path = tmp_path / name
        text = "".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        if manifest:
            (tmp_path / f"{name}.manifest.json").write_text("{}")
        found = check_first_rows(load(BASE, [f"data.train.data_path={path}", *overrides]), tokenizer)
        assert not list(tmp_path.glob("*.index*")), "nothing is written"
        return [str(each) for each in found.refusals], found.notes

    return at


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_r_setup_22_a_packed_file_on_the_online_path_is_refused(looked, name):
    (refused,), _ = looked([SEVERAL, SEVERAL], *ONLINE, name=name)
    assert "it is packed (every line has several system messages)" in refused
    assert "set dataset_name to megatron_sft_packed" in refused
    (refused,), _ = looked([ONE, ONE], *ONLINE, name=name, manifest=True)
    assert "it is packed (a manifest of packed rows lies beside it)" in refused


def test_some_lines_of_several_system_messages_are_a_note_online(looked):
    refused, (note, *_) = looked([ONE, SEVERAL, ONE], *ONLINE)
    assert refused == []
    assert "several system messages stand in line 2" in note


def test_a_chat_file_on_the_direct_path_is_a_note(looked):
    refused, (note,) = looked([ONE, ONE])
    assert refused == []
    assert "each of its first 2 lines is one conversation" in note
    assert "packproof-pack-rows" in note
    assert looked([ONE, SEVERAL]) == ([], [])
    assert looked([ONE, ONE], name="packed.jsonl", manifest=True) == ([], [])


def test_settings_without_a_value_are_noted_online(looked):
    _, notes = looked([ONE], *ONLINE)
    assert [NOTE_ON_LONG in note for note in notes] == [True]
    assert looked([ONE], *ONLINE, "data.on_long_conversation=mask_out")[1] == []
    word = tokenizers.load("word")
    kept, word.bos_token = word.bos_token, None
    try:
        _, notes = looked([ONE], *ONLINE, "data.on_long_conversation=refuse", tokenizer=word)
    finally:
        word.bos_token = kept
    assert notes == ["data.add_bos is true and the tokenizer has no BOS token: none is added, as in NeMo-RL"]


def test_r_setup_22_conversations_that_become_other_tokens_are_refused_with_their_line(looked):
    merging = [USER, {"role": "user", "content": "w1"}, {"role": "assistant", "content": "2"}]
    (refused,), _ = looked([ONE, merging], *ONLINE, tokenizer=tokenizers.load("word"))
    assert "rows.jsonl, line 2, message 1" in refused
    assert "data.on_unjoined_pieces to allow" in refused
    allowed = "data.on_unjoined_pieces=allow"
    assert looked([ONE, merging], *ONLINE, allowed, tokenizer=tokenizers.load("word"))[0] == []
    with_tools = {"messages": ONE, "tools": [{"name": "w3"}]}
    (refused,), _ = looked([with_tools], *ONLINE, tokenizer=tokenizers.load("word"))
    assert "renders no tools" in refused
    assert looked([with_tools], *ONLINE, "data.train.tool_key=null", tokenizer=tokenizers.load("word"))[0] == []


def test_r_file_14_a_message_that_only_calls_tools_needs_no_content_online(looked):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "w3"}]}
    refused, _ = looked([[USER, call]], *ONLINE, tokenizer=tokenizers.load("word"))
    assert ["renders no tools, and the line has tool calls" in each for each in refused] == [True]


def test_a_dry_run_refuses_what_a_run_would(tmp_path, capsys):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": ONE}) + "\n" for _ in range(8)))
    forgetting = "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}"
    online = [*ONLINE[:3], f"data.train.data_path={path}", f"policy.tokenizer.name={TOKENIZER}"]
    online += ["data.train.megatron_sft_prompt_format=null"]
    arguments = [
        "--config",
        str(BASE),
        "--dry-run",
        *online,
        f"policy.tokenizer.chat_template={json.dumps(forgetting)}",
    ]
    assert main(arguments) == 2
    assert "no longer renders what it rendered before" in capsys.readouterr().err
    assert main([*arguments, "data.on_unjoined_pieces=allow"]) == 0
    assert NOTE_ON_LONG in capsys.readouterr().out
    assert not list(tmp_path.glob("chat.jsonl.*"))
