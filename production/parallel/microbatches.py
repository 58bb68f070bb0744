"""Make one microbatch of either path, cut for a rank, in the form that megatron-core takes.

All checks happen on the host before anything is copied; then each tensor moves to the device once. Every pipeline
stage gets everything: boundaries reach the middle stages without a broadcast, at the price of copies that a middle
stage does not read.

Reference: `reference/microbatches.py`, docs/SPEC.md#online-path and #both-paths.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from production.errors import BatchRefused, PackproofError
from production.online.bins import Padding, squeeze
from production.online.padded_batch import PaddedBatch
from production.parallel.context_parallel import check_boundaries, find_layout, shard_batch, shard_tensors
from production.parallel.multi_token import DepthTables, depth_tables, derive_labels
from production.parallel.multi_token_feed import MultiTokenParams, Stage, Weights, multi_token_params
from production.rows.batch import Batch, FlatBatch, flatten

Mtp = Literal["tables", "upstream_roll"]


@dataclass(frozen=True, kw_only=True)
class MicrobatchSettings:
    """Settings of a microbatch: this rank's place, and the way in which multi-token prediction gets its tensors."""

    context_parallel_rank: int = 0
    """Number of the share of the row, from 0."""
    context_parallel_size: int = 1
    """cp."""
    layout: str = "zigzag"
    """One of context_parallel.LAYOUTS."""
    padding: Padding = dataclasses.field(default_factory=Padding)
    """Of the online path; rows of the direct path are padded when they are built."""
    depths: int = 0
    """D, `mtp_num_layers` of the model."""
    mtp: Mtp = "tables"
    """`tables` needs `multi_token_feed.rolls_from_tables` around the step; `upstream_roll` is megatron-core's own."""
    weights: Weights = "rank"
    """Divisor of a multi-token loss (R-MTP-3): `rank` is megatron-core's; `rows` needs `tables`."""
    stage: Stage = "embedding_and_loss"
    """Parts of multi-token prediction on this pipeline stage."""
    verify: bool = False
    """Whether the feed holds the values of every roll against its tables, which on CUDA waits for the device."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if self.depths < 0:
            raise PackproofError(
                what=f"must be at least 0, got {self.depths}", where="mtp_num_layers", fix="give 0 or more"
            )
        if self.depths and self.mtp == "upstream_roll" and self.weights == "rows":
            raise PackproofError(
                what="must not be combined: megatron-core's own roll weights by rank",
                where="weights=rows, mtp=upstream_roll",
                fix="set mtp=tables, or weights=rank",
            )
        find_layout(self.layout)


@dataclass(frozen=True, kw_only=True, eq=False)
class OnlineRow:
    """Holds the whole row over which the online path's loss is computed, the same on every cp rank."""

    input_ids: torch.Tensor
    """[1, T] int64."""
    target_ids: torch.Tensor
    """[1, T] int64: the ids rolled by one within each sequence with its padding."""
    target_mask: torch.Tensor
    """[1, T] float32: the mask of those targets, times the sample mask."""
    cu_seqlens: torch.Tensor
    """[K] int32: true lengths, added up. On the host, as the next."""
    cu_seqlens_padded: torch.Tensor
    """[K] int32, from 0 to T: where the sequences lie."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """Holds one sequence of T tokens, of which this rank holds n = T / cp, on the device."""

    input_ids: torch.Tensor
    """[1, n] int64."""
    position_ids: torch.Tensor | None
    """[1, n] int64; None online, also with multi-token prediction (R-ONLINE-7)."""
    labels: torch.Tensor | None
    """[1, n] int64, what the model is given; None online, where the loss is computed outside (R-MEET-2)."""
    loss_mask: torch.Tensor | None
    """[1, n] float32, what the model is given: it reads only multi-token prediction's counts from it, online the tokens' own mask
    (R-ONLINE-7), which it shifts. Not what the loss counts."""
    packed_seq_params: PackedSeqParams
    """`thd`, the same boundaries four times; with depths and tables a `MultiTokenParams`."""
    total_tokens: int
    """n: tokens of this rank's share."""
    target_ids: torch.Tensor
    """[1, n] int64: this rank's labels, on both paths."""
    target_mask: torch.Tensor
    """[1, n] float32: which of them the loss counts, sample mask included, on both paths."""
    row: OnlineRow | None
    """Input of the loss outside the model; None on the direct path."""


def process_microbatch(
    batch: Batch | PaddedBatch, settings: MicrobatchSettings, *, device: torch.device | str | None = None
) -> Microbatch:
    """Return the microbatch of these rows for one rank: with `packed_cu_seqlens` their boundaries are reused, else
    they are packed now.

    `batch` is one or more rows of the direct path (flattened, R-BATCH-2) or the sequences of one bin of the online path, on
    the host. With `device` everything moves there once, without waiting. Raises BatchRefused (as `shard_index`, and
    `field_shape` for a batch that is not on the host) and PackproofError.
    """
    if isinstance(batch, Batch):  # the one of the two that has `packed_cu_seqlens`
        return _direct(batch, settings, device)
    return _online(batch, settings, device)


def _direct(batch: Batch, settings: MicrobatchSettings, device: torch.device | str | None) -> Microbatch:
    """Cut the stored rows, every tensor with one index (R-MEET-1)."""
    _check_host({name: getattr(batch, name) for name in _DIRECT_FIELDS})
    rank, size = settings.context_parallel_rank, settings.context_parallel_size
    # A row that only fills a validation batch counts nowhere: not in the loss, nor in multi-token prediction.
    batch = dataclasses.replace(batch, token_mask=batch.token_mask * batch.sample_mask[:, None])
    flat = flatten(batch)
    pieces = 2 * size if size > 1 and find_layout(settings.layout).unit == "segment" else 1
    check_boundaries(flat.cu_seqlens.long(), pieces, rows=len(batch.sample_mask), total=flat.input_ids.numel())
    if settings.depths and settings.mtp == "tables":
        tables = _one_row(depth_tables(batch, settings.depths, rank=rank, size=size, layout=settings.layout))
        return _direct_with_tables(flat, tables, settings, device)
    cut = shard_batch(batch, rank, size, layout=settings.layout)
    names = ("input_ids", "position_ids", "target_ids", "token_mask")
    tensors = _move({name: getattr(cut, name).reshape(1, -1) for name in names}, device)
    total = tensors["input_ids"].numel()
    return Microbatch(
        input_ids=tensors["input_ids"],
        position_ids=tensors["position_ids"],
        labels=tensors["target_ids"],
        loss_mask=tensors["token_mask"],
        packed_seq_params=_thd(flat.cu_seqlens, flat.max_seqlen, total, device),
        total_tokens=total,
        target_ids=tensors["target_ids"],
        target_mask=tensors["token_mask"],
        row=None,
    )


def _direct_with_tables(
    flat: FlatBatch, tables: DepthTables, settings: MicrobatchSettings, device: torch.device | str | None
) -> Microbatch:
    """Cut the stored rows into tables; depth 0 is the model's input, so that its rolls can be answered from the
    others.
    """
    tables = _moved(tables, device)
    total = tables.input_ids[0].numel()
    params = _thd_with_tables(flat, tables, settings, total, device)
    return Microbatch(
        input_ids=tables.input_ids[0],
        position_ids=None if tables.position_ids is None else tables.position_ids[0],
        labels=tables.target_ids[0],
        loss_mask=None if params.feed is None else params.feed.loss_mask,
        packed_seq_params=params,
        total_tokens=total,
        target_ids=tables.target_ids[0],
        target_mask=tables.token_mask[0],
        row=None,
    )


def _online(batch: PaddedBatch, settings: MicrobatchSettings, device: torch.device | str | None) -> Microbatch:
    """Squeeze the sequences; labels and mask stay outside the model, but for the mask that multi-token prediction
    needs (R-ONLINE-7).
    """
    _check_host({field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)})
    row = squeeze(batch, settings.padding)
    whole = {name: getattr(row, name) for name in ("input_ids", "target_ids", "target_mask")}
    given = {"token_mask": row.token_mask} if settings.depths else {}
    rank, size = settings.context_parallel_rank, settings.context_parallel_size
    cut = shard_tensors(whole | given, row.cu_seqlens_padded, rank, size, layout=settings.layout)
    total = row.input_ids.numel() // size
    if settings.depths and settings.mtp == "tables":
        flat = derive_labels(row)
        tables = depth_tables(flat, settings.depths, rank=rank, size=size, layout=settings.layout, has_positions=False)
        tables = _moved(dataclasses.replace(tables, own_mask=cut.pop("token_mask")[None]), device)
        params: PackedSeqParams = _thd_with_tables(flat, tables, settings, total, device)
        # What stands in the tables too is given from there: the feed knows it by its memory.
        del cut["input_ids"]
        share = _move(cut, device) | {"input_ids": tables.input_ids[0]}
        share["token_mask"] = params.feed.loss_mask
    else:
        params = _thd(row.cu_seqlens_padded, row.max_seqlen, total, device)
        share = _move(cut, device)
    outside = _move(whole, device)
    return Microbatch(
        input_ids=share["input_ids"],
        position_ids=None,
        labels=None,
        loss_mask=share.get("token_mask"),
        packed_seq_params=params,
        total_tokens=total,
        target_ids=share["target_ids"],
        target_mask=share["target_mask"],
        row=OnlineRow(
            **outside,
            cu_seqlens=row.cu_seqlens,
            cu_seqlens_padded=row.cu_seqlens_padded,
        ),
    )


_DIRECT_FIELDS = (
    *("input_ids", "position_ids", "target_ids", "token_mask"),
    *("sample_mask", "packed_cu_seqlens", "packed_cu_seqlens_lengths", "packed_max_seqlen"),
)
_TABLES = ("input_ids", "position_ids", "target_ids", "token_mask", "rank_counts", "row_counts", "own_mask")


def _one_row(tables: DepthTables) -> DepthTables:
    """Return tables of several rows as those of the one sequence that the model is given: [D + 1, 1, B·n]."""
    names = ("input_ids", "position_ids", "target_ids", "token_mask")
    given = {name: tensor for name in names if (tensor := getattr(tables, name)) is not None}
    flat: dict[str, Any] = {name: tensor.reshape(tables.depths + 1, 1, -1) for name, tensor in given.items()}
    return dataclasses.replace(tables, **flat)


def _moved(tables: DepthTables, device: torch.device | str | None) -> DepthTables:
    given = {name: tensor for name in _TABLES if (tensor := getattr(tables, name)) is not None}
    moved: dict[str, Any] = {**_move(given, device)}
    return dataclasses.replace(tables, **moved)


def _thd_with_tables(
    flat: FlatBatch, tables: DepthTables, settings: MicrobatchSettings, total: int, device: torch.device | str | None
) -> MultiTokenParams:
    """Return the boundaries four times with the tables that lie on the device."""
    plain = _thd(flat.cu_seqlens, flat.max_seqlen, total, device)
    params = multi_token_params(
        dataclasses.replace(flat, cu_seqlens=plain.cu_seqlens_q),
        tables,
        weights=settings.weights,
        stage=settings.stage,
        verify=settings.verify,
    )
    params.total_tokens, params.seq_idx = plain.total_tokens, plain.seq_idx
    return params


def _thd(cu_seqlens: torch.Tensor, max_seqlen: int, total: int, device: torch.device | str | None) -> PackedSeqParams:
    """Return the boundaries four times, made on the host: `total_tokens` lets megatron-core expand them, which waits
    on a device.
    """
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        total_tokens=total,
    )
    moved = _move({"cu_seqlens": cu_seqlens, "seq_idx": params.seq_idx}, device)
    params.cu_seqlens_q = params.cu_seqlens_kv = moved["cu_seqlens"]
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = moved["cu_seqlens"]
    params.seq_idx = moved["seq_idx"]
    return params


def _move(tensors: dict[str, torch.Tensor], device: torch.device | str | None) -> dict[str, torch.Tensor]:
    if device is None:
        return tensors
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _check_host(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse tensors that a check would have to wait for."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise BatchRefused(
                kind="field_shape",
                row=None,
                what=f"{name} must be on the host, got {tensor.device}",
                where="batch",
                fix="give the batch on the host, and the device as an argument",
            )
