"""Fingerprints of tokenizers, files and configurations: equal where behaviour is, and a difference names what shifted."""

import json
import shutil
from pathlib import Path

import pytest

from production.files.fingerprint import BLOCK_BYTES, fingerprint_file
from production.tokens.fingerprint import PROBES, TokenizerFingerprint, fingerprint_tokenizer, tokenizer_differences
from production.tokens.folder import load_folder
from production.training.config import load
from production.training.config.fingerprint import ConfigFingerprint, config_differences, fingerprint_config

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "examples" / "tokenizers" / "nemotron-mini"


@pytest.fixture(scope="module")
def saved():
    return fingerprint_tokenizer(load_folder(TOKENIZER))


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(TOKENIZER, tmp_path / "tokenizer"))


def rewrite(folder, change, name="tokenizer.json"):
    value = json.loads((folder / name).read_bytes())
    change(value)
    (folder / name).write_text(json.dumps(value))
    return fingerprint_tokenizer(load_folder(folder))


def test_order_of_keys_formatting_and_other_files_do_not_count(folder, saved):
    value = json.loads((folder / "tokenizer.json").read_bytes())
    value["model"]["vocab"] = dict(sorted(value["model"]["vocab"].items()))
    value["decoder"] = None
    (folder / "tokenizer.json").write_text(json.dumps(dict(reversed(value.items())), indent=3, ensure_ascii=False))
    (folder / "weights.bin").write_bytes(b"anything")
    assert fingerprint_tokenizer(load_folder(folder)) == saved
    assert tokenizer_differences(saved, fingerprint_tokenizer(load_folder(folder))) == []


def test_truncation_of_an_earlier_call_does_not_count(saved):
    tokenizer = load_folder(TOKENIZER)
    tokenizer("a b c d", truncation=True, max_length=2)
    assert fingerprint_tokenizer(tokenizer).definition == saved.definition


def test_a_removed_merge_is_found_and_the_changed_text_is_named(folder, saved):
    now = rewrite(folder, lambda value: value["model"]["merges"].remove(["q", "u"]))
    told = tokenizer_differences(saved, now)
    assert saved.digest[:12] in told[0]
    assert now.digest[:12] in told[0]
    assert any("'plain'" in line and "The quick brown fox" in line for line in told)


def test_each_part_of_a_tokenizer_counts(folder, saved):
    now = rewrite(folder, lambda value: value.update(eos_token="<s>"), "tokenizer_config.json")
    assert tokenizer_differences(saved, now)[1] == "Its eos_token was '<SPECIAL_12>' (id 12) and is '<s>' (id 1)."
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "Its chat template is another text." in tokenizer_differences(
        saved, fingerprint_tokenizer(load_folder(folder))
    )


def test_another_definition_is_a_difference_even_if_no_probe_text_shows_it(folder, saved):
    tokens = len(saved.probes["plain"])
    used = {each for ids in saved.probes.values() for each in ids}

    def swap(value):
        """Swap the ids of two tokens that no probe text has."""
        vocab = value["model"]["vocab"]
        one, two = [token for token, each in vocab.items() if each not in used][-2:]
        vocab[one], vocab[two] = vocab[two], vocab[one]

    told = tokenizer_differences(saved, rewrite(folder, swap))
    assert tokens
    assert told[-1] == f"Its definition is another, although all {len(PROBES)} probe texts have the same ids."


def test_a_fingerprint_goes_through_json(saved):
    again = TokenizerFingerprint.from_json(json.loads(json.dumps(saved.to_json())))
    assert again == saved
    for broken in (
        None,
        [],
        {},
        {**saved.to_json(), "probes": 3},
        {**saved.to_json(), "other": 1},
        {**saved.to_json(), "digest": 1},
    ):
        with pytest.raises(ValueError, match="not a fingerprint of a tokenizer"):
            TokenizerFingerprint.from_json(broken)


def test_a_files_fingerprint_is_the_same_for_any_number_of_threads_and_sees_every_byte(tmp_path):
    path, copy = tmp_path / "a", tmp_path / "b"
    content = bytearray(range(256)) * (2 * BLOCK_BYTES // 256) + b"end"
    path.write_bytes(content)
    first = fingerprint_file(path, threads=1)
    assert fingerprint_file(path, threads=5) == first
    for at in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(content) - 1):
        changed = bytearray(content)
        changed[at] ^= 1
        copy.write_bytes(changed)
        assert fingerprint_file(copy).digest != first.digest, at
    copy.write_bytes(content[BLOCK_BYTES : 2 * BLOCK_BYTES] + content[:BLOCK_BYTES] + b"end")
    assert fingerprint_file(copy).size == first.size


@pytest.fixture(scope="module")
def job():
    return fingerprint_config(load(ROOT / "examples" / "jobs" / "small-cpu.yaml"))


@pytest.mark.parametrize(
    "override", ["logger.log_dir=x", "checkpointing.save_period=3", "data.num_workers=0", "sft.val_period=7"]
)
def test_keys_that_decide_no_number_are_not_in_a_configs_fingerprint(job, override):
    assert fingerprint_config(load(ROOT / "examples" / "jobs" / "small-cpu.yaml", [override])) == job


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("policy.max_total_sequence_length=1024", "policy.max_total_sequence_length"),
        ("data.default.semantics=strict", "data.train.0.semantics"),
        ("sft.seed=1", "sft.seed"),
        ("policy.megatron_cfg.optimizer.lr=0.1", "policy.megatron_cfg.optimizer.lr"),
    ],
)  # fmt: skip
def test_a_key_that_decides_a_number_is_named_with_both_values(job, override, key):
    now = fingerprint_config(load(ROOT / "examples" / "jobs" / "small-cpu.yaml", [override]))
    told = config_differences(job, now)
    assert now.digest != job.digest
    assert any(
        line == f"{key} was {json.dumps(job.values[key])} and is {json.dumps(now.values[key])}." for line in told
    )
    assert ConfigFingerprint.from_json(json.loads(json.dumps(now.to_json()))) == now
