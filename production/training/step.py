"""Run one global batch through megatron-core's own schedule, data parallelism and gradient reduction, in any layout.

Nothing here waits for the device: reported numbers stay tensors, one pair per microbatch.

Reference: `reference/loss.py`, docs/SPEC.md#loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import distributed

from production.errors import PackproofError
from production.loss import (
    REPORT,
    LossSettings,
    Normalization,
    auxiliary_scale,
    calculates_per_token,
    loss_function,
)
from production.online.padded_batch import PaddedBatch
from production.parallel.microbatches import Microbatch, MicrobatchSettings, process_microbatch
from production.parallel.multi_token_feed import Weights
from production.parallel.sizes import RankCoordinates
from production.rows.batch import Batch, count_trained


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings that decide how a global batch becomes a gradient."""

    normalization: Normalization
    """Divisor of token losses: `per_token`, `mean_of_means` or `global_valid_tokens` (docs/SPEC.md#loss)."""
    depths: int = 0
    """D, `mtp_num_layers` of the model."""
    mtp_weights: Weights = "rank"
    """Divisor of multi-token losses (R-MTP-3)."""
    mtp: str = "tables"
    """`tables` sends no message and needs `multi_token_feed.rolls_from_tables`; `upstream_roll` is megatron-core's own."""
    padding: Any = None
    """`bins.Padding` of the online path; None on the direct path."""
    verify: bool = False
    """Whether every roll of multi-token prediction is compared with its table, which on CUDA waits for the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """Holds what one rank knows of a global batch, on its device."""

    losses: list[torch.Tensor] = field(default_factory=list)
    """[sum, trained tokens] of each microbatch; empty except on the last pipeline stage."""
    global_valid_tokens: torch.Tensor | None
    """Scalar float32: trained tokens of the global batch, over all data-parallel ranks (R-BATCH-5), where losses are divided by them; else
    None, and no message is sent for them."""


Observer = Callable[[int, Microbatch, torch.Tensor], None]
"""Called with a microbatch's number, itself and the model's output, on the last stage."""


def wrap(
    model: torch.nn.Module, settings: StepSettings, ddp: DistributedDataParallelConfig | None = None
) -> DistributedDataParallel:
    """Wrap the model in megatron-core's data parallelism, with its config set as the normalization needs it.

    Raises PackproofError where the model was built with a `calculate_per_token_loss` that contradicts the
    normalization.
    """
    config = get_model_config(model)
    per_token = calculates_per_token(settings.normalization)
    if config.calculate_per_token_loss and not per_token:
        raise PackproofError(
            what=f"calculate_per_token_loss must not be set with the normalization {settings.normalization}",
            where="loss.normalization",
            fix="leave calculate_per_token_loss out: the normalization sets it",
        )
    if (config.mtp_num_layers or 0) != settings.depths:
        raise PackproofError(
            what=f"must equal the depths of the step, {settings.depths}, got {config.mtp_num_layers or 0}",
            where="mtp_num_layers",
            fix="give both the same",
        )
    config.calculate_per_token_loss = per_token
    wrapped = DistributedDataParallel(config, ddp or DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    if wrapped.ddp_config.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync
    return wrapped


def forward_backward(
    model: torch.nn.Module,
    batches: Sequence[Batch | PaddedBatch],
    settings: StepSettings,
    place: RankCoordinates,
    *,
    forward_only: bool = False,
    observe: Observer | None = None,
) -> StepReport:
    """Run this data-parallel rank's microbatches and, except with `forward_only`, leave the finished gradients in the
    buffers.

    `batches` are on the host, one for each microbatch: a row of the direct path or a bin of the online one, the same
    on all ranks that share it. Every rank of the world must call it with the same number of microbatches. Raises
    PackproofError for no microbatch, or for stages that cannot know each other's lengths.
    """
    if not batches:
        raise PackproofError(
            what="must have at least one microbatch, got 0",
            where="step",
            fix="give every data-parallel rank at least one row",
        )
    config = get_model_config(model)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    divides = settings.normalization == "global_valid_tokens" or settings.padding is not None
    valid = count_valid(batches, device) if divides else None
    scale = None if valid is None else auxiliary_scale(settings.normalization, valid)
    config.mtp_grad_scale_func = config.moe_grad_scale_func = scale
    losses = LossSettings(
        normalization=settings.normalization,
        num_microbatches=len(batches),
        context_parallel_size=place.context_size,
    )
    groups = {
        "tensor_group": parallel_state.get_tensor_model_parallel_group(),
        "context_group": parallel_state.get_context_parallel_group(),
    }

    def forward_step(microbatches: Iterator[tuple[int, Microbatch]], chunk: torch.nn.Module) -> Any:
        number, microbatch = next(microbatches)
        output = chunk(
            microbatch.input_ids,
            microbatch.position_ids,
            None,  # attention_mask: the boundaries say it
            labels=microbatch.labels,
            loss_mask=microbatch.loss_mask,
            packed_seq_params=microbatch.packed_seq_params,
        )
        compute = loss_function(microbatch, losses, global_valid_tokens=valid, **groups)
        if observe is None:
            return output, compute

        def observed(output: torch.Tensor) -> Any:
            observe(number, microbatch, output)
            return compute(output)

        return output, observed

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_microbatches(batches, settings, place, device),
        model=[model],
        num_microbatches=len(batches),
        seq_length=_sequence_length(batches, settings, config),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return StepReport(
        losses=[report[REPORT] for report in reports],
        global_valid_tokens=valid,
    )


def count_valid(batches: Sequence[Batch | PaddedBatch], device: torch.device) -> torch.Tensor:
    """Return the trained tokens of the global batch (R-BATCH-5), a scalar float32 on the device, summed over
    data-parallel ranks.
    """
    counts = [count_trained(batch) if isinstance(batch, Batch) else batch.valid_tokens() for batch in batches]
    # float64 on the way: float32 counts exactly only up to 16,777,216.
    total = torch.stack([torch.as_tensor(count, dtype=torch.float64) for count in counts]).sum().to(device)
    distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.float()


def _microbatches(
    batches: Sequence[Batch | PaddedBatch], settings: StepSettings, place: RankCoordinates, device: torch.device
) -> Iterator[tuple[int, Microbatch]]:
    options = {} if settings.padding is None else {"padding": settings.padding}
    made_for = MicrobatchSettings(
        context_parallel_rank=place.context_rank,
        context_parallel_size=place.context_size,
        depths=settings.depths if place.is_last_stage else 0,
        mtp=settings.mtp,  # type: ignore[arg-type] # checked there
        weights=settings.mtp_weights,
        verify=settings.verify,
        **options,
    )
    for number, batch in enumerate(batches):
        yield number, process_microbatch(batch, made_for, device=device)


def _sequence_length(batches: Sequence[Batch | PaddedBatch], settings: StepSettings, config: Any) -> int:
    """Return the tokens of a row, from which the schedule takes the shape that stages send; online that of
    R-ONLINE-5, or the shape is sent along.
    """
    if all(isinstance(batch, Batch) for batch in batches):
        lengths = {batch.input_ids.numel() for batch in batches}
        if len(lengths) == 1:
            return lengths.pop()
    elif settings.padding is not None and settings.padding.row_length is not None:
        return int(settings.padding.row_length)
    if not config.variable_seq_lengths and config.pipeline_model_parallel_size > 1:
        raise PackproofError(
            what="microbatches must have one length between pipeline stages, got several",
            where="step",
            fix="set transformer.variable_seq_lengths, or pad to one length",
        )
    return max(batch.input_ids.numel() for batch in batches)


def split_rows(batch: Batch) -> list[Batch]:
    """Split a batch into one batch for each row: microbatches of micro batch size 1."""
    return [_rows(batch, slice(row, row + 1)) for row in range(len(batch.sample_mask))]


def _rows(batch: Batch, keep: slice) -> Batch:
    """Return some rows of a batch, as views; boundaries keep their padding."""
    return dataclasses.replace(
        batch, **{each.name: getattr(batch, each.name)[keep] for each in dataclasses.fields(batch)}
    )
