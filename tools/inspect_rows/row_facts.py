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
from production.tokens.turn_tokens import IGNORE_INDEX
from tools.counted import counted
from tools.inspect_rows.duplicates import RECORD, hash_messages
from tools.inspect_rows.histograms import BINS
from tools.inspect_rows.inspection import Finding, Severity
from tools.inspect_rows.part import SIZES, Part
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
    "ids_outside_vocabulary", "rows_exactly_full",
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
        built = iter(self._build([messages for _, messages in rows if not isinstance(messages, BadInput)]))
        row_hashes, hashes = [], []
        for place, messages in rows:
            part.counts["rows"] += 1
            if isinstance(messages, BadInput):
                part.counts["rows_unreadable"] += 1
                fault = _finding(place, messages.kind, "fails", messages.what, messages.fix)
                part.findings.append(dataclasses.replace(fault, is_unreadable=True))
                continue
            row, is_odd = next(built)
            hashes += self._hashes(place, messages)
            row_hashes.append((*hash_messages(messages), place.number, -1))
            part.counts["messages"] += len(messages)
            if self._presets is not None:
                self._presets.count(messages, row, is_odd=is_odd, part=part, number=place.number)
            try:
                self._keys.check(messages)
            except RowRefused as error:
                row = error
            if isinstance(row, RowRefused):
                part.counts["rows_refused"] += 1
                part.note_edge(f"refused_{row.kind}", place.number)
                part.findings.append(_finding(place, row.kind, "fails", row.what, row.fix, row.conversation, row.turn))
            else:
                self._count(place, messages, row, part)
        part.row_hashes = np.concatenate([part.row_hashes, np.array(row_hashes, dtype=RECORD)])
        part.conversation_hashes = np.concatenate([part.conversation_hashes, np.array(hashes, dtype=RECORD)])

    def _build(self, rows: Sequence[list[Any]]) -> list[tuple[BuiltRow | RowRefused, bool]]:
        """Return each row or its refusal under the settings, and whether fields that no count shows may matter."""
        built: list[tuple[BuiltRow | RowRefused, bool]] = []
        for messages, row in zip(rows, self._builder.build_whole_group(rows), strict=True):
            if isinstance(row, RowRefused) and row.kind in ("turn_mismatch", "prefix_too_long"):
                built.append((self._as_set.build_whole_group([messages])[0], True))
            else:
                built.append((row, False))
        return built

    def _hashes(self, place: Place, messages: list[Any]) -> list[tuple[int, int, int, int]]:
        starts = [index for index, message in enumerate(messages) if message["role"] == "system" and index]
        bounds = [0, *starts, len(messages)]
        return [
            (*hash_messages(messages[start:end]), place.number, number)
            for number, (start, end) in enumerate(itertools.pairwise(bounds))
        ]

    def _count(self, place: Place, messages: list[Any], built: BuiltRow, part: Part) -> None:
        counts, row, laid = part.counts, built.row, built.laid
        report, length = row.report, self._settings.pack_length
        counts["rows_built"] += 1
        counts["conversations"] += built.messages.count
        counts["conversations_begun"] += len(laid.lengths)
        counts["row_tokens"] += length
        counts.update({name: report[name] or 0 for name in _REPORTED})
        starts = np.concatenate([[0], laid.ends[:-1]])
        in_row = np.clip(length - starts, 0, laid.lengths)
        content = int(in_row.sum())
        counts["content_tokens"] += content
        trained = _trained_of_each(row.token_mask.numpy(), starts, in_row)
        is_idle = (trained == 0) & (in_row > 0)
        counts["conversations_that_train_nothing"] += int(is_idle.sum())
        self._add_histograms(part, built, in_row, trained, content)
        self._add_context_parallel(part, laid.lengths)
        losses = int(report["truncated_tokens"] or 0)
        part.note_size(int(laid.lengths.sum()), place.number)
        if losses:
            part.note_loss(losses, place.number)
        if len(laid.ends) and laid.ends[-1] == length:
            counts["rows_exactly_full"] += 1
            part.note_edge("exactly_full", place.number)
        if built.messages.count + 1 > length:
            part.note_edge("more_boundaries_than_tokens", place.number)
        self._find_losses(place, built, in_row, part)
        self._find_odd_tokens(place, messages, built, part)
        for conversation in np.flatnonzero(is_idle).tolist():
            what = f"none of its {counted(int(in_row[conversation]), 'token')} in the row trains"
            self._note(part, place, "trains_nothing", what, conversation)
        if not report["trained_tokens"]:
            counts["rows_that_train_nothing"] += 1
            self._note(part, place, "row_trains_nothing", "no token of the row trains")

    def _add_histograms(
        self, part: Part, built: BuiltRow, in_row: NDArray[Any], trained: NDArray[Any], content: int
    ) -> None:
        values = {
            "conversation_tokens": built.laid.lengths,
            "row_content_tokens": np.array([int(built.laid.lengths.sum())]),
            "fill": np.array([content / self._settings.pack_length]),
            "trained_share": trained[in_row > 0] / in_row[in_row > 0],
            "turns": np.diff(np.array(built.messages.bounds)),
            "conversations_of_a_row": np.array([built.messages.count]),
        }
        for bins, counter in zip(BINS, part.histograms, strict=True):
            counter.add(values[bins.name])

    def _add_context_parallel(self, part: Part, lengths: NDArray[np.int64]) -> None:
        """Lay the begun conversations out for each cp (R-LAYOUT-2, R-LAYOUT-3)."""
        multiples = 2 * np.array(SIZES)[:, None]
        padded = -(-lengths // multiples) * multiples
        ends = padded.cumsum(axis=1)
        starts = ends - padded
        lost = (lengths - np.clip(self._settings.pack_length - starts, 0, lengths)).sum(axis=1)
        indivisible = (padded != lengths).sum(axis=1)
        padding = (padded - lengths).sum(axis=1)
        part.context_parallel += np.stack([indivisible, indivisible > 0, padding, lost > 0, lost], axis=1)

    def _find_losses(self, place: Place, built: BuiltRow, in_row: NDArray[Any], part: Part) -> None:
        lengths, count = built.laid.lengths, built.messages.count
        for conversation in np.flatnonzero((in_row < lengths) & (in_row > 0)).tolist():
            gone = int(lengths[conversation] - in_row[conversation])
            self._note(
                part,
                place,
                "truncated",
                f"{gone:,} of its {lengths[conversation]:,} tokens {'is' if gone == 1 else 'are'} cut off",
                conversation,
            )
        whole_gone = np.flatnonzero((in_row == 0) & (lengths > 0)).tolist()
        first = whole_gone[0] if whole_gone else len(lengths)
        if dropped := built.row.report["dropped"]:
            first = min(first, count - 1)
            place_of = (
                f"conversation {first}" if dropped == 1 else f"{dropped} conversations, the first of them {first},"
            )
            self._note(
                part, place, "dropped", f"{place_of} of {count} {'is' if dropped == 1 else 'are'} not in the row", first
            )
        if number := built.row.report["unrendered_messages"]:
            self._note(part, place, "unrendered", f"the format renders nothing of the role of {counted(number, 'message')} with content")  # fmt: skip

    def _find_odd_tokens(self, place: Place, messages: list[Any], built: BuiltRow, part: Part) -> None:
        counts, laid, report = part.counts, built.laid, built.row.report
        is_pad = laid.tokens == self._pad.id
        if is_pad.any():
            labels = int(np.count_nonzero(is_pad & (laid.targets != IGNORE_INDEX)))
            counts["pad_in_content"] += int(is_pad.sum())
            counts["pad_labels"] += labels
            self._note(part, place, "pad_in_content", f"the pad id {self._pad.id} stands in contents at {counted(int(is_pad.sum()), 'position')}, {labels} of them targets")  # fmt: skip
        if outside := int(np.count_nonzero(laid.tokens >= self._vocab_size)):
            counts["ids_outside_vocabulary"] += outside
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


def _trained_of_each(mask: NDArray[np.float32], starts: NDArray[Any], in_row: NDArray[Any]) -> NDArray[np.int64]:
    """Return the trained labels that are tokens of each conversation: label p is token p + 1 of the row (R-SHIFT-1)."""
    sums = np.concatenate([[0], mask.astype(np.int64).cumsum()])
    first = np.clip(starts - 1, 0, len(mask))
    last = np.clip(starts + in_row - 1, 0, len(mask))
    return np.where(in_row > 0, sums[np.maximum(last, first)] - sums[first], 0)


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
