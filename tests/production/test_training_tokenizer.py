"""A job's tokenizer that is not there or is damaged: what is wrong with which file, by the job's key, before any model is built."""

import shutil
from pathlib import Path

import pytest
import training_job_worlds as jobs

from production.errors import PackproofError
from production.training.__main__ import main
from production.training.config import load
from production.training.data.tokenizer import check_tokenizer, load_tokenizer, vocabulary_size

KEY = "policy.tokenizer.name"


@pytest.fixture
def tokenizer(tmp_path):
    """A copy of the small job's tokenizer."""
    return Path(shutil.copytree(jobs.TOKENIZER, tmp_path / "tokenizer"))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The small job's file."""
    folder = tmp_path_factory.mktemp("job")
    return jobs.write_job(folder, jobs.write_rows(folder / "rows.jsonl"))


@pytest.fixture
def job(config):
    """The small job with another tokenizer."""

    def read(name, **changes):
        return load(config, [f"{key}={value}" for key, value in {KEY: name, **changes}.items()])

    return read


@pytest.fixture
def refused(job):
    """What is said against a tokenizer of this name, the key, its place and the fix held."""

    def said(name):
        with pytest.raises(PackproofError) as caught:
            load_tokenizer(job(name))
        assert caught.value.where == f"{KEY} (override '{KEY}={name}')"
        assert caught.value.fix.startswith("give a folder with tokenizer.json and tokenizer_config.json")
        begin = f"no tokenizer can be loaded from {name}: "
        assert caught.value.what.startswith(begin)
        early = [each.what for each in check_tokenizer(job(name))]  # without loading it not all can be seen
        assert early in ([], [caught.value.what])
        return caught.value.what.removeprefix(begin)

    return said


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_missing_is_named_with_those_that_are_there(refused, tokenizer, file):
    (tokenizer / file).unlink()
    others = ", ".join(sorted(each.name for each in tokenizer.iterdir()))
    assert refused(tokenizer) == f"{file} is missing; the folder has {others}"
    (tokenizer / file).mkdir()  # transformers passes over it, and knows no special token then
    assert refused(tokenizer).startswith(f"{file} is missing; the folder has ")
    assert f"{file}/" in refused(tokenizer)


def test_an_empty_tokenizer_folder_is_reported_as_empty(refused, tmp_path):
    assert refused(tmp_path) == "tokenizer_config.json is missing; the folder has nothing"


def test_many_files_are_reported_by_their_number(refused, tmp_path):
    for number in range(11):
        (tmp_path / f"{number:02}.bin").write_text("")
    assert refused(tmp_path).endswith("06.bin, 07.bin and 3 more")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"{", "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"\x00", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[]", "it is not a JSON object"),
        (b"\xff\xfe{}", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(refused, tokenizer, file, content, why):
    (tokenizer / file).write_bytes(content)
    assert refused(tokenizer) == f"{file} is damaged: {why}"


def test_a_file_that_was_copied_in_part_is_named(refused, tokenizer):
    whole = (tokenizer / "tokenizer.json").read_bytes()
    (tokenizer / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    assert refused(tokenizer).startswith("tokenizer.json is damaged: it is not JSON: ")


@pytest.mark.parametrize("content", ["{}", '{"version": 1, "model": 3}'])
def test_a_tokenizer_file_with_other_json_is_named(refused, tokenizer, content):
    (tokenizer / "tokenizer.json").write_text(content)
    assert refused(tokenizer).startswith("tokenizer.json is damaged: the tokenizers library refuses it: ")


def test_a_chat_template_file_that_is_not_text_is_named(refused, tokenizer):
    (tokenizer / "chat_template.jinja").write_bytes(b"\xff")
    assert refused(tokenizer).startswith("chat_template.jinja is damaged: 'utf-8' codec can't decode byte 0xff")


def test_a_fault_that_no_file_shows_is_reported_in_transformers_words(refused, tokenizer, monkeypatch):
    from transformers import AutoTokenizer

    def fails(_name):
        raise KeyError("of its own\nand more")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fails)
    assert refused(tokenizer) == r"one of its files is damaged: KeyError: 'of its own\nand more'"


@pytest.mark.parametrize("name", ["/not/there", "./not-there", "not/there/either", "not-there/"])
def test_a_missing_folder_is_reported_with_its_absolute_path(refused, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(name) == f"there is no such folder ({Path(name).absolute()})"


@pytest.mark.parametrize("name", ["not-there", "owner/not-there"])
def test_a_name_that_is_neither_a_folder_nor_on_hugging_face_is_reported(refused, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absent = f"there is no such folder ({tmp_path / name}), and Hugging Face's of this name cannot be had: "
    assert refused(name).startswith(absent)
    assert len(refused(name)) > len(absent)
    assert "\n" not in refused(name)


def test_a_file_in_place_of_a_folder_is_reported(refused, tokenizer):
    assert refused(tokenizer / "tokenizer.json") == "it is a file, and no folder"


def test_a_tokenizer_that_is_whole_is_loaded_with_the_jobs_template(job, tokenizer, tmp_path):
    loaded = load_tokenizer(job(tokenizer))
    assert (len(loaded), loaded.eos_token) == (4096, "<SPECIAL_12>")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    (tmp_path / "no.jinja").write_bytes(b"\xff")
    key = "policy.tokenizer.chat_template"
    assert load_tokenizer(job(tokenizer, **{key: tmp_path / "own.jinja"})).chat_template == "{{ messages }}"
    assert load_tokenizer(job(tokenizer, **{key: "a {{ template }}"})).chat_template == "a {{ template }}"
    with pytest.raises(PackproofError, match="the chat template cannot be read") as caught:
        load_tokenizer(job(tokenizer, **{key: tmp_path / "no.jinja"}))
    assert key in caught.value.where


def test_an_embedding_has_room_for_every_id(job, tokenizer):
    loaded, parallel = load_tokenizer(job(tokenizer)), "policy.megatron_cfg.tensor_model_parallel_size"
    assert vocabulary_size(job(tokenizer, **{parallel: 3, "model.vocab_size": "null"}), loaded) == 4098
    assert vocabulary_size(job(tokenizer, **{"model.vocab_size": 5000}), loaded) == 5000
    with pytest.raises(
        PackproofError, match="must be at least 4096, since the tokenizer has ids up to 4095, got 4000"
    ) as caught:
        vocabulary_size(job(tokenizer, **{"model.vocab_size": 4000}), loaded)
    assert "model.vocab_size" in caught.value.where


def without_a_model(payload, worker):
    """What jobs are refused with on a rank that can build no model."""
    from unittest import mock

    with mock.patch("production.training.engine.build_model", side_effect=AssertionError("a model is built")):
        return jobs.train_in_turn(payload, worker)


@pytest.mark.worlds
def test_a_job_whose_tokenizer_cannot_be_loaded_ends_before_a_model_is_built(config, tokenizer, tmp_path):
    from equivalence.workers import open_world, preload

    (tokenizer / "tokenizer.json").write_text("{")
    names = [tmp_path / "none", tokenizer]
    preload(*jobs.MODULES)
    payload = [{"config": str(config), "overrides": [f"{KEY}={name}"]} for name in names]
    with open_world(1) as world:
        (found,) = world.run(f"{__name__}:without_a_model", payload)
    for each, name in zip(found, names, strict=True):
        assert each["refused"].startswith(f"{KEY} (override '{KEY}={name}'): no tokenizer can be loaded from {name}: ")


def test_a_dry_run_reports_a_tokenizer_that_a_run_refuses(config, tokenizer, tmp_path, capsys, job):
    for name, why in ((tokenizer, None), (tmp_path / "none", "there is no such folder"), (tmp_path, "is missing")):
        assert main(["--config", str(config), "--dry-run", f"{KEY}={name}"]) == 0
        printed = capsys.readouterr().out
        assert ("no tokenizer can be loaded" in printed) == bool(why)
        assert why is None or why in printed
        assert printed.endswith(f"nothing against this job on 1 rank{', but for the notes above' if why else ''}\n")
        assert bool(check_tokenizer(job(name))) == bool(why)
    assert main(["--config", str(config), f"{KEY}={tmp_path / 'none'}"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert check_tokenizer(job("owner/name")) == []


def test_a_chat_template_without_a_placeholder_is_refused(job, tokenizer, tmp_path):
    (tmp_path / "empty.jinja").write_text("")
    (tmp_path / "t.txt").write_text("{{ messages }}")
    for given in ("t.txt", str(tmp_path / "t.txt"), str(tmp_path / "empty.jinja")):
        with pytest.raises(PackproofError, match="all conversations are rendered as the same text") as caught:
            load_tokenizer(job(tokenizer, **{"policy.tokenizer.chat_template": given}))
        assert caught.value.where.startswith("policy.tokenizer.chat_template (override")
