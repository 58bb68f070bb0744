"""Check that prompt formats, pad tokens and keys of messages fit a job's tokenizer (docs/spec-tokens.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from production.rows.builder import RowSettings, find_pad
from production.rows.token_facts import Note, template_notes, tokenizer_notes
from production.tokens.format_fit import MISFIT_FIX, format_misfits, misfit_text
from production.tokens.message_keys import MessageKeys
from production.tokens.prompts import FORMATS
from production.training.config import Dataset, Job, SetupRefused, row_settings
from production.training.data.heads import datasets


def check_fit(job: Job, tokenizer: Any) -> Iterator[SetupRefused]:
    """Yield the formats that do not fit the tokenizer (R-FIT-1) and the pad tokens that the tokenizer lacks
    (R-PAD-1).
    """
    for key, dataset in datasets(job):
        settings = row_settings(job, dataset)
        misfits = _misfits(tokenizer, dataset, settings)
        if misfits and not dataset.allow_format_misfit:
            what, at = misfit_text(settings.prompt_format, misfits), f"{key}.megatron_sft_prompt_format"
            fix = f"{MISFIT_FIX}; {key}.allow_format_misfit: true trains all the same"
            yield _refuse(job, "format_misfit", at, what, fix)
        if dataset.is_packed and (why := _no_pad(tokenizer, settings)) is not None:
            fix = "name a token that the tokenizer has, other than those that end an answer"
            yield _refuse(job, "no_pad_token", f"{key}.megatron_sft_pad_token", why, fix)


def fit_notes(job: Job, tokenizer: Any) -> tuple[Note, ...]:
    """Return the notes on the tokens of all rows, whatever the rows hold; each once."""
    notes: dict[str, Note] = {}
    for _, dataset in datasets(job):
        for note in _notes(job, dataset, tokenizer):
            notes.setdefault(note.text, note)
    return tuple(notes.values())


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


def _refuse(job: Job, kind: str, key: str, what: str, fix: str) -> SetupRefused:
    return SetupRefused(kind=kind, key=job.written(key), what=what, where=job.where(key), fix=fix)
