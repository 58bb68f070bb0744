"""Whole runs of the training job: they are the reference's, each fault of a run shows, and so does what is wrong with what ranks and log tell."""

import dataclasses

import pytest
import torch

from equivalence.mutants.layout_matrix import layout_kill_matrix
from equivalence.mutants.matrix import failures
from equivalence.mutants.rank_faults import ONE
from equivalence.mutants.run_faults import RUN_MUTANTS, WHOLE_RUN
from equivalence.runner.counters import Tally
from equivalence.runner.job import Job
from equivalence.runner.job_runners import RUNNERS
from equivalence.runner.plan import SIZES, whole_run_jobs

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    from equivalence.runner.whole_run_jobs import preload_whole_runs

    preload_whole_runs()


@pytest.fixture(scope="module")
def run():
    """A run of the direct path on one rank, as it was and as the reference has it."""
    from equivalence.runner.whole_run_jobs import short_case, sound_run

    case = short_case("direct", ONE, seed=0)
    return case, *sound_run(case)


def tensors(result):
    assert result.refused is None
    return [each.tensor for finding in result.findings for each in finding.differences]


@pytest.mark.parametrize("mutant", RUN_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_of_a_run_is_found_and_a_run_without_faults_equals_the_reference(mutant):
    (kills,) = layout_kill_matrix([mutant], first_only=True)
    assert failures([kills], checks=()) == []
    assert kills.found[WHOLE_RUN] == 1


def test_the_references_steps_all_differ_so_that_a_swapped_step_is_found(run):
    _, _, expected = run
    steps = expected.trained.steps
    assert len({each.learning_rate for each in steps}) == len({each.weight_decay for each in steps}) == len(steps)
    assert len({str(batch.tokens) for batch in expected.steps}) == len(steps)
    assert len(set(expected.trained.validations.values())) == len(expected.trained.validations)
    assert all(each.balancing_loss > 0.5 for each in steps)
    assert all(0 < bound < 1e-4 for bound in expected.trained.loss_bounds)
    counts = [batch.counts for batch in expected.steps]
    assert min(sum(getattr(each, name) for each in counts) for name in ("padding_tokens", "rows_truncated", "conversations_dropped"))  # fmt: skip


def test_each_fault_of_a_rank_or_log_is_named(run):
    from equivalence.checks.runs.whole_run import check_whole_run

    case, performed, expected = run
    first, second = performed.outcomes[0]

    def numbers(part, step, **changes):
        return dataclasses.replace(part, numbers=part.numbers | {step: part.numbers[step] | changes})

    nudged = [dataclasses.replace(each, values=each.values + 1e-3) for each in second.begun]
    wrong = {
        "trained_tokens of step 1": (numbers(first, 1, trained_tokens=7), second),
        "learning_rate of step 4": (first, numbers(second, 4, learning_rate=0.5)),
        "mtp_1_loss_by_tokens of step 3": (first, numbers(second, 3, mtp_1_loss_by_tokens=9.0)),
        "mtp_1_empty_shares of step 3": (first, numbers(second, 3, mtp_1_empty_shares=0.125)),
        "mtp_2_loss of step 3": (first, numbers(second, 3, mtp_2_loss=9.0)),
        "gradient_norm of step 2": (numbers(first, 2, gradient_norm=torch.nan), second),
        "tokens_per_second of step 2, times its seconds": (numbers(first, 2, tokens_per_second=1.0), second),
        "rank 0 ended [0]": (dataclasses.replace(first, reason="finished"), second),
        "rank 0 reported steps [1]: how many": (first, dataclasses.replace(second, numbers={4: second.numbers[4]})),
        "rank 0 learning rates of step 3 [0]": (first, dataclasses.replace(second, rates=second.rates | {3: {0.1}})),
        "rank 0 steps that Adam has counted before step 4 [0]": (
            first,
            dataclasses.replace(second, counted=second.counted | {4: {3, 4}}),
        ),
        "rank 0 weight decays of step 3: how many": (first, dataclasses.replace(second, decays={})),
        "rank 0 rows of validations after [3]: how many": (first, dataclasses.replace(second, validated=[])),
        f"weight {nudged[0].name}, resumed": (first, dataclasses.replace(second, begun=nudged)),
        f"weight {nudged[0].name}": (first, dataclasses.replace(second, weights=nudged)),
    }
    for name, parts in wrong.items():
        assert name in tensors(check_whole_run(case, [parts], expected, performed.log)), name
    other = [dataclasses.replace(part, begun=[], weights=[]) for part in (numbers(first, 1, loss=1.0), second)]
    assert tensors(check_whole_run(case, [performed.outcomes[0], other], expected, performed.log)) == [
        "what rank 0 reports: 1: loss"
    ]
    log = performed.log
    again = [each for each in log if each.kind == "step"][:1]
    without = [each for each in log if each.kind != "validation"]
    assert "steps of the log: how many" in tensors(check_whole_run(case, performed.outcomes, expected, log + again))
    assert "validation_loss after step 3" in tensors(check_whole_run(case, performed.outcomes, expected, without))
    twice = [*log, *(each for each in log if each.kind in ("validation", "end"))]
    found = tensors(check_whole_run(case, performed.outcomes, expected, twice))
    assert {"validations of the log, how many", "ends in the log: how many", "lines of the log: end"} <= {*found}
    tied = dataclasses.replace(expected, trained=dataclasses.replace(expected.trained, router_gap=1e-9))
    assert check_whole_run(case, performed.outcomes, tied, log).refused == "router_tie"


def test_the_main_job_runs_both_paths_and_counts_them(monkeypatch):
    from equivalence.cases.result import CheckResult
    from equivalence.runner import whole_run_jobs

    jobs = list(whole_run_jobs_of_tiny())
    assert [job.aim for job in jobs] == ["direct", "online"]
    asked = []
    monkeypatch.setattr(whole_run_jobs, "check_case", lambda case: asked.append(case) or CheckResult(check=WHOLE_RUN))
    tally = Tally()
    for job in jobs:
        RUNNERS["whole_run"](job, [], tally)
    assert [case.layout for case in asked] == [
        "direct dp2",
        "direct cp2, depths weighed by rows, distributed optimizer",
        "online dp2",
    ]
    assert all(case.workers == (2, 0) for case in asked)
    assert tally.equal[WHOLE_RUN, "any"] == 3
    several = whole_run_jobs.cases_of(Job(kind="whole_run", subjects=(), aim="direct", first=2))
    plain = {f"direct {name}2" for name in ("dp", "cp", "tp", "pp")} | {"direct dp2 ep2", "direct cp2 ep2", "direct tp2 ep2"}  # fmt: skip
    distributed = {f"{name}, depths weighed by rows, distributed optimizer" for name in plain if "dp2" in name or "cp2" in name}  # fmt: skip
    assert {case.layout for case in several} == plain | distributed


def whole_run_jobs_of_tiny():
    return whole_run_jobs(SIZES["tiny"], 0, ())


def test_a_rank_that_cannot_run_is_a_finding_with_its_stack(monkeypatch):
    from equivalence.runner import whole_run_jobs

    monkeypatch.setattr(whole_run_jobs, "TRAIN", "equivalence.trainers.whole_run:_read_nothing")
    result = whole_run_jobs.check_case(whole_run_jobs.short_case("direct", ONE, seed=0))
    (finding,) = result.findings
    assert finding.differences[0].kind == "failed"
    assert "_read_nothing" in finding.differences[0].right
