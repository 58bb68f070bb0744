"""Shards, depths and packers of the reference, against values worked out by hand (docs/SPEC.md#context-parallelism, #multi-token-prediction and #packing)."""

import itertools

import pytest
import torch

from reference import context_parallel, multi_token, packing
from reference.refusals import RowRefused

_ = -100
LENGTHS = [4, 1, 3, 2, 1, 3, 4, 5]


def test_r_cp_1_the_published_example():
    assert context_parallel.owned_positions([0, 8, 16], 0, 2) == [0, 1, 6, 7, 8, 9, 14, 15]
    assert context_parallel.owned_positions([0, 8, 16], 1, 2) == [2, 3, 4, 5, 10, 11, 12, 13]
    assert context_parallel.owned_positions([0, 4, 4, 16], 1, 2) == [1, 2, 7, 8, 9, 10, 11, 12]


def kernel_index(cu, rank, world):
    """The kernel's formula as published: position t of a rank's share, by bisection over scaled boundaries."""
    scaled = [boundary // world for boundary in cu]
    index = []
    for t in range(scaled[-1]):
        s = max(n for n, boundary in enumerate(scaled[:-1]) if boundary <= t)
        length, j = scaled[s + 1] - scaled[s], t - scaled[s]
        half = length // 2
        offset = rank if j < half else 2 * (world - 1) - rank
        index.append(j + world * scaled[s] + half * offset)
    return index


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_r_cp_1_equals_the_kernels_formula_and_r_cp_5_every_position_is_owned_once(world):
    cu = list(itertools.accumulate((0, 2, 0, 6, 2, 10), lambda a, b: a + b * world))
    owned = [context_parallel.owned_positions(cu, rank, world) for rank in range(world)]
    assert owned == [kernel_index(cu, rank, world) for rank in range(world)]
    assert sorted(itertools.chain(*owned)) == list(range(cu[-1]))


@pytest.mark.parametrize("layout", context_parallel.LAYOUTS)
def test_r_cp_5_gather_is_the_inverse(layout):
    cu, whole = [0, 8, 24, 32], torch.arange(64).reshape(2, 32)
    shards = [context_parallel.shard(whole, cu, rank, 4, layout) for rank in range(4)]
    assert shards[0].shape == (2, 8)
    assert context_parallel.gather(shards, cu, layout).equal(whole)
    assert context_parallel.shard(whole, cu, 0, 1, layout).equal(whole)


def test_r_cp_3_and_4_rows_that_cannot_be_cut_are_refused():
    with pytest.raises(RowRefused, match="segment 1 has 6 tokens, which 4 does not divide") as refused:
        context_parallel.owned_positions([0, 4, 10], 0, 2)
    assert (refused.value.kind, refused.value.conversation) == ("indivisible_segment", 1)
    assert context_parallel.owned_positions([0, 3, 10], 0, 1) == list(range(10))
    assert context_parallel.owned_positions([0, 3, 10], 1, 2, "contiguous") == [5, 6, 7, 8, 9]
    with pytest.raises(RowRefused, match="10 tokens, which 4"):
        context_parallel.owned_positions([0, 3, 10], 1, 4, "contiguous")
    for layout, rank in (("spiral", 0), ("zigzag", 2)):
        with pytest.raises(ValueError, match=r"layout|rank"):
            context_parallel.owned_positions([0, 4], rank, 2, layout)


def test_r_mtp_1_the_published_example():
    cu = [0, 5, 8]
    labels, mask = torch.tensor([_, 2, 3, 4, _, _, 6, 7]), torch.tensor([0, 1, 1, 1, 0, 0, 1, 1])
    one, two = multi_token.depths(labels, labels, mask, labels, cu, 2)
    assert one.target_ids.tolist() == [2, 3, 4, _, 0, 6, 7, 0]
    assert one.token_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 0]
    assert two.target_ids.tolist() == [3, 4, _, 0, 0, 7, 0, 0]
    assert two.token_mask.tolist() == [1, 1, 0, 0, 0, 1, 0, 0]


def test_r_mtp_1_equals_megatron_cores_own_roll():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    cu = [0, 1, 4, 4, 12, 13]
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(cu, dtype=torch.int32))
    rolled = torch.arange(1, 14)
    for depth in range(1, 5):
        rolled, _total = roll_tensor(rolled, shifts=-1, dims=-1, cp_group=None, packed_seq_params=params)
        assert multi_token.shift(torch.arange(1, 14), cu, depth).equal(rolled)


def test_r_cp_1_equals_megatron_cores_rotary_partition():
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    cu, world = [0, 8, 24, 32], 4
    for rank in range(world):
        theirs = []
        for start, end in itertools.pairwise(cu):
            share = torch.empty((end - start) // world, 1)
            theirs += (start + _get_thd_freqs_on_this_cp_rank(rank, world, share, torch.arange(end - start))).tolist()
        assert context_parallel.owned_positions(cu, rank, world) == theirs


def test_r_pack_the_published_examples():
    assert packing.concatenative(LENGTHS, 8) == [[0, 1, 2], [3, 4, 5], [6], [7]]
    assert packing.first_fit_decreasing(LENGTHS, 8) == [[7, 5], [6, 0], [2, 3, 4, 1]]
    assert packing.modified_first_fit_decreasing(LENGTHS, 8) == [[7, 2], [5, 3, 1, 4], [0, 6]]


def test_r_pack_3_a_seed_gives_the_same_bins_and_another_one_others():
    bins = [packing.first_fit_shuffle(list(range(1, 30)), 40, seed) for seed in (1, 1, 2)]
    assert bins[0] == bins[1] != bins[2]
    assert sorted(itertools.chain(*bins[2])) == list(range(29))


def test_r_pack_4_pairs_of_small_items_in_reverse():
    # C 12: two large of 7 with room 5; small are 3, 4, 4, of which no two fit together, so each bin takes the largest that fits
    assert packing.modified_first_fit_decreasing([7, 7, 3, 4, 4], 12) == [[0, 3], [1, 4], [2]]
    # C 13: large 7, 7 have room 6; small 3, 3, 3, 4: reversed, bin 1 takes the two smallest, bin 0 has one left that fits
    assert packing.modified_first_fit_decreasing([7, 7, 3, 3, 3, 4], 13) == [[0, 5], [1, 2, 4], [3]]


def test_r_pack_5_and_6_bin_counts():
    assert packing.raise_bin_count([[0, 1, 2], [3, 4, 5], [6]], 2) == [[0, 1, 2], [3, 4], [6], [5]]
    assert packing.raise_bin_count([[0, 1, 2], [3, 4, 5], [6]], 6) == [[0, 1], [3], [6], [5], [4], [2]]
    assert packing.raise_bin_count([[0, 1, 2]], 3) == [[0], [2], [1]]
    # NeMo-RL's concatenative packer at capacity 3, its number of bins raised to a multiple of 4.
    assert packing.raise_bin_count(packing.concatenative([1] * 5, 3), 4) == [[0], [3, 4], [2], [1]]
    assert packing.bins_of_rank([[0], [1], [2]], 0, 2) == [[0], [2]]
    with pytest.raises(packing.PackingError, match="at least 2 sequences, one for each bin, got 1"):
        packing.raise_bin_count([[0]], 2)


@pytest.mark.parametrize("pack", packing.PACKERS.values(), ids=packing.PACKERS)
def test_a_sequence_that_no_bin_can_hold_is_an_error(pack):
    with pytest.raises(packing.PackingError, match="sequence 1 must have at most the 8 tokens of a bin, got 9"):
        pack([1, 9], 8)
    with pytest.raises(packing.PackingError, match="sequence 0 must have at least one token, got 0"):
        pack([0, 9], 8)
