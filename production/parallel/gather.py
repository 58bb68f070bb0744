"""Gather the shares of context-parallel ranks over their process group, with gradients: one message forward, at most
one back.

Which gradient is right depends on the losses, not on the gather, so it is named. Let rank r hold x_r, let all ranks hold the
whole W = gather(x_0 … x_{n-1}), and let rank r's loss be l_r(W). Where every rank's loss is another part of the job's loss,
which is Σ l_r, rank r needs d(Σ_s l_s)/dx_r: the *sum* over ranks of their gradients at its positions. Where every rank
computes the same loss l from the whole, the sum would be n · dl/dx_r: rank r needs its *own* gradient's part alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed

from production.errors import PackproofError
from production.parallel.context_parallel import Layout, find_layout, shard_index


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Exchanges the ranks' shares [t, ...] and the whole row [T, ...], T = size · t. Not differentiable."""

    group: distributed.ProcessGroup
    """The ranks that share the row."""
    rank: int
    """This rank's place in the group."""
    size: int
    """Ranks of the group."""
    order: torch.Tensor
    """[T] int64: the positions that rank 0 owns, then those of rank 1, and so on."""

    def gather(self, share: torch.Tensor) -> torch.Tensor:
        """Return every position of the row, from all ranks' shares (R-CP-5): [t, ...] to [T, ...].

        All ranks must call it.
        """
        together = share.new_empty(self.size * len(share), *share.shape[1:])
        # Newer versions of torch warn of the older name.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        gather(together, share.contiguous(), group=self.group)
        return torch.empty_like(together).index_copy_(0, self.order, together)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the values of the whole row at the positions of this rank: [T, ...] to [t, ...]; no message."""
        return whole.index_select(0, self.order.view(self.size, -1)[self.rank])

    def summed(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks at this rank's positions: [T, ...] to [t, ...]. All ranks must call it.

        Added here, so that the result does not hang on the backend; torch adds half precision in float32.
        """
        pieces = whole.index_select(0, self.order)
        received = torch.empty_like(pieces)
        distributed.all_to_all_single(received, pieces, group=self.group)
        return received.view(self.size, -1, *whole.shape[1:]).sum(0)


def exchange(
    cu_seqlens: torch.Tensor,
    total_tokens: int,
    group: distributed.ProcessGroup,
    *,
    layout: str | Layout = "zigzag",
    rows: int = 1,
    device: torch.device | None = None,
) -> Exchange:
    """Return the exchange of one sequence of `total_tokens` with these boundaries [K] among the ranks of `group`.

    Raises BatchRefused as `context_parallel.shard_index`: where the boundaries do not divide, or are not those of a
    sequence of this length.
    """
    size = distributed.get_world_size(group)
    parts = [
        shard_index(
            cu_seqlens, rank, size, layout=layout, rows=rows, total_tokens=total_tokens, check=rank == 0
        )  # the same boundaries every time: one check
        for rank in range(size)
    ]
    return Exchange(
        group=group,
        rank=distributed.get_rank(group),
        size=size,
        order=torch.cat(parts).to(cu_seqlens.device if device is None else device),
    )


def gather_ranks(
    tensor: torch.Tensor,
    cu_seqlens: torch.Tensor,
    group: distributed.ProcessGroup,
    *,
    layout: str | Layout = "zigzag",
    dim: int = 0,
    rows: int = 1,
    gradient: Literal["sum", "own"],
) -> torch.Tensor:
    """Return the whole row from all ranks' shares of it, on every rank, in row order: t tokens along `dim` to T =
    size · t.

    `tensor` is this rank's share (of any dtype, with `dim` of t tokens), `cu_seqlens` [K] the boundaries of the whole
    row, which may be `rows` flattened rows. All ranks of `group` must call it with equal shapes. With `gradient="sum"`
    the backward pass gives each rank the sum over ranks of the gradients at its positions, so all ranks must call
    backward; with "own" it gives this rank's own gradient there, without a message: for a loss that every rank computes
    alike from the whole (the module's docstring has the mathematics). In a group of one rank the tensor is returned as
    it is.

    Raises PackproofError for another `gradient`, BatchRefused as `context_parallel.shard_index`.
    """
    if gradient not in ("sum", "own"):
        raise PackproofError(
            what=f"gradient must be sum or own, got {gradient!r}",
            where="gather over context parallel ranks",
            fix='choose "sum" where the ranks\' losses add up, "own" where all ranks compute the same loss',
        )
    find_layout(layout)
    if (size := distributed.get_world_size(group)) == 1:
        return tensor
    first = tensor.movedim(dim, 0)
    how = exchange(cu_seqlens, size * len(first), group, layout=layout, rows=rows, device=tensor.device)
    whole: torch.Tensor = _Gather.apply(first, how, gradient)
    return whole.movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, how: Exchange, gradient: str) -> torch.Tensor:
        ctx.how, ctx.gradient = how, gradient
        return how.gather(share)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, whole: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        how: Exchange = ctx.how
        return how.summed(whole) if ctx.gradient == "sum" else how.own(whole), None, None
