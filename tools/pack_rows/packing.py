"""Packs chat files into rows that Megatron-LM splits back into the same conversations; what is left out is listed."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from production.errors import PackproofError
from production.rows.token_facts import Note
from production.semantics import DEFAULT_PRESET, parse
from production.tokens.message_keys import MessageKeys
from tools.pack_rows.bins import first_fit_decreasing, sequential
from tools.pack_rows.conversations import (
    Conversation,
    InputFile,
    MiddleSystem,
    MissingSystem,
    Refusal,
    SourceLocation,
    read_conversations,
)
from tools.pack_rows.lengths import LengthMeter, Measured, PromptFormat

TOO_LONG = "too_long"
_CHUNK = 2_048
"""Conversations measured at once: enough for the tokenizer's threads, few enough to keep little in memory."""


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """Settings that decide which conversation goes into which row."""

    prompt_format: PromptFormat
    """Prompt format of the job that will read the rows; it decides the lengths and what is refused."""
    pack_length: int
    """Tokens a row has in the model."""
    semantics: str = DEFAULT_PRESET
    """Semantics of the job, a preset's name or `preset,field=value`; they decide what else is refused."""
    chat_key: str = "messages"
    """Key of the messages in the chat files."""
    context_parallel_size: int = 1
    """Context parallel size of the job; above 1 every conversation is padded to a multiple of twice this."""
    algorithm: Literal["first-fit-decreasing", "sequential"] = "first-fit-decreasing"
    """Fewest rows, or the input's order kept."""
    missing_system: MissingSystem = "insert"
    """A conversation without a system message in front: put an empty one there, or refuse it."""
    middle_system: MiddleSystem = "refuse"
    """A conversation with a system message in the middle: refuse it, or split it there."""
    on_bad: Literal["error", "skip"] = "error"
    """A refused conversation: write nothing, or leave it out."""
    on_long: Literal["error", "skip", "truncate"] = "error"
    """Handling of a conversation longer than a row: write nothing, leave it out, or let Megatron-LM cut a row of its own."""
    pad_token: str | None = None
    """Pad token of the job; None: the prompt format's. Labels of its id do not count under `padding_mask=by_value`."""
    ignore_keys: tuple[str, ...] = ()
    """Keys that say what to train, or hold text that is not rendered, and are passed over all the same; others are refused."""
    allow_format_misfit: bool = False
    """Whether to pack for a tokenizer that lacks the prompt format's markers, which are then trained as text."""
    seed: int | None = None
    """Shuffles: the conversations before packing in order, the finished rows otherwise. None keeps the input's order."""

    def __post_init__(self) -> None:
        """Refuse what no row can have, and what no job takes."""
        if self.on_long == "truncate" and parse(self.semantics).lost_conversations == "refuse":
            raise PackproofError(
                what=f"rows that are cut are refused by the semantics {self.semantics}",
                where="on_long",
                mend="choose skip or error, or semantics with lost_conversations=allow",
            )
        if self.pack_length < 1:
            raise PackproofError(
                what=f"it is {self.pack_length}, and a row needs a token", where="pack_length", mend="make it 1 or more"
            )
        if self.context_parallel_size < 1:
            raise PackproofError(
                what=f"it is {self.context_parallel_size}", where="context_parallel_size", mend="make it 1 or more"
            )
        if self.pack_length % self.granularity:
            raise PackproofError(
                what=f"{self.pack_length} is not a multiple of {self.granularity}, twice the context parallel size, so "
                "rows cannot be cut for it",
                where="pack_length",
                mend=f"use {-(-self.pack_length // self.granularity) * self.granularity}",
            )

    @property
    def granularity(self) -> int:
        """Multiple to which each conversation is padded."""
        return 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size


@dataclass(frozen=True, kw_only=True)
class PackedConversation:
    """A conversation in a row; its text is kept as JSON, which is a fraction of the objects' size."""

    place: SourceLocation
    """Place in the input."""
    json: str
    """Its messages as they will be written, without the brackets around them."""
    messages: int
    """Its messages."""
    system_inserted: bool
    """Whether its system message was put there, empty."""
    measured: Measured
    """Its size."""
    padded: int
    """Tokens it takes in the row, padding for context parallelism included."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Rows, and what is not in them."""

    settings: PackSettings
    """Settings with which the rows were packed."""
    inputs: tuple[InputFile, ...]
    """The files, with their hashes and what was counted in them."""
    tokenizer: Path
    """The tokenizer's folder."""
    vocab_size: int
    """Ids in its vocabulary."""
    notes: tuple[Note, ...]
    """Facts about the rows that do not depend on their contents."""
    conversations: int
    """Conversations read, pieces of split ones counted each; refused lines count as one."""
    rows: tuple[tuple[PackedConversation, ...], ...]
    """The rows."""
    refused: tuple[Refusal, ...]
    """Conversations that no row holds, in the order read."""

    @property
    def failures(self) -> tuple[Refusal, ...]:
        """Refusals that the settings treat as errors: with any of them nothing is written."""
        asked = {True: self.settings.on_long, False: self.settings.on_bad}
        return tuple(refusal for refusal in self.refused if asked[refusal.kind == TOO_LONG] == "error")

    def counts(self) -> dict[str, int]:
        """Return the counts of the rows by name, in rows, conversations or tokens (R-COUNT-1)."""
        length = self.settings.pack_length
        packed = [conversation for row in self.rows for conversation in row]
        fills = [sum(conversation.padded for conversation in row) for row in self.rows]
        cut = [conversation for conversation in packed if conversation.padded > length]
        tokens = sum(conversation.measured.tokens for conversation in packed)
        trained = [[_trained(conversation, place) for place, conversation in enumerate(row)] for row in self.rows]
        return {
            "conversations_read": self.conversations,
            "conversations_packed": len(packed),
            "conversations_refused": len(self.refused),
            "conversations_truncated": len(cut),
            "conversations_that_train_nothing": sum(not count for row in trained for count in row),
            "conversations_split_at_a_system_message": sum(file.split for file in self.inputs),
            "empty_system_messages_inserted": sum(conversation.system_inserted for conversation in packed),
            "messages_packed": sum(conversation.messages for conversation in packed),
            "messages_that_render_to_nothing": sum(conversation.measured.silent_messages for conversation in packed),
            "messages_that_lose_think_switches": sum(conversation.measured.removed_switches for conversation in packed),
            "control_tokens_in_contents": sum(conversation.measured.control_tokens for conversation in packed),
            "prompt_messages_trained": sum(conversation.measured.prompt_messages for conversation in packed),
            "rows": len(self.rows),
            "rows_that_train_nothing": sum(not any(row) for row in trained),
            "row_tokens": length * len(self.rows),
            "conversation_tokens": tokens,
            "trained_tokens": sum(map(sum, trained)),
            "labels_masked_as_padding": sum(conversation.measured.masked_as_padding for conversation in packed),
            "truncated_tokens": sum(conversation.measured.tokens - length for conversation in cut),
            "context_parallel_padding": sum(conversation.padded for conversation in packed) - tokens,
            "tail_padding": sum(max(length - fill, 0) for fill in fills),
            "longest_conversation": max((conversation.measured.tokens for conversation in packed), default=0),
            "most_conversations_in_a_row": max(map(len, self.rows), default=0),
        }

    def refused_by_kind(self) -> Counter[str]:
        """Return how many conversations were refused under each name."""
        return Counter(refusal.kind for refusal in self.refused)


def pack_files(inputs: Sequence[Path], tokenizer: Path, settings: PackSettings) -> Packing:
    """Pack the chat files `inputs`; deterministic, so the same files, tokenizer and settings give the same rows.

    Raises PackproofError for a tokenizer or a file of no use and OSError for a file that cannot be read. Conversations
    are never left out in silence: each is in `rows` exactly once or in `refused`.
    """
    resolved = [Path(path).resolve() for path in inputs]
    if twice := [path.name for path, count in Counter(resolved).items() if count > 1]:
        raise PackproofError(
            what="the file is given twice, so its conversations would be packed twice",
            where=twice[0],
            mend="give it once",
        )
    meter = LengthMeter(
        tokenizer,
        settings.prompt_format,
        settings.semantics,
        pack_length=settings.pack_length,
        allow_format_misfit=settings.allow_format_misfit,
        ignore_keys=settings.ignore_keys,
        pad_token=settings.pad_token,
    )
    files = tuple(InputFile(path=Path(path)) for path in inputs)
    accepted: list[PackedConversation] = []
    refused: list[Refusal] = []
    total = 0
    for chunk in itertools.batched(_read(files, settings, meter.keys), _CHUNK):
        total += len(chunk)
        for outcome in _measure(chunk, meter, settings):
            if isinstance(outcome, Refusal):
                refused.append(outcome)
            else:
                accepted.append(outcome)
    return Packing(
        settings=settings,
        inputs=files,
        tokenizer=tokenizer,
        vocab_size=meter.vocab_size,
        notes=meter.notes,
        conversations=total,
        rows=tuple(_rows(accepted, settings)),
        refused=tuple(refused),
    )


def row_line(row: Iterable[PackedConversation]) -> bytes:
    r"""Return a row as its line: raw UTF-8, ended by `\n`."""
    return f'{{"messages": [{", ".join(conversation.json for conversation in row)}]}}\n'.encode()


def _trained(conversation: PackedConversation, place: int) -> int:
    """Count a conversation's labels that train in its row: the first token is a label only behind another conversation (R-SHIFT-1)."""
    return conversation.measured.trained + (conversation.measured.trained_first if place else 0)


def _read(files: Sequence[InputFile], settings: PackSettings, keys: MessageKeys) -> Iterator[Conversation | Refusal]:
    for index, file in enumerate(files):
        yield from read_conversations(
            file,
            index,
            chat_key=settings.chat_key,
            missing_system=settings.missing_system,
            middle_system=settings.middle_system,
            keys=keys,
        )


def _measure(
    chunk: Sequence[Conversation | Refusal], meter: LengthMeter, settings: PackSettings
) -> Iterator[PackedConversation | Refusal]:
    sizes = iter(meter.measure([item for item in chunk if isinstance(item, Conversation)]))
    for item in chunk:
        if isinstance(item, Refusal):
            yield item
            continue
        size = next(sizes)
        if isinstance(size, Refusal):
            yield size
            continue
        padded = -(-size.tokens // settings.granularity) * settings.granularity
        if padded > settings.pack_length and settings.on_long != "truncate":
            yield Refusal(
                place=item.place,
                kind=TOO_LONG,
                detail=f"the conversation has {size.tokens} tokens and a row {settings.pack_length}; shorten it, raise "
                "the pack length, or choose --on-long skip or truncate",
            )
            continue
        yield PackedConversation(
            place=item.place,
            json=", ".join(json.dumps(message, ensure_ascii=False) for message in item.messages),
            messages=len(item.messages),
            system_inserted=item.system_inserted,
            measured=size,
            padded=padded,
        )


def _rows(accepted: Sequence[PackedConversation], settings: PackSettings) -> Iterator[tuple[PackedConversation, ...]]:
    # A conversation that Megatron-LM will cut fills its row: in a row with others it would cost them, too.
    lengths = [min(conversation.padded, settings.pack_length) for conversation in accepted]
    rank = list(range(len(accepted)))
    if settings.seed is not None:
        # By a hash and not by random.shuffle, whose order no Python version has promised.
        rank = [_shuffle_key(settings.seed, index) for index in range(len(accepted))]
    if settings.algorithm == "sequential":
        order = sorted(range(len(accepted)), key=rank.__getitem__)
        bins = [[order[i] for i in bin_] for bin_ in sequential([lengths[i] for i in order], settings.pack_length)]
    else:
        bins = first_fit_decreasing(lengths, settings.pack_length)
        # Longest first would train long rows first: within a row and among rows the order is the input's.
        bins = sorted((sorted(bin_, key=rank.__getitem__) for bin_ in bins), key=lambda bin_: rank[bin_[0]])
    for bin_ in bins:
        yield tuple(accepted[i] for i in bin_)


def _shuffle_key(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=16).digest())
