"""Print notes on tokens of a row that its author may not have meant (docs/spec-tokens.md), to standard error beside the screen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from production import semantics
from production.errors import PackproofError, RowRefused
from production.files.head import first_rows
from production.files.manifest import read_manifest
from production.rows.builder import RowSettings
from production.rows.token_facts import (
    ControlTokens,
    chat_file_note,
    prompt_messages,
    removed_switches,
    tokenizer_notes,
)
from production.tokens.message_keys import MessageKeys
from production.tokens.prompts import FORMATS
from tools.diff_row.inputs import load_named, messages_of
from tools.diff_row.row.findings import Findings

_LOOKED_AT = 16
"""Rows that show whether a file is one of conversations."""


def token_notes(findings: Findings, chat_key: str, chat_template: str | None = None) -> list[str]:
    """Return the notes on the row of `findings`; empty for a row without a file. A chat template stands for the tokenizer's own."""
    file, number = findings.source.file, findings.source.row
    if file is None or number is None or findings.settings is None or findings.tokenizer is None:
        return []
    try:
        given = dataclasses.asdict(findings.settings)
        settings = RowSettings(**given | {"semantics": semantics.parse(findings.settings.semantics)})
    except PackproofError:
        return []  # a side of the user's own may take what packproof's do not
    tokenizer = load_named(findings.tokenizer, chat_template)
    messages, _ = messages_of(Path(file), number, chat_key)
    told = [note.text for note in tokenizer_notes(tokenizer, settings)]
    rows = [row for _, row in first_rows(file, _LOOKED_AT, chat_key, skip=True)]
    if (note := chat_file_note(file, rows, has_manifest=_has_manifest(Path(file)))) is not None:
        told.append(note)
    keys = MessageKeys.of_format(
        settings.prompt_format, settings.semantics, tokenizer, ignored=(), ignore="ignore_keys"
    )
    try:
        keys.check(messages)
    except RowRefused as error:
        told.append(f"{error.where}: {error.what}; pack_rows and a job refuse it")
    if count := ControlTokens(tokenizer).count(messages):
        told.append(
            f"{count} control tokens of the tokenizer stand in contents as text, and become the tokens themselves"
        )
    is_masked = FORMATS[settings.prompt_format].is_masked(settings.semantics)
    if not is_masked and (count := prompt_messages(messages)):
        told.append(f"{count} of {len(messages)} messages are of the system, users and tools, and are trained")
    if count := removed_switches(messages, settings.prompt_format):
        told.append(f"{count} messages hold /think or /no_think, which the format takes out, also within a word")
    return told


def _has_manifest(file: Path) -> bool:
    try:
        return read_manifest(file) is not None
    except PackproofError:
        return True
