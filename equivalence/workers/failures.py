"""Describe a case that failed: the rank, the cause, the line, and the activity of every other rank."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal

from equivalence.errors import SuiteError

State = Literal["finished", "raised", "died", "stuck"]
MOST_PRINTED = 3000
"""Characters of a rank's output that a failure shows: the last ones."""
ORDER: dict[State, int] = {"died": 0, "raised": 1, "stuck": 2, "finished": 3}
"""Errors of a rank whose peer died or is stuck; they are not a cause, because a death breaks the peers' connections."""

_SERVES = "equivalence/workers/rank.py"
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank of a failed case."""

    rank: int
    state: State
    """`stuck` is a rank that had not finished when the case was given up: not necessarily the one at fault."""
    how: str
    """One line: the exception's type and message, the signal or exit status, or where it stood."""
    stack: str = ""
    """The traceback of what it raised, or the Python stacks of all its threads, innermost frame first; "" if finished."""
    output: str = ""
    """The last of what it printed during the case, both streams as one, up to MOST_PRINTED characters."""
    exception: str = ""
    """The type's name if it raised."""
    seconds: float = 0.0
    """From the start of the case until the rank answered, died or was given up."""

    def __str__(self) -> str:
        lines = [f"rank {self.rank} {self.how}"]
        for title, text in (("", self.stack), ("it printed:", self.output)):
            if text.strip():
                lines += [f"  {title}"] * bool(title)
                lines += [f"    {line}" for line in text.strip("\n").splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A case, or the opening of a world, that did not end well on every rank."""

    target: str
    """The case's `module:function`, or what was being opened."""
    size: int
    """Ranks of the world."""
    why: str
    """Cause of the end, in a line: the first rank's fault, or that nothing moved, or the deadline."""
    ranks: tuple[RankReport, ...]
    """All of them, the one to look at first in front."""

    @property
    def first(self) -> RankReport:
        """Rank to look at first: a rank that died, else the first that raised, else a stuck rank."""
        return self.ranks[0]

    def __str__(self) -> str:
        return "\n".join([f"{self.target} on {self.size} ranks: {self.why}", *map(str, self.ranks)])


class _Failed(SuiteError):  # noqa: N818 - its two kinds read as verdicts
    failure: Failure

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return str(self.failure)


class CaseFailed(_Failed):
    """A case failed; its world is dead, the next is clean."""


class WorldNotOpened(_Failed):
    """A rank failed before the first case: in joining the others, or in `enter`."""


def in_order(reports: list[RankReport]) -> tuple[RankReport, ...]:
    """Return reports with the rank to look at first in front."""
    return tuple(sorted(reports, key=lambda report: (ORDER[report.state], report.seconds, report.rank)))


def ended(code: int, status: int) -> str:
    """Describe the end of a process, from `os.waitid`'s si_code and si_status."""
    if code == 1:  # CLD_EXITED
        return f"exited with status {status} without an answer"
    try:
        name = signal.Signals(status).name
    except ValueError:
        name = f"signal {status}"
    return f"was killed by {name}"


def own_frames(dump: str) -> str:
    """Return faulthandler's dump without the frames below the case: the worker's own, and the parent's, inherited by the fork."""
    kept: list[str] = []
    below = False
    for line in dump.splitlines():
        if line.startswith("Extension modules:"):
            continue
        frame = _FRAME.match(line)
        if frame is None:
            below = False
        elif frame["file"].endswith(_SERVES):
            below = True
        if not below:
            kept.append(line)
    return "\n".join(kept).strip("\n")


def where(stack: str) -> str:
    """Return the innermost frame of the case's own code in faulthandler's text, without torch's frames, and the call in which it waits."""
    frames = [frame for frame in map(_FRAME.match, _main_thread(stack)) if frame]
    own = [frame for frame in frames if "/torch/" not in frame["file"]]
    if not frames:
        return "somewhere that its stack does not show"
    place = own[0] if own else frames[0]
    called = [frame["function"] for frame in frames[: frames.index(place)] if frame["function"] != "wrapper"]
    within = f", in {called[-1]}" if called else ""
    return f"at {place['file'].rpartition('/')[2]}:{place['line']} ({place['function']}){within}"


def _main_thread(stack: str) -> list[str]:
    """Return the lines of the thread that runs cases, which faulthandler writes last because it was started first."""
    return re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.MULTILINE)[-1].splitlines()
