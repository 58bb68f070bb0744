"""diff_row and the main job compare a row whatever its tokens are, and tell what its author may not have meant."""

import json
from pathlib import Path

import pytest

from equivalence.errors import InputError
from equivalence.generators import tokenizers
from equivalence.runner.main import sample_notes
from equivalence.runner.own_settings import count_rows
from production.errors import BadInput
from tools.diff_row.__main__ import main

MINI = Path(__file__).parents[2] / "examples" / "tokenizers" / "nemotron-mini"


def write(path, **last):
    row = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "where is /thinking?"},
        {"role": "assistant", "content": "here <SPECIAL_12>", **last},
    ]
    path.write_text(json.dumps({"messages": row}) + "\n")
    return path


def told(capsys, file, tokenizer, *options):
    sides = "reference,production"
    arguments = [str(file), "--row", "0", "--tokenizer", str(tokenizer), "--pack-length", "64", "--sides", sides]
    assert main([*arguments, *options]) == 0
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]


def test_what_the_tokens_of_a_row_are_is_told_beside_the_screen(tmp_path, capsys):
    """R-FIT-1, R-KEYS-1, R-TOLD-1 and 2: told, and no row is changed or refused."""
    notes = "\n".join(told(capsys, write(tmp_path / "rows.jsonl", weight=0), MINI))
    assert "the key 'weight' is 0" in notes
    assert "1 control tokens" in notes
    assert "1 messages hold /think" in notes
    assert "does not fit" not in notes
    file = write(tmp_path / "plain.jsonl")
    notes = "\n".join(told(capsys, file, tokenizers.folder("bytes"), "--semantics", "megatron-lm-0.19"))
    assert "does not fit this tokenizer" in notes
    assert "weight" not in notes
    notes = "\n".join(told(capsys, file, MINI, "--prompt-format", "identity"))
    assert "trains prompts" in notes
    assert "1 of 3 messages are of the system, users and tools, and are trained" in notes


def test_the_way_to_a_rank_tells_the_same(tmp_path, capsys):
    notes = told(
        capsys,
        write(tmp_path / "rows.jsonl", weight=0),
        MINI,
        "--cp",
        "2",
        "--rank",
        "1",
        "--semantics",
        "megatron-lm-0.19",
    )
    assert ["the key 'weight' is 0" in note for note in notes].count(True) == 1


def test_a_chat_file_is_distinguished_from_packed_rows(tmp_path, capsys):
    file = write(tmp_path / "chat.jsonl")
    file.write_text(file.read_text() * 2)
    wanted = "each of its first 2 lines is one conversation, and it has no manifest"
    assert [wanted in note for note in told(capsys, file, MINI)].count(True) == 1
    (tmp_path / "chat.jsonl.manifest.json").write_text("{}")
    assert wanted not in "\n".join(told(capsys, file, MINI))


def test_the_main_job_tells_formats_that_do_not_fit_the_samples_tokenizer(tmp_path):
    """R-FIT-1 in `equivalence run --sample`, and R-FILE-11 of its file."""
    file = write(tmp_path / "rows.jsonl")
    assert sample_notes(file, str(MINI)) == []
    assert [note.split(" does not fit")[0] for note in sample_notes(file, "only-unk")] == [
        "the prompt format nemotron-nano-v2",
        "the prompt format nemotron-h-aligned",
    ]
    assert sample_notes(None, "only-unk") == []
    assert count_rows(file) == 1
    file.write_bytes(b"PAR1" + bytes(60))
    with pytest.raises(BadInput, match="a Parquet file"):
        count_rows(file)
    with pytest.raises(InputError, match="is a folder"):
        count_rows(tmp_path)
