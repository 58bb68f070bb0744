"""Check before any model is built that tokenizer, prompt formats and first rows mean what their author did (docs/spec-tokens.md
).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from production.errors import BadInput, PackproofError, RowRefused
from production.files.file_state import is_there
from production.files.head import cut_end, first_rows
from production.files.manifest import read_manifest
from production.rows.builder import RowSettings, find_pad
from production.rows.token_facts import ControlTokens, Note, removed_switches, template_notes, tokenizer_notes
from production.tokens.format_fit import MISFIT_MEND, format_misfits, misfit_text
from production.tokens.message_keys import MessageKeys
from production.tokens.prompts import FORMATS
from production.training.config import Dataset, Job, SetupRefused, row_settings
from production.training.data.tokenizer import check_tokenizer, load_tokenizer

FIRST_ROWS = 32
"""Rows of each file that are checked before a run."""


def check_tokens(job: Job, tokenizer: Any) -> tuple[Note, ...]:
    """Refuse formats that do not fit the tokenizer and first rows with keys that no row honours; return the notes on
    all rows.

    Raises SetupRefused. Rows that cannot be read are left to the run, row by row (`data.default.on_bad_row`).
    """
    for refusal in itertools.chain(_unfit(job, tokenizer), _bad_first_rows(job, tokenizer, unreadable=False)):
        raise refusal
    notes: dict[str, Note] = {}
    for _, dataset in _datasets(job):
        for note in _notes(job, dataset, tokenizer):
            notes.setdefault(note.text, note)
    return tuple(notes.values())


def dry_run_tokens(job: Job) -> tuple[list[PackproofError], list[str]]:
    """Return a run's refusals and notes on the files and the tokenizer that are on this machine. Nothing is written."""
    name = job.policy.tokenizer.name
    files = [file.path for _, dataset in _datasets(job) for file in dataset.data_path]
    if not (name and is_there(name)):
        why = f"not checked here: whether the prompt format fits the tokenizer {name}, which is not on this machine"
        return [*_bad_first_rows(job, None, unreadable=True)], [] if check_tokenizer(job) else [why]
    try:
        tokenizer = load_tokenizer(job)
    except PackproofError:
        return [], []  # told by `check_tokenizer`
    told = [note.text for note in dict.fromkeys(itertools.chain.from_iterable(
        _notes(job, dataset, tokenizer) for _, dataset in _datasets(job)
    ))]  # fmt: skip
    if any(map(is_there, files)):
        told += _counted(job, tokenizer)
    return [*_unfit(job, tokenizer), *_bad_first_rows(job, tokenizer, unreadable=True)], told


def message_keys(dataset: Dataset, settings: RowSettings, tokenizer: Any) -> MessageKeys:
    """Return the checks on the keys of a dataset's messages."""
    ignore = "ignore_keys of the dataset"
    if dataset.is_packed:
        return MessageKeys.of_format(
            settings.prompt_format, settings.semantics, tokenizer, ignored=dataset.ignore_keys, ignore=ignore
        )
    template = tokenizer.chat_template if FORMATS[settings.prompt_format].render is None else None
    return MessageKeys(
        trained_roles=("assistant",),  # whatever the format (R-ONLINE-1)
        template=template if isinstance(template, str) else None,
        ignored=dataset.ignore_keys,
        ignore=ignore,
    )


def _notes(job: Job, dataset: Dataset, tokenizer: Any) -> list[Note]:
    settings = row_settings(job, dataset)
    if dataset.is_packed:
        return tokenizer_notes(tokenizer, settings)
    misfits = _misfits(tokenizer, dataset, settings)
    found = [Note(kind="format_misfit", text=misfit_text(settings.prompt_format, misfits))] if misfits else []
    return found + (template_notes(tokenizer) if FORMATS[settings.prompt_format].render is None else [])


def _misfits(tokenizer: Any, dataset: Dataset, settings: RowSettings) -> list[str]:
    return format_misfits(
        tokenizer,
        settings.prompt_format,
        assistant_prefix_len=settings.assistant_prefix_len,
        has_prefix=dataset.is_packed,
    )


def _no_pad(tokenizer: Any, settings: RowSettings) -> str | None:
    """Return why every row would be refused for its pad token (R-PAD-1)."""
    pad = find_pad(tokenizer, settings)
    if pad.id is not None and (pad.is_known or settings.semantics.unknown_pad_token == "unk"):
        return None
    lacks = "has no pad token and no end-of-text token" if pad.token is None else f"lacks the pad token {pad.token}"
    return f"the tokenizer {lacks}, so every row is refused (no_pad_token)"


def _unfit(job: Job, tokenizer: Any) -> Iterator[SetupRefused]:
    """Return the formats that do not fit the tokenizer (R-FIT-1) and the pad tokens that the tokenizer lacks
    (R-PAD-1).
    """
    for key, dataset in _datasets(job):
        settings = row_settings(job, dataset)
        misfits = _misfits(tokenizer, dataset, settings)
        if misfits and not dataset.allow_format_misfit:
            what, at = misfit_text(settings.prompt_format, misfits), f"{key}.megatron_sft_prompt_format"
            mend = f"{MISFIT_MEND}; {key}.allow_format_misfit: true trains all the same"
            yield _refuse(job, "format_misfit", at, what, mend)
        if dataset.is_packed and (why := _no_pad(tokenizer, settings)) is not None:
            mend = "name a token that the tokenizer has, other than those that end an answer"
            yield _refuse(job, "no_pad_token", f"{key}.megatron_sft_pad_token", why, mend)


def _bad_first_rows(job: Job, tokenizer: Any, *, unreadable: bool) -> Iterator[SetupRefused]:
    """Return truncated files, and of each other file the first row with a key that no row honours or, if asked for,
    the first unreadable row.
    """
    for key, dataset in _datasets(job):
        keys = None if tokenizer is None else message_keys(dataset, row_settings(job, dataset), tokenizer)
        for file in dataset.data_path:
            if not is_there(file.path):
                continue  # told as missing
            skip = dataset.on_bad_row == "skip" or not unreadable
            fault = _cut(file.path, dataset)
            if fault is None:
                fault = _first_fault(file.path, dataset, keys, skip=skip)
                fault = fault if unreadable or isinstance(fault, RowRefused) else None
            if fault is not None:
                where = f"{fault.where} ({job.where(f'{key}.data_path')})"
                at = job.written(f"{key}.data_path")
                yield SetupRefused(kind=fault.kind, key=at, what=fault.what, where=where, mend=fault.mend)


def _cut(path: str, dataset: Dataset) -> BadInput | RowRefused | None:
    """Return why the file is incomplete: a size other than its manifest's, or an end within a row (R-FILE-13)."""
    try:
        if dataset.is_packed and Path(path).is_file():
            read_manifest(Path(path))
        return None if dataset.on_bad_row == "skip" else cut_end(path, dataset.chat_key)
    except BadInput as error:
        return error


def _first_fault(path: str, dataset: Dataset, keys: MessageKeys | None, *, skip: bool) -> BadInput | RowRefused | None:
    try:
        for line, messages in first_rows(
            path, FIRST_ROWS, dataset.chat_key, skip=skip, takes_tool_calls=not dataset.is_packed
        ):
            try:
                if keys is not None:
                    keys.check(messages)
            except RowRefused as error:
                where = f"{path}, line {line}, {error.where}"
                return RowRefused(kind=error.kind, what=error.what, where=where, mend=error.mend)
    except BadInput as error:
        return error
    return None


def _counted(job: Job, tokenizer: Any) -> Iterator[str]:
    """Return notes on the contents of each file's first rows."""
    control = ControlTokens(tokenizer)
    for _, dataset in _datasets(job):
        settings = row_settings(job, dataset)
        for file in dataset.data_path:
            if not is_there(file.path):
                continue
            rows: Sequence[Any] = []
            try:
                rows = [row for _, row in first_rows(file.path, FIRST_ROWS, dataset.chat_key, skip=True)]
            except PackproofError:
                continue  # refused above
            of_first = f"{file.path}: in the first {len(rows)} rows"
            if count := sum(map(control.count, rows)):
                yield f"{of_first} {count} control tokens of the tokenizer stand in contents as text, and become the tokens themselves"  # fmt: skip
            if count := sum(removed_switches(row, settings.prompt_format) for row in rows):
                yield f"{of_first} {count} messages hold /think or /no_think, which the format takes out, also within a word"  # fmt: skip


def _datasets(job: Job) -> Iterator[tuple[str, Dataset]]:
    for split, datasets in (("train", job.data.train), ("validation", job.data.validation)):
        for index, dataset in enumerate(datasets):
            yield job.dataset_key(split, index), dataset


def _refuse(job: Job, kind: str, key: str, what: str, mend: str) -> SetupRefused:
    return SetupRefused(kind=kind, key=job.written(key), what=what, where=job.where(key), mend=mend)
