"""Tell whose error an exception is: one in production or in a subject is a difference, one of a witness or of the
suite ends the run.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary

from equivalence.cases.difference import Difference
from equivalence.cases.result import Finding

RAISED = "raised"
"""The class of a difference that is an exception."""
CONVENTION = "convention"
"""The class of a difference that a convention explains which a subject outside the process does not declare."""
_ROOT = Path(__file__).resolve().parents[2]
_PRODUCTION, _SUITE = str(_ROOT / "production"), str(_ROOT / "equivalence")
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def is_of_production(error: BaseException) -> bool:
    """Return whether production's code was running: the outermost frame of a side decides nothing, a callback may be production's."""
    return any(frame.filename.startswith(_PRODUCTION) for frame in traceback.extract_tb(error.__traceback__))


def raised(side: str, error: BaseException, *, expected: str = "a row or a refusal") -> Finding:
    """Return the difference that a side's exception is, with file and line."""
    kind = getattr(error, "difference", RAISED)
    difference = Difference(tensor="exception", position=None, left=expected, right=told(error), kind=kind)
    return Finding(left="expected", right=side, differences=[difference])


def told(error: BaseException) -> str:
    """Return the error, and the line of the side's own code at which it was raised or that called what raised it."""
    if getattr(error, "own_words", False):  # of a subject outside the process: our frames tell nothing
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return f"{type(error).__name__}: {error}"
    own = [frame for frame in frames if _is_own(frame)]
    frame = own[-1] if own else frames[-1]
    within = "" if frame is frames[-1] else f", in {frames[-1].name} of {Path(frames[-1].filename).name}"
    return f"{type(error).__name__}: {error} (at {frame.filename}:{frame.lineno} in {frame.name}{within})"


def _is_own(frame: FrameSummary) -> bool:
    """Return whether a frame is neither the suite's nor a library's, so that a reader can fix the frame's code."""
    return not frame.filename.startswith((_SUITE, *_LIBRARIES, "<"))
