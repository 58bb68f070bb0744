"""Turn samples into batches for the loader: packed rows of the direct path, or tokenized conversations of the online
path.

Every data-parallel rank prepares its own rows, and online the whole global batch, which is packed as one; nothing is sent between ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from production.errors import BadInput, PackproofError, RowRefused
from production.files.source import Location, PackedSource
from production.online.chat import Chat
from production.online.padded_batch import Conversation
from production.refusals import refusal
from production.rows.batch import Batch, BatchSettings, collate_checked
from production.rows.builder import GROUP_TOKENS, Row, RowBuilder, RowSettings
from production.rows.token_facts import ControlTokens, prompt_messages
from production.tokens.message_keys import MessageKeys
from production.tokens.prompts import FORMATS
from production.training.data.fingerprint import tokenizer_identity
from production.training.data.order import Sample
from production.training.data.row_cache import RowCache
from production.training.metrics.token_counts import RowCounts

Wire = Mapping[str, Any]
"""An item as sent between processes: numpy arrays and plain values by name."""


class BadRow(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A row cannot be trained on; names the row's location.

    `kind` is SPEC's (docs/SPEC.md#refusals), R-FILE's, `refused` or `unexpected`.
    """

    kind: str
    """One word for the fault."""
    file: str
    """The path as the user wrote it."""
    line: int | None
    row: int

    def __init__(self, *, kind: str, what: str, where: str, fix: str, file: str, line: int | None, row: int) -> None:
        super().__init__(what=what, where=where, fix=fix)
        self.kind = kind
        self.file = file
        self.line = line
        """1-based; None where the line is not known."""
        self.row = row
        """0-based row of the source."""


class Recipe[Item, Made](Protocol):
    """Defines how the loader prepares samples: workers call `prepare` and `to_wire`, the training process calls the
    rest.
    """

    rows: tuple[int, ...]
    """Rows of each source."""
    group: int
    """Samples that are prepared together at most."""

    def prepare(self, samples: Sequence[Sample]) -> list[Item | PackproofError]:
        """Return each sample prepared, or the error that rules the sample out.

        The outcome depends on the sample alone.
        """
        ...

    def to_wire(self, item: Item) -> Wire:
        """Return the item as numpy arrays."""
        ...

    def from_wire(self, wire: Wire) -> Item:
        """Return the item of these arrays: the inverse of `to_wire`, bit by bit."""
        ...

    def assemble(self, items: Sequence[Item], weights: Sequence[float]) -> tuple[Made, RowCounts]:
        """Return the batch of these items and its counts; an item of weight 0 only fills the batch and is not
        counted.
        """
        ...


class PackedData:
    """Prepares packed rows (the direct path): a batch is `production.rows.batch.Batch` of this rank's rows, guarded
    by R-GUARD-1.
    """

    def __init__(
        self,
        *,
        sources: Sequence[PackedSource],
        tokenizer: Any,
        settings: RowSettings,
        guards: BatchSettings,
        keys: MessageKeys | None = None,
        caches: Sequence[RowCache] = (),
    ) -> None:
        """`guards` are the job's; the number of rows is the order's affair and is not asked of a rank's share.

        `keys` refuses rows with keys that no row honours; None: nothing is asked of them. `caches` keep the rows of each source, so
        that a row is built once; they must have been opened with `row_facts` of the same source, tokenizer, settings and keys.
        """
        self.settings = settings
        self.rows = tuple(map(len, sources))
        self.group = max(1, GROUP_TOKENS // settings.pack_length)
        self._sources = tuple(sources)
        self._builder = RowBuilder(tokenizer=tokenizer, settings=settings)
        self._keys = keys
        self._control_tokens = ControlTokens(tokenizer)
        self._trains_prompts = not FORMATS[settings.prompt_format].is_masked(settings.semantics)
        self._guards = dataclasses.replace(guards, global_batch_size=None, data_parallel_size=1)
        self.caches = tuple(caches)
        """Row cache of each source; empty without one."""

    def prepare(self, samples: Sequence[Sample]) -> list[Row | PackproofError]:
        """Return the row of each sample, or a BadRow."""
        if not self.caches:
            return self._build(samples)
        stored = [self.caches[sample.source].get(sample.row) for sample in samples]
        built = iter(self._build([sample for sample, row in zip(samples, stored, strict=True) if row is None]))
        return [
            next(built) if row is None else _placed(row, self._sources, sample)
            for sample, row in zip(samples, stored, strict=True)
        ]

    def _build(self, samples: Sequence[Sample]) -> list[Row | PackproofError]:
        read = [_read(self._sources, sample, self._keys) for sample in samples]
        good = [messages for messages in read if not isinstance(messages, PackproofError)]
        try:
            built: Iterator[Row | Exception] = iter(self._builder.build_group(good))
        except Exception:  # noqa: BLE001 - each by itself says which one it is
            built = iter([self._build_alone(messages) for messages in good])
        built = map(self._counted, built, good)
        return [
            found if isinstance(found, PackproofError) else self._finished(next(built), sample)
            for found, sample in zip(read, samples, strict=True)
        ]

    def _finished(self, row: Row | Exception, sample: Sample) -> Row | PackproofError:
        """Store the row or its refusal where rows are cached, and return it with its location."""
        if self.caches and isinstance(row, Row | RowRefused):
            self.caches[sample.source].put(sample.row, row)
        return _placed(row, self._sources, sample)

    def to_wire(self, item: Row) -> Wire:
        """Return the row as numpy arrays."""
        return {
            name: value.numpy() if isinstance(value, torch.Tensor) else value
            for name, value in ((field.name, getattr(item, field.name)) for field in dataclasses.fields(item))
        }

    def from_wire(self, wire: Wire) -> Row:
        """Return the row of these arrays, without a copy."""
        fields: dict[str, Any] = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in wire.items()
        }
        return Row(**fields)

    def assemble(self, items: Sequence[Row], weights: Sequence[float]) -> tuple[Batch, RowCounts]:
        """Return the batch, a copy of the rows, with `weights` as its sample mask. Raises BatchRefused."""
        batch = collate_checked(items, self._guards)
        counts = RowCounts()
        for row, weight in zip(items, weights, strict=True):
            counts += RowCounts.of_row(row) if weight else RowCounts()
        return dataclasses.replace(batch, sample_mask=torch.tensor(list(weights), dtype=torch.float32)), counts

    def _counted(self, row: Row | Exception, messages: Sequence[Any]) -> Row | Exception:
        """Return the row with suspicious tokens counted in its report (docs/spec-tokens.md)."""
        if isinstance(row, Exception):
            return row
        masked = 0
        pad = self._builder.pad_token_id
        if self.settings.semantics.padding_mask == "by_value" and pad is not None:
            # Padding's own labels: one for each padded position, and that of the row's last.
            padding = (row.report["padding_tokens"] or 0) + 1
            masked = max(0, int(torch.count_nonzero(row.target_ids.eq(pad))) - padding)
        control = self._control_tokens.count(messages)
        more: dict[str, int | None] = {
            "control_tokens": control,
            "labels_masked_as_padding": masked,
            "prompt_messages_trained": prompt_messages(messages) if self._trains_prompts else 0,
        }
        return dataclasses.replace(row, report=row.report | more)

    def _build_alone(self, messages: Sequence[Any]) -> Row | Exception:
        try:
            return self._builder.build(messages)
        except Exception as error:  # noqa: BLE001 - named with its row by the caller
            return error


def row_facts(
    source: PackedSource, tokenizer: Any, settings: RowSettings, *, ignored: Sequence[str] = ()
) -> dict[str, Any]:
    """Return all that decides a source's rows, besides the code, as plain values: the facts of a `RowCache`.

    `ignored` are the keys of messages that are passed over (`ignore_keys`).
    """
    return {
        "source": source.fingerprint,
        "tokenizer": tokenizer_identity(tokenizer),
        "settings": msgspec.to_builtins(settings),
        "ignored": sorted(ignored),
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class ConversationBatch:
    """Holds the conversations of a whole global batch, which is packed as one (docs/SPEC.md#packing)."""

    conversations: tuple[Conversation, ...]
    """Tokenized conversations in order, not padded."""
    sample_mask: torch.Tensor
    """[conversations] float32."""

    @property
    def masked_out(self) -> int:
        """Return how many conversations were too long; those that only fill the batch are not counted."""
        return sum(
            not each.weight
            for each, counts in zip(self.conversations, self.sample_mask.tolist(), strict=True)
            if counts
        )


class ConversationData:
    """Prepares ordinary chat files, one conversation a line (the online path); each rank gets the whole global batch."""

    def __init__(
        self,
        *,
        sources: Sequence[PackedSource],
        tokenize: Callable[[Chat], Conversation],
        tokenize_many: Callable[[Sequence[Chat]], Sequence[Conversation]] | None = None,
        tool_key: str | None = None,
        group: int = 16,
        keys: MessageKeys | None = None,
    ) -> None:
        """`tokenize` takes a line, and may refuse it; `tokenize_many` gives the same for several at once, which takes a quarter less
        (`chat.ChatTokenizer.tokenize`). `tool_key` is the key of a line's tools. A conversation of no token is refused here, and so is
        one with keys that are not honoured, if `keys` are given.
        """
        self.rows = tuple(map(len, sources))
        self.group = group
        self._sources = tuple(sources)
        self._tokenize, self._tokenize_many = tokenize, tokenize_many
        self._tool_key = tool_key
        self._keys = keys

    def prepare(self, samples: Sequence[Sample]) -> list[Conversation | PackproofError]:
        """Return the conversation of each sample, or a BadRow."""
        read = [_read(self._sources, sample, self._keys, self._chat) for sample in samples]
        good = [chat for chat in read if not isinstance(chat, PackproofError)]
        made = iter(self._tokenize_all(good))
        return [
            found if isinstance(found, PackproofError) else _placed(self._checked(next(made)), self._sources, sample)
            for found, sample in zip(read, samples, strict=True)
        ]

    def to_wire(self, item: Conversation) -> Wire:
        """Return the conversation as numpy arrays."""
        return {"token_ids": item.token_ids.numpy(), "token_mask": item.token_mask.numpy(), "weight": item.weight}

    def from_wire(self, wire: Wire) -> Conversation:
        """Return the conversation of these arrays, without a copy."""
        return Conversation(
            token_ids=torch.from_numpy(wire["token_ids"]),
            token_mask=torch.from_numpy(wire["token_mask"]),
            weight=wire["weight"],
        )

    def assemble(self, items: Sequence[Conversation], weights: Sequence[float]) -> tuple[ConversationBatch, RowCounts]:
        """Return the global batch; padding and attention cost are only known once the batch is packed, and are 0
        here.
        """
        counted = [item for item, weight in zip(items, weights, strict=True) if weight]
        counts = RowCounts(
            rows=len(counted),
            tokens=sum(len(item.token_ids) for item in counted),
            # The first token is no target.
            trained_tokens=sum(int(item.token_mask[1:].sum()) for item in counted if item.weight),
        )
        mask = torch.tensor(list(weights), dtype=torch.float32)
        return ConversationBatch(conversations=tuple(items), sample_mask=mask), counts

    def _chat(self, source: PackedSource, row: int) -> Chat:
        record = source.record(row)
        tools = None if self._tool_key is None else record.get(self._tool_key)
        return Chat(messages=record[source.chat_key], tools=tools)

    def _tokenize_all(self, rows: Sequence[Chat]) -> Sequence[Conversation | Exception]:
        if self._tokenize_many is not None:
            with contextlib.suppress(Exception):  # each by itself says which one it is
                return self._tokenize_many(rows)
        return [self._tokenize_alone(chat) for chat in rows]

    def _tokenize_alone(self, chat: Chat) -> Conversation | Exception:
        try:
            return self._tokenize(chat)
        except Exception as error:  # noqa: BLE001 - named with its row by the caller
            return error

    def _checked(self, conversation: Conversation | Exception) -> Conversation | Exception:
        if isinstance(conversation, Exception):
            return conversation
        if not len(conversation.token_ids):
            what = (
                "it renders to no token"
                if conversation.weight
                else "it is too long, and has more messages than it may have tokens"
            )
            return refusal("empty_conversation", what, conversation=0)
        return conversation


def _messages(source: PackedSource, row: int) -> Any:
    return source[row]


def _read(
    sources: Sequence[PackedSource],
    sample: Sample,
    keys: MessageKeys | None,
    take: Callable[[PackedSource, int], Any] = _messages,
) -> Any:
    """Return what `take` makes of a row's messages, or a BadRow."""
    try:
        taken = take(sources[sample.source], sample.row)
        if keys is not None:
            keys.check(taken.messages if isinstance(taken, Chat) else taken)
        return taken  # noqa: TRY300 - what follows places errors
    except BadInput as error:
        return BadRow(
            kind=error.kind,
            what=error.what,
            where=f"{error.where} (row {sample.row})",
            fix=error.fix,
            file=error.file,
            line=error.line,
            row=sample.row,
        )
    except Exception as error:  # noqa: BLE001 - with its place it can be looked into
        return _placed(error, sources, sample)


def _placed[Item](found: Item | Exception, sources: Sequence[PackedSource], sample: Sample) -> Item | PackproofError:
    """Return the item, or the error together with its location."""
    if not isinstance(found, Exception):
        return found
    place: Location | None = None
    try:
        place = sources[sample.source].locate(sample.row)
        where = f"{place.file}, line {place.line} (row {sample.row})"
    except Exception as error:  # noqa: BLE001 - the first fault is the one to tell
        where = f"source {sample.source}, row {sample.row} (its line cannot be found: {error})"
    if isinstance(found, RowRefused):
        kind, what, where, fix = found.kind, found.what, f"{where}, {found.where}", found.fix
    elif isinstance(found, PackproofError):
        kind, what, where, fix = "refused", found.what, f"{where}, {found.where}", found.fix
    else:
        kind, what = "unexpected", f"{type(found).__name__}: {found}"
        fix = "leave the row out if it is damaged; if it is not, this is a fault of packproof or of the tokenizer"
    line = None if place is None else place.line
    file = f"source {sample.source}" if place is None else place.file
    return BadRow(kind=kind, what=what, where=where, fix=fix, file=file, line=line, row=sample.row)
