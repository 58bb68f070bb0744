"""Faults of cutting and shifting: which tokens a rank gets, what they are labelled with, what multi-token prediction reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivalence.mutants.layout_mutant import LayoutMutant

_ROW = ("input_ids", "position_ids", "target_ids", "token_mask")


def _zigzag_of(owned: Callable[[int, int], tuple[int, ...]]) -> Callable[[Any], Any]:
    return lambda layouts: layouts | {"zigzag": dataclasses.replace(layouts["zigzag"], owned=owned)}


def _gather_by_rank(sound: Any) -> Any:
    del sound

    def gather(shards: Sequence[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        return torch.cat(list(shards), dim=-1)

    return gather


def _total_checked_only(sound: Any) -> Any:
    def check_boundaries(boundaries: torch.Tensor, pieces: int, *, rows: int, total: int) -> None:
        sound(boundaries, pieces if total % pieces else 1, rows=rows, total=total)

    return check_boundaries


def _positions_of_the_share(sound: Any) -> Any:
    def shard_tensors(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        cut: dict[str, torch.Tensor] = sound(*args, **options)
        if "position_ids" in cut:
            share = cut["position_ids"]
            cut["position_ids"] = torch.arange(share.shape[-1]).expand_as(share)
        return cut

    return shard_tensors


def _sentinels_kept(sound: Any) -> Any:
    def flatten(batch: Any) -> Any:
        count, length = batch.input_ids.shape
        shifted = batch.packed_cu_seqlens + torch.arange(count)[:, None] * length
        is_own = torch.ones_like(shifted, dtype=torch.bool)
        is_own[1:, 0] = False
        return dataclasses.replace(sound(batch), cu_seqlens=shifted[is_own].int())

    return flatten


def _boundaries_of_row_0(sound: Any) -> Any:
    def flatten(batch: Any) -> Any:
        names = ("packed_cu_seqlens", "packed_cu_seqlens_lengths")
        first = {name: getattr(batch, name)[:1].expand_as(getattr(batch, name)) for name in names}
        return sound(dataclasses.replace(batch, **first))

    return flatten


def _shares_of_boundaries(sound: Any) -> Any:
    def thd(cu_seqlens: torch.Tensor, max_seqlen: int, total: int, device: Any) -> Any:
        ranks = int(cu_seqlens[-1]) // total
        return sound(cu_seqlens // ranks, max_seqlen // ranks, total, device)

    return thd


def _filler_counts(sound: Any) -> Any:
    def process_microbatch(batch: Any, settings: Any, **options: Any) -> Any:
        counted = dataclasses.replace(batch, sample_mask=torch.ones_like(batch.sample_mask))
        return sound(counted, settings, **options)

    return process_microbatch


def _shifted_twice(sound: Any) -> Any:
    def process_microbatch(batch: Any, settings: Any, **options: Any) -> Any:
        made = sound(batch, settings, **options)
        labels = made.target_ids.roll(-1, dims=-1)
        return dataclasses.replace(made, target_ids=labels, labels=None if made.labels is None else labels)

    return process_microbatch


def _flat_shift(sound: Any) -> Any:
    def depth_tables(batch: Any, depths: int, **options: Any) -> Any:
        tables = []
        for depth in range(depths + 1):
            rolled = {name: getattr(batch, name).reshape(-1).roll(-depth) for name in _ROW}
            shaped = {name: rolled[name].view_as(getattr(batch, name)) for name in _ROW}
            tables.append(sound(dataclasses.replace(batch, **shaped), 0, **options))
        names = (*_ROW, "rank_counts", "row_counts")
        return dataclasses.replace(
            tables[0], **{name: torch.cat([getattr(each, name) for each in tables]) for name in names}
        )

    return depth_tables


def _with_masks(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    """Return a fault that uses other masks at the depths, from [D + 1, B, n], with the counts of these masks."""

    def wrong(sound: Any) -> Any:
        def depth_tables(*args: Any, **options: Any) -> Any:
            tables = sound(*args, **options)
            mask = change(tables.token_mask)
            return dataclasses.replace(tables, token_mask=mask, rank_counts=mask.sum(dim=(1, 2)))

        return depth_tables

    return wrong


def _flat_labels(sound: Any) -> Any:
    def squeeze(*args: Any) -> Any:
        row = sound(*args)
        return dataclasses.replace(row, target_ids=row.input_ids.roll(-1, dims=-1))

    return squeeze


def _boundary_label_trains(sound: Any) -> Any:
    def squeeze(*args: Any) -> Any:
        row = sound(*args)
        return dataclasses.replace(row, target_mask=row.token_mask.roll(-1, dims=-1))

    return squeeze


def _pad_id_masked(sound: Any) -> Any:
    def squeeze(*args: Any) -> Any:
        row = sound(*args)
        return dataclasses.replace(row, target_mask=row.target_mask * (row.target_ids != 0))

    return squeeze


def _positions_given(sound: Any) -> Any:
    def process_microbatch(batch: Any, settings: Any, **options: Any) -> Any:
        made = sound(batch, settings, **options)
        if made.row is None:
            return made
        return dataclasses.replace(made, position_ids=torch.arange(made.input_ids.shape[1])[None])

    return process_microbatch


def _mask_of_tokens(sound: Any) -> Any:
    def derive_labels(row: Any) -> Any:
        return dataclasses.replace(sound(row), token_mask=row.token_mask)

    return derive_labels


def _mask_of_targets(sound: Any) -> Any:
    def process_microbatch(batch: Any, settings: Any, **options: Any) -> Any:
        made = sound(batch, settings, **options)
        return (
            made
            if made.row is None or made.loss_mask is None
            else dataclasses.replace(made, loss_mask=made.target_mask)
        )

    return process_microbatch


def _tail_apart(sound: Any) -> Any:
    def squeeze(padded_batch: Any, padding: Any) -> Any:
        row = sound(padded_batch, padding)
        unit = padding.sequence_multiple
        end = int(row.cu_seqlens_padded[-2]) - int(-padded_batch.input_lengths[-1] // unit * unit)
        if end == int(row.cu_seqlens_padded[-1]):
            return row
        entries = [*row.cu_seqlens_padded.tolist()[:-1], end, int(row.cu_seqlens_padded[-1])]
        return dataclasses.replace(row, cu_seqlens_padded=torch.tensor(entries, dtype=torch.int32))

    return squeeze


CUT_MUTANTS = (
    LayoutMutant(
        name="owner_off_by_one",
        story="a rank's second chunk is the one before its own",
        target="production.parallel.context_parallel:LAYOUTS",
        wrong=_zigzag_of(lambda rank, size: (rank, 2 * size - 2 - rank)),
        first="context_parallel",
    ),
    LayoutMutant(
        name="chunks_swapped",
        story="a rank has its later chunk first",
        target="production.parallel.context_parallel:LAYOUTS",
        wrong=_zigzag_of(lambda rank, size: (2 * size - 1 - rank, rank)),
        first="context_parallel",
    ),
    LayoutMutant(
        name="gathered_by_rank",
        story="shares are put together in order of ranks instead of tokens",
        target="production.parallel.context_parallel:gather",
        wrong=_gather_by_rank,
        first="context_parallel",
    ),
    LayoutMutant(
        name="only_the_row_divides",
        story="the kernel's own demand: segments that do not divide lose and repeat tokens",
        target="production.parallel.context_parallel:check_boundaries",
        wrong=_total_checked_only,
        first="context_parallel",
        raises=("RuntimeError",),  # torch's, of an index that is too long
    ),
    LayoutMutant(
        name="positions_of_the_share",
        story="positions are counted after the cut, so they neither restart nor skip",
        target="production.parallel.context_parallel:shard_tensors",
        wrong=_positions_of_the_share,
        first="direct_microbatches",
    ),
    LayoutMutant(
        name="sentinels_cut",
        story="the -1 that fills ragged boundaries reaches the partition",
        target="production.rows.batch:flatten",
        wrong=_sentinels_kept,
        first="direct_microbatches",
        raises=("BatchRefused",),
    ),
    LayoutMutant(
        name="boundaries_of_row_0",
        story="the whole batch is cut by its first row's boundaries",
        target="production.rows.batch:flatten",
        wrong=_boundaries_of_row_0,
        first="direct_microbatches",
    ),
    LayoutMutant(
        name="local_boundaries",
        story="attention is given the boundaries of a rank's share instead of the row's",
        target="production.parallel.microbatches:_thd",
        wrong=_shares_of_boundaries,
        first="direct_microbatches",
        raises=("BatchRefused", "RuntimeError"),  # or megatron-core's rotary embedding, first
    ),
    LayoutMutant(
        name="filler_rows_count",
        story="a row that only fills a validation batch up is trained on, since the sample mask is not looked at",
        target="production.parallel.microbatches:process_microbatch",
        wrong=_filler_counts,
        first="direct_microbatches",
    ),
    LayoutMutant(
        name="labels_shifted_again",
        story="labels that are already shifted are shifted for the model",
        target="production.parallel.microbatches:process_microbatch",
        wrong=_shifted_twice,
        first="direct_microbatches",
        raises=("PackproofError",),
    ),
    LayoutMutant(
        name="shift_across_segments",
        story="multi-token prediction shifts the flat row",
        target="production.parallel.multi_token:depth_tables",
        wrong=_flat_shift,
        first="multi_token",
    ),
    LayoutMutant(
        name="mtp_mask_not_shifted",
        story="every depth has the mask of the next token",
        target="production.parallel.multi_token:depth_tables",
        wrong=_with_masks(lambda mask: mask[:1].expand_as(mask).clone()),
        first="multi_token",
    ),
    LayoutMutant(
        name="mtp_mask_of_both",
        story="the mask of a depth is and-ed with that of the position, so the last of a prompt do not train",
        target="production.parallel.multi_token:depth_tables",
        wrong=_with_masks(lambda mask: mask * mask[:1]),
        first="multi_token",
    ),
    LayoutMutant(
        name="online_shift_across_sequences",
        story="labels of the online path are the flat row's ids",
        target="production.online.bins:squeeze",
        wrong=_flat_labels,
        first="online_microbatches",
    ),
    LayoutMutant(
        name="online_boundary_label_trains",
        story="the last token of a sequence trains on the first of the next",
        target="production.online.bins:squeeze",
        wrong=_boundary_label_trains,
        first="direct_vs_online",
    ),
    LayoutMutant(
        name="online_padding_by_value",
        story="padding is known by its id, which also stands in contents",
        target="production.online.bins:squeeze",
        wrong=_pad_id_masked,
        first="direct_vs_online",
    ),
    LayoutMutant(
        name="online_positions_given",
        story="the model is given positions on the online path, which do not restart with a sequence",
        target="production.parallel.microbatches:process_microbatch",
        wrong=_positions_given,
        first="online_microbatches",
    ),
    LayoutMutant(
        name="online_mtp_mask_of_tokens",
        story="every depth of the online path has the mask of the token before its target",
        target="production.parallel.multi_token:derive_labels",
        wrong=_mask_of_tokens,
        first="online_microbatches",
    ),
    LayoutMutant(
        name="online_mtp_mask_shifted_again",
        story="the model is given the mask of the targets, which megatron-core shifts along with the ids once more",
        target="production.parallel.microbatches:process_microbatch",
        wrong=_mask_of_targets,
        first="online_microbatches",
        raises=("PackproofError",),  # tables know the mask that they were made with
    ),
    LayoutMutant(
        name="online_tail_is_a_segment",
        story="the row's padding is a segment of its own instead of its last sequence's",
        target="production.online.bins:squeeze",
        wrong=_tail_apart,
        first="online_microbatches",
    ),
)
"""Each is seen on data alone."""
