"""Find the rows of a file that lie near an edge of the rules, from facts that a scan has of every row."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

EDGES = {
    "exact fill": "the row is full to the token, or one token off",
    "overfull": "a conversation is cut, or does not fit",
    "empty conversation": "a conversation renders to no token",
    "many boundaries": "there are more boundaries than the row has tokens, or segments that no boundary shows",
    "pad id in content": "a trained label is taken for padding, since the content has the pad id",
    "control token in content": "the text of a control token, such as the end of text, stands in a content",
    "merge across turns": "tokens merge across the turns of a conversation, or its turns do not add up to it",
    "indivisible segment": "2·cp does not divide a segment",
    "boundary label": "a label across a boundary trains",
    "unrendered message": "a message renders to nothing",
    "trains nothing": "no token of the row trains",
    "refused": "the job's preset refuses the row",
    "refused by one preset": "presets do not agree on whether the row may be trained",
    "longest": "it has the most tokens",
    "shortest": "it has the fewest tokens",
}
"""Kinds of edges, and what each means."""


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What a scan knows of a row."""

    row: int
    """0-based row of the dataset."""
    pack_length: int
    refusal: str = ""
    """The kind of docs/SPEC.md#refusals or R-FILE that the row is refused with; empty for a row that can be built."""
    counts: Mapping[str, int | None]
    """The report of docs/SPEC.md#report, with `control_tokens` and `labels_masked_as_padding`; empty for a refused row."""
    segments: int = 0
    is_divisible: bool = True
    """Whether 2·cp divides every segment."""

    @property
    def tokens(self) -> int:
        """Tokens of the row's own, without padding."""
        return self.pack_length - (self.counts.get("padding_tokens") or 0)


def edges_of(facts: RowFacts) -> list[str]:
    """Return the edges that a row lies near, but for those that only a comparison of all rows tells."""
    if facts.refusal:
        by_kind = {
            "turn_mismatch": "merge across turns",
            "too_many_boundaries": "many boundaries",
            "empty_conversation": "empty conversation",
            "empty_row": "empty conversation",
            "indivisible_segment": "indivisible segment",
        }
        return ["refused", *([by_kind[facts.refusal]] if facts.refusal in by_kind else [])]
    count = {name: value or 0 for name, value in facts.counts.items()}
    lost = count.get("truncated_tokens", 0)
    found = {
        "exact fill": count.get("padding_tokens", 0) <= 1 and lost <= 1,
        "overfull": bool(count.get("truncated", 0) or count.get("dropped", 0)),
        "empty conversation": count.get("empty_conversations", 0) > 0,
        "many boundaries": count.get("hidden_segments", 0) > 0 or facts.segments >= facts.pack_length,
        "pad id in content": count.get("labels_masked_as_padding", 0) > 0,
        "control token in content": count.get("control_tokens", 0) > 0,
        "indivisible segment": not facts.is_divisible,
        "boundary label": count.get("boundary_labels", 0) > 0,
        "unrendered message": count.get("unrendered_messages", 0) > 0,
        "trains nothing": not count.get("trained_tokens", 0),
    }
    return [name for name, holds in found.items() if holds]


class EdgeRows:
    """Collects edge rows of a scan in bounded memory: of each kind every row up to `most`, then a fair draw of them."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self._most = most
        self._random = random.Random(seed)  # noqa: S311 - a draw of rows, no secret
        self.rows: dict[str, list[int]] = {}
        """Rows by edge."""
        self.counts: Counter[str] = Counter()
        """How many rows lie near each edge, kept or not."""
        self._longest = self._shortest = (0, -1)

    def add(self, facts: RowFacts) -> None:
        """Take a row of the scan."""
        for edge in edges_of(facts):
            self.put(edge, facts.row)
        if not facts.refusal:
            if self._longest[1] < 0 or facts.tokens > self._longest[0]:
                self._longest = facts.tokens, facts.row
            if self._shortest[1] < 0 or facts.tokens < self._shortest[0]:
                self._shortest = facts.tokens, facts.row

    def put(self, edge: str, row: int) -> None:
        """Take a row that lies near an edge."""
        self.counts[edge] += 1
        kept = self.rows.setdefault(edge, [])
        if len(kept) < self._most:
            kept.append(row)
        elif (place := self._random.randrange(self.counts[edge])) < self._most:
            kept[place] = row

    def chosen(self) -> dict[int, list[str]]:
        """Return each collected row with its edges."""
        found: dict[int, list[str]] = {}
        ends = {"longest": self._longest[1], "shortest": self._shortest[1]}
        for edge, rows in [*self.rows.items(), *((edge, [row]) for edge, row in ends.items() if row >= 0)]:
            for row in rows:
                found.setdefault(row, []).append(edge)
        return found

    def left_out(self) -> dict[str, int]:
        """Return how many rows of each edge were not kept."""
        return {edge: more for edge, count in self.counts.items() if (more := count - len(self.rows[edge])) > 0}


def spread(rows: int, count: int, seed: int = 0) -> list[int]:
    """Return at most `count` rows spread over a file of `rows` rows: one drawn from each of as many equal stretches."""
    if count >= rows:
        return list(range(rows))
    draw = random.Random(seed)  # noqa: S311 - a draw of rows, no secret
    edges = [number * rows // count for number in range(count + 1)]
    return [draw.randrange(start, end) for start, end in itertools.pairwise(edges)]
