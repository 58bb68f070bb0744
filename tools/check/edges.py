"""Keep the rows of a file that lie near an edge of the rules, in bounded memory, and draw a sample of the others."""

from __future__ import annotations

import itertools
import random
from collections import Counter

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


class EdgeRows:
    """Collects edge rows of a scan in bounded memory: of each kind every row up to `most`, then a fair draw of them."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self._most = most
        self._random = random.Random(seed)  # noqa: S311 - a draw of rows, no secret
        self.rows: dict[str, list[int]] = {}
        """Rows by edge."""
        self.counts: Counter[str] = Counter()
        """How many rows lie near each edge, kept or not."""

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
        for edge, rows in self.rows.items():
            for row in rows:
                found.setdefault(row, []).append(edge)
        return found

    def left_out(self) -> dict[str, int]:
        """Return how many rows of each edge were not kept."""
        return {edge: more for edge, count in self.counts.items() if (more := count - len(self.rows.get(edge, ()))) > 0}


def spread(rows: int, count: int, seed: int = 0) -> list[int]:
    """Return at most `count` rows spread over a file of `rows` rows: one drawn from each of as many equal stretches."""
    if count >= rows:
        return list(range(rows))
    draw = random.Random(seed)  # noqa: S311 - a draw of rows, no secret
    edges = [number * rows // count for number in range(count + 1)]
    return [draw.randrange(start, end) for start, end in itertools.pairwise(edges)]
