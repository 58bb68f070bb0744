"""Feed the tables of `production.parallel.multi_token` to megatron-core's own multi-token prediction block, which
then sends no message.

One name of megatron-core is replaced, `multi_token_prediction.roll_tensor`, by one that hands the tables out in the order of its
calls: the tensors are cloned on the way, so only the order tells them apart. It fails closed where a call cannot be the one
expected, and `verify` holds the values of every call against it too (on CUDA that waits for the device).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction

from production.errors import PackproofError
from production.parallel.multi_token import DepthTables
from production.rows.batch import FlatBatch

Stage = Literal["embedding_and_loss", "embedding", "loss"]
Weights = Literal["rank", "rows"]

_EMBEDDING = ("input_ids", "position_ids")
_LOSS = ("target_ids", "token_mask")
TOKEN_SUMS = "packproof_token_sums"
"""Key of megatron-core's tracker under which the sums of `DepthFeed.token_sums` stand, [3, D], added up over microbatches."""


@dataclass
class MultiTokenParams(PackedSeqParams):  # type: ignore[misc] # megatron-core has no types
    """Holds the boundaries of a microbatch with the tables that answer its rolls; without a feed, megatron-core's own
    roll runs.
    """

    feed: DepthFeed | None = None
    """The microbatch's tables. megatron-core copies these parameters by field, so that copies share it."""


class DepthFeed:
    """The tables of one microbatch on one rank, handed out in the order of megatron-core's calls.

    That order is ids, positions (and padding mask) at each depth in the block, then labels, mask at each depth in the
    loss: from depth 1, or from 0 where the model is given no labels and rolls them out of the ids (`tables.own_mask`).
    After the last it begins again, for a forward pass that is computed again as a whole.

    `weights` says what a token's MTP loss is divided by (R-MTP-3): `rank` is
    megatron-core's own, sums of the mask over one rank and microbatch; `rows` takes them over all ranks that share the
    rows, so that the gradient does not depend on cp. Both with `calculate_per_token_loss` and without it.
    """

    def __init__(
        self,
        tables: DepthTables,
        *,
        weights: Weights = "rank",
        stage: Stage = "embedding_and_loss",
        verify: bool = False,
    ) -> None:
        """Feed the tables; `stage` says which of the two a pipeline stage holds; `verify` compares the values of each
        call with the tables.
        """
        self.tables = tables
        self.verify = verify
        # With one rank both weights are the same, to the bit.
        self._scale = tables.size if weights == "rows" else 1
        embedding = (*_EMBEDDING, "padding_mask") if tables.padding_mask is not None else _EMBEDDING
        derives_labels = tables.own_mask is not None
        self._slots = [
            (name, depth)
            for part, names, first in (("embedding", embedding, 1), ("loss", _LOSS, 0 if derives_labels else 1))
            if part in stage
            for depth in range(first, tables.depths + 1)
            for name in names
        ]
        self._known = {
            getattr(tables, name)[depth].data_ptr(): (name, depth)
            for name in (*embedding, *_LOSS)
            if getattr(tables, name) is not None
            for depth in range(tables.depths + 1)
        }
        if tables.own_mask is not None:
            self._known[tables.own_mask[0].data_ptr()] = ("own_mask", 0)
        elif self._scale != 1:
            whole = "token_mask, where the model must be given the feed's own loss_mask,"
            self._known[tables.token_mask[0].data_ptr()] = (whole, 0)
        self._next = 0

    @property
    def loss_mask(self) -> torch.Tensor:
        """[B, n] float32: what the model must be given as `loss_mask`, from which it takes the sum at depth 0.

        With `weights="rows"` only its sum has a meaning; the loss outside the model takes `tables.token_mask[0]`. A model
        without labels is given the tokens' own mask.
        """
        return self._counting_mask if self.tables.own_mask is None else self.tables.own_mask[0]

    @property
    def _counting_mask(self) -> torch.Tensor:
        """Return [B, n] float32: the mask of depth 0 as the loss must see it."""
        if self._scale == 1:
            return self.tables.token_mask[0]
        # The mask of each depth is handed out times cp, so that reported losses average to those of the rows.
        mask = torch.zeros_like(self.tables.token_mask[0])
        mask[0, 0] = self.tables.row_counts[0] / self._scale
        return mask

    @property
    def expected(self) -> str:
        """Return the description of the next call."""
        name, depth = self._slots[self._next]
        return f"{name} at depth {depth} (call {self._next + 1} of {len(self._slots)})"

    @property
    def is_between(self) -> bool:
        """Return whether the feed stands between two passes."""
        return self._next == 0

    def answer(
        self, tensor: torch.Tensor | None, *, shifts: int, dims: int, size: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the next table [B, n] and its sum, for megatron-core's roll of `tensor`: None twice for positions that the model is not given.

        Raises PackproofError where it cannot be that one.
        """
        if not self._slots:
            raise _unexpected("a roll, and the tables have no depth", "no call")
        name, depth = self._slots[self._next]
        if fault := self._fault(tensor, name, depth, shifts=shifts, dims=dims, size=size):
            raise _unexpected(fault, self.expected)
        self._next = (self._next + 1) % len(self._slots)
        if getattr(self.tables, name) is None:
            return None, None
        table = getattr(self.tables, name)[depth]
        if name != "token_mask":
            return table, table.sum()
        if self._scale == 1:
            return table, self.tables.rank_counts[depth]
        if depth == 0:
            return self._counting_mask, self.tables.row_counts[0]
        return table * self._scale, self.tables.row_counts[depth]

    def token_sums(self, loss: torch.Tensor, depth: int) -> torch.Tensor:
        """Return [3] float32 of this share at a depth: the sum of its token losses, its targets, and 1 where it divides by no target.

        `loss` is what megatron-core logs of the depth: the sum of the masked token losses over the divisor, 0 where that is 0.
        """
        divisor = self.tables.rank_counts[depth] if self._scale == 1 else self.tables.row_counts[depth]
        is_empty = (divisor == 0).to(torch.float32)
        return torch.stack([loss.float() * divisor / self._scale, self.tables.rank_counts[depth], is_empty])

    def _fault(
        self,
        tensor: torch.Tensor | None,
        name: str,
        depth: int,
        *,
        shifts: int,
        dims: int,
        size: int,
    ) -> str | None:
        """Return why this call cannot be the one expected."""
        has_table = getattr(self.tables, name) is not None
        if tensor is None or not has_table:
            return None if tensor is None and not has_table else _missing(tensor, name)
        if shifts != -1 or dims not in (-1, tensor.ndim - 1):
            return f"a roll by {shifts} over dimension {dims}"
        if size != self.tables.size:
            return f"a roll over {size} context parallel ranks, and the tables were cut for {self.tables.size}"
        origin = _origin(name, depth)
        before = getattr(self.tables, origin[0])[origin[1]]
        if tensor.shape != before.shape or tensor.dtype != before.dtype or tensor.device != before.device:
            return f"a tensor {_describe(tensor)}, and the tables are {_describe(before)}"
        # Where a tensor was not cloned on the way, its memory says which it is.
        known = self._known.get(tensor.data_ptr())
        if known is not None and known != origin:
            return f"the roll of {known[0]} from depth {known[1]}"
        if self.verify and not torch.equal(tensor, self._before(name, depth)):
            return f"values that are not {origin[0]} at depth {origin[1]}"
        return None

    def _before(self, name: str, depth: int) -> torch.Tensor:
        """Return the tensor that a call for this depth must bring."""
        origin, at = _origin(name, depth)
        if origin != "token_mask" or self._scale == 1:
            return cast("torch.Tensor", getattr(self.tables, origin)[at])
        return self._counting_mask if at == 0 else self.tables.token_mask[at] * self._scale


def _origin(name: str, depth: int) -> tuple[str, int]:
    """Return the table, and its depth, that megatron-core rolls to get this one."""
    if depth:
        return name, depth - 1
    return ("input_ids", 0) if name == "target_ids" else ("own_mask", 0)


def multi_token_params(batch: FlatBatch, tables: DepthTables, **options: Any) -> MultiTokenParams:
    """Return the thd parameters of these whole rows with the rank's tables; `options` are those of DepthFeed."""
    boundaries = batch.cu_seqlens
    return MultiTokenParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        feed=DepthFeed(tables, **options),
    )


@contextlib.contextmanager
def rolls_from_tables() -> Iterator[None]:
    """Answers megatron-core's rolls from the tables of the parameters that come with them; undone on exit.

    Beside what megatron-core logs of each depth, its tracker then holds the depths' sums by token (`TOKEN_SUMS`).

    Parameters without a feed, and calls without parameters, get megatron-core's own roll. Raises PackproofError where a
    call is not the one expected, and on leaving where a pass has begun and not ended.
    """
    upstream = multi_token_prediction.roll_tensor
    if getattr(upstream, "answers_from_tables", False):
        raise PackproofError(
            what="the feed is entered already: the rolls come from its tables",
            where="rolls_from_tables",
            fix="enter it once",
        )
    begun: set[DepthFeed] = set()
    helper = multi_token_prediction.MTPLossLoggingHelper
    logged = helper.save_metrics_to_tracker
    current: list[DepthFeed | None] = [None]

    def roll_tensor(
        tensor: torch.Tensor | None,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        feed: DepthFeed | None = getattr(packed_seq_params, "feed", None)
        current[0] = feed
        if feed is None:
            return upstream(tensor, shifts, dims, cp_group, packed_seq_params)
        answer = feed.answer(tensor, shifts=shifts, dims=dims, size=1 if cp_group is None else cp_group.size())
        if feed.is_between:
            begun.discard(feed)
        else:
            begun.add(feed)
        return answer

    def save_metrics_to_tracker(
        loss: torch.Tensor, correct: Any, total: Any, layer_number: int | None, num_layers: int, **groups: Any
    ) -> None:
        logged(loss, correct, total, layer_number, num_layers, **groups)
        if layer_number is not None and current[0] is not None:
            fresh = torch.zeros(3, num_layers, device=loss.device)
            sums = helper.tracker.setdefault(TOKEN_SUMS, fresh)
            sums[:, layer_number] += current[0].token_sums(loss.detach(), layer_number + 1)

    roll_tensor.answers_from_tables = True  # type: ignore[attr-defined]
    multi_token_prediction.roll_tensor = roll_tensor
    helper.save_metrics_to_tracker = staticmethod(save_metrics_to_tracker)
    try:
        yield
    finally:
        multi_token_prediction.roll_tensor = upstream
        helper.save_metrics_to_tracker = staticmethod(logged)
    for feed in begun:
        raise _unexpected("the end of the pass", feed.expected)


def _missing(tensor: torch.Tensor | None, name: str) -> str:
    return "nothing to roll" if tensor is None else f"a tensor {_describe(tensor)}, and the tables have no {name}"


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}".removeprefix("torch.")


def _unexpected(found: str, expected: str) -> PackproofError:
    return PackproofError(
        what=f"{found} came where {expected} was expected",
        where="multi-token prediction",
        fix="say which stage this is (stage), cut the tables for the model's cp, and give the model exactly depth 0 of the "
        "tables, with labels (without them where the tables have an own_mask); or leave the feed out, which takes megatron-core's own roll",
    )
