"""Megatron-LM's own way from a packed row to a gradient, put together from the installed package's pieces: the third witness of a step.

Its wheel has no driver script, so `forward_step` and `loss_func` below are glue in its place; STAND_INS says all that is not
upstream's own. Nothing of production's data path is used: no microbatch, no table, no loss function, no cut.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core import utils as upstream
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, mtp_on_this_rank
from torch import distributed

STAND_INS = {
    "driver": "get_batch, forward_step, loss_func and the sum over reports of Megatron-LM's pretrain script, which the wheel lacks: equivalence/trainers/megatron_step.py",
    "thd_get_partitioned_indices": "Transformer Engine's CUDA kernel: a loop over segments and chunks in equivalence/trainers/megatron_step.py",
    "core attention": "Transformer Engine's, on CPU: production.model.device.attention",
    "norm": "megatron-core's local one refuses sequence parallelism: production.model.device.norm",
    "CUDA": "devices, streams, events and random states on CPU: production.model.device.shim",
}
"""Stand-ins by the part that each replaces, with its place; reports list them."""

UPSTREAM = (
    "flatten_batch_for_packed_sequences",
    "get_batch_on_this_tp_rank",
    "get_batch_on_this_cp_rank",
    "roll_tensor",
    "vocab_parallel_cross_entropy",
    "get_forward_backward_func",
    "DistributedDataParallel",
    "finalize_model_grads",
    "MTPLossLoggingHelper",
)
"""Parts that are Megatron-LM's own."""

Row = dict[str, torch.Tensor]
"""Output of SFTDataset collated to micro batch size 1: tokens, labels, position_ids [1, P] int64, loss_mask [1, P] float32, cu_seqlens [1, K]
int32, right-filled with P where `fills_boundaries`, max_seqlen [1] int32."""


def fills_boundaries() -> bool:
    """Return whether SFTDataset fills `cu_seqlens` up to P + 1 entries: from 0.19 on, which has the function that takes the filling off again."""
    return hasattr(upstream, "flatten_batch_for_packed_sequences")


def packed_keyword() -> str:
    """Return the keyword by which get_batch_on_this_tp_rank is told of boundaries: `is_sft` before 0.19."""
    known = inspect.signature(upstream.get_batch_on_this_tp_rank).parameters
    return "has_cu_seqlens" if "has_cu_seqlens" in known else "is_sft"


def forward_backward(
    model: torch.nn.Module,
    rows: Sequence[Row],
    *,
    per_token: bool,
    forward_only: bool = False,
    observe: Callable[[int, torch.Tensor], None] | None = None,
) -> list[torch.Tensor]:
    """Run one global batch, of which this data-parallel rank has these rows; return [sum, count] of each microbatch on the last stage.

    `model` is in megatron-core's DDP, with `calculate_per_token_loss` as `per_token` says. Finished gradients are in its buffers.
    """
    config = upstream.get_model_config(model)
    if config.calculate_per_token_loss != per_token:
        raise ValueError("the model's calculate_per_token_loss was set for another normalization")
    config.mtp_grad_scale_func = config.moe_grad_scale_func = None
    config.finalize_model_grads_func = finalize_model_grads
    length = rows[0]["tokens"].shape[1]
    with _index_kernel():
        reports = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, length=length, observe=observe),
            data_iterator=iter(list(enumerate(rows))),
            model=[model],
            num_microbatches=len(rows),
            seq_length=length,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return [report["lm loss"] for report in reports]


def reported(reports: Sequence[torch.Tensor], microbatches: int) -> tuple[float | None, torch.Tensor | None]:
    """Return the loss that Megatron-LM logs and those of the depths [D], on the last stage; None on the others.

    The loss is NaN where nothing is trained. Collective over the stage: `track_mtp_metrics` and the loss are reduced.
    """
    if not reports:
        return None, None
    # As train_step of megatron.training: sums of all microbatches, then of all ranks.
    total = torch.vstack(list(reports)).sum(dim=0)
    distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    logged: dict[str, torch.Tensor] = {}
    MTPLossLoggingHelper.track_mtp_metrics(1 / microbatches, 0, None, total_loss_dict=logged)
    depths = torch.stack(list(logged.values())).double() if logged else torch.zeros(0, dtype=torch.float64)
    return float(total[0] / total[1]), depths


def partitioned_indices(cu_seqlens: torch.Tensor, total_tokens: int, size: int, rank: int) -> torch.Tensor:
    """Return the positions [total / size] int64 that Transformer Engine's kernel gives a rank: two of 2·size chunks of each segment."""
    index: list[int] = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            index += range(start + number * chunk, start + (number + 1) * chunk)
    if len(index) * size != total_tokens:
        raise ValueError(f"segments of {cu_seqlens.tolist()} do not divide into {2 * size} chunks")
    return torch.tensor(index)


def _forward_step(
    data: Iterator[tuple[int, Row]],
    model: torch.nn.Module,
    *,
    length: int,
    observe: Callable[[int, torch.Tensor], None] | None,
) -> Any:
    number, row = next(data)
    batch = _get_batch(row, model, length)
    boundaries = batch["cu_seqlens"][0]
    longest = int(batch["max_seqlen"][0])
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=params,
    )

    def loss_func(output: torch.Tensor) -> Any:
        if observe is not None:
            observe(number, output)
        losses, mask = output.view(-1).float(), batch["loss_mask"].view(-1).float()
        loss = torch.sum(losses * mask)
        count = mask.sum().clone().detach().to(torch.int)
        return loss, count, {"lm loss": torch.cat([loss.clone().detach().view(1), count.view(1)])}

    return output, loss_func


def _get_batch(row: Row, model: torch.nn.Module, length: int) -> dict[str, Any]:
    """Return the batch of this rank: broadcast over tp, flattened, cut for cp, by Megatron-LM's functions."""
    config = upstream.get_model_config(model)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    has_mtp = bool(config.mtp_num_layers) and mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout, mtp_num_layers=config.mtp_num_layers, ignore_virtual=True
    )
    context = parallel_state.get_context_parallel_world_size()
    whole: dict[str, Any] = {
        **{name: tensor.clone() for name, tensor in row.items()},
        "attention_mask": None,
        "local_cp_size": None,
    }
    whole["cu_seqlens_padded"] = whole["cu_seqlens"].clone() if context > 1 else None
    batch = upstream.get_batch_on_this_tp_rank(
        whole,
        **{packed_keyword(): True},
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=context,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=1,
        seq_length=length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=stages,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    if fills_boundaries():
        batch = upstream.flatten_batch_for_packed_sequences(batch)
    if batch["tokens"] is None and batch["labels"] is None:
        return dict(batch)  # a middle stage has boundaries only
    return dict(
        upstream.get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
        )
    )


class _index_kernel:  # noqa: N801 - reads as the context that it is
    """Context manager that replaces Transformer Engine's kernel in megatron-core while the kernel, or a CUDA device for it, is absent."""

    def __enter__(self) -> None:
        self._upstream = upstream.tex
        if upstream.tex is None or not torch.cuda.is_available():
            upstream.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)

    def __exit__(self, *_raised: object) -> None:
        upstream.tex = self._upstream
