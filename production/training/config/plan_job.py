"""Plan a job on a number of ranks without starting one: ranks per dimension, groups, microbatches, tokens, parameters
(SPEC R-SETUP-19).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from production.training.config.schema.job import Job
from production.training.config.settings import multi_token_depths, sizes
from production.training.config.sizing import Memory, memory_of_a_rank

_SHOWN = 8
"""Ranks of a group that are shown."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds the plan of `--dry-run`."""

    world_size: int
    """Ranks."""
    cluster: str
    """Note on ranks that the cluster section gives and the dry run replaces; empty where the section agrees or is
    silent.
    """
    ranks: Mapping[str, int]
    """Ranks per dimension: tp, cp, pp, dp, ep, etp, edp (data parallelism of the experts)."""
    groups: Mapping[str, tuple[Sequence[int], int]]
    """The group of rank 0 in each dimension, and how many groups there are."""
    microbatches: int
    """Microbatches of one data-parallel rank in a step."""
    tokens_per_step: int
    """Positions of a global batch, padding included; online: at most, since bins are only known when rows are."""
    tokens_per_rank: int
    """Positions of a row on one rank, after the context parallel cut."""
    validation_microbatches: int
    """Microbatches of one data-parallel rank in a validation batch; 0 without validation."""
    depths: int
    """Depths of multi-token prediction."""
    memory: Memory | None
    """Parameters and bytes of a rank, by arithmetic; None where the shape is not known here."""

    def text(self) -> str:
        """Return the plan as lines for a terminal."""
        lines = [f"ranks               {self.world_size}"]
        lines += [f"  in place of       {self.cluster}"] if self.cluster else []
        lines += [f"  {name:<18}{size}" for name, size in self.ranks.items()]
        lines += [
            f"microbatches/step   {self.microbatches} on each data-parallel rank",
            f"tokens/step         {self.tokens_per_step:,} (padding included)",
            f"tokens/row/rank     {self.tokens_per_rank:,}",
            f"validation          {self.validation_microbatches} microbatches a batch" if self.validation_microbatches else "validation          none",
            f"multi-token depths  {self.depths}",
        ]  # fmt: skip
        lines += (
            self.memory.lines() if self.memory else ["parameters          not estimated: the shape is not in this file"]
        )
        lines.append("group of rank 0")
        for name, (group, count) in self.groups.items():
            more = f" … {group[-1]} ({len(group)} ranks)" if len(group) > _SHOWN else ""
            lines.append(f"  {name:<18}{' '.join(map(str, group[:_SHOWN]))}{more}, one of {count}")
        return "\n".join(lines) + "\n"


def plan(job: Job, world_size: int) -> Plan:
    """Plan a job that `validate` accepts; ranks are numbered as megatron-core numbers them (its RankGenerator)."""
    layout = sizes(job)
    data = layout.data(world_size)
    expert_data = world_size // (layout.expert * layout.expert_tensor * layout.pipeline)
    rows = job.policy.train_global_batch_size
    length = job.policy.max_total_sequence_length
    cluster = job.cluster
    is_other = cluster.ranks not in {None, world_size}
    said = f"cluster.num_nodes {cluster.num_nodes} x cluster.gpus_per_node {cluster.gpus_per_node} = {cluster.ranks}"
    validation = (job.sft.val_global_batch_size or rows) // data if job.data.validation else 0
    return Plan(
        world_size=world_size,
        cluster=said if is_other else "",
        ranks={
            "tp": layout.tensor, "cp": layout.context, "pp": layout.pipeline, "dp": data,
            "ep": layout.expert, "etp": layout.expert_tensor, "edp": expert_data,
        },
        groups=_groups(job, data, expert_data),
        microbatches=rows // data,
        tokens_per_step=rows * length,
        tokens_per_rank=length // layout.context,
        validation_microbatches=validation,
        depths=multi_token_depths(job),
        memory=memory_of_a_rank(job, data_parallel_size=data, expert_data_parallel_size=expert_data),
    )  # fmt: skip


def _groups(job: Job, data: int, expert_data: int) -> dict[str, tuple[Sequence[int], int]]:
    """Return the group of rank 0 in each dimension, and the number of groups, as megatron-core's RankGenerator
    numbers ranks.

    Ranks count tp fastest, pp slowest. A group of rank 0 is every nth rank and is not listed in full: a file may ask
    for a world of any size.
    """
    layout = sizes(job)
    tensor, context, pipeline = layout.tensor, layout.context, layout.pipeline
    world = tensor * context * data * pipeline
    experts = layout.expert_tensor * layout.expert
    found = {
        "tp": (1, tensor), "cp": (tensor, context), "dp": (tensor * context, data), "dp x cp": (tensor, context * data),
        "pp": (tensor * context * data, pipeline), "ep": (layout.expert_tensor, layout.expert), "edp": (experts, expert_data),
    }  # fmt: skip
    return {name: (_counted(step, size), world // size) for name, (step, size) in found.items()}


def _counted(step: int, size: int) -> Sequence[int]:
    ranks = range(0, step * size, step)
    return tuple(ranks) if size <= 1024 else ranks
