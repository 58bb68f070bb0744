"""Check the first lines of a job's files before a run and in a dry run (SPEC R-SETUP-22, R-ONLINE-9).

The check finds files of the other path, and conversations whose tokens are not the tokens of their text. Nothing is
written: no index is built, so that a dry run can check too.
"""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from production.errors import PackproofError, RowRefused
from production.files.faults import LineError
from production.files.manifest import read_manifest
from production.files.parse import parse_record
from production.online.chat import Chat, ChatTokenizer
from production.training.config import Dataset, Job, chat_settings
from production.training.config.schema.data import CHAT, PACKED

LINES = 16
"""Lines of each file that are checked."""
_MOST_BYTES = 1 << 26
"""Bytes of the first lines that are checked at most: a packed row has at most some megabytes."""


@dataclass(kw_only=True)
class FirstLines:
    """Holds the refusals and notes of the check."""

    refusals: list[PackproofError] = field(default_factory=list)
    """Reasons why the job must not run."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user of a job that may run."""


def look(job: Job, tokenizer: Any | None) -> FirstLines:
    """Check every file of the job. Without a tokenizer no conversation is tokenized; unreadable files are passed
    over.
    """
    found = FirstLines()
    for split, datasets in (("train", job.data.train), ("validation", job.data.validation)):
        for index, dataset in enumerate(datasets):
            key = f"{job.dataset_key(split, index)}.data_path"
            for path in dict.fromkeys(Path(file.path) for file in dataset.data_path):
                records = list(_records(path, dataset))
                if dataset.is_packed:
                    _look_at_rows(path, records, dataset, found)
                else:
                    _look_at_chat(path, records, dataset, f"{job.where(key)}, {path}", found)
                    if tokenizer is not None and not found.refusals:
                        _tokenize(job, dataset, tokenizer, path, records, found)
    if not job.is_packed:
        found.notes += _online_notes(job, tokenizer)
    found.notes = list(dict.fromkeys(found.notes))
    return found


def _look_at_rows(
    path: Path, records: Sequence[tuple[int, dict[str, Any]]], dataset: Dataset, found: FirstLines
) -> None:
    """Refuse a chat file on the direct path, which would train one conversation a row."""
    if len(records) > 1 and not _has_manifest(path) and not any(_is_packed(each, dataset) for _, each in records):
        found.notes.append(
            f"{path}: each of its first {len(records)} lines is one conversation, and it has no manifest of packed rows: every row will be one conversation "
            f"and padding. If it is a chat file, pack it (packproof-pack-rows), or train it on the online path (dataset_name: {CHAT})"
        )


def _look_at_chat(
    path: Path, records: Sequence[tuple[int, dict[str, Any]]], dataset: Dataset, where: str, found: FirstLines
) -> None:
    """Refuse a packed file on the online path, which would train each row as one conversation whose parts see each
    other.
    """
    packed = [line for line, record in records if _is_packed(record, dataset)]
    has_manifest = _has_manifest(path)
    if has_manifest or (packed and len(packed) == len(records)):
        why = "a manifest of packed rows lies beside it" if has_manifest else "every line has several system messages"
        found.refusals.append(
            PackproofError(
                what=f"the file is packed ({why}), and {CHAT} takes each line for one conversation",
                where=where,
                mend=f"set dataset_name to {PACKED} (the direct path), or give the chat file that it was packed from",
            )
        )
    elif packed:
        lines = ", ".join(map(str, packed))
        found.notes.append(
            f"{path}: several system messages stand in line {lines}, each of which is trained as one conversation; if "
            "they begin conversations of their own, put each on a line of its own, or train packed rows"
        )


def _tokenize(
    job: Job,
    dataset: Dataset,
    tokenizer: Any,
    path: Path,
    records: Sequence[tuple[int, dict[str, Any]]],
    found: FirstLines,
) -> None:
    """Report the first conversation whose tokens differ from those of its text; faults of single lines are the
    loader's.
    """
    chat = ChatTokenizer(tokenizer=tokenizer, settings=chat_settings(job, dataset))
    for line, record in records:
        tools = None if dataset.tool_key is None else record.get(dataset.tool_key)
        try:
            chat.check_ids(Chat(messages=record[dataset.chat_key], tools=tools))
        except RowRefused as refused:
            if refused.kind not in {"unjoined_pieces", "tools_not_rendered", "no_chat_template"}:
                continue
            turn = "" if refused.turn is None else f", message {refused.turn}"
            found.refusals.append(
                PackproofError(what=refused.what, where=f"{path}, line {line}{turn}", mend=refused.mend)
            )
            return


def _online_notes(job: Job, tokenizer: Any | None) -> Iterator[str]:
    data = job.data
    longest = data.max_input_seq_length or job.policy.max_total_sequence_length
    if data.on_long_conversation == "mask_out" and "data.on_long_conversation" not in _said(job):
        yield (
            f"a conversation of {longest} tokens or more (data.max_input_seq_length) is cut to a stub that trains nothing, as in NeMo-RL; the run says "
            "how many there were. data.on_long_conversation: refuse stops the job instead"
        )
    if tokenizer is None:
        return
    for key in ChatTokenizer(tokenizer=tokenizer, settings=chat_settings(job, data.train[0])).missing_tokens:
        name = "BOS" if key == "add_bos" else "EOS"
        yield f"data.{key} is true and the tokenizer has no {name} token: none is added, as in NeMo-RL"


def _said(job: Job) -> set[str]:
    """Return the keys that a file or an override set."""
    return {key for key, source in job.sources.items() if source.kind in {"file", "override"}}


def _is_packed(record: dict[str, Any], dataset: Dataset) -> bool:
    roles = [message["role"] for message in record[dataset.chat_key]]
    return roles.count("system") > 1


def _has_manifest(path: Path) -> bool:
    try:
        return read_manifest(path) is not None
    except PackproofError:  # there is one, of which `packed_otherwise` says what is wrong
        return True


def _records(path: Path, dataset: Dataset) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the first numbered lines up to one that is not a row: the loader names faults of files."""
    with contextlib.suppress(OSError, EOFError, zstandard.ZstdError, LineError), _opened(path) as stream:
        for line in range(1, LINES + 1):
            data = stream.readline(_MOST_BYTES)
            if not data.endswith(b"\n") and (not data or len(data) == _MOST_BYTES):
                return
            yield (
                line,
                parse_record(
                    data.removesuffix(b"\n"), chat_key=dataset.chat_key, takes_tool_calls=not dataset.is_packed
                ),
            )


def _opened(path: Path) -> BinaryIO | gzip.GzipFile | io.BufferedReader:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() in {".zst", ".zstd"}:
        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True, read_across_frames=True)
        return io.BufferedReader(reader)
    return path.open("rb")
