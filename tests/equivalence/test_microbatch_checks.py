"""R-ONLINE, R-MEET, R-LOSS: reference, production and megatron-core are equal, every entry of the closed list shows, and wrong ones are found."""

import collections
import dataclasses
import functools

import pytest
import torch
from hypothesis import Phase, given, settings

from equivalence.checks.cuts import direct_vs_online, loss, microbatches
from equivalence.generators.choices import RandomChoices
from equivalence.generators.online import (
    OnlineCase,
    cross_entropies,
    direct_cases,
    draw_meeting,
    loss_cases,
    meeting_cases,
    online_cases,
)
from equivalence.mutants.loss_faults import LOSS_MUTANTS
from equivalence.runner.layout_jobs import draw_layouts
from equivalence.runner.plan import LAYOUT_CHECKS

reached = collections.Counter()


def run(cases, check, examples, count):
    reached.clear()

    @settings(max_examples=examples)
    @given(cases)
    def every(case):
        found = check(case)
        assert found.equal, found.findings
        reached.update(count(case, found))

    every()


def test_r_meet_1_the_direct_path_is_equal_on_all_sides():
    def count(case, found):
        padded = {"a filling row"} if 0.0 in case.sample_mask else set()
        return {found.refused or f"cp {case.size}", case.layout, f"depths {case.depths}", *padded}

    run(direct_cases(), microbatches.check_direct_microbatches, 40, count)
    expected = {
        "indivisible_segment",
        "cp 1",
        "cp 2",
        "cp 3",
        "cp 4",
        "zigzag",
        "contiguous",
        "depths 3",
        "a filling row",
    }
    assert expected <= set(reached), reached


def test_r_online_both_sides_are_equal():
    def count(case, found):
        return {
            found.refused or f"cp {case.size}",
            case.precision,
            f"pp {case.pipeline_parallel_size}",
            f"dp {case.data_parallel_size}",
            *({"HybridEP"} if case.hybrid_expert_parallel else ()),
            *({"sequence parallel"} if case.sequence_parallel else ()),
            *({"depths"} if case.depths else ()),
        }

    run(online_cases(), microbatches.check_online_microbatches, 150, count)
    expected = {
        "bins",
        "padding",
        "cp 1",
        "cp 2",
        "fp8_mxfp8",
        "pp 2",
        "dp 3",
        "HybridEP",
        "sequence parallel",
        "depths",
    }
    assert expected <= set(reached), reached


def test_r_online_5_the_row_length_is_that_of_each_ranks_own_bins_on_both_sides():
    """NeMo-RL's own code: lengths 4 and 2 over dp 2 with two stages give rows of 4 and of 2."""
    case = OnlineCase(
        conversations=[([1, 2, 3, 4], [0, 1, 1, 1]), ([5, 6], [0, 1])],
        uncounted=[],
        multiple=1,
        capacity=4,
        packer="concatenative",
        data_parallel_size=2,
        size=1,
        tensor_parallel_size=1,
        sequence_parallel=False,
        pipeline_parallel_size=2,
        precision="unquantized",
        hybrid_expert_parallel=False,
        depths=0,
    )
    sides = microbatches._reference_online(case, []), microbatches._production_online(case, "tables")
    for side in sides:
        assert [len(side[f"input_ids of rank {(data_rank, 0, 0)}"]) for data_rank in range(2)] == [4, 2]


def test_r_meet_2_and_3_the_paths_differ_by_the_closed_list_and_every_entry_of_it_shows():
    reached.clear()
    for place in range(60):
        case = draw_meeting(RandomChoices(0, place))
        found = direct_vs_online.check_meeting(case)
        assert found.equal, found.findings
        reached.update((entry, case.preset) for entry, fired in found.fired.items() if fired)
    for entry in direct_vs_online.CLOSED_LIST:
        assert (entry, "strict") in reached, reached
    presets = {entry: {preset for each, preset in reached if each == entry} for entry in direct_vs_online.BY_PRESET}
    assert presets["padding_mask"] == {"megatron-lm-main", "megatron-lm-0.19", "nemo-rl-direct"}
    assert presets["boundary_label"] == {"megatron-lm-main"}  # the other formats begin a conversation with a prompt


def test_r_loss_all_sides_are_equal():
    def count(case, _):
        masked = {"all masked"} if not any(mask.any() for rank in case.masks for mask in rank) else set()
        partly = {"a share masked"} if any(not mask.any() for rank in case.masks for mask in rank) else set()
        return {case.normalization, f"cp {case.size}", f"depths {case.depths}", *masked, *(partly - masked)}

    run(loss_cases(), loss.check_loss, 25, count)
    expected = {
        "per_token",
        "mean_of_means",
        "global_valid_tokens",
        "cp 2",
        "cp 3",
        "depths 2",
        "all masked",
        "a share masked",
    }
    assert expected <= set(reached), reached


def test_r_loss_5_the_online_loss_and_its_cross_entropy_are_equal_on_all_sides():
    run(loss_cases(), loss.check_online_loss, 20, lambda case, _: {f"cp {case.size}"})
    assert {"cp 1", "cp 2", "cp 3", "cp 4"} <= set(reached), reached
    run(
        cross_entropies(),
        lambda case: loss.check_cross_entropy(*case),
        30,
        lambda case, _: {str(case[0].dtype), *({"no token"} if (case[1] == -100).any() else ())},
    )
    assert {"torch.float32", "torch.float64", "no token"} <= set(reached), reached


def test_the_direct_and_the_online_loss_differ_by_the_epsilon_alone():
    """R-MEET-2: over the same shares a token weighs 1 / valid against 1 / (valid + 1e-8)."""
    mask = torch.tensor([1.0, 0.0, 1.0])
    valid = torch.tensor(2.0, dtype=torch.float64)
    (direct,) = loss.reference.token_weights(
        "global_valid_tokens", [[mask]], context_parallel_size=1, valid_tokens=valid
    )
    (online,) = loss.reference.online_weights([[mask]], valid)
    assert direct[0].tolist() == [1 / 2, 0, 1 / 2]
    assert online[0].tolist() == [1 / (2 + 1e-8), 0, 1 / (2 + 1e-8)]
    assert direct[0].tolist() != online[0].tolist()


@pytest.mark.parametrize("check", LAYOUT_CHECKS)
def test_the_main_job_draws_every_check(check):
    drawn = list(draw_layouts(check, number=1, examples=2))
    assert len(drawn) == 2
    assert all(found.equal for found, _ in drawn)


CHECKS = {
    "direct": (direct_cases(), microbatches.check_direct_microbatches),
    "online": (online_cases(), microbatches.check_online_microbatches),
    "direct_vs_online": (meeting_cases(), direct_vs_online.check_meeting),
    "loss": (loss_cases(), loss.check_loss),
    "online_loss": (loss_cases(), loss.check_online_loss),
}


@functools.cache
def some_cases(check):
    """A dozen drawn cases, for sides that are wrong."""
    found = []

    @settings(max_examples=12, phases=[Phase.generate])
    @given(CHECKS[check][0])
    def every(case):
        found.append(case)

    every()
    return found


def differences(check):
    """What a check finds on some cases, by the names of the tensors; a side that is wrong must show."""
    found = [CHECKS[check][1](case) for case in some_cases(check)]
    assert not all(each.equal for each in found), check
    return " ".join(names(each) for each in found)


def names(found):
    return " ".join(each.tensor for finding in found.findings for each in finding.differences)


def test_a_wrong_microbatch_is_found(monkeypatch):
    production = microbatches.production
    flatten = production.flatten
    with monkeypatch.context() as patch:  # row 0's boundaries for the whole batch
        patch.setattr(
            production,
            "flatten",
            lambda batch: dataclasses.replace(flatten(batch), cu_seqlens=flatten(batch).cu_seqlens[:2]),
        )
        differences("direct")
    cut = production.shard_batch
    with monkeypatch.context() as patch:  # mask not cut with the labels
        patch.setattr(
            production,
            "shard_batch",
            lambda batch, rank, size, **how: dataclasses.replace(
                cut(batch, rank, size, **how), token_mask=cut(batch, 0, size, **how).token_mask
            ),
        )
        assert "mask" in differences("direct")
    replace = dataclasses.replace
    with monkeypatch.context() as patch:  # a filling row counts
        patch.setattr(
            production.dataclasses,
            "replace",
            lambda batch, **new: batch if "token_mask" in new and "input_ids" not in new else replace(batch, **new),
        )
        assert "mask" in differences("direct")


def test_a_wrong_squeeze_is_found(monkeypatch):
    production = microbatches.production
    squeezed = production.squeeze

    def without_shift(padded_batch, padding):
        row = squeezed(padded_batch, padding)
        return dataclasses.replace(row, target_mask=row.token_mask)

    def true_boundaries(padded_batch, padding):
        row = squeezed(padded_batch, padding)
        return dataclasses.replace(row, cu_seqlens=row.cu_seqlens_padded)

    for wrong, name in ((without_shift, "target_mask"), (true_boundaries, "true cu_seqlens")):
        with monkeypatch.context() as patch:
            patch.setattr(production, "squeeze", wrong)
            assert name in differences("online")
    monkeypatch.setattr(production, "squeeze", without_shift)
    differences("direct_vs_online")
    found, case = list(draw_layouts("online_microbatches", number=3, examples=30))[-1]
    assert not found.equal
    assert "OnlineCase(" in str(case)


def test_a_wrong_loss_is_found(monkeypatch):
    production = loss.production
    with monkeypatch.context() as patch:  # x cp missing
        patch.setattr(production, "_undo_averaging", lambda value, settings: value * settings.num_microbatches)
        differences("loss")
        differences("online_loss")
    with monkeypatch.context() as patch:  # nothing divides the losses inside the model
        patch.setattr(production, "auxiliary_scale", lambda *_: None)
        assert "weight at a depth" in differences("loss")
    with monkeypatch.context() as patch:
        patch.setattr(production, "ONLINE_EPSILON", 0.0)
        differences("online_loss")
    with monkeypatch.context() as patch:  # a mean of means, which a short microbatch weighs as much in as a long one
        (fault,) = [each for each in LOSS_MUTANTS if each.name == "reported_as_validation"]
        patch.setattr(loss.StepMetrics, "_summed", fault.wrong(loss.StepMetrics._summed))
        found = differences("loss")
        assert "reported: training" in found
        assert "reported: validation" in found
    with monkeypatch.context() as patch:  # a divisor of its own
        patch.setattr(loss.reference, "NORMALIZATIONS", ())
        patch.setattr(loss.reference, "masked_sum", lambda losses, mask: (losses * mask).mean())
        assert "returned" in differences("loss")


def test_a_field_that_one_side_leaves_out_is_found(monkeypatch):
    told = microbatches._told
    monkeypatch.setattr(
        microbatches, "_told", lambda named, rank: told({k: v for k, v in named.items() if k != "total_tokens"}, rank)
    )
    share = microbatches._reference_share
    monkeypatch.setattr(
        microbatches, "_reference_share", lambda made, rank: share(made, rank) | {f"total_tokens of rank {rank}": None}
    )
    assert "names" in differences("direct")
