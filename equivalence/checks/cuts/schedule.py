"""Run megatron-core as a witness of losses: its schedule, its division of gradients, its multi-token prediction.

Everything runs in one process on data alone: tokens' losses replace a model, and ranks are a loop.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, process_mtp_loss

from equivalence.generators.online import LossCase
from production import loss as production
from production.parallel.context_parallel import gather
from production.parallel.multi_token import depth_tables
from production.parallel.multi_token_feed import Weights, multi_token_params, rolls_from_tables
from production.rows.batch import FlatBatch

SCALING_FACTOR = 0.3
"""Scaling factor of multi-token losses: any number that is not a power of two."""


def loss_settings(case: LossCase, normalization: production.Normalization) -> production.LossSettings:
    """Return production's settings of a case."""
    return production.LossSettings(
        normalization=normalization,
        num_microbatches=len(case.losses[0]),
        context_parallel_size=case.size,
    )


def schedule(
    returned: production.LossResult,
    case: LossCase,
    normalization: production.Normalization,
    count: torch.Tensor | None,
    **config: Any,
) -> torch.Tensor:
    """Return the loss after megatron-core's schedule, before the backward pass; tokens are added to `count` as the schedule adds them."""
    given = SimpleNamespace(
        calculate_per_token_loss=production.calculates_per_token(normalization),
        timers=None,
        grad_scale_func=None,
        **config,
    )
    store: list[Any] = []
    output, tokens = forward_step_calc_loss(
        model=None,
        output_tensor=returned[0],
        loss_func=lambda _: returned,
        config=given,
        vp_stage=None,
        collect_non_loss_data=False,
        num_microbatches=len(case.losses[0]),
        forward_data_store=store,
        cp_group_size=case.size,
        is_last_stage=True,
    )
    if count is not None:
        count += tokens
    loss: torch.Tensor = output
    return loss


def finalized(found: list[list[torch.Tensor]], case: LossCase, count: torch.Tensor) -> list[list[torch.Tensor]]:
    """Scale by 1 / (dp·cp) as DDP does unless gradients are per token; then divide by the count as `finalize_model_grads` does."""
    if not production.calculates_per_token(case.normalization):
        return [[each * (1.0 / len(found)) for each in rank] for rank in found]
    scale = 1.0 / torch.clamp(count, min=1)
    return [[each * scale for each in rank] for rank in found]


def gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    """Return the tensor's gradient; zeros if no gradient reached it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def multi_token_gradients(case: LossCase, valid: torch.Tensor, *, weights: str) -> dict[str, torch.Tensor]:
    """Run megatron-core's own multi-token losses on production's tables; return their gradients by the token's loss."""
    if not case.depths:
        return {}
    count = torch.zeros((), dtype=torch.int32)
    boundaries = torch.tensor(case.boundaries, dtype=torch.int32)
    found: list[list[torch.Tensor]] = [[] for _ in case.masks]
    for first in range(0, len(case.masks), case.size):
        for number, rank in itertools.product(range(len(case.masks[0])), range(case.size)):
            row_mask = gather([case.masks[first + each][number][None] for each in range(case.size)], boundaries)
            ids = torch.arange(row_mask.numel())[None]
            row = FlatBatch(
                input_ids=ids,
                target_ids=ids,
                token_mask=row_mask,
                position_ids=ids,
                cu_seqlens=boundaries,
                max_seqlen=int(boundaries.diff().max()),
            )
            tables = depth_tables(row, case.depths, rank=rank, size=case.size)
            found[first + rank].append(_depth_gradient(case, row, tables, weights, valid, count))
    reduced = finalized(found, case, count)
    return {
        f"depth {depth} of rank {rank}, microbatch {number}": gradient[depth - 1]
        for rank, of_rank in enumerate(reduced)
        for number, gradient in enumerate(of_rank)
        for depth in range(1, case.depths + 1)
    }


def _depth_gradient(
    case: LossCase, row: FlatBatch, tables: Any, weights: str, valid: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """Return [D, n]: the weight of each token's loss at each depth before data parallelism, in one microbatch of one rank."""
    how: Weights = "rows" if weights == "rows" else "rank"
    params = multi_token_params(row, tables, weights=how, stage="loss", verify=True)
    assert params.feed is not None
    share = tables.input_ids.shape[2]
    hidden = torch.ones((1 + case.depths) * share, 1, 1, dtype=torch.float64, requires_grad=True)
    config = SimpleNamespace(
        mtp_num_layers=case.depths,
        mtp_loss_scaling_factor=SCALING_FACTOR,
        mtp_detach_heads=False,
        calculate_per_token_loss=production.calculates_per_token(case.normalization),
    )
    with rolls_from_tables():
        main = process_mtp_loss(
            hidden_states=hidden,
            labels=tables.target_ids[0],
            loss_mask=params.feed.loss_mask,
            output_layer=lambda states, **_: (states, None),  # a token's loss is its hidden state
            output_weight=None,
            runtime_gather_output=None,
            is_training=False,
            compute_language_model_loss=lambda _, states: states[:, :, 0].transpose(0, 1),
            config=config,
            cp_group=SimpleNamespace(size=lambda: case.size),
            packed_seq_params=params,
        )
    settings = loss_settings(case, case.normalization)
    returned = production.direct_loss(
        main[:, :, 0].transpose(0, 1), target_mask=tables.token_mask[0], settings=settings, global_valid_tokens=valid
    )
    scale = production.auxiliary_scale(settings.normalization, valid)
    before = MTPLossAutoScaler.main_loss_backward_scale
    try:
        scheduled = schedule(
            returned, case, case.normalization, count, mtp_num_layers=case.depths, mtp_grad_scale_func=scale
        )
        torch.autograd.backward(scheduled)
    finally:
        MTPLossAutoScaler.set_loss_scale(before)
    return gradient_of(hidden).reshape(1 + case.depths, share)[1:]
