"""Estimate parameters and bytes of the fullest rank by arithmetic on the shape: no model is built, activations are
not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from production.training.config.schema.job import Job
from production.training.config.settings import multi_token_depths, sizes, uses_distributed_optimizer

_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Holds the memory that one rank keeps between steps."""

    parameters: int
    """Parameters of the fullest rank (the first or the last stage)."""
    of_the_model: int
    """Parameters of the whole model."""
    weights: int
    """Bytes of the parameters."""
    gradients: int
    """Bytes of the gradient buffer."""
    optimizer: int
    """Bytes of Adam's two moments and, below float32, the main weights; this rank's share where the optimizer is distributed."""

    def lines(self) -> list[str]:
        """Return the lines for a terminal."""
        kept = f"{_readable(self.weights)} weights, {_readable(self.gradients)} gradients, {_readable(self.optimizer)} optimizer"
        return [
            f"parameters          {self.of_the_model:,} in all, {self.parameters:,} on the fullest rank (estimated)",
            f"memory/rank         {kept}; activations not counted",
        ]


@dataclass(frozen=True, kw_only=True)
class _Count:
    """Counts parameters whose gradients are shared by the dense groups and by the expert groups."""

    dense: int
    experts: int

    def __add__(self, other: _Count) -> _Count:
        return _Count(dense=self.dense + other.dense, experts=self.experts + other.experts)


def memory_of_a_rank(job: Job, *, data_parallel_size: int, expert_data_parallel_size: int) -> Memory | None:
    """Return the estimate; None where the shape is not in the file, or holds layers that are not counted here
    (Mamba).
    """
    model, layout = job.model, sizes(job)
    pattern = model.hybrid_layer_pattern
    is_uncounted = pattern is not None and set(pattern) - set("*-E/|")
    if not model.hidden_size or not model.num_attention_heads or not model.vocab_size or is_uncounted:
        return None
    stages = [_stage(job, stage) for stage in range(layout.pipeline)]
    fullest = max(stages, key=lambda count: count.dense + count.experts)
    parameters = fullest.dense + fullest.experts
    of_the_model = sum(
        count.dense * layout.tensor + count.experts * layout.expert * layout.expert_tensor for count in stages
    )
    precision = job.policy.precision
    ddp = job.megatron.distributed_data_parallel_config
    gradient = max(4, _BYTES[precision]) if ddp.get("grad_reduce_in_fp32") else _BYTES[precision]
    each = 12 if precision == "bfloat16" else 2 * _BYTES[precision]
    shares = (data_parallel_size * layout.context, expert_data_parallel_size)
    if not uses_distributed_optimizer(job):
        shares = (1, 1)
    kept = math.ceil(fullest.dense / shares[0]) + math.ceil(fullest.experts / shares[1])
    return Memory(
        parameters=parameters,
        of_the_model=of_the_model,
        weights=parameters * _BYTES[precision],
        gradients=parameters * gradient,
        optimizer=kept * each,
    )


def _stage(job: Job, stage: int) -> _Count:
    """Return the parameters of one rank of a pipeline stage; layers in equal parts, the rest on the first stages."""
    model, layout = job.model, sizes(job)
    width, tensor = model.hidden_size or 0, layout.tensor
    table = (model.vocab_size or 0) // tensor * width
    kinds = _layers(job)
    each, rest = divmod(len(kinds), layout.pipeline)
    start = stage * each + min(stage, rest)
    total = _Count(dense=0, experts=0)
    for kind in kinds[start : start + each + (stage < rest)]:
        total += _layer(job, kind)
    if stage == 0:
        total += _Count(dense=table, experts=0)
    if stage == layout.pipeline - 1:
        has_own_head = not model.tie_embeddings or layout.pipeline > 1
        total += _Count(dense=width + (table if has_own_head else 0), experts=0)
        depths = multi_token_depths(job)
        for _ in range(min(depths, 1) if job.megatron.mtp_use_repeated_layer else depths):
            # Two norms in front, one behind, and the projection of two hidden states into one.
            total += _Count(dense=3 * width + 2 * width * width // tensor, experts=0)
            for kind in _depth(job):
                total += _layer(job, kind)
        if depths and layout.pipeline > 1:
            total += _Count(dense=table, experts=0)
    return total


def _layers(job: Job) -> list[str]:
    """Return each layer as the letters of a hybrid pattern: attention and MLP, or attention and experts, are one in a
    GPT.
    """
    if job.model.hybrid_layer_pattern is not None:
        return list(job.model.hybrid_layer_pattern.split("/")[0].replace("|", ""))
    count, every = job.model.num_layers or 0, job.megatron.transformer.get("moe_layer_freq", 1)
    if job.model.num_moe_experts is None:
        return ["*-"] * count
    if isinstance(every, list):
        return ["*E" if each else "*-" for each in every]
    return ["*-" if index % every else "*E" for index in range(count)]


def _depth(job: Job) -> list[str]:
    pattern = job.model.hybrid_layer_pattern
    return list(pattern.split("/")[1]) if pattern is not None else _layers(job)[-1:]


def _layer(job: Job, kind: str) -> _Count:
    model, layout = job.model, sizes(job)
    width, tensor = model.hidden_size or 0, layout.tensor
    inner = model.ffn_hidden_size or 4 * width
    head = model.kv_channels or width // (model.num_attention_heads or 1)
    queries, keys = (
        (model.num_attention_heads or 0) * head,
        (model.num_query_groups or model.num_attention_heads or 0) * head,
    )
    fold, bias = 2 if model.gated_linear_unit else 1, model.add_bias_linear
    total = _Count(dense=0, experts=0)
    if "*" in kind:
        matrices = width * (queries + 2 * keys) // tensor + queries * width // tensor
        total += _Count(dense=matrices + width + ((queries + 2 * keys) // tensor + width if bias else 0), experts=0)
    if "-" in kind:
        matrices = (fold + 1) * width * inner // tensor
        total += _Count(dense=matrices + width + (fold * inner // tensor + width if bias else 0), experts=0)
    if "E" in kind:
        inner = model.moe_ffn_hidden_size or inner
        local = (model.num_moe_experts or 0) // layout.expert
        shared = int(job.megatron.transformer.get("moe_shared_expert_intermediate_size") or 0)
        dense = width + (model.num_moe_experts or 0) * width + (fold + 1) * width * shared // tensor
        total += _Count(dense=dense, experts=local * (fold + 1) * width * inner // layout.expert_tensor)
    return total


def _readable(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.2f} MiB"
