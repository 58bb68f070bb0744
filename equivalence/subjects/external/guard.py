"""Run a command and end everything that it started, whatever becomes of packproof: `guard.py COMMAND …`.

packproof starts the guard, and the guard starts the subject in a process group of its own. When packproof closes the subject's
stdin, or is killed, the subject has GRACE_SECONDS to end; then its group is killed. SIGTERM kills the group at once. The guard ends
with the subject's exit status, 128 + N where signal N killed the subject. This file runs by its path, so that it imports nothing of packproof.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 5.0
NOT_FOUND = 127
_POLL_MILLISECONDS = 1000


def main(command: list[str]) -> int:
    """Run the command and return its exit status."""
    wakeup_read, wakeup_write = os.pipe()
    for end in (wakeup_read, wakeup_write):
        os.set_blocking(end, False)
    terminated: list[int] = []
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    try:
        child = subprocess.Popen(command, start_new_session=True)  # noqa: S603 - the user's own command
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    # The subject alone holds its stdout and stderr, so that packproof sees when they are closed.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    poller = select.poll()
    poller.register(0, 0)  # only tells that the other end is closed
    poller.register(wakeup_read, select.POLLIN)
    while child.poll() is None and not terminated:
        events = dict(poller.poll(_POLL_MILLISECONDS))
        if events.get(0):
            _wait(child, GRACE_SECONDS, terminated)
            break
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup_read, 4096)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # what it forked is in its group, also when it ended by itself
    status = child.wait()
    return status if status >= 0 else 128 - status


def _wait(child: subprocess.Popen[bytes], seconds: float, terminated: list[int]) -> None:
    end = time.monotonic() + seconds
    while child.poll() is None and not terminated and time.monotonic() < end:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
