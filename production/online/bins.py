"""Squeeze the sequences of one bin into a row, end to end, with every padding that NeMo-RL adds (R-ONLINE-4,
R-ONLINE-5).

The squeeze is one gather out of the padded batch and one index for labels, whatever the number of sequences.

Reference: `reference/microbatches.py`, R-ONLINE-4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from production.errors import PackproofError
from production.online.padded_batch import PAD_TOKEN_ID, PaddedBatch, round_up

Precision = Literal["unquantized", "fp8_blockwise", "fp8_mxfp8", "fp8_other"]
ROW_MULTIPLES: dict[str, int] = {"unquantized": 1, "fp8_blockwise": 128, "fp8_mxfp8": 32, "fp8_other": 16}
"""Multiple that the kernels of a precision need of a rank's share of the row."""
HYBRID_EXPERT_MULTIPLE = 128
"""Multiple that the flex dispatcher with the HybridEP backend needs."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Lengths to which the online path pads; `choose_padding` derives them from a job's layout."""

    sequence_multiple: int = 1
    """Multiple of each sequence: `make_sequence_length_divisible_by`."""
    row_multiple: int = 1
    """Multiple of the whole row; the row's last sequence takes the padding."""
    row_length: int | None = None
    """`pad_packed_seq_to`: the one length of all rows of a data-parallel rank, where there is more than one pipeline stage."""

    def __post_init__(self) -> None:
        """Refuse lengths that no row could satisfy."""
        if min(self.sequence_multiple, self.row_multiple) < 1 or (self.row_length is not None and self.row_length < 1):
            raise PackproofError(what=f"{self}", where="padding", fix="give at least 1")
        if self.row_length is not None and self.row_length % self.row_multiple:
            raise PackproofError(
                what=f"must be a multiple of {self.row_multiple}, got {self.row_length}",
                where="pad_packed_seq_to",
                fix="round it up to the multiple (choose_padding does)",
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Squeezed:
    """Holds the sequences of a bin as one row of T tokens."""

    input_ids: torch.Tensor
    """[1, T] int64, 0 in padding."""
    position_ids: torch.Tensor
    """[1, T] int64: from 0 in each sequence, 0 in padding. No model is given them (R-ONLINE-7): dumps keep them to be looked at."""
    target_ids: torch.Tensor
    """[1, T] int64: the ids rolled by one within each sequence with its padding, so its last is its first id."""
    target_mask: torch.Tensor
    """[1, T] float32: `token_mask[:, 1:]` times the sample mask, where the target lies in the sequence; else 0."""
    token_mask: torch.Tensor
    """[1, T] float32: the mask of the tokens themselves times the sample mask, 0 in padding."""
    cu_seqlens: torch.Tensor
    """[K] int32: true lengths, added up."""
    cu_seqlens_padded: torch.Tensor
    """[K] int32, from 0 to T: where the sequences lie."""
    max_seqlen: int
    """The longest sequence, padding included."""


def domain_factor(*, context_parallel_size: int, tensor_parallel_size: int, sequence_parallel: bool) -> int:
    """Return the number that must divide each sequence's length: 2·cp where cp > 1, times tp with sequence
    parallelism (R-ONLINE-4).
    """
    factor = 2 * context_parallel_size if context_parallel_size > 1 else 1
    return factor * tensor_parallel_size if sequence_parallel else factor


def choose_padding(
    *,
    make_sequence_length_divisible_by: int,
    context_parallel_size: int,
    tensor_parallel_size: int,
    sequence_parallel: bool,
    pipeline_parallel_size: int,
    precision: Precision,
    hybrid_expert_parallel: bool,
    longest_bin: int,
) -> Padding:
    """Return the padding of a data-parallel rank (R-ONLINE-5). `longest_bin`, that of its own bins (`padded_batch.longest_bin`), counts where there is
    more than one pipeline stage.

    Raises PackproofError where the sequences' multiple is none of the domain factor, and for an unknown precision.
    """
    if precision not in get_args(Precision):
        raise PackproofError(
            what=f"must be one of {', '.join(get_args(Precision))}, got {precision!r}",
            where="precision",
            fix=f"choose one of {', '.join(get_args(Precision))}",
        )
    factor = domain_factor(
        context_parallel_size=context_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        sequence_parallel=sequence_parallel,
    )
    if make_sequence_length_divisible_by < 1 or make_sequence_length_divisible_by % factor:
        raise PackproofError(
            what=f"must be a multiple of {factor} (2·cp, times tp with sequence parallelism), got {make_sequence_length_divisible_by}",
            where="make_sequence_length_divisible_by",
            fix=f"give a multiple of {factor}",
        )
    kernel = max(ROW_MULTIPLES[precision], HYBRID_EXPERT_MULTIPLE if hybrid_expert_parallel else 1)
    row_multiple = kernel * factor if kernel > 1 else 1
    return Padding(
        sequence_multiple=make_sequence_length_divisible_by,
        row_multiple=row_multiple,
        row_length=round_up(longest_bin, row_multiple) if pipeline_parallel_size > 1 else None,
    )


def squeeze(padded_batch: PaddedBatch, padding: Padding) -> Squeezed:
    """Lay the sequences of a padded batch end to end in one row (R-ONLINE-4, R-ONLINE-5).

    Each sequence is padded to a multiple of `sequence_multiple`, and the last one takes what the row's length
    needs. Raises PackproofError if the sequences exceed `row_length`.
    """
    lengths = padded_batch.input_lengths
    padded = (lengths + padding.sequence_multiple - 1) // padding.sequence_multiple * padding.sequence_multiple
    total = int(padded.sum())
    row = padding.row_length if padding.row_length is not None else round_up(total, padding.row_multiple)
    if row < total:
        raise PackproofError(
            what=f"must be at least the {total} tokens of the bin with its padding, got {row}",
            where="pad_packed_seq_to",
            fix="give the length of the rank's longest bin (padded_batch.longest_bin)",
        )
    padded[-1] += row - total
    ends = padded.cumsum(0)
    starts = ends - padded
    sequence = torch.arange(len(lengths)).repeat_interleave(padded, output_size=row)
    place = torch.arange(row) - starts.index_select(0, sequence)
    length, width = lengths.index_select(0, sequence), padded_batch.input_ids.shape[1]
    first = sequence * width  # one index into the flat padded batch: two into a matrix take five times as long

    def taken(tensor: torch.Tensor, places: torch.Tensor, fill: int = 0) -> torch.Tensor:
        values = tensor.reshape(-1).index_select(0, first + places.clamp(max=width - 1))
        # Filled, not multiplied: what the padded batch holds behind a sequence may be anything.
        return values.masked_fill_(places >= length, fill)

    input_ids = taken(padded_batch.input_ids, place, PAD_TOKEN_ID)
    weight = padded_batch.sample_mask.index_select(0, sequence)
    following = place + 1
    rolled = torch.arange(row) + 1
    rolled[ends - 1] = starts
    return Squeezed(
        input_ids=input_ids[None],
        position_ids=torch.where(place < length, place, 0)[None],
        target_ids=input_ids.index_select(0, rolled)[None],
        target_mask=(taken(padded_batch.token_mask, following) * weight)[None],
        token_mask=(taken(padded_batch.token_mask, place) * weight)[None],
        cu_seqlens=_boundaries(lengths),
        cu_seqlens_padded=_boundaries(padded),
        max_seqlen=int(padded.max()),
    )


def _boundaries(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
