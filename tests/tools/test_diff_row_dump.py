"""Dumps of diff_row: written and read under both name sets, compared with sides, and looked at on their own."""

import json

import pytest
import torch
from diff_row_fakes import LEAKY, MASK, NAN, POSITION, REFERENCE, SHIFTED, SHORT, conversation, many, write_rows
from safetensors.torch import load_file, save_file

from equivalence.generators.tokenizers import load
from equivalence.subjects import ROW_TENSORS, RowSettings
from tools.diff_row.__main__ import main
from tools.diff_row.dump.batch_reader import Conventions, read_dump
from tools.diff_row.dump.writer import NAMES, write_dump
from tools.diff_row.errors import BadInput
from tools.diff_row.row.inspection import inspect

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


def doctored(path, rows, change, names="packproof"):
    """A dump of these rows whose tensors are changed as a trainer of its own would have them."""
    write_dump(path, rows, names=names)
    tensors = load_file(path)
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)
    return path


def test_another_dtype_is_compared_by_value_and_told(tmp_path):
    row = build(many(2))
    dtypes = {"token_mask": torch.bool, "input_ids": torch.int32, "packed_cu_seqlens": torch.int64}
    path = doctored(
        tmp_path / "x.safetensors", [row], lambda found: {n: t.to(dtypes.get(n, t.dtype)) for n, t in found.items()}
    )
    read = read_dump(path)
    for tensor in ROW_TENSORS:
        assert torch.equal(getattr(read.row, tensor), getattr(row, tensor)), tensor
        assert getattr(read.row, tensor).dtype == getattr(row, tensor).dtype, tensor
    assert [note.what for note in read.notes] == [
        "input_ids is int32, not int64, token_mask is bool, not float32, cu_seqlens is int64, not int32; values are compared"
    ]


def test_a_dtype_that_loses_a_value_is_kept_and_is_a_flaw(tmp_path):
    path = doctored(
        tmp_path / "x.safetensors",
        [build(many(2))],
        lambda found: {**found, "position_ids": found["position_ids"] + 0.5},
    )
    assert (
        next(flaw.what for flaw in inspect(read_dump(path).row) if not flaw.note)
        == "position_ids is float32, not int64"
    )


def test_what_a_dump_leaves_out_is_derived_and_told(tmp_path):
    row = build(many(3))
    kept = {"input_ids", "target_ids", "position_ids"}
    path = doctored(tmp_path / "x.safetensors", [row], lambda found: {n: found[n] for n in kept})
    read = read_dump(path)
    assert torch.equal(read.row.cu_seqlens, row.cu_seqlens)
    assert read.row.max_seqlen == row.max_seqlen
    assert torch.equal(read.row.token_mask, (row.target_ids != -100).float())
    assert [note.what.split(":")[0] for note in read.notes] == [
        "no mask was dumped",
        "no boundaries were dumped",
        "no max_seqlen was dumped",
    ]
    path = doctored(path, [row], lambda found: {n: t for n, t in found.items() if n != "position_ids"})
    assert torch.equal(read_dump(path).row.position_ids, row.position_ids)
    path = doctored(path, [row], lambda found: {n: found[n] for n in ("input_ids", "target_ids")})
    with pytest.raises(BadInput, match="neither boundaries nor positions"):
        read_dump(path)


def test_names_are_mapped_and_labels_may_be_unshifted(tmp_path, run):
    """A trainer whose model shifts dumps `y`, the tokens themselves with -100 where they do not train, and no mask."""
    settings = RowSettings(pack_length=32, prompt_format="nemotron-h-aligned")
    file = write_rows(tmp_path, [many(1)])
    row = build(many(1), settings=settings)
    trained = torch.where(row.token_mask != 0, row.target_ids, -100)

    def theirs(found):
        y = torch.cat([torch.tensor([-100]), trained[:-1]])[None]
        return {"x": found["input_ids"], "y": y, "position_ids": found["position_ids"]}

    dump = doctored(tmp_path / "x.safetensors", [row], theirs)
    common = [file, "--tokenizer", "word", "--prompt-format", "nemotron-h-aligned", "--dump", dump]
    status, _, err = run(*common)
    assert status == 2
    assert "has no input_ids, target_ids; it has position_ids, x, y" in err
    named = [*common, "--name", "x=input_ids", "--name", "y=target_ids", "--labels", "unshifted"]
    status, out, _ = run(*named)
    assert status == 1, "labels under padding are another convention"
    status, out, _ = run(*named, "--only-trained-labels")
    assert status == 0, out
    assert "labels were declared unshifted" in out
    assert f"labels of {int((row.token_mask == 0).sum())} positions that no side trains were left out" in out
    status, out, _ = run(*named[:-2], "--only-trained-labels")
    assert status == 1, "labels that are not declared are taken as they stand"
    assert run(*common, "--name", "z=input_ids")[0] == 2
    assert run(*common, "--name", "x=logits")[0] == 2
    assert run(*common, "--name", "x")[0] == 2
    assert run(*common, "--labels", "twice")[0] == 2


def test_names_of_both_kinds_are_known_in_one_dump_and_what_is_not_read_is_told(tmp_path, run):
    """A mask or boundaries that a dump has are never derived in their place."""
    file = write_rows(tmp_path, [many(3)])
    dump = tmp_path / "x.safetensors"
    common = [file, "--tokenizer", "word", "--prompt-format", "identity", "--dump", dump]

    def mixed(**changed):
        def change(found):
            named = {
                "input_ids": found["input_ids"],
                "labels": found["target_ids"],
                "loss_mask": found["token_mask"],
                "position_ids": found["position_ids"],
                "cu_seqlens": found["packed_cu_seqlens"],
                "attention_mask": torch.ones(1, 32),
            }
            return named | changed

        return change

    doctored(dump, [build(many(3))], mixed())
    status, out, _ = run(*common)
    assert status == 0
    assert "not read: attention_mask" in out
    doctored(dump, [build(many(3))], mixed(loss_mask=torch.zeros(1, 32)))
    assert run(*common)[0] == 1
    doctored(dump, [build(many(3))], mixed(cu_seqlens=torch.tensor([[0, 32]], dtype=torch.int32)))
    assert run(*common)[0] == 1
    doctored(dump, [build(many(3))], mixed(target_ids=build(many(3)).target_ids[None]))
    status, _, err = run(*common)
    assert status == 2
    assert "has labels and target_ids, and both mean target_ids" in err


def test_unshifted_labels_differ_nowhere_because_the_last_position_has_none(tmp_path, run):
    file = write_rows(tmp_path, [many(9)])
    row = build(many(9))
    row.token_mask[-1] = 0
    labels = torch.cat([torch.tensor([-100]), row.target_ids[:-1]])[None]
    mask = torch.cat([torch.zeros(1), row.token_mask[:-1]])[None]
    dump = doctored(
        tmp_path / "x.safetensors", [row], lambda found: {**found, "target_ids": labels, "token_mask": mask}
    )
    given = [file, "--tokenizer", "word", "--prompt-format", "identity", "--dump", dump, "--labels", "unshifted"]
    _, out, _ = run(*given, "--json")
    differing = json.loads(out)["differing"]
    assert "target_ids" not in differing, differing


def test_another_pack_length_than_the_dumps_is_reported_and_not_searched_for(tmp_path, run):
    file = write_rows(tmp_path, [many(3)])
    dump = tmp_path / "x.safetensors"
    write_dump(dump, [build(many(3))])
    status, _, err = run(
        file, "--tokenizer", "word", "--prompt-format", "identity", "--dump", dump, "--pack-length", 48
    )
    assert status == 2
    assert "the dump's rows have 32 tokens, and --pack-length says 48" in err


def test_a_file_of_torch_save_is_answered_with_the_line_that_converts_it(tmp_path):
    import subprocess
    import sys

    row = build(many(2))
    names = dict(
        zip(ROW_TENSORS, ("input_ids", "target_ids", "token_mask", "position_ids", "packed_cu_seqlens"), strict=True)
    )
    torch.save({name: getattr(row, field) for field, name in names.items()}, tmp_path / "batch.pt")
    with pytest.raises(BadInput, match="convert it with") as caught:
        read_dump(tmp_path / "batch.pt")
    script = str(caught.value).split('python -c "')[1].removesuffix('"')
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    assert torch.equal(read_dump(tmp_path / "batch.safetensors").row.input_ids, row.input_ids)


def test_a_flattened_batch_is_split_into_its_rows(tmp_path, run):
    """Two rows of 32 as one THD sequence of 64 (R-BATCH-2), with the seam as a boundary."""
    rows = [build(many(3)), build(many(2))]
    file = write_rows(tmp_path, [many(3), many(2)])
    flat = vars(REFERENCE.collate(rows, SETTINGS))
    tensors = {name: flat[name].reshape(-1) for name in ("input_ids", "target_ids", "token_mask", "position_ids")}
    tensors |= {
        "packed_cu_seqlens": flat["flat_cu_seqlens"],
        "packed_max_seqlen": torch.tensor(flat["flat_max_seqlen"]),
    }
    write_dump(tmp_path / "x.safetensors", tensors)
    for number, row in enumerate(rows):
        read = read_dump(tmp_path / "x.safetensors", number, Conventions(pack_length=32))
        assert (read.rows, read.row.max_seqlen) == (2, row.max_seqlen)
        for tensor in ROW_TENSORS:
            assert torch.equal(getattr(read.row, tensor), getattr(row, tensor)), tensor
    common = [file, "--tokenizer", "word", "--prompt-format", "identity", "--dump", tmp_path / "x.safetensors"]
    status, out, _ = run(*common, "--pack-length", "32", "--dump-row", "1")
    assert status == 0
    assert "split into 2 rows of 32" in out
    # A seam that the trainer lost is a boundary that differs, not a row that begins elsewhere.
    lost = flat["flat_cu_seqlens"][flat["flat_cu_seqlens"] != 32]
    write_dump(tmp_path / "x.safetensors", {**tensors, "packed_cu_seqlens": lost})
    status, out, _ = run(*common, "--pack-length", "32", "--dump-row", "1")
    assert status == 1
    assert "cu_seqlens does not start at 0" in out


def test_the_dumps_row_is_found_by_its_ids(tmp_path, run):
    rows = [many(3), many(2), many(1), many(2)]
    file = write_rows(tmp_path, rows)
    dump = tmp_path / "x.safetensors"
    common = [file, "--tokenizer", "word", "--prompt-format", "identity", "--dump", dump]
    write_dump(dump, [build(rows[2])])
    status, out, _ = run(*common)
    assert status == 0
    assert "the dump is row 2 of the file, found by its ids (4 rows searched)" in out
    write_dump(dump, [build(rows[1])])
    status, out, _ = run(*common)
    assert status == 0
    assert "the dump is row 1 of the file, found by its ids; rows 3 have the same ids" in out
    # The row that was asked for is another one: said, and compared as asked.
    status, out, _ = run(*common, "--row", "0")
    assert status == 1
    assert "the dump's ids are those of row 1 of the file, not of row 0: give --row 1" in out
    wrong = build(rows[0])
    wrong.input_ids[30] += 1
    write_dump(dump, [wrong])
    status, out, _ = run(*common)
    assert status == 1
    assert "no row of the file has the dump's ids: row 0 is nearest, with 31 of 32 equal" in out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda tensors: tensors.pop("labels"),
            "has no target_ids; it has cu_seqlens, loss_mask, .*--name TENSOR=target_ids",
        ),
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
