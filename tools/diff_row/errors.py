"""The one error that this tool raises for what its user gave it: it ends in one line and exit status 2."""

from __future__ import annotations


class BadInput(ValueError):  # noqa: N818 - it names what is bad, and reads so where it is raised
    """Error text on one line: fault, place and fix."""


def problem(what: str, *, where: str, fix: str) -> BadInput:
    """Return a refusal with fault, place and fix."""
    return BadInput(f"{where}: {what}. To fix it: {fix}")
