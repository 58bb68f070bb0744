"""Packing says which tokens train: counts are those of Megatron-LM's own rows, and what is not what the user meant is refused or told."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from equivalence.generators import tokenizers
from equivalence.subjects import RowSettings, load
from production.errors import PackproofError
from tools.pack_rows import PackSettings, lengths, main, pack_files
from tools.pack_rows.output import manifest_path

MINI = Path(__file__).parents[2] / "examples" / "tokenizers" / "nemotron-mini"
SYSTEM = {"role": "system", "content": ""}


@pytest.fixture(autouse=True)
def _load_once(monkeypatch):
    monkeypatch.setattr(lengths, "load_folder", load_cached)


load_cached = functools.cache(lengths.load_folder)


def chat(*turns, **last):
    """A conversation of user and assistant turns in alternation; `last` are keys of its last message."""
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    messages[-1] |= last
    return [SYSTEM, *messages]


def write(path, conversations, **beside):
    path.write_text("".join(json.dumps({"messages": each, **beside}) + "\n" for each in conversations))
    return path


CONVERSATIONS = [
    chat("Which numbers?", "One, two and three of them."),
    chat("a", "b <unk> c", "d", "<unk>"),
    chat("What ends an answer?", "This: <SPECIAL_12> and </s>"),
    chat("Tell me something long.", "word " * 90),
    chat("/think of a path like https://a.b/thinking", "yes /think"),
    chat("x", "y" * 37, "z", "0123456789"),
]


@pytest.mark.parametrize("prompt_format", ["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"])
@pytest.mark.parametrize("cp", [1, 2])
def test_the_tokens_counted_as_trained_are_those_that_megatron_lms_rows_train(tmp_path, prompt_format, cp):
    """R-COUNT-1: after cutting, shifting and masking: 72 tokens a row cut one conversation, and hold several of the others."""
    settings = PackSettings(
        prompt_format=prompt_format, pack_length=72, on_long="truncate", context_parallel_size=cp, on_bad="skip"
    )
    packing = pack_files([write(tmp_path / "chat.jsonl", CONVERSATIONS)], MINI, settings)
    judge, tokenizer = load("megatron_lm"), load_cached(MINI)
    rows = [
        judge.build_row(
            [message for conversation in row for message in json.loads(f"[{conversation.json}]")],
            tokenizer,
            RowSettings(prompt_format=prompt_format, pack_length=72, context_parallel_size=cp),
        )
        for row in packing.rows
    ]
    counts = packing.counts()
    assert counts["trained_tokens"] == sum(int(row.token_mask.sum()) for row in rows) > 100
    assert counts["rows_that_train_nothing"] == sum(not row.token_mask.any() for row in rows)
    assert counts["conversations_truncated"] > 0
    assert counts["conversation_tokens"] - counts["truncated_tokens"] < sum(len(row.input_ids) for row in rows)
    assert len(rows) < counts["conversations_packed"]


@pytest.mark.parametrize(
    "semantics", ["strict,row_ends=any", "nemo-rl-direct", "megatron-lm-main,boundary_label=ignore"]
)
def test_what_a_preset_masks_is_not_counted(tmp_path, semantics):
    settings = PackSettings(
        prompt_format="identity", semantics=semantics, pack_length=72, on_long="truncate", on_bad="skip"
    )
    packing = pack_files([write(tmp_path / "chat.jsonl", CONVERSATIONS)], MINI, settings)
    build = load("reference").build_row
    rows = [
        build(
            [message for conversation in row for message in json.loads(f"[{conversation.json}]")],
            load_cached(MINI),
            RowSettings(prompt_format="identity", pack_length=72, semantics=semantics),
        )
        for row in packing.rows
    ]
    assert all(row.refusal is None for row in rows)
    assert packing.counts()["trained_tokens"] == sum(int(row.token_mask.sum()) for row in rows) > 50


def test_rows_that_a_job_refuses_because_they_are_cut_are_not_packed():
    with pytest.raises(PackproofError, match="lost_conversations=refuse"):
        PackSettings(
            prompt_format="identity",
            pack_length=8,
            on_long="truncate",
            semantics="megatron-lm-0.19,lost_conversations=refuse",
        )


@pytest.mark.parametrize("preset", ["megatron-lm-0.19", "strict"])
@pytest.mark.parametrize(
    ("tokenizer", "prompt_format", "why"),
    [
        ("only-unk", "nemotron-nano-v2", "its marker <SPECIAL_11> is 11 tokens of this tokenizer, not one"),
        ("only-unk", "nemotron-h-aligned", "its marker <SPECIAL_10> is 11 tokens of this tokenizer, not one"),
        (
            "bytes",
            "nemotron-nano-v2",
            r"'<SPECIAL_11>Assistant\n' is 8 tokens of this tokenizer, and the assistant prefix",
        ),
    ],
)
def test_a_format_is_refused_for_a_tokenizer_that_lacks_its_markers(
    tmp_path, capsys, preset, tokenizer, prompt_format, why
):
    file, out = write(tmp_path / "chat.jsonl", CONVERSATIONS[:1]), tmp_path / "out.packed"
    folder = tokenizers.folder(tokenizer)
    arguments = [
        str(file), "--tokenizer", str(folder), "--pack-length", "256", "--out", str(out),
        "--prompt-format", prompt_format, "--semantics", f"{preset},unknown_pad_token=unk",
    ]  # fmt: skip
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert why in said
    assert str(folder) in said
    assert "--allow-format-misfit" in said
    assert not out.exists()
    if (preset, tokenizer) == (
        "megatron-lm-0.19",
        "bytes",
    ):  # who means it says so, and reads in the manifest that it was said
        assert main([*arguments, "--allow-format-misfit"]) == 0
        report = json.loads(manifest_path(out).read_text())
        assert "does not fit" in report["notes"]["format_misfit"]
        assert report["settings"]["allow_format_misfit"] is True


@pytest.mark.parametrize(
    ("last", "prompt_format", "kind"),
    [
        ({"weight": 0}, "nemotron-nano-v2", "training_key"),
        ({"weight": 0.5}, "nemotron-nano-v2", "training_key"),
        ({"train": False}, "identity", "training_key"),
        ({"trainable": "no"}, "default", "training_key"),
        ({"loss": False}, "nemotron-h-aligned", "training_key"),
        ({"masked": True}, "nemotron-nano-v2", "training_key"),
        ({"reasoning_content": "I think"}, "nemotron-nano-v2", "unread_key"),
        ({"reasoning_content": "I think"}, "default", "unread_key"),
        ({"tool_calls": [{"name": "f"}]}, "identity", "unread_key"),
        # What a row does anyway is honoured, and what says nothing says nothing.
        ({"weight": 1, "train": True, "loss": 1.0, "masked": False}, "nemotron-nano-v2", None),
        ({"weight": None, "reasoning_content": "", "tool_calls": []}, "nemotron-nano-v2", None),
        ({"id": 7, "name": "x"}, "nemotron-nano-v2", None),
    ],
)
def test_keys_that_a_row_would_ignore_are_refused_by_name(tmp_path, last, prompt_format, kind):
    """R-KEYS-1 and 2."""
    file = write(tmp_path / "chat.jsonl", [chat("a", "b", **last)])
    settings = {"prompt_format": prompt_format, "pack_length": 64, "on_bad": "skip"}
    refused = pack_files([file], MINI, PackSettings(**settings)).refused
    assert [each.kind for each in refused] == ([] if kind is None else [kind])
    for each in refused:
        assert next(iter(last)) in each.detail
        assert "message 2" in each.detail
        assert "--ignore-keys" in each.detail
    ignoring = pack_files([file], MINI, PackSettings(**settings, ignore_keys=tuple(last)))
    assert ignoring.refused == ()


def test_a_prompt_that_is_to_train_is_refused_where_prompts_do_not(tmp_path):
    turns = chat("a", "b")
    file = write(tmp_path / "chat.jsonl", [[turns[0], turns[1] | {"weight": 1}, turns[2]]])
    for prompt_format, kinds in (("nemotron-nano-v2", ["training_key"]), ("identity", [])):
        packing = pack_files([file], MINI, PackSettings(prompt_format=prompt_format, pack_length=64, on_bad="skip"))
        assert [each.kind for each in packing.refused] == kinds


@pytest.mark.parametrize(
    ("beside", "kind"),
    [
        ({"weight": 0.5}, "training_key"),
        ({"loss_mask": [0, 1]}, "training_key"),
        ({"tools": [{"name": "f"}]}, "unread_key"),
        ({"system": "Be kind."}, "unread_key"),
        ({"tools": [], "weight": 1, "id": 3}, None),
    ],
)
def test_keys_beside_the_messages_are_refused_by_name(tmp_path, beside, kind):
    file = write(tmp_path / "chat.jsonl", CONVERSATIONS[:1], **beside)
    settings = PackSettings(prompt_format="nemotron-nano-v2", pack_length=64, on_bad="skip")
    refused = pack_files([file], MINI, settings).refused
    assert [each.kind for each in refused] == ([] if kind is None else [kind])


def test_a_template_that_reads_a_key_honours_it(tmp_path):
    folder = Path(shutil.copytree(MINI, tmp_path / "tokenizer"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['reasoning_content'] }}{{ m['content'] }}{% endfor %}"
    )
    file = write(tmp_path / "chat.jsonl", [chat("a", "b", reasoning_content="I think")])
    settings = PackSettings(prompt_format="default", pack_length=64)
    packing = pack_files([file], folder, settings)
    assert packing.refused == ()
    assert packing.counts()["conversation_tokens"] > pack_files([file], MINI, PackSettings(
        prompt_format="identity", pack_length=64, ignore_keys=("reasoning_content",)
    )).counts()["conversation_tokens"]  # fmt: skip


def test_what_stands_in_contents_is_counted(tmp_path):
    """R-TOLD-2."""
    file = write(tmp_path / "chat.jsonl", CONVERSATIONS)
    packing = pack_files([file], MINI, PackSettings(prompt_format="nemotron-nano-v2", pack_length=512))
    counts = packing.counts()
    assert counts["control_tokens_in_contents"] == 2 + 2  # <unk> twice, <SPECIAL_12>, </s>
    assert counts["labels_masked_as_padding"] == 2  # <unk> is the pad token of the format
    assert counts["messages_that_lose_think_switches"] == 1  # the answer keeps its own
    by_position = PackSettings(
        prompt_format="nemotron-nano-v2", pack_length=512, semantics="megatron-lm-0.19,padding_mask=by_position"
    )
    other = pack_files([file], MINI, by_position).counts()
    assert other["labels_masked_as_padding"] == 0
    assert other["trained_tokens"] == counts["trained_tokens"] + 2


def test_what_is_so_of_every_row_is_told_on_the_screen_and_in_the_manifest(tmp_path, capsys):
    """R-TOLD-1."""
    folder = Path(shutil.copytree(MINI, tmp_path / "tokenizer"))
    (folder / "chat_template.jinja").write_text(
        "{{ strftime_now('%d') }}{% for m in messages %}<|im_start|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    file, out = write(tmp_path / "chat.jsonl", CONVERSATIONS[:1]), tmp_path / "out.packed"
    arguments = [str(file), "--tokenizer", str(folder), "--pack-length", "256", "--out", str(out), "--overwrite"]
    assert main([*arguments, "--prompt-format", "default"]) == 0
    notes = json.loads(manifest_path(out).read_text())["notes"]
    assert set(notes) == {"pad_is_eos", "trains_prompts", "reads_clock", "split_marker"}
    assert "<|im_start|>" in notes["split_marker"]
    said = capsys.readouterr().out
    for text in notes.values():
        assert f"note: {text}" in said
    assert main([*arguments, "--prompt-format", "nemotron-nano-v2"]) == 0
    assert json.loads(manifest_path(out).read_text())["notes"] == {}


def test_a_pad_token_that_the_vocabulary_lacks_is_reported_and_refused_by_strict(tmp_path, capsys):
    folder = tokenizers.folder("only-unk")
    file, out = write(tmp_path / "chat.jsonl", [chat("a", "b")]), tmp_path / "out.packed"
    arguments = [
        str(file), "--tokenizer", str(folder), "--pack-length", "256", "--out", str(out), "--overwrite",
        "--prompt-format", "nemotron-h-aligned", "--allow-format-misfit",
    ]  # fmt: skip
    assert main(arguments) == 0
    assert "lacks the pad token <SPECIAL_233>" in json.loads(manifest_path(out).read_text())["notes"]["pad_missing"]
    capsys.readouterr()
    assert main([*arguments, "--semantics", "strict"]) == 2
    said = capsys.readouterr().err
    assert "lacks the pad token <SPECIAL_233>" in said
    assert "--pad-token" in said
    assert (
        main([*arguments, "--semantics", "strict,row_ends=any", "--pad-token", tokenizers.load("only-unk").unk_token])
        == 0
    )
    assert "pad_missing" not in json.loads(manifest_path(out).read_text())["notes"]


def test_places_that_cannot_be_are_errors_with_a_fix(tmp_path, capsys):
    """R-FILE-11: no traceback and no bare error of the system, whatever is named."""
    file = write(tmp_path / "chat.jsonl", CONVERSATIONS[:1])
    parquet = tmp_path / "table.jsonl"
    parquet.write_bytes(b"PAR1" + bytes(60))
    odd = tmp_path / "a\udcffb.jsonl"
    out = tmp_path / "out.packed"
    bare = tmp_path / "bare"
    bare.mkdir()
    for inputs, tokenizer, target, why in (
        (parquet, MINI, out, "a Parquet file"),
        (bare, MINI, out, "the folder has no file that ends in"),
        (tmp_path / "none.jsonl", MINI, out, "there is no such file"),
        (odd, MINI, out, "not UTF-8"),
        (tmp_path / ("x" * 5000), MINI, out, "cannot be opened"),
        (file, bare, out, "tokenizer_config.json is missing"),
        (file, tmp_path / ("x" * 5000), out, "the tokenizer folder does not exist"),
        (file, MINI, tmp_path, "name of a file"),
        (file, MINI, file / "below" / "out.packed", "read and write"),
    ):
        options = ["--tokenizer", str(tokenizer), "--pack-length", "256", "--out", str(target)]
        assert main([str(inputs), *options]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert "To fix it" in said
        assert "Traceback" not in said
    assert not out.exists()
