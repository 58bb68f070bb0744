"""The command under torchrun: a killed rank is named and nothing hangs, a signal saves and ends with status 0."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import training_job_worlds as jobs

pytestmark = pytest.mark.worlds

ROOT = Path(__file__).parents[2]


@contextmanager
def running(folder, *options, **changes):
    """A job of two ranks that has taken two steps: torchrun's process and those of the ranks."""
    rows = jobs.write_rows(folder / "rows.jsonl")
    config = jobs.write_job(folder, rows, **{"sft.max_num_steps": 1_000_000, **changes})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    with (folder / "printed").open("w") as printed:
        job = subprocess.Popen(
            [*command, "-m", "production.training", "--config", str(config)],
            cwd=ROOT,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        started = psutil.Process(job.pid)
        try:
            until = time.monotonic() + 240
            numbers = folder / "logs" / "metrics.jsonl"
            while not numbers.is_file() or len(jobs.records(folder, "step")) < 2:
                assert job.poll() is None, (folder / "printed").read_text()
                assert time.monotonic() < until, (folder / "printed").read_text()
                time.sleep(0.2)
            ranks = {int(child.environ()["RANK"]): child for child in started.children()}
            yield job, [ranks[0], ranks[1]]
        finally:
            for process in [*started.children(recursive=True), started] if started.is_running() else []:
                process.kill()
            job.wait()


def test_a_killed_rank_ends_the_job_with_a_message_that_names_it(tmp_path):
    with running(tmp_path) as (job, ranks):
        children = psutil.Process(job.pid).children(recursive=True)
        ranks[1].kill()
        assert job.wait(60) == 1
        psutil.wait_procs(children, timeout=10)
        assert not [each for each in children if each.is_running()]
    printed = (tmp_path / "printed").read_text()
    assert "failed: a collective of the job: rank 1 is gone" in printed
    assert "Traceback" not in printed.split("failed: a collective")[0]


def test_a_signal_to_one_rank_saves_and_ends_all_with_status_0(tmp_path):
    with running(tmp_path, **{"policy.megatron_cfg.optimizer.use_distributed_optimizer": True}) as (job, ranks):
        ranks[1].send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
    (end,) = jobs.records(tmp_path, "end")
    assert end["reason"] == "signal"
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name == f"step_{end['step']:08d}"


def test_a_signal_to_torchrun_itself_saves_after_the_step_and_ends_all_within_its_time(tmp_path):
    with running(tmp_path, "--shutdown-timeout", "45", **{"checkpointing.save_period": 1_000_000}) as (job, ranks):
        job.send_signal(signal.SIGTERM)
        status = job.wait(60)
        assert not [each for each in ranks if each.is_running()]
    printed = (tmp_path / "printed").read_text()
    (end,) = jobs.records(tmp_path, "end")
    assert (end["reason"], [path.name for path in (tmp_path / "checkpoints").iterdir()]) == (
        "signal",
        [f"step_{end['step']:08d}"],
    )
    assert [each["step"] for each in jobs.records(tmp_path, "step")] == list(range(1, end["step"] + 1))
    assert "forcefully exiting" not in printed  # torchrun's words where it kills
    assert "failed:" not in printed
    # torchrun itself tells that a signal ended it, by a traceback of its own and its status.
    assert status == 1
    assert printed.count("Traceback") == printed.count("SignalException: Process") == 1
