"""The scan of whole packed files: the counts of the sample, each kind of finding at its place, and presets against full builds."""

import json
from pathlib import Path

import numpy as np
import pytest

from production.errors import BadInput, PackproofError, RowRefused
from production.files.source import open_source
from production.rows.builder import RowBuilder, RowSettings
from production.semantics import PRESETS, parse
from production.tokens.folder import load_folder
from tools.inspect_rows.duplicates import RECORD, DuplicateFinder, hash_messages
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
    assert sample.presets[2].rows_refused == {"row_start": len(told["without_a_leading_system_message"])}
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


def test_any_number_of_processes_finds_the_same(sample, tokenizer):
    assert without_time(inspect(SAMPLE, tokenizer, processes=2)) == without_time(sample)


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
    assert found.presets[0].rows_equal == 1
    assert found.presets[2].rows_refused == {"prefix_too_long": 1}


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
    with pytest.raises(PackproofError, match="no such tokenizer folder"):
        scan([SAMPLE], tmp_path / "none", SETTINGS, 1)
    with pytest.raises(PackproofError, match="give at least 1"):
        inspect(SAMPLE, tokenizer, processes=0)


def test_settings_are_told_as_semantics_can_be_parsed(tokenizer):
    semantics = parse("strict,lost_conversations=refuse")
    found = inspect(SAMPLE, tokenizer, RowSettings(pack_length=2048, semantics=semantics), most_rows=1)
    assert parse(found.settings["semantics"]) == semantics
