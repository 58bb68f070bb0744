"""R-ORDER: both sides and the installed Megatron-LM's samplers give each rank the same rows, and the check sees when they do not."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equivalence.checks import order
from equivalence.checks.order import OrderCase, check_order
from production.training.order import Order

BASE = OrderCase(rows=(10,), kind="sequential", last_batch="wrap", global_batch_size=4, data_parallel_size=2, steps=9)


def case(**changes):
    return dataclasses.replace(BASE, **changes)


@st.composite
def cases(draw):
    dp = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["sequential", "shuffle"]))
    count = draw(st.integers(1, 5))
    blended = draw(st.booleans())
    wrapping = blended or draw(st.booleans())
    weight = st.one_of(st.integers(1, 9).map(float), st.floats(0.01, 5))
    return OrderCase(
        rows=tuple(
            draw(st.lists(st.integers(1, 30), min_size=count if blended else 1, max_size=count if blended else 1))
        ),
        kind=kind,
        last_batch="wrap" if wrapping else draw(st.sampled_from(["drop", "stop"])),
        global_batch_size=dp * draw(st.integers(1, 4)),
        data_parallel_size=dp,
        seed=draw(st.integers(0, 2**64 - 1)) if kind == "shuffle" else None,
        max_epochs=None if blended else draw(st.sampled_from([None, 1, 3])),
        weights=tuple(draw(st.lists(weight, min_size=count, max_size=count))) if blended else None,
        steps=draw(st.integers(1, 12)),
        consumed_steps=draw(st.integers(0, 12)) if wrapping else 0,
    )


@settings(max_examples=150)
@given(cases())
def test_r_order_both_sides_take_the_same_rows_in_any_order(drawn):
    assert check_order(drawn).findings == []


@pytest.mark.parametrize("consumed", [0, 1, 7])
@pytest.mark.parametrize(("size", "dp"), [(1, 1), (4, 1), (4, 2), (12, 4)])
def test_r_order_1_and_2_sequential_is_megatron_lms_sampler_from_any_step(consumed, size, dp):
    one = case(global_batch_size=size, data_parallel_size=dp, consumed_steps=consumed)
    assert drawn_rows(one) == 9 * size
    assert check_order(one).findings == []


@pytest.mark.parametrize("last_batch", ["drop", "stop"])
@pytest.mark.parametrize("rows", [12, 13, 15])
def test_r_order_3_an_epoch_without_its_partial_batch_is_megatron_lms_sampler_of_whole_global_batches(last_batch, rows):
    one = case(rows=(rows,), last_batch=last_batch, max_epochs=1)
    assert drawn_rows(one) == 12
    assert check_order(one).findings == []


@pytest.mark.parametrize("consumed", [0, 3, 11])
@pytest.mark.parametrize(
    ("kind", "rows"), [("megatron-cyclic", 12), ("megatron-cyclic-sharded", 12), ("megatron-cyclic-sharded", 14)]
)
def test_r_order_5_cyclic_is_megatron_lms_random_sampler_through_epochs(consumed, kind, rows):
    one = case(rows=(rows,), kind=kind, global_batch_size=8, data_parallel_size=4, consumed_steps=consumed)
    assert drawn_rows(one) == 72
    assert check_order(one).findings == []


def test_r_order_5_megatron_lms_ranks_fall_out_of_step_where_dp_does_not_divide_the_rows():
    one = case(rows=(10,), kind="megatron-cyclic", global_batch_size=4, data_parallel_size=4, steps=4)
    by_rank = [[row for _, row in order._cyclic(one, rank)] for rank in range(4)]
    # Rank 0 takes a third row of epoch 0 while ranks 2 and 3 are in epoch 1: rows come twice and others not at all.
    epochs = [[row for rank in by_rank for row in rank[first : first + 2]] for first in (0, 2)]
    assert len(set(epochs[0])) == 8
    assert len(set(epochs[1])) < 8
    assert order._of_production(one) == "order"


@pytest.mark.parametrize(
    "weights", [(1.0, 1.0), (0.7, 0.3), (0.1, 0.2, 0.7), (1 / 3, 1 / 3, 1 / 3), (3.0, 5.0, 2.0, 0.11, 0.13, 1e-3, 7.0)]
)
def test_r_order_6_a_blend_is_what_the_installed_helper_builds(weights):
    rows = tuple(range(5, 5 + len(weights)))
    one = case(rows=rows, weights=weights, global_batch_size=50, steps=40, consumed_steps=3)
    assert drawn_rows(one) == 2000
    assert check_order(one).findings == []


def test_r_order_6_production_also_agrees_with_the_helper_beyond_seven_sources():
    weights = tuple(0.1 * number for number in range(1, 12))
    one = case(rows=(9,) * 11, weights=weights, global_batch_size=50, steps=40)
    ours, theirs = order._of_production(one), order._drawn_by_megatron(one)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert order._of_reference(one) == "order"


@pytest.mark.parametrize("changes", [{}, {"rows": (10, 7), "weights": (0.7, 0.3)}, {"kind": "shuffle", "seed": 3}])
def test_the_check_finds_one_row_that_is_another(monkeypatch, changes):
    whole = Order.batch_at

    def wrong(self, consumed_samples):
        batch = whole(self, consumed_samples)
        if batch.step != 5:
            return batch
        samples = (*batch.samples[:-1], batch.samples[-1]._replace(row=(batch.samples[-1].row + 1) % 7))
        return dataclasses.replace(batch, samples=samples)

    monkeypatch.setattr(Order, "batch_at", wrong)
    result = check_order(case(**changes))
    assert [difference.tensor for finding in result.findings for difference in finding.differences]
    assert all("production" in (finding.left, finding.right) for finding in result.findings)


def test_an_order_that_only_one_side_has_is_not_called_equal():
    with pytest.raises(ValueError, match="nothing to compare"):
        check_order(case(kind="megatron-cyclic", max_epochs=2))


def drawn_rows(one):
    """How many rows Megatron-LM draws of a case, over all ranks: the witness has spoken."""
    return sum(len(taken) for taken in order._drawn_by_megatron(one).values())
