"""Replay a saved case alone: in a process forked from one that has run nothing, so that what an earlier case left
behind shows as missing.

A fault with memory (a cache, a counter) is shrunk in a process that ran other cases; its smallest case may be equal by itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

from equivalence.cases import store
from equivalence.cases.result import CheckResult
from equivalence.checks.blame import is_of_production, raised, told
from equivalence.subjects.protocol import Subject
from production.library_warnings import quiet_fork

SECONDS = 60.0
"""Seconds that one replay may take."""
DIFFERENT, EQUAL = "different", "equal"
_FORK = multiprocessing.get_context("fork")

Replayer = Callable[[str], str]
"""From a case's JSON to DIFFERENT, EQUAL, or why there is no answer."""


@contextlib.contextmanager
def replayer(sides: Sequence[Subject], *, seconds: float = SECONDS) -> Iterator[Replayer]:
    """Keep a clean process ready from here on; enter it before anything is run, and when everything needed is imported."""
    ours, theirs = _FORK.Pipe()
    server = _fork(_serve, theirs, tuple(sides), seconds, os.getpid())
    theirs.close()

    def replay(text: str) -> str:
        try:
            ours.send(text)
            # The server itself gives up after `seconds`; a little more is for its own work.
            return str(ours.recv()) if ours.poll(seconds + 10) else "not replayed alone: no answer"
        except (OSError, EOFError) as error:
            return f"not replayed alone: {type(error).__name__}"

    try:
        yield replay
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        ours.close()
        server.join(1)
        if server.is_alive():
            server.kill()
            server.join()


def is_equal_alone(case: store.Case, sides: Sequence[Subject]) -> bool:
    """Replay a case here and say whether all its checks are equal. An exception of production is a difference; others go through."""
    return all(each.equal for each in checked(case, sides))


def checked(case: store.Case, sides: Sequence[Subject]) -> list[CheckResult]:
    """Run a case's checks; an exception of production is a finding."""
    try:
        return store.check(case, sides)
    except Exception as error:
        if not is_of_production(error):
            raise
        name = getattr(case, "check", store.kind_of(case).name)
        return [CheckResult(check=name, findings=[raised("production", error, expected="a result")])]


def _serve(pipe: Connection, sides: tuple[Subject, ...], seconds: float, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        if not pipe.poll(1.0):
            if os.getppid() != parent:  # killed without a word
                return
            continue
        try:
            text = pipe.recv()
        except EOFError:
            return
        if text is None:
            return
        pipe.send(_in_child(text, sides, seconds))


def _in_child(text: str, sides: tuple[Subject, ...], seconds: float) -> str:
    receive, send = _FORK.Pipe(duplex=False)
    child = _fork(_one, send, text, sides)
    send.close()
    try:
        answer = str(receive.recv()) if receive.poll(seconds) else f"not ended within {seconds:.0f} s alone"
    except EOFError:
        answer = "its process ended without an answer alone"
    child.kill()
    child.join()
    receive.close()
    return answer


def _one(send: Connection, text: str, sides: tuple[Subject, ...]) -> None:
    try:
        answer = EQUAL if is_equal_alone(store.parse(text), sides) else DIFFERENT
    except Exception as error:  # noqa: BLE001 - told, whatever it is
        answer = f"could not run alone: {told(error)}"
    send.send(answer)


def _fork(target: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = _FORK.Process(target=target, args=arguments, daemon=False)
    with quiet_fork():
        process.start()
    return process
