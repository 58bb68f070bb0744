"""Worlds of workers: many cases in one, every way to fail named within seconds, and nothing of it left afterwards."""

import atexit
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import worker_targets

from equivalence.errors import InputError, SuiteError
from equivalence.workers import (
    Case,
    CaseFailed,
    Deadlines,
    WorldNotOpened,
    open_world,
    preload,
    reopening_world,
    run_cases,
)
from equivalence.workers.launched import _Watch, plain
from equivalence.workers.preload import MEGATRON

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning"),
]

QUICK = Deadlines(idle_s=1.0, after_failure_s=0.5)
SUM = Case(target="worker_targets:summed", payload={"numbers": [1, 2]})


@pytest.fixture(scope="module", autouse=True)
def _preloaded(tmp_path_factory):
    preload(megatron=False)
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("worlds"))  # not those of other processes
    yield
    tempfile.tempdir = before


@pytest.fixture
def world():
    """Two ranks; opening them takes less than 0.1 s."""
    with open_world(2, enter="worker_targets:entered", entry={"layout": "none"}) as opened:
        yield opened


def open_descriptors():
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def folders():
    return set(Path(tempfile.gettempdir()).glob("packproof-world-*"))


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # of pid 1, which may be slow to reap
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_hundreds_of_cases_run_in_one_world(world):
    pids = {rank[4] for rank in world.run("worker_targets:place")}
    for number in range(300):
        assert [int(total) for total in world.run(SUM.target, {"numbers": [number, 1]})] == [3 * (number + 1)] * 2
    assert {rank[4] for rank in world.run("worker_targets:place")} == pids


def test_preloading_warns_of_nothing_and_a_rank_has_megatron_core_without_an_import():
    with warnings.catch_warnings(record=True) as heard:
        preload("json")
    assert not heard
    with open_world(1) as world:
        (modules,) = world.run("worker_targets:modules")
    assert set(MEGATRON) <= modules


def test_every_rank_gets_its_coordinates_the_entered_value_and_the_payload(world):
    places = world.run("worker_targets:place", {"any": 1})
    assert [place[:4] for place in places] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert [place[4] for place in places] == list(world.pids)
    assert [place[5] for place in places] == [{"rank": 0, "layout": "none"}, {"rank": 1, "layout": "none"}]
    assert [place[6] for place in places] == [{"any": 1}] * 2


def test_results_come_back_whole_with_type_shape_and_bits(world):
    mine = worker_targets.kinds(None, type("Worker", (), {"rank": 1}))
    result = world.run("worker_targets:kinds")[1]
    assert set(result) == set(mine)
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert (result[name].dtype, result[name].shape) == (value.dtype, value.shape), name
            both = [x.detach().to_dense().resolve_conj().contiguous().reshape(-1) for x in (result[name], value)]
            assert torch.equal(*(x.view(torch.uint8) for x in both)), name
    assert not result["gradient"].requires_grad
    assert type(result["parameter"]) is torch.Tensor
    assert result["verdict"].name == "rank 1"
    assert result["verdict"].value.item() == 1
    assert result["plain"] == mine["plain"]
    result["float64"][0, 0] = 7.0  # its memory is its own


def test_payload_tensors_cross_to_every_rank_and_stay_the_parents_own(world):
    payload = {"tensor": torch.tensor([1.0, 2.0])}
    assert [result.tolist() for result in world.run("worker_targets:doubled", payload)] == [[2.0, 4.0]] * 2
    assert payload["tensor"].tolist() == [1.0, 2.0]


def test_a_case_draws_the_same_numbers_whatever_ran_before_it(world):
    first = world.run("worker_targets:drawn")
    world.run(SUM.target, SUM.payload)
    again = world.run("worker_targets:drawn")
    assert torch.equal(first[0][0], again[1][0])
    assert first[0][1:] == again[1][1:]


def test_a_rank_is_rid_of_the_parents_tracer_and_warning_filters(world):
    assert world.run("worker_targets:warned") == [(True, 1)] * 2


WAYS = {
    "raises": ("raised", 1, "rank 1 raised ValueError at worker_targets.py:"),
    "killed": ("died", 1, "rank 1 was killed by SIGKILL"),
    "exits": ("died", 1, "rank 1 exited with status 3 without an answer"),
    "crashes": ("died", 1, "rank 1 was killed by SIGSEGV"),
    "leaves_early": ("stuck", 0, "nothing has moved for "),
    "waits_elsewhere": ("stuck", 0, "nothing has moved for "),
    "quits": ("raised", 1, "rank 1 raised SystemExit at worker_targets.py:"),
    "cannot_be_sent": ("raised", 1, "rank 1 raised "),
    "cannot_be_read": ("raised", 1, "rank 1 gave a result that cannot be read here: FileNotFoundError"),
    "leaves_float64": ("raised", 1, "default dtype: torch.float32 became torch.float64"),
}


@pytest.fixture(scope="module")
def outcomes():
    """Each way to fail, between two cases that end well, in worlds of three."""
    cases = [SUM]
    for way in WAYS:
        cases += [Case(target=f"worker_targets:{way}", payload=1), SUM]
    before = (open_descriptors(), threading.active_count(), folders())
    ran = list(run_cases(3, cases, deadlines=QUICK))
    assert (open_descriptors(), threading.active_count(), folders()) == before
    return ran


@pytest.mark.parametrize("way", WAYS)
def test_a_failing_rank_is_named_with_error_and_line(outcomes, way):
    outcome = outcomes[1 + 2 * list(WAYS).index(way)]
    state, rank, why = WAYS[way]
    assert outcome.results is None
    assert (outcome.failure.first.state, outcome.failure.first.rank) == (state, rank)
    assert why in outcome.failure.why
    assert str(outcome.failure).startswith(f"worker_targets:{way} on 3 ranks: ")
    assert sorted(report.rank for report in outcome.failure.ranks) == [0, 1, 2]


def test_the_case_after_a_failure_has_a_clean_world(outcomes):
    assert len(outcomes) == 1 + 2 * len(WAYS)
    assert [[int(total) for total in outcome.results] for outcome in outcomes[::2]] == [[18] * 3] * (1 + len(WAYS))


def test_an_exception_comes_with_its_line_and_what_the_others_waited_in(outcomes):
    failure = outcomes[1].failure
    line = next(
        number
        for number, text in enumerate(Path(worker_targets.__file__).read_text().splitlines(), start=1)
        if 'raise ValueError("boom' in text
    )
    assert failure.first.exception == "ValueError"
    assert failure.why == f"rank 1 raised ValueError at worker_targets.py:{line}: boom"
    assert f'worker_targets.py", line {line}, in raises' in failure.first.stack
    assert "rank.py" not in failure.first.stack
    assert failure.first.output == "printed before the fault by 1\n"
    for other in failure.ranks[1:]:
        assert other.state == "stuck"
        assert f"at worker_targets.py:{line + 1} (raises), in all_reduce" in other.how
        assert "pytest" not in other.stack, "the parent's frames are none of the case's"


def test_a_rank_stuck_in_a_collective_shows_the_stack_it_waits_in(outcomes):
    failure = outcomes[1 + 2 * list(WAYS).index("leaves_early")].failure
    assert [(report.rank, report.state) for report in failure.ranks] == [(0, "stuck"), (2, "stuck"), (1, "finished")]
    assert "(leaves_early), in all_reduce" in failure.first.how
    assert "in leaves_early" in failure.first.stack
    assert "printed before the wait by 2" in str(failure)


def test_ranks_that_wait_for_each_other_are_found_though_none_has_finished(outcomes):
    failure = outcomes[1 + 2 * list(WAYS).index("waits_elsewhere")].failure
    assert [report.state for report in failure.ranks] == ["stuck"] * 3
    assert "(waits_elsewhere), in recv" in failure.ranks[0].how


def test_a_crash_shows_the_stack_that_the_rank_wrote_as_it_died(outcomes):
    assert "in crashes" in outcomes[1 + 2 * list(WAYS).index("crashes")].failure.first.stack


def test_slow_work_is_not_stuck_but_ends_at_the_deadline():
    with open_world(2, deadlines=Deadlines(idle_s=0.4, after_failure_s=0.2)) as world:
        assert world.run("worker_targets:computes", 0.9) == [0, 1]
        with pytest.raises(CaseFailed, match=r"not finished after 0\.7 s: rank 0 had not finished: at worker_targets"):
            world.run("worker_targets:computes", 60, deadline_s=0.7)
        assert not world.alive
        with pytest.raises(SuiteError, match="is closed"):
            world.run(SUM.target, SUM.payload)


def test_processes_that_a_rank_started_end_with_its_world():
    with open_world(2) as world:
        helper = world.run("worker_targets:starts_a_process")[1]
        assert not gone(helper)
        ranks = world.pids
    assert wait_until(lambda: all(map(gone, (helper, *ranks))))
    assert not psutil.Process().children()


def test_a_world_whose_enter_fails_is_not_opened_and_names_the_rank():
    before = (open_descriptors(), folders())
    with (
        pytest.raises(
            WorldNotOpened, match="opening a world with worker_targets:entered on 2 ranks: rank 1 raised"
        ) as at,
        open_world(2, enter="worker_targets:entered", entry={"raises": 1}, deadlines=QUICK),
    ):
        pass
    assert "boom in enter" in at.value.failure.first.stack
    with pytest.raises(WorldNotOpened, match="ModuleNotFoundError"):
        list(run_cases(1, [SUM], enter="no_such_module:thing"))
    assert (open_descriptors(), folders()) == before


def test_the_parent_stays_unpatched_after_a_world_that_patches_torch():
    before = (torch.cuda.current_device, torch.ones, torch.Tensor.to, torch.cuda.Stream)
    with open_world(2, enter="worker_targets:patched") as world:
        assert world.run("worker_targets:current_device") == [("cpu", "cpu")] * 2
        assert len(world.run("worker_targets:kinds")[0]) == len(worker_targets.kinds(None, type("W", (), {"rank": 0})))
    assert (torch.cuda.current_device, torch.ones, torch.Tensor.to, torch.cuda.Stream) == before
    assert not torch.overrides._get_current_function_mode_stack()


def test_nine_workers_never_live_at_once():
    with pytest.raises(InputError, match="1 to 8 ranks, got 9"), open_world(9):
        pass
    refused = pytest.raises(SuiteError, match="2 workers live, and 7 more would exceed 8")
    with open_world(1), open_world(1), refused, open_world(7):  # this thread holds the seats: waiting would be for ever
        pass
    with pytest.raises(InputError, match="must be module:function"), open_world(1, enter="nothing"):
        pass


def test_a_world_waits_for_the_seats_that_another_thread_gives_back():
    opened, release = threading.Event(), threading.Event()

    def hold():
        with open_world(1):
            opened.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert opened.wait(10)
    threading.Timer(0.3, release.set).start()
    with open_world(8) as world:
        assert release.is_set(), "eight were there before the one was given back"
        assert [int(total) for total in world.run(SUM.target, SUM.payload)] == [3 * 36] * 8
    thread.join()


def test_a_search_runs_failing_cases_again_and_again():
    bad = Case(target="worker_targets:raises", payload=0)
    with reopening_world(1, deadlines=QUICK) as world:
        states = [world.run(case).failure is None for case in (SUM, bad, bad, SUM, SUM)]
        assert states == [True, False, False, True, True]
        assert world.openings == 3
    assert not psutil.Process().children()


def test_a_rank_whose_parent_is_gone_ends_without_the_parents_exit_handlers(tmp_path):
    def leave_a_trace():
        (tmp_path / "trace").write_text("an exit handler of the parent ran")

    atexit.register(leave_a_trace)
    try:
        with open_world(1) as world:
            child = world._children[0]
            child.connection.close()
            child.look(patience_s=5)
            assert child.death == "exited with status 0 without an answer"
    finally:
        atexit.unregister(leave_a_trace)
    assert not (tmp_path / "trace").exists()


@contextlib.contextmanager
def another_parent(body):
    """A process that runs `body(write)`, never back into pytest; yields its id and the ids of ranks that it wrote."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body(write)
        except KeyboardInterrupt:
            os._exit(77)
        finally:
            os._exit(1)
    os.close(write)
    try:
        yield pid, [int(number) for number in os.read(read, 1000).split()]
    finally:
        os.close(read)


def opens_and_waits(write):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open_world(2) as world:
        os.write(write, b" ".join(str(pid).encode() for pid in world.pids))
        world.run("worker_targets:sleeps", 60)


def test_ranks_end_with_a_parent_that_is_killed():
    with another_parent(opens_and_waits) as (parent, ranks):
        assert len(ranks) == 2
        assert not any(map(gone, ranks))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert wait_until(lambda: all(map(gone, ranks)))


def test_ctrl_c_in_the_parent_ends_all_ranks():
    with another_parent(opens_and_waits) as (parent, ranks):
        assert len(ranks) == 2
        time.sleep(0.1)
        os.kill(parent, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == 77
        assert wait_until(lambda: all(map(gone, ranks)))


def test_under_torchrun_the_same_functions_run_and_the_first_failure_names_its_rank(tmp_path):
    payloads = tmp_path / "payloads.jsonl"
    payloads.write_text('{"numbers": [1, 2]}\n{"numbers": [3, 4]}\n{"numbers": "no numbers"}\n')
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "equivalence.workers"]
    ran = subprocess.run(
        [sys.executable, "-m", *launcher, SUM.target, str(payloads)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["case"] for line in lines] == [0, 1], ran.stderr
    assert [[result["values"] for result in line["results"]] for line in lines] == [[9, 9], [21, 21]]
    assert ran.returncode == 1
    assert "of 2, case 2 of worker_targets:summed" in ran.stderr
    assert "in summed" in ran.stderr


@pytest.mark.parametrize(("ending", "status"), [("deadline", 1), ("SIGTERM", 143)])
def test_a_launched_rank_that_is_late_or_ended_prints_where_it_stood(tmp_path, ending, status):
    def waits(_write):
        os.dup2(os.open(tmp_path / "stderr", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        with _Watch(1, 0.3 if ending == "deadline" else 60) as watch:
            watch.start("case 7 of a:b")
            if ending == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            worker_targets.sleeps(30, None)

    with another_parent(waits) as (pid, _):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    text = (tmp_path / "stderr").read_text()
    assert text.startswith("rank 1 ")
    assert "case 7 of a:b" in text
    assert "in sleeps" in text


def test_results_are_written_as_json_with_every_value():
    verdict = worker_targets.Verdict(name="x", value=torch.tensor([0.1], dtype=torch.float64))
    assert plain([verdict, {"a": (1, None)}, math.inf, {2}]) == [
        {"name": "x", "value": {"dtype": "torch.float64", "shape": [1], "values": [0.1]}},
        {"a": [1, None]},
        math.inf,
        "{2}",
    ]
