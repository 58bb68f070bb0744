"""Hold tokenized conversations as a right-padded batch before they are squeezed, and pack them into bins (docs/SPEC.md#online-path
).

A padded batch of B sequences holds B times the longest; the form is NeMo-RL's, since NeMo-RL's masks and divisor are
defined on it.

Reference: `reference/microbatches.py`, R-ONLINE-2 and 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from production.errors import PackproofError
from production.online.packing import Bins, pack

PAD_TOKEN_ID = 0
"""Id in the padding of a squeezed row, whatever the tokenizer's pad token is (R-ONLINE-4)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """Holds a tokenized conversation with the mask of its messages (`chat.ChatTokenizer` makes them)."""

    token_ids: torch.Tensor
    """[L] int64."""
    token_mask: torch.Tensor
    """[L] float32: 1 for the tokens of assistant messages, each at its own position: not shifted."""
    weight: float = 1.0
    """0 for a conversation that is too long and was cut to a stub, which counts nowhere (R-ONLINE-8)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedBatch:
    """Holds B sequences of at most S tokens, right-padded, on the host, without `packed_cu_seqlens`: they are not
    packed yet.
    """

    input_ids: torch.Tensor
    """[B, S] int64, padded with the tokenizer's pad token. Nothing reads the padding: a squeezed row has its own."""
    token_mask: torch.Tensor
    """[B, S] float32: of the tokens themselves, not of their targets."""
    input_lengths: torch.Tensor
    """[B] int64: true lengths."""
    sample_mask: torch.Tensor
    """[B] float32: the weight of each sequence, 0 for one that does not count."""

    def valid_tokens(self) -> torch.Tensor:
        """Return the part of these sequences in the loss's divisor (R-ONLINE-6): Σ token_mask[:, 1:] · sample_mask, a
        scalar float64.
        """
        return (self.token_mask[:, 1:].sum(dim=1, dtype=torch.float64) * self.sample_mask).sum()


def build_padded_batch(
    conversations: Sequence[Conversation], *, make_sequence_length_divisible_by: int, pad_token_id: int = PAD_TOKEN_ID
) -> PaddedBatch:
    """Return the conversations as a padded batch whose width is a multiple, with their weights as `sample_mask`
    (R-ONLINE-2).

    Raises PackproofError for no conversation, or a conversation of no token.
    """
    multiple = _multiple(make_sequence_length_divisible_by)
    lengths = torch.tensor([len(each.token_ids) for each in conversations], dtype=torch.int64)
    if not len(lengths) or not lengths.all():
        where = f"conversation {int(lengths.argmin())}" if len(lengths) else "conversations"
        raise PackproofError(
            what="every conversation must have a token",
            where=where,
            fix="leave empty conversations out, and give at least one conversation",
        )
    width = round_up(int(lengths.max()), multiple)
    ids = torch.full((len(lengths), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(lengths), width)
    is_own = torch.arange(width) < lengths[:, None]
    ids[is_own] = torch.cat([each.token_ids for each in conversations])
    mask[is_own] = torch.cat([each.token_mask for each in conversations])
    weights = torch.tensor([each.weight for each in conversations], dtype=torch.float32)
    return PaddedBatch(input_ids=ids, token_mask=mask, input_lengths=lengths, sample_mask=weights)


def fill_bins(
    padded_batch: PaddedBatch,
    capacity: int,
    *,
    algorithm: str,
    make_sequence_length_divisible_by: int,
    data_parallel_size: int,
    seed: int | None = None,
) -> Bins:
    """Pack the global batch once, over lengths rounded up to the multiple (R-ONLINE-3); `packing.take_rank` deals the
    bins.

    `capacity` is in tokens of a row. Raises PackproofError as `packing.pack`.
    """
    multiple = _multiple(make_sequence_length_divisible_by)
    lengths = [round_up(length, multiple) for length in padded_batch.input_lengths.tolist()]
    return pack(lengths, capacity, algorithm=algorithm, multiple_of=data_parallel_size, seed=seed)


def take_sequences(padded_batch: PaddedBatch, members: Sequence[int]) -> PaddedBatch:
    """Return the sequences of one bin, in its order: the input of `process_microbatch`.

    Raises PackproofError for an empty bin.
    """
    if not members:
        raise PackproofError(
            what="a bin must hold at least one sequence",
            where="bin",
            fix="leave the bin out (raise_bin_count makes no empty bin)",
        )
    index = torch.tensor(members, dtype=torch.int64)
    fields = {field.name: getattr(padded_batch, field.name)[index] for field in dataclasses.fields(padded_batch)}
    return PaddedBatch(**fields)


def longest_bin(padded_batch: PaddedBatch, bins: Bins, *, make_sequence_length_divisible_by: int) -> int:
    """Return the tokens of the fullest bin, each sequence rounded up: rows are padded to it where pipeline stages
    need one length.

    `bins` are those of one data-parallel rank (`packing.take_rank`): ranks are padded to lengths of their own (R-ONLINE-5).
    """
    multiple = _multiple(make_sequence_length_divisible_by)
    lengths = padded_batch.input_lengths.tolist()
    return max(sum(round_up(lengths[member], multiple) for member in members) for members in bins)


def round_up(length: int, multiple: int) -> int:
    """Return the next multiple that is at least `length`."""
    return -(-length // multiple) * multiple


def _multiple(value: int) -> int:
    if value < 1:
        raise PackproofError(
            what=f"must be at least 1, got {value}", where="make_sequence_length_divisible_by", fix="give at least 1"
        )
    return value
