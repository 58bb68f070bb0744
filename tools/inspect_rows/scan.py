"""Scan packed files: build every row at production's speed in several processes, in memory that no size of file raises.

Rows are dealt in runs of a few megabytes. Each process builds its run and sends counts back; the counts are added up in
the order of the files, so that the result is the same for any number of processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from production.errors import BadInput
from production.files.file_state import FileState, check_state, is_there, state_of
from production.files.source import OnBadRow, PackedSource, open_source
from production.rows.builder import GROUP_TOKENS, RowSettings, find_pad
from production.rows.token_facts import tokenizer_notes
from production.semantics import PRESETS
from production.tokens.folder import load_folder
from production.tokens.message_keys import MessageKeys
from tools.inspect_rows.duplicates import DuplicateFinder
from tools.inspect_rows.inspection import (
    ContextParallelFacts,
    DuplicateGroup,
    Duplicates,
    Finding,
    Inspection,
    PresetFacts,
)
from tools.inspect_rows.part import KEPT_WORST, SIZES, FindingKeeper, Part
from tools.inspect_rows.row_facts import COUNTS, Place, RowInspector
from tools.ordered_pool import OrderedPool, ProcessPool, cores

type Progress = Callable[[int, int], None]
"""Called with the rows inspected so far and the rows in all."""
RUN_BYTES = 1 << 21
"""Bytes of a run of rows, about: a second of work, so that progress moves and the last run keeps nobody waiting."""
MOST_ROWS = 2_048
"""Rows of a run at most."""
KEEP = 100
"""Findings of each kind that an inspection keeps."""


@dataclass(frozen=True, kw_only=True)
class FileWatch:
    """Tells whether files are still those that they were when the watch began."""

    states: tuple[tuple[Path, FileState | None], ...]

    @classmethod
    def begin(cls, files: Sequence[str | os.PathLike[str]]) -> Self:
        """Note size, time and inode of these files; one that is not there is refused by whoever opens it."""
        paths = [Path(file) for file in files]
        return cls(states=tuple((path, state_of(path) if is_there(path) else None) for path in paths))

    def check(self) -> None:
        """Raise BadInput (`file_changed`) where a file is another one, or has another size or time."""
        for path, state in self.states:
            check_state(path, state)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Settings and tools of a process that inspects runs of rows."""

    source: PackedSource
    inspector: RowInspector
    group: int
    """Rows built together."""

    def run(self, rows_of_run: tuple[int, int]) -> Part:
        """Inspect the rows from the first number to before the second."""
        first, last = rows_of_run
        part = Part()
        for rows in itertools.batched(range(first, last), self.group):
            self.inspector.inspect([self._read(row) for row in rows], part)
        return part

    def _read(self, row: int) -> tuple[Place, list[Any] | BadInput]:
        found: list[Any] | BadInput
        try:
            found = self.source[row]
        except BadInput as error:
            if error.line is None:  # of the file as a whole: it changed, or cannot be read any more
                raise
            found = error
        location = self.source.locate(row)
        return Place(number=row, file=location.file, row=location.line - 1, line=location.line), found


def scan(
    files: Sequence[str | os.PathLike[str]],
    tokenizer: str | os.PathLike[str],
    settings: RowSettings,
    processes: int | None = None,
    progress: Progress | None = None,
    *,
    loaded: Any = None,
    chat_key: str = "messages",
    on_bad_row: OnBadRow = "error",
    ignore_keys: Sequence[str] = (),
    ignore: str = "--ignore-keys",
    vocab_size: int | None = None,
    compare_presets: bool = True,
    keep: int = KEEP,
    on_finding: Callable[[Finding], None] | None = None,
    on_redundant: Callable[[NDArray[Any]], None] | None = None,
    most_rows: int | None = None,
    budget_seconds: float | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
    pool: OrderedPool | None = None,
) -> Inspection:
    """Inspect every row of these files as a job with this tokenizer and these settings would build it.

    `processes` is the number of processes that build rows, by default the cores that this process may use; 1 forks
    none; a `pool` takes their place. `on_finding` gets every finding in order; the result keeps the first `keep` of each kind. `on_redundant` gets row
    and conversation of every copy of an earlier conversation, in order. `most_rows` and
    `budget_seconds` end a scan early (`rows_complete` is False then). `compare_presets` builds rows again where a
    preset could differ: in the format `identity` that is every row. `ignore` is the option or the key of the YAML that lists `ignore_keys`, for messages. `vocab_size` is the model's; the tokenizer's by
    default. `loaded` is the folder's tokenizer where the caller has it, with a job's own chat template. With `on_bad_row` "skip" an unreadable line is a loss, not a failure.

    Raises PackproofError for files or a tokenizer that cannot be opened, for files that change meanwhile, and where a
    process died.
    """
    started = time.monotonic()
    watch = FileWatch.begin(files)
    loaded = load_folder(Path(tokenizer)) if loaded is None else loaded
    ids = max(len(loaded), max(loaded.get_vocab().values(), default=0) + 1)
    keys = MessageKeys.of_format(settings.prompt_format, settings.semantics, loaded, ignored=ignore_keys, ignore=ignore)
    pool = pool or ProcessPool(workers=cores() if processes is None else processes)
    with open_source([os.fspath(file) for file in files], chat_key=chat_key, cache_folder=cache_folder) as source:
        inspector = RowInspector(
            tokenizer=loaded,
            settings=settings,
            keys=keys,
            vocab_size=ids if vocab_size is None else vocab_size,
            compare_presets=compare_presets,
        )
        group = max(1, GROUP_TOKENS // settings.pack_length)
        work = _Work(source=source, inspector=inspector, group=group)
        wanted = len(source) if most_rows is None else min(len(source), most_rows)
        total, done = Part(), 0
        keeper = FindingKeeper(keep, on_finding)
        with DuplicateFinder() as rows, DuplicateFinder() as conversations:
            for (_, last), part in pool.run(work.run, runs_of(source, wanted)):
                total.merge(part)
                keeper.add(_severe(part.findings, on_bad_row))
                rows.add(np.concatenate(part.row_hashes))
                conversations.add(np.concatenate(part.conversation_hashes))
                done = last
                watch.check()
                if progress is not None:
                    progress(done, wanted)
                if budget_seconds is not None and time.monotonic() - started > budget_seconds:
                    break
            watch.check()
            if on_redundant is not None:
                on_redundant(conversations.redundant())
            return Inspection(
                files=tuple(_files(source)),
                tokenizer=os.fspath(tokenizer),
                settings=_plain(settings),
                pad_token_id=find_pad(loaded, settings).id,
                vocab_size=ids if vocab_size is None else vocab_size,
                counts={name: int(total.counts[name]) for name in COUNTS},
                findings=tuple(keeper.kept),
                findings_by_kind=dict(keeper.by_kind),
                severities=dict(keeper.severities),
                histograms=tuple(counter.result() for counter in total.histograms),
                context_parallel=tuple(_context_parallel(total)),
                presets=tuple(_presets(total)) if compare_presets else (),
                duplicate_rows=_duplicates(rows, source),
                duplicate_conversations=_duplicates(conversations, source),
                edges=_edges(total),
                worst=tuple((row, tokens) for tokens, row in total.worst),
                notes=tuple(note.text for note in tokenizer_notes(loaded, settings)),
                rows_complete=done == len(source),
                seconds=time.monotonic() - started,
                processes=pool.workers,
            )


def _files(source: PackedSource) -> list[dict[str, Any]]:
    described: Any = source.describe()["files"]
    return [{key: file[key] for key in ("file", "bytes", "plain_bytes", "rows", "content")} for file in described]


def runs_of(source: PackedSource, wanted: int) -> Iterator[tuple[int, int]]:
    """Yield runs of about `RUN_BYTES` of the first `wanted` rows: the first row of each, and the row behind its last."""
    size = sum(int(file["plain_bytes"]) for file in _files(source))
    step = max(1, min(MOST_ROWS, RUN_BYTES * len(source) // max(size, 1)))
    return ((first, min(first + step, wanted)) for first in range(0, wanted, step))


def _severe(findings: Iterable[Finding], on_bad_row: OnBadRow) -> list[Finding]:
    """Return the findings; an unreadable line that a job skips is lost and stops nothing."""
    if on_bad_row == "error":
        return list(findings)
    return [dataclasses.replace(each, severity="loses") if each.is_unreadable else each for each in findings]


def _plain(settings: RowSettings) -> dict[str, Any]:
    return {**dataclasses.asdict(settings), "semantics": _name(settings)}


def _name(settings: RowSettings) -> str:
    """Return a text that is parsed to these semantics: the nearest preset and what differs."""
    asked = dataclasses.asdict(settings.semantics)
    texts: list[tuple[str, ...]] = []
    for name, preset in PRESETS.items():
        own = dataclasses.asdict(preset)
        texts.append((name, *(f"{field}={value}" for field, value in asked.items() if own[field] != value)))
    fewest = min(map(len, texts))
    return ",".join(next(text for text in texts if len(text) == fewest))


def _context_parallel(total: Part) -> Iterator[ContextParallelFacts]:
    for size, values in zip(SIZES, total.context_parallel.tolist(), strict=True):
        indivisible, rows, padding, losing, lost = values
        yield ContextParallelFacts(
            size=size,
            indivisible_conversations=indivisible,
            rows_with_indivisible=rows,
            padding_tokens=padding,
            rows_that_lose=losing,
            lost_tokens=lost,
        )


def _presets(total: Part) -> Iterator[PresetFacts]:
    for name, counter in total.presets.items():
        yield PresetFacts(
            name=name,
            rows_equal=counter.equal,
            rows_different=counter.different,
            rows_refused=dict(sorted(counter.refused.items())),
            rows_accepted=counter.accepted,
            trained_tokens=counter.trained_tokens,
        )


def _duplicates(finder: DuplicateFinder, source: PackedSource) -> Duplicates:
    distinct, redundant, groups, largest = finder.summary(KEPT_WORST)
    return Duplicates(
        distinct=distinct,
        redundant=redundant,
        groups=groups,
        most_copied=tuple(
            DuplicateGroup(
                places=tuple(
                    _place(source, int(row), int(number)) for row, number in group[["row", "conversation"]][:5]
                ),
                copies=len(group),
            )
            for group in largest
        ),
    )


def _place(source: PackedSource, row: int, conversation: int) -> tuple[str, int, int | None]:
    location = source.locate(row)
    return location.file, location.line - 1, None if conversation < 0 else conversation


def _edges(total: Part) -> dict[str, tuple[int, ...]]:
    edges = {kind: tuple(rows) for kind, rows in sorted(total.edges.items())}
    if total.longest[1] >= 0:
        edges |= {"longest": (total.longest[1],), "shortest": (total.shortest[1],)}
    return edges
