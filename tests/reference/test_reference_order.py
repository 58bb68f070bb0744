"""R-ORDER in the reference: examples worked by hand, so that both sides cannot be wrong alike."""

import itertools

import pytest

from reference.order import OrderError, blend, cyclic, epoch_rows, global_batches, mix, one_source


def take(count, **how):
    given = {"kind": "sequential", "seed": None, "global_batch_size": 2, "last_batch": "wrap"} | how
    return list(itertools.islice(one_source(given.pop("rows", 3), **given), count))


def test_r_order_3_wrap_continues_with_the_next_epoch_inside_a_global_batch():
    assert take(7) == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 0, 2)]


def test_r_order_3_drop_leaves_the_rest_of_each_epoch_out():
    assert take(5, last_batch="drop") == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 0, 2)]


def test_r_order_3_stop_ends_before_the_rest_of_the_first_epoch():
    assert take(9, last_batch="stop") == [(0, 0, 0), (0, 1, 0)]


def test_r_order_3_stop_continues_where_nothing_is_left_over():
    assert len(take(99, rows=4, last_batch="stop", max_epochs=3)) == 12


def test_r_order_3_epochs_end_and_wrap_fills_the_last_batch_from_the_next_one():
    assert take(99, max_epochs=1) == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1)]
    assert take(99, max_epochs=2) == [*take(6)]
    assert take(99, max_epochs=2, last_batch="drop") == take(4, last_batch="drop")


def test_r_order_3_fewer_rows_than_a_global_batch_are_refused_unless_wrapped():
    for last_batch in ("drop", "stop"):
        with pytest.raises(OrderError, match="a source needs at least 4 rows, one global batch, got 3"):
            take(1, global_batch_size=4, last_batch=last_batch)
    assert len(take(4, global_batch_size=4)) == 4


def test_r_order_4_mix_is_splitmix64():
    # The first outputs of SplitMix64 from the state 0 are known; each is the mix of a multiple of its increment.
    increment = 0x9E3779B97F4A7C15
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix(increment * number % 2**64) for number in range(3)] == known


def test_r_order_4_a_shuffled_epoch_has_every_row_once_and_no_two_epochs_seeds_or_sources_agree():
    def rows(**how):
        return epoch_rows(50, **{"kind": "shuffle", "seed": 1, "source": 0, "epoch": 0} | how)

    drawn = [rows(), rows(epoch=1), rows(seed=2), rows(source=1)]
    assert all(sorted(each) == list(range(50)) for each in drawn)
    assert len({tuple(each) for each in drawn}) == 4


def test_r_order_4_a_shuffled_epoch_is_this_one_for_ever():
    assert epoch_rows(10, kind="shuffle", seed=42, source=0, epoch=0) == [9, 8, 7, 2, 3, 6, 1, 5, 0, 4]


def test_r_order_5_a_cyclic_run_is_one_permutation_of_its_samples():
    permuted = [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]  # torch.randperm(10), seed 0
    whole = list(cyclic(4, run_samples=10, data_parallel_size=2, is_sharded=False))
    assert whole == [(0, number % 4, number // 4) for number in permuted]
    # Two runs of five samples, both drawn as [4, 0, 1, 3, 2].
    sharded = list(cyclic(4, run_samples=10, data_parallel_size=2, is_sharded=True))
    drawn = [number for place in (4, 0, 1, 3, 2) for number in (place, 5 + place)]
    assert sharded == [(0, number % 4, number // 4) for number in drawn]
    with pytest.raises(OrderError, match="must be a multiple of the 3 data-parallel ranks, got 10"):
        next(cyclic(4, run_samples=10, data_parallel_size=3, is_sharded=False))


def test_r_order_6_a_blend_of_three_to_one():
    sources = [source for source, _, _ in itertools.islice(blend([9, 9], [3, 1], kind="sequential", seed=None), 9)]
    assert sources == [0, 1, 0, 0, 0, 1, 0, 0, 0]


def test_r_order_6_each_source_goes_through_its_own_epochs():
    drawn = list(itertools.islice(blend([2, 3], [1, 1], kind="sequential", seed=None), 8))
    assert [sample for sample in drawn if sample[0] == 0] == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    assert [sample for sample in drawn if sample[0] == 1] == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 0, 1)]


def test_r_order_2_a_resume_is_the_rest_of_the_same_batches():
    whole = list(
        itertools.islice(
            global_batches(one_source(5, kind="shuffle", seed=7, global_batch_size=2, last_batch="wrap"), 2, 0), 8
        )
    )
    rest = global_batches(one_source(5, kind="shuffle", seed=7, global_batch_size=2, last_batch="wrap"), 2, 6)
    assert list(itertools.islice(rest, 5)) == whole[3:]
    with pytest.raises(OrderError, match="consumed_samples must be a multiple of 2, the global batch size, got 3"):
        next(global_batches(iter([]), 2, 3))


def test_unknown_orders_and_missing_seeds_are_refused():
    for kind, seed in (("random", 1), ("shuffle", None)):
        with pytest.raises(OrderError, match="must be sequential, or shuffle with a seed"):
            epoch_rows(3, kind=kind, seed=seed, source=0, epoch=0)
    with pytest.raises(OrderError, match="at most 7"):
        next(blend([1] * 8, [1.0] * 8, kind="sequential", seed=None))
