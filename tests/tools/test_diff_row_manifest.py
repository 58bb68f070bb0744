"""What the manifest beside a packed file says is what diff_row builds its rows for."""

import gzip
import json

import pytest
from diff_row_fakes import many, write_rows

from tools.diff_row.__main__ import main

SIDES = ["--sides", "reference,diff_row_fakes:SAME", "--tokenizer", "word"]


@pytest.fixture
def run(capsys, monkeypatch):
    def run(*arguments):
        monkeypatch.setenv("COLUMNS", "120")
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, " ".join(printed.out.split()), printed.err

    return run


def write(folder, *, said=None, **settings):
    """Two rows, and what their manifest says."""
    file = write_rows(folder, [many(3), many(2)])
    size = (folder / "rows.jsonl.packed").stat().st_size
    whole = {"output": {"file": "rows.jsonl.packed", "bytes": size}, "settings": settings} | (said or {})
    (folder / "rows.jsonl.packed.manifest.json").write_text(json.dumps(whole))
    return file


def test_settings_that_were_not_given_are_the_manifests(run, tmp_path):
    file = write(tmp_path, pack_length=40, prompt_format="identity", context_parallel_size=2, semantics="strict")
    status, out, _ = run(file, "--row", 1, *SIDES)
    assert status == 0
    assert (
        "row 1 (file line 2) identity (manifest) · P 40 (from rows.jsonl.packed.manifest.json) · cp 2 (manifest)" in out
    )
    assert "· strict (manifest)" in out
    _, out, _ = run(file, "--row", 1, *SIDES, "--context-parallel-size", 1, "--semantics", "megatron-lm-main")
    assert "· cp 1 · megatron-lm-main ·" in out, "another cp and other semantics may be looked at"
    found = json.loads(run(file, "--row", 1, *SIDES, "--json")[1])
    assert found["settings"]["pack_length"] == 40
    assert found["source"]["settings_from"]["pack_length"] == "from rows.jsonl.packed.manifest.json"
    assert (found["source"]["row"], found["source"]["line"]) == (1, 2)


def test_the_sample_has_its_pack_length_outside_of_its_settings(run, tmp_path):
    file = write(tmp_path, said={"pack_length": 36, "settings": None})
    assert (
        "P 36 (from rows.jsonl.packed.manifest.json)" in run(file, "--row", 0, *SIDES, "--prompt-format", "identity")[1]
    )


def test_the_manifest_of_an_unpacked_file_serves_the_packed_one(run, tmp_path):
    file = write(tmp_path, pack_length=40, prompt_format="identity")
    packed = tmp_path / "rows.jsonl.packed.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.jsonl.packed").read_bytes()))
    (tmp_path / "rows.jsonl.packed").unlink()
    assert "P 40 (from rows.jsonl.packed.manifest.json)" in run(f"{file}.gz", "--row", 0, *SIDES)[1]


@pytest.mark.parametrize(("option", "value"), [("--pack-length", 32), ("--prompt-format", "nemotron-nano-v2")])
def test_what_contradicts_the_manifest_is_refused(run, tmp_path, option, value):
    file = write(tmp_path, pack_length=40, prompt_format="identity")
    status, _, err = run(file, "--row", 0, *SIDES, option, value)
    assert status == 2
    assert f"{option} {value}, and {file} was packed for {40 if value == 32 else 'identity'}" in err
    assert f"leave {option} out" in err
    same = {"--pack-length": 40, "--prompt-format": "identity"}[option]
    status, out, _ = run(file, "--row", 0, *SIDES, option, same)
    assert status == 0
    assert "identity (manifest) · P 40 ·" in out or "identity · P 40 (from rows.jsonl.packed.manifest.json) ·" in out


def test_without_a_manifest_the_screen_says_that_the_length_is_the_default(run, tmp_path):
    file = write_rows(tmp_path, [many(3)])
    assert "P 4,096 (the default: the file has no manifest)" in run(file, "--row", 0, *SIDES)[1]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"output": {"bytes": 7}}, "is of a file of 7 bytes, and"),
        ({"settings": {"pack_length": "40"}}, "says pack_length '40'"),
        ({"settings": {"pack_length": True}}, "says pack_length True"),
        ({"settings": {"semantics": 3}}, "says semantics 3"),
    ],
)
def test_a_manifest_that_is_not_the_files_is_refused(run, tmp_path, said, says):
    file = write(tmp_path, said=said, pack_length=40)
    status, _, err = run(file, "--row", 0, *SIDES)
    assert status == 2
    assert says in err
    assert "move the" in err or "move it away" in err


def test_a_manifest_that_cannot_be_read_is_refused(run, tmp_path):
    file = write(tmp_path, pack_length=40)
    for content in ("{", "[]"):
        (tmp_path / "rows.jsonl.packed.manifest.json").write_text(content)
        status, _, err = run(file, "--row", 0, *SIDES)
        assert status == 2
        assert "rows.jsonl.packed.manifest.json" in err


def test_beside_a_dump_its_length_counts_and_the_manifests_is_reported(run, tmp_path):
    file = write(tmp_path, pack_length=40, prompt_format="identity")
    dump = tmp_path / "batch.safetensors"
    (tmp_path / "bare").mkdir()
    bare = write_rows(tmp_path / "bare", [many(3)])
    options = ["--prompt-format", "identity", "--pack-length", 32, "--write-dump", dump]
    assert run(bare, "--row", 0, *SIDES, *options)[0] == 0
    status, out, _ = run(file, "--row", 0, "--tokenizer", "word", "--dump", dump)
    assert status == 1, "a row that is not whole is not equal"
    assert "P 32 (of the dump; packed for 40)" in out
    status, out, _ = run(file, "--row", 0, "--tokenizer", "word", "--dump", dump, "--pack-length", 32)
    assert status == 0


def test_the_manifest_is_ignored_where_that_is_asked(run, tmp_path):
    file = write(tmp_path, pack_length=40, prompt_format="identity")
    options = ["--pack-length", 32, "--prompt-format", "identity"]
    status, out, _ = run(file, "--row", 0, *SIDES, *options, "--ignore-manifest")
    assert status == 0
    assert "identity · P 32 · cp 1" in out
    (tmp_path / "rows.jsonl.packed.manifest.json").write_text("[]")
    status, _, err = run(file, "--row", 0, *SIDES, *options)
    assert status == 2
    assert "--ignore-manifest" in err
    assert run(file, "--row", 0, *SIDES, *options, "--ignore-manifest")[0] == 0
