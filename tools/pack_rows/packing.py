"""Packs chat files into rows that Megatron-LM splits back into the same conversations; what is left out is listed."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from production.errors import PackproofError
from production.files.file_state import is_there
from production.rows.token_facts import Note
from production.tokens.fingerprint import TokenizerFingerprint
from tools.ordered_pool import OrderedPool, ProcessPool, cores
from tools.pack_rows.conversation import Refusal
from tools.pack_rows.inputs import STDIN, Chunk, InputFile, expand, read_chunks
from tools.pack_rows.layouts import layout_of
from tools.pack_rows.lengths import LengthMeter
from tools.pack_rows.measuring import TOO_LONG, ChunkMeter
from tools.pack_rows.rows import rows_of
from tools.pack_rows.settings import PackSettings
from tools.pack_rows.spool import MeasuredChunk, PackedConversation, Spool

_VERSION = 3
"""Version of what a chunk holds; a packing of another version is not gone on with."""
_FILL_BINS = 50


class Rows(Sequence[tuple[PackedConversation, ...]]):
    """The rows in their order, read from the spool one at a time."""

    def __init__(self, spool: Spool, order: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        self._spool = spool
        self.order = order
        """[N]: conversations, row after row."""
        self.starts = starts
        """[R + 1]: where each row begins in `order`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, row: int) -> tuple[PackedConversation, ...]: ...
    @overload
    def __getitem__(self, row: slice) -> list[tuple[PackedConversation, ...]]: ...
    def __getitem__(self, row: int | slice) -> Any:
        """Return the conversations of a row."""
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        number = range(len(self))[row]
        first, last = self.starts[number], self.starts[number + 1]
        return tuple(self._spool.conversation(each) for each in self.order[first:last].tolist())


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Rows, and what is not in them."""

    settings: PackSettings
    """What the rows were packed with."""
    inputs: tuple[InputFile, ...]
    """The files, with their hashes and what was counted in them."""
    tokenizer: Path
    """The tokenizer's folder."""
    fingerprint: TokenizerFingerprint
    """How the tokenizer behaves."""
    vocab_size: int
    """Ids in its vocabulary."""
    notes: tuple[Note, ...]
    """What must be known of the rows whatever stands in them."""
    conversations: int
    """Conversations read, pieces of split ones counted each; refused lines count as one."""
    rows: Rows
    """The rows."""
    refused: tuple[Refusal, ...]
    """What no row holds, in the order read."""
    spool: Spool
    """The conversations on disk."""

    @property
    def failures(self) -> tuple[Refusal, ...]:
        """Refusals that the settings treat as errors: with any of them nothing is written."""
        asked = {True: self.settings.on_long, False: self.settings.on_bad}
        return tuple(refusal for refusal in self.refused if asked[refusal.kind == TOO_LONG] in ("error", "split"))

    def counts(self) -> dict[str, int]:
        """Return the counts of the rows by name, in rows, conversations or tokens (R-COUNT-1)."""
        return self._counted[0]

    def fill(self) -> dict[str, list[float]]:
        """Return the histogram of the share of each row that conversation tokens take: edges and counts."""
        edges = [part / _FILL_BINS for part in range(_FILL_BINS + 1)]
        places = np.clip(np.searchsorted(edges, self._counted[1], side="right") - 1, 0, _FILL_BINS - 1)
        return {"edges": edges, "counts": np.bincount(places, minlength=_FILL_BINS).tolist()}

    def refused_by_kind(self) -> Counter[str]:
        """Return how many conversations were refused under each name."""
        return Counter(refusal.kind for refusal in self.refused)

    @functools.cached_property
    def _counted(self) -> tuple[dict[str, int], NDArray[np.float64]]:
        """Return the counts, and the share of each row that is filled, from one pass over the conversations."""
        length, count = self.settings.pack_length, len(self.rows)
        row_of = np.empty(len(self.rows.order), dtype=np.int64)
        row_of[self.rows.order] = np.arange(count).repeat(np.diff(self.rows.starts))
        is_first = np.zeros(len(row_of), dtype=np.bool_)
        is_first[self.rows.order[self.rows.starts[:-1]]] = True
        filled, trained = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        sums: Counter[str] = Counter()
        longest = 0
        for number, conversation in enumerate(self.spool):
            size = conversation.measured
            labels = size.trained + (0 if is_first[number] else size.trained_first)
            row = row_of[number]
            filled[row] += min(size.tokens, length)
            trained[row] += labels
            longest = max(longest, size.tokens)
            sums["idle"] += not labels
            sums["inserted"] += conversation.system_inserted
            sums["messages"] += conversation.messages
            sums["silent"] += size.silent_messages
            sums["switches"] += size.removed_switches
            sums["control"] += size.control_tokens
            sums["prompts"] += size.prompt_messages
            sums["tokens"] += size.tokens
            sums["masked"] += size.masked_as_padding
            sums["padded"] += conversation.padded
            sums["parts"] += conversation.place.part > 0
            if conversation.padded > length:
                sums["cut"] += 1
                sums["cut tokens"] += size.tokens - length
        padded = np.add.reduceat(self.spool.padded()[self.rows.order].astype(np.int64), self.rows.starts[:-1]) if count else filled  # fmt: skip
        counts = {
            "conversations_read": self.conversations,
            "conversations_packed": len(row_of),
            "conversations_refused": len(self.refused),
            "conversations_truncated": sums["cut"],
            "conversations_that_train_nothing": sums["idle"],
            "conversations_split_at_a_system_message": sum(file.split for file in self.inputs),
            "parts_split_off_at_a_turn": sums["parts"],
            "empty_system_messages_inserted": sums["inserted"],
            "messages_packed": sums["messages"],
            "messages_that_render_to_nothing": sums["silent"],
            "messages_that_lose_think_switches": sums["switches"],
            "control_tokens_in_contents": sums["control"],
            "prompt_messages_trained": sums["prompts"],
            "rows": count,
            "rows_that_train_nothing": int(np.count_nonzero(trained == 0)),
            "row_tokens": length * count,
            "conversation_tokens": sums["tokens"],
            "trained_tokens": int(trained.sum()),
            "labels_masked_as_padding": sums["masked"],
            "truncated_tokens": sums["cut tokens"],
            "context_parallel_padding": sums["padded"] - sums["tokens"],
            "tail_padding": int(np.maximum(length - padded, 0).sum()),
            "longest_conversation": longest,
            "most_conversations_in_a_row": int(np.diff(self.rows.starts).max(initial=0)),
        }
        return counts, filled / length


def pack_files(
    inputs: Sequence[Path],
    tokenizer: Path,
    settings: PackSettings,
    *,
    processes: int | None = 1,
    work: Path | None = None,
    resume: bool = False,
    restart: bool = False,
    pool: OrderedPool | None = None,
) -> Packing:
    """Pack the chat files `inputs`; the same files, tokenizer and settings give the same rows for any number of processes, and in any `pool` that takes their place.

    `work` is a folder in which measured conversations are kept; with `resume` those that an earlier process left there
    are not measured again; with `restart` they are thrown away, and with neither they are refused. Raises PackproofError for a tokenizer or a file of no use and OSError for a file that
    cannot be read. Conversations are never left out in silence: each is in `rows` exactly once or in `refused`.
    """
    meter = LengthMeter(
        tokenizer,
        settings.prompt_format,
        settings.semantics,
        pack_length=settings.pack_length,
        allow_format_misfit=settings.allow_format_misfit,
        ignore_keys=settings.ignore_keys,
        pad_token=settings.pad_token,
    )
    files = tuple(InputFile(path=Path(path)) for path in expand([Path(path) for path in inputs]))
    is_read_once = any(file.path == STDIN for file in files)
    if resume and is_read_once:
        raise PackproofError(what="standard input cannot be read again", where="--resume", fix="write it into a file")
    spool = Spool(work, key=_key(files, meter, settings), resume=resume, restart=restart or is_read_once)
    try:
        refused, total = _measure(
            files, meter, settings, spool, pool or ProcessPool(workers=cores() if processes is None else processes)
        )
        order, starts = rows_of(
            np.minimum(spool.padded(), settings.pack_length).astype(np.int64),
            settings.pack_length,
            algorithm=settings.algorithm,
            seed=settings.seed,
        )
    except PackproofError:
        spool.remove()
        raise
    except BaseException:
        spool.close()  # measured conversations stay for --resume
        raise
    return Packing(
        settings=settings,
        inputs=files,
        tokenizer=tokenizer,
        fingerprint=meter.fingerprint,
        vocab_size=meter.vocab_size,
        notes=meter.notes,
        conversations=total,
        rows=Rows(spool, order, starts),
        refused=tuple(refused),
        spool=spool,
    )


def row_line(row: Iterable[PackedConversation]) -> bytes:
    r"""Return a row as its line: raw UTF-8, ended by `\n`."""
    return f'{{"messages": [{", ".join(conversation.json for conversation in row)}]}}\n'.encode()


def _measure(
    files: Sequence[InputFile], meter: LengthMeter, settings: PackSettings, spool: Spool, pool: OrderedPool
) -> tuple[list[Refusal], int]:
    """Measure every chunk that the spool does not hold yet; return what was refused, and the conversations read."""
    refused: list[Refusal] = []
    total = 0

    def count(chunk: MeasuredChunk) -> None:
        nonlocal total
        refused.extend(chunk.refused)
        total += chunk.conversations
        file = files[chunk.input]
        file.split += chunk.split
        file.dropped_keys.update(chunk.dropped_keys)
        file.message_keys.update(chunk.message_keys)

    chunks = _with_layouts(files, settings, read_chunks(files))
    for earlier, _ in zip(spool.earlier, chunks, strict=False):
        count(earlier)
    measure = ChunkMeter(meter, settings, files)
    for _, chunk in pool.run(measure.measure, chunks):
        spool.add(chunk)
        count(chunk)
    return refused, total


def _with_layouts(
    files: Sequence[InputFile], settings: PackSettings, chunks: Iterator[Chunk]
) -> Iterator[tuple[Chunk, str]]:
    """Yield chunks with the layout of their file, which the first line decides that can be read."""
    for chunk in chunks:
        file = files[chunk.input]
        if not file.layout:
            file.layout = settings.layout if settings.layout != "auto" else _layout(chunk, settings.chat_key)
        yield chunk, file.layout


def _layout(chunk: Chunk, chat_key: str) -> str:
    for line in chunk.lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return layout_of(record, chat_key)
    return "messages"


def _key(files: Sequence[InputFile], meter: LengthMeter, settings: PackSettings) -> dict[str, Any]:
    """Return what measured chunks depend on."""
    stamps = []
    for file in files:
        # A file that is not there is refused where it is read.
        status = file.path.stat() if file.path != STDIN and is_there(file.path) else None
        stamps.append([str(file.path), *([] if status is None else [status.st_size, status.st_mtime_ns])])
    measured = {name: value for name, value in asdict(settings).items() if name not in ("algorithm", "seed", "on_bad")}
    return {"version": _VERSION, "files": stamps, "settings": measured, "tokenizer": meter.fingerprint.digest}


__all__ = ["TOO_LONG", "PackSettings", "PackedConversation", "Packing", "Rows", "pack_files", "row_line"]
