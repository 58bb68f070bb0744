"""Measure the conversations of a chunk of lines, and split those that no row could hold between their turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.counted import counted
from tools.pack_rows.chat_lines import read_conversations
from tools.pack_rows.conversation import Conversation, Refusal
from tools.pack_rows.inputs import Chunk, InputFile
from tools.pack_rows.lengths import LengthMeter, Measured
from tools.pack_rows.settings import PackSettings
from tools.pack_rows.spool import MeasuredChunk, PackedConversation, encode_record

TOO_LONG = "too_long"
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class ChunkMeter:
    """Measures chunks; processes that are forked share it."""

    meter: LengthMeter
    """Measures conversations."""
    settings: PackSettings
    """What decides what is refused."""
    files: Sequence[InputFile]
    """The input files."""

    def measure(self, task: tuple[Chunk, str]) -> MeasuredChunk:
        """Return what became of the lines of a chunk, whose file has this layout."""
        chunk, layout = task
        file = InputFile(path=self.files[chunk.input].path, layout=layout)
        found = list(
            read_conversations(
                chunk,
                file,
                chat_key=self.settings.chat_key,
                missing_system=self.settings.missing_system,
                middle_system=self.settings.middle_system,
                keys=self.meter.keys,
            )
        )
        records, padded, refused = [], [], []
        for outcome in self._outcomes(found):
            if isinstance(outcome, Refusal):
                refused.append(outcome)
            else:
                records.append(encode_record(outcome))
                padded.append(outcome.padded)
        return MeasuredChunk(
            input=chunk.input,
            lines=len(chunk.lines),
            conversations=len(found),
            records=b"".join(records),
            sizes=np.array([len(record) for record in records], dtype=np.int32).tobytes(),
            padded=np.array(padded, dtype=np.int32).tobytes(),
            refused=tuple(refused),
            split=file.split,
            dropped_keys=dict(file.dropped_keys),
            message_keys=dict(file.message_keys),
        )

    def _outcomes(self, found: Sequence[Conversation | Refusal]) -> Iterator[PackedConversation | Refusal]:
        sizes = iter(self.meter.measure([item for item in found if isinstance(item, Conversation)]))
        for item in found:
            if isinstance(item, Refusal):
                yield item
                continue
            size = next(sizes)
            if isinstance(size, Refusal):
                yield size
            elif self._padded(size) <= self.settings.pack_length or self.settings.on_long == "truncate":
                yield self._packed(item, size)
            elif self.settings.on_long == "split":
                yield from self._split(item, size)
            else:
                yield self._too_long(item, size)

    def _split(self, conversation: Conversation, size: Measured) -> list[PackedConversation | Refusal]:
        """Return the conversation in parts, each its system message and as many exchanges as a row holds.

        An exchange ends with the last answer before the next question. A conversation with an exchange that no row
        holds is refused whole: a part of it would be lost otherwise.
        """
        system, *rest = conversation.messages
        exchanges = _exchanges(rest)
        parts: list[PackedConversation | Refusal] = []
        while exchanges:
            count, fitting = len(exchanges), None
            # The largest number of exchanges that fits: measured, since tokens may merge across turns.
            low, high = 1, len(exchanges)
            while low <= high:
                count = (low + high) // 2
                part = replace(
                    conversation,
                    messages=(system, *(message for exchange in exchanges[:count] for message in exchange)),
                    place=replace(conversation.place, part=len(parts)),
                )
                (measured,) = self.meter.measure([part])
                if isinstance(measured, Refusal):
                    return [measured]
                if self._padded(measured) <= self.settings.pack_length:
                    fitting, low = (part, measured, count), count + 1
                else:
                    high = count - 1
            if fitting is None:
                return [self._too_long(conversation, size)]
            part, measured, count = fitting
            parts.append(self._packed(part, measured))
            exchanges = exchanges[count:]
        return parts

    def _padded(self, size: Measured) -> int:
        granularity = self.settings.granularity
        return -(-size.tokens // granularity) * granularity

    def _packed(self, conversation: Conversation, size: Measured) -> PackedConversation:
        return PackedConversation(
            place=conversation.place,
            json=_encode(conversation.messages)[1:-1],  # without the brackets of the list
            messages=len(conversation.messages),
            system_inserted=conversation.system_inserted,
            measured=size,
            padded=self._padded(size),
        )

    def _too_long(self, conversation: Conversation, size: Measured) -> Refusal:
        what = f"the conversation has {counted(size.tokens, 'token')} and a row {self.settings.pack_length:,}"
        if self.settings.on_long == "split":
            what += ", and one question with its answer alone is more than a row"
        detail = f"{what}; shorten it, raise the pack length, or choose {self.settings.ways_for_long}"
        return Refusal(place=conversation.place, kind=TOO_LONG, detail=detail)


def _exchanges(messages: Sequence[dict[str, object]]) -> list[list[dict[str, object]]]:
    """Return the messages in groups, each of which ends where a question follows an answer."""
    groups: list[list[dict[str, object]]] = []
    before = None
    for message in messages:
        if before is None or (before == "assistant" and message["role"] == "user"):
            groups.append([])
        groups[-1].append(message)
        before = message["role"]
    return groups
