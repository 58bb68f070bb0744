"""Define the report that every command of diff-row makes and every renderer shows: a row, its way to one rank, or a job's dump.

The screen, the page and the JSON show this value and compute nothing of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.diff_row.rank.steps import RankFindings
from tools.diff_row.row.findings import Findings


@dataclass(frozen=True, kw_only=True)
class ComparedMicrobatch:
    """One microbatch of one rank, and how it compares."""

    rank: int
    microbatch: int
    file: str
    row: int | None
    """In its file, from 0; None for a bin."""
    line: int | None
    """In its file, from 1; None for a bin."""
    told: str
    """Place of the row, or of the bin's conversations, in words."""
    equal: bool
    first: str
    """The first step and tensor that differ; empty if all is equal."""


@dataclass(frozen=True, kw_only=True)
class FedStep:
    """A job's dump of one step: everything in it that was compared with the reference."""

    folder: str
    normalization: str
    looked_at: tuple[ComparedMicrobatch, ...]
    """Every microbatch of every rank that was compared."""
    chat_key: str
    """The key of a row's messages in the job's files."""
    chat_template: str | None
    """The job's own chat template; None for the tokenizer's."""
    shown: ComparedMicrobatch
    """The first that differs, else the first: the one that the rest of the report is about."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """Findings of one command, for every renderer."""

    row: Findings
    """The row itself: its sides, conversations and texts."""
    rank: RankFindings | None = None
    """The way of the row to one rank; None if only the row was asked for."""
    fed: FedStep | None = None
    """The dump from which row and rank come; None if no job's dump is looked at."""

    @property
    def equal(self) -> bool:
        """True if nothing that was compared differs, which is exit status 0."""
        if self.fed is not None:
            return all(each.equal for each in self.fed.looked_at)
        return self.row.equal if self.rank is None else self.rank.equal
