"""R-CP on the production side, held to the kernel's formula written out and to megatron-core's rotary partition."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from production.errors import BatchRefused, PackproofError
from production.parallel import context_parallel
from production.parallel.context_parallel import (
    LAYOUTS,
    ROW_TENSORS,
    Layout,
    gather,
    index_for_megatron,
    partitioned_indices,
    select,
    shard_batch,
    shard_index,
    shard_tensors,
)
from production.rows.batch import Batch, FlatBatch, flatten

POISON = -(10**15)


def boundaries(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def kernel_formula(cu, size, rank):
    """Transformer Engine's index, position by position, as it is published."""
    local = [each // size for each in cu]
    index = []
    for t in range(local[-1]):
        s = max(i for i in range(len(cu) - 1) if local[i] <= t and local[i + 1] > local[i])
        length, j = local[s + 1] - local[s], t - local[s]
        half = length // 2
        offset = rank if j < half else 2 * (size - 1) - rank
        index.append(j + size * local[s] + half * offset)
    return index


def batch_of(rows, seed=0):
    """Rows of segments (lengths in tokens) with values that tell every position apart, and -1 after the boundaries."""
    total = sum(rows[0])
    count = len(rows)
    ids = torch.randperm(count * total, generator=torch.Generator().manual_seed(seed)).view(count, total)
    return Batch(
        input_ids=ids,
        target_ids=ids * 3 + 1,
        token_mask=(ids % 2).float(),
        position_ids=torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows]),
        packed_cu_seqlens=torch.nn.utils.rnn.pad_sequence(
            [boundaries(row) for row in rows], batch_first=True, padding_value=-1
        ),
        packed_cu_seqlens_lengths=torch.tensor([len(row) + 1 for row in rows]),
        packed_max_seqlen=torch.tensor([max(row) for row in rows]),
        input_lengths=torch.full((count,), total),
        sample_mask=torch.ones(count),
    )


@st.composite
def cuts(draw, *, empty=True):
    """cp, and lengths of segments that 2·cp divides, not all empty."""
    size = draw(st.sampled_from([2, 3, 4, 8]))
    pieces = draw(st.lists(st.integers(0 if empty else 1, 4), min_size=1, max_size=6).filter(any))
    return size, [2 * size * each for each in pieces]


def test_r_cp_1_published_index():
    cu = boundaries([8, 8])
    assert shard_index(cu, 0, 2).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert shard_index(cu, 1, 2).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert shard_index(cu, 0, 2).dtype == torch.int64


def test_r_cp_1_published_online_row():
    ids = torch.tensor([[1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 0, 9, 10, 0, 0]])
    assert shard_tensors({"ids": ids}, boundaries([8, 4, 4]), 0, 2)["ids"].tolist() == [[1, 2, 0, 0, 6, 0, 9, 0]]


@settings(max_examples=60)
@given(cuts())
def test_r_cp_1_is_the_kernels_formula(case):
    size, lengths = case
    cu = boundaries(lengths)
    for rank in range(size):
        assert shard_index(cu, rank, size).tolist() == kernel_formula(cu.tolist(), size, rank)


@settings(max_examples=40)
@given(cuts())
def test_r_cp_1_is_megatrons_rotary_partition(case):
    from megatron.core.models.common.embeddings import rope_utils

    size, lengths = case
    cu = boundaries(lengths)
    positions = torch.arange(sum(lengths))
    for rank in range(size):
        parts = [
            rope_utils._get_thd_freqs_on_this_cp_rank(rank, size, torch.empty(length // size), positions, start)
            for start, length in zip(cu.tolist()[:-1], lengths, strict=True)
        ]
        assert torch.equal(shard_index(cu, rank, size), torch.cat(parts))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@given(case=cuts())
def test_r_cp_5_every_position_is_owned_once(layout, case):
    size, lengths = case
    cu = boundaries(lengths)
    index = torch.cat([shard_index(cu, rank, size, layout=layout) for rank in range(size)])
    assert index.sort().values.tolist() == list(range(sum(lengths)))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@settings(max_examples=30)
@given(case=cuts(), count=st.integers(1, 3), data=st.data())
def test_r_cp_2_one_index_for_all_tensors_of_all_rows(layout, case, count, data):
    size, lengths = case
    rows = [data.draw(st.permutations(lengths)) for _ in range(count)]
    batch = batch_of(rows)
    shards = [shard_batch(batch, rank, size, layout=layout) for rank in range(size)]
    for rank, shard in enumerate(shards):
        # Row by row: a row's part is that of the row alone, and labels stay with their tokens.
        for row, lengths_of_row in enumerate(rows):
            alone = shard_index(boundaries(lengths_of_row), rank, size, layout=layout)
            for name in ROW_TENSORS:
                assert torch.equal(getattr(shard, name)[row], getattr(batch, name)[row][alone])
        assert torch.equal(shard.target_ids, shard.input_ids * 3 + 1)
        assert shard.packed_cu_seqlens is batch.packed_cu_seqlens
        assert shard.packed_max_seqlen is batch.packed_max_seqlen
    cu = flatten(batch).cu_seqlens
    for name in ROW_TENSORS:
        whole = gather([getattr(shard, name) for shard in shards], cu, layout=layout, rows=count)
        assert torch.equal(whole, getattr(batch, name))
        assert whole.dtype == getattr(batch, name).dtype


def test_r_cp_2_a_flattened_batch_is_cut_as_its_rows():
    batch = batch_of([[8, 24], [16, 16]])
    flat = flatten(batch)
    for rank in range(4):
        cut, rows = shard_batch(flat, rank, 4), shard_batch(batch, rank, 4)
        assert isinstance(cut, FlatBatch)
        assert torch.equal(cut.cu_seqlens, flat.cu_seqlens)
        for name in ROW_TENSORS:
            assert torch.equal(getattr(cut, name), getattr(rows, name).reshape(1, -1))


def test_r_cp_4_contiguous_passes_over_segments():
    assert shard_index(boundaries([5, 7]), 1, 3, layout="contiguous").tolist() == [4, 5, 6, 7]
    assert LAYOUTS["contiguous"].witness is None
    assert LAYOUTS["zigzag"].witness is not None
    with pytest.raises(BatchRefused, match="must be a multiple of the 5 ranks, got 12 tokens in 1 rows") as found:
        shard_index(boundaries([5, 7]), 1, 5, layout="contiguous")
    assert (found.value.kind, found.value.row) == ("indivisible_segment", 0)


def test_a_layout_of_ones_own():
    whole_row = Layout(
        name="zigzag_over_the_row",
        unit="row",
        pieces=lambda size: 2 * size,
        owned=lambda rank, size: (rank, 2 * size - 1 - rank),
        witness=None,
    )
    assert shard_index(boundaries([3, 5]), 0, 2, layout=whole_row).tolist() == [0, 1, 6, 7]


def test_r_cp_3_names_row_segment_and_length():
    batch = batch_of([[8, 8, 16], [8, 10, 14]])
    with pytest.raises(BatchRefused) as found:
        shard_batch(batch, 0, 2)
    assert (found.value.kind, found.value.row) == ("indivisible_segment", 1)
    assert str(found.value).startswith("row 1: segment 1 must have a multiple of 4 (2·cp) tokens, got 10")


def test_r_cp_3_counts_segments_after_empty_ones():
    with pytest.raises(BatchRefused, match=r"segment 2 must have a multiple of 4 \(2·cp\) tokens, got 6"):
        shard_index(boundaries([8, 0, 6, 2]), 0, 2)


def test_r_cp_3_passes_over_empty_segments():
    full, gaps = boundaries([8, 16]), boundaries([0, 8, 0, 0, 16, 0])
    for rank in range(4):
        assert torch.equal(shard_index(gaps, rank, 4), shard_index(full, rank, 4))


def test_r_cp_3_nothing_is_cut_or_checked_at_cp_1():
    batch = batch_of([[3, 4]])
    assert shard_batch(batch, 0, 1) is batch
    assert shard_index(boundaries([3, 4]), 0, 1).tolist() == list(range(7))


@pytest.mark.parametrize(
    ("cu", "kind"),
    [
        ([0, 8, 16, -1], "cu_order"),
        ([0, 8, 16, -1, -1], "cu_order"),
        ([0, 16, 8, 24], "cu_order"),
        ([8, 16], "cu_start"),
        ([0, 8], "cu_end"),
    ],
)
def test_invalid_boundaries_are_refused(cu, kind):
    with pytest.raises(BatchRefused) as found:
        shard_index(torch.tensor(cu, dtype=torch.int32), 0, 2, total_tokens=16 if kind != "cu_order" else None)
    assert found.value.kind == kind


def test_a_segment_across_two_rows_is_refused():
    tensors = {"ids": torch.arange(32).view(2, 16)}
    with pytest.raises(BatchRefused, match="must have a boundary between the 2 rows of 16 tokens"):
        shard_tensors(tensors, boundaries([8, 16, 8]), 0, 2, rows=2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(PackproofError, match=f"rank: must be from 0 to 1, got {rank}"):
        shard_index(boundaries([8]), rank, 2)


def test_other_faults_of_a_call_are_refused():
    with pytest.raises(
        PackproofError, match=r"must be one of zigzag, contiguous, got 'zigzig'.*choose one of zigzag, contiguous"
    ):
        shard_index(boundaries([8]), 0, 2, layout="zigzig")
    with pytest.raises(PackproofError, match="a 8, b 4"):
        shard_tensors({"a": torch.zeros(8), "b": torch.zeros(4)}, boundaries([8]), 0, 2)
    with pytest.raises(
        PackproofError, match=r"context parallel rank 1: must have the shape of rank 0's shard, \[1, 4\], got \[1, 2\]"
    ):
        gather([torch.zeros(1, 4), torch.zeros(1, 2)], boundaries([8]))


def test_the_fill_of_boundaries_is_never_read():
    batch = batch_of([[8, 8, 16], [32]])
    poisoned = batch.packed_cu_seqlens.where(batch.packed_cu_seqlens >= 0, torch.tensor(-(2**30), dtype=torch.int32))
    poisoned_batch = Batch(**{**vars(batch), "packed_cu_seqlens": poisoned})
    assert torch.equal(shard_batch(poisoned_batch, 1, 2).input_ids, shard_batch(batch, 1, 2).input_ids)


def test_gather_writes_every_position():
    whole = gather([torch.full((1, 4), POISON), torch.full((1, 4), 7)], boundaries([8]))
    assert whole.tolist() == [[POISON, POISON, 7, 7, 7, 7, POISON, POISON]]


def test_the_longest_batch_that_int32_boundaries_can_hold():
    size = 2**16
    total = 2**31 - 2 * size
    cu = torch.tensor([0, 200 * size, total], dtype=torch.int32)
    index = shard_index(cu, 0, size)
    assert index.dtype == torch.int64
    assert len(index) == total // size
    assert (int(index[0]), int(index[-1])) == (0, total - 1)
    assert int(index.min()) == 0
    assert torch.equal(partitioned_indices(cu, total, size, 0).long(), index)


def test_select_reads_only_the_positions_of_the_index():
    tensor = torch.full((2, 4), POISON)
    tensor.view(-1)[[1, 6]] = torch.tensor([5, 9])
    assert select(tensor, torch.tensor([1, 6])).tolist() == [[5], [9]]


@settings(max_examples=30)
@given(cuts(empty=False))
def test_megatron_cuts_a_batch_with_the_torch_index(case):
    from megatron.core import utils

    size, lengths = case
    flat = flatten(batch_of([lengths]))
    for rank in (0, size - 1):
        # Right-filled with P, as upstream's own dataset does.
        cu = torch.cat([flat.cu_seqlens, flat.cu_seqlens[-1:].expand(3)])[None]
        batch = {
            "tokens": flat.input_ids,
            "labels": flat.target_ids,
            "loss_mask": flat.token_mask,
            "position_ids": flat.position_ids,
            "cu_seqlens": cu,
            "cu_seqlens_padded": cu,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda _group, size=size: size)
            patch.setattr(torch.distributed, "get_rank", lambda _group, rank=rank: rank)
            with index_for_megatron():
                found = utils._get_batch_on_this_cp_rank_per_document_balancing(batch, None)
        cut = shard_batch(flat, rank, size)
        for theirs, ours in zip(
            ("tokens", "labels", "loss_mask", "position_ids"),
            ("input_ids", "target_ids", "token_mask", "position_ids"),
            strict=True,
        ):
            assert torch.equal(found[theirs], getattr(cut, ours))


@pytest.mark.parametrize("there", [None, SimpleNamespace()])
def test_the_index_for_megatron_is_undone(there, monkeypatch):
    from megatron.core import utils

    monkeypatch.setattr(utils, "tex", there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def fail_inside():
        with index_for_megatron():
            assert utils.tex.thd_get_partitioned_indices is partitioned_indices
            with index_for_megatron():
                pass
            assert utils.tex.thd_get_partitioned_indices is partitioned_indices
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert utils.tex is there


def test_the_index_for_megatron_leaves_a_kernel_alone_that_can_run(monkeypatch):
    from megatron.core import utils

    engine = SimpleNamespace()
    monkeypatch.setattr(utils, "tex", engine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with index_for_megatron():
        assert utils.tex is engine
        assert not vars(engine)
    assert utils.tex is engine


def test_the_kernel_is_looked_for_only_when_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)  # as where it is not installed
    context_parallel._kernel.cache_clear()
    assert context_parallel._kernel() is None
    engine = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", engine)
    context_parallel._kernel.cache_clear()
    assert context_parallel._kernel() is partitioned_indices
    context_parallel._kernel.cache_clear()


def test_partitioned_indices_is_the_kernels_interface():
    found = partitioned_indices(boundaries([8, 8]), 16, 2, 0)
    assert found.dtype == torch.int32
    assert found.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
