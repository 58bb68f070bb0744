"""Hold what an inspection found of packed files, as plain values that JSON can carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["fails", "loses", "note"]
"""`fails`: a run stops there. `loses`: a run goes on without a part of the data. `note`: a fact to know."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Holds one fact about one row that its author may not have meant."""

    kind: str
    """One word: a kind of SPEC R-FILE or section 9, or one of `row_facts.KINDS`."""
    severity: Severity
    """What a run makes of it."""
    file: str
    """The path as the user wrote it."""
    row: int
    """0-based row within its file, as `diff_row --row` takes it."""
    line: int
    """1-based line of the file."""
    conversation: int | None = None
    """0-based conversation within the row."""
    turn: int | None = None
    """0-based message within the conversation."""
    what: str
    """What is wrong, with its numbers."""
    fix: str
    """How to fix it."""
    is_unreadable: bool = False
    """Whether the line cannot be read as a row (R-FILE); `empty_row` is a kind of lines and of rows."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Holds how often values fell between edges."""

    name: str
    """What was counted."""
    unit: str
    """Unit of the values."""
    edges: tuple[float, ...]
    """[B + 1]: bin b holds values of at least edges[b] and below edges[b + 1]; the last bin holds its upper edge and all above."""
    counts: tuple[int, ...]
    """[B]: values in each bin."""
    count: int
    """Values in all."""
    total: float
    """Sum of the values."""
    least: float | None
    """The smallest value; None without values."""
    most: float | None
    """The largest value; None without values."""

    @property
    def mean(self) -> float:
        """Return the mean value; 0 without values."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, kw_only=True)
class ContextParallelFacts:
    """Holds what the begun conversations of all rows would do under one context parallel size."""

    size: int
    """cp."""
    indivisible_conversations: int
    """Conversations whose length 2·cp does not divide: each would be padded."""
    rows_with_indivisible: int
    """Rows with such a conversation."""
    padding_tokens: int
    """Tokens of padding between conversations that cp would add."""
    rows_that_lose: int
    """Rows in which a conversation would not fit whole."""
    lost_tokens: int
    """Tokens of conversations that would not fit."""


@dataclass(frozen=True, kw_only=True)
class PresetFacts:
    """Holds how the rows of one preset differ from those of the settings."""

    name: str
    """Name of the preset."""
    rows_equal: int
    """Rows with the same tensors, or with the same refusal."""
    rows_different: int
    """Rows that both build, with other tensors."""
    rows_refused: Mapping[str, int]
    """Rows that the preset refuses and the settings build, by kind of refusal."""
    rows_accepted: int
    """Rows that the settings refuse and the preset builds."""
    trained_tokens: int
    """Trained tokens of the preset less those of the settings, over rows that both build."""


@dataclass(frozen=True, kw_only=True)
class DuplicateGroup:
    """Holds one row or conversation that stands in the files more than once."""

    places: tuple[tuple[str, int, int | None], ...]
    """The first places: file, 0-based row within the file, 0-based conversation (None for a whole row)."""
    copies: int
    """How often it stands there in all."""


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Holds what stands in the files more than once."""

    distinct: int
    """Rows or conversations that are different."""
    redundant: int
    """Copies beyond the first of each."""
    groups: int
    """Rows or conversations that stand there more than once."""
    most_copied: tuple[DuplicateGroup, ...]
    """Those with the most copies, the most first."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Holds everything that `scan` found."""

    files: tuple[Mapping[str, Any], ...]
    """Name, bytes, rows and content hash (`xxh3_128`, of the unpacked bytes) of each file."""
    tokenizer: str
    """The tokenizer's folder as the user wrote it."""
    settings: Mapping[str, Any]
    """The row settings: pack_length, prompt_format, context_parallel_size, semantics, pad_token, assistant_prefix_len."""
    pad_token_id: int | None
    """Id of padding."""
    vocab_size: int
    """Ids that the model's embedding has."""
    counts: Mapping[str, int]
    """Totals by name, in rows, conversations, messages or tokens (`row_facts.COUNTS`)."""
    findings: tuple[Finding, ...]
    """The first findings of each kind, in the order of the file; `findings_by_kind` counts all."""
    findings_by_kind: Mapping[str, int]
    """Number of findings of each kind."""
    severities: Mapping[str, Severity]
    """What a run makes of each kind that was found."""
    histograms: tuple[Histogram, ...]
    """Conversation lengths, tokens of a row, fill, trained share, turns, conversations of a row."""
    context_parallel: tuple[ContextParallelFacts, ...]
    """cp 2, 4, 8, 16, 32 and 64."""
    presets: tuple[PresetFacts, ...]
    """Every published preset; empty where the comparison was not asked for."""
    duplicate_rows: Duplicates
    """Rows that stand there more than once."""
    duplicate_conversations: Duplicates
    """Conversations that stand there more than once."""
    edges: Mapping[str, tuple[int, ...]]
    """Rows near an edge by kind of edge: the first few row numbers over all files, as `open_source(files)` numbers rows."""
    worst: tuple[tuple[int, int], ...]
    """The rows that lose most: row number over all files, tokens lost; the most first."""
    notes: tuple[str, ...]
    """What must be known of all rows of this tokenizer under these settings."""
    rows_complete: bool
    """Whether every row was inspected; False where a budget ended the scan."""
    seconds: float
    """Seconds that the scan took."""
    processes: int
    """Processes that built rows."""

    @property
    def fails(self) -> bool:
        """Return whether a run would stop at a row."""
        return any(severity == "fails" for severity in self.severities.values())

    @property
    def loses(self) -> bool:
        """Return whether a run would go on without a part of the data."""
        return any(severity == "loses" for severity in self.severities.values())

    @property
    def exit_status(self) -> int:
        """Return 0 where a run would feed everything, 1 where a run would fail or lose data."""
        return 1 if self.fails or self.loses else 0

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        verdict = "fails" if self.fails else "loses" if self.loses else "good"
        return {"verdict": verdict, **dataclasses.asdict(self)}
