"""Cut rows among context-parallel ranks with one vectorised index, and gather them again.

No Python loop over segments: a rank's index into 1,000 segments of a row of 262,144 tokens takes 0.1 ms at cp 16. On
CUDA Transformer Engine's kernel makes the index where it is installed; that branch has not been run here.

Reference: `reference/context_parallel.py`, R-CP-1 to 5, docs/SPEC.md#context-parallelism.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from production.errors import BatchRefused, PackproofError
from production.rows.batch import Batch, FlatBatch, flatten

ROW_TENSORS = ("input_ids", "target_ids", "token_mask", "position_ids")
"""Tensors of which a rank gets its own part; everything else of a batch stays that of the whole row (R-CP-2)."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Defines how a sequence is cut: each unit into equal pieces, and the pieces that a rank owns, in that order."""

    name: str
    """Name in configurations."""
    unit: Literal["segment", "row"]
    """Unit that is cut into pieces; its length must be divisible by their number."""
    pieces: Callable[[int], int]
    """Number of pieces of a unit, of cp."""
    owned: Callable[[int, int], tuple[int, ...]]
    """The pieces of rank `rank` at cp `size`; the ranks' pieces are all of them, each once."""
    witness: str | None
    """Installed code that cuts the same way; None if there is none."""


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            name="zigzag",  # R-CP-1
            unit="segment",
            pieces=lambda size: 2 * size,
            owned=lambda rank, size: (rank, 2 * size - 1 - rank),
            witness="megatron.core.models.common.embeddings.rope_utils._get_thd_freqs_on_this_cp_rank",
        ),
        Layout(
            name="contiguous",  # R-CP-4
            unit="row",
            pieces=lambda size: size,
            owned=lambda rank, _size: (rank,),
            witness=None,
        ),
    )
}
"""The layouts by name."""


def shard_index(
    cu_seqlens: torch.Tensor,
    rank: int,
    size: int,
    *,
    layout: str | Layout = "zigzag",
    rows: int = 1,
    total_tokens: int | None = None,
    check: bool = True,
) -> torch.Tensor:
    """Return the positions that rank `rank` of `size` owns, in its order: [T / size] int64, on the device of
    `cu_seqlens`.

    `cu_seqlens` [K] are the boundaries of one sequence of T tokens, which may be `rows` flattened rows of equal
    length (R-BATCH-2). Segments of length 0 are passed over. Raises BatchRefused, of kind `indivisible_segment` with
    row, segment and length (R-CP-3), or `cu_start`, `cu_order`, `cu_end` where they are not boundaries of T tokens.

    On CUDA the check waits for the device, and so does reading T where `total_tokens` is not given: leave the check
    out only where the host has seen the same boundaries (`batch.collate_checked`).
    """
    how = find_layout(layout)
    _check_rank(rank, size)
    total = int(cu_seqlens[-1]) if total_tokens is None else total_tokens
    if size == 1:
        return torch.arange(total, device=cu_seqlens.device)
    # int64 from here on: sums and products of a long batch leave int32.
    boundaries = cu_seqlens.long()
    if how.unit == "row":
        _check_rows(how.pieces(size), size=size, rows=rows, total=total)
    elif check:
        check_boundaries(boundaries, how.pieces(size), rows=rows, total=total)
    if how.name == "zigzag" and cu_seqlens.is_cuda and (kernel := _kernel()) is not None:
        return torch.as_tensor(kernel(cu_seqlens.int(), total, size, rank)).long()
    if how.unit == "row":
        boundaries = torch.arange(rows + 1, device=cu_seqlens.device) * (total // rows)
    return _expand(boundaries, how.owned(rank, size), how.pieces(size), total // size)


def shard_batch[Rows: (Batch, FlatBatch)](
    batch: Rows, rank: int, size: int, *, layout: str | Layout = "zigzag"
) -> Rows:
    """Return the batch with its row tensors cut to rank `rank` of `size`, all with one index: [B, P / size] each
    (R-CP-2).

    Boundaries, longest segments and lengths stay those of the whole rows. Raises BatchRefused as `shard_index`.
    """
    if size == 1:
        _check_rank(rank, size)
        return batch
    if isinstance(batch, Batch):
        cu_seqlens, rows = flatten(batch).cu_seqlens, len(batch.sample_mask)
    else:
        cu_seqlens, rows = batch.cu_seqlens, 1
    tensors = {name: getattr(batch, name) for name in ROW_TENSORS}
    cut: dict[str, Any] = {**shard_tensors(tensors, cu_seqlens, rank, size, layout=layout, rows=rows)}
    return dataclasses.replace(batch, **cut)


def shard_tensors(
    tensors: Mapping[str, torch.Tensor],
    cu_seqlens: torch.Tensor,
    rank: int,
    size: int,
    *,
    layout: str | Layout = "zigzag",
    rows: int = 1,
    check: bool = True,
) -> dict[str, torch.Tensor]:
    """Return rank `rank`'s part of each tensor, all with one index (R-CP-2): [rows, P] to [rows, P / size], [P] to [P
    / size].

    `cu_seqlens` are those of the rows flattened, as `batch.flatten` gives them. Raises BatchRefused as `shard_index`.
    """
    totals = {name: tensor.numel() for name, tensor in tensors.items()}
    if len(set(totals.values())) != 1:
        raise PackproofError(
            what=f"all tensors must have the same number of tokens, got {', '.join(f'{name} {total}' for name, total in totals.items())}",
            where="context parallel cut",
            fix="give tensors with one value for each token of the rows",
        )
    index = shard_index(
        cu_seqlens, rank, size, layout=layout, rows=rows, total_tokens=next(iter(totals.values())), check=check
    )
    return {name: select(tensor, index) for name, tensor in tensors.items()}


def select(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the values at `index` (of `shard_index`, over all rows): [rows, P] to [rows, P / size]."""
    # Flattened first: over a second dimension torch selects three times as slowly.
    return tensor.reshape(-1).index_select(0, index).view(*tensor.shape[:-1], -1)


def gather(
    shards: Sequence[torch.Tensor], cu_seqlens: torch.Tensor, *, layout: str | Layout = "zigzag", rows: int = 1
) -> torch.Tensor:
    """Return the whole rows from the ranks' shares, given in order of ranks (R-CP-5): [rows, P / size] to [rows, P].

    Raises PackproofError where a shard has another shape than the first, BatchRefused as `shard_index`.
    """
    if other := next((rank for rank, shard in enumerate(shards) if shard.shape != shards[0].shape), None):
        raise PackproofError(
            what=f"must have the shape of rank 0's shard, {list(shards[0].shape)}, got {list(shards[other].shape)}",
            where=f"context parallel rank {other}",
            fix="give every rank's part of the same rows",
        )
    size, total = len(shards), shards[0].numel() * len(shards)
    order = torch.cat(
        [shard_index(cu_seqlens, rank, size, layout=layout, rows=rows, total_tokens=total) for rank in range(size)]
    )
    together = torch.cat([shard.reshape(-1) for shard in shards])
    whole = torch.empty_like(together).index_copy_(0, order, together)
    return whole.view(*shards[0].shape[:-1], -1)


def find_layout(layout: str | Layout) -> Layout:
    """Return the layout of this name. Raises PackproofError for an unknown one."""
    if isinstance(layout, Layout):
        return layout
    if layout not in LAYOUTS:
        raise PackproofError(
            what=f"must be one of {', '.join(LAYOUTS)}, got {layout!r}",
            where="context parallel layout",
            fix=f"choose one of {', '.join(LAYOUTS)}",
        )
    return LAYOUTS[layout]


def partitioned_indices(cu_seqlens: torch.Tensor, total_tokens: int, size: int, rank: int) -> torch.Tensor:
    """Return the indices of Transformer Engine's kernel `thd_get_partitioned_indices`, in torch on any device: [T /
    size] int32.

    Unlike the kernel it refuses segments that do not divide (R-CP-3).
    """
    return shard_index(cu_seqlens, rank, size, total_tokens=total_tokens).int()


def check_boundaries(boundaries: torch.Tensor, pieces: int, *, rows: int, total: int) -> None:
    """Refuse `boundaries` [K] int64 that are not those of `rows` rows and `total` tokens in segments that `pieces`
    divides: BatchRefused.
    """
    ends = boundaries[:: max(len(boundaries) - 1, 1)].tolist()
    is_torn = ends != [0, total] or int(boundaries.diff().amin()) < 0
    if rows > 1:
        seams = torch.arange(rows + 1, device=boundaries.device) * (total // rows)
        found = boundaries[torch.searchsorted(boundaries, seams).clamp_(max=len(boundaries) - 1)]
        is_torn = is_torn or not torch.equal(found, seams)
    if is_torn or bool(boundaries.remainder(pieces).any()):
        raise _refused(boundaries.cpu(), pieces, rows=rows, total=total)


@contextlib.contextmanager
def index_for_megatron() -> Iterator[None]:
    """Let megatron-core cut its batches per document without Transformer Engine or without CUDA; undone on exit.

    `megatron.core.utils._get_batch_on_this_cp_rank_per_document_balancing` asks its module's name `tex` for the
    kernel; that one name is set. Where the kernel can run nothing is touched.
    """
    from megatron.core import utils  # noqa: PLC0415 - heavy, and needed only by those who enter

    theirs = utils.tex
    if theirs is None or not torch.cuda.is_available():
        utils.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    try:
        yield
    finally:
        utils.tex = theirs


def _expand(boundaries: torch.Tensor, owned: tuple[int, ...], pieces: int, count: int) -> torch.Tensor:
    """Return the positions of the owned pieces of each unit, unit after unit: [count] int64."""
    scaled = boundaries // pieces
    length = scaled.diff()
    # Within a piece, position minus place in the index is constant: the piece begins at scaled·pieces + length·piece,
    # and in the index at scaled·len(owned) + length·order.
    ahead = torch.tensor([piece - order for order, piece in enumerate(owned)], device=boundaries.device)
    offsets = torch.addr((scaled[:-1, None] * (pieces - len(owned))).expand(-1, len(owned)), length, ahead)
    lengths = length[:, None].expand_as(offsets).reshape(-1)
    # Taken by piece numbers: half as slow as repeating the offsets themselves.
    numbers = torch.repeat_interleave(lengths, output_size=count)
    return offsets.view(-1).index_select(0, numbers).add_(torch.arange(count, device=boundaries.device))


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise PackproofError(
            what=f"must be from 0 to {size - 1}, got {rank}",
            where="context parallel rank",
            fix="give a rank from 0 to size - 1",
        )


def _check_rows(pieces: int, *, size: int, rows: int, total: int) -> None:
    if rows < 1 or total % (rows * pieces):
        raise BatchRefused(
            kind="indivisible_segment",
            row=0,
            what=f"the tokens of each row must be a multiple of the {size} ranks, got {total} tokens in {rows} rows",
            where="row 0",
            fix="make pack_length a multiple of cp",
        )


def _refused(boundaries: torch.Tensor, pieces: int, *, rows: int, total: int) -> BatchRefused:
    """Return the refusal of the first fault of boundaries that have one."""
    lengths = boundaries.diff()
    if boundaries[0] != 0:
        return _boundary_refused("cu_start", f"cu_seqlens must begin at 0, got {int(boundaries[0])}")
    if (lengths < 0).any():
        entry = int((lengths < 0).nonzero()[0]) + 1
        pair = f"{int(boundaries[entry - 1])} and then {int(boundaries[entry])}"
        return _boundary_refused("cu_order", f"cu_seqlens has {pair} at entry {entry}")
    if boundaries[-1] != total:
        return _boundary_refused(
            "cu_end", f"cu_seqlens must end at {total}, the number of tokens, got {int(boundaries[-1])}"
        )
    if not (lengths % pieces).any():
        return _boundary_refused(
            "cu_end", f"cu_seqlens must have a boundary between the {rows} rows of {total // rows} tokens"
        )
    segment = int((lengths % pieces).nonzero()[0])
    row = int(boundaries[segment]) // max(total // rows, 1)
    first = int(torch.searchsorted(boundaries, row * (total // rows)))
    return BatchRefused(
        kind="indivisible_segment",
        row=row,
        what=f"segment {segment - first} must have a multiple of {pieces} (2·cp) tokens, got {int(lengths[segment])}",
        where=f"row {row}",
        fix="build the rows for this context_parallel_size, with a pack_length that is a multiple of 2·cp",
    )


def _boundary_refused(kind: str, what: str) -> BatchRefused:
    fix = "give the boundaries of whole rows, without the -1 that fills them up (batches.flatten joins them)"
    return BatchRefused(kind=kind, row=None, what=what, where="cu_seqlens", fix=fix)


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """Return Transformer Engine's kernel, asked for only when a tensor lies on CUDA."""
    try:
        importlib.import_module("transformer_engine.pytorch")  # loads the library that the next import needs
        kernel: Callable[..., Any] = importlib.import_module("transformer_engine_torch").thd_get_partitioned_indices
    except ImportError:
        return None
    return kernel
