"""Packing: exact rows, nothing lost in silence, lengths that are Megatron-LM's own."""

import functools
import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from production.errors import PackproofError
from production.files.fingerprint import fingerprint_file
from production.tokens.fingerprint import fingerprint_tokenizer
from tools.pack_rows import PackSettings, lengths, main, pack_files
from tools.pack_rows.conversation import Conversation, SourceLocation
from tools.pack_rows.lengths import LengthMeter, Measured
from tools.pack_rows.output import describe_tokenizer, manifest, manifest_path
from tools.pack_rows.packing import row_line

EXAMPLES = Path(__file__).parents[2] / "examples"
MINI = EXAMPLES / "tokenizers" / "nemotron-mini"
SAMPLE = EXAMPLES / "packed" / "sample.jsonl.packed"
CHAT = EXAMPLES / "chat" / "sample.jsonl"
FORMATS = ("nemotron-nano-v2", "nemotron-h-aligned", "identity", "default")


@pytest.fixture(autouse=True)
def _load_once(monkeypatch):
    """The tokenizer is read for every packing; once is enough here."""
    monkeypatch.setattr(lengths, "load_folder", load_cached)


load_cached = functools.cache(lengths.load_folder)


def system(content=""):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def write(path, conversations):
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations]
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def read_rows(path):
    return [json.loads(line)["messages"] for line in path.read_bytes().decode().split("\n") if line]


def split(messages):
    conversations = []
    for message in messages:
        if message["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def settings(**changed):
    return PackSettings(
        **{"prompt_format": "identity", "pack_length": 8, "on_bad": "skip", "on_long": "skip"} | changed
    )


def digits(count):
    """A conversation of `count` tokens under identity: digits are one token each, and an empty system message is none."""
    return [system(), user("1" * count)]


# --- rows


def test_rows_are_exact(tmp_path):
    chat = write(tmp_path / "chat.jsonl", [digits(n) for n in (4, 1, 3, 2, 1, 3, 4, 5)])
    greedy = pack_files([chat], MINI, settings(algorithm="sequential"))
    assert [[c.place.line for c in row] for row in greedy.rows] == [[1, 2, 3], [4, 5, 6], [7], [8]]
    assert row_line(greedy.rows[2]) == (
        b'{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "1111"}]}\n'
    )
    # First-fit-decreasing finds [[8,6],[7,1],[3,4,5,2]]; written in the order of the input.
    fewest = pack_files([chat], MINI, settings())
    assert [[c.place.line for c in row] for row in fewest.rows] == [[1, 7], [2, 3, 4, 5], [6, 8]]
    assert fewest.counts()["tail_padding"] == 3 * 8 - 23


def test_context_parallel_padding_counts_against_the_row(tmp_path):
    chat = write(tmp_path / "chat.jsonl", [digits(n) for n in (5, 3, 2)])
    packing = pack_files([chat], MINI, settings(pack_length=12, context_parallel_size=2, algorithm="sequential"))
    assert [[c.padded for c in row] for row in packing.rows] == [[8, 4], [4]]
    counts = packing.counts()
    assert counts["context_parallel_padding"] == 3 + 1 + 2
    assert counts["tail_padding"] == 8
    with pytest.raises(PackproofError, match=r"multiple of 4.*use 12"):
        settings(pack_length=10, context_parallel_size=2)


def test_megatron_lm_sees_the_planned_boundaries(tmp_path):
    import numpy as np
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer
    from megatron.training.datasets.sft_dataset import SFTDataset

    chats = [messages for row in read_rows(SAMPLE)[:12] for messages in split(row)]
    chat = write(tmp_path / "chat.jsonl", chats)
    for cp in (1, 4):
        plan = pack_files(
            [chat], MINI, settings(prompt_format="nemotron-nano-v2", pack_length=2048, context_parallel_size=cp)
        )
        tokenizer = SFTTokenizer(str(MINI), "nemotron-nano-v2")
        tokenizer = SimpleNamespace(
            pad=tokenizer.pad_id, eod=tokenizer.eod, tokenize_conversation=tokenizer.tokenize_conversation
        )
        dataset = SFTDataset.__new__(SFTDataset)
        dataset.dataset = [json.loads(row_line(row))["messages"] for row in plan.rows]
        dataset.indices = np.arange(len(dataset.dataset))
        dataset.config = SimpleNamespace(
            tokenizer=tokenizer,
            sequence_length=2048,
            context_parallel_size=cp,
            reset_position_ids=False,
            create_attention_mask=False,
            reset_attention_mask=False,
        )
        for number, row in enumerate(plan.rows):
            ends = np.cumsum([conversation.padded for conversation in row]).tolist()
            built = dataset[number]
            assert built["cu_seqlens"][: len(row)].tolist() == [0, *ends[:-1]]
            assert int(built["loss_mask"].sum()) in range(
                sum(c.measured.trained for c in row) - 1, sum(c.measured.trained for c in row) + 1
            )
        assert len(plan.rows) > 5
        assert sum(map(len, plan.rows)) > 20


def test_every_accepted_conversation_is_in_exactly_one_row():
    for algorithm in ("sequential", "first-fit-decreasing"):
        packing = pack_files(
            [CHAT],
            MINI,
            settings(
                prompt_format="nemotron-nano-v2", pack_length=1024, algorithm=algorithm, middle_system="split", seed=3
            ),
        )
        out = b"".join(map(row_line, packing.rows))
        written = [
            conversation
            for line in out.decode().split("\n")
            if line
            for conversation in split(json.loads(line)["messages"])
        ]
        refused = {(r.place.line, r.place.piece) for r in packing.refused}
        expected = []
        for number, line in enumerate(CHAT.read_bytes().decode().split("\n")[:-1], 1):
            messages = json.loads(line)["messages"]
            if (number, 0) in refused:
                continue
            expected += split(messages if messages[0]["role"] == "system" else [system(), *messages])
        as_text = [Counter(json.dumps(c, sort_keys=True) for c in side) for side in (written, expected)]
        assert as_text[0] == as_text[1]
        assert len(packing.refused) >= 10
        assert len(written) > 150
        assert len(written) + len(packing.refused) == packing.conversations


def test_same_input_same_bytes_and_a_seed_only_reorders(tmp_path):
    chat = write(tmp_path / "chat.jsonl", [digits(n % 7 + 1) for n in range(60)])

    def lines(**changed):
        return [row_line(row) for row in pack_files([chat], MINI, settings(**changed)).rows]

    for algorithm in ("sequential", "first-fit-decreasing"):
        assert lines(algorithm=algorithm) == lines(algorithm=algorithm)
        assert lines(algorithm=algorithm, seed=1) == lines(algorithm=algorithm, seed=1)
        orders = [lines(algorithm=algorithm, seed=seed) for seed in (None, 1, 2)]
        assert orders[0] != orders[1] != orders[2] != orders[0]
    # First-fit-decreasing chooses the same bins under every seed, whatever their order.
    assert sorted(map(len, lines())) == sorted(map(len, lines(seed=5)))


# --- what is refused


BAD_LINES = {
    "blank_line": b"  \n",
    "bom": b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "a"}]}\n',
    "invalid_utf8": b'{"messages": [{"role": "user", "content": "\xff"}]}\n',
    "invalid_json": b'{"messages": [\n',
    "duplicate_key": b'{"messages": [{"role": "user", "role": "user", "content": "a"}]}\n',
    "missing_chat_key": b'{"text": "a"}\n',
    "empty_row": b'{"messages": []}\n',
    "missing_content": b'{"messages": [{"role": "user"}]}\n',
    "content_null": b'{"messages": [{"role": "user", "content": null}]}\n',
    "content_parts": b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}\n',
    "role_not_text": b'{"messages": [{"role": null, "content": "a"}]}\n',
    "lone_surrogate": b'{"messages": [{"role": "user", "content": "\\ud83d"}]}\n',
}


def test_every_bad_line_is_refused_by_name_and_place(tmp_path):
    good = b'{"messages": [{"role": "user", "content": "1"}]}\n'
    chat = tmp_path / "chat.jsonl"
    chat.write_bytes(good + b"".join(line + good for line in BAD_LINES.values()))
    packing = pack_files([chat], MINI, settings())
    assert [(r.kind, r.place.line) for r in packing.refused] == [(kind, 2 * i) for i, kind in enumerate(BAD_LINES, 1)]
    assert packing.counts()["conversations_packed"] == len(BAD_LINES) + 1


BAD_TURNS = {
    "empty_assistant": [system(), user("a"), assistant("")],
    "role_order": [system(), user("a"), assistant("b"), assistant("c")],
    "unknown_role": [system(), user("a"), {"role": "narrator", "content": "b"}],
    "role_case": [system(), {"role": "User", "content": "a"}, assistant("b")],
    "turn_mismatch": [system(), user("a"), assistant("  ")],
}


@pytest.mark.parametrize("prompt_format", FORMATS)
def test_a_format_refuses_exactly_what_megatron_lm_cannot_train_on(prompt_format):
    refused = {
        "nemotron-nano-v2": {"empty_assistant", "role_order", "unknown_role", "role_case"},
        "nemotron-h-aligned": {"empty_assistant", "role_order", "unknown_role", "role_case", "turn_mismatch"},
        "identity": set(),
        "default": {"unknown_role", "role_case"},
    }[prompt_format]
    meter = LengthMeter(MINI, prompt_format, "megatron-lm-0.19")
    found = measure(meter, BAD_TURNS.values())
    kinds = {
        name: None if isinstance(size, Measured) else size.kind for name, size in zip(BAD_TURNS, found, strict=True)
    }
    if prompt_format == "default":  # its template says no, and the name says that it was the template
        assert {name for name, kind in kinds.items() if kind} == refused
        assert {kind for kind in kinds.values() if kind} == {"template_error"}
    else:
        assert {name for name, kind in kinds.items() if kind} == refused
        assert {name: kind for name, kind in kinds.items() if kind} == {name: name for name in refused}


def test_a_capital_system_is_refused_in_every_format_because_no_row_splits_there():
    for prompt_format in FORMATS:
        found = measure(
            LengthMeter(MINI, prompt_format, "megatron-lm-0.19"),
            [[{"role": "System", "content": "a"}, user("b"), assistant("c")]],
        )
        assert found[0].kind == "role_case"


def test_a_conversation_without_a_token_is_refused():
    assert (
        measure(LengthMeter(MINI, "identity", "megatron-lm-0.19"), [[system(), user("")]])[0].kind
        == "empty_conversation"
    )


def test_the_jobs_semantics_refuse_more():
    conversations = [[system(), user("1"), assistant("2")], [system(), user("1")], [system(), assistant("1")]]
    found = {
        semantics: [
            getattr(size, "kind", None) for size in measure(LengthMeter(MINI, "identity", semantics), conversations)
        ]
        for semantics in ("megatron-lm-0.19", "nemo-rl-direct", "strict")
    }
    assert found == {
        "megatron-lm-0.19": [None, None, None],
        "nemo-rl-direct": [None, "row_end", None],
        "strict": [None, "row_end", "role_order"],
    }
    with pytest.raises(PackproofError, match="no format 'default'"):
        LengthMeter(MINI, "default", "nemo-rl-direct")


def test_a_refusal_in_the_middle_costs_no_neighbour():
    good, bad = [system(), user("a"), assistant("b" * 300)], [system(), user("a"), assistant("")]
    conversations = [bad, *[good] * 5, bad, bad, *[good] * 40, bad]
    found = measure(LengthMeter(MINI, "nemotron-nano-v2", "megatron-lm-0.19"), conversations)
    assert [isinstance(size, Measured) for size in found] == [messages is good for messages in conversations]
    assert [size.place.line for size in found if not isinstance(size, Measured)] == [1, 7, 8, 49]
    assert len({size.tokens for size in found if isinstance(size, Measured)}) == 1


def test_a_message_is_numbered_as_in_the_file(tmp_path):
    chat = write(tmp_path / "chat.jsonl", [[user("a"), assistant("")], [system(), user("a"), assistant("")]])
    packing = pack_files([chat], MINI, settings(prompt_format="nemotron-nano-v2"))
    assert [refusal.detail.split(":")[0] for refusal in packing.refused] == ["message 1", "message 2"]


def test_system_messages_in_front_and_in_the_middle(tmp_path):
    chat = write(tmp_path / "chat.jsonl", [[user("1")], [user("2"), system("3"), user("4")], [system("5"), user("6")]])
    packing = pack_files([chat], MINI, settings())
    assert [(r.kind, r.place.line) for r in packing.refused] == [("system_in_the_middle", 2)]
    assert packing.counts()["empty_system_messages_inserted"] == 1
    packing = pack_files([chat], MINI, settings(middle_system="split"))
    assert packing.refused == ()
    assert b"".join(map(row_line, packing.rows)).decode() == (
        json.dumps(
            {"messages": [system(), user("1"), system(), user("2"), system("3"), user("4"), system("5"), user("6")]}
        )
        + "\n"
    )
    counts = packing.counts()
    assert counts["empty_system_messages_inserted"] == 2
    assert counts["conversations_split_at_a_system_message"] == 1
    packing = pack_files([chat], MINI, settings(missing_system="refuse", middle_system="split"))
    assert [(r.kind, r.place.line) for r in packing.refused] == [("missing_system", 1), ("missing_system", 2)]


def test_long_conversations_are_left_out_or_cut_in_a_row_of_their_own(tmp_path):
    chat = write(tmp_path / "chat.jsonl", [digits(n) for n in (2, 8, 9, 3)])
    skipped = pack_files([chat], MINI, settings())
    assert [(r.kind, r.place.line) for r in skipped.refused] == [("too_long", 3)]
    cut = pack_files([chat], MINI, settings(on_long="truncate"))
    assert [[c.place.line for c in row] for row in cut.rows] == [[1, 4], [2], [3]]
    assert cut.counts()["conversations_truncated"] == 1
    assert cut.counts()["truncated_tokens"] == 1
    assert pack_files([chat], MINI, settings(on_long="error")).failures[0].kind == "too_long"
    assert skipped.failures == ()


def test_messages_keep_unknown_keys_and_raw_separators(tmp_path):
    message = {"role": "assistant", "content": "a\u2028b\x85", "tool_calls": [{"name": "é"}]}
    chat = tmp_path / "chat.jsonl.gz"
    line = json.dumps({"id": 7, "messages": [system(), user("1"), message]}, ensure_ascii=False) + "\n"
    chat.write_bytes(gzip.compress(line.encode()))
    packing = pack_files([chat], MINI, settings(pack_length=64, ignore_keys=("tool_calls",)))
    out = row_line(packing.rows[0])
    assert "\u2028".encode() in out
    assert out.count(b"\n") == 1
    assert json.loads(out)["messages"][2] == message
    assert packing.inputs[0].dropped_keys == {"id": 1}
    assert packing.inputs[0].message_keys == {"tool_calls": 1}


# --- lengths


def measure(meter, conversations):
    return meter.measure(
        [
            Conversation(place=SourceLocation(input=0, line=number), messages=tuple(messages))
            for number, messages in enumerate(conversations, 1)
        ]
    )


@pytest.mark.parametrize("prompt_format", FORMATS)
def test_lengths_and_refusals_are_megatron_lms_own(prompt_format):
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer

    theirs = SFTTokenizer(str(MINI), prompt_format)
    conversations = [messages for row in read_rows(SAMPLE)[::10] for messages in split(row)]
    for line in CHAT.read_bytes().decode().split("\n")[-20:-1]:  # the bad ones stand at the end
        messages = json.loads(line)["messages"]
        if messages and all(isinstance(message["content"], str) for message in messages):
            conversations.append([system(), *messages] if messages[0]["role"].lower() != "system" else messages)
    agreed = Counter()
    for messages, ours in zip(
        conversations, measure(LengthMeter(MINI, prompt_format, "megatron-lm-0.19"), conversations), strict=True
    ):
        try:
            tokens, targets = theirs.tokenize_conversation(messages, return_target=True, add_generation_prompt=False)
        except Exception:  # noqa: BLE001 - any error of theirs ends a job
            assert not isinstance(ours, Measured)
            agreed["refused"] += 1
            continue
        if not isinstance(ours, Measured):
            assert ours.kind == "role_case"  # taken by Megatron-LM, and rendered to nothing or not split there
            agreed["stricter"] += 1
            continue
        labels = ours.trained + ours.trained_first + ours.masked_as_padding
        assert (ours.tokens, labels) == (len(tokens), int((targets != -100).sum()))
        agreed["equal"] += 1
    assert agreed["equal"] > 100
    assert agreed["refused"] >= {"identity": 0, "default": 1}.get(prompt_format, 6)
    assert agreed["stricter"] <= 1


# --- the command


def run(*arguments):
    return main([*map(str, arguments), "--tokenizer", str(MINI), "--pack-length", "2048"])


def test_refused_conversations_end_the_command_unless_skipping_is_asked_for(tmp_path, capsys):
    out = tmp_path / "rows.jsonl.packed"
    assert run(CHAT, "--out", out) == 1
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().err
    assert "empty_assistant" in said
    assert "nothing was written" in said
    assert run(CHAT, "--out", out, "--on-bad", "skip", "--on-long", "skip") == 0
    assert {file.name for file in tmp_path.iterdir()} == {out.name, manifest_path(out).name}
    assert "empty_assistant" in capsys.readouterr().out


def test_the_manifest_says_what_the_rows_were_made_of(tmp_path):
    out = tmp_path / "rows.jsonl.packed"
    assert run(CHAT, "--out", out, "--on-bad", "skip", "--on-long", "skip", "--list-refused", 0) == 0
    report = json.loads(manifest_path(out).read_bytes())
    content = out.read_bytes()
    assert report["output"] == {
        "file": out.name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "rows": content.count(b"\n"),
        "digest": fingerprint_file(out).digest,
    }
    assert sum(report["fill"]["counts"]) == report["output"]["rows"]
    assert report["packer"]["name"] == "first_fit_decreasing"
    assert report["inputs"][0]["sha256"] == hashlib.sha256(CHAT.read_bytes()).hexdigest()
    fingerprint = fingerprint_tokenizer(load_cached(MINI)).to_json()
    assert report["tokenizer"] == {**describe_tokenizer(MINI, 4096), "fingerprint": json.loads(json.dumps(fingerprint))}
    assert report["settings"]["prompt_format"] == "nemotron-nano-v2"
    assert report["counts"]["conversations_read"] == CHAT.read_bytes().count(b"\n")
    assert sum(report["refused"].values()) == report["counts"]["conversations_refused"] > 0
    assert set(report["inputs"][0]["refused_lines"]) == set(report["refused"])
    assert str(tmp_path) not in json.dumps(report)
    first = manifest_path(out).read_bytes()
    assert run(CHAT, "--out", out, "--on-bad", "skip", "--on-long", "skip", "--overwrite") == 0
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == (content, first)


def test_the_manifest_names_refused_lines_as_ranges_and_pieces(tmp_path):
    good, bad = [system(), user("1"), assistant("2")], [system(), user("1"), assistant("")]
    chat = write(tmp_path / "chat.jsonl", [bad, good, bad, bad, bad, [*good, *bad], bad])
    packing = pack_files(
        [chat], MINI, settings(prompt_format="nemotron-nano-v2", pack_length=64, middle_system="split")
    )
    assert manifest(packing)["inputs"][0]["refused_lines"] == {"empty_assistant": "1, 3-5, 6/1, 7"}
    assert packing.counts()["conversations_packed"] == 2


def test_bad_input_is_exit_code_2_with_a_remedy(tmp_path, capsys):
    out = tmp_path / "rows.jsonl.packed"
    good = write(tmp_path / "chat.jsonl", [[user("1"), assistant("2")]])
    cases = [
        ((good, "--out", tmp_path / "rows.gz"), "another --out"),
        ((good, good, "--out", out), "given twice"),
        ((tmp_path / "none.jsonl", "--out", out), "none.jsonl"),
        ((good, "--out", out, "--context-parallel-size", 3), "multiple of 6"),
        ((write(tmp_path / "empty.jsonl", []), "--out", out), "no conversation is left"),
        ((good, "--out", good, "--overwrite"), "one of the inputs"),
        ((write(tmp_path / "chat.jsonl.xz", [[user("1")]]), "--out", out), "unpack it"),
    ]
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(good.read_bytes() * 100)[:-20])
    cases.append(((broken, "--out", out), "end too early"))
    for arguments, remedy in cases:
        assert run(*arguments) == 2
        assert remedy in capsys.readouterr().err
        assert not out.exists()
    assert run(good, "--out", out) == 0
    assert run(good, "--out", out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (
        main([str(good), "--tokenizer", str(tmp_path / "no"), "--pack-length", "8", "--out", str(out), "--overwrite"])
        == 2
    )
    assert "packproof-build-tokenizer" in capsys.readouterr().err


# --- the sample


def test_the_sample_is_the_one_its_manifest_describes():
    report = json.loads(manifest_path(SAMPLE).read_bytes())
    content = SAMPLE.read_bytes()
    assert report["output"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert report["output"]["rows"] == content.count(b"\n") == len(read_rows(SAMPLE)) > 200
    assert len(content) < 1_500_000
    for part in report["parts"].values():
        assert part["tokenizer"] == describe_tokenizer(MINI, 4096)


def test_the_rows_that_the_sample_calls_overfull_are():
    report = json.loads(manifest_path(SAMPLE).read_bytes())
    rows = read_rows(SAMPLE)
    meter = LengthMeter(MINI, "nemotron-nano-v2", "megatron-lm-0.19")
    named = report["rows"]
    special = sorted(named["overfull"] + named["of_one_conversation_that_is_cut"])
    looked_at = sorted({*special, *range(0, len(rows), 4)})
    totals = {i: sum(size.tokens for size in measure(meter, split(rows[i]))) for i in looked_at}
    assert [i for i, total in totals.items() if total > 2048] == special
    assert [i for i, row in enumerate(rows) if row[0]["role"] != "system"] == named["without_a_leading_system_message"]
    assert all(len(split(rows[i])) == 1 for i in named["of_one_conversation_that_is_cut"])
    assert min(map(len, named.values())) >= 5
    assert sum(len(split(row)) >= 2 for row in rows) > 200
