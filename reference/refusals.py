"""Define the refusal of a row: its kind, place and fix (docs/SPEC.md#refusals)."""

from __future__ import annotations


class RowRefused(ValueError):  # noqa: N818 - a refusal is a result, not a fault of the program
    """The rules refuse this row. `kind` is one of SPEC's kinds; the place is given where there is one."""

    def __init__(self, kind: str, why: str, *, conversation: int | None = None, turn: int | None = None) -> None:
        where = [f"conversation {conversation}"] if conversation is not None else []
        where += [f"turn {turn}"] if turn is not None else []
        super().__init__(f"{kind}: {', '.join(where) + ': ' if where else ''}{why}")
        self.kind = kind
        self.why = why
        self.conversation = conversation
        self.turn = turn

    def at(self, conversation: int) -> RowRefused:
        """Return the same refusal with the conversation that caused it."""
        return RowRefused(self.kind, self.why, conversation=conversation, turn=self.turn)
