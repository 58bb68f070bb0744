"""Save and end a rank whose launcher was killed, since no other process would end the rank."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

POLL_SECONDS = 1.0
"""Seconds between two checks that the launcher still runs."""
LAUNCHER_GONE = "LAUNCHER_GONE"
"""Name of this request to end, beside the names of signals."""


@contextlib.contextmanager
def outliving_no_launcher(asked: list[str], *, timeout_seconds: float) -> Iterator[None]:
    """Ask this rank to save and end where torchrun, which started it, is gone; end the process after
    `timeout_seconds`.

    Without torchrun it does nothing: a shell may end before the process that it started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    launcher, ended = os.getppid(), threading.Event()

    def watch() -> None:
        while os.getppid() == launcher:
            if ended.wait(POLL_SECONDS):
                return
        print(f"torchrun (process {launcher}) is gone: this rank saves and ends", file=sys.stderr, flush=True)
        asked.append(LAUNCHER_GONE)
        until = time.monotonic() + timeout_seconds
        while time.monotonic() < until:
            if ended.wait(POLL_SECONDS):
                return
        os.write(
            2, b"failed: torchrun is gone, and this rank did not come to the end of a step in cluster.timeout_seconds\n"
        )
        os._exit(1)

    thread = threading.Thread(target=watch, name="packproof-launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
