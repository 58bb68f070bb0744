"""The scan of whole packed files: the counts of the sample, each kind of finding at its place, and presets against full builds."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from production.errors import BadInput, PackproofError, RowRefused
from production.files.manifest import read_manifest
from production.files.source import open_source
from production.refusals import FIXES
from production.rows.builder import RowBuilder, RowSettings
from production.semantics import PRESETS, parse
from production.tokens.fingerprint import fingerprint_tokenizer
from production.tokens.folder import load_folder
from production.tokens.message_keys import MessageKeys
from production.tokens.prompts import FORMATS, TURN_ROLES, split_conversations
from tools.inspect_rows import scan as module
from tools.inspect_rows import terminal
from tools.inspect_rows.__main__ import main
from tools.inspect_rows.duplicates import RECORD, DuplicateFinder, hash_messages, hash_row
from tools.inspect_rows.fix import Fixer, changes_of
from tools.inspect_rows.scan import scan

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "packed" / "sample.jsonl.packed"
TOKENIZER = ROOT / "examples" / "tokenizers" / "nemotron-mini"
SETTINGS = RowSettings(pack_length=2048)


@pytest.fixture(scope="module")
def tokenizer():
    return load_folder(TOKENIZER)


@pytest.fixture
def write(tmp_path):
    """Writes rows, each a list of (role, content), as a packed file."""

    def write(*rows, name="rows.jsonl", raw=b""):
        lines = [
            json.dumps({"messages": [{"role": role, "content": content} for role, content in row]}).encode() + b"\n"
            for row in rows
        ]
        path = tmp_path / name
        path.write_bytes(b"".join(lines) + raw)
        return path

    return write


CHAT = [("system", "s"), ("user", "hello there"), ("assistant", "good day")]


def inspect(path, tokenizer, settings=SETTINGS, processes=1, **options):
    files = path if isinstance(path, list) else [path]
    return scan(files, TOKENIZER, settings, processes, loaded=tokenizer, **options)


def places(found, kind):
    return [(each.row, each.line, each.conversation) for each in found.findings if each.kind == kind]


def without_time(found):
    whole = found.to_json()
    return {key: value for key, value in whole.items() if key not in ("seconds", "processes")}


@pytest.fixture(scope="module")
def sample(tokenizer):
    return inspect(SAMPLE, tokenizer)


def test_the_samples_losses_are_those_that_its_manifest_tells(sample):
    told = json.loads(SAMPLE.with_name(f"{SAMPLE.name}.manifest.json").read_bytes())["rows"]
    cut = sorted({*told["of_one_conversation_that_is_cut"], *told["overfull"]})
    assert (
        sorted({row for row, _, _ in places(sample, "truncated")} | {row for row, _, _ in places(sample, "dropped")})
        == cut
    )
    assert {each.name: each for each in sample.presets}["nemo-rl-direct"].rows_refused == {
        "row_start": len(told["without_a_leading_system_message"])
    }
    assert sample.loses
    assert sample.exit_status == 1


def test_counts_are_the_sums_of_the_reports_of_rows(sample, tokenizer):
    builder = RowBuilder(tokenizer=tokenizer, settings=SETTINGS)
    with open_source(SAMPLE) as source:
        reports = [row.report for row in builder.build_many(source)]
    for name in (
        "conversations",
        "kept",
        "truncated",
        "dropped",
        "trained_tokens",
        "padding_tokens",
        "truncated_tokens",
    ):
        assert sample.counts[name] == sum(report[name] for report in reports), name
    assert sample.counts["content_tokens"] == sample.counts["row_tokens"] - sample.counts["padding_tokens"]
    assert sum(sample.histograms[0].counts) == sample.counts["conversations_begun"]


def test_presets_are_those_of_building_every_row_under_each(sample, tokenizer):
    """A row is built again only where a preset could change it: the proof is held against building all."""
    with open_source(SAMPLE) as source:
        rows = list(source)
    ours = list(RowBuilder(tokenizer=tokenizer, settings=SETTINGS).build_many(rows))
    for facts in sample.presets:
        settings = RowSettings(pack_length=2048, semantics=PRESETS[facts.name])
        theirs = list(RowBuilder(tokenizer=tokenizer, settings=settings).build_many(rows))
        refused = [other.kind for other in theirs if isinstance(other, RowRefused)]
        equal = sum(_same(row, other) for row, other in zip(ours, theirs, strict=True))
        assert (facts.rows_equal, sum(facts.rows_refused.values())) == (equal, len(refused)), facts.name


def _same(row, other):
    names = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens")
    return not isinstance(other, RowRefused) and all(getattr(row, name).equal(getattr(other, name)) for name in names)


def test_any_number_of_processes_and_runs_finds_the_same(sample, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "RUN_BYTES", 1 << 16)  # twenty runs, where the sample is one
    told = []
    found = inspect(SAMPLE, tokenizer, processes=2, progress=lambda done, total: told.append((done, total)))
    assert without_time(found) == without_time(sample)
    assert len(told) > 15
    assert told[-1] == (241, 241)


def test_each_fault_is_found_at_its_row_line_and_conversation(write, tokenizer):
    path = write(
        CHAT,
        [*CHAT, ("system", "s"), ("user", "q"), ("assistant", "")],
        [*CHAT, ("system", "s"), ("user", "say <unk> please"), ("assistant", "<unk> it is")],
        [("system", "only a prompt"), ("user", "q"), ("tool", "a result"), ("assistant", "word " * 3000), *CHAT],
        raw=b'{"messages": [{"role": "user"}]}\n{"messages": []}\n',
    )
    found = inspect(path, tokenizer)
    assert places(found, "empty_assistant") == [(1, 2, 1)]
    assert [each.turn for each in found.findings if each.kind == "empty_assistant"] == [2]
    assert places(found, "pad_in_content") == [(2, 3, None)]
    assert places(found, "truncated") == [(3, 4, 0)]
    assert places(found, "dropped") == [(3, 4, 1)]
    assert places(found, "unrendered") == [(3, 4, None)]
    assert places(found, "missing_content") == [(4, 5, None)]
    assert places(found, "empty_row") == [(5, 6, None)]
    assert (found.counts["rows_unreadable"], found.counts["rows_refused"], found.counts["rows_built"]) == (2, 1, 3)
    assert found.fails


def test_a_good_file_ends_with_0_and_a_skipped_line_is_a_loss(write, tokenizer):
    assert inspect(write(CHAT), tokenizer).exit_status == 0
    found = inspect(write(CHAT, raw=b"{\n"), tokenizer, on_bad_row="skip")
    assert (found.fails, found.loses) == (False, True)


def test_a_conversation_that_trains_nothing_is_named(write, tokenizer):
    found = inspect(write([*CHAT, ("system", "s"), ("user", "no answer follows")]), tokenizer)
    assert places(found, "trains_nothing") == [(0, 1, 1)]
    assert found.counts["conversations_that_train_nothing"] == 1


def test_lengths_that_2cp_does_not_divide_are_counted_as_a_builder_with_that_cp_pads_them(write, tokenizer):
    path = write([*CHAT, *CHAT, *CHAT], [*CHAT, ("system", "t"), ("user", "u"), ("assistant", "v w x")])
    for facts in inspect(path, tokenizer).context_parallel:
        settings = RowSettings(pack_length=2048, context_parallel_size=facts.size)
        builder = RowBuilder(tokenizer=tokenizer, settings=settings)
        with open_source(path) as source:
            segments = [np.diff(row.cu_seqlens.numpy())[:-1] for row in builder.build_many(source)]
        assert all((each % (2 * facts.size) == 0).all() for each in segments)
        built = [builder.build_whole_group([messages])[0].laid for messages in open_source(path)]
        assert facts.padding_tokens == sum(int(laid.ends[-1] - laid.lengths.sum()) for laid in built)
    tight = RowSettings(pack_length=int(built[0].lengths.sum()))
    assert inspect(path, tokenizer, tight).context_parallel[-1].rows_that_lose == 2


def test_duplicates_are_found_whatever_the_order_of_keys(write, tokenizer):
    path = write(CHAT, [*CHAT, ("system", "x"), ("user", "y"), ("assistant", "z")], CHAT)
    found = inspect(path, tokenizer)
    assert (found.duplicate_rows.redundant, found.duplicate_conversations.redundant) == (1, 2)
    assert found.duplicate_conversations.most_copied[0].places == (
        (str(path), 0, 0),
        (str(path), 1, 0),
        (str(path), 2, 0),
    )
    assert hash_messages([{"role": "a", "content": "b"}]) == hash_messages([{"content": "b", "role": "a"}])
    assert hash_messages([{"role": "a", "content": "b"}]) != hash_messages([{"role": "b", "content": "a"}])


def test_a_row_and_its_conversations_are_hashed_as_messages_are():
    row = [{"role": role, "content": f'{role} é "x"'} for role in ("user", "system", "assistant", "system", "system")]
    assert hash_row(row) == (hash_messages(row), list(map(hash_messages, (row[:1], row[1:3], row[3:4], row[4:]))))
    assert hash_row(row[1:3]) == (hash_messages(row[1:3]), [hash_messages(row[1:3])])


@pytest.mark.parametrize("pack_length", [40, 512, 2048])
@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_rows_are_counted_alike_alone_and_in_a_group(write, tokenizer, monkeypatch, pack_length, context_parallel_size):
    """The counts of a group come from arrays over all its rows, so that no row may touch another's."""
    empty = [("system", ""), ("user", ""), ("assistant", "x")]
    odd = [("system", "<unk> s"), ("user", "/think <SPECIAL_11>"), ("assistant", "a b <unk>")]
    long = [("system", "s"), ("user", "word " * 60), ("assistant", "answer " * 700)]
    tool = [("system", "s"), ("tool", "t"), ("user", "u")]
    refused = [("system", "s"), ("assistant", "a")]
    rows = [
        CHAT * 9,
        odd,
        long + CHAT,
        CHAT + long + CHAT,
        refused,
        tool + CHAT,
        empty * 3,
        CHAT,
        odd + refused,
        long * 2,
    ]
    path = write(*rows, raw=b"no row\n")
    settings = RowSettings(pack_length=pack_length, context_parallel_size=context_parallel_size)
    together = without_time(inspect(path, tokenizer, settings))
    with monkeypatch.context() as patch:
        patch.setattr(module, "GROUP_TOKENS", 1)
        alone = without_time(inspect(path, tokenizer, settings))
    assert together == alone
    assert together["counts"]["rows_built"] >= 7
    assert together["counts"]["rows_refused"] >= 2


def test_duplicates_on_disk_are_those_in_memory(tmp_path):
    draws = np.random.default_rng(3)
    records = np.zeros(5_000, dtype=RECORD)
    records["high"] = draws.integers(0, 1 << 63, 1_500, dtype=np.uint64)[draws.integers(0, 1_500, 5_000)] << np.uint64(
        1
    )
    records["row"] = np.arange(5_000)
    found = []
    for most in (64, 1 << 20):
        with DuplicateFinder(tmp_path, in_memory=most) as finder:
            for part in np.array_split(records, 40):
                finder.add(part)
            found.append(
                [finder.summary(5)[:3], [group.tolist() for group in finder.summary(5)[3]], finder.redundant().tolist()]
            )
        assert not list(tmp_path.iterdir())
    assert found[0] == found[1]
    assert found[0][0][1] == 5_000 - len(np.unique(records["high"]))


def test_ids_outside_the_models_vocabulary_fail(write, tokenizer):
    found = inspect(write(CHAT), tokenizer, vocab_size=100)
    assert found.fails
    assert found.counts["ids_outside_vocabulary"] > 0


def test_keys_that_a_run_refuses_fail(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    messages = [{"role": role, "content": content} for role, content in CHAT]
    messages[2]["weight"] = 0
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert places(inspect(path, tokenizer), "training_key") == [(0, 1, 0)]
    assert not inspect(path, tokenizer, ignore_keys=("weight",)).fails


def test_a_turn_that_merges_with_its_neighbour_is_counted_by_preset(write, tokenizer):
    """Fields that no count shows (turn_check, long_assistant_prefix) are found by a stricter build of the same row."""
    settings = RowSettings(pack_length=64, assistant_prefix_len=9)
    found = inspect(write([("system", "s"), ("user", "u"), ("assistant", "a")]), tokenizer, settings)
    assert {each.name: each for each in found.presets}["megatron-lm-0.19"].rows_equal == 1
    assert {each.name: each for each in found.presets}["nemo-rl-direct"].rows_refused == {"prefix_too_long": 1}


def test_findings_are_kept_per_kind_and_all_are_handed_on(write, tokenizer):
    told = []
    found = inspect(write(*[[*CHAT, ("tool", "t")]] * 5), tokenizer, keep=2, on_finding=told.append)
    assert len(places(found, "unrendered")) == 2
    assert found.findings_by_kind["unrendered"] == len([each for each in told if each.kind == "unrendered"]) == 5


def test_a_budget_of_rows_says_that_the_scan_is_not_complete(tokenizer):
    found = inspect(SAMPLE, tokenizer, most_rows=3)
    assert (found.counts["rows"], found.rows_complete) == (3, False)


def test_bad_input_is_refused_with_its_fix(tmp_path, tokenizer):
    with pytest.raises(BadInput, match="there is no such file"):
        inspect(tmp_path / "none", tokenizer)
    with pytest.raises(PackproofError, match="the tokenizer folder does not exist"):
        scan([SAMPLE], tmp_path / "none", SETTINGS, 1)
    with pytest.raises(PackproofError, match="give at least 1"):
        inspect(SAMPLE, tokenizer, processes=0)


def test_settings_are_reported_as_semantics_can_be_parsed(tokenizer):
    semantics = parse("strict,lost_conversations=refuse")
    found = inspect(SAMPLE, tokenizer, RowSettings(pack_length=2048, semantics=semantics), most_rows=1)
    assert parse(found.settings["semantics"]) == semantics


def repair(path, out, tokenizer, settings=SETTINGS, **options):
    keys = MessageKeys.of_format(settings.prompt_format, settings.semantics, tokenizer, ignored=(), ignore="")
    fixer = Fixer(tokenizer=tokenizer, settings=settings, keys=keys, **options)
    with open_source(path) as source:
        return fixer.write(source, out)


def conversations_of(path):
    with open_source(path) as source:
        rows = [split_conversations(messages) for messages in source]
    return [json.dumps(row.conversation(number)) for row in rows for number in range(row.count)]


def test_split_keeps_every_conversation_that_a_row_can_hold_and_lists_the_others(tmp_path, tokenizer):
    before = SAMPLE.read_bytes()
    out = tmp_path / "fixed.jsonl"
    repair(SAMPLE, out, tokenizer, by="split")
    changes = list(changes_of(tmp_path / "fixed.jsonl.changes.jsonl"))
    lost = [change for change in changes if change["action"] == "dropped_conversation"]
    assert {change["kind"] for change in lost} == {"too_long"}
    whole = conversations_of(SAMPLE)
    kept = conversations_of(out)
    assert len(kept) == len(whole) - len(lost)
    assert sorted(kept) == sorted(_without(whole, lost))
    found = inspect(out, tokenizer)
    assert (found.counts["truncated"], found.counts["dropped"], found.counts["rows_refused"]) == (0, 0, 0)
    assert SAMPLE.read_bytes() == before


def _without(whole, lost):
    """The conversations of the sample but those that the list names, each by its line and number."""
    with open_source(SAMPLE) as source:
        names = [
            (line, number)
            for line, messages in enumerate(source, 1)
            for number in range(split_conversations(messages).count)
        ]
    gone = {(change["line"], change["conversation"]) for change in lost}
    return [conversation for name, conversation in zip(names, whole, strict=True) if name not in gone]


def test_drop_leaves_out_what_does_not_fit_and_moves_nothing(tmp_path, tokenizer):
    repaired = repair(SAMPLE, tmp_path / "fixed.jsonl", tokenizer, by="drop")
    assert "moved_conversation" not in repaired.by_action
    assert repaired.by_action["dropped_conversation"] == 30
    assert not inspect(tmp_path / "fixed.jsonl", tokenizer).counts["truncated"]


def test_mark_changes_no_message_and_names_each_rows_faults(tmp_path, tokenizer):
    out = tmp_path / "fixed.jsonl"
    repair(SAMPLE, out, tokenizer, by="mark")
    assert conversations_of(out) == conversations_of(SAMPLE)
    marks = [json.loads(line).get("packproof") for line in out.read_text().removesuffix("\n").split("\n")]
    assert marks[5] == ["truncated"]
    assert marks[1] is None


def test_refused_conversations_are_left_out_under_the_jobs_semantics(write, tmp_path, tokenizer):
    path = write([*CHAT, ("system", "s"), ("user", "q"), ("assistant", ""), *CHAT], raw=b"{\n")
    repair(path, tmp_path / "fixed.jsonl", tokenizer, by="split")
    changes = list(changes_of(tmp_path / "fixed.jsonl.changes.jsonl"))
    assert [(each["action"], each["kind"], each["line"], each["conversation"]) for each in changes] == [
        ("dropped_conversation", "empty_assistant", 1, 1),
        ("dropped_line", "invalid_json", 2, None),
    ]
    assert len(conversations_of(tmp_path / "fixed.jsonl")) == 2


def test_copies_and_idle_conversations_are_left_out_where_asked_for(write, tmp_path, tokenizer):
    path = write(CHAT, [*CHAT, ("system", "s"), ("user", "idle")], CHAT)
    redundant = []
    inspect(path, tokenizer, on_redundant=redundant.append)
    repaired = repair(path, tmp_path / "fixed.jsonl", tokenizer, by="split", redundant=redundant[0], drop_idle=True)
    assert repaired.rows == 1
    assert [each["kind"] for each in changes_of(repaired.changes)] == [
        "duplicate",
        "trains_nothing",
        "nothing_left",
        "duplicate",
        "nothing_left",
    ]


def test_the_original_is_never_written_to(tmp_path, write, tokenizer):
    path = write(CHAT)
    with pytest.raises(PackproofError, match="originals are never changed"):
        repair(path, path, tokenizer, by="split")
    assert list(tmp_path.glob("*.tmp")) == []


def command(*arguments):
    return main([*map(str, arguments), "--tokenizer", str(TOKENIZER), "--processes", "1"])


def test_the_command_tells_places_and_fixes_and_writes_what_is_asked_for(tmp_path, write, capsys):
    path = write(CHAT, [*CHAT, ("system", "s"), ("user", "q"), ("assistant", "")])
    html, log = tmp_path / "page.html", tmp_path / "all.jsonl"
    assert command(path, "--pack-length", 2048, "--html", html, "--findings", log, "--fix", tmp_path / "out.jsonl") == 1
    printed = capsys.readouterr().out
    assert "A run with these settings fails at 1 of 2 rows." in printed
    assert f"fails empty_assistant: {path} line 2 conversation 1 turn 2" in printed
    assert "the repaired file, inspected: A run feeds all of 2 rows." in printed
    assert json.loads(log.read_text().splitlines()[0])["kind"] == "empty_assistant"
    page = html.read_text()
    assert "a run fails" in page
    assert page.count("<svg") == 12
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_a_repair_keeps_rows_that_were_written_in_another_way_and_lists_them(tmp_path, capsys):
    messages = [{"role": role, "content": content} for role, content in CHAT]
    row = json.dumps({"messages": messages}).encode()
    turns = {
        "conversations": [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "good day"}],
        "system": "s",
    }
    lines = [
        b"\xef\xbb\xbf" + row + b"\r",
        row + b"\r",
        row,
        json.dumps(turns).encode(),
        json.dumps(messages).encode(),
        b"[]",
        b"{",
    ]
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(b"\n".join([*lines, b""]))
    assert command(path, "--pack-length", 64, "--fix", out) == 1
    printed = capsys.readouterr().out
    assert f"wrote {out}: 5 rows; dropped 2 lines, repaired 4 lines" in printed
    assert (
        "2 lines could not be read as a row and are not in the repaired file: 1 invalid_json, 1 row_not_object"
        in printed
    )
    assert [json.loads(line)["messages"] for line in out.read_bytes().splitlines()] == [messages] * 5
    assert b"\r" not in out.read_bytes()
    changes = [
        (each["action"], each["kind"], each["line"], each["out_row"])
        for each in changes_of(tmp_path / "out.jsonl.changes.jsonl")
    ]
    assert changes == [
        ("repaired_line", "bom", 1, 0),
        ("repaired_line", "carriage_return", 2, 1),
        ("repaired_line", "sharegpt", 4, 3),
        ("repaired_line", "bare_messages", 5, 4),
        ("dropped_line", "row_not_object", 6, None),
        ("dropped_line", "invalid_json", 7, None),
    ]


@pytest.mark.parametrize("taken", ["out.jsonl", "out.jsonl.changes.jsonl"])
def test_a_repair_replaces_no_file_unasked(tmp_path, write, capsys, taken):
    path, out = write(CHAT), tmp_path / "out.jsonl"
    (tmp_path / taken).write_text("mine")
    assert command(path, "--pack-length", 64, "--fix", out) == 2
    assert capsys.readouterr().err == (
        f"packproof inspect: {tmp_path / taken}: the file exists. To fix it: choose another --fix, or replace it with --overwrite\n"
    )
    assert (tmp_path / taken).read_text() == "mine"
    assert command(path, "--pack-length", 64, "--fix", out, "--overwrite") == 0
    assert "wrote" in capsys.readouterr().out
    assert command(path, "--pack-length", 64, "--fix", path, "--overwrite") == 2
    assert "originals are never changed" in capsys.readouterr().err


def test_rows_that_lose_most_are_named_by_line_and_row(tmp_path, write, tokenizer, capsys):
    long = [("system", "s"), ("user", "word " * 90), ("assistant", "yes")]
    one, other = write(CHAT, long, name="one.jsonl"), write(CHAT, CHAT, long, name="other.jsonl")
    found = inspect([one, other], tokenizer, RowSettings(pack_length=64))
    assert [place for place, _ in terminal.worst_rows(found)] == [f"{one} line 2, row 1", f"{other} line 3, row 2"]
    assert [place for place, _ in terminal.worst_rows(inspect(other, tokenizer, RowSettings(pack_length=64)))] == [
        "line 3, row 2"
    ]
    html = tmp_path / "page.html"
    assert command(one, "--pack-length", 64, "--html", html) == 1
    assert '<td class="place">line 2, row 1</td>' in html.read_text()
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 conversations is cut or left out" in printed
    assert "1 process)" in printed


def test_the_table_of_presets_says_what_is_counted_and_that_tokens_are_a_difference(write, capsys):
    assert terminal.PRESET_COLUMNS[1] == "equal"
    assert terminal.PRESET_COLUMNS[-1] == "trained tokens"
    assert command(write(CHAT), "--pack-length", 64) == 0
    assert "trained tokens: the difference" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("prompt_format", ["nemotron-nano-v2", "nemotron-h-aligned"])
def test_the_advice_on_an_unknown_role_names_the_formats_that_render_no_tool(prompt_format):
    fix = FIXES["unknown_role"]
    assert prompt_format in fix
    assert "render only the first three" in fix
    assert TURN_ROLES[:3] == FORMATS[prompt_format].rendered_roles
    assert {name for name, each in FORMATS.items() if each.rendered_roles is not None and name not in fix} == set()


def test_json_is_one_object_and_nothing_else(write, capsys):
    assert command(write(CHAT), "--pack-length", 64, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "good"


def test_a_manifest_is_written_where_there_is_none_and_read_by_everybody(write, capsys, tokenizer):
    path = write(CHAT)
    assert command(path) == 2
    assert "give --pack-length" in capsys.readouterr().err
    assert command(path, "--pack-length", 64, "--semantics", "strict", "--write-manifest") == 0
    manifest = read_manifest(path)
    assert manifest.settings == {
        "pack_length": 64,
        "prompt_format": "nemotron-nano-v2",
        "context_parallel_size": 1,
        "semantics": "strict",
    }
    assert manifest.tokenizer_fingerprint == json.loads(json.dumps(fingerprint_tokenizer(tokenizer).to_json()))
    assert manifest.output["rows"] == sum(manifest.fill["counts"]) == 1
    assert command(path) == 0
    capsys.readouterr()
    assert command(path, "--write-manifest") == 2
    assert "has a manifest already" in capsys.readouterr().err


def test_a_manifest_of_another_tokenizer_or_other_bytes_is_reported(write, capsys):
    path = write(CHAT)
    assert command(path, "--pack-length", 64, "--write-manifest") == 0
    assert "note: " not in capsys.readouterr().out
    place = path.with_name(f"{path.name}.manifest.json")
    manifest = json.loads(place.read_bytes())
    manifest["tokenizer"]["fingerprint"]["probes"]["digits"][1] += 1
    del manifest["format"], manifest["checksum"]  # as whoever changes one by hand must
    place.write_text(json.dumps(manifest))
    path.write_bytes(path.read_bytes().replace(b"hello", b"jello"))
    assert command(path) == 0
    printed = capsys.readouterr().out
    assert "was packed with another tokenizer" in printed
    assert "The probe text 'digits'" in printed
    assert "is not the file that its manifest describes" in printed


def test_the_notes_of_a_file_are_those_of_a_check(write, capsys):
    """CRLF, separators, another tokenizer's markers, and rows that look packed for something else."""
    odd = [("system", "s"), ("user", "<|im_start|>one\u2028two"), ("assistant", "three")]
    long = [("system", "s"), ("user", "word " * 3000), ("assistant", "an answer")]
    path = write(*[long] * 20, odd, raw=json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode() + b"\r\n")
    main([str(path), "--tokenizer", str(TOKENIZER), "--pack-length", "2048", "--processes", "1"])
    printed = capsys.readouterr().out
    assert f"note: {path}, line 22: 1 line ends in CRLF" in printed
    assert f"note: {path}, line 21: 1 line holds U+2028" in printed
    assert f"note: {path}, line 21: <|im_start|> stands in 1 line and is" in printed
    assert f"note: {path}: 90.9 % of its rows are overfull, as if packed for another tokenizer" in printed


def test_presets_are_reported_apart_in_80_columns(sample):
    console = Console(width=80, record=True, file=io.StringIO())
    terminal.show(sample, console)
    printed = console.export_text()
    assert all(re.search(rf"^│ {re.escape(each.name)} +│", printed, re.MULTILINE) for each in sample.presets), printed
