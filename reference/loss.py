"""The loss of a global batch: what each rank returns to the schedule, what a token's gradient weighs after it, what is reported.

`losses[rank][microbatch]` and `masks[rank][microbatch]` are tensors [n], rank by rank over dp x cp, cp fastest; upstream's
arithmetic in upstream's order, written out (docs/SPEC.md#loss).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

NORMALIZATIONS = ("per_token", "mean_of_means", "global_valid_tokens")
"""Megatron-LM with `calculate_per_token_loss`, Megatron-LM's default, and the direct path."""
ONLINE_EPSILON = 1e-8
"""Term that the online path adds to its divisor."""

Shares = Sequence[Sequence[torch.Tensor]]


def masked_sum(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return Σ loss · mask of one microbatch on one rank. R-LOSS-1."""
    return torch.sum(losses.reshape(-1) * mask.reshape(-1))


def returned(
    normalization: str,
    losses: torch.Tensor,
    mask: torch.Tensor,
    *,
    microbatches: int,
    context_parallel_size: int,
    valid_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the loss function's result for the schedule: a sum and a count, or a loss without a count. R-LOSS-2, R-LOSS-3, R-LOSS-4."""
    total = masked_sum(losses, mask)
    if normalization in ("per_token", "mean_of_means"):
        return total, mask.sum().to(torch.int32)
    if normalization != "global_valid_tokens" or valid_tokens is None:
        raise ValueError(
            f"normalization must be one of {', '.join(NORMALIZATIONS)}, with valid_tokens for global_valid_tokens, "
            f"got {normalization!r} with {valid_tokens}"
        )
    loss = total / torch.clamp(valid_tokens, min=1)
    return loss * microbatches / context_parallel_size, None


def returned_online(
    log_probabilities: torch.Tensor,
    mask: torch.Tensor,
    *,
    microbatches: int,
    context_parallel_size: int,
    valid_tokens: torch.Tensor,
) -> torch.Tensor:
    """Return the online path's loss from a whole row's log-probabilities [T]; all cp ranks of the row have the same loss. R-LOSS-5."""
    loss = -(torch.sum(log_probabilities * mask) / (valid_tokens + ONLINE_EPSILON))
    return loss * microbatches / context_parallel_size


def cross_entropy(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """Return token losses [n] float32 from logits [n, V], with megatron-core's steps in float32 for every dtype. R-LOSS-1, R-LOSS-5.

    The target -100, which is not a token, is looked up as 0: the loss is the log of the sum, finite and not 0.
    """
    shifted = logits.float() - logits.float().max(dim=-1).values.unsqueeze(-1)
    predicted = torch.zeros(len(target_ids), dtype=torch.float32)
    for position, target in enumerate(target_ids.tolist()):
        if 0 <= target < logits.shape[-1]:
            predicted[position] = shifted[position, target]
    return torch.log(torch.exp(shifted).sum(dim=-1)) - predicted


def scheduled(
    normalization: str,
    loss: torch.Tensor,
    count: torch.Tensor | None,
    *,
    microbatches: int,
    context_parallel_size: int,
) -> torch.Tensor:
    """Return the loss that megatron-core's schedule passes to the backward pass. R-LOSS-2, R-LOSS-3, R-LOSS-4."""
    if count is None:
        return loss * context_parallel_size / microbatches
    if normalization == "per_token":
        return loss
    return loss / torch.clamp(count, min=1) / microbatches


def token_weights(
    normalization: str,
    masks: Shares,
    *,
    context_parallel_size: int,
    valid_tokens: torch.Tensor | None = None,
) -> list[list[torch.Tensor]]:
    """Return the weight (float64) of each token's loss in the step's gradient, after schedule, DDP and the division by tokens.

    R-LOSS-2: `per_token` sums over ranks and divides by all tokens. R-LOSS-3: `mean_of_means` divides by its own tokens and
    microbatches, and DDP by dp·cp. R-LOSS-4: `global_valid_tokens` has divided already, and nothing divides again.
    """
    ranks, microbatches = len(masks), len(masks[0])
    everything = max(1.0, float(sum(mask.sum() for rank in masks for mask in rank)))
    weights: list[list[torch.Tensor]] = []
    for rank in masks:
        weights.append([])
        for mask in rank:
            each = mask.double()
            if normalization == "per_token":
                weights[-1].append(each / everything)
            elif normalization == "mean_of_means":
                weights[-1].append(each / max(1.0, float(each.sum())) / microbatches / ranks)
            else:
                assert valid_tokens is not None
                divisor = max(1.0, float(valid_tokens))
                scale = microbatches / context_parallel_size * context_parallel_size / microbatches
                weights[-1].append(each / divisor * scale)
    return weights


def online_weights(masks: Shares, valid_tokens: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return `token_weights` for the online path, from the masks of the ranks' shares: float64. R-LOSS-5."""
    return [[mask.double() / (float(valid_tokens) + ONLINE_EPSILON) for mask in rank] for rank in masks]


def multi_token_weights(
    normalization: str,
    masks: Sequence[Sequence[Sequence[torch.Tensor]]],
    *,
    scaling_factor: float,
    context_parallel_size: int,
    rows: bool = False,
    valid_tokens: torch.Tensor | None = None,
) -> list[list[list[torch.Tensor]]]:
    """Return the weight of each token's loss at depth k ≥ 1 in the gradient, as `[rank][microbatch][k - 1]`: float64. R-LOSS-6.

    `masks[rank][microbatch][k]` are the masks at depths 0 to D. The loss of depth k is divided by n_k, the number of its
    targets, and multiplied by n₀ unless the normalization is mean_of_means. If `rows` is true, both counts are those of the
    whole row, summed over the cp ranks that share it; if false, those of the rank's own share, as Megatron-LM counts them
    (R-MTP-3).
    """
    ranks, microbatches = len(masks), len(masks[0])
    depths = len(masks[0][0]) - 1
    if normalization == "per_token":
        divisor = max(1.0, float(sum(mask[0].sum() for rank in masks for mask in rank)))
    else:
        divisor = 1.0 if valid_tokens is None else max(1.0, float(valid_tokens))
    weights: list[list[list[torch.Tensor]]] = []
    for number, rank in enumerate(masks):
        first = number - number % context_parallel_size
        sharing = range(first, first + context_parallel_size) if rows else (number,)
        weights.append([])
        for microbatch, of_depths in enumerate(rank):
            counts = [float(sum(masks[other][microbatch][k].sum() for other in sharing)) for k in range(depths + 1)]
            of_microbatch = []
            for k in range(1, depths + 1):
                weight = scaling_factor / depths * of_depths[k].double() / max(1.0, counts[k])
                if normalization == "mean_of_means":
                    # A row's count is cp times one rank's, and DDP divides by cp again.
                    weight = weight * (context_parallel_size if rows else 1) / microbatches / ranks
                else:
                    weight = weight * counts[0] / divisor
                of_microbatch.append(weight)
            weights[-1].append(of_microbatch)
    return weights


def training_loss(losses: Shares, masks: Shares) -> torch.Tensor:
    """Return the reported `lm loss`: the sum of all sums over the sum of all counts, in every normalization; 0 if everything is masked. R-LOSS-7."""
    total, count = sum_reports(losses, masks)
    return total / torch.clamp(count, min=1)


def validation_loss(losses: Shares, masks: Shares) -> torch.Tensor:
    """Return Megatron-LM's validation loss of SFT: the mean over microbatches, then over ranks, of sum / max(count, 1). R-LOSS-8."""
    means = []
    for of_losses, of_masks in zip(losses, masks, strict=True):
        each = [
            masked_sum(loss, mask) / torch.clamp(mask.sum(), min=1)
            for loss, mask in zip(of_losses, of_masks, strict=True)
        ]
        means.append(torch.stack(each).mean())
    return add_up(means) / len(means)


def valid_tokens_loss(losses: Shares, masks: Shares, valid_tokens: torch.Tensor, *, online: bool) -> torch.Tensor:
    """Return NeMo-RL's reported loss of either path: the sum of all sums over the divisor of training. R-LOSS-9."""
    total, _ = sum_reports(losses, masks)
    return total / (valid_tokens + ONLINE_EPSILON if online else torch.clamp(valid_tokens, min=1))


def multi_token_losses(losses: Sequence[Shares], masks: Sequence[Shares]) -> torch.Tensor:
    """Return Megatron-LM's reported losses of multi-token prediction, one for each depth [D]. R-LOSS-10.

    `losses[k - 1]` and `masks[k - 1]` are those at depth k. A mean of means over microbatches and dp x cp ranks.
    """
    return torch.stack(
        [validation_loss(of_losses, of_masks) for of_losses, of_masks in zip(losses, masks, strict=True)]
    )


def token_losses_of_depths(losses: Sequence[Shares], masks: Sequence[Shares]) -> torch.Tensor:
    """Return the loss of each depth by token [D]: all targets' losses over their number, which shares without a target do not change. R-LOSS-10b."""
    return torch.stack([training_loss(*of_depth) for of_depth in zip(losses, masks, strict=True)])


def empty_shares(masks: Sequence[Shares]) -> list[float]:
    """Return, for each depth, the fraction of shares of a microbatch that have no target. R-LOSS-10b."""
    of_depths = [[bool(mask.sum() == 0) for rank in of_masks for mask in rank] for of_masks in masks]
    return [sum(shares) / len(shares) for shares in of_depths]


def sum_reports(losses: Shares, masks: Shares) -> tuple[torch.Tensor, torch.Tensor]:
    """Add sums and counts over the microbatches of a rank and then over ranks, in the order of the all-reduce. R-LOSS-7."""
    sums, counts = [], []
    for of_losses, of_masks in zip(losses, masks, strict=True):
        each = [masked_sum(loss, mask) for loss, mask in zip(of_losses, of_masks, strict=True)]
        sums.append(torch.stack(each).sum())
        counts.append(torch.stack([mask.sum().to(each[0].dtype) for mask in of_masks]).sum())
    return add_up(sums), add_up(counts)


def add_up(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the ranks' values one after the other; an all-reduce gives the same but for rounding."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
