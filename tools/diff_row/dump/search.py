"""Finds which row of a packed file a dumped row is, by its token ids."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equivalence.subjects import RowSettings
from equivalence.subjects.production import SUBJECT
from production.errors import PackproofError
from production.files.source import open_source
from tools.diff_row.errors import BadInput
from tools.diff_row.row.inspection import Flaw

TELL_AFTER = 2.0
"""Seconds between two lines that say how far a search is."""
MOST_NAMED = 5
"""Further rows with the same ids that are named."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """The row of a file whose ids are nearest to those of a dumped row."""

    row: int
    """Its number in the file, from 0: the first that equals, else the one that shares most positions."""
    shared: int
    """Positions at which both have the same id."""
    length: int
    """Positions of the dumped row."""
    others: tuple[int, ...] = ()
    """Further rows with exactly the same ids."""
    searched: int = 0
    """Rows of the file that were built and held against the dump."""

    @property
    def exact(self) -> bool:
        """True if all ids are equal."""
        return self.shared == self.length

    def note(self, *, asked_row: int | None) -> Flaw:
        """Return the note on the match: the row was found, or another row matches than the requested one."""
        if not self.exact:
            what = f"no row of the file has the dump's ids: row {self.row} is nearest, with {self.shared:,} of {self.length:,} equal (another tokenizer, format or file?)"
        elif asked_row in (None, self.row):
            what = f"the dump is row {self.row} of the file, found by its ids"
        else:
            what = (
                f"the dump's ids are those of row {self.row} of the file, not of row {asked_row}: give --row {self.row}"
            )
        if self.others:
            named = ", ".join(map(str, self.others[:MOST_NAMED]))
            more = f" and {len(self.others) - MOST_NAMED} more" if len(self.others) > MOST_NAMED else ""
            what += f"; rows {named}{more} have the same ids"
        what += f" ({self.searched:,} rows searched)"
        return Flaw(what=what, rule="", count=1, position=None, note=True)


def find_row(ids: torch.Tensor, file: Path, tokenizer: Any, settings: RowSettings, *, chat_key: str) -> Match:
    """Build every row of the file for `settings` and return the row whose ids [P] are nearest to `ids` [P].

    All rows are compared, because several may be equal. A refused row never matches. Raises BadInput if the file
    cannot be read or none of its rows can be built.
    """
    wanted = ids.reshape(-1).to(torch.int64)
    best: tuple[int, int] | None = None
    exact: list[int] = []
    searched = 0
    for number, built in _rows(file, tokenizer, settings, chat_key):
        searched += 1
        if built is None or built.numel() != wanted.numel():
            continue
        shared = int((built == wanted).sum())
        if shared == wanted.numel():
            exact.append(number)
        if best is None or shared > best[1]:
            best = number, shared
    if best is None:
        raise BadInput(
            f"no row of {file} could be built with these settings, so the dump's row cannot be found: give --row N"
        )
    return Match(row=best[0], shared=best[1], length=wanted.numel(), others=tuple(exact[1:]), searched=searched)


def _rows(
    file: Path, tokenizer: Any, settings: RowSettings, chat_key: str
) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Yield number and ids of every row, None for a refused row; print the progress to standard error."""
    told = time.monotonic()
    try:
        with open_source([file], chat_key=chat_key) as source:
            for number in range(len(source)):
                yield number, SUBJECT.build_row(source[number], tokenizer, settings).input_ids
                if time.monotonic() - told > TELL_AFTER:
                    told = time.monotonic()
                    print(f"looking for the dump's row: {number + 1:,} of {len(source):,}", file=sys.stderr)
    except PackproofError as error:
        raise BadInput(str(error)) from error
