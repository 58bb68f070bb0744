"""Run a subject as a child process and exchange frames with it: neither a hang, a crash nor a flood of output stops the caller."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packproof_subject import MAGIC, PREFIX

GUARD = Path(__file__).with_name("guard.py")
TAIL_BYTES = 4096
"""Bytes of stderr that are kept."""
MOST_BYTES = 1 << 32
"""Bytes that a frame has at most; a longer one is refused as garbage."""
_CHUNK = 1 << 20
_END_SECONDS = 6.0
"""Seconds that the guard may take to end the subject: its own grace and a little more."""

Frame = tuple[dict[str, Any], bytearray]


class SubjectFailed(Exception):  # noqa: N818 - the subject's fault, and a result of the comparison
    """A subject that ended, hung, or answered with something that is no answer. The text is complete: it needs no place in our code."""

    own_words = True


class UndeclaredConvention(SubjectFailed):
    """A row that would be equal if the adapter declared a convention; nothing was raised, and the text says it all."""

    difference = "convention"


class ChildProcess:
    """A running subject. Its stdin, stdout and stderr are pipes that only `send`, `receive` and `close` touch; no thread is used."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the command. It runs in the caller's environment and folder."""
        # A session of its own: Ctrl-C reaches packproof alone, which then ends the subject.
        self._process = subprocess.Popen(  # noqa: S603 - the user's own command
            [sys.executable, "-I", "-S", str(GUARD), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = (
            pipe.fileno() for pipe in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe, False)
            with contextlib.suppress(OSError, AttributeError):  # Linux: a row of 4,096 tokens in one piece
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _CHUNK)
        self._poller = select.poll()
        self._poller.register(self._stdout, select.POLLIN)
        self._poller.register(self._stderr, select.POLLIN)
        self._open = {self._stdout, self._stderr}
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        self._tail = bytearray()
        self._said = 0
        _RUNNING.add(self)

    def send(self, frame: bytes) -> None:
        """Queue a frame. It is written while `receive` waits, so that two full pipes cannot block each other."""
        self._outgoing = memoryview(bytes(self._outgoing) + frame)
        self._poller.register(self._stdin, select.POLLOUT)

    def receive(self, seconds: float, *, what: str, skips_noise: bool = False) -> Frame:
        """Return the next frame within `seconds`. With `skips_noise` what was printed before the first frame is dropped.

        Raises SubjectFailed.
        """
        end = time.monotonic() + seconds
        while True:
            if skips_noise:
                self._skip_noise()
            if (frame := self._taken(what)) is not None:
                return frame
            if self._stdout not in self._open:
                raise SubjectFailed(self._with_tail(f"{self._ended()} while it was asked for {what}"))
            left = end - time.monotonic()
            if left <= 0:
                raise SubjectFailed(self._with_tail(f"gave no answer within {seconds:g} s to {what}"))
            self._pump(left)

    def close(self, *, at_once: bool = False) -> None:
        """End the subject and whatever it started. It may end by itself first, unless `at_once`."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        _RUNNING.discard(self)
        if at_once:
            self._process.send_signal(signal.SIGTERM)
        self._close_pipes()
        for end in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                end()  # SIGTERM first: the guard then kills what it guards
        self._process.wait()

    def abandon(self) -> None:
        """Close the pipes of a subject that another process started: for a forked process, which must not hold them."""
        self._close_pipes()
        self._process.returncode = 0  # not ours to wait for

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _pump(self, seconds: float) -> None:
        """Move bytes for one round: answers in, requests out, stderr to its tail."""
        for pipe, _ in self._poller.poll(max(1, int(seconds * 1000))):
            if pipe == self._stdin:
                self._write()
                continue
            try:
                data = os.read(pipe, _CHUNK)
            except BlockingIOError:
                continue
            if not data:
                self._poller.unregister(pipe)
                self._open.discard(pipe)
            elif pipe == self._stdout:
                self._incoming += data
            else:
                self._said += len(data)
                self._tail = (self._tail + data)[-TAIL_BYTES:]

    def _write(self) -> None:
        try:
            written = os.write(self._stdin, self._outgoing[:_CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended, or closed its stdin: what it answers, or that it ended, tells
            written = len(self._outgoing)
        self._outgoing = self._outgoing[written:]
        if not self._outgoing:
            self._poller.unregister(self._stdin)

    def _taken(self, what: str) -> Frame | None:
        """Take one frame from what has come in; None where it is not whole yet."""
        if self._incoming[: len(MAGIC)] != MAGIC[: len(self._incoming)]:
            raise self._garbage(what)
        if len(self._incoming) < PREFIX.size:
            return None
        _, of_header, of_body = PREFIX.unpack_from(self._incoming)
        start, end = PREFIX.size + of_header, PREFIX.size + of_header + of_body
        if end > MOST_BYTES:
            raise self._garbage(what)
        if len(self._incoming) < end:
            return None
        try:
            header = json.loads(self._incoming[PREFIX.size : start])
        except ValueError:
            raise self._garbage(what) from None
        body = self._incoming[start:end]
        del self._incoming[:end]
        if not isinstance(header, dict):
            raise self._garbage(what)
        return header, body

    def _garbage(self, what: str) -> SubjectFailed:
        first = bytes(self._incoming[:60])
        return SubjectFailed(
            self._with_tail(
                f"wrote something that is not a frame of the protocol to its stdout when it was asked for {what}: {first!r}; "
                "let packproof_subject.serve write the answers"
            )
        )

    def _skip_noise(self) -> None:
        """Drop what an import printed before `serve` took stdout: everything before the first frame."""
        at = self._incoming.find(MAGIC)
        if at < 0:
            at = max(0, len(self._incoming) - len(MAGIC) + 1)
            while at < len(self._incoming) and not MAGIC.startswith(self._incoming[at:]):
                at += 1
        del self._incoming[:at]

    def _ended(self) -> str:
        """Return in words how the subject ended; one that only closed its stdout says so."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(1.0)
            self._drain()
            if status > 128:
                number = status - 128
                known = {each.value: each.name for each in signal.Signals}
                return f"was killed by {known.get(number, f'signal {number}')}"
            return f"ended with exit status {status}"
        return "closed its stdout"

    def _drain(self) -> None:
        while self._stderr in self._open:
            before = self._said
            self._pump(0.01)
            if self._said == before and self._stderr in self._open:
                return

    def _with_tail(self, text: str) -> str:
        said = self._tail.decode("utf-8", "replace").strip()
        lines = said.splitlines()[-12:]
        return f"{text}; stderr: {' | '.join(lines)}" if lines else f"{text}; it wrote nothing to stderr"


_RUNNING: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a forked process: let go of the subjects of the process that forked, whose end must reach them."""
    for child in list(_RUNNING):
        child.abandon()
    _RUNNING.clear()


os.register_at_fork(after_in_child=_abandon_all)
