"""The installed Megatron-LM as a subject: which preset it ships, its refusals by kind, its own file reader."""

import json

import pytest

from equivalence.generators.tokenizers import load
from equivalence.subjects import BUILT_IN, RowSettings
from equivalence.subjects import load as load_subject
from equivalence.subjects.megatron_lm import masks_identity
from equivalence.subjects.tokenizers import as_transformers, folder_of

MEGATRON = load_subject("megatron_lm")
OLD, MAIN = "megatron-lm-0.19", "megatron-lm-main"


def say(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def build(messages, tokenizer="word", **settings):
    settings = {"prompt_format": "identity", "pack_length": 16} | settings
    return MEGATRON.build_row(messages, load(tokenizer), RowSettings(**settings))


def test_the_installed_package_is_named():
    assert MEGATRON.version.startswith("megatron-core 0.19.")
    assert masks_identity(folder_of(load("word"))) is False  # 0.18 to 0.19.2 train the prompt


def test_both_presets_of_identity():
    messages = say(("system", "w0 "), ("user", "w1 "), ("assistant", "w2 w3 "))
    assert build(messages, pack_length=4).target_ids.tolist() == [13, 14, 15, 0]
    assert build(messages, pack_length=4, semantics=MAIN).target_ids.tolist() == [-100, 14, 15, 0]


def test_the_subject_refuses_semantics_of_other_paths():
    for name in ("nemo-rl-direct", "strict", f"{OLD},row_ends=system_to_assistant"):
        assert not MEGATRON.covers(RowSettings(pack_length=4, semantics=name))
        with pytest.raises(ValueError, match="not a witness of the semantics"):
            build(say(("user", "w0")), semantics=name)


REFUSALS = {
    "empty_row": ([], {}),
    "bad_message": ([{"content": "w0"}], {}),
    "bad_content": ([{"role": "user", "content": None}], {"prompt_format": "nemotron-nano-v2"}),
    "bad_text": (say(("user", "\ud800")), {}),
    "template_error": (say(("critic", "w0")), {"prompt_format": "default", "tokenizer": "raising"}),
    "no_chat_template": (say(("user", "w0")), {"prompt_format": "default", "tokenizer": "plain"}),
    "no_pad_token": (say(("user", "ab")), {"tokenizer": "plain"}),
    "empty_assistant": (say(("user", "w0 "), ("assistant", "")), {"semantics": MAIN}),
    "role_order": (say(("assistant", "w0 "), ("assistant", "w0 ")), {"semantics": MAIN}),
    "unknown_role": (say(("critic", "w0 ")), {"semantics": MAIN}),
    "turn_mismatch": (say(("user", "w0"), ("assistant", "w1")), {"semantics": MAIN}),
    "too_many_boundaries": (say(("system", "w0"), ("system", "w0"), ("system", "w0")), {"pack_length": 2}),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_has_its_kind(kind):
    messages, settings = REFUSALS[kind]
    assert build(messages, **settings).refusal.kind == kind


def test_a_set_of_named_templates_is_a_template_error_on_every_side(tmp_path):
    load("word").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    named = [{"name": name, "template": "{{ messages[0]['content'] }}"} for name in ("default", "tool_use")]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name in BUILT_IN:
        built = load_subject(name).build_row(
            say(("user", "w0")), tmp_path, RowSettings(pack_length=4, prompt_format="default")
        )
        assert built.refusal.kind == "template_error"


def test_an_empty_template_is_one(tmp_path):
    load("word").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("")
    for name in BUILT_IN:
        built = load_subject(name).build_row(
            say(("user", "w0")), tmp_path, RowSettings(pack_length=4, prompt_format="default")
        )
        assert built.refusal.kind == "empty_row"


def test_an_error_that_spec_does_not_know_is_not_a_refusal(monkeypatch):
    def broken(*_, **__):
        raise OSError("disk")

    monkeypatch.setattr(
        "megatron.core.tokenizers.text.libraries.sft_tokenizer.SFTTokenizer.tokenize_conversation", broken
    )
    with pytest.raises(OSError, match="disk"):
        build(say(("user", "w0")))


def test_overrides_of_pad_token_and_prefix():
    messages = say(("user", "w0"), ("assistant", "w1 w2"))
    assert build(messages, pad_token="<pad>").input_ids.tolist()[-1] == 3
    plain = build(messages, prompt_format="nemotron-nano-v2")
    longer = build(messages, prompt_format="nemotron-nano-v2", assistant_prefix_len=4)
    assert int(plain.token_mask.sum()) == int(longer.token_mask.sum()) + 1
    assert build(messages, prompt_format="nemotron-nano-v2").target_ids.equal(plain.target_ids)  # no override stays


def test_megatron_lms_own_reader_reads_a_file(tmp_path):
    path = tmp_path / "rows.jsonl.packed"
    rows = [say(("system", "w0")), say(("system", ""), ("user", "w1 w2"))]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    settings = RowSettings(pack_length=3, prompt_format="identity")
    read = MEGATRON.open_file(path, load("word"), settings)
    assert [row.input_ids.tolist() for row in read] == [[12, 0, 0], [13, 14, 0]]
    with pytest.raises(FileNotFoundError, match="no such file"):
        MEGATRON.open_file(tmp_path / "none.jsonl", load("word"), settings)


def test_a_tokenizer_by_folder_or_saved_for_the_purpose(tmp_path):
    load("word").save_pretrained(tmp_path)
    loaded = as_transformers(tmp_path)
    assert folder_of(loaded) == tmp_path.resolve()
    loaded.name_or_path = ""
    assert (folder_of(loaded) / "tokenizer.json").is_file()
    with pytest.raises(FileNotFoundError, match="tokenizer_config"):
        as_transformers(tmp_path / "nowhere")
