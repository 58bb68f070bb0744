"""Dumps of diff_row: written and read under both name sets, compared with sides, and looked at on their own."""

import json

import pytest
import torch
from diff_row_fakes import LEAKY, MASK, NAN, POSITION, REFERENCE, SHIFTED, SHORT, conversation, many, write_rows
from safetensors.torch import load_file, save_file

from equivalence.generators.tokenizers import load
from equivalence.subjects import ROW_TENSORS, RowSettings
from tools.diff_row.__main__ import main
from tools.diff_row.dump import NAMES, read_dump, write_dump
from tools.diff_row.inspection import inspect
from tools.diff_row.problems import BadInput

SETTINGS = RowSettings(pack_length=32, prompt_format="identity")


def build(messages, side=REFERENCE, settings=SETTINGS):
    return side.build_row(messages, load("word"), settings)


@pytest.mark.parametrize("names", sorted(NAMES))
def test_rows_come_back_to_the_bit(tmp_path, names):
    rows = [build(many(count)) for count in (1, 3, 2)]
    write_dump(tmp_path / "x.safetensors", rows, names=names)
    for number, row in enumerate(rows):
        read = read_dump(tmp_path / "x.safetensors", number)
        assert (read.names, read.rows, read.row.max_seqlen) == (names, 3, row.max_seqlen)
        for tensor in ROW_TENSORS:
            found, expected = getattr(read.row, tensor), getattr(row, tensor)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), tensor


def test_a_batch_as_collate_makes_it_and_one_row_without_a_batch_dimension(tmp_path):
    rows = [build(many(count)) for count in (1, 3)]
    batch = vars(REFERENCE.collate(rows, SETTINGS))
    write_dump(tmp_path / "batch.safetensors", batch)
    assert torch.equal(read_dump(tmp_path / "batch.safetensors", 1).row.cu_seqlens, rows[1].cu_seqlens)
    flat = {"tokens": rows[0].input_ids, "labels": rows[0].target_ids, "loss_mask": rows[0].token_mask}
    flat |= {"position_ids": rows[0].position_ids, "cu_seqlens": rows[0].cu_seqlens, "max_seqlen": torch.tensor(32)}
    write_dump(tmp_path / "flat.safetensors", flat | {"attention_mask": None})
    assert torch.equal(read_dump(tmp_path / "flat.safetensors").row.input_ids, rows[0].input_ids)


def test_a_dtype_that_a_job_changed_is_kept_and_seen(tmp_path):
    row = build(many(2))
    write_dump(tmp_path / "x.safetensors", [row])
    tensors = load_file(tmp_path / "x.safetensors")
    save_file({**tensors, "token_mask": tensors["token_mask"].bfloat16()}, tmp_path / "x.safetensors")
    read = read_dump(tmp_path / "x.safetensors").row
    assert read.token_mask.dtype == torch.bfloat16
    assert [flaw.what for flaw in inspect(read) if not flaw.note] == ["token_mask is bfloat16, not float32"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("labels"), "has no labels"),
        (lambda tensors: tensors.update(tokens=torch.zeros(1, 2, 3)), "a batch is \\[B, P\\]"),
        (lambda tensors: tensors.update(labels=torch.zeros(3, 32)), "one entry a row"),
        (lambda tensors: tensors.update(labels=torch.zeros(2, 31)), "row 0 has tokens 32, labels 31"),
    ],
)
def test_a_dump_that_lacks_something_says_what(tmp_path, change, says):
    write_dump(tmp_path / "x.safetensors", [build(many(2)), build(many(1))], names="megatron_lm")
    tensors = load_file(tmp_path / "x.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(BadInput, match=says):
        read_dump(tmp_path / "x.safetensors")


def test_what_cannot_be_dumped_says_why(tmp_path):
    refused = build([{"role": "user", "content": ""}])
    for rows, says in (
        ([], "needs a row"),
        ([refused], "refused"),
        ([build(many(1)), build(many(1), SHORT)], "one length"),
    ):
        with pytest.raises(BadInput, match=says):
            write_dump(tmp_path / "x.safetensors", rows)
    write_dump(tmp_path / "x.safetensors", [build(many(1))])
    with pytest.raises(BadInput, match="no row 5"):
        read_dump(tmp_path / "x.safetensors", 5)


@pytest.mark.parametrize("prompt_format", ["identity", "nemotron-nano-v2", "nemotron-h-aligned"])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("preset", ["megatron-lm-0.19", "megatron-lm-main", "strict,row_ends=any"])
def test_right_rows_have_no_flaw(prompt_format, cp, preset):
    looked = 0
    for messages in (many(1), many(3), many(9), many(2, (1, 1, 1)), [*many(1), *conversation(40, (1, 40, 3))]):
        settings = RowSettings(pack_length=32, prompt_format=prompt_format, context_parallel_size=cp, semantics=preset)
        row = build(messages, settings=settings)
        if row.refusal is None:
            looked += 1
            assert [flaw for flaw in inspect(row, cp) if not flaw.note] == []
    assert looked


@pytest.mark.parametrize(
    ("side", "what", "position"),
    [
        (SHIFTED, "labels are shifted by two", 0),
        (POSITION, "position_ids do not count from 0", 3),
        (MASK, "token_mask leaves out labels", 2),
        (NAN, "token_mask is neither 0 nor 1", 2),
    ],
)
def test_a_fault_is_recognised_from_the_dump_alone(side, what, position):
    flaws = [flaw for flaw in inspect(build(many(3), side)) if not flaw.note]
    assert flaws[0].what.startswith(what)
    assert flaws[0].position == position


def test_boundaries_and_lengths_that_cannot_be_are_flaws():
    row = build(many(3))
    for change, what in (
        ({"cu_seqlens": torch.tensor([0, 20, 10, 32], dtype=torch.int32)}, "goes back"),
        ({"cu_seqlens": torch.tensor([0, 10], dtype=torch.int32)}, "does not end at 32"),
        ({"cu_seqlens": torch.tensor([1, 32], dtype=torch.int32)}, "does not start at 0"),
        ({"max_seqlen": 5}, "max_seqlen is 5"),
        ({"position_ids": torch.arange(32)}, "never restart"),
        ({"target_ids": row.input_ids}, "not shifted"),
        ({"target_ids": row.target_ids[:-1]}, "lengths differ"),
    ):
        flaws = inspect(type(row)(**{**vars(row), **change}))
        assert any(what in flaw.what for flaw in flaws), what


def test_labels_across_boundaries_are_noted_and_no_flaw():
    notes = inspect(build(many(3)))
    assert [(flaw.rule, flaw.count, flaw.note) for flaw in notes] == [("R-BOUNDARY-1", 2, True)]
    assert inspect(build(many(3), LEAKY)) == []


def test_a_dump_beside_the_reference(tmp_path, capsys):
    file = write_rows(tmp_path, [many(3), many(2)])
    dump = tmp_path / "x.safetensors"
    write_dump(dump, [build(many(2)), build(many(3), SHIFTED)], names="megatron_lm")
    common = [file, "--tokenizer", "word", "--prompt-format", "identity", "--dump", str(dump), "--json"]
    assert main([*common, "--row", "1", "--dump-row", "0"]) == 0
    assert [side["name"] for side in json.loads(capsys.readouterr().out)["sides"]] == ["dump", "reference"]
    assert main([*common, "--row", "0", "--dump-row", "1"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["pack_length"] == 32
    assert found["sides"][0]["flaws"][0]["what"] == "labels are shifted by two"
    assert found["first"]["tensor"] == "target_ids"


def test_a_dump_alone(tmp_path, capsys):
    dump = tmp_path / "x.safetensors"
    write_dump(dump, [build(many(3)), build(many(3), SHIFTED)])
    assert main(["--dump", str(dump), "--tokenizer", "word"]) == 0
    assert "consistent in itself" in capsys.readouterr().out
    assert main(["--dump", str(dump), "--dump-row", "1"]) == 1
    out = capsys.readouterr().out
    assert "FLAW  dump: labels are shifted by two" in out
    assert "▶ 0" in out


def test_write_dump_writes_the_first_side(tmp_path, capsys):
    file = write_rows(tmp_path, [many(3)])
    dump = tmp_path / "new" / "x.safetensors"
    arguments = [file, "--row", "0", "--tokenizer", "word", "--prompt-format", "identity", "--pack-length", "32"]
    arguments += ["--sides", "reference,diff_row_fakes:LEAKY", "--write-dump", str(dump)]
    assert main([*arguments, "--dump-names", "megatron_lm"]) == 1
    assert torch.equal(read_dump(dump).row.target_ids, build(many(3)).target_ids)
    assert main([*arguments, "--dump-names", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
