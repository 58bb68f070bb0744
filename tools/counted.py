"""Write a count with its noun, as one or as several."""

from __future__ import annotations


def counted(number: int, noun: str, verb: str = "", verbs: str = "") -> str:
    """Return a count with its noun, and with the verb for one or for several: `1 row is`, `2 rows are`."""
    said = verb if number == 1 else verbs
    return f"{number:,} {noun}{'' if number == 1 else 's'}{' ' if said else ''}{said}"
