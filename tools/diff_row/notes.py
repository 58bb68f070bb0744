"""Print notes on tokens of a row that its author may not have meant (docs/spec-tokens.md), to standard error beside the screen."""

from __future__ import annotations

import dataclasses

from production import semantics
from production.errors import PackproofError, RowRefused
from production.rows.builder import RowSettings
from production.rows.token_facts import ControlTokens, removed_switches, tokenizer_notes
from production.tokens.message_keys import MessageKeys
from tools.diff_row.inputs import Request, load_named, messages_of
from tools.diff_row.row.findings import Findings


def token_notes(request: Request, findings: Findings) -> list[str]:
    """Return the notes on the row of `findings`; empty for a row without a file."""
    number = findings.source.row
    if request.file is None or number is None or findings.settings is None or findings.tokenizer is None:
        return []
    try:
        given = dataclasses.asdict(findings.settings)
        settings = RowSettings(**given | {"semantics": semantics.parse(findings.settings.semantics)})
    except PackproofError:
        return []  # a side of the user's own may take what packproof's do not
    tokenizer = load_named(findings.tokenizer)
    messages, _ = messages_of(request.file, number, request.chat_key)
    told = [note.text for note in tokenizer_notes(tokenizer, settings)]
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
    if count := removed_switches(messages, settings.prompt_format):
        told.append(f"{count} messages hold /think or /no_think, which the format takes out, also within a word")
    return told
