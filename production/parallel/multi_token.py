"""Compute the input of multi-token prediction at every depth, from the whole row and without a message.

megatron-core rolls the cut tensors, one segment and two messages at a time; here one index per depth into the whole
row, taken at a rank's positions, gives its ids, positions, labels and masks of all depths at once: D + 1 times the
memory of its cut.

Reference: `reference/multi_token.py`, R-MTP-1 to 3, docs/SPEC.md#multi-token-prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from production.errors import PackproofError
from production.online.bins import Squeezed
from production.parallel.context_parallel import Layout, check_boundaries, find_layout, shard_index
from production.rows.batch import Batch, FlatBatch, flatten


@dataclass(frozen=True, kw_only=True, eq=False)
class DepthTables:
    """Holds one rank's tensors at depths 0 to D; depth 0 is the cut that the model itself is given, n = P / size."""

    input_ids: torch.Tensor
    """[D + 1, B, n] int64."""
    position_ids: torch.Tensor | None
    """[D + 1, B, n] int64; None where the model is given none, on the online path (R-ONLINE-7)."""
    target_ids: torch.Tensor
    """[D + 1, B, n] int64."""
    token_mask: torch.Tensor
    """[D + 1, B, n] float32: the mask of the target at that depth, not and-ed with the mask at the position itself."""
    padding_mask: torch.Tensor | None
    """[D + 1, B, n] bool, where the model is given one."""
    rank_counts: torch.Tensor
    """[D + 1] float32: sums of this rank's mask, what megatron-core divides by."""
    row_counts: torch.Tensor
    """[D + 1] float32: sums of the mask over all ranks, the same on each."""
    size: int
    """cp: context parallel ranks that share the rows."""
    own_mask: torch.Tensor | None = None
    """[1, B, n] float32: the mask of the tokens themselves, where the model is given no labels and derives depth 0 from ids and this (R-ONLINE-7)."""

    @property
    def depths(self) -> int:
        """Return D, the number of layers that predict further."""
        return len(self.input_ids) - 1


def depth_tables(
    batch: Batch | FlatBatch,
    depths: int,
    *,
    rank: int = 0,
    size: int = 1,
    layout: str | Layout = "zigzag",
    padding_mask: torch.Tensor | None = None,
    has_positions: bool = True,
) -> DepthTables:
    """Return the tables of rank `rank` of `size` for `depths` layers: at depth k `x[i + k]` inside the segment of i,
    else 0 (R-MTP-1).

    `batch` holds whole rows; each depth is cut with the rank's one index (R-MTP-2). `padding_mask` [B, P] bool is
    shifted along; `has_positions` says whether the model is given positions. Raises PackproofError for a number of depths below 0, BatchRefused as `context_parallel.shard_index`.
    """
    if depths < 0:
        raise PackproofError(what=f"must be at least 0, got {depths}", where="mtp_num_layers", fix="give 0 or more")
    flat, rows = (flatten(batch), len(batch.sample_mask)) if isinstance(batch, Batch) else (batch, 1)
    total = flat.input_ids.numel()
    boundaries = flat.cu_seqlens.long()
    cuts_segments = size > 1 and find_layout(layout).unit == "segment"
    if not cuts_segments:  # shard_index looks at segments only where it cuts them
        check_boundaries(boundaries, 1, rows=rows, total=total)
    index = shard_index(flat.cu_seqlens, rank, size, layout=layout, rows=rows, total_tokens=total)
    # Where the segment of each position ends; each rank has its equal part of each segment, one after the other.
    lengths = boundaries.diff() // size if cuts_segments else boundaries.diff()
    ends = boundaries[1:].repeat_interleave(lengths, output_size=total // size if cuts_segments else total)
    if size > 1 and not cuts_segments:
        ends = ends.index_select(0, index)
    # [D + 1, T / size]: where each depth reads, and whether that is still in the segment.
    sources = index + torch.arange(depths + 1, device=index.device)[:, None]
    beyond = sources >= ends
    sources.clamp_(max=total - 1)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        taken = tensor.reshape(-1).index_select(0, sources.view(-1)).view_as(sources)
        # Filled, not multiplied: what stands beyond a segment may be anything.
        return taken.masked_fill_(beyond, 0).view(depths + 1, rows, -1)

    token_mask = take(flat.token_mask)
    return DepthTables(
        input_ids=take(flat.input_ids),
        position_ids=take(flat.position_ids) if has_positions else None,
        target_ids=take(flat.target_ids),
        token_mask=token_mask,
        padding_mask=None if padding_mask is None else take(padding_mask),
        rank_counts=token_mask.sum(dim=(1, 2)),
        row_counts=_row_counts(flat.token_mask.reshape(-1), boundaries, depths),
        size=size,
    )


def derive_labels(row: Squeezed) -> FlatBatch:
    """Return a row of the online path [1, T] with the labels that megatron-core derives from its ids: those one place on, 0 behind a sequence's
    padding (R-ONLINE-7). The loss outside the model has another label there, a sequence's first id, and counts neither.
    """
    labels = row.input_ids.roll(-1, dims=-1)
    labels[0, row.cu_seqlens_padded[1:].long() - 1] = 0
    return FlatBatch(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        target_ids=labels,
        token_mask=row.target_mask,
        cu_seqlens=row.cu_seqlens_padded,
        max_seqlen=row.max_seqlen,
    )


def _row_counts(mask: torch.Tensor, boundaries: torch.Tensor, depths: int) -> torch.Tensor:
    """Return the mask's sums over whole rows at depths 0 to D: each depth loses one more target at the front of each
    segment.
    """
    fronts = boundaries[:-1] + torch.arange(depths, device=boundaries.device)[:, None]  # [D, N]
    lost = mask[fronts.clamp(max=len(mask) - 1)].masked_fill_(fronts >= boundaries[1:], 0).sum(dim=1)
    return mask.sum() - torch.cat([lost.new_zeros(1), lost.cumsum(0)])
