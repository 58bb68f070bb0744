"""R-CP, R-MTP, R-PACK: reference, production and megatron-core's own arithmetic are equal, and the checks see a wrong one."""

import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equivalence.checks.cuts import context_parallel, multi_token, packing
from equivalence.checks.cuts.pairs import compare_sides
from equivalence.generators.choices import RandomChoices
from equivalence.generators.layouts import cut_rows, draw_cut_row, sequences

reached = collections.Counter()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_r_cp_all_sides_are_equal(layout):
    reached.clear()
    for place in range(80):
        row = draw_cut_row(RandomChoices(0, place))
        found = context_parallel.check_context_parallel(row.tensors, row.cu_seqlens, row.size, layout=layout)
        assert found.equal, found.findings
        reached[found.refused or f"cp {row.size}"] += 1
    assert {"indivisible_segment", "cp 1", "cp 2", "cp 3", "cp 4", "cp 8"} <= set(reached), reached


def test_r_mtp_all_sides_are_equal():
    reached.clear()

    @settings(max_examples=80)
    @given(cut_rows(), st.integers(0, 3))
    def check(row, depths):
        found = multi_token.check_multi_token(row.tensors, row.cu_seqlens, row.size, depths)
        assert found.equal, found.findings
        reached.update([found.refused or f"cp {row.size}", f"depths {depths}"])

    check()
    assert {"indivisible_segment", "cp 1", "cp 2", "cp 4", "depths 3"} <= set(reached), reached


def test_r_pack_both_sides_are_equal():
    reached.clear()

    @settings(max_examples=120)
    @given(sequences(), st.integers(1, 5), st.randoms(use_true_random=False))
    def check(case, size, choose):
        lengths, capacity = case
        order = list(range(len(lengths)))
        choose.shuffle(order)
        found = packing.check_packing(lengths, capacity, order=order, data_parallel_size=size)
        assert found.equal, found.findings
        reached.update([found.refused or "packed", f"dp {size}"])

    check()
    assert {"sequence", "packed", "dp 1", "dp 5"} <= set(reached), reached


def row_tensors(length):
    ids = torch.arange(1, length + 1)
    return {"input_ids": ids, "target_ids": ids + 1, "token_mask": (ids % 2).float(), "position_ids": ids - 1}


def test_a_wrong_cut_is_found(monkeypatch):
    own = context_parallel.production.shard_index
    monkeypatch.setattr(
        context_parallel.production,
        "shard_index",
        lambda cu, rank, size, **options: own(cu, size - 1 - rank, size, **options),
    )
    found = context_parallel.check_context_parallel(row_tensors(16), [0, 8, 16], 2)
    assert {(each.left, each.right) for each in found.findings} == {
        ("reference", "production"),
        ("production", "megatron_lm"),
    }


def test_a_wrong_depth_is_found(monkeypatch):
    own = multi_token.depth_tables

    def off_by_one(row, depths, **options):
        tables = own(row, depths, **options)
        tables.token_mask[1:] *= tables.token_mask[0]  # and-ed with the mask at the position itself
        return tables

    monkeypatch.setattr(multi_token, "depth_tables", off_by_one)
    found = multi_token.check_multi_token(row_tensors(16), [0, 8, 16], 2, 1)
    assert [each.right for each in found.findings] == ["production", "megatron_lm"]
    assert all(each.tensor.startswith("token_mask at depth 1") for each in found.findings[0].differences)


def test_a_wrong_packer_and_a_missing_refusal_are_found(monkeypatch):
    monkeypatch.setattr(packing.reference, "check_lengths", lambda *_: None)
    found = packing.check_packing([3, 9], 8, order=[1, 0], data_parallel_size=1)
    assert found.findings[0].differences[0].kind == "refusal"
    monkeypatch.undo()
    monkeypatch.setitem(
        packing.production.PACKERS, "concatenative", lambda lengths, _: [[index] for index in range(len(lengths))]
    )
    found = packing.check_packing([3, 2], 8, order=[1, 0], data_parallel_size=1)
    assert {each.tensor for each in found.findings[0].differences} >= {"concatenative"}


def test_sides_that_share_no_name_are_not_equal():
    sides = {"left": {"a": torch.zeros(1)}, "right": {"b": torch.zeros(1)}}
    assert not compare_sides("context_parallel", sides).equal
    assert compare_sides("context_parallel", {"left": "kind", "right": "kind"}).refused == "kind"
    assert not compare_sides(
        "context_parallel", {"left": {"a": torch.zeros(1)}, "right": {"a": torch.zeros(1).int()}}
    ).equal


@pytest.mark.parametrize("size", [2, 3, 4])
def test_r_cp_4_contiguous_is_what_megatron_cores_state_space_layers_make_of_the_zigzag(size):
    from megatron.core.ssm.mamba_context_parallel import _undo_attention_load_balancing

    boundaries = torch.tensor([0, 12 * size], dtype=torch.int32)
    zigzag = [context_parallel.production.shard_index(boundaries, rank, size) for rank in range(size)]
    for rank, share in enumerate(_undo_attention_load_balancing(torch.cat(zigzag), size).chunk(size)):
        ours = context_parallel.production.shard_index(boundaries, rank, size, layout="contiguous")
        theirs = context_parallel.reference.owned_positions(boundaries.tolist(), rank, size, "contiguous")
        assert share.tolist() == ours.tolist() == theirs
