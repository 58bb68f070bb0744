"""Define faults of the row kind: production with one fault, each a subject of its own (`equivalence.mutants.row_faults:NAME`).

A fault changes production's input or its built row, so it stays one fault whatever production looks like inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from equivalence.subjects.production import Production
from equivalence.subjects.protocol import Batch, Messages, Row, RowSettings, overridden
from equivalence.subjects.tokenizers import as_transformers

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class Build:
    """Source of a built row, for faults that need it."""

    messages: Messages
    tokenizer: Any
    settings: RowSettings
    build: Callable[[Messages, RowSettings], Row]
    """Production without the fault."""


def _same_settings(settings: RowSettings, _: Any) -> RowSettings:
    return settings


def _same_messages(messages: Messages) -> Messages:
    return messages


def _same_row(row: Row, _: Build) -> Row:
    return row


def _same_batch(batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """Production with one fault. A subject."""

    name: str
    story: str
    """Origin of the fault, or its effect on a run."""
    settings: Callable[[RowSettings, Any], RowSettings] = _same_settings
    """Change of production's settings; the second argument is the tokenizer."""
    messages: Callable[[Messages], Messages] = _same_messages
    row: Callable[[Row, Build], Row] = _same_row
    """Change of a built row; a refused row stays."""
    batch: Callable[[Batch], Batch] = _same_batch
    sound: Production = field(default_factory=Production, repr=False)

    @property
    def is_of_batches(self) -> bool:
        """Return whether the fault is in batches only, so that single rows are sound."""
        return self.batch is not _same_batch

    def build_row(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> Row:
        """Return production's row with the fault."""
        tokenizer = as_transformers(tokenizer)

        def build(asked: Messages, how: RowSettings) -> Row:
            return self.sound.build_row(asked, tokenizer, how)

        row = build(self.messages(messages), self.settings(settings, tokenizer))
        if row.refusal is not None:
            return row
        return self.row(row, Build(messages=messages, tokenizer=tokenizer, settings=settings, build=build))

    def collate(self, rows: Sequence[Row], settings: RowSettings) -> Batch:
        """Return production's batch with the fault."""
        return self.batch(self.sound.collate(rows, settings))


def _with(**changes: str) -> Callable[[RowSettings, Any], RowSettings]:
    """Return a fault that uses other semantics than the settings."""
    return lambda settings, _: settings.replace(semantics=overridden(settings.semantics, **changes))


def _shift_twice(row: Row, _: Build) -> Row:
    return dataclasses.replace(row, target_ids=_rolled(row.target_ids), token_mask=_rolled(row.token_mask))


def _rolled(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    rolled = tensor.roll(-1)
    rolled[-1] = tensor[-1]
    return rolled


def _no_shift(row: Row, _: Build) -> Row:
    assert row.input_ids is not None
    assert row.token_mask is not None
    return dataclasses.replace(row, target_ids=torch.where(row.token_mask > 0, row.input_ids, IGNORE_INDEX))


def _flat_positions(row: Row, _: Build) -> Row:
    assert row.position_ids is not None
    return dataclasses.replace(row, position_ids=torch.arange(len(row.position_ids)))


def _positions_restart_at_every_boundary(row: Row, _: Build) -> Row:
    assert row.position_ids is not None
    assert row.cu_seqlens is not None
    positions = torch.cat([torch.arange(int(length)) for length in row.cu_seqlens.diff()])
    return dataclasses.replace(row, position_ids=positions)


def _positions_stop_at_padding(row: Row, build: Build) -> Row:
    assert row.position_ids is not None
    assert row.report is not None
    padded = int(row.report["padding_tokens"] or 0)
    positions = row.position_ids.clone()
    if padded and build.settings.context_parallel_size == 1:
        positions[-padded:] = 0
    return dataclasses.replace(row, position_ids=positions)


def _padding_trains(row: Row, _: Build) -> Row:
    assert row.target_ids is not None
    return dataclasses.replace(row, token_mask=(row.target_ids != IGNORE_INDEX).float())


def _ignored_labels_train(row: Row, _: Build) -> Row:
    assert row.target_ids is not None
    assert row.token_mask is not None
    return dataclasses.replace(row, token_mask=torch.where(row.target_ids == IGNORE_INDEX, 1.0, row.token_mask))


def _tail_is_a_segment(row: Row, build: Build) -> Row:
    assert row.cu_seqlens is not None
    assert row.report is not None
    padded = int(row.report["padding_tokens"] or 0)
    if not padded or build.settings.context_parallel_size > 1:
        return row
    end = build.settings.pack_length - padded
    entries = [*row.cu_seqlens.tolist()[:-1], end, build.settings.pack_length]
    return dataclasses.replace(row, cu_seqlens=torch.tensor(entries, dtype=torch.int32))


def _last_label_kept(row: Row, build: Build) -> Row:
    assert row.target_ids is not None
    longer = build.build(build.messages, build.settings.replace(pack_length=build.settings.pack_length + 1))
    if longer.refusal is not None or not (row.report or {}).get("truncated"):
        return row
    assert longer.target_ids is not None
    targets = row.target_ids.clone()
    targets[-1] = longer.target_ids[len(targets) - 1]
    return dataclasses.replace(row, target_ids=targets)


def _empty_segments_vanish(row: Row, _: Build) -> Row:
    assert row.cu_seqlens is not None
    return dataclasses.replace(row, cu_seqlens=torch.unique_consecutive(row.cu_seqlens))


def _longest_without_padding(row: Row, _: Build) -> Row:
    assert row.max_seqlen is not None
    assert row.report is not None
    return dataclasses.replace(row, max_seqlen=max(1, row.max_seqlen - int(row.report["padding_tokens"] or 0)))


def _losses_uncounted(row: Row, _: Build) -> Row:
    assert row.report is not None
    return dataclasses.replace(row, report={**row.report, "dropped": 0, "conversations": row.report["kept"]})


def _boundaries_int64(row: Row, _: Build) -> Row:
    assert row.cu_seqlens is not None
    return dataclasses.replace(row, cu_seqlens=row.cu_seqlens.long())


def _bos_first(row: Row, build: Build) -> Row:
    assert row.input_ids is not None
    bos = build.tokenizer.bos_token_id
    ids = row.input_ids if bos is None else torch.cat([torch.tensor([bos]), row.input_ids[:-1]])
    return dataclasses.replace(row, input_ids=ids)


def _other_role(change: Callable[[str], str]) -> Callable[[Messages], Messages]:
    def changed(messages: Messages) -> Messages:
        return [
            {**message, "role": change(message["role"])}
            if isinstance(message, dict) and isinstance(message.get("role"), str)
            else message
            for message in messages
        ]

    return changed


def _other_content(change: Callable[[str], str], roles: Sequence[str]) -> Callable[[Messages], Messages]:
    def changed(messages: Messages) -> Messages:
        return [
            {**message, "content": change(message["content"])}
            if isinstance(message, dict) and message.get("role") in roles and isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    return changed


def _eos_pads(settings: RowSettings, tokenizer: Any) -> RowSettings:
    return settings.replace(pad_token=tokenizer.eos_token or settings.pad_token)


def _prefix(settings: RowSettings, _: Any) -> RowSettings:
    if settings.prompt_format in ("identity", "default"):
        return settings
    usual = 3 if settings.prompt_format == "nemotron-nano-v2" else 0
    asked = usual if settings.assistant_prefix_len is None else settings.assistant_prefix_len
    return settings.replace(assistant_prefix_len=asked + 1)


def _first_boundaries_for_all(batch: Batch) -> Batch:
    assert batch.packed_cu_seqlens is not None
    return dataclasses.replace(batch, packed_cu_seqlens=batch.packed_cu_seqlens[:1].expand_as(batch.packed_cu_seqlens))


def _zero_fill(batch: Batch) -> Batch:
    assert batch.packed_cu_seqlens is not None
    return dataclasses.replace(batch, packed_cu_seqlens=batch.packed_cu_seqlens.clamp(min=0))


def _rows_merge(batch: Batch) -> Batch:
    length = batch.input_ids.shape[1]
    seams = batch.flat_cu_seqlens[(batch.flat_cu_seqlens % length != 0) | (batch.flat_cu_seqlens == 0)]
    return dataclasses.replace(batch, flat_cu_seqlens=torch.cat([seams, batch.flat_cu_seqlens[-1:]]))


ROW_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="boundary_label_kept",
        story="the direct path keeps the label that leads into the next conversation",
        settings=_with(boundary_label="next"),
    ),
    Mutant(
        name="boundary_label_ignored",
        story="labels at boundaries are masked where Megatron-LM trains on them",
        settings=_with(boundary_label="ignore"),
    ),
    Mutant(
        name="shift_twice", story="labels that are already shifted are shifted again by the trainer", row=_shift_twice
    ),
    Mutant(name="no_shift", story="the model is asked to copy its input", row=_no_shift),
    Mutant(name="flat_positions", story="positions run on over conversations", row=_flat_positions),
    Mutant(
        name="positions_restart_in_an_empty_last_segment",
        story="positions are made from boundaries, so an empty last segment restarts them",
        row=_positions_restart_at_every_boundary,
    ),
    Mutant(name="positions_stop_at_padding", story="padding has position 0", row=_positions_stop_at_padding),
    Mutant(name="padding_trains", story="the mask only knows -100", row=_padding_trains),
    Mutant(
        name="ignored_labels_train",
        story="labels of -100 are left to the cross entropy, which gives them a loss",
        row=_ignored_labels_train,
    ),
    Mutant(
        name="padding_by_position",
        story="a pad id in a content trains, which Megatron-LM masks",
        settings=_with(padding_mask="by_position"),
    ),
    Mutant(
        name="padding_by_value",
        story="a pad id in a content is masked where padding is known by position",
        settings=_with(padding_mask="by_value"),
    ),
    Mutant(
        name="identity_masked",
        story="prompts of identity are masked as in 0.17 and main",
        settings=_with(identity_prompt="masked"),
    ),
    Mutant(
        name="no_cp_padding",
        story="segments are packed for cp 1",
        settings=lambda s, _: s.replace(context_parallel_size=1),
    ),
    Mutant(
        name="cp_padding_doubled",
        story="segments are padded to multiples of 4·cp",
        settings=lambda s, _: (
            s.replace(context_parallel_size=s.context_parallel_size * 2) if s.context_parallel_size > 1 else s
        ),
    ),
    Mutant(name="tail_is_a_segment", story="tail padding gets a segment of its own", row=_tail_is_a_segment),
    Mutant(name="last_label_kept", story="a cut row keeps the label behind its last token", row=_last_label_kept),
    Mutant(name="empty_segments_vanish", story="boundaries are made unique", row=_empty_segments_vanish),
    Mutant(name="longest_without_padding", story="max_seqlen leaves padding out", row=_longest_without_padding),
    Mutant(name="boundaries_int64", story="the kernel wants int32", row=_boundaries_int64),
    Mutant(name="losses_uncounted", story="dropped conversations are forgotten", row=_losses_uncounted),
    Mutant(name="bos_first", story="the tokenizer's post-processor adds BOS to the row", row=_bos_first),
    Mutant(
        name="roles_without_case",
        story="`System` splits a row and `Assistant` renders",
        messages=_other_role(str.lower),
    ),
    Mutant(
        name="tools_render",
        story="tool turns are rendered as the user's",
        messages=_other_role(lambda role: "user" if role == "tool" else role),
    ),
    Mutant(
        name="think_stays",
        story="/no_think is left in prompts",
        messages=_other_content(lambda text: text.replace("/no_think", "/no_/no_thinkthink"), ("system", "user")),
    ),
    Mutant(
        name="think_goes_everywhere",
        story="/think is also cut from answers",
        messages=_other_content(lambda text: text.replace("/think", ""), ("assistant",)),
    ),
    Mutant(
        name="contents_stripped",
        story="contents are stripped in formats that do not",
        messages=_other_content(str.strip, ("system", "user", "assistant", "tool")),
    ),
    Mutant(name="eos_pads", story="the tokenizer's eos is the pad token", settings=_eos_pads),
    Mutant(name="prefix_off_by_one", story="the assistant prefix is a token too long", settings=_prefix),
    Mutant(
        name="stops_when_full",
        story="errors behind an exact fill no longer surface",
        settings=_with(exact_fill="stop"),
    ),
    Mutant(
        name="exact_turn_check",
        story="turns are compared exactly where Megatron-LM lets ids be off by one",
        settings=_with(turn_check="exact"),
    ),
    Mutant(
        name="relative_turn_check",
        story="turns are compared relatively where they must be equal",
        settings=_with(turn_check="relative"),
    ),
    Mutant(
        name="first_boundaries_for_all",
        story="a batch's boundaries are read from its first row",
        batch=_first_boundaries_for_all,
    ),
    Mutant(name="zero_fill", story="ragged boundaries are filled with 0, which the partition reads", batch=_zero_fill),
    Mutant(name="rows_merge", story="flattening drops the seams between rows", batch=_rows_merge),
)
"""Each fault that has happened, or that a reader of SPEC could make."""
