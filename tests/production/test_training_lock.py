"""A folder is one run's: who holds it is named, who is gone is told apart, and what was taken over is not written to."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from production.training.checkpoint import lock
from production.training.checkpoint.lock import FolderLock, FolderLocked

KEY = "checkpointing.checkpoint_dir (job.yaml:3)"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Signs of life in milliseconds."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.4)


def left_by(folder, **changes):
    """A lock file as another process would leave it."""
    with FolderLock(folder, key=KEY):
        owner = json.loads((folder / lock.NAME).read_text())
    (folder / lock.NAME).write_text(json.dumps(owner | {"token": "other"} | changes))


def test_a_folder_that_a_run_holds_is_refused_with_host_process_and_run_and_free_once_it_ends(tmp_path):
    with FolderLock(tmp_path / "made", key=KEY) as held:
        held.name_run("abc123")
        began = time.monotonic()
        with pytest.raises(FolderLocked) as refused:
            FolderLock(tmp_path / "made", key=KEY)
        assert time.monotonic() - began < 0.3, "its process is seen from here: nothing is waited for"
        for named in (KEY, str(tmp_path / "made"), f"process {os.getpid()} on ", "run abc123", "a folder of its own"):
            assert named in str(refused.value)
        held.check()
    assert not list((tmp_path / "made").iterdir())
    FolderLock(tmp_path / "made", key=KEY).close()


def test_a_lock_of_a_process_that_was_killed_is_taken_over_also_while_nobody_has_waited_for_it(tmp_path):
    said = []
    program = f"import os, signal; from pathlib import Path; from production.training.checkpoint.lock import FolderLock; FolderLock(Path({str(tmp_path)!r}), key='k'); os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.Popen([sys.executable, "-c", program])
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # ended, and still listed
    with FolderLock(tmp_path, key=KEY, say=said.append):
        assert f"took {tmp_path} over from process {killed.pid} on " in said[0]
    killed.wait()
    assert not list(tmp_path.iterdir())


def test_another_process_with_the_same_number_is_not_taken_for_the_ended_process(tmp_path):
    left_by(tmp_path, started=1.0)
    FolderLock(tmp_path, key=KEY).close()


@pytest.mark.parametrize("lives", [True, False])
def test_a_lock_of_another_machine_holds_as_long_as_it_shows_signs_of_life(tmp_path, lives):
    left_by(tmp_path, boot="elsewhere", host="node-7", beats=5)
    ended = threading.Event()

    def beat():
        while lives and not ended.wait(0.05):
            owner = json.loads((tmp_path / lock.NAME).read_text())
            (tmp_path / "new").write_text(json.dumps(owner | {"beats": owner["beats"] + 1}))
            (tmp_path / "new").replace(tmp_path / lock.NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        if lives:
            with pytest.raises(FolderLocked, match="on node-7"):
                FolderLock(tmp_path, key=KEY)
        else:
            FolderLock(tmp_path, key=KEY).close()
            assert not list(tmp_path.iterdir())
    finally:
        ended.set()
        thread.join()


def test_a_run_that_lost_its_folder_stops_writing_and_leaves_the_other_runs_lock(tmp_path):
    held = FolderLock(tmp_path, key=KEY)
    (tmp_path / lock.NAME).rename(tmp_path / "away")
    with FolderLock(tmp_path, key=KEY) as other:
        with pytest.raises(FolderLocked, match="has taken the folder over"):
            held.check()
        time.sleep(0.2)  # its signs of life go to its own file
        held.close()
        other.check()


def test_a_file_system_without_hard_links_has_locks_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with FolderLock(tmp_path, key=KEY), pytest.raises(FolderLocked):
        FolderLock(tmp_path, key=KEY)
    assert not list(tmp_path.iterdir())
