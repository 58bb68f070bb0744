"""Count what one row holds, loses and would do elsewhere, from the row as production builds it.

The row is built once. The builder that is used compares turns exactly and refuses a prefix that is longer than its
turn; a row that passes is the same under any choice of those two fields, and a row that does not is built again as
the settings say (`SPEC` R-TURN-1, R-TURN-3).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from production.errors import BadInput, RowRefused
from production.rows.builder import BuiltRow, RowBuilder, RowSettings, find_pad
from production.rows.token_facts import ControlTokens, removed_switches
from production.tokens.message_keys import MessageKeys
from production.tokens.prompts import FORMATS
from tools.counted import counted
from tools.inspect_rows.duplicates import RECORD, hash_row
from tools.inspect_rows.group_facts import GroupFacts
from tools.inspect_rows.histograms import BINS
from tools.inspect_rows.inspection import Finding, Severity
from tools.inspect_rows.part import Part
from tools.inspect_rows.preset_facts import PresetComparison

KINDS: dict[str, tuple[Severity, str]] = {
    "truncated": ("loses", "pack fewer tokens into the row, or raise pack_length"),
    "dropped": ("loses", "pack fewer conversations into the row, or raise pack_length"),
    "unrendered": ("loses", "write the message with a role that the format renders (system, user or assistant), or take it out"),
    "control_tokens": ("note", "escape the token's text, unless the token itself is meant"),
    "removed_switches": ("note", "write the word without the slash if the model should read it"),
    "unknown_keys": ("note", "take the keys out, or write their text into the content"),
    "hidden_segments": ("note", "leave conversations without tokens out of the row"),
    "empty_conversations": ("note", "leave the conversation out"),
    "boundary_labels": ("note", "choose semantics with boundary_label=ignore if the label across a boundary should not train"),
    "pad_in_content": ("note", "name another pad token, or choose semantics with padding_mask=by_position"),
    "trains_nothing": ("note", "leave the conversation out, or give it an answer that fits into the row"),
    "row_trains_nothing": ("note", "leave the row out"),
    "outside_vocabulary": ("fails", "give the model an embedding for every id of the tokenizer (model.vocab_size)"),
}  # fmt: skip
"""What a run makes of each kind of finding about a row that is built, and the fix."""
COUNTS = (
    "rows", "rows_unreadable", "rows_refused", "rows_built", "conversations", "conversations_begun", "kept", "truncated", "dropped",
    "empty_conversations", "conversations_that_train_nothing", "rows_that_train_nothing", "messages", "row_tokens",
    "content_tokens", "trained_tokens", "padding_tokens", "truncated_tokens", "boundary_labels", "pad_labels",
    "pad_in_content", "hidden_segments", "unrendered_messages", "unknown_keys", "control_tokens", "removed_switches",
    "ids_outside_vocabulary", "rows_exactly_full", "rows_overfull",
)  # fmt: skip
"""The totals of an inspection. `content_tokens` and `trained_tokens` are those in rows."""
_REPORTED = (
    "kept", "truncated", "dropped", "empty_conversations", "trained_tokens", "padding_tokens", "truncated_tokens",
    "boundary_labels", "hidden_segments", "unrendered_messages", "unknown_keys",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Names a row."""

    number: int
    """Row over all files."""
    file: str
    """The path as the user wrote it."""
    row: int
    """0-based row within the file."""
    line: int
    """1-based line."""


class RowInspector:
    """Builds rows and counts what is in them into a part."""

    def __init__(
        self, *, tokenizer: Any, settings: RowSettings, keys: MessageKeys, vocab_size: int, compare_presets: bool
    ) -> None:
        exact = dataclasses.replace(settings.semantics, turn_check="exact", long_assistant_prefix="refuse")
        self._settings = settings
        self._format = FORMATS[settings.prompt_format]
        self._builder = RowBuilder(tokenizer=tokenizer, settings=dataclasses.replace(settings, semantics=exact))
        self._as_set = RowBuilder(tokenizer=tokenizer, settings=settings)
        self._keys = keys
        self._vocab_size = vocab_size
        self._pad = find_pad(tokenizer, settings)
        self._control_tokens = ControlTokens(tokenizer)
        self._presets = PresetComparison(tokenizer=tokenizer, settings=settings) if compare_presets else None

    def inspect(self, rows: Sequence[tuple[Place, list[Any] | BadInput]], part: Part) -> None:
        """Build these rows in one group and count them into the part."""
        found = self._build([messages for _, messages in rows if not isinstance(messages, BadInput)])
        whole = [row for row, _ in found if isinstance(row, BuiltRow)]
        facts = self._facts(whole) if whole else None
        built, index = iter(found), itertools.count()
        is_counted = np.zeros(len(whole), dtype=np.bool_)
        row_hashes, hashes = [], []
        for place, messages in rows:
            part.counts["rows"] += 1
            if isinstance(messages, BadInput):
                part.counts["rows_unreadable"] += 1
                fault = _finding(place, messages.kind, "fails", messages.what, messages.fix)
                part.findings.append(dataclasses.replace(fault, is_unreadable=True))
                continue
            row, is_odd = next(built)
            number = next(index) if isinstance(row, BuiltRow) else -1
            of_row, of_conversations = hash_row(messages)
            row_hashes.append((*of_row, place.number, -1))
            hashes += [(*each, place.number, conversation) for conversation, each in enumerate(of_conversations)]
            part.counts["messages"] += len(messages)
            if self._presets is not None:
                self._presets.count(messages, row, is_odd=is_odd, part=part, number=place.number, facts=facts, index=number)  # fmt: skip
            try:
                self._keys.check(messages)
            except RowRefused as error:
                row = error
            if isinstance(row, RowRefused):
                part.counts["rows_refused"] += 1
                part.note_edge(f"refused_{row.kind}", place.number)
                part.findings.append(_finding(place, row.kind, "fails", row.what, row.fix, row.conversation, row.turn))
            else:
                assert facts is not None
                is_counted[number] = True
                self._count(place, messages, row, facts, number, part)
        if facts is not None:
            self._add_sums(part, whole, facts, is_counted)
        part.row_hashes.append(np.array(row_hashes, dtype=RECORD))
        part.conversation_hashes.append(np.array(hashes, dtype=RECORD))

    def _facts(self, rows: Sequence[BuiltRow]) -> GroupFacts:
        return GroupFacts.of(
            rows, pack_length=self._settings.pack_length, pad_id=self._pad.id, vocab_size=self._vocab_size
        )

    def _build(self, rows: Sequence[list[Any]]) -> list[tuple[BuiltRow | RowRefused, bool]]:
        """Return each row or its refusal under the settings, and whether fields that no count shows may matter."""
        built: list[tuple[BuiltRow | RowRefused, bool]] = []
        for messages, row in zip(rows, self._builder.build_whole_group(rows), strict=True):
            if isinstance(row, RowRefused) and row.kind in ("turn_mismatch", "prefix_too_long"):
                built.append((self._as_set.build_whole_group([messages])[0], True))
            else:
                built.append((row, False))
        return built

    def _count(
        self, place: Place, messages: list[Any], built: BuiltRow, facts: GroupFacts, number: int, part: Part
    ) -> None:
        """Count what no array holds, and note what stands out; `number` is the row's in the group."""
        report, length = built.row.report, self._settings.pack_length
        part.note_size(int(facts.tokens[number]), place.number)
        if losses := report["truncated_tokens"]:
            part.note_loss(losses, place.number)
        if facts.is_exactly_full[number]:
            part.note_edge("exactly_full", place.number)
        if built.messages.count + 1 > length:
            part.note_edge("more_boundaries_than_tokens", place.number)
        own = facts.conversations(number)
        lengths, in_row = facts.lengths[own], facts.in_row[own]
        if facts.has_cut[number]:
            self._find_cut(place, lengths, in_row, part)
        self._find_dropped(place, built, lengths, in_row, part)
        self._find_odd_tokens(place, messages, built, facts, number, part)
        if facts.has_idle[number]:
            for conversation in np.flatnonzero((facts.trained[own] == 0) & (in_row > 0)).tolist():
                what = f"none of its {counted(int(in_row[conversation]), 'token')} in the row trains"
                self._note(part, place, "trains_nothing", what, conversation)
        if not report["trained_tokens"]:
            self._note(part, place, "row_trains_nothing", "no token of the row trains")

    def _add_sums(self, part: Part, rows: Sequence[BuiltRow], facts: GroupFacts, is_counted: NDArray[np.bool_]) -> None:
        """Add what is summed over the rows that are counted [R], and their histograms."""
        if not is_counted.any():
            return
        counts, length = part.counts, self._settings.pack_length
        kept = [row for row, wanted in zip(rows, is_counted.tolist(), strict=True) if wanted]
        reports = [row.row.report for row in kept]
        counts.update({name: sum(report[name] or 0 for report in reports) for name in _REPORTED})
        is_in = is_counted[facts.row]
        lengths, in_row, trained = facts.lengths[is_in], facts.in_row[is_in], facts.trained[is_in]
        has_tokens = in_row > 0
        conversations = np.array([row.messages.count for row in kept])
        content = facts.content[is_counted]
        counts.update(
            {
                "rows_built": len(kept),
                "conversations": int(conversations.sum()),
                "conversations_begun": len(lengths),
                "row_tokens": length * len(kept),
                "content_tokens": int(content.sum()),
                "conversations_that_train_nothing": int(np.count_nonzero((trained == 0) & has_tokens)),
                "rows_exactly_full": int(np.count_nonzero(facts.is_exactly_full[is_counted])),
                "rows_overfull": sum(bool(report["truncated"] or report["dropped"]) for report in reports),
                "rows_that_train_nothing": sum(not report["trained_tokens"] for report in reports),
                "pad_in_content": int(facts.pads[is_counted].sum()),
                "pad_labels": int(facts.pad_labels[is_counted].sum()),
                "ids_outside_vocabulary": int(facts.outside[is_counted].sum()),
            }
        )
        part.context_parallel += facts.context_parallel(is_counted)
        values = {
            "conversation_tokens": lengths,
            "row_content_tokens": facts.tokens[is_counted],
            "fill": content / length,
            "trained_share": trained[has_tokens] / in_row[has_tokens],
            "turns": np.concatenate([np.diff(row.messages.bounds) for row in kept]),
            "conversations_of_a_row": conversations,
        }
        for bins, counter in zip(BINS, part.histograms, strict=True):
            counter.add(values[bins.name])

    def _find_cut(self, place: Place, lengths: NDArray[Any], in_row: NDArray[Any], part: Part) -> None:
        for conversation in np.flatnonzero((in_row < lengths) & (in_row > 0)).tolist():
            gone = int(lengths[conversation] - in_row[conversation])
            self._note(
                part,
                place,
                "truncated",
                f"{gone:,} of its {lengths[conversation]:,} tokens {'is' if gone == 1 else 'are'} cut off",
                conversation,
            )

    def _find_dropped(
        self, place: Place, built: BuiltRow, lengths: NDArray[Any], in_row: NDArray[Any], part: Part
    ) -> None:
        count = built.messages.count
        if dropped := built.row.report["dropped"]:
            whole_gone = np.flatnonzero((in_row == 0) & (lengths > 0)).tolist()
            first = min(whole_gone[0] if whole_gone else len(lengths), count - 1)
            place_of = (
                f"conversation {first}" if dropped == 1 else f"{dropped} conversations, the first of them {first},"
            )
            self._note(
                part, place, "dropped", f"{place_of} of {count} {'is' if dropped == 1 else 'are'} not in the row", first
            )
        if number := built.row.report["unrendered_messages"]:
            self._note(part, place, "unrendered", f"the format renders nothing of the role of {counted(number, 'message')} with content")  # fmt: skip

    def _find_odd_tokens(
        self, place: Place, messages: list[Any], built: BuiltRow, facts: GroupFacts, index: int, part: Part
    ) -> None:
        counts, report = part.counts, built.row.report
        if pads := int(facts.pads[index]):
            self._note(part, place, "pad_in_content", f"the pad id {self._pad.id} stands in contents at {counted(pads, 'position')}, {facts.pad_labels[index]} of them targets")  # fmt: skip
        if outside := int(facts.outside[index]):
            self._note(
                part,
                place,
                "outside_vocabulary",
                f"{counted(outside, 'token')} with an id of {self._vocab_size} or above",
            )
        if number := self._control_tokens.count(messages):
            counts["control_tokens"] += number
            self._note(part, place, "control_tokens", f"{counted(number, 'control token')} in contents as text, which become the tokens themselves")  # fmt: skip
        if number := removed_switches(messages, self._format.name):
            counts["removed_switches"] += number
            self._note(
                part, place, "removed_switches", f"/think or /no_think is taken out of {counted(number, 'message')}"
            )
        for kind, noun, text in (
            ("unknown_keys", "message", "{} with keys beside role and content, which are not read"),
            ("hidden_segments", "segment", "{} of no token hidden behind the row's end"),
            ("empty_conversations", "conversation", "{} of no token"),
            ("boundary_labels", "label", "{} at a boundary that trains the next conversation's first token"),
        ):
            if of_kind := report[kind]:
                self._note(part, place, kind, text.format(counted(of_kind, noun)))

    def _note(self, part: Part, place: Place, kind: str, what: str, conversation: int | None = None) -> None:
        severity, fix = KINDS[kind]
        part.findings.append(_finding(place, kind, severity, what, fix, conversation))
        part.note_edge(kind, place.number)


def _finding(
    place: Place,
    kind: str,
    severity: Severity,
    what: str,
    fix: str,
    conversation: int | None = None,
    turn: int | None = None,
) -> Finding:
    return Finding(
        kind=kind, severity=severity, file=place.file, row=place.row, line=place.line,
        conversation=conversation, turn=turn, what=what, fix=fix,
    )  # fmt: skip
