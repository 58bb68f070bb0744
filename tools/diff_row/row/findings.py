"""Hold the findings about one row: its sides, their differences, and the place to look at first.

All three outputs (terminal, JSON, page) show this value and compute nothing of their own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from equivalence.cases.difference import Difference, compare_rows
from equivalence.subjects import ROW_TENSORS, Row, RowSettings
from tools.diff_row.row.inspection import IGNORE_INDEX, Flaw
from tools.diff_row.row.layout import RowMap
from tools.diff_row.tokens import TokenTexts

TOKEN_TENSORS = ROW_TENSORS[:4]
"""The tensors that have one value a position."""
REACH = 4
"""Positions shown before and after the first difference."""
MOST_LISTED = 200
"""Differences that are listed one by one; all are counted."""
MOST_LINES = 12
"""Largest number of a bin's conversations whose lines are printed."""
EVERYTHING = "every tensor to the bit"
"""What was compared where nothing was derived, cast or left out."""
NOT_FED = "not_fed"
"""Class of tensors that a dump neither has nor lets derive."""
IGNORED_LABEL = "ignored_label"
"""Class of a label that is -100 on one side alone where no side trains: another convention, which may hide a fault behind it."""
PACK_LENGTH = "pack_length"
"""Class of a dump whose rows have another length than the file was packed for."""
WHOLE = ("max_seqlen", "report", "dtype_or_shape", "refusal", NOT_FED, PACK_LENGTH)
"""Classes of what differs as a whole and not at a position."""
RULES = {
    "boundary_label": "R-BOUNDARY-1, R-SHIFT-1",
    "padding": "R-MASK-1, R-PAD-1, R-LAYOUT-2, R-LAYOUT-6",
    "role_mask": "R-TARGET-1, R-PREFIX-1, R-MASK-1",
    "mask": "R-MASK-1, R-TARGET-1",
    "shift": "R-SHIFT-1",
    "row_end": "R-LAYOUT-3, R-LAYOUT-6, R-SHIFT-1",
    "label": "R-TARGET-1, R-SHIFT-1",
    "token": "R-RENDER-1 to R-RENDER-4, R-ENCODE-1",
    "position": "R-LAYOUT-1, R-LAYOUT-2, R-LAYOUT-6",
    "boundary": "R-SPLIT-1, R-LAYOUT-2 to R-LAYOUT-6, R-CU-1",
    "max_seqlen": "R-CU-1",
    "report": "R-REPORT-1 to R-REPORT-3",
    "refusal": "#refusals, and R-TURN-1 for turns",
    "pack_length": "#row",
    "not_fed": "R-CU-1, R-LAYOUT-1",
    "ignored_label": "R-MASK-1",
    "dtype_or_shape": "#tensors",
    "other": "#targets-and-turns, #row",
}
"""Rules and headings of SPEC for a class of differences."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of the row."""

    file: str | None = None
    """The packed file or the saved case."""
    row: int | None = None
    """Its row in the packed file, from 0."""
    line: int | None = None
    """Line of the row, from 1."""
    case: bool = False
    """Whether `file` is a saved case."""
    dump: str | None = None
    """The dumped batch."""
    dump_row: int | None = None
    """The row of the batch, from 0."""
    bin: tuple[tuple[str, int], ...] = ()
    """File and line (from 1) of each conversation, where the row is a bin of the online path."""
    settings_from: Mapping[str, str] = field(default_factory=dict)
    """Source of each setting that nobody gave, by name."""

    @property
    def place(self) -> str:
        """Place of the row in its file, in unambiguous words, because rows count from 0 and lines from 1; empty without a file."""
        if self.bin:
            return _bin_in_words(self.bin)
        if self.row is None:
            return ""
        return f"row {self.row}" + ("" if self.line is None else f" (file line {self.line})")


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One side of the comparison and the row that it built."""

    name: str
    version: str
    """Version of the side's code; empty if the side does not say."""
    row: Row
    derived: tuple[str, ...] = ()
    """Tensors of the row that a dump does not have, and that were derived from its others."""
    cast: tuple[str, ...] = ()
    """Tensors of a dump that have another dtype and are compared by value."""
    not_fed: tuple[str, ...] = ()
    """Tensors that a dump neither has nor lets derive; those of the row are of one segment."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two sides, and how many differences they have."""

    left: str
    right: str
    counts: Mapping[str, Mapping[str, int]]
    """Tensor to class to count; empty if the two are equal."""
    fields: Mapping[str, tuple[object, object]]
    """The two values of each field that differs as a whole: max_seqlen, a count of the report, a shape, a refusal."""

    @property
    def total(self) -> int:
        """Number of differences of the pair."""
        return sum(count for classes in self.counts.values() for count in classes.values())


@dataclass(frozen=True, kw_only=True)
class Found:
    """One difference of two sides, with its place in the row."""

    left: str
    right: str
    tensor: str
    kind: str
    position: int | None
    """In the row; of a boundary, the position where only one side has it. None for what has no place."""
    left_value: object
    right_value: object


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings:
    """Everything that is shown about a row."""

    source: Source
    settings: RowSettings | None
    """None if only a dump is looked at."""
    tokenizer: str | None
    """Its name or folder."""
    texts: TokenTexts
    sides: tuple[Side, ...]
    map: RowMap
    """By the boundaries of the first side that built the row."""
    pairs: tuple[Pair, ...]
    listed: tuple[Found, ...]
    """The first differences over all pairs, by position, at most MOST_LISTED."""
    differing: Mapping[str, npt.NDArray[np.int64]]
    """Tensor to the sorted positions at which any two sides differ; boundaries as positions of the row."""
    flaws: Mapping[str, Sequence[Flaw]]
    """Flaws of a dump, or of any row, in itself: by side, only sides that have flaws."""
    left_out: int = 0
    """Labels of positions that no side trains and that were left out of the comparison."""

    @property
    def first(self) -> Found | None:
        """First difference over all pairs."""
        return self.listed[0] if self.listed else None

    @property
    def covered(self) -> str:
        """Return in words what was compared where nothing differs; name derived tensors and labels that were left out."""
        derived = [name for side in self.sides for name in (*side.derived, *side.not_fed)]
        cast = [name for side in self.sides for name in side.cast if name not in derived]
        if not derived and not cast and not self.left_out:
            return EVERYTHING
        told = [f"{', '.join(name for name in ROW_TENSORS if name not in (*derived, *cast))} to the bit"]
        if cast:
            told.append(f"{', '.join(cast)} by value (another dtype)")
        if derived:
            told.append(f"{', '.join(derived)} not dumped, but derived from the dump's other tensors")
        if self.left_out:
            told.append(f"labels of {self.left_out:,} positions that no side trains left out")
        return "; ".join(told)

    @property
    def letters(self) -> Mapping[str, str]:
        """Letter of each side, for narrow columns."""
        return {side.name: chr(ord("a") + number % 26) for number, side in enumerate(self.sides)}

    @property
    def built(self) -> tuple[Side, ...]:
        """The sides that built the row."""
        return tuple(side for side in self.sides if side.row.refusal is None)

    @property
    def length(self) -> int:
        """Positions of the longest built row."""
        return max((side.row.input_ids.numel() for side in self.built if side.row.input_ids is not None), default=0)

    @property
    def equal(self) -> bool:
        """True if all sides agree, and a lone dump is consistent."""
        lone_flaws = len(self.sides) == 1 and any(not f.note for flaws in self.flaws.values() for f in flaws)
        return not lone_flaws and not any(pair.counts for pair in self.pairs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Differences between the sides of a row."""

    pairs: tuple[Pair, ...]
    listed: tuple[Found, ...]
    differing: Mapping[str, npt.NDArray[np.int64]]


def compare(sides: Sequence[Side]) -> Comparison:
    """Compare each side with each other one, by `equivalence.cases.difference`, which names the classes."""
    pairs: list[Pair] = []
    listed: list[Found] = []
    places: dict[str, set[int]] = {}
    for left, right in itertools.combinations(sides, 2):
        found = _with_not_fed([_found(each, left, right) for each in compare_rows(left.row, right.row)], left, right)
        counts: dict[str, dict[str, int]] = {}
        for each in found:
            classes = counts.setdefault(each.tensor, {})
            classes[each.kind] = classes.get(each.kind, 0) + 1
            if each.position is not None:
                places.setdefault(each.tensor, set()).add(each.position)
        fields = {each.tensor: (each.left_value, each.right_value) for each in found if each.kind in WHOLE}
        pairs.append(Pair(left=left.name, right=right.name, counts=counts, fields=fields))
        listed += heapq.nsmallest(MOST_LISTED, found, key=order)
    return Comparison(
        pairs=tuple(pairs),
        listed=tuple(heapq.nsmallest(MOST_LISTED, listed, key=order)),
        differing={tensor: np.array(sorted(found), dtype=np.int64) for tensor, found in sorted(places.items())},
    )


def boundary_set(row: Row) -> set[int]:
    """Return the boundaries inside a row, without 0 and P."""
    if row.cu_seqlens is None or row.input_ids is None:
        return set()
    return {int(value) for value in row.cu_seqlens.reshape(-1)} - {0, row.input_ids.numel()}


def _bin_in_words(members: Sequence[tuple[str, int]]) -> str:
    """Describe the conversations in the order of the bin, with file names if there are several files."""
    several = len({file for file, _ in members}) > 1
    lines = [f"{file} {line}" if several else str(line) for file, line in members]
    told = ", ".join(lines[:MOST_LINES]) + (f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else "")
    return f"bin of {len(members)} (file line{'s' if len(members) > 1 else ''} {told})"


def _place(difference: Difference, left: Row, right: Row) -> int | None:
    """Return the position of a difference in the row; None if the difference has no position."""
    if difference.tensor in TOKEN_TENSORS:
        return difference.position if isinstance(difference.position, int) else None
    if difference.tensor == "cu_seqlens":
        # Entries move when one is missing: the first boundary that only one side has is what a person looks for.
        apart = boundary_set(left) ^ boundary_set(right)
        values = [value for value in (difference.left, difference.right) if isinstance(value, int)]
        inside = [value for value in values if value in apart]
        return min(inside, default=min(apart, default=None) if difference.kind == "dtype_or_shape" else None)
    return None


def other_pack_length(side: str, length: int, packed: int) -> tuple[Pair, Found]:
    """Return the difference of a dump whose rows have `length` tokens from a file that was packed for `packed`."""
    found = Found(
        left=side,
        right="manifest",
        tensor=PACK_LENGTH,
        kind=PACK_LENGTH,
        position=None,
        left_value=length,
        right_value=packed,
    )
    counts = {PACK_LENGTH: {PACK_LENGTH: 1}}
    return Pair(left=side, right="manifest", counts=counts, fields={PACK_LENGTH: (length, packed)}), found


def _with_not_fed(found: list[Found], left: Side, right: Side) -> list[Found]:
    """Replace what differs in tensors that a side was never fed by one difference that says so."""
    names = {*left.not_fed, *right.not_fed}
    if not any(each.tensor in names for each in found):
        return found
    values = ["not fed" if side.not_fed else _boundaries_in_words(side.row) for side in (left, right)]
    told = Found(
        left=left.name,
        right=right.name,
        tensor="cu_seqlens",
        kind=NOT_FED,
        position=None,
        left_value=values[0],
        right_value=values[1],
    )
    return [*(each for each in found if each.tensor not in names), told]


def _boundaries_in_words(row: Row) -> str:
    values = [] if row.cu_seqlens is None else [int(value) for value in row.cu_seqlens.reshape(-1)]
    return f"{len(values)} boundaries"


def _class_of(difference: Difference, left: Row, right: Row) -> str:
    """Return the class of a difference; a label that one side ignores where no side trains is a convention, and no fault by itself."""
    at = difference.position
    masks = [side.token_mask for side in (left, right)]
    if difference.tensor != "target_ids" or not isinstance(at, int) or None in (masks[0], masks[1]):
        return difference.kind
    ignored = IGNORE_INDEX in (difference.left, difference.right)
    untrained = all(mask is not None and at < mask.numel() and mask.reshape(-1)[at] == 0 for mask in masks)
    return IGNORED_LABEL if ignored and untrained else difference.kind


def _found(difference: Difference, left: Side, right: Side) -> Found:
    return Found(
        left=left.name,
        right=right.name,
        tensor=difference.tensor,
        kind=_class_of(difference, left.row, right.row),
        position=_place(difference, left.row, right.row),
        left_value=difference.left,
        right_value=difference.right,
    )


CAUSES = ("input_ids", "cu_seqlens", "target_ids", "token_mask", "position_ids")
"""Tensors in the order in which one explains the next at the same position: another boundary restarts positions."""


def order(found: Found) -> tuple[float, int, int]:
    """Return the sort key: a refusal first, then by position, causes before consequences, differences without a position, ignored labels."""
    if found.tensor == "refusal":
        return (-1, 0, 0)
    if found.kind == IGNORED_LABEL and found.position is not None:
        return (float("inf"), len(CAUSES) + 1, found.position)
    order = CAUSES.index(found.tensor) if found.tensor in CAUSES else len(CAUSES)
    return (float("inf") if found.position is None else found.position, order, 0)
