"""Conventions in which sound packing functions differ, and a pack with its declared conventions undone.

A convention that is declared is no difference from Megatron-LM. Every name and value is listed in CONVENTIONS.
"""

from __future__ import annotations

import difflib
from typing import Any, Mapping, Sequence

from packproof.placement import Span, expected_tokens, place
from packproof.rows import IGNORE_INDEX, ReadRow, read_pack
from packproof_subject import CONVENTIONS

MEGATRON_LM = {
    "shift": "data",
    "last_token": "kept",
    "tail": "joins",
    "pad_label": "pad",
    "pad_positions": "continue",
    "overlong": "cut",
    "row_length": "P",
    "order": "kept",
}
"""The conventions of Megatron-LM's rows, and the default of each convention."""
MEANING = {
    "shift": "who moves labels by one: `model` (a label stands at its own token, as transformers has it) or `data` (it stands at the token before)",
    "last_token": "whether a conversation's last token is an input (`kept`), or only the label of the one before (`dropped`)",
    "tail": "the padding at the end of a row: it `joins` the last segment, is a segment of its `own`, `each` padding token is one, or it is in `none`",
    "pad_label": "the label under padding: the pad id with mask 0 (`pad`), or -100 (`ignore`)",
    "pad_positions": "positions of padding: they `continue` those of the conversation, `restart` at 0, or are all `zero`",
    "overlong": "a conversation that is longer than a row: it is `cut`, `drop`ped, `split` over rows, or the call is refused (`refuse`)",
    "row_length": "positions of a row: `P`, `P+1` (the loss takes the first P), a `multiple` of something, or `ragged`",
    "order": "whether conversations stay in order (`kept`) or are `sorted`",
}
"""Each convention in one line."""


def declare(conventions: Mapping[str, str] | None) -> dict[str, str]:
    """Return all conventions: those declared, and Megatron-LM's for the others. ValueError names a word that is not known."""
    found = dict(MEGATRON_LM)
    for name, value in (conventions or {}).items():
        if name not in CONVENTIONS:
            raise ValueError(
                "no convention is called {!r}{}; known are {}".format(
                    name, _near(name, CONVENTIONS), ", ".join(CONVENTIONS)
                )
            )
        if value not in CONVENTIONS[name]:
            known = CONVENTIONS[name]
            raise ValueError(
                "convention {} cannot be {!r}{}; choose one of {}".format(
                    name, value, _near(value, known), ", ".join(known)
                )
            )
        found[name] = value
    return found


def _near(word: str, known: Any) -> str:
    near = difflib.get_close_matches(str(word), list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def normalise(
    pack: Mapping[str, Any],
    conventions: Mapping[str, str] | None,
    *,
    conversations: Sequence[Mapping[str, Sequence[Any]]],
    pack_length: int,
    pad_id: int,
    context_parallel_size: int = 1,
) -> dict[str, list[int]]:
    """Return one pack as the row that it would be under Megatron-LM's conventions, as lists of `pack_length` positions.

    The result has `input_ids`, `labels`, `mask`, and where the pack has what they need `position_ids` and `cu_seqlens`. Only what a
    declared convention decides is rewritten: labels and positions of padding, the shift, a dropped last token, the segments of the tail
    and the length. Everything else stays as the pack has it, right or wrong. Raises MalformedPackError and ValueError.
    """
    declared = declare(conventions)
    row = read_pack(pack, declared["shift"])
    spans = place([row], conversations, declared, pad_id)[0].spans
    beyond = declared["row_length"] == "P+1" and len(row.tokens) == pack_length + 1  # the last one is a label only
    columns = _Columns(row, spans, pack_length if beyond else len(row.tokens))
    added: list[int] = []
    if declared["last_token"] == "dropped":
        added = _put_last_tokens_back(columns, spans, conversations, pad_id, context_parallel_size)
    ends_row = declared["tail"] == "joins" and columns.boundaries[-1:] == [len(columns.tokens)]
    columns.fill_to(pack_length, pad_id)
    padding = columns.padding(pad_id)
    for at in range(pack_length):
        is_last = at + 1 == pack_length or padding[at + 1]
        rewritten = declared["pad_label"] == "ignore" or at in added or at >= len(row.tokens)
        if is_last and rewritten and not columns.mask[at] and columns.labels[at] == IGNORE_INDEX:
            columns.labels[at] = pad_id
    if declared["pad_positions"] != "continue" or added:
        for at in range(1, pack_length):
            if padding[at]:
                columns.positions[at] = columns.positions[at - 1] + 1
    found = {"input_ids": columns.tokens, "labels": columns.labels, "mask": columns.mask}
    if row.positions is not None:
        found["position_ids"] = columns.positions
    if row.boundaries is not None:
        last = max([at for at, owner in enumerate(columns.owner) if owner is not None], default=-1)
        kept = columns.boundaries[:-1] if ends_row else columns.boundaries
        if declared["tail"] != "joins":
            kept = [boundary for boundary in kept if boundary <= last]
        found["cu_seqlens"] = [*kept, pack_length] if kept[-1:] != [pack_length] else kept
    return found


def _put_last_tokens_back(
    columns: _Columns,
    spans: Sequence[Span],
    conversations: Sequence[Mapping[str, Sequence[Any]]],
    pad_id: int,
    size: int,
) -> list[int]:
    """Insert the last token of each conversation, with the padding that its segment then needs; return the new positions."""
    granularity = 2 * size if size > 1 else 1
    added: list[int] = []
    for number in range(len(spans) - 1, -1, -1):
        span = spans[number]
        tokens = conversations[span.conversation]["tokens"]
        if span.offset + span.length != len(expected_tokens(tokens, "dropped")):
            continue  # cut: the token is not the next one
        end = span.start + span.length
        columns.insert(end, tokens[-1], span.conversation)
        moved = 1
        if number + 1 < len(spans):
            length, gap = span.length + 1, spans[number + 1].start - end
            needed = -(-length // granularity) * granularity - length if granularity > 1 else gap
            for _ in range(gap, needed):
                columns.insert(end + 1, pad_id, None)
            for _ in range(needed, gap):
                columns.remove(end + 1)
            moved += needed - gap
        added = [each + moved for each in added] + [end]
    return added


class _Columns:
    """A row while it is rewritten, each position with the number of its conversation, or None."""

    def __init__(self, row: ReadRow, spans: Sequence[Span], length: int) -> None:
        self.tokens = row.tokens[:length]
        self.labels = row.labels[:length]
        self.mask = [int(trained) for trained in row.trained[:length]]
        self.positions = list(row.positions[:length]) if row.positions is not None else [0] * length
        self.owner: list[int | None] = [None] * length
        for span in spans:
            for at in range(span.start, min(span.start + span.length, length)):
                self.owner[at] = span.conversation
        self.boundaries = [boundary for boundary in row.boundaries or [] if boundary <= length]

    def _lists(self) -> list[list[Any]]:
        return [self.tokens, self.labels, self.mask, self.positions, self.owner]

    def insert(self, at: int, token: int, owner: int | None) -> None:
        """Insert a token that trains nothing before position `at`, and move the boundaries behind it."""
        position = self.positions[at - 1] + 1 if at else 0
        for values, value in zip(self._lists(), (token, IGNORE_INDEX, 0, position, owner)):
            values.insert(at, value)
        self.boundaries = [boundary + 1 if boundary >= at else boundary for boundary in self.boundaries]

    def remove(self, at: int) -> None:
        """Take position `at` away, and move the boundaries behind it."""
        for values in self._lists():
            del values[at]
        self.boundaries = [boundary - 1 if boundary > at else boundary for boundary in self.boundaries]

    def fill_to(self, length: int, pad_id: int) -> None:
        """Bring the row to `length` positions: pad it, or cut what lies beyond."""
        missing = max(0, length - len(self.tokens))
        last = self.positions[-1] if self.positions else -1
        self.positions += list(range(last + 1, last + 1 + missing))
        for values, value in zip(self._lists(), (pad_id, IGNORE_INDEX, 0, None, None)):
            values.extend([value] * (length - len(values)))
            del values[length:]

    def padding(self, pad_id: int) -> list[bool]:
        """[L] whether a position belongs to no conversation and holds the pad id."""
        return [owner is None and token == pad_id for owner, token in zip(self.owner, self.tokens)]
