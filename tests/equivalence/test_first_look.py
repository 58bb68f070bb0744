"""The first look of a run: rows and recorded outcomes in a process of its own, told while this one still imports megatron-core.

That nothing of the look imports megatron-core is held in tests/test_house.py.
"""

import os
import threading
from pathlib import Path

import pytest

from equivalence.runner import first_look
from equivalence.runner.counters import Tally
from equivalence.runner.first_look import first_jobs, looking
from equivalence.runner.job import Job
from equivalence.runner.own_settings import own_settings
from equivalence.runner.plan import OWN_ROWS, recorded_jobs
from equivalence.runner.restriction import EVERYTHING

SAMPLE = Path(__file__).parents[2] / "examples" / "packed" / "sample.jsonl.packed"
BUILT_IN = ("reference", "production", "megatron_lm")


@pytest.fixture(scope="module")
def own():
    return own_settings(SAMPLE, pack_length=None, restriction=EVERYTHING)


def first(own, subjects=BUILT_IN, *, has_recorded=True):
    return list(first_jobs(own, "nemotron-mini", subjects, has_recorded=has_recorded))


def test_some_rows_come_first_then_recorded_outcomes_then_the_other_rows(own):
    jobs = first(own)
    assert (jobs[0].kind, jobs[0].examples, jobs[1].kind) == ("first_look", OWN_ROWS, "recorded")
    rows = [job for job in jobs if job.kind == "first_look"]
    assert sorted(row for job in rows for row in range(job.first, job.first + job.examples)) == list(range(own.rows))
    assert {job.subjects for job in rows} == {("reference", "production")}
    # A recorded outcome is the plan's own job, so that the run can leave out what the look has done.
    recorded = [job for job in jobs if job.kind == "recorded"]
    assert recorded == [job for job in recorded_jobs(BUILT_IN) if job.aim != "partitions"]


def test_a_first_look_needs_two_sides_and_a_file(own):
    assert first(own, ("reference", "megatron_lm")) == []
    assert first(None) == []
    assert {job.kind for job in first(own, has_recorded=False)} == {"first_look"}


def counted(job):
    tally = Tally()
    tally.rows["first_look", "any"] = job.examples
    tally.messages = os.getpid()
    return tally


def numbered(count):
    return [Job(kind="first_look", subjects=(), examples=number) for number in range(count)]


def test_each_job_is_reported_when_it_ends_while_this_process_continues(monkeypatch):
    ended = threading.Event()
    jobs = numbered(3)
    told = []
    monkeypatch.setattr(first_look, "run", counted)

    def tell(job, tally):
        told.append((job, tally))
        if len(told) == len(jobs):
            ended.set()

    with looking(jobs, tell) as done:
        assert ended.wait(60), "told before the context is left"
    assert done == [job for job, _ in told] == jobs
    assert [tally.rows["first_look", "any"] for _, tally in told] == [0, 1, 2]
    assert os.getpid() not in {tally.messages for _, tally in told}, "in a process of its own"


def test_jobs_that_a_first_look_cannot_run_are_left_to_the_run(monkeypatch):
    def dies(job):
        if job.examples == 1:
            os._exit(1)
        return counted(job)

    seen = threading.Event()
    monkeypatch.setattr(first_look, "run", dies)
    with looking(numbered(3), lambda *_: seen.set()) as done:
        assert seen.wait(60)
    assert [job.examples for job in done] == [0]


def test_a_look_ends_with_the_job_that_is_running_when_the_imports_are_done(monkeypatch, tmp_path):
    go, begun = tmp_path / "go", tmp_path / "begun"
    os.mkfifo(go)
    os.mkfifo(begun)
    sound = first_look._FORK.Event

    def event():
        stop = sound()
        set_it = stop.set
        monkeypatch.setattr(stop, "set", lambda: (set_it(), go.write_text("the job may end")))
        return stop

    def waits(job):
        begun.write_text("it runs")
        go.read_text()
        return counted(job)

    monkeypatch.setattr(first_look._FORK, "Event", event)
    monkeypatch.setattr(first_look, "run", waits)
    with looking(numbered(50), lambda *_: None) as done:
        begun.read_text()
    assert len(done) == 1, "the running job is told, and no other begins"


def test_an_error_beside_a_look_does_not_wait_for_it(monkeypatch, tmp_path):
    never = tmp_path / "never"
    os.mkfifo(never)
    monkeypatch.setattr(first_look, "run", lambda _: never.read_text())
    with pytest.raises(KeyboardInterrupt), looking(numbered(2), lambda *_: None):
        raise KeyboardInterrupt
