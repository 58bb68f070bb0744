"""The comparator itself: what it must see, and what it calls it."""

import dataclasses
import sys

import pytest
import torch

from equivalence.compare import compare_batches, compare_rows
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
    ("target_ids", 3, 77, "other"),
    ("target_ids", 5, 1, "padding"),
    ("token_mask", 6, 1, "padding"),
]


@pytest.mark.parametrize(("tensor", "position", "value", "klass"), CLASSES)
def test_one_changed_value_is_one_difference_with_its_class(tensor, position, value, klass):
    for left, right in ((row(), changed(tensor, position, value)), (changed(tensor, position, value), row())):
        (found,) = compare_rows(left, right)
        assert (found.tensor, found.position, found.klass) == (tensor, position, klass)


def test_nan_and_dtype_and_shape_show():
    assert compare_rows(*[changed("token_mask", 1, float("nan"))] * 2)
    for name in ROW_TENSORS:
        other = row(**{name: getattr(row(), name).to(torch.int16)})
        assert [difference.klass for difference in compare_rows(row(), other)] == ["dtype_or_shape"]
        assert compare_rows(row(), row(**{name: getattr(row(), name)[:-1]}))[0].klass == "dtype_or_shape"
    assert compare_rows(row(), row(max_seqlen=3))[0].klass == "max_seqlen"


def test_a_report_counts_only_where_both_have_one():
    assert compare_rows(row(), row(report=None)) == []
    assert compare_rows(row(), row(report={"kept": 1}))[0].tensor == "report.kept"
    assert compare_rows(row(), row(report={}))[0].right == "absent"


def test_a_refusal_is_compared_by_its_kind():
    refused = Row(refusal=Refusal(kind="empty_row", message="one"))
    assert compare_rows(refused, Row(refusal=Refusal(kind="empty_row", message="two"))) == []
    assert compare_rows(refused, Row(refusal=Refusal(kind="role_order")))[0].klass == "refusal"
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
    classes = [difference.klass for difference in compare_rows(once, twice) if difference.position < 4]
    assert classes == ["shift"] * 3


def test_a_side_is_found_in_the_folder_one_is_in(tmp_path, monkeypatch):
    (tmp_path / "a_side_of_mine.py").write_text("class Side:\n    name = 'mine'\n    build_row = collate = print\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    assert load("a_side_of_mine:Side").name == "mine"
