"""Dumps of trainers of other people: half a row, labels of another convention, nothing that says where conversations end."""

import json

import pytest
import torch
from diff_row_fakes import MASK, REFERENCE, described, many, write_rows
from safetensors.torch import save_file

from equivalence.generators.tokenizers import load
from equivalence.subjects import RowSettings
from tools.diff_row.dump.batch_reader import read_dump
from tools.diff_row.errors import BadInput
from tools.diff_row.inputs import findings_of
from tools.diff_row.render.page import render_page
from tools.diff_row.report import Report
from tools.diff_row.row.findings import Side, Source

IDENTITY = {"prompt_format": "identity"}
MASKED = {"prompt_format": "nemotron-h-aligned"}


def row_of(messages, length=32, **settings):
    return REFERENCE.build_row(messages, load("word"), RowSettings(pack_length=length, **settings))


def save(folder, row, *without, **changed):
    """A dump of one row; `without` these tensors, or with others in their place."""
    tensors = {
        "input_ids": row.input_ids,
        "labels": row.target_ids,
        "loss_mask": row.token_mask,
        "position_ids": row.position_ids,
        "cu_seqlens": row.cu_seqlens,
        "max_seqlen": torch.tensor([row.max_seqlen]),
    } | changed
    path = folder / "fed.safetensors"
    save_file({name: each[None].contiguous() for name, each in tensors.items() if name not in without}, path)
    return path


def packed(folder, length, messages=None):
    """A file of one row with the manifest that says for which length it was packed."""
    file = write_rows(folder, [messages or many(5)])
    size = (folder / "rows.jsonl.packed").stat().st_size
    whole = {"output": {"file": "rows.jsonl.packed", "bytes": size}, "settings": {"pack_length": length} | IDENTITY}
    (folder / "rows.jsonl.packed.manifest.json").write_text(json.dumps(whole))
    return file


def one_line(text):
    return " ".join(text.split())


@pytest.mark.parametrize("length", [31, 16])
@pytest.mark.parametrize("way", [(), ("--row", 0), ("--row", 0, "--cp", 1, "--rank", 0)])
def test_a_dump_that_holds_a_part_of_its_row_is_a_difference(run, tmp_path, length, way):
    file = packed(tmp_path, 32)
    common = [file, "--tokenizer", "word", "--dump", save(tmp_path, row_of(many(5), length, **IDENTITY))]
    status, out, _ = run(*common, *way)
    assert status == 1
    assert "EQUAL " not in out
    assert (
        "DIFFERENT first at step row in pack_length" if "--rank" in way else "DIFFERENT pack length in pack_length"
    ) in out
    told = one_line(out)
    assert f"FLAW dump: its rows have {length} tokens, and the file was packed for 32" in told
    assert f"--pack-length {length} if" in told
    if "--rank" not in way:
        status, found = described(run, *common, *way)
        assert (status, found["equal"]) == (1, False)
        assert found["pairs"][-1]["fields"] == {"pack_length": [length, 32]}
        status, out, _ = run(*common, *way, "--html", tmp_path / "page.html")
        assert "pack_length" in (tmp_path / "page.html").read_text()
    status, out, _ = run(*common, *way, "--pack-length", length)
    assert status == 0, out
    assert run(*common, "--row", 0, "--pack-length", 20)[0] == 2, "neither the dump's length nor the manifest's"


def test_a_whole_dump_has_the_length_of_the_manifest(run, tmp_path):
    file = packed(tmp_path, 32)
    status, out, _ = run(file, "--tokenizer", "word", "--dump", save(tmp_path, row_of(many(5), **IDENTITY)))
    assert status == 0
    assert "EQUAL dump = reference: every tensor to the bit" in out
    assert "FLAW" not in out


def test_equal_says_what_was_compared_and_what_was_derived_or_left_out(run, tmp_path):
    file = packed(tmp_path, 32)
    row = row_of(many(3), **IDENTITY)
    file = write_rows(tmp_path, [many(3)])
    (tmp_path / "rows.jsonl.packed.manifest.json").unlink()
    common = [file, "--tokenizer", "word", "--prompt-format", "identity", "--dump"]
    trained = torch.where(row.token_mask != 0, row.target_ids, -100)
    dump = save(tmp_path, row, "loss_mask", "position_ids", "max_seqlen", labels=trained)
    status, out, _ = run(*common, dump, "--only-trained-labels")
    out = one_line(out)
    assert status == 0
    assert "every tensor to the bit" not in out
    assert "EQUAL dump = reference: input_ids, target_ids, cu_seqlens to the bit; " in out
    assert "token_mask, position_ids, max_seqlen not dumped, but derived from the dump's other tensors; " in out
    untrained = int((row.token_mask == 0).sum())
    assert untrained
    assert f"labels of {untrained} positions that no side trains left out" in out
    run(*common, dump, "--only-trained-labels", "--html", tmp_path / "page.html")
    assert "token_mask, position_ids, max_seqlen not dumped" in (tmp_path / "page.html").read_text()
    status, out, _ = run(*common, dump, "--only-trained-labels", "--row", 0, "--cp", 1, "--rank", 0)
    assert status == 0
    assert "token_mask, position_ids, max_seqlen not dumped" in one_line(out)
    dump = save(tmp_path, row, loss_mask=row.token_mask.bool())
    assert "; token_mask by value (another dtype)" in one_line(run(*common, dump)[1])


def test_an_ignored_label_is_a_class_of_its_own_and_hides_no_fault(run, tmp_path):
    """Labels of -100 where nobody trains are a convention; a wrong label behind them is the first difference."""
    file, row = write_rows(tmp_path, [many(2)]), row_of(many(2), **MASKED)
    common = [file, "--tokenizer", "word", "--prompt-format", "nemotron-h-aligned", "--dump"]
    trained = torch.where(row.token_mask != 0, row.target_ids, -100)
    ignored = int((trained != row.target_ids).sum())
    assert ignored
    status, out, _ = run(*common, save(tmp_path, row, labels=trained))
    assert status == 1
    assert "DIFFERENT ignored label in target_ids" in out
    assert f"ignored label {ignored}" in out
    assert "next  --only-trained-labels" in out
    assert run(*common, save(tmp_path, row, labels=trained), "--only-trained-labels")[0] == 0
    place = int((row.token_mask != 0).nonzero()[-1])
    wrong = trained.clone()
    wrong[place] += 1
    status, found = described(run, *common, save(tmp_path, row, labels=wrong))
    assert (found["first"]["position"], found["first"]["tensor"]) == (place, "target_ids")
    assert found["first"]["class"] != "ignored_label"
    assert found["pairs"][0]["counts"]["target_ids"]["ignored_label"] == ignored
    # All labels with a mask that keeps them from training: the same convention, the other way round.
    every = torch.where(row.target_ids == -100, torch.tensor(7), row.target_ids)
    found = described(run, *common, save(tmp_path, row, labels=every))[1]
    assert set(found["pairs"][0]["counts"]["target_ids"]) == {"ignored_label"}
    # Where one side trains, -100 is a fault.
    taken = row.target_ids.clone()
    taken[place], mask = -100, row.token_mask.clone()
    mask[place] = 0
    found = described(run, *common, save(tmp_path, row, labels=taken, loss_mask=mask))[1]
    assert found["first"]["class"] != "ignored_label"


def test_the_reference_has_no_flaw_for_a_label_of_the_dump_that_is_off_by_one(run, tmp_path):
    row = row_of(many(2), **IDENTITY)
    # The dump trains padding and leaves a label out, so that the last label is not the pad any more.
    labels = row.target_ids.clone()
    labels[3] += 1
    mask = row.token_mask.clone()
    mask[22:30] = 1
    common = [write_rows(tmp_path, [many(2)]), "--tokenizer", "word", "--prompt-format", "identity"]
    common += ["--only-trained-labels", "--dump", save(tmp_path, row, labels=labels, loss_mask=mask)]
    status, out, _ = run(*common)
    assert status == 1
    assert "FLAW  reference" not in out
    assert "FLAW  dump: labels are not the next token" in out


def test_a_trainer_without_boundaries_has_its_ids_and_labels_compared(run, tmp_path):
    """Hugging Face's batch: input_ids, labels and attention_mask."""
    file, row = write_rows(tmp_path, [many(3), many(1)]), row_of(many(3), **IDENTITY)
    common = [file, "--tokenizer", "word", "--prompt-format", "identity", "--dump"]
    bare = ("loss_mask", "position_ids", "cu_seqlens", "max_seqlen")
    trained = torch.where(row.token_mask != 0, row.target_ids, -100)
    dump = save(tmp_path, row, *bare, labels=trained, attention_mask=(row.token_mask != 0).long())
    status, out, _ = run(*common, dump, "--only-trained-labels")
    assert status == 1
    assert "DIFFERENT not fed in cu_seqlens" in out
    assert "dump not fed ≠ reference 4 boundaries" in one_line(out)
    assert "neither boundaries nor positions were fed" in one_line(out)
    assert "consistent in itself: labels are the next tokens\n" in out, "nothing is said of boundaries"
    status, found = described(run, *common, dump, "--only-trained-labels")
    assert found["pairs"][0]["counts"] == {"cu_seqlens": {"not_fed": 1}}
    wrong = trained.clone()
    wrong[4] += 1
    found = described(run, *common, save(tmp_path, row, *bare, labels=wrong))[1]
    assert (found["first"]["tensor"], found["first"]["position"]) == ("target_ids", 4)
    # A row of one conversation has no boundary inside, and one segment is what it is.
    row = row_of(many(1), **IDENTITY)
    status, out, _ = run(*common, save(tmp_path, row, "position_ids", "cu_seqlens", "max_seqlen"), "--row", 1)
    assert status == 0
    assert "position_ids, cu_seqlens, max_seqlen not dumped" in one_line(out)
    # Nothing but the file says what the row's boundaries are.
    with pytest.raises(BadInput, match="FILE and --tokenizer DIR beside --dump"):
        read_dump(save(tmp_path, row, *bare))


def test_the_error_for_boundaries_that_end_before_the_row_names_both_numbers(tmp_path):
    row = row_of(many(3), **IDENTITY)
    short = torch.tensor([0, 10, 20, 24], dtype=torch.int32)
    with pytest.raises(BadInput) as caught:
        read_dump(save(tmp_path, row, "position_ids", "max_seqlen", cu_seqlens=short))
    told = str(caught.value)
    assert "must cover the 32 tokens of the row: they run from 0 to 24" in told
    assert "the last one must be 32, because the 8 positions behind it belong to the last segment" in told
    for wrong in ([3, 10, 32], [0, 20, 10, 32, 40]):
        with pytest.raises(BadInput, match="must begin at 0, ascend, and end at 32"):
            read_dump(
                save(tmp_path, row, "position_ids", "max_seqlen", cu_seqlens=torch.tensor(wrong, dtype=torch.int32))
            )


def test_a_note_of_no_rule_names_none_and_a_lost_boundary_is_called_so(run, tmp_path):
    file, row = write_rows(tmp_path, [many(1), many(3)]), row_of(many(3), **IDENTITY)
    common = [file, "--tokenizer", "word", "--prompt-format", "identity", "--dump"]
    ends = row.cu_seqlens.tolist()
    lost = torch.tensor([ends[0], *ends[2:]], dtype=torch.int32)
    dump = save(tmp_path, row, cu_seqlens=lost, max_seqlen=torch.tensor([20]))
    status, out, _ = run(*common, dump, columns=200)
    assert status == 1
    assert "the dump is row 1 of the file, found by its ids (2 rows searched)\n" in out
    assert "R-SHIFT-1" not in out
    assert f"dump no boundary ≠ reference {ends[1]}" in out
    other = row.input_ids.clone()
    other[0] += 1
    run(*common, save(tmp_path, row, input_ids=other), "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "(2 rows searched)</p>" in page
    dump = save(tmp_path, row, cu_seqlens=lost, max_seqlen=torch.tensor([20]))
    run(*common, dump, "--html", tmp_path / "page.html")
    assert "<b>no boundary</b>" in (tmp_path / "page.html").read_text()


def test_the_page_reads_as_sentences(run, tmp_path):
    file, row = write_rows(tmp_path, [many(1), many(3)]), row_of(many(3), **IDENTITY)
    labels = row.target_ids.clone()
    labels[4] += 1
    dump = save(tmp_path, row, "max_seqlen", labels=labels)
    options = ["--tokenizer", "word", "--prompt-format", "identity", "--dump", dump, "--html", tmp_path / "page.html"]
    _, out, _ = run(file, *options, columns=200)
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    heading = page.split("<h1>")[1].split("</h1>")[0]
    assert "row 1 (file line 2)</small> <small>against" in " ".join(heading.split())
    assert "1 times" not in page + out
    assert 'labels are not the next token, at position <a href="#p4">4</a> (R-SHIFT-1)</p>' in page
    assert "labels are not the next token, at position 4  (R-SHIFT-1)" in out
    notes = page.split('<details id="notes" open>')[1].split("</details>")[0]
    assert "<summary>3 notes</summary>" in notes
    assert notes.count('<p class="note">') == 3
    assert 'reach into the next conversation, 2 times, first at position <a href="#p9">' in notes


def test_a_page_without_notes_has_nothing_to_fold():
    sides = {"reference": REFERENCE, "mask": MASK}
    built = [
        Side(
            name=name,
            version="",
            row=side.build_row(many(2), load("word"), RowSettings(pack_length=32, prompt_format="identity")),
        )
        for name, side in sides.items()
    ]
    assert 'id="notes"' not in render_page(Report(row=findings_of(built, source=Source(file="x", row=0))))
