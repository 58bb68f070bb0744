"""The online path from conversations to a row, and the one function in which it and the direct path meet (docs/SPEC.md#online-path and #both-paths).

Lists and loops, a sequence at a time; every rank's share is cut out of the whole row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from reference import context_parallel, multi_token, packing
from reference.batches import Batch, flatten_boundaries
from reference.multi_token import Depth
from reference.packing import Bins

PAD_TOKEN_ID = 0
"""Filling of a squeezed row, whatever the tokenizer's pad token is."""


class PaddingError(ValueError):
    """Error for lengths that cannot be padded as configured; names the lengths, the reason and the fix."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedBatch:
    """Sequences right-padded to one width. R-ONLINE-2."""

    input_ids: torch.Tensor
    """[B, S] int64."""
    token_mask: torch.Tensor
    """[B, S] float32: 1 for a token that trains; the mask belongs to the tokens, not to their targets."""
    input_lengths: list[int]
    sample_mask: torch.Tensor
    """[B] float32."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Lengths to which the online path pads."""

    sequence_multiple: int
    row_multiple: int
    row_length: int | None
    """The one length of all rows of a data-parallel rank, where there is more than one pipeline stage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Squeezed:
    """The sequences of one bin end to end: tensors [T]. R-ONLINE-4."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    """0 in padding. No model is given them: they are there to be looked at."""
    target_ids: torch.Tensor
    """Rolled by one within each sequence with its padding."""
    target_mask: torch.Tensor
    token_mask: torch.Tensor
    """Of the tokens themselves."""
    cu_seqlens: list[int]
    """True lengths, added up."""
    cu_seqlens_padded: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """Input of one rank's model for one microbatch, tensors [n]. R-MEET-1."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    """Tensors that the model receives."""
    cu_seqlens: list[int]
    """Of the whole row, padding included: what attention gets four times."""
    max_seqlen: int
    total_tokens: int
    """Of this rank's share, on both paths."""
    target_ids: torch.Tensor
    target_mask: torch.Tensor
    """Mask of the targets that the loss counts."""
    depths: list[Depth]
    """Depths 1 to D."""
    row: Squeezed | None
    """Online: what the loss outside the model needs."""


def padded_batch(
    conversations: Sequence[tuple[Sequence[int], Sequence[int]]], multiple: int, pad_token_id: int = PAD_TOKEN_ID
) -> PaddedBatch:
    """Pad tokens and masks of conversations at the right, to a multiple, with the tokenizer's pad token. R-ONLINE-2."""
    lengths = [len(tokens) for tokens, _ in conversations]
    if not lengths or 0 in lengths:
        raise PaddingError(
            "every conversation must have a token, and a batch at least one conversation; leave empty conversations out"
        )
    width = round_up(max(lengths), multiple)
    ids = [[*tokens] + [pad_token_id] * (width - len(tokens)) for tokens, _ in conversations]
    masks = [[*mask] + [0] * (width - len(mask)) for _, mask in conversations]
    return PaddedBatch(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        token_mask=torch.tensor(masks, dtype=torch.float32),
        input_lengths=lengths,
        sample_mask=torch.ones(len(lengths), dtype=torch.float32),
    )


def bins(lengths: Sequence[int], multiple: int, capacity: int, packer: str, data_parallel_size: int) -> Bins:
    """Pack the global batch as one, over rounded lengths; rank r takes bins r, r + dp, … R-ONLINE-3."""
    packed = packing.PACKERS[packer]([round_up(length, multiple) for length in lengths], capacity)
    return packing.raise_bin_count(packed, data_parallel_size)


def take(batch: PaddedBatch, members: Sequence[int]) -> PaddedBatch:
    """Return the sequences of one bin, in the bin's order."""
    return PaddedBatch(
        input_ids=torch.stack([batch.input_ids[member] for member in members]),
        token_mask=torch.stack([batch.token_mask[member] for member in members]),
        input_lengths=[batch.input_lengths[member] for member in members],
        sample_mask=torch.stack([batch.sample_mask[member] for member in members]),
    )


def valid_tokens(batch: PaddedBatch) -> float:
    """Return the divisor: the sum of the mask without its first column, times the sample mask, over the global batch. R-ONLINE-6."""
    return sum(
        float(mask[1:].sum()) * float(weight) for mask, weight in zip(batch.token_mask, batch.sample_mask, strict=True)
    )


def padding(
    *,
    multiple: int,
    context_parallel_size: int,
    tensor_parallel_size: int,
    sequence_parallel: bool,
    pipeline_parallel_size: int,
    precision: str,
    hybrid_expert_parallel: bool,
    longest_bin: int,
) -> Padding:
    """Return a data-parallel rank's padding; `longest_bin` is the longest of the rank's own bins. R-ONLINE-4, R-ONLINE-5."""
    factor = 1
    if context_parallel_size > 1:
        factor *= 2 * context_parallel_size
    if tensor_parallel_size > 1 and sequence_parallel:
        factor *= tensor_parallel_size
    if multiple % factor != 0:
        raise PaddingError(f"the length of a padded sequence must be a multiple of {factor}, got {multiple}")
    kernel = {"unquantized": 1, "fp8_blockwise": 128, "fp8_mxfp8": 32, "fp8_other": 16}[precision]
    if hybrid_expert_parallel:
        kernel = max(kernel, 128)
    row_multiple = kernel * factor if kernel > 1 else 1
    row_length = round_up(longest_bin, row_multiple) if pipeline_parallel_size > 1 else None
    return Padding(sequence_multiple=multiple, row_multiple=row_multiple, row_length=row_length)


def squeeze(batch: PaddedBatch, how: Padding) -> Squeezed:
    """Lay the sequences end to end, each padded; the last sequence also takes the padding of the whole row. R-ONLINE-4, R-ONLINE-5."""
    padded = [round_up(length, how.sequence_multiple) for length in batch.input_lengths]
    whole = round_up(sum(padded), how.row_multiple) if how.row_length is None else how.row_length
    if whole < sum(padded):
        raise PaddingError(
            f"the row length must be at least the {sum(padded)} tokens of the bin, got {whole}; give the longest bin of the rank"
        )
    padded[-1] += whole - sum(padded)
    ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    target_mask: list[float] = []
    token_mask: list[float] = []
    for number, (length, size) in enumerate(zip(batch.input_lengths, padded, strict=True)):
        weight = float(batch.sample_mask[number])
        own = batch.input_ids[number, :length].tolist() + [PAD_TOKEN_ID] * (size - length)
        mask = [each * weight for each in batch.token_mask[number, :length].tolist()] + [0.0] * (size - length)
        ids += own
        positions += [*range(length)] + [0] * (size - length)
        targets += [*own[1:], own[0]]
        target_mask += [*mask[1:], 0.0]
        token_mask += mask
    return Squeezed(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        position_ids=torch.tensor(positions, dtype=torch.int64),
        target_ids=torch.tensor(targets, dtype=torch.int64),
        target_mask=torch.tensor(target_mask, dtype=torch.float32),
        token_mask=torch.tensor(token_mask, dtype=torch.float32),
        cu_seqlens=cumsum(batch.input_lengths),
        cu_seqlens_padded=cumsum(padded),
    )


def process_microbatch(
    batch: Batch | PaddedBatch,
    *,
    rank: int,
    context_parallel_size: int,
    how: Padding | None = None,
    depths: int = 0,
    layout: str = "zigzag",
) -> Microbatch:
    """Make one microbatch for one rank: reuse stored boundaries, or squeeze the sequences now. R-MEET-1, R-MEET-2."""
    if isinstance(batch, Batch):  # it has `packed_cu_seqlens`
        return direct(batch, rank, context_parallel_size, depths, layout)
    if how is None:
        raise PaddingError("padding must be given on the online path")
    row = squeeze(batch, how)

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return context_parallel.shard(tensor, row.cu_seqlens_padded, rank, context_parallel_size, layout)

    return Microbatch(
        input_ids=share(row.input_ids),
        position_ids=None,  # R-ONLINE-7
        labels=None,
        loss_mask=share(row.token_mask) if depths else None,  # R-ONLINE-7
        cu_seqlens=row.cu_seqlens_padded,
        max_seqlen=longest(row.cu_seqlens_padded),
        total_tokens=len(row.input_ids) // context_parallel_size,
        target_ids=share(row.target_ids),
        target_mask=share(row.target_mask),
        depths=[cut_depth(each, share) for each in online_depths(row, depths)],
        row=row,
    )


def online_depths(row: Squeezed, count: int) -> list[Depth]:
    """Return depths 1 to `count` of a squeezed row: a token's label is the next id, with the mask of that id. R-ONLINE-7."""
    return multi_token.depths(
        input_ids=row.input_ids,
        target_ids=multi_token.shift(row.input_ids, row.cu_seqlens_padded, 1),
        token_mask=multi_token.shift(row.token_mask, row.cu_seqlens_padded, 1),
        position_ids=None,
        cu_seqlens=row.cu_seqlens_padded,
        count=count,
    )


def direct(batch: Batch, rank: int, context_parallel_size: int, depths: int, layout: str) -> Microbatch:
    """Make a microbatch of the direct path: flatten the rows, multiply their mask by the sample mask, cut all tensors with one index. R-MEET-1."""
    boundaries, max_seqlen = flatten_boundaries(batch)
    cu = boundaries.tolist()
    mask = torch.cat([row * weight for row, weight in zip(batch.token_mask, batch.sample_mask, strict=True)])
    whole = {
        "input_ids": batch.input_ids.reshape(-1),
        "target_ids": batch.target_ids.reshape(-1),
        "token_mask": mask,
        "position_ids": batch.position_ids.reshape(-1),
    }

    def share(tensor: torch.Tensor) -> torch.Tensor:
        if layout == "zigzag":
            return context_parallel.shard(tensor, cu, rank, context_parallel_size, layout)
        rows = tensor.reshape(batch.input_ids.shape)  # what is cut is a row, whatever its segments
        parts = [context_parallel.shard(row, [0, len(row)], rank, context_parallel_size, layout) for row in rows]
        return torch.cat(parts)

    shifted = multi_token.depths(**whole, cu_seqlens=cu, count=depths)
    own = {name: share(tensor) for name, tensor in whole.items()}
    return Microbatch(
        input_ids=own["input_ids"],
        position_ids=own["position_ids"],
        labels=own["target_ids"],
        loss_mask=own["token_mask"],
        cu_seqlens=cu,
        max_seqlen=max_seqlen,
        total_tokens=len(own["input_ids"]),
        target_ids=own["target_ids"],
        target_mask=own["token_mask"],
        depths=[cut_depth(each, share) for each in shifted],
        row=None,
    )


def cut_depth(depth: Depth, share: Callable[[torch.Tensor], torch.Tensor]) -> Depth:
    """Return a rank's share of one depth, cut with the row's index. R-MTP-2."""
    return Depth(
        input_ids=share(depth.input_ids),
        target_ids=share(depth.target_ids),
        token_mask=share(depth.token_mask),
        position_ids=None if depth.position_ids is None else share(depth.position_ids),
    )


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple that is at least the length."""
    while length % multiple != 0:
        length += 1
    return length


def cumsum(lengths: Sequence[int]) -> list[int]:
    """Return the running sums of the lengths, from 0: their segment boundaries."""
    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    return boundaries


def longest(boundaries: Sequence[int]) -> int:
    """Return the length of the longest segment."""
    return max(end - start for start, end in itertools.pairwise(boundaries))
