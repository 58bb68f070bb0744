"""No leak across a boundary, the same in every layout but for what the reference predicts, both paths alike; and each check finds its fault."""

import dataclasses

import pytest

from equivalence.cases.step import ModelCase, ModelShape
from production.parallel.sizes import ParallelSizes

pytestmark = pytest.mark.worlds

SHAPE = ModelShape(layers=1, hidden_size=8, heads=2, query_groups=1, ffn_hidden_size=8, depths=1)
STEP = ModelCase(
    shape=SHAPE,
    sizes=ParallelSizes(context=2),
    rows=((8, 8), (4, 12)),
    masked=(0.6, 0.9),
    trained=("share 1/2", "anywhere"),
    normalization="mean_of_means",
    seed=3,
)
LEAKS = dataclasses.replace(STEP, sizes=ParallelSizes(), check="leaks", normalization="per_token", trained=())
PATHS = dataclasses.replace(
    STEP,
    shape=dataclasses.replace(SHAPE, depths=2),
    normalization="global_valid_tokens",
    check="paths",
    trained=(),
    rows=((8, 8), (4, 12)),
    lengths=((6, 8), (3, 9)),
    multiple=4,
)


@pytest.fixture(scope="module", autouse=True)
def preloaded():
    from equivalence.runner.step_runs import preload_models

    preload_models()


@pytest.fixture(scope="module")
def step():
    """Outcomes of STEP in its layout and on one rank, and what the reference expects of the layout."""
    from equivalence.checks.steps.models import shapes_of
    from equivalence.expectations.step import expect
    from equivalence.trainers.production_step import gradients
    from equivalence.workers import open_world

    with open_world(1, enter="equivalence.trainers.production_step:layout", entry=ParallelSizes()) as world:
        alone = world.run("equivalence.trainers.production_step:run", STEP.on_one_rank())
    with open_world(2, enter="equivalence.trainers.production_step:layout", entry=STEP.sizes) as world:
        outcomes = world.run("equivalence.trainers.production_step:run", STEP)
    return outcomes, alone, expect(STEP, shapes_of(gradients(outcomes)))


def tensors(result):
    return {each.tensor for finding in result.findings for each in finding.differences}


def test_r_model_12_the_effect_of_a_layout_is_predicted_and_is_not_zero(step):
    from equivalence.checks.steps.invariance import check_invariance
    from equivalence.generators.models import VARIES

    found = check_invariance(STEP, *step)
    assert found.equal, found.findings
    assert found.fired == {VARIES: 1}


def test_r_model_12_a_gradient_that_does_not_change_as_predicted_is_found(step):
    from equivalence.checks.steps.invariance import check_invariance

    outcomes, alone, expected = step
    unchanged = [
        dataclasses.replace(outcomes[0], gradients=alone[0].gradients),
        dataclasses.replace(outcomes[1], gradients=[]),
    ]
    found = check_invariance(STEP, unchanged, alone, expected)
    assert any(each.startswith("gradient of") for each in tensors(found))
    # What divides nothing by its share must not change at all.
    same = dataclasses.replace(STEP, normalization="per_token", mtp_weights="rows")
    assert any(each.startswith("gradient of") for each in tensors(check_invariance(same, outcomes, alone, expected)))


def test_token_losses_that_differ_between_layouts_are_found(step):
    from equivalence.checks.steps.invariance import check_invariance

    outcomes, alone, expected = step
    losses = [[each.clone() for each in microbatch] for microbatch in outcomes[1].token_losses]
    losses[1][0][2] += 1e-3
    found = check_invariance(
        STEP, [outcomes[0], dataclasses.replace(outcomes[1], token_losses=losses)], alone, expected
    )
    assert tensors(found) == {"row 1 on rank 1 depth 0 token losses"}


def test_r_model_12_the_order_of_microbatches_does_not_change_the_gradient():
    from equivalence.runner.step_runs import check_case

    found = check_case(dataclasses.replace(STEP, seed=1))
    assert [each.check for each in found] == ["models", "third_witness", "invariance", "invariance"]
    assert all(each.equal for each in found), found
    assert (found[-1].findings, found[1].check) == ([], "third_witness")


@pytest.mark.parametrize("case", [LEAKS, PATHS], ids=lambda case: case.check)
def test_r_model_13_and_r_meet_4_leaks_and_paths_find_nothing_in_production(case):
    from equivalence.runner.step_runs import check_case

    (found,) = check_case(case)
    assert found.equal, found.findings
    assert all(found.fired.values()), found.fired


def test_r_model_13_boundaries_that_attention_does_not_get_are_a_leak():
    from equivalence.runner.step_runs import check_case

    case = dataclasses.replace(LEAKS, shape=dataclasses.replace(SHAPE, depths=0))
    (found,) = check_case(case, entered=lambda sizes: ("model_targets:one_segment", sizes))
    named = tensors(found)
    assert any(each.startswith("other tokens: row") for each in named), named
    assert any(each.startswith("NaN: row") for each in named)
    assert any(each.startswith("alone: row") for each in named)


def test_r_meet_4_another_divisor_of_the_online_path_is_found():
    from equivalence.runner.step_runs import check_case

    (found,) = check_case(PATHS, entered=lambda sizes: ("model_targets:wrong_divisor", sizes))
    named = tensors(found)
    assert named
    assert all(each.startswith("gradient of") for each in named), "token losses stay as they are"


def test_masks_of_other_depths_are_found_on_the_online_path():
    from equivalence.mutants.layout_faults import entered
    from equivalence.runner.step_runs import check_case

    (found,) = check_case(PATHS, entered=entered("online_mtp_mask_of_tokens"))
    named = tensors(found)
    assert any(each.startswith("gradient of mtp.") for each in named), named
    assert any(each.endswith("depths reported") for each in named), named


def test_findings_before_a_check_failed_are_kept(monkeypatch):
    from equivalence.runner import step_runs

    asked = []

    def breaks_at_the_second(case, _run):
        asked.append(case)
        if len(asked) == 2:
            raise IndexError("a fault of the check")
        return step_runs.CheckResult(check="leaks")

    monkeypatch.setattr(step_runs, "check_leaks", breaks_at_the_second)
    ran = step_runs.run_layout([LEAKS, LEAKS, LEAKS])
    assert next(ran).equal
    with pytest.raises(IndexError, match="a fault of the check"):
        next(ran)
    assert len(asked) == 2
