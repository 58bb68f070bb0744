"""Collect the result of a case for each level while the case is judged: misses, exercised levels, levels that cannot be shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Sequence

from packproof.cases import Case
from packproof.placement import PlacedRow, Span

Conventions = Mapping[str, str]


@dataclass(frozen=True)
class Refused:
    """The outcome of a call that was refused, or that raised."""

    reason: str


@dataclass(frozen=True)
class Miss:
    """The first place at which a case misses a level."""

    level: str
    what: str
    """One sentence: what was found where, and what the level wants."""
    pack: int | None = None
    position: int | None = None


@dataclass
class Verdict:
    """Holds the result of one case for each level."""

    exercised: list[str] = field(default_factory=list)
    """Levels that the case could have shown a fault of."""
    misses: dict[str, Miss] = field(default_factory=dict)
    not_shown: dict[str, str] = field(default_factory=dict)
    """Levels that the case is about, with the field that the rows lack."""
    derived: dict[str, str] = field(default_factory=dict)
    """Levels that were judged from another field than their own, with its name."""


@dataclass
class Judged:
    """One case while one level looks at it."""

    case: Case
    rows: list[PlacedRow]
    conventions: Conventions
    preset: str
    level: str
    verdict: Verdict

    def exercise(self) -> None:
        """Count the case for the level."""
        if self.level not in self.verdict.exercised:
            self.verdict.exercised.append(self.level)

    def miss(self, what: str, pack: int | None = None, position: int | None = None) -> None:
        """Record a miss; the first one counts."""
        self.exercise()
        self.verdict.misses.setdefault(self.level, Miss(self.level, what, pack, position))

    def lacks(self, field_name: str) -> None:
        """Record that the level cannot be shown for want of a field."""
        self.verdict.not_shown.setdefault(self.level, field_name)

    def derive(self, field_name: str) -> None:
        """Record that the level was judged from this field, since the rows lack the level's own."""
        self.verdict.derived[self.level] = field_name

    def tokens(self, span: Span) -> Sequence[int]:
        """Tokens of a span's conversation."""
        return self.case.conversations[span.conversation]["tokens"]

    def trains(self, span: Span, at: int) -> bool:
        """Return whether token `at` of a span's conversation counts as a label."""
        return bool(self.case.conversations[span.conversation]["trained"][at])

    def inputs(self, conversation: int) -> int:
        """Count the tokens of a conversation that are inputs."""
        dropped = self.conventions["last_token"] == "dropped"
        return max(0, len(self.case.conversations[conversation]["tokens"]) - dropped)

    def is_overlong(self, conversation: int) -> bool:
        """Return whether a conversation does not fit into a row alone."""
        granularity = self.case.granularity
        return -(-self.inputs(conversation) // granularity) * granularity > self.case.pack_length
