"""Compute the messages of a job's ranks for multi-token prediction, attention and experts, in closed form from the rows."""

from __future__ import annotations

from dataclasses import dataclass

from tools.simulate.walk import Walk

_ROLLED_BYTES = 3 * 8 + 4
"""One value each of ids, positions and labels (int64) and of the mask (float32)."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of the forward pass of one global batch, unless a field says otherwise."""

    roll_messages: int
    """Messages of megatron-core's packed roll: 2·N·(cp-1) per roll of N segments, four rolls a depth, on every tensor parallel rank."""
    roll_messages_of_a_row: int
    """The most that one row takes within one context parallel group."""
    roll_bytes: int
    """Their payload: one element each."""
    table_messages: int
    """Messages where all depths are taken from the whole row before it is cut: none."""
    attention_bytes: int
    """Keys and values that one rank receives from the other context parallel ranks, per attention layer and row."""
    attention_bytes_in_all: int
    """Over all ranks and rows, per attention layer."""
    stage_bytes: int
    """Hidden states that all stages but the last send to the next, over all ranks and rows; 0 with one stage."""
    expert_bytes: int
    """Hidden states that one rank sends to other experts' ranks, per expert layer and row, if the router spreads them evenly."""


def costs_of(found: Walk) -> Costs:
    """Return the costs of the rows that were walked."""
    job = found.job
    per_segment = 2 * (job.cp - 1) * job.depths
    segments, most = int(found.segments.sum()), int(found.segments.max())
    heads = max(job.kv_heads // job.tp, 1)
    attention = job.pack_length * (job.cp - 1) // job.cp * 2 * heads * job.head_dim * job.value_bytes
    held = job.pack_length // job.cp // (job.tp if job.sequence_parallel else 1)
    return Costs(
        roll_messages=4 * per_segment * segments * job.tp,
        roll_messages_of_a_row=4 * per_segment * most,
        roll_bytes=_ROLLED_BYTES * per_segment * segments * job.tp,
        table_messages=0,
        attention_bytes=attention,
        attention_bytes_in_all=attention * job.tp * job.cp * job.rows,
        stage_bytes=held * job.hidden * job.value_bytes * job.tp * job.cp * job.rows * (job.pp - 1),
        expert_bytes=held * min(job.topk, job.ep) * job.hidden * job.value_bytes * (job.ep - 1) // job.ep,
    )
