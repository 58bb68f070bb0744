"""A training step in a layout: all sides are equal, and what is broken in an outcome, in production, or by a dying rank shows."""

import dataclasses
import json

import pytest
import torch

from equivalence.cases import store
from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult, Finding
from equivalence.cases.step import CHECKS, ModelCase, ModelShape
from equivalence.generators.models import Layout
from equivalence.runner import shrink
from equivalence.runner.counters import Tally
from equivalence.runner.job import Job
from production.parallel.sizes import ParallelSizes

pytestmark = pytest.mark.worlds

CASE = ModelCase(
    shape=ModelShape(hidden_size=8, heads=2, query_groups=1, ffn_hidden_size=8, depths=1),
    rows=((4, 8, 4), (16,)),
    masked=(0.6, 0.3),
    seed=5,
)


@pytest.fixture(scope="module")
def runs():
    """Production's and the third witness's outcome of CASE on one rank."""
    from equivalence.runner.step_runs import preload_models
    from equivalence.workers import open_world

    preload_models()
    with open_world(1, enter="equivalence.trainers.production_step:layout", entry=CASE.sizes) as world:
        return world.run("equivalence.trainers.production_step:run", CASE), world.run(
            "equivalence.trainers.production_step:run_baseline", CASE
        )


def broken(outcome, **changes):
    return [dataclasses.replace(outcome[0], **changes)]


def with_gradient(outcome, name, change):
    parts = [
        dataclasses.replace(part, values=change(part.values.clone())) if part.name == name else part
        for part in outcome[0].gradients
    ]
    return broken(outcome, gradients=parts)


def nudged(values):
    values.view(-1)[0] += 1e-4 * values.norm()
    return values


def test_each_wrong_outcome_differs_from_the_reference(runs):
    from equivalence.checks.steps.models import check_model, shapes_of
    from equivalence.expectations.step import expect
    from equivalence.trainers.production_step import gradients

    right, _ = runs
    assert check_model(CASE, right).equal
    expected = expect(CASE, shapes_of(gradients(right)))
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    losses = [[each.clone() for each in microbatch] for microbatch in right[0].token_losses]
    losses[1][1][3] += 1e-4
    wrong = {
        f"gradient of {name}": with_gradient(right, name, nudged),
        "rank 0 microbatch 1 depth 1 token losses": broken(right, token_losses=losses),
        "rank 0 microbatch: how many": broken(right, token_losses=losses[:1]),
        "rank 0 reported loss": broken(right, reported=right[0].reported * 1.001),
        "rank 0 reported of each depth": broken(right, mtp_losses=right[0].mtp_losses * 1.001),
        "rank 0 valid tokens": broken(right, valid_tokens=right[0].valid_tokens + 1),
        "rank 0 gradient norm": broken(right, gradient_norm=right[0].gradient_norm * 1.0001),
        "gradient of output_layer.weight": broken(
            right, gradients=[part for part in right[0].gradients if part.name != "output_layer.weight"]
        ),
    }
    for tensor, outcome in wrong.items():
        found = check_model(CASE, outcome, expected=expected)
        assert tensor in {each.tensor for finding in found.findings for each in finding.differences}, tensor
    assert not check_model(CASE, with_gradient(right, name, lambda values: values * torch.nan)).equal


def test_another_boundary_shows_against_the_reference(runs):
    from equivalence.checks.steps.models import check_model

    moved = dataclasses.replace(CASE, rows=((8, 4, 4), (16,)))
    found = check_model(moved, runs[0]).findings[0].differences
    assert any("token losses" in each.tensor for each in found)
    assert any(each.tensor.startswith("gradient of") for each in found)


def test_megatron_lms_step_is_compared_to_the_bit(runs):
    from equivalence.checks.steps.models import compare_outcomes

    ours, theirs = runs
    assert compare_outcomes("third_witness", "production", ours, "megatron_lm", theirs).equal

    def one_bit(values):
        values.view(-1).view(torch.int64)[0] ^= 1
        return values

    last = with_gradient(theirs, "output_layer.weight", one_bit)
    (finding,) = compare_outcomes("third_witness", "production", ours, "megatron_lm", last).findings
    assert [each.tensor for each in finding.differences] == ["rank 0 gradient of output_layer.weight"]
    (finding,) = compare_outcomes(
        "third_witness", "production", ours, "megatron_lm", broken(theirs, reported=theirs[0].reported * 1.001)
    ).findings
    assert [each.tensor for each in finding.differences] == ["rank 0 reported loss"]
    less = broken(theirs, gradients=theirs[0].gradients[1:])
    assert not compare_outcomes("third_witness", "production", ours, "megatron_lm", less).equal


def test_a_tie_is_counted_and_not_compared(runs):
    from equivalence.checks.steps.models import check_model, shapes_of
    from equivalence.expectations.step import expect
    from equivalence.runner.step_jobs import count
    from equivalence.runner.step_runs import Ran
    from equivalence.trainers.production_step import gradients

    expected = dataclasses.replace(expect(CASE, shapes_of(gradients(runs[0]))), router_gap=1e-9)
    found = check_model(CASE, with_gradient(runs[0], "output_layer.weight", nudged), expected=expected)
    assert found.refused == "router_tie"
    tally = Tally()
    count(Ran(case=CASE, results=[found], seconds=1.0), tally)
    assert tally.layouts["one rank"]["ties"] == 1
    assert tally.refusals["router_tie", "any"] == 1


@pytest.mark.parametrize(
    ("fault", "left", "said"),
    [
        # The second is the stack of the rank that waited.
        ("dies_once", "a result, not died", ["rank 1 was killed by SIGKILL", "schedules.py"]),
        ("fails_once_alone", "a result, not RuntimeError", ["on 1 ranks"]),
    ],
)
def test_a_rank_that_fails_is_a_failed_case_and_the_next_case_runs(tmp_path, fault, left, said):
    from equivalence.runner.step_runs import preload_models, run_layout

    preload_models()
    cases = [dataclasses.replace(CASE, sizes=ParallelSizes(context=2), seed=seed) for seed in (2, 4)]

    def entered(sizes):
        return f"model_targets:{fault}", (sizes, str(tmp_path / "failed"))

    first, second = run_layout(cases, entered=entered)
    (difference,) = first.results[0].findings[0].differences
    assert difference.left == left
    assert all(each in difference.right for each in said)
    assert second.equal
    assert {each.check for each in second.results} == {"models", "third_witness", "invariance"}


def test_no_rank_runs_while_the_expectation_of_its_steps_is_computed(monkeypatch):
    from equivalence.runner import step_runs
    from equivalence.workers import seats as workers

    step_runs.preload_models()
    living = []
    own = step_runs.expect

    def expect(case, shapes):
        living.append(sum(workers._taken.values()))
        return own(case, shapes)

    monkeypatch.setattr(step_runs, "expect", expect)
    cases = [dataclasses.replace(CASE, sizes=ParallelSizes(context=2), seed=seed) for seed in (2, 4)]
    assert all(ran.equal for ran in step_runs.run_layout(cases))
    assert living == [0, 0]


def test_a_rank_compiles_nothing():
    from equivalence.runner.step_runs import preload_models
    from equivalence.workers import open_world

    preload_models()
    case = dataclasses.replace(CASE, shape=dataclasses.replace(CASE.shape, experts=2))
    with open_world(1, enter="equivalence.trainers.production_step:layout", entry=case.sizes) as world:
        assert world.run("model_targets:compiled_functions", case) == [0]


def test_a_fault_in_a_layout_is_found_counted_and_named(tmp_path):
    from equivalence.runner.step_jobs import preload_models, run_drawn, run_saved

    preload_models()
    layout = Layout(sizes=ParallelSizes(), data_size=2)
    job = Job(kind="models", subjects=(), layout=layout, counts=(1, 0, 0), examples=1, seed=3, shrink=False)
    tally = Tally()
    run_drawn(job, layout, tally, entered=lambda sizes: ("model_targets:same_rows", sizes))
    assert {each.check for each in tally.differences} >= {"models", "third_witness", "invariance"}
    assert tally.layouts["dp2"]["differing"] == 1
    case = ModelCase.from_json(tally.differences[0].case)
    again = Tally()
    run_saved(case, str(store.save(case, "why", folder=tmp_path)), again)
    assert not again.differences, "production has no such fault"
    assert again.layouts["dp2"]["cases"] == 1


def test_a_difference_is_shrunk_to_the_cheapest_layout_that_still_differs():
    shape = ModelShape(architecture="hybrid", pattern="*E*E", experts=4, depths=2, repeated=True)
    case = ModelCase(
        shape=shape,
        sizes=ParallelSizes(tensor=2, context=2, expert=2),
        data_size=2,
        rows=((16, 8, 8), (32,), (8, 8, 8, 8), (24, 8)),
        masked=(0.5, 0.0, 1.0, 0.3),
        trained=("anywhere", "first", "share 1/2", "last"),
        normalization="mean_of_means",
    )
    wrong = Difference(tensor="t", position=0, left=1, right=2, kind="other")

    def check(step):  # a fault of context parallelism that needs two segments
        differs = step.sizes.context > 1 and any(len(row) > 1 for row in step.rows)
        findings = [Finding(left="reference", right="production", differences=[wrong])] if differs else []
        return [CheckResult(check="models", findings=findings)]

    small, results = shrink.shrink(case, check(case), check)
    assert not results[0].equal
    assert small.layout == "cp2"
    assert len(small.rows) == 1
    assert small.pack_length == 8
    assert small.shape.depths == small.shape.experts == 0
    assert small.shape.architecture == "gpt"
    assert small.shape.layers == 1
    assert small.normalization == "per_token"


def test_a_saved_case_that_cannot_be_read_is_named(tmp_path):
    from equivalence.errors import CaseError

    for text in ("{", '{"schema": 2}', json.dumps({"schema": 1, "rows": [[4]], "masked": [1], "check": "nothing"})):
        (tmp_path / "case.json").write_text(text)
        with pytest.raises(CaseError, match=r"case\.json"):
            store.read(tmp_path / "case.json")


def test_a_step_is_promoted_among_the_permanent_ones(tmp_path, monkeypatch):
    from equivalence.__main__ import main

    monkeypatch.setattr(store, "SAVED", tmp_path / "saved")
    fresh = store.save(CASE, "why", folder=tmp_path)
    assert main(["promote", str(fresh), "--name", "a-step"]) == 0
    assert not fresh.exists()
    assert store.read(tmp_path / "saved" / "models" / "a-step.json") == dataclasses.replace(CASE, note="why")
    again = store.save(CASE, "why", folder=tmp_path)
    assert main(["promote", str(again), "--name", "a-step"]) == 2


@pytest.mark.parametrize(
    "layout",
    [
        Layout(sizes=ParallelSizes(tensor=2), data_size=1),
        Layout(sizes=ParallelSizes(context=2), data_size=1),
        Layout(sizes=ParallelSizes(pipeline=2), data_size=1),
        Layout(sizes=ParallelSizes(expert=2), data_size=2),
    ],
    ids=lambda layout: layout.name,
)
def test_steps_of_the_smallest_run_are_equal_in_each_dimension(layout):
    from equivalence.runner.step_jobs import tiny_cases
    from equivalence.runner.step_runs import preload_models, run_layout

    preload_models()
    cases = tiny_cases(layout)
    assert {case.check for case in cases} == set(CHECKS)
    # The first one has the third witness.
    ran = list(run_layout([cases[0], *cases[-2:]]))
    assert all(each.equal for each in ran), [each.results for each in ran if not each.equal]
    assert {result.check for each in ran for result in each.results} >= {
        *("models", "third_witness", "invariance", "leaks", "paths")
    }


def test_tallies_of_one_layout_are_added_except_the_number_of_ranks():
    from equivalence.runner.counters import Tally

    whole = Tally()
    for cases in (2, 3):
        piece = Tally()
        piece.layouts["cp2"].update({"ranks": 2, "cases": cases, "checks": 4})
        whole.add(piece)
    assert dict(whole.layouts["cp2"]) == {"ranks": 2, "cases": 5, "checks": 8}
