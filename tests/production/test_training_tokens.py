"""A job whose tokens would not be what the user meant: refused or told before any model is built, counted while it runs."""

import gzip
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import training_job_worlds as jobs
import zstandard

from equivalence.generators import tokenizers
from production.errors import PackproofError
from production.files.source import open_source
from production.parallel.sizes import RankCoordinates
from production.rows.builder import RowSettings
from production.rows.guards import BatchSettings
from production.semantics import parse
from production.tokens.message_keys import MessageKeys
from production.training.__main__ import main
from production.training.config import load
from production.training.data.batch_stream import BatchStream
from production.training.data.dataset import BadRow, PackedData
from production.training.data.first_rows import check_first_rows
from production.training.data.order import Sample
from production.training.data.tokenizer import load_tokenizer
from production.training.metrics.loggers import Record
from production.training.metrics.summary import summarize

TRAIN = "data.train"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The small job's file."""
    folder = tmp_path_factory.mktemp("job")
    return jobs.write_job(folder, jobs.write_rows(folder / "rows.jsonl"))


@pytest.fixture
def dry_run(config, capsys):
    """What a dry run says of the small job with these changes: its status, and both streams."""

    def run(**changes):
        status = main(["--config", str(config), "--dry-run", *(f"{key}={value}" for key, value in changes.items())])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def checked(config):
    """What the start of a run makes of the small job with these changes."""

    def check(**changes):
        job = load(config, [f"{key}={value}" for key, value in changes.items()])
        found = check_first_rows(job, load_tokenizer(job))
        for refusal in found.refusals:
            raise refusal
        return found.token_notes

    return check


def write(path, rows):
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def rows_with(**last):
    """Rows of the small job of which the third has these keys in its first answer."""
    rows = [jobs.conversation(number) for number in range(6)]
    rows[2][2] |= last
    return rows


@pytest.mark.parametrize("preset", ["megatron-lm-0.19", "strict"])
@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        ("only-unk", "its marker <SPECIAL_11> is 11 tokens of this tokenizer, not one"),
        ("bytes", "8 tokens of this tokenizer, and the assistant prefix, which is not trained, 3"),
    ],
)
def test_a_tokenizer_without_the_formats_markers_is_refused(dry_run, checked, preset, tokenizer, why):
    """R-FIT-1 and 2."""
    changes = {
        "policy.tokenizer.name": tokenizers.folder(tokenizer), "data.default.semantics": preset, "model.vocab_size": "null",
    }  # fmt: skip
    status, _, said = dry_run(**changes)
    assert status == 2
    assert "data.train.megatron_sft_prompt_format" in said
    assert why in said
    assert "allow_format_misfit: true" in said
    with pytest.raises(PackproofError, match="does not fit this tokenizer") as caught:
        checked(**changes)
    assert caught.value.kind == "format_misfit"
    notes = checked(**changes, **{"data.default.allow_format_misfit": "true"})
    assert [note.kind for note in notes if note.kind == "format_misfit"] == ["format_misfit"]
    assert "does not fit" in dry_run(**changes, **{"data.default.allow_format_misfit": "true"})[1]


def test_a_prefix_that_is_not_the_headers_length_is_refused(dry_run):
    """R-FIT-2."""
    for prefix in (2, 4, 0):
        status, _, said = dry_run(**{"data.default.megatron_sft_assistant_prefix_len": prefix})
        assert (status, "assistant header" in said) == (2, True)
    assert dry_run(**{"data.default.megatron_sft_assistant_prefix_len": 3})[0] == 0


def test_a_pad_token_that_every_row_would_be_refused_for_is_refused_at_once(dry_run):
    changes = {"data.default.megatron_sft_pad_token": "<no such token>"}
    status, said, _ = dry_run(**changes)
    assert (status, "lacks the pad token <no such token>" in said) == (0, True)
    status, _, said = dry_run(**changes, **{"data.default.semantics": "strict"})
    assert status == 2
    assert "data.train.megatron_sft_pad_token" in said


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"data.default.megatron_sft_pad_token": "<SPECIAL_12>"}, ["pad_is_eos"]),
        ({"data.default.megatron_sft_prompt_format": "identity"}, ["trains_prompts"]),
        ({"data.default.megatron_sft_prompt_format": "identity", "data.default.semantics": "strict"}, []),
        ({"data.default.megatron_sft_prompt_format": "default"}, ["pad_is_eos", "trains_prompts"]),
        ({"data.default.megatron_sft_prompt_format": "default", "data.default.semantics": "strict"}, ["pad_is_eos", "trains_prompts"]),
    ],
)  # fmt: skip
def test_what_is_so_of_every_row_is_told(checked, dry_run, changes, kinds):
    """R-TOLD-1."""
    notes = checked(**changes)
    assert [note.kind for note in notes] == kinds
    status, said, _ = dry_run(**changes)
    assert status == 0
    for note in notes:
        assert f"note: {note.text}" in said


def test_strict_trains_the_end_of_an_answer_whatever_the_pad_token_is(checked):
    def text(preset):
        (note,) = checked(**{"data.default.megatron_sft_pad_token": "<SPECIAL_12>", "data.default.semantics": preset})
        return note.text

    assert "the end of an answer is never trained" in text("megatron-lm-0.19")
    assert "the end of an answer is trained" in text("strict")


def test_a_template_that_reads_the_clock_is_reported(checked, tmp_path):
    folder = Path(shutil.copytree(jobs.TOKENIZER, tmp_path / "tokenizer"))
    template = folder / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    changes = {"policy.tokenizer.name": folder, "data.default.megatron_sft_prompt_format": "default"}
    assert "reads_clock" in [note.kind for note in checked(**changes)]
    assert checked(**{"policy.tokenizer.name": folder}) == ()  # another format does not render it


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [("weight", 0, "training_key"), ("loss", False, "training_key"), ("reasoning_content", "hm", "unread_key")],
)
def test_keys_that_no_row_honours_are_refused_before_a_model_is_built(checked, dry_run, tmp_path, key, value, kind):
    """R-KEYS-1 and 2."""
    file = write(tmp_path / "rows.jsonl", rows_with(**{key: value}))
    status, _, said = dry_run(**{f"{TRAIN}.data_path": file})
    assert status == 2
    assert f"{file}, line 3, conversation 0, turn 2" in said
    assert f"the key '{key}'" in said
    with pytest.raises(PackproofError, match=key) as caught:
        checked(**{f"{TRAIN}.data_path": file})
    assert caught.value.kind == kind
    ignoring = {f"{TRAIN}.data_path": file, "data.default.ignore_keys": f"[{key}]"}
    assert checked(**ignoring) == ()
    assert dry_run(**ignoring)[0] == 0


def test_a_row_far_into_the_file_is_refused_when_it_is_prepared(tmp_path):
    rows = [jobs.conversation(number) for number in range(3)]
    rows[2][2]["weight"] = 0
    rows[1][2]["content"] += " <unk> and <SPECIAL_12>"
    tokenizer = load_tokenizer_at(jobs.TOKENIZER)
    settings = RowSettings(pack_length=64)
    with open_source([write(tmp_path / "rows.jsonl", rows)]) as source:
        data = PackedData(
            sources=[source],
            tokenizer=tokenizer,
            settings=settings,
            guards=BatchSettings(context_parallel_size=1, data_parallel_size=1, global_batch_size=2),
            keys=MessageKeys.of_format(
                "nemotron-nano-v2", parse("megatron-lm-0.19"), tokenizer, ignored=(), ignore="ignore_keys"
            ),
        )
        first, second, third = data.prepare([Sample(source=0, row=row, epoch=0) for row in range(3)])
    assert isinstance(third, BadRow)
    assert (third.kind, third.line, third.row) == ("training_key", 3, 2)
    _, counts = data.assemble([first, second], [1.0, 1.0])
    assert (counts.control_tokens, counts.labels_masked_as_padding) == (2, 1)
    _, counts = data.assemble([first], [1.0])
    assert (counts.control_tokens, counts.labels_masked_as_padding) == (0, 0)


def load_tokenizer_at(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_prompts_that_a_format_trains_are_counted(tmp_path, dry_run):
    """R-TOLD-2."""
    file = write(tmp_path / "rows.jsonl", [[*jobs.conversation(number), *jobs.conversation(9)] for number in range(3)])
    tokenizer = load_tokenizer_at(jobs.TOKENIZER)
    counted = {}
    for name in ("identity", "nemotron-nano-v2"):
        guards = BatchSettings(context_parallel_size=1, data_parallel_size=1, global_batch_size=3)
        with open_source([file]) as source:
            settings = RowSettings(pack_length=64, prompt_format=name)
            data = PackedData(sources=[source], tokenizer=tokenizer, settings=settings, guards=guards)
            rows = data.prepare([Sample(source=0, row=row, epoch=0) for row in range(3)])
        counted[name] = data.assemble(rows, [1.0, 1.0, 0.0])[1].prompt_messages_trained
    assert counted == {"identity": 4, "nemotron-nano-v2": 0}  # an empty system message trains nothing
    _, said, _ = dry_run(**{f"{TRAIN}.data_path": file, "data.default.megatron_sft_prompt_format": "identity"})
    assert "in the first 3 rows 6 of 18 messages are of the system, users and tools, and are trained" in said


def test_over_long_conversations_of_a_validation_are_counted_by_every_rank(tmp_path):
    chat = tmp_path / "chat.jsonl"
    lengths = (2, 2, 40, 2, 40)
    rows = [
        [{"role": "user", "content": "river"}, {"role": "assistant", "content": jobs.words(1, count)}]
        for count in lengths
    ]
    write(chat, rows)
    changes = {
        "data.train.dataset_name": "openai_format", "policy.sequence_packing.enabled": True,
        "loss.normalization": "global_valid_tokens", "data.max_input_seq_length": 32, "data.num_workers": 0,
        "data.validation": {"dataset_name": "openai_format", "data_path": str(chat)},
    }  # fmt: skip
    job = load(jobs.write_job(tmp_path, chat, **changes))
    for rank in (0, 1):
        place = RankCoordinates(
            rank=rank, world_size=2, tensor_rank=0, context_rank=0, context_size=1, data_rank=rank, data_size=2,
            pipeline_rank=0, pipeline_size=1,
        )  # fmt: skip
        with BatchStream(job, place) as feed:
            assert [fed.conversations_masked_out for fed in feed.validation()] == [
                1,
                1,
            ]  # what fills the last batch is none


def test_the_closing_table_has_the_notes_and_the_counts():
    """R-TOLD-1 and 2."""
    step = {
        "loss": 1.0, "step_seconds": 1.0, "tokens": 8, "padding_share": 0.0, "trained_tokens": 4, "data_wait_seconds": 0.0,
        "memory_mebibytes": 1.0, "consumed_samples": 1, "control_tokens": 3, "labels_masked_as_padding": 2,
        "prompt_messages_trained": 5,
    }  # fmt: skip
    records = [
        Record(kind="run", step=0, values={"note_pad_is_eos": "the pad token is the end of an answer"}),
        Record(kind="step", step=1, values=step),
        Record(kind="step", step=2, values=step),
    ]
    summary = summarize(records)
    assert (summary.control_tokens, summary.labels_masked_as_padding) == (6, 4)
    assert summary.prompt_messages_trained == 10
    assert summary.notes == ["the pad token is the end of an answer"]


def test_a_dry_run_notes_the_contents_of_the_first_rows(dry_run, tmp_path):
    rows = [jobs.conversation(number) for number in range(3)]
    rows[1][2]["content"] += " <SPECIAL_12>"
    rows[2][1]["content"] += " see /thinking"
    _, said, _ = dry_run(**{f"{TRAIN}.data_path": write(tmp_path / "rows.jsonl", rows)})
    assert "in the first 3 rows 1 control tokens" in said
    assert "1 messages hold /think" in said


def test_a_packed_file_whose_end_was_cut_is_found_before_a_model_is_built(checked, dry_run, tmp_path):
    """R-FILE-13."""
    file = write(tmp_path / "rows.jsonl.packed", rows_with())
    whole = file.read_bytes()
    file.write_bytes(whole[:-30])  # within the last row
    for look in (lambda: checked(**{f"{TRAIN}.data_path": file}),):
        with pytest.raises(PackproofError, match="the file ends within its last row"):
            look()
    assert dry_run(**{f"{TRAIN}.data_path": file})[0] == 2
    file.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])  # at a line's end: only the manifest tells
    assert checked(**{f"{TRAIN}.data_path": file}) == ()
    manifest = tmp_path / "rows.jsonl.packed.manifest.json"
    manifest.write_text(json.dumps({"output": {"bytes": len(whole), "rows": 6}}))
    with pytest.raises(PackproofError, match=f"of a file of {len(whole):,} bytes"):
        checked(**{f"{TRAIN}.data_path": file})
    status, _, said = dry_run(**{f"{TRAIN}.data_path": file})
    assert (status, "pack the file again" in said) == (2, True)
    file.write_bytes(whole)
    assert checked(**{f"{TRAIN}.data_path": file}) == ()


def test_r_file_13_a_file_whose_rows_differ_from_its_manifest_is_refused_also_compressed(checked, dry_run, tmp_path):
    plain = write(tmp_path / "rows.jsonl.packed", rows_with())
    whole = plain.read_bytes()
    output = {"bytes": len(whole), "rows": 6, "sha256": hashlib.sha256(whole).hexdigest()}
    manifest = tmp_path / "rows.jsonl.packed.manifest.json"
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    swapped = whole.replace(jobs.words(1, 4).encode(), jobs.words(1, 4)[::-1].encode(), 1)
    for suffix, pack in packed.items():
        file = tmp_path / f"rows.jsonl.packed{suffix}"
        for content, said, why in (
            (whole, {}, None),
            (whole, {"rows": 7}, "rows 7"),
            (whole[: whole[:-1].rindex(b"\n") + 1], {}, "bytes"),
            (whole + whole, {}, "bytes"),
            (swapped, {}, "sha256"),
        ):
            manifest.write_text(json.dumps({"output": output | said}))
            file.write_bytes(pack(content))
            status, _, err = dry_run(**{f"{TRAIN}.data_path": file})
            assert (status, why is None or why in err) == (2 if why else 0, True), (suffix, why, err)
            if why is not None:
                assert "pack the file again" in err
                with pytest.raises(PackproofError, match="the manifest is of a file"):
                    checked(**{f"{TRAIN}.data_path": file})


def test_a_dry_run_refuses_a_file_that_is_not_json_lines(dry_run, tmp_path):
    file = tmp_path / "rows.jsonl"
    for content, why in ((b"PAR1" + bytes(60), "a Parquet file"), (b"", "the file has no row"), (b"[\n {}\n]", "one JSON array")):  # fmt: skip
        file.write_bytes(content)
        status, _, said = dry_run(**{f"{TRAIN}.data_path": file})
        assert (status, why in said, "To fix it" in said) == (2, True, True)
    assert not list(tmp_path.glob("*index*"))  # a dry run writes nothing
