"""Read a job process's environment: ranks that a launcher started, this rank, and threads it may use."""

from __future__ import annotations

import os

from production.errors import PackproofError

_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torch needs to find the other ranks; torchrun sets all of them."""
_FIX = "start with torchrun, or take it out of the environment"


def started_ranks() -> int | None:
    """Return the number of ranks that a launcher started; None without a launcher.

    Raises PackproofError for a value that is not a number.
    """
    said = os.environ.get("WORLD_SIZE")
    if said is None:
        return None
    if not said.isascii() or not said.isdecimal() or int(said[:20]) < 1 or len(said) > 9:
        raise _refused(f"must be a number of ranks from 1, got {said[:40]!r}", "WORLD_SIZE")
    return int(said)


def check_environment() -> None:
    """Refuse launcher variables that are incomplete, empty, or not numbers: PackproofError names the variable and its
    fault.
    """
    size = started_ranks()
    there = [name for name in _OF_A_RANK if name in os.environ]
    if "RANK" in there or "WORLD_SIZE" in there:
        unset = [name for name in _OF_A_RANK if not os.environ.get(name)]
        if unset:
            what = f"must be set where {', '.join(there)} {'is' if len(there) == 1 else 'are'} set"
            fix = f"start with torchrun, which sets all of {', '.join(_OF_A_RANK)}, or unset {', '.join(there)}"
            raise _refused(what, ", ".join(unset), fix)
        rank = _number("RANK")
        assert size is not None
        if rank >= size:
            raise _refused(f"must be from 0 to {size - 1}, got {rank}", "RANK")
        _number("MASTER_PORT")
    if "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK")
    threads()


def threads() -> int:
    """Return the threads of `OMP_NUM_THREADS`, of a list those of the outermost level; 1 where it is not set or
    empty.

    Raises PackproofError for a value that is not a number.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not said:
        return 1
    first = said.partition(",")[0].strip()
    if not first.isascii() or not first.isdecimal() or not 1 <= int(first[:9]) <= 1 << 16:
        raise _refused(
            f"must be a number of threads from 1, got {said[:40]!r}",
            "OMP_NUM_THREADS",
            "set it to a number, such as 1, or unset it",
        )
    return int(first)


def _number(name: str) -> int:
    said = os.environ[name]
    if not said.isascii() or not said.isdecimal() or len(said) > 9:
        raise _refused(f"must be a number, got {said[:40]!r}", name)
    return int(said)


def _refused(what: str, name: str, fix: str = _FIX) -> PackproofError:
    return PackproofError(what=what, where=f"{name} (environment)", fix=fix)
