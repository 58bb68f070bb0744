"""Compare rows with those of the published presets, building a row again only where a preset could change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from production.errors import RowRefused
from production.rows.builder import BuiltRow, Row, RowBuilder, RowSettings, find_pad
from production.semantics import PRESETS, Semantics
from production.tokens.prompts import TURN_ROLES
from tools.inspect_rows.group_facts import GroupFacts
from tools.inspect_rows.part import Part, PresetCounter

_TENSORS = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens")


class PresetComparison:
    """Counts, preset by preset, which rows are the same, others, or refused."""

    def __init__(self, *, tokenizer: Any, settings: RowSettings) -> None:
        self._settings = settings
        self._knows_pad = find_pad(tokenizer, settings).is_known
        self._rebuilt: dict[tuple[str, ...], frozenset[str]] = {}
        self._builders = {
            name: RowBuilder(tokenizer=tokenizer, settings=dataclasses.replace(settings, semantics=semantics))
            for name, semantics in PRESETS.items()
        }

    def count(
        self,
        messages: Sequence[Any],
        row: BuiltRow | RowRefused,
        *,
        is_odd: bool,
        part: Part,
        number: int,
        facts: GroupFacts | None,
        index: int,
    ) -> None:
        """Count this row under every preset; `is_odd` says that turns alone are not the turns in their conversation.

        `index` is the row's place in `facts`, which a refused row does not have.
        """
        rebuilt = self._presets_that_differ(tuple(self._fields_that_matter(messages, row, facts, index, is_odd=is_odd)))
        for name in PRESETS:
            counter = part.presets.setdefault(name, PresetCounter())
            if name not in rebuilt:
                counter.equal += 1
                continue
            (other,) = self._builders[name].build_group([messages])
            _compare(row, other, counter)
            if isinstance(row, RowRefused) != isinstance(other, RowRefused):
                part.note_edge(f"{'accepted' if isinstance(row, RowRefused) else 'refused'}_by_{name}", number)

    def _presets_that_differ(self, fields: tuple[str, ...]) -> frozenset[str]:
        """Return the presets that choose otherwise than the settings in one of these fields of Semantics."""
        found = self._rebuilt.get(fields)
        if found is None:
            own = self._settings.semantics
            found = self._rebuilt[fields] = frozenset(
                name
                for name, preset in PRESETS.items()
                if any(getattr(preset, field) != getattr(own, field) for field in fields)
            )
        return found

    def _fields_that_matter(
        self, messages: Sequence[Any], row: BuiltRow | RowRefused, facts: GroupFacts | None, index: int, *, is_odd: bool
    ) -> list[str]:
        """Return the fields of Semantics that can change this row, more rather than fewer."""
        if isinstance(row, RowRefused) or facts is None:
            return [field.name for field in dataclasses.fields(Semantics)]
        length, cp = self._settings.pack_length, self._settings.context_parallel_size
        fields = []
        if self._settings.prompt_format == "identity":
            fields.append("identity_prompt")
        if self._settings.prompt_format == "default":
            fields.append("default_format")
        if is_odd:
            fields += ["turn_check", "long_assistant_prefix"]
        if facts.trains_a_first_token[index]:
            fields.append("boundary_label")
        if facts.pad_labels[index]:
            fields.append("padding_mask")
        if facts.has_empty[index]:
            fields += ["empty_conversation", "exact_fill"]
        if row.messages.count + 1 > length:
            fields.append("boundaries_beyond_pack_length")
        if not _has_plain_turns(row):
            fields.append("turn_rules")
        if messages[0]["role"] != "system" or messages[-1]["role"] != "assistant":
            fields.append("row_ends")
        if facts.meets_the_end[index]:
            fields.append("exact_fill")
        if cp > 1 and length % (2 * cp):
            fields.append("indivisible_segment")
        if row.row.report["truncated"] or row.row.report["dropped"]:
            fields.append("lost_conversations")
        if not self._knows_pad:
            fields.append("unknown_pad_token")
        return fields


def _has_plain_turns(row: BuiltRow) -> bool:
    """Return whether every role is one of the four, and every answer has a content and follows a question or a tool."""
    roles = row.messages.roles
    if not all(type(role) is str and role in TURN_ROLES for role in roles):
        return False
    starts = set(row.messages.bounds[:-1])
    for index, role in enumerate(roles):
        if role != "assistant":
            continue
        content = row.messages.messages[index].get("content")
        if not (isinstance(content, str) and content):
            return False
        if index in starts or roles[index - 1] not in ("user", "tool"):
            return False
    return True


def _compare(row: BuiltRow | RowRefused, other: Row | RowRefused, counter: PresetCounter) -> None:
    if isinstance(other, RowRefused):
        if not isinstance(row, RowRefused):
            counter.refused[other.kind] += 1
        elif row.kind == other.kind:
            counter.equal += 1
        else:
            counter.different += 1
        return
    if isinstance(row, RowRefused):
        counter.accepted += 1
        return
    mine = row.row
    if all(torch.equal(getattr(mine, name), getattr(other, name)) for name in _TENSORS):
        counter.equal += 1
        return
    counter.different += 1
    counter.trained_tokens += int(other.report["trained_tokens"] or 0) - int(mine.report["trained_tokens"] or 0)
