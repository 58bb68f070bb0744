"""R-LOSS in production: what a schedule is given, in tensors alone, and the online loss over real groups of ranks."""

from types import SimpleNamespace

import online_loss_world as world
import pytest
import torch

from equivalence.workers import open_world, preload
from production import loss
from production.errors import PackproofError

LOSSES = torch.tensor([[2.0, 4.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 0.0]])
VALID = torch.tensor(4.0)


def settings(normalization="per_token", **options):
    return loss.LossSettings(
        **{"normalization": normalization, "num_microbatches": 3, "context_parallel_size": 2} | options
    )


@pytest.mark.parametrize("normalization", ["per_token", "mean_of_means"])
def test_r_loss_2_and_3_the_schedule_gets_sum_count_and_report(normalization):
    total, count, report = loss.direct_loss(LOSSES, target_mask=MASK, settings=settings(normalization))
    assert (float(total), int(count), count.dtype) == (6.0, 2, torch.int32)
    assert report["lm loss"].tolist() == [6.0, 2.0]
    total /= 2  # as the schedule does, in place
    assert report["lm loss"].tolist() == [6.0, 2.0]


def test_r_loss_4_the_direct_path_gives_a_loss_without_a_count():
    found, report = loss.direct_loss(
        LOSSES, target_mask=MASK, settings=settings("global_valid_tokens"), global_valid_tokens=VALID
    )
    assert float(found) == 6 / 4 * 3 / 2
    assert report["lm loss"].tolist() == [6.0, 2.0]


def test_r_loss_1_half_precision_is_summed_in_float32_and_all_masked_is_0():
    half = torch.full((1, 4096), 0.1, dtype=torch.bfloat16)
    total, _, report = loss.direct_loss(half, target_mask=torch.ones(1, 4096), settings=settings())
    assert total.dtype == report["lm loss"].dtype == torch.float32
    assert float(total) == pytest.approx(4096 * float(half[0, 0]), rel=1e-6)
    for normalization in ("per_token", "mean_of_means", "global_valid_tokens"):
        found = loss.direct_loss(
            LOSSES, target_mask=MASK * 0, settings=settings(normalization), global_valid_tokens=VALID * 0
        )
        assert float(found[0]) == 0


def test_r_loss_1_only_the_mask_removes_a_token():
    leaf = LOSSES.clone().requires_grad_()
    loss.direct_loss(leaf, target_mask=MASK, settings=settings())[0].backward()
    assert leaf.grad.tolist() == [[1.0, 1.0, 0.0]]


def test_r_loss_6_losses_inside_the_model_are_scaled_where_nothing_else_divides_them():
    assert loss.auxiliary_scale("per_token", VALID) is None
    assert loss.auxiliary_scale("mean_of_means", VALID) is None
    assert float(loss.auxiliary_scale("global_valid_tokens", VALID)()) == 0.25
    assert float(loss.auxiliary_scale("global_valid_tokens", VALID * 0)()) == 1
    found = [loss.calculates_per_token(name) for name in ("per_token", "mean_of_means", "global_valid_tokens")]
    assert found == [True, False, True]


def test_nothing_waits_for_a_device():
    """On `meta` every read of a value is an error."""
    tensors = {"target_mask": MASK.to("meta"), "global_valid_tokens": VALID.to("meta")}
    for normalization in ("per_token", "mean_of_means", "global_valid_tokens"):
        loss.direct_loss(LOSSES.to("meta"), settings=settings(normalization), **tensors)
    share = LOSSES.to("meta")
    loss.online_loss(share, share, row_mask=MASK.to("meta"), settings=settings("global_valid_tokens"), **tensors)


def test_settings_that_would_only_spoil_the_gradient_are_refused():
    for options in (
        {"normalization": "mean"},
        {"num_microbatches": 0},
        {"context_parallel_size": 0},
        {"layout": "spiral"},
    ):
        with pytest.raises(PackproofError, match="To fix it"):
            settings(**options)
    with pytest.raises(PackproofError, match="global_valid_tokens: must be given"):
        loss.direct_loss(LOSSES, target_mask=MASK, settings=settings("global_valid_tokens"))
    online = world.microbatch(0)
    with pytest.raises(PackproofError, match="must be global_valid_tokens on the online path, got per_token"):
        loss.loss_function(online, settings(), global_valid_tokens=VALID)
    with pytest.raises(PackproofError, match="must be the group of the 2 context parallel ranks"):
        loss.gather_context(LOSSES, online.row, settings())
    direct = SimpleNamespace(row=None, target_mask=MASK)
    assert float(loss.loss_function(direct, settings())(LOSSES)[0]) == 6.0


@pytest.fixture(scope="module")
def ranks():
    """What each of the four ranks found."""
    preload("online_loss_world")
    with open_world(world.TENSOR * world.CONTEXT) as ranks:
        return ranks.run("online_loss_world:work")


@pytest.mark.worlds
def test_r_loss_5_ranks_that_share_a_row_and_its_vocabulary_have_one_loss_and_their_parts_of_its_gradient(ranks):
    row = world.microbatch(0, size=1).row
    logits = world.logits().double().requires_grad_()
    picked = torch.log_softmax(logits, dim=1)[torch.arange(16), row.target_ids[0]]
    divisor = 6 + 1e-8
    expected = -(picked * row.target_mask[0]).sum() / divisor
    expected.backward()
    expected = expected.detach()
    # float32: a sum of 12 exponentials, a logarithm, and at most six losses of at most 8 units.
    bound = 64 * torch.finfo(torch.float32).eps
    counts = torch.zeros(2)
    for rank, found in enumerate(ranks):
        scheduled = found["loss"] * world.CONTEXT / world.MICROBATCHES
        assert abs(float(scheduled - expected)) < bound
        half = world.VOCABULARY // world.TENSOR
        columns = slice(rank % world.TENSOR * half, (rank % world.TENSOR + 1) * half)
        assert (found["gradient"] - logits.grad[found["index"], columns]).abs().max() < bound
        counts += found["report"] if rank % world.TENSOR == 0 else 0
    assert counts.tolist() == [pytest.approx(float(expected) * divisor, abs=8 * bound), 6.0]
    assert ranks[0]["loss"] == ranks[2]["loss"]  # every cp rank has the row's


@pytest.mark.worlds
def test_r_loss_7_and_9_reports_are_added_up_over_the_group_that_shares_a_row(ranks):
    each = [ranks[rank]["report"] for rank in (0, 2)]
    total = each[0] + each[1]
    for rank in (0, 2):
        assert ranks[rank]["reported"] == float(total[0] / total[1])
