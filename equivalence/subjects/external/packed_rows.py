"""Build a row with an adapter that packs: its pack with the declared conventions undone, so that it can be compared to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from equivalence.subjects.external.process import SubjectFailed, UndeclaredConvention
from equivalence.subjects.protocol import (
    ROW_TENSORS,
    Messages,
    NotComparable,
    Refusal,
    Row,
    RowSettings,
    as_row,
    row_of,
)
from equivalence.subjects.reference import adapt, row_settings
from equivalence.subjects.tokenizers import as_transformers
from packproof.conventions import MEGATRON_LM, normalise
from packproof_subject import CONVENTIONS, Refused
from reference import prompts, rows
from reference.prompts import IGNORE_INDEX
from reference.refusals import RowRefused

Pack = Callable[..., list[dict[str, Any]]]
"""Makes packs of conversations: `ExternalSubject.pack`."""
NO_EOS = -1
"""Handed over as the EOS id where the tokenizer has no such token."""


def build_packed_row(
    pack: Pack, conventions: Mapping[str, str], messages: Messages, tokenizer: Any, settings: RowSettings
) -> Row:
    """Return the row that an adapter packs from these messages, under Megatron-LM's conventions.

    The reference tokenizes, since a packing function takes tokens. What a pack has no field for (positions, boundaries) is not compared.
    Raises NotComparable for a row that the reference refuses, since refusals are about messages, and for conversations that do not fit into
    one row, since a packing function chooses its rows itself. Raises SubjectFailed for packs that are no row, and for a difference that an
    undeclared convention explains.
    """
    adapted = adapt(as_transformers(tokenizer))
    asked = row_settings(settings)
    try:
        wanted = as_row(rows.build_row(messages, adapted, asked))
        conversations = [
            prompts.tokenize_conversation(each, asked.prompt, adapted, asked.semantics)
            for each in prompts.split_conversations(messages)
        ]
    except RowRefused as refused:
        raise NotComparable(f"the reference refuses the row ({refused.kind})") from refused
    pad = prompts.pad_id(adapted, asked.prompt)
    if pad is None:
        raise NotComparable("the tokenizer has no pad token, and a packing function needs its id")
    given: list[dict[str, Sequence[Any]]] = [
        {"tokens": each.tokens, "trained": [target != IGNORE_INDEX for target in each.targets]}
        for each in conversations
    ]
    _check_fit(given, settings)
    sizes = {
        "pack_length": settings.pack_length,
        "pad_id": pad,
        "context_parallel_size": settings.context_parallel_size,
    }
    try:
        packs = pack(given, eos_id=NO_EOS if adapted.eos_id is None else adapted.eos_id, **sizes)
    except Refused as refused_by_it:
        return Row(refusal=Refusal(kind=refused_by_it.kind, message=refused_by_it.message))
    if len(packs) != 1:
        raise SubjectFailed(
            f"made {len(packs)} packs of conversations that fit into one row of {settings.pack_length} tokens"
        )

    def under(declared: Mapping[str, str]) -> Row:
        return _as_row(normalise(packs[0], declared, conversations=given, **sizes), wanted)

    try:
        row = under(conventions)
    except ValueError as error:
        raise SubjectFailed(str(error)) from error
    if not _is_equal(wanted, row):
        for more in _undeclared(conventions):
            try:
                explains = _is_equal(wanted, under({**conventions, **more}))
            except ValueError:
                continue
            if explains:
                raise UndeclaredConvention(
                    f"differs by a convention that the adapter does not declare: serve(…, conventions={more!r}) would make the row equal"
                )
    return row


def _is_equal(left: Row, right: Row) -> bool:
    pairs = [(getattr(left, name), getattr(right, name)) for name in ROW_TENSORS]
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


def _as_row(lists: Mapping[str, Sequence[int]], wanted: Row) -> Row:
    """Return lists as a row. A field that the pack does not have is the reference's: it is not compared."""
    fields: dict[str, Any] = {
        "input_ids": list(lists["input_ids"]),
        "target_ids": list(lists["labels"]),
        "token_mask": [float(each) for each in lists["mask"]],
    }
    for name in ("position_ids", "cu_seqlens"):
        fields[name] = list(lists[name]) if name in lists else getattr(wanted, name)
    return row_of(fields)


def _check_fit(conversations: Sequence[Mapping[str, Sequence[Any]]], settings: RowSettings) -> None:
    """Raise NotComparable where the padded conversations are longer than a row, or one is empty."""
    granularity = 2 * settings.context_parallel_size if settings.context_parallel_size > 1 else 1
    lengths = [len(each["tokens"]) for each in conversations]
    if sum(-(-length // granularity) * granularity for length in lengths) > settings.pack_length:
        raise NotComparable("the conversations do not fit into one row")


def _undeclared(declared: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield conventions that are not declared: each alone, then each two together."""
    others = [
        (name, value)
        for name, values in CONVENTIONS.items()
        for value in values
        if name not in declared and value != MEGATRON_LM[name]
    ]
    for count in (1, 2):
        for some in itertools.combinations(others, count):
            if len(dict(some)) == count:
                yield dict(some)
