"""R-ORDER in production: refusals, ends, validation, and what a resume must not change."""

import pytest

from production.errors import PackproofError
from production.training.data.order import Order, Sample, ValidationOrder, shuffled
from production.training.order_settings import OrderSettings

GIVEN = {"kind": "sequential", "last_batch": "drop", "global_batch_size": 4, "data_parallel_size": 2}


def settings(**changes):
    return OrderSettings(**GIVEN | changes)


def rows_of(order, steps, start=0):
    batches = [order.batch_at(consumed) for consumed in range(start, start + steps * 4, 4)]
    return [[sample.row for sample in batch.samples] for batch in batches if batch is not None]


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"kind": "random"}, "kind", "got 'random'"),
        ({"last_batch": "keep"}, "last_batch", "got 'keep'"),
        ({"global_batch_size": 0}, "global_batch_size", "must be at least 1, got 0"),
        ({"global_batch_size": 5}, "global_batch_size", "must be a multiple of data_parallel_size, 2, got 5"),
        ({"max_epochs": 0}, "max_epochs", "must be at least 1, got 0"),
        ({"kind": "shuffle"}, "seed", "must be set for the order shuffle"),
        ({"seed": 1}, "seed", "must not be set for the order sequential"),
        (
            {"kind": "megatron-cyclic", "last_batch": "wrap", "run_steps": 3, "seed": 1},
            "seed",
            "must not be set for the order",
        ),
        ({"kind": "megatron-cyclic", "last_batch": "wrap"}, "run_steps", "must be set for the order"),
        ({"kind": "megatron-cyclic", "last_batch": "wrap", "run_steps": 0}, "run_steps", "must be at least 1, got 0"),
        (
            {"kind": "megatron-cyclic", "last_batch": "wrap", "run_steps": 3, "max_epochs": 1},
            "max_epochs",
            "must not be set for the order",
        ),
        ({"run_steps": 3}, "run_steps", "does not depend on the length of the run"),
        ({"kind": "shuffle", "seed": -1}, "seed", "must be from 0 to 2**64 - 1, got -1"),
        ({"kind": "shuffle", "seed": 1 << 64}, "seed", "must be from 0 to 2**64 - 1"),
        ({"kind": "megatron-cyclic-sharded"}, "last_batch", "must be wrap for the order"),
        ({"weights": (1.0, 0.0), "last_batch": "wrap"}, "weights", "(1.0, 0.0)"),
        ({"weights": (float("nan"),), "last_batch": "wrap"}, "weights", "nan"),
        ({"weights": (1.0, 1.0)}, "last_batch", "must be wrap for a blend"),
        ({"weights": (1.0, 1.0), "last_batch": "wrap", "max_epochs": 2}, "max_epochs", "must not be set for a blend"),
        (
            {"weights": (1.0,), "last_batch": "wrap", "kind": "megatron-cyclic", "run_steps": 3},
            "kind",
            "must be sequential or shuffle for a blend",
        ),
    ],
)
def test_settings_that_would_have_to_be_guessed_are_refused_by_name(changes, where, what):
    with pytest.raises(PackproofError) as caught:
        settings(**changes)
    assert caught.value.where == where
    assert what in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    ("rows", "changes", "what"),
    [
        ((3,), {}, "a source needs at least 4 rows, one global batch, got 3"),
        ((3,), {"last_batch": "stop"}, "a source needs at least 4 rows, one global batch, got 3"),
        ((0,), {}, "must have at least one row"),
        ((5, 5), {}, "one source without weights, got 2 sources"),
        ((5,), {"weights": (1.0, 1.0), "last_batch": "wrap"}, "2 sources, one for each weight, got 1 sources"),
    ],
)
def test_rows_that_do_not_fit_the_order_are_refused(rows, changes, what):
    with pytest.raises(PackproofError) as caught:
        Order(rows, settings(**changes))
    assert what in caught.value.what


def test_r_order_3_rows_that_an_epoch_leaves_out_are_reported():
    order = Order((11,), settings(max_epochs=3))
    assert (order.samples_per_epoch, order.dropped_per_epoch) == (8, 3)
    assert (order.total_samples, order.total_steps) == (24, 6)
    assert rows_of(order, 9) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


def test_r_order_3_wrap_ends_with_a_full_batch_after_every_row_of_every_epoch():
    order = Order((5,), settings(last_batch="wrap", max_epochs=2))
    assert (order.total_samples, order.total_steps) == (12, 3)
    assert rows_of(order, 9) == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
    assert [sample.epoch for sample in order.batch_at(8).samples] == [1, 1, 2, 2]


def test_r_order_3_stop_is_one_epoch_unless_all_rows_fill_batches():
    assert Order((11,), settings(last_batch="stop", max_epochs=9)).total_steps == 2
    assert Order((11,), settings(last_batch="stop")).total_steps == 2
    assert Order((8,), settings(last_batch="stop", max_epochs=9)).total_steps == 18
    assert Order((8,), settings(last_batch="stop")).total_steps is None


def test_r_order_2_any_step_can_be_asked_for_in_any_order():
    for changes in ({"kind": "shuffle", "seed": 5}, {"last_batch": "wrap", "weights": (0.6, 0.4)}):
        rows = (7, 9) if "weights" in changes else (9,)
        whole = [Order(rows, settings(**changes)).batch_at(0)]
        order = Order(rows, settings(**changes))
        whole = [order.batch_at(consumed) for consumed in range(0, 80, 4)]
        assert len(set(whole)) == 20
        for consumed in (40, 4, 76, 0, 40):
            assert order.batch_at(consumed) == whole[consumed // 4]
            assert Order(rows, settings(**changes)).batch_at(consumed) == whole[consumed // 4]


@pytest.mark.parametrize("kind", ["megatron-cyclic", "megatron-cyclic-sharded"])
def test_r_order_5_a_cyclic_run_ends_with_its_steps_and_any_of_them_can_be_asked_for(kind):
    cyclic = settings(kind=kind, last_batch="wrap", run_steps=6)
    order = Order((5,), cyclic)
    assert (order.total_samples, order.total_steps, order.dropped_per_epoch) == (24, 6, 0)
    whole = [order.batch_at(consumed) for consumed in range(0, 24, 4)]
    assert order.batch_at(24) is None
    assert sorted(sample.row + 5 * sample.epoch for batch in whole for sample in batch.samples) == list(range(24))
    assert Order((5,), cyclic).batch_at(12) == whole[3]


@pytest.mark.parametrize("consumed", [-4, 1, 6])
def test_r_order_2_a_position_inside_a_global_batch_is_refused(consumed):
    with pytest.raises(PackproofError, match="global batch size that the run had"):
        Order((9,), settings()).batch_at(consumed)


def test_r_batch_3_a_rank_takes_every_dp_th_sample():
    batch = Order((9,), settings(global_batch_size=6)).batch_at(0)
    assert [sample.row for sample in batch.of_rank(1, 2)[0]] == [1, 3, 5]
    for rank, size in ((2, 2), (-1, 2), (0, 4)):
        with pytest.raises(PackproofError, match="data-parallel rank"):
            batch.of_rank(rank, size)


def test_r_order_4_a_shuffled_epoch_is_this_one_for_ever():
    assert shuffled(10, seed=42, source=0, epoch=0).tolist() == [9, 8, 7, 2, 3, 6, 1, 5, 0, 4]


def test_r_order_4_seeds_sources_and_epochs_each_draw_another_order():
    given = {"seed": 1, "source": 2, "epoch": 3}
    drawn = {tuple(shuffled(50, **given | change)) for change in ({}, {"seed": 4}, {"source": 4}, {"epoch": 4})}
    assert len(drawn) == 4


def test_r_order_4_rows_are_spread_evenly_over_places():
    # 2,000 epochs of 20 rows: each row is 100 times at each place, give or take 10; a place is off by 5 of these nowhere.
    counts = [[0] * 20 for _ in range(20)]
    for epoch in range(2000):
        for place, row in enumerate(shuffled(20, seed=1, source=0, epoch=epoch).tolist()):
            counts[row][place] += 1
    assert all(50 < count < 150 for each in counts for count in each)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_r_order_7_the_rows_of_a_validation_that_count_do_not_depend_on_dp(dp):
    order = ValidationOrder(rows=30, global_batch_size=12, data_parallel_size=dp, limit=29)
    consumed, counted = 0, []
    for _ in range(order.total_steps):
        batch = order.batch_at(consumed)
        assert len(batch.samples) % dp == 0
        for rank in range(dp):
            samples, weights = batch.of_rank(rank, dp)
            counted += [sample.row for sample, weight in zip(samples, weights, strict=True) if weight]
        consumed = batch.consumed_samples
    assert sorted(counted) == list(range(29))
    assert order.batch_at(consumed) is None
    assert consumed == order.total_samples == 29


def test_r_batch_4_a_validation_repeats_its_last_row_at_weight_0():
    batch = ValidationOrder(rows=5, global_batch_size=8, data_parallel_size=4).batch_at(0)
    assert batch.samples[4:] == (Sample(0, 4, 0),) * 4
    assert batch.weights == (1.0,) * 5 + (0.0,) * 3


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"limit": 6}, "must be at most the 5 rows of the source, got 6"),
        ({"limit": 0}, "must be at least 1, got 0"),
        ({"global_batch_size": 3}, "must be a multiple of data_parallel_size, 2, got 3"),
    ],
)
def test_a_validation_that_cannot_be_had_is_refused(changes, what):
    with pytest.raises(PackproofError) as caught:
        ValidationOrder(**{"rows": 5, "global_batch_size": 4, "data_parallel_size": 2} | changes)
    assert what in caught.value.what
