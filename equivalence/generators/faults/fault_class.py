"""A fault class: what can go wrong with a row, how to draw one that has it, and how to tell that one has.

A class is aimed at by its edit and counted by its detector, which looks at the case and the outcome, never at the aim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from equivalence.generators.drafts import MEGATRON, Draft
from equivalence.generators.row_facts import Facts
from equivalence.subjects import PROMPT_FORMATS, Row

NANO, ALIGNED, IDENTITY, DEFAULT = PROMPT_FORMATS
NEMOTRON = (NANO, ALIGNED)

Edit = Callable[[Draft], None]
Hits = Callable[[Facts, Row], bool]


@dataclass(frozen=True, kw_only=True)
class FaultClass:
    """One way in which a row can be hard to build."""

    name: str
    group: str
    """layout, roles, contents, settings, refusals or tokenizers: how the report sorts them."""
    what: str
    """In words."""
    edit: Edit
    """Makes a draft have it."""
    hits: Hits
    """Whether a case with this outcome has it."""
    not_in: Mapping[str, str] = field(default_factory=dict)
    """Formats in which it cannot occur, with the reason."""
    weight: float = 1.0
    """Share of the examples that a class usually gets; less where a row is expensive."""

    def applies(self, prompt_format: str) -> bool:
        """Return whether the class can occur in a format."""
        return prompt_format not in self.not_in


Faults = dict[str, FaultClass]
"""Fault classes by name, in the order in which they are defined."""


def fault(
    faults: Faults,
    name: str,
    group: str,
    what: str,
    *,
    hits: Hits,
    not_in: Mapping[str, str] | None = None,
    weight: float = 1.0,
) -> Callable[[Edit], Edit]:
    """Return a decorator that adds the decorated edit to `faults` as a class."""

    def add(edit: Edit) -> Edit:
        assert name not in faults, f"two fault classes are called {name}"
        faults[name] = FaultClass(
            name=name, group=group, what=what, edit=edit, hits=hits, not_in=not_in or {}, weight=weight
        )
        return edit

    return add


def built(row: Row) -> bool:
    """Return whether the row was built."""
    return row.refusal is None


def refused(row: Row, *kinds: str) -> bool:
    """Return whether the row was refused with one of these kinds."""
    return row.refusal is not None and row.refusal.kind in kinds


def looked_at(row: Row) -> bool:
    """Return whether conversations were read: the row was not refused for its format or its ends."""
    return not refused(row, "unsupported_format", "row_start", "row_end")


def undivided(draft: Draft) -> None:
    """Let the pack length be what the class needs: no context parallelism where the preset refuses a ragged segment."""
    if draft.semantics not in MEGATRON:
        draft.context_parallel_size = 1


def lenient(draft: Draft) -> None:
    """Choose a preset that accepts any first and last role of a row."""
    if draft.semantics not in MEGATRON:
        draft.semantics = draft.one_of(MEGATRON)


def at_least(draft: Draft, count: int) -> None:
    """Raise the number of conversations to `count` by repeating the last."""
    while len(draft.conversations) < count:
        last = draft.conversations[-1] if draft.conversations else [{"role": "system", "content": "w0"}]
        draft.conversations.append([dict(m) if isinstance(m, dict) else m for m in last])
