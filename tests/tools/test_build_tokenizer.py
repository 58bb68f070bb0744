"""The real tokenizers: equal to the one they are cut from, the same bytes each time, built once into the cache."""

import importlib.metadata
import json
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from equivalence.generators import real_tokenizers
from equivalence.generators.real_tokenizers import (
    NAMED_SPECIALS,
    RECIPES,
    TokenizerSourceError,
    build_tokenizer,
    cached_tokenizer,
)
from production.errors import PackproofError
from tools.build_tokenizer import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def real_texts():
    lines = (EXAMPLES / "packed" / "sample.jsonl.packed").read_bytes().decode().split("\n")
    contents = [message["content"] for line in lines if line for message in json.loads(line)["messages"]]
    # Special tokens written in a text are ids of their own only with the folder: that is tested apart.
    return [text for text in dict.fromkeys(contents) if text and "<SPECIAL_" not in text and "<unk>" not in text][::5]


@pytest.fixture(scope="module")
def large():
    return Tokenizer.from_file(str(cached_tokenizer("nemotron-like") / "tokenizer.json"))


@pytest.fixture(scope="module")
def small():
    return Tokenizer.from_file(str(EXAMPLES / "tokenizers" / "nemotron-mini" / "tokenizer.json"))


def test_the_large_tokenizer_encodes_like_the_one_its_vocabulary_comes_from(large):
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    own = Tekkenizer.from_file(real_tokenizers._source_file())
    texts = real_texts()
    ours = [encoding.ids for encoding in large.encode_batch_fast(texts, add_special_tokens=False)]
    theirs = [own.encode(text, bos=False, eos=False) for text in texts]
    assert len(texts) > 500
    assert sum(map(len, theirs)) > 30_000
    assert [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]] == []


@pytest.mark.parametrize("name", RECIPES)
def test_special_ids_are_those_that_the_formats_expect(name, large, small):
    tokenizer = {"nemotron-like": large, "nemotron-mini": small}[name]
    assert tokenizer.get_vocab_size() == {"nemotron-like": 131_072, "nemotron-mini": 4_096}[name]
    assert [tokenizer.token_to_id(text) for text in NAMED_SPECIALS] == list(range(10))
    assert [tokenizer.token_to_id(f"<SPECIAL_{i}>") for i in range(10, 1000)] == list(range(10, 1000))
    # The prefix that nano-v2 masks is three ids, and a special string in a text becomes its id.
    prefix = tokenizer.encode("<SPECIAL_11>Assistant\n", add_special_tokens=False).ids
    assert prefix[0] == 11
    assert len(prefix) == 3
    # The post-processor adds a BOS, which no row may hold.
    assert tokenizer.encode("a").ids[0] == tokenizer.token_to_id("<s>") == 1


def test_the_shipped_small_tokenizer_is_what_the_command_makes_now(tmp_path):
    assert main([str(tmp_path / "mini"), "--name", "nemotron-mini"]) == 0
    shipped = EXAMPLES / "tokenizers" / "nemotron-mini"
    names = {file.name for file in shipped.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "provenance.json"}
    assert {name: (tmp_path / "mini" / name).read_bytes() == (shipped / name).read_bytes() for name in names} == (
        dict.fromkeys(names, True)
    )


def test_every_text_survives_the_small_vocabulary(small):
    texts = real_texts()
    encoded = small.encode_batch_fast(texts, add_special_tokens=False)
    assert [small.decode(encoding.ids, skip_special_tokens=False) for encoding in encoded] == texts


def test_the_template_renders_the_layout_and_refuses_what_it_does_not_know():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(EXAMPLES / "tokenizers" / "nemotron-mini"))
    messages = [
        {"role": "system", "content": " S "},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "T"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<SPECIAL_10>System\nS\n<SPECIAL_11>User\nU\n<SPECIAL_11>Assistant\nA\n<SPECIAL_12>\n"
        "<SPECIAL_11>User\n<TOOL_RESPONSE>[T]</TOOL_RESPONSE>\n<SPECIAL_11>Assistant\n"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 12, 0)
    for bad in ({"role": "narrator", "content": "x"}, {"role": "user", "content": None}):
        with pytest.raises(Exception, match=r"unknown role narrator|content"):
            tokenizer.apply_chat_template([bad], tokenize=False)


def test_many_askers_build_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKPROOF_CACHE", str(tmp_path))
    builds = []

    def slow_build(name, folder):
        builds.append(folder)
        time.sleep(0.2)  # long enough for all others to ask meanwhile
        return build_tokenizer(name, folder)

    monkeypatch.setattr(real_tokenizers, "build_tokenizer", slow_build)
    found = []
    threads = [threading.Thread(target=lambda: found.append(cached_tokenizer("nemotron-mini"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len(found) == 6
    assert len(set(found)) == 1
    assert {file.name for file in found[0].iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    assert sorted(file.suffix for file in (tmp_path / "tokenizers").iterdir()) == ["", ".lock"]


def test_two_builders_without_working_locks_end_with_one_whole_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKPROOF_CACHE", str(tmp_path))
    monkeypatch.setattr(real_tokenizers.fcntl, "flock", lambda *_: None)
    both = threading.Barrier(2)

    def meeting_build(name, folder):
        build_tokenizer(name, folder)
        both.wait(timeout=30)
        return folder

    monkeypatch.setattr(real_tokenizers, "build_tokenizer", meeting_build)
    found = []
    threads = [threading.Thread(target=lambda: found.append(cached_tokenizer("nemotron-mini"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert len({*found}) == 1
    assert not [file for file in (tmp_path / "tokenizers").iterdir() if file.name.startswith(".")]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKPROOF_CACHE", str(tmp_path))

    def broken_build(_name, folder):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(real_tokenizers, "build_tokenizer", broken_build)
    with pytest.raises(OSError, match="disk full"):
        cached_tokenizer("nemotron-mini")
    assert [file.suffix for file in (tmp_path / "tokenizers").iterdir()] == [".lock"]


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKPROOF_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert real_tokenizers.cache_root() == tmp_path / "a"
    monkeypatch.delenv("PACKPROOF_CACHE")
    assert real_tokenizers.cache_root() == tmp_path / "b" / "packproof"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert real_tokenizers.cache_root() == Path.home() / ".cache" / "packproof"


def test_a_missing_package_is_named_with_the_command_that_fixes_it(tmp_path, monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("PACKPROOF_CACHE", str(tmp_path))
    monkeypatch.setattr(real_tokenizers.importlib.metadata, "version", missing)
    with pytest.raises(TokenizerSourceError) as error:
        cached_tokenizer("nemotron-mini")
    assert "mistral-common" in str(error.value)
    assert "pip install 'packproof[tokenizers]'" in str(error.value)
    assert main([str(tmp_path / "out")]) == 2
    assert "pip install" in capsys.readouterr().err


def test_another_vocabulary_under_the_same_name_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "tekken_240718.json"
    file.write_text("{}")
    monkeypatch.setattr(real_tokenizers, "_source_file", lambda: file)
    with pytest.raises(TokenizerSourceError, match="sha256"):
        build_tokenizer("nemotron-mini", tmp_path / "out")


def test_an_unknown_name_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(PackproofError, match="choose one of nemotron-like, nemotron-mini"):
        build_tokenizer("nemotron-huge", tmp_path / "out")
    assert not (tmp_path / "out").exists()
