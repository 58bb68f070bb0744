"""The loss outside the model, as the functions that megatron-core's schedules call: direct and online, three normalizations (docs/SPEC.md#loss).

Tensors only: nothing here waits for the device, and what is reported stays [sum, count] until it is reduced over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import distributed

from production.errors import PackproofError
from production.parallel.context_parallel import find_layout
from production.parallel.gather import gather_ranks
from production.parallel.microbatches import Microbatch, OnlineRow

Normalization = Literal["per_token", "mean_of_means", "global_valid_tokens"]
Report = dict[str, torch.Tensor]
LossResult = tuple[torch.Tensor, torch.Tensor, Report] | tuple[torch.Tensor, Report]
"""Result for a schedule: (sum, trained tokens int32, report), or (loss, report)."""

REPORT = "lm loss"
"""The key that Megatron-LM reports the loss under."""
ONLINE_EPSILON = 1e-8
"""Term that the online path adds to its divisor."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Normalization of the token losses of a global batch. Raises PackproofError for an unknown normalization."""

    normalization: Normalization
    """`per_token`; `mean_of_means`, Megatron-LM's default; `global_valid_tokens`, the direct and the online path's (R-LOSS-2 to 4)."""
    num_microbatches: int
    """Number of microbatches of this global batch on each data-parallel rank, as the schedule has it."""
    context_parallel_size: int
    """cp."""
    layout: str = "zigzag"
    """Cut of rows among cp ranks."""

    def __post_init__(self) -> None:
        """Refuse what would only show in the gradient."""
        if self.normalization not in get_args(Normalization):
            raise PackproofError(
                what=f"must be one of {', '.join(get_args(Normalization))}, got {self.normalization!r}",
                where="normalization",
                fix=f"choose one of {', '.join(get_args(Normalization))}",
            )
        if min(self.num_microbatches, self.context_parallel_size) < 1:
            what = f"{self.num_microbatches} microbatches on {self.context_parallel_size} context parallel ranks"
            raise PackproofError(
                what=what, where="num_microbatches, context_parallel_size", fix="give at least 1 of each"
            )
        find_layout(self.layout)


def calculates_per_token(normalization: Normalization) -> bool:
    """Return the value for `TransformerConfig.calculate_per_token_loss`: whether megatron-core sums gradients instead of averaging (R-LOSS-2)."""
    return normalization != "mean_of_means"


def auxiliary_scale(
    normalization: Normalization, global_valid_tokens: torch.Tensor
) -> Callable[[], torch.Tensor] | None:
    """Return the value for `mtp_grad_scale_func` and `moe_grad_scale_func` of the model's config in this global batch; None leaves them unset.

    `global_valid_tokens` is a scalar (R-BATCH-5).

    With `global_valid_tokens` the schedule counts no tokens, so nothing divides the gradients of losses that are computed
    inside the model: they come out as in `per_token` only with this scale (R-LOSS-6).
    """
    if normalization != "global_valid_tokens":
        return None
    scale = 1.0 / global_valid_tokens.to(torch.float32).clamp(min=1)
    return lambda: scale


def loss_function(
    microbatch: Microbatch,
    settings: LossSettings,
    *,
    global_valid_tokens: torch.Tensor | None = None,
    tensor_group: Any = None,
    context_group: Any = None,
) -> Callable[[torch.Tensor], LossResult]:
    """Return the loss function that a forward step of either path returns beside the model's output.

    The output is token losses [1, n] on the direct path, logits [1, n, V / tp] on the online path. `global_valid_tokens`
    (scalar, R-BATCH-5 or R-ONLINE-6) is needed for the normalization of that name, the only one of the online path.
    The groups are megatron-core's; `tensor_group` None takes the current one, `context_group` is needed online at cp > 1.
    Raises PackproofError for a missing divisor or group, and for another normalization on the online path.
    """
    if microbatch.row is None:
        return lambda output: direct_loss(
            output, target_mask=microbatch.target_mask, settings=settings, global_valid_tokens=global_valid_tokens
        )
    row, divisor = microbatch.row, _needed(global_valid_tokens)
    if settings.normalization != "global_valid_tokens":
        raise PackproofError(
            what=f"must be global_valid_tokens on the online path, got {settings.normalization}",
            where="normalization",
            fix="set it to global_valid_tokens, or use the direct path",
        )

    def online(logits: torch.Tensor) -> LossResult:
        share = token_log_probabilities(logits, microbatch.target_ids, tensor_group=tensor_group)
        whole = gather_context(share, row, settings, group=context_group)
        return online_loss(
            share,
            whole,
            target_mask=microbatch.target_mask,
            row_mask=row.target_mask,
            settings=settings,
            global_valid_tokens=divisor,
        )

    return online


def direct_loss(
    token_losses: torch.Tensor,
    *,
    target_mask: torch.Tensor,
    settings: LossSettings,
    global_valid_tokens: torch.Tensor | None = None,
) -> LossResult:
    """Return a microbatch's loss from the model's token losses [1, n] and the mask of their targets [1, n] float32 (R-LOSS-1 to 4).

    `per_token` and `mean_of_means` give megatron-core a sum and a count, which it divides as its config says;
    `global_valid_tokens` gives a loss that cancels megatron-core's averaging.
    """
    total, count = _sum_and_count(token_losses, target_mask)
    report = {REPORT: torch.stack([total.detach().clone(), count.to(total.dtype)])}
    if settings.normalization != "global_valid_tokens":
        # The schedule adds counts up in int32, in place.
        return total, count.to(torch.int32), report
    loss = total / _needed(global_valid_tokens).clamp(min=1)
    return _undo_averaging(loss, settings), report


def token_log_probabilities(
    logits: torch.Tensor, target_ids: torch.Tensor, *, tensor_group: Any = None
) -> torch.Tensor:
    """Return log-probabilities [1, n] float32 of `target_ids` [1, n], from logits [1, n, V / tp] that are split over tensor-parallel ranks (R-LOSS-5).

    The result is megatron-core's vocabulary-parallel cross entropy, negated. The function works in place: float32 logits are overwritten.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: PLC0415 - only the online path needs it

    losses = vocab_parallel_cross_entropy(
        logits.transpose(0, 1).contiguous(), target_ids.transpose(0, 1).contiguous(), tp_group=tensor_group
    )
    return cast("torch.Tensor", -losses.transpose(0, 1))


def gather_context(share: torch.Tensor, row: OnlineRow, settings: LossSettings, *, group: Any = None) -> torch.Tensor:
    """Gather the whole row's log-probabilities [1, T] from every rank's share [1, T / cp], in the order of the row (R-CP-5).

    All ranks compute the same loss from the result, so each keeps the gradient of its own share, without a message. Raises
    PackproofError if `group` is not the row's.
    """
    if settings.context_parallel_size == 1:
        return share
    if group is None or distributed.get_world_size(group) != settings.context_parallel_size:
        raise PackproofError(
            what=f"must be the group of the {settings.context_parallel_size} context parallel ranks",
            where="context_group",
            fix="give parallel_state.get_context_parallel_group()",
        )
    return gather_ranks(share, row.cu_seqlens_padded, group, layout=settings.layout, dim=1, gradient="own")


def online_loss(
    share: torch.Tensor,
    whole: torch.Tensor,
    *,
    target_mask: torch.Tensor,
    row_mask: torch.Tensor,
    settings: LossSettings,
    global_valid_tokens: torch.Tensor,
) -> LossResult:
    """Return a microbatch's loss from the log-probabilities of this rank's targets [1, n] and of the whole row [1, T] (R-LOSS-5).

    `target_mask` [1, n] and `row_mask` [1, T] float32 are the same mask, cut and whole. Every rank returns the row's loss and the
    report of its share, so that sums over dp x cp ranks mean the same on both paths.
    """
    loss = -((whole * row_mask).sum() / (global_valid_tokens + ONLINE_EPSILON))
    total, count = _sum_and_count(-share.detach(), target_mask)
    return _undo_averaging(loss, settings), {REPORT: torch.stack([total, count.to(total.dtype)])}


def _sum_and_count(token_losses: torch.Tensor, target_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the masked sum, in float32 or wider, and the number of targets that count."""
    losses = token_losses.reshape(-1)
    losses = losses if losses.dtype == torch.float64 else losses.float()
    mask = target_mask.reshape(-1)
    return (losses * mask).sum(), mask.sum().detach()


def _undo_averaging(loss: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """Cancel the schedule's averaging: it multiplies by cp and divides by the number of microbatches."""
    return loss * settings.num_microbatches / settings.context_parallel_size


def _needed(global_valid_tokens: torch.Tensor | None) -> torch.Tensor:
    if global_valid_tokens is None:
        raise PackproofError(
            what="must be given for the normalization global_valid_tokens",
            where="global_valid_tokens",
            fix="give batches.count_trained of the global batch, summed over the data-parallel ranks",
        )
    return global_valid_tokens
