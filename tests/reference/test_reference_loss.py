"""The reference's losses against values worked out by hand (docs/SPEC.md#loss)."""

import math

import pytest
import torch

from reference import loss

ONES = torch.tensor([1.0, 1.0])


def shares(*values):
    return [[torch.tensor(each, dtype=torch.float64) for each in rank] for rank in values]


# Two ranks of two microbatches: 3 tokens train on rank 0, none in the second of rank 1.
LOSSES = shares([[2.0, 4.0], [6.0, 9.0]], [[8.0, 1.0], [5.0, 7.0]])
MASKS = shares([[1.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]])
VALID = torch.tensor(4.0, dtype=torch.float64)


def test_r_loss_1_and_2_a_sum_and_a_count_go_to_the_schedule_as_they_are():
    total, count = loss.returned("per_token", LOSSES[0][0], MASKS[0][0], microbatches=2, context_parallel_size=2)
    assert (float(total), int(count), count.dtype) == (6.0, 2, torch.int32)
    assert float(loss.scheduled("per_token", total, count, microbatches=2, context_parallel_size=2)) == 6.0


def test_r_loss_3_mean_of_means_divides_by_its_own_tokens_and_microbatches():
    total, count = loss.returned("mean_of_means", LOSSES[0][0], MASKS[0][0], microbatches=2, context_parallel_size=2)
    assert float(loss.scheduled("mean_of_means", total, count, microbatches=2, context_parallel_size=2)) == 1.5


def test_r_loss_4_the_schedules_averaging_is_taken_out_again():
    given = {"microbatches": 2, "context_parallel_size": 4}
    value, count = loss.returned("global_valid_tokens", LOSSES[0][0], MASKS[0][0], **given, valid_tokens=VALID)
    assert (float(value), count) == (6 / 4 * 2 / 4, None)
    assert float(loss.scheduled("global_valid_tokens", value, count, **given)) == 1.5


def test_r_loss_2_to_4_each_token_has_the_weight_of_the_rule():
    def weights(name):
        found = loss.token_weights(name, MASKS, context_parallel_size=2, valid_tokens=VALID)
        return [[each.tolist() for each in rank] for rank in found]

    quarter = 1 / 4
    assert weights("per_token") == [[[quarter, quarter], [quarter, 0]], [[0, quarter], [0, 0]]]
    assert weights("global_valid_tokens") == weights("per_token")
    # 1 / n / M / (dp·cp)
    assert weights("mean_of_means") == [[[1 / 8, 1 / 8], [1 / 4, 0]], [[0, 1 / 4], [0, 0]]]


def test_r_loss_5_the_online_loss_has_its_epsilon():
    row, mask = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64), torch.tensor([1.0, 0.0, 1.0])
    nothing = torch.tensor(0.0, dtype=torch.float64)
    given = {"microbatches": 3, "context_parallel_size": 2}
    found = loss.returned_online(row, mask, **given, valid_tokens=VALID)
    assert float(found) == 4 / (4 + 1e-8) * 3 / 2
    assert float(loss.returned_online(row, mask * 0, **given, valid_tokens=nothing)) == 0
    assert loss.online_weights(MASKS, VALID)[0][1].tolist() == [1 / (4 + 1e-8), 0]


def test_r_loss_1_an_ignored_label_has_a_finite_loss():
    found = loss.cross_entropy(torch.zeros(3, 4), torch.tensor([2, -100, 0]))
    assert found.tolist() == [pytest.approx(math.log(4))] * 3
    assert found.dtype == torch.float32
    shifted = loss.cross_entropy(torch.tensor([[0.0, 5.0]]), torch.tensor([-100]))
    assert shifted.item() == pytest.approx(math.log(1 + math.exp(-5)))


def test_r_loss_6_multi_token_weights_of_the_rank_and_of_the_row():
    # One row on two cp ranks: n₀ 2 and 1, n₁ 1 and 0.
    masks = [
        [[torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])]],
        [[torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])]],
    ]

    def weights(name, **options):
        found = loss.multi_token_weights(
            name, masks, scaling_factor=0.5, context_parallel_size=2, valid_tokens=torch.tensor(3.0), **options
        )
        return [rank[0][0].tolist() for rank in found]

    assert weights("per_token") == [[0.5 * 2 / 1 / 3, 0.0], [0.0, 0.0]]
    assert weights("per_token", rows=True) == [[0.5 * 3 / 1 / 3, 0.0], [0.0, 0.0]]
    assert weights("global_valid_tokens") == weights("per_token")
    assert weights("mean_of_means") == [[0.5 / 1 / 1 / 2, 0.0], [0.0, 0.0]]
    assert weights("mean_of_means", rows=True) == [[0.5, 0.0], [0.0, 0.0]]  # not divided by cp


def test_r_loss_7_to_10_reported_losses_follow_the_rules():
    assert float(loss.training_loss(LOSSES, MASKS)) == (2 + 4 + 6 + 1) / 4
    # Means of 3, 6, 1 and 0, first over microbatches: another number.
    assert float(loss.validation_loss(LOSSES, MASKS)) == ((3 + 6) / 2 + (1 + 0) / 2) / 2
    assert float(loss.valid_tokens_loss(LOSSES, MASKS, VALID, online=False)) == 13 / 4
    assert float(loss.valid_tokens_loss(LOSSES, MASKS, VALID, online=True)) == 13 / (4 + 1e-8)
    assert loss.multi_token_losses([LOSSES, LOSSES], [MASKS, MASKS]).tolist() == [2.5, 2.5]
    assert loss.token_losses_of_depths([LOSSES, LOSSES], [MASKS, MASKS]).tolist() == [13 / 4, 13 / 4]
    assert loss.empty_shares([MASKS, MASKS]) == [0.25, 0.25]


def test_r_loss_1_where_all_is_masked_everything_is_0():
    masked = [[mask * 0 for mask in rank] for rank in MASKS]
    nothing = torch.tensor(0.0)
    for name in loss.NORMALIZATIONS:
        weights = loss.token_weights(name, masked, context_parallel_size=1, valid_tokens=nothing)
        assert all(not each.any() for rank in weights for each in rank)
    for reported in (loss.training_loss(LOSSES, masked), loss.validation_loss(LOSSES, masked)):
        assert float(reported) == 0
    assert float(loss.valid_tokens_loss(LOSSES, masked, nothing, online=True)) == 0


def test_an_unknown_normalization_and_a_missing_divisor_are_errors():
    for name in ("mean", "global_valid_tokens"):
        with pytest.raises(ValueError, match="normalization must be one of"):
            loss.returned(name, ONES, ONES, microbatches=1, context_parallel_size=1)
