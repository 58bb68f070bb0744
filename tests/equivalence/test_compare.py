"""The comparator itself: what it must see, and what it calls it."""

import dataclasses
import sys

import pytest
import torch

from equivalence.cases.difference import compare_batches, compare_rows
from equivalence.subjects import ROW_TENSORS, Batch, Refusal, Row, load


def row(**changes):
    fields = {
        "input_ids": torch.tensor([12, 13, 14, 15, 16, 0, 0]),
        "target_ids": torch.tensor([-100, 14, 15, 16, 17, 0, 0]),
        "token_mask": torch.tensor([0.0, 1, 1, 1, 1, 0, 0]),
        "position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3]),
        "cu_seqlens": torch.tensor([0, 3, 7], dtype=torch.int32),
        "max_seqlen": 4,
        "report": {"kept": 2},
    }
    return Row(**(fields | changes))


def changed(tensor, position, value):
    other = getattr(row(), tensor).clone()
    other[position] = value
    return row(**{tensor: other})


def test_equal_rows_have_no_difference():
    assert compare_rows(row(), row()) == []


CLASSES = [
    ("input_ids", 1, 99, "token"),
    ("position_ids", 3, 3, "position"),
    ("cu_seqlens", 1, 4, "boundary"),
    ("target_ids", 2, -100, "boundary_label"),
    ("token_mask", 2, 0, "boundary_label"),
    ("target_ids", 0, 13, "role_mask"),
    ("token_mask", 0, 1, "role_mask"),
    ("target_ids", 3, 17, "shift"),
    ("target_ids", 3, 77, "label"),
    ("token_mask", 3, 0, "mask"),
    ("target_ids", 5, 1, "padding"),
    ("token_mask", 6, 1, "padding"),
]


@pytest.mark.parametrize(("tensor", "position", "value", "kind"), CLASSES)
def test_one_changed_value_is_one_difference_with_its_class(tensor, position, value, kind):
    for left, right in ((row(), changed(tensor, position, value)), (changed(tensor, position, value), row())):
        (found,) = compare_rows(left, right)
        assert (found.tensor, found.position, found.kind) == (tensor, position, kind)


def full_row(**changes):
    """A row that was cut at its end: no padding, and the last label is the first token behind the cut."""
    fields = {
        "input_ids": torch.tensor([12, 13, 14, 15, 16, 17, 18]),
        "target_ids": torch.tensor([-100, 14, 15, 16, 17, 18, 19]),
        "token_mask": torch.tensor([0.0, 1, 0, 1, 1, 1, 1]),
    }
    return row(**(fields | changes))


def test_a_wrong_label_where_a_row_was_cut_is_named_so():
    (found,) = compare_rows(full_row(), full_row(target_ids=torch.tensor([-100, 14, 15, 16, 17, 18, 0])))
    assert (found.position, found.kind) == (6, "row_end")


def test_a_mask_that_is_shifted_by_one_is_called_a_shift_and_one_that_leaves_pads_out_padding():
    labels = torch.tensor([14, 14, 14, 14, 14, 14, 14])
    mask = torch.tensor([0.0, 1, 1, 0, 1, 1, 0])
    one_segment = {"cu_seqlens": torch.tensor([0, 7], dtype=torch.int32), "max_seqlen": 7}
    whole = full_row(target_ids=labels, token_mask=mask, **one_segment)
    shifted = full_row(target_ids=labels, token_mask=torch.cat([mask[1:], mask[:1]]), **one_segment)
    classes = [difference.kind for difference in compare_rows(whole, shifted)]
    assert classes[:-1] == ["shift"] * (len(classes) - 1)
    assert len(classes) > 2
    padded = row(target_ids=torch.tensor([-100, 0, 15, 16, 17, 0, 0]))
    other = row(target_ids=padded.target_ids, token_mask=torch.tensor([0.0, 0, 1, 1, 1, 0, 0]))
    assert [difference.kind for difference in compare_rows(padded, other)] == ["padding"]


@pytest.mark.parametrize("is_left", [True, False])
def test_each_boundary_that_one_side_lacks_is_a_boundary_and_no_shape(is_left):
    fewer = row(cu_seqlens=torch.tensor([0, 7], dtype=torch.int32))
    sides = (fewer, row()) if is_left else (row(), fewer)
    (found,) = compare_rows(*sides)
    assert (found.tensor, found.kind, found.left, found.right) == (
        ("cu_seqlens", "boundary", None, 3) if is_left else ("cu_seqlens", "boundary", 3, None)
    )
    twice = row(cu_seqlens=torch.tensor([0, 3, 3, 7], dtype=torch.int32))
    (found,) = compare_rows(twice, row())
    assert (found.kind, found.left, found.right) == ("boundary", 3, None)


def test_nan_and_dtype_and_shape_show():
    assert compare_rows(*[changed("token_mask", 1, float("nan"))] * 2)
    for name in ROW_TENSORS:
        other = row(**{name: getattr(row(), name).to(torch.int16)})
        assert [difference.kind for difference in compare_rows(row(), other)] == ["dtype_or_shape"]
        shorter = compare_rows(row(), row(**{name: getattr(row(), name)[:-1]}))[0]
        assert shorter.kind == ("boundary" if name == "cu_seqlens" else "dtype_or_shape")
    assert compare_rows(row(), row(max_seqlen=3))[0].kind == "max_seqlen"


def test_a_report_counts_only_where_both_have_one():
    assert compare_rows(row(), row(report=None)) == []
    assert compare_rows(row(), row(report={"kept": 1}))[0].tensor == "report.kept"
    assert compare_rows(row(), row(report={}))[0].right == "absent"


def test_a_refusal_is_compared_by_its_kind():
    refused = Row(refusal=Refusal(kind="empty_row", message="one"))
    assert compare_rows(refused, Row(refusal=Refusal(kind="empty_row", message="two"))) == []
    assert compare_rows(refused, Row(refusal=Refusal(kind="role_order")))[0].kind == "refusal"
    (found,) = compare_rows(refused, row())
    assert (found.left, found.right) == ("empty_row", None)


def test_batches_compare_the_fields_that_both_have():
    full = Batch(
        **{name: torch.stack([getattr(row(), name)] * 2) for name in ROW_TENSORS[:4]},
        packed_cu_seqlens=torch.tensor([[0, 3, 7]] * 2),
        packed_cu_seqlens_lengths=torch.tensor([3, 3]),
        packed_max_seqlen=torch.tensor([4, 4]),
        input_lengths=torch.tensor([7, 7]),
        sample_mask=torch.ones(2),
        flat_cu_seqlens=torch.tensor([0, 3, 7, 10, 14]),
        flat_max_seqlen=4,
    )
    assert compare_batches(full, dataclasses.replace(full, sample_mask=None)) == []
    (found,) = compare_batches(full, dataclasses.replace(full, packed_cu_seqlens=torch.tensor([[0, 3, 7], [0, 4, 7]])))
    assert (found.tensor, found.position, found.left, found.right) == ("packed_cu_seqlens", (1, 1), 3, 4)
    (found,) = compare_batches(full, dataclasses.replace(full, flat_max_seqlen=5))
    assert found.tensor == "flat_max_seqlen"


def test_a_row_shifted_twice_is_called_a_shift_also_beside_masked_labels():
    labels = [-100, -100, 14, 15, 16, 17, 18]
    once = row(target_ids=torch.tensor(labels), cu_seqlens=torch.tensor([0, 7], dtype=torch.int32), max_seqlen=7)
    twice = row(target_ids=torch.tensor([*labels[1:], 19]), cu_seqlens=once.cu_seqlens, max_seqlen=7)
    classes = [difference.kind for difference in compare_rows(once, twice) if difference.position < 4]
    assert classes == ["shift"] * 3


def test_a_side_is_found_in_the_folder_one_is_in(tmp_path, monkeypatch):
    (tmp_path / "a_side_of_mine.py").write_text("class Side:\n    name = 'mine'\n    build_row = collate = print\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    assert load("a_side_of_mine:Side").name == "mine"
