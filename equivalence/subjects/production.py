"""The production side as a subject: rows and batches as a job would build them, adapted to the common protocol."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from equivalence.subjects.protocol import Batch, Messages, Row, RowSettings, as_batch, as_refusal, as_row
from equivalence.subjects.tokenizers import as_transformers
from production.errors import RowRefused
from production.rows import batch as batches
from production.rows import builder as rows
from production.semantics import parse

BUILDERS_KEPT = 128
"""Row builders that are kept for the next row; one holds a proof about its tokenizer and little else."""


class Production:
    """The production side as a subject."""

    name = "production"

    def __init__(self) -> None:
        # A builder holds its tokenizer, so no other can take its id while the entry stands.
        self._builders: OrderedDict[tuple[int, RowSettings], tuple[Any, rows.RowBuilder]] = OrderedDict()

    def build_row(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> Row:
        """Return the row of these messages, or production's refusal. Any other error of production is raised."""
        try:
            row = self._builder(as_transformers(tokenizer), settings).build(messages)
        except RowRefused as refused:
            return as_refusal(refused)
        return as_row(row)

    def collate(self, built: Sequence[Row], settings: RowSettings) -> Batch:
        """Return the batch of these rows without the guards of training: empty segments are collated too, as Megatron-LM does."""
        batch = batches.collate([_as_production(row, settings) for row in built])
        flat = batches.flatten(batch)
        return as_batch(batch, flat_cu_seqlens=flat.cu_seqlens, flat_max_seqlen=flat.max_seqlen)

    def _builder(self, tokenizer: Any, settings: RowSettings) -> rows.RowBuilder:
        key = (id(tokenizer), settings)
        if key in self._builders:
            self._builders.move_to_end(key)
            return self._builders[key][1]
        builder = rows.RowBuilder(tokenizer=tokenizer, settings=_settings(settings))
        self._builders[key] = (tokenizer, builder)
        if len(self._builders) > BUILDERS_KEPT:
            self._builders.popitem(last=False)
        return builder


def _settings(settings: RowSettings) -> rows.RowSettings:
    return rows.RowSettings(
        pack_length=settings.pack_length,
        prompt_format=settings.prompt_format,
        context_parallel_size=settings.context_parallel_size,
        semantics=parse(settings.semantics),
        pad_token=settings.pad_token,
        assistant_prefix_len=settings.assistant_prefix_len,
    )


def _as_production(row: Row, settings: RowSettings) -> rows.Row:
    if (
        row.input_ids is None
        or row.target_ids is None
        or row.token_mask is None
        or row.position_ids is None
        or row.cu_seqlens is None
        or row.max_seqlen is None
    ):
        raise ValueError("a refused row cannot be collated: leave it out")
    return rows.Row(
        input_ids=row.input_ids,
        target_ids=row.target_ids,
        token_mask=row.token_mask,
        position_ids=row.position_ids,
        cu_seqlens=row.cu_seqlens,
        max_seqlen=row.max_seqlen,
        context_parallel_size=settings.context_parallel_size,
        report=dict(row.report or {}),
    )


SUBJECT = Production()
