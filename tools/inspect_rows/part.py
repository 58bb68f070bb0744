"""Hold what was counted in one part of the files, so that parts add up to the whole in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.inspect_rows.histograms import BINS, HistogramCounter
from tools.inspect_rows.inspection import Finding, Severity

SIZES = (2, 4, 8, 16, 32, 64)
"""Context parallel sizes under which conversations are measured."""
KEPT_EDGES = 256
"""Rows that are kept of each kind of edge."""
KEPT_WORST = 10
"""Rows that are kept of those that lose most."""


@dataclass(kw_only=True)
class PresetCounter:
    """Counts how rows differ under one preset."""

    equal: int = 0
    different: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    trained_tokens: int = 0


@dataclass(kw_only=True)
class Part:
    """Counts of a run of rows."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    histograms: list[HistogramCounter] = field(default_factory=lambda: [HistogramCounter(bins) for bins in BINS])
    context_parallel: NDArray[np.int64] = field(default_factory=lambda: np.zeros((len(SIZES), 5), dtype=np.int64))
    """[sizes, 5]: indivisible conversations, rows with one, padding, rows that lose, tokens lost."""
    presets: dict[str, PresetCounter] = field(default_factory=dict)
    row_hashes: list[NDArray[Any]] = field(default_factory=list)
    """Records of `duplicates.RECORD`, a group of rows each."""
    conversation_hashes: list[NDArray[Any]] = field(default_factory=list)
    edges: dict[str, list[int]] = field(default_factory=dict)
    longest: tuple[int, int] = (-1, -1)
    """Tokens and row of the row with the most conversation tokens."""
    shortest: tuple[int, int] = (-1, -1)
    """The same of the fewest."""
    worst: list[tuple[int, int]] = field(default_factory=list)
    """Tokens lost and row, the most first."""

    def note_edge(self, kind: str, row: int) -> None:
        """Remember a row near an edge, if it is among the first of its kind."""
        rows = self.edges.setdefault(kind, [])
        if len(rows) < KEPT_EDGES and row not in rows:
            rows.append(row)

    def note_size(self, tokens: int, row: int) -> None:
        """Remember the longest and the shortest row."""
        if tokens > self.longest[0]:
            self.longest = tokens, row
        if self.shortest[1] < 0 or tokens < self.shortest[0]:
            self.shortest = tokens, row

    def note_loss(self, tokens: int, row: int) -> None:
        """Remember a row that loses, if it is among the worst."""
        self.worst = sorted([*self.worst, (tokens, row)], key=lambda each: (-each[0], each[1]))[:KEPT_WORST]

    def merge(self, other: Part) -> None:
        """Add the counts of the next part; findings and hashes are left to the caller, which may not hold all."""
        self.counts.update(other.counts)
        for own, theirs in zip(self.histograms, other.histograms, strict=True):
            own.merge(theirs)
        self.context_parallel += other.context_parallel
        for name, counter in other.presets.items():
            mine = self.presets.setdefault(name, PresetCounter())
            mine.equal += counter.equal
            mine.different += counter.different
            mine.accepted += counter.accepted
            mine.refused.update(counter.refused)
            mine.trained_tokens += counter.trained_tokens
        for kind, rows in other.edges.items():
            for row in rows:
                self.note_edge(kind, row)
        if other.longest[1] >= 0:
            self.note_size(*other.longest)
            self.note_size(*other.shortest)
        for tokens, row in other.worst:
            self.note_loss(tokens, row)


class FindingKeeper:
    """Keeps the first findings of each kind, counts all, and hands each on."""

    def __init__(self, keep: int, on_finding: Callable[[Finding], None] | None) -> None:
        self._keep = keep
        self._on_finding = on_finding
        self.kept: list[Finding] = []
        self.by_kind: Counter[str] = Counter()
        self.severities: dict[str, Severity] = {}

    def add(self, findings: list[Finding]) -> None:
        """Take findings in the order of the file."""
        for finding in findings:
            if self._on_finding is not None:
                self._on_finding(finding)
            if self.by_kind[finding.kind] < self._keep:
                self.kept.append(finding)
            self.by_kind[finding.kind] += 1
            self.severities.setdefault(finding.kind, finding.severity)
