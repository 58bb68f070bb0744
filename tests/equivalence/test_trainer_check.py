"""Steps of training in a layout: production's engine is the reference's training loop, and a wrong beta, decay group, schedule or clipping shows."""

import dataclasses

import pytest
import torch

from equivalence.cases import store
from equivalence.generators.models import Layout
from equivalence.runner.counters import Tally
from equivalence.runner.job import Job
from production.parallel.sizes import ParallelSizes

pytestmark = pytest.mark.worlds

TWO = Layout(sizes=ParallelSizes(context=2), data_size=1)
FOUR = Layout(sizes=ParallelSizes(pipeline=2), data_size=2)


@dataclasses.dataclass(kw_only=True)
class Runs:
    """A case with the reference's run of it, and by name what production makes of it and of its like on two ranks."""

    case: object
    expected: object
    found: dict


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    from equivalence.runner.trainer_jobs import preload_training

    preload_training()


@pytest.fixture(scope="module")
def exact():
    """In float64, twenty steps."""
    from equivalence.checks.runs.trainer import expect_training, whole_weights
    from equivalence.runner.trainer_jobs import case_of
    from equivalence.trainers.production_run import TRAIN
    from equivalence.workers import open_world

    case = case_of("dense", TWO, ranks=2, seed=5)
    with open_world(2, enter="equivalence.trainers.production_step:layout", entry=TWO.sizes) as world:
        found = {
            "right": world.run(TRAIN, case),
            "beta": world.run(TRAIN, dataclasses.replace(case, beta2=0.951)),
            "decay": world.run("trainer_targets:without_decay_groups", case),
            "schedule": world.run("trainer_targets:schedule_a_step_early", case),
        }
    shapes = {name: tuple(each.shape) for name, each in whole_weights(found["right"]).items()}
    return Runs(case=case, expected=expect_training(case, shapes), found=found)


@pytest.fixture(scope="module")
def rounded(exact):
    """In float32, eight steps."""
    from equivalence.checks.runs.trainer import expect_training
    from equivalence.trainers.production_run import TRAIN
    from equivalence.workers import open_world

    case = dataclasses.replace(exact.case, precision="float32", clip_gradient=0.4, steps=8)
    with open_world(2, enter="equivalence.trainers.production_step:layout", entry=TWO.sizes) as world:
        found = {
            (is_distributed, clip): world.run(
                TRAIN, dataclasses.replace(case, is_distributed=is_distributed, clip_gradient=clip)
            )
            for is_distributed in (False, True)
            for clip in (0.4, 0.0)
        }
    shapes = {name: tuple(each.shape) for name, each in exact.expected.weights.items()}
    return Runs(case=case, expected=expect_training(case, shapes), found=found)


def tensors(result):
    assert result.refused is None
    return [each.tensor for finding in result.findings for each in finding.differences]


def test_twenty_steps_of_two_and_four_ranks_equal_the_references_within_a_millionth(exact):
    from equivalence.checks.runs.trainer import check_trainer, trains_alike
    from equivalence.runner.trainer_jobs import case_of
    from equivalence.trainers.production_run import TRAIN
    from equivalence.workers import open_world

    expected = exact.expected
    assert len(expected.steps) == 20
    assert tensors(check_trainer(exact.case, exact.found["right"], expected)) == []
    assert all(0 < expected.weight_bounds[name] < 2e-6 * moved for name, moved in expected.moved.items())
    assert len({each.learning_rate for each in expected.steps}) > 10
    other = case_of("dense", FOUR, ranks=2, seed=5)
    assert trains_alike(other)
    with open_world(4, enter="equivalence.trainers.production_step:layout", entry=FOUR.sizes) as world:
        assert tensors(check_trainer(other, world.run(TRAIN, other), expected)) == []


def test_a_wrong_beta_shows_in_all_weights_and_in_the_norms_that_follow(exact):
    from equivalence.checks.runs.trainer import check_trainer

    found = tensors(check_trainer(exact.case, exact.found["beta"], exact.expected))
    assert {f"weight {name}" for name in exact.expected.weights} <= set(found)
    assert "rank 1 gradient norm of step 19" in found
    # The first update of Adam is the same for all betas, and the rate of the first step is 0.
    assert "rank 0 gradient norm of step 1" not in found


def test_a_missing_decay_group_changes_parameters_of_one_dimension(exact):
    from equivalence.checks.runs.trainer import check_trainer
    from reference.trainer import decays

    found = tensors(check_trainer(exact.case, exact.found["decay"], exact.expected))
    norms = {f"weight {name}" for name, each in exact.expected.weights.items() if not decays(name, each)}
    assert norms
    assert norms <= set(found)


def test_a_schedule_that_is_a_step_early_shows_in_the_rates(exact):
    from equivalence.checks.runs.trainer import check_trainer

    found = tensors(check_trainer(exact.case, exact.found["schedule"], exact.expected))
    assert {"rank 0 learning rate of step 0", "rank 1 learning rate of step 19"} <= set(found)


def numbers_with(outcome, step, **changes):
    """The outcome's numbers, those of one step changed."""
    numbers = list(outcome.numbers)
    numbers[step] = dataclasses.replace(numbers[step], **changes)
    return {"numbers": numbers}


def test_each_wrong_outcome_is_named(exact):
    from equivalence.checks.runs.trainer import check_trainer, whole_weights

    first, second = exact.found["right"]
    name = first.weights[0].name
    nudged = dataclasses.replace(first.weights[0], values=first.weights[0].values + 1e-4)
    lost = [each for each in first.weights if each.name != name]
    for broken, shows in (
        ({"weights": [nudged, *first.weights[1:]]}, f"weight {name}"),
        ({"weights": lost}, f"weight {name}"),
        (numbers_with(first, 0, gradient_norm=torch.nan), "rank 0 gradient norm of step 0"),
        (numbers_with(first, 7, loss=first.numbers[7].loss * 1.001), "rank 0 loss of step 7"),
        (
            numbers_with(first, 8, mtp_losses=(first.numbers[8].mtp_losses[0] * 1.001,)),
            "rank 0 loss of depth 1 of step 8",
        ),
        (numbers_with(first, 8, mtp_losses=()), "rank 0 depths"),
        ({"numbers": first.numbers[:-1]}, "rank 0 reported steps"),
        ({"weight_decays": [(0.0, 0.2)] * 20}, "rank 0 weight decay of step 3"),
    ):
        outcomes = [dataclasses.replace(first, **broken), second]
        assert shows in tensors(check_trainer(exact.case, outcomes, exact.expected))
    assert whole_weights([first, second])[name].shape == nudged.shape
    tied = dataclasses.replace(exact.expected, router_gap=1e-9)
    assert check_trainer(exact.case, [first, second], tied).refused == "router_tie"


def test_clipping_and_the_distributed_optimizer_in_float32_are_the_references(rounded):
    from equivalence.checks.runs.trainer import check_distributed, check_trainer, equal_to_the_bit

    case, expected, found = rounded.case, rounded.expected, rounded.found
    assert min(each.gradient_norm for each in expected.steps) > case.clip_gradient, "nothing was clipped"
    for is_distributed in (False, True):
        assert tensors(check_trainer(case, found[is_distributed, 0.4], expected)) == []
    assert not equal_to_the_bit(case)
    assert tensors(check_distributed(case, found[False, 0.4], found[True, 0.4], expected)) == []
    unclipped = tensors(check_trainer(case, found[False, 0.0], expected))
    assert sum(each.startswith("weight ") for each in unclipped) == len(expected.weights)
    assert any(
        each.startswith("weight ")
        for each in tensors(check_distributed(case, found[False, 0.4], found[True, 0.0], expected))
    )


def test_r_train_10_without_clipping_two_replicas_train_to_the_bit_as_with_the_plain_optimizer(rounded):
    from equivalence.checks.runs.trainer import check_distributed, equal_to_the_bit

    free = dataclasses.replace(rounded.case, clip_gradient=0.0)
    assert equal_to_the_bit(free)
    plain, distributed = rounded.found[False, 0.0], rounded.found[True, 0.0]
    assert tensors(check_distributed(free, plain, distributed)) == []
    part = distributed[0].weights[0]
    off = dataclasses.replace(part, values=torch.nextafter(part.values, torch.full_like(part.values, 9)))
    broken = [dataclasses.replace(distributed[0], weights=[off, *distributed[0].weights[1:]]), distributed[1]]
    assert tensors(check_distributed(free, plain, broken)) == [f"weight {part.name}"]
    three = dataclasses.replace(free, model=dataclasses.replace(free.model, data_size=2))
    assert not equal_to_the_bit(three)


def test_a_job_of_the_main_run_trains_in_all_its_layouts_and_counts_them(monkeypatch):
    from equivalence.runner import trainer_jobs

    job = Job(kind="trainer", subjects=(), aim="experts", seed=3)
    all_of_two = trainer_jobs.layouts_of(dataclasses.replace(job, first=2))
    assert {each.name for each in all_of_two} == {"dp2 ep2", "cp2 ep2", "tp2 ep2"}
    small = trainer_jobs.case_of
    monkeypatch.setattr(
        trainer_jobs, "case_of", lambda *args, **options: dataclasses.replace(small(*args, **options), steps=2)
    )
    tally = Tally()
    trainer_jobs.run_drawn(job, tally)
    assert (tally.differences, tally.errors) == ([], [])
    assert tally.equal["trainer", "any"] == len(trainer_jobs.FEW["experts"])
    monkeypatch.setattr(trainer_jobs, "TRAIN", "trainer_targets:without_decay_groups")
    trainer_jobs.run_drawn(job, tally)
    assert [each.check for each in tally.differences] == ["trainer"]
    case = store.parse(tally.differences[0].case)
    assert (type(case).__name__, case.steps) == ("TrainingCase", 2)
    # The same fault shows in a replay, and production as it is shows none.
    assert not store.check(case, ())[0].equal
    monkeypatch.undo()
    assert store.check(case, ())[0].equal
