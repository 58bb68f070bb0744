"""R-ORDER: both sides and the installed Megatron-LM's samplers give each rank the same rows, and the check sees when they do not."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equivalence.cases.order import OrderCase
from equivalence.checks.input import order
from equivalence.checks.input.order import check_order
from production.training.data.order import Order

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
@pytest.mark.parametrize("kind", ["megatron-cyclic", "megatron-cyclic-sharded"])
@pytest.mark.parametrize("rows", [1, 12, 14, 500])
def test_r_order_5_cyclic_is_what_megatron_lms_driver_draws(consumed, kind, rows):
    one = case(
        rows=(rows,), kind=kind, global_batch_size=8, data_parallel_size=4, consumed_steps=consumed, run_steps=30
    )
    assert drawn_rows(one) == 72
    assert check_order(one).findings == []


def test_r_order_5_the_sampler_is_given_the_samples_of_the_run_and_the_dataset_turns_them_into_rows():
    """The installed classes that `pretrain` puts together: SFTDataset is as long as the run, and permuted once."""
    from megatron.training.datasets.sft_dataset import SFTDataset

    dataset = SFTDataset.__new__(SFTDataset)
    dataset.num_samples = 24
    permuted = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    one = case(rows=(5,), kind="megatron-cyclic", global_batch_size=4, data_parallel_size=2, run_steps=6, steps=6)
    for side in (order._of_production(one), order._of_reference(one), order._drawn_by_megatron(one)):
        for rank in range(2):
            assert side[f"rows of rank {rank}"].tolist() == [[0, number % 5] for number in permuted[rank::2]]


@pytest.mark.parametrize("kind", ["megatron-cyclic", "megatron-cyclic-sharded"])
def test_r_order_5_every_sample_of_a_run_comes_once_and_a_longer_run_is_another_order(kind):
    one = case(rows=(7,), kind=kind, run_steps=14, steps=99)
    sides = [order._of_production(one), order._of_reference(one)]
    for side in sides:
        taken = [
            (row, epoch)
            for rank in range(2)
            for (_, row), epoch in zip(
                side[f"rows of rank {rank}"].tolist(), side[f"epochs of rank {rank}"].tolist(), strict=True
            )
        ]
        assert sorted(taken) == sorted((number % 7, number // 7) for number in range(56))
    longer = order._of_production(dataclasses.replace(one, run_steps=15))
    assert not torch.equal(longer["rows of rank 0"][:28], sides[0]["rows of rank 0"])


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


def drawn_rows(one):
    """How many rows Megatron-LM draws of a case, over all ranks: the witness has spoken."""
    return sum(len(taken) for taken in order._drawn_by_megatron(one).values())
