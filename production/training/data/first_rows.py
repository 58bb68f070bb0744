"""Check before any model is built what a job's files and its tokenizer make of the first rows (SPEC R-SETUP-22,
R-ONLINE-9, section 22): a run and a dry run ask the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from production.errors import PackproofError, RowRefused
from production.online.chat import Chat, ChatTokenizer
from production.rows.token_facts import (
    ControlTokens,
    Note,
    chat_file_note,
    holds_several,
    prompt_messages,
    removed_switches,
)
from production.tokens.prompts import FORMATS
from production.training.config import Job, SetupRefused, chat_settings, row_settings
from production.training.config.schema.data import CHAT, PACKED
from production.training.data.heads import Head, read_heads
from production.training.data.token_fit import check_fit, fit_notes, message_keys

_OF_THE_SETUP = {"unjoined_pieces", "tools_not_rendered", "no_chat_template"}
"""Kinds of refused conversations that say that the settings are wrong, not the line."""


@dataclass(kw_only=True)
class FirstRows:
    """Holds the refusals and notes of the check."""

    refusals: list[PackproofError] = field(default_factory=list)
    """Reasons why the job must not run."""
    notes: list[str] = field(default_factory=list)
    """Notes on the files and on the settings of a job that may run."""
    token_notes: tuple[Note, ...] = ()
    """Notes on the tokens of all rows, whatever the rows hold."""


def check_first_rows(job: Job, tokenizer: Any | None) -> FirstRows:
    """Check every file that is on this machine, and the tokenizer where there is one."""
    found, heads = FirstRows(), read_heads(job)
    if tokenizer is not None:
        found.refusals += check_fit(job, tokenizer)
        found.token_notes = fit_notes(job, tokenizer)
    for head in heads:
        (_check_packed if head.dataset.is_packed else _check_chat)(job, head, found)
        fault: PackproofError | None = head.fault
        if fault is None and tokenizer is not None:
            fault = None if head.dataset.is_packed else _other_tokens(job, head, tokenizer)
            fault = fault or _bad_key(job, head, tokenizer)
        if fault is not None:
            found.refusals.append(_of_file(job, head, fault))
    if not job.is_packed:
        found.notes += _online_notes(job, tokenizer)
    found.notes = list(dict.fromkeys(found.notes))
    return found


def count_first_rows(job: Job, tokenizer: Any) -> Iterator[str]:
    """Yield notes on the contents of each file's first rows, for a dry run; a run counts all rows that it feeds."""
    control = ControlTokens(tokenizer)
    for head in read_heads(job):
        settings = row_settings(job, head.dataset)
        rows = [record[head.dataset.chat_key] for _, record in head.rows]
        of_first = f"{head.path}: in the first {len(rows)} rows"
        if count := sum(map(control.count, rows)):
            yield f"{of_first} {count} control tokens of the tokenizer stand in contents as text, and become the tokens themselves"  # fmt: skip
        if count := sum(removed_switches(row, settings.prompt_format) for row in rows):
            yield f"{of_first} {count} messages hold /think or /no_think, which the format takes out, also within a word"  # fmt: skip
        is_unmasked = head.dataset.is_packed and not FORMATS[settings.prompt_format].is_masked(settings.semantics)
        if is_unmasked and (count := sum(map(prompt_messages, rows))):
            of_all = sum(map(len, rows))
            yield f"{of_first} {count} of {of_all} messages are of the system, users and tools, and are trained"


def _check_packed(_job: Job, head: Head, found: FirstRows) -> None:
    """Note a chat file on the direct path, which would train one conversation a row."""
    rows = [record[head.dataset.chat_key] for _, record in head.rows]
    if (note := chat_file_note(head.path, rows, has_manifest=_has_manifest(head))) is not None:
        found.notes.append(note)


def _check_chat(job: Job, head: Head, found: FirstRows) -> None:
    """Refuse a packed file on the online path, which would train each row as one conversation whose parts see each
    other.
    """
    packed = [line for line, record in head.rows if holds_several(record[head.dataset.chat_key])]
    if _has_manifest(head) or (packed and len(packed) == len(head.rows)):
        why = (
            "a manifest of packed rows lies beside it"
            if _has_manifest(head)
            else "every line has several system messages"
        )
        key = f"{head.key}.data_path"
        found.refusals.append(
            SetupRefused(
                kind="packed_file",
                key=job.written(key),
                what=f"the file must hold one conversation a line for {CHAT}, and it is packed ({why})",
                where=f"{job.where(key)}, {head.path}",
                fix=f"set dataset_name to {PACKED} (the direct path), or give the chat file that it was packed from",
            )
        )
    elif packed:
        lines = ", ".join(map(str, packed))
        found.notes.append(
            f"{head.path}: several system messages stand in line {lines}, each of which is trained as one conversation; if "
            "they begin conversations of their own, put each on a line of its own, or train packed rows"
        )


def _of_file(job: Job, head: Head, fault: PackproofError) -> SetupRefused:
    """Return the fault together with the key that names the file."""
    key = f"{head.key}.data_path"
    return SetupRefused(
        kind=getattr(fault, "kind", "refused"),
        key=job.written(key),
        what=fault.what,
        where=f"{fault.where} ({job.where(key)})",
        fix=fault.fix,
    )


def _bad_key(job: Job, head: Head, tokenizer: Any) -> RowRefused | None:
    """Return the refusal of the first row with a key that no row honours."""
    keys = message_keys(head.dataset, row_settings(job, head.dataset), tokenizer)
    for line, record in head.rows:
        try:
            keys.check(record[head.dataset.chat_key])
        except RowRefused as error:
            return _placed(error, f"{head.path}, line {line}, {error.where}")
    return None


def _other_tokens(job: Job, head: Head, tokenizer: Any) -> RowRefused | None:
    """Return the refusal of the first conversation whose tokens differ from those of its text; faults of single lines are the
    loader's.
    """
    dataset = head.dataset
    chat = ChatTokenizer(tokenizer=tokenizer, settings=chat_settings(job, dataset))
    for line, record in head.rows:
        tools = None if dataset.tool_key is None else record.get(dataset.tool_key)
        try:
            chat.check_ids(Chat(messages=record[dataset.chat_key], tools=tools))
        except RowRefused as error:
            if error.kind in _OF_THE_SETUP:
                turn = "" if error.turn is None else f", message {error.turn}"
                return _placed(error, f"{head.path}, line {line}{turn}")
    return None


def _placed(error: RowRefused, where: str) -> RowRefused:
    return RowRefused(kind=error.kind, what=error.what, where=where, fix=error.fix)


def _online_notes(job: Job, tokenizer: Any | None) -> Iterator[str]:
    data = job.data
    longest = data.max_input_seq_length or job.policy.max_total_sequence_length
    set_keys = {key for key, source in job.sources.items() if source.kind in {"file", "override"}}
    if data.on_long_conversation == "mask_out" and "data.on_long_conversation" not in set_keys:
        yield (
            f"a conversation of {longest} tokens or more (data.max_input_seq_length) is cut to a stub that trains nothing, as in NeMo-RL; the run says "
            "how many there were. data.on_long_conversation: refuse stops the job instead"
        )
    if tokenizer is None:
        return
    for key in ChatTokenizer(tokenizer=tokenizer, settings=chat_settings(job, data.train[0])).missing_tokens:
        name = "BOS" if key == "add_bos" else "EOS"
        yield f"data.{key} is true and the tokenizer has no {name} token: none is added, as in NeMo-RL"


def _has_manifest(head: Head) -> bool:
    return head.manifest is not None or (head.fault is not None and head.fault.kind == "manifest")
