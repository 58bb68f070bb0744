"""Refuse parts that this job does not have, and impossible layouts (SPEC R-SETUP-7 and R-SETUP-8)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from production.training.config.refusal import SetupRefused
from production.training.config.schema.job import Job
from production.training.config.settings import sizes

_MEGATRON = "policy.megatron_cfg"
_SWITCHED_OFF = {
    "policy.dtensor_cfg.enabled": "the DTensor backend: megatron-core is the one backend",
    "policy.dynamic_batching.enabled": "dynamic batching: a packed row is one microbatch",
    "policy.draft.enabled": "a draft model",
    "policy.router_replay.enabled": "router replay",
    "policy.delegate_pack_to_model": "a model that packs inside its own forward pass",
    "policy.split_training": "the split training call",
    "policy.offload_optimizer_for_logprob": "offloading for log-probabilities",
    "policy.megatron_cfg.peft.enabled": "adapters",
    "policy.megatron_cfg.use_fused_linear_logprobs": "fused linear log-probabilities: the loss is the model's own",
    "policy.megatron_cfg.defer_fp32_logits": "late casting of logits: the cross entropy rounds as Megatron-LM's",
    "sft.only_unmask_final": "training on the last turn alone: rows carry their own masks",
    "logger.swanlab_enabled": "SwanLab",
}
_OF_THE_LAUNCHER = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
"""Variables that torchrun sets for each process."""
_PATHS = (
    "logger.log_dir", "checkpointing.checkpoint_dir", "data.cache_folder", "data.cache_dir", "policy.tokenizer.name",
    "model.initial_path", "policy.tokenizer.chat_template",
)  # fmt: skip
_MOST_RANKS = 1 << 24
_DIMENSIONS = [
    f"{_MEGATRON}.{name}_parallel_size"
    for name in ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Holds the input of every check."""

    job: Job
    """The job."""
    world_size: int
    """Ranks of the run."""
    device: str | None
    """`cpu`, `cuda`, or None where it is not known."""

    @property
    def data_parallel_size(self) -> int | None:
        """Return dp, or None where the world is not made of whole replicas."""
        if any(_look_up(self.job, key) < 1 for key in _DIMENSIONS):
            return None
        size = sizes(self.job).of_a_replica
        return None if self.world_size < 1 or self.world_size % size else self.world_size // size

    def refuse(self, kind: str, key: str, what: str, fix: str) -> SetupRefused:
        """Return a refusal at `key` as the file writes it, with the file and line that set it."""
        return SetupRefused(kind=kind, key=self.job.written(key), what=what, where=self.job.where(key), fix=fix)


def check_nemo_rl(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse what a file of NeMo-RL asks for and this job does not have (R-SETUP-24)."""
    job = setup.job
    yield from job.unsupported
    if job.policy.model_name is not None and "model.initial" not in job.sources:
        what = "must be set beside policy.model_name: NeMo-RL loads the weights of that name, and this job may also draw weights"
        yield setup.refuse("start", "model.initial", what, "set model.initial to huggingface, megatron or scratch")
    if not job.is_packed and job.policy.tokenizer.chat_template is None:
        what = "must name a template, got null: in NeMo-RL, null joins the contents of all messages without their roles"
        fix = "write default for the tokenizer's own template, or the template itself"
        yield setup.refuse("chat_template", "policy.tokenizer.chat_template", what, fix)


def check_switches(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse backends, losses and parts that this job does not have (R-SETUP-7)."""
    megatron = setup.job.megatron
    if megatron.freeze_moe_router and setup.job.model.num_moe_experts is not None:
        key = f"{_MEGATRON}.freeze_moe_router"
        yield setup.refuse("switched_on", key, "this job does not have a frozen router", f"set {key} to false")
    if not megatron.enabled:
        what, fix = (
            "must be true, got false: megatron-core is the only backend of this job",
            f"set {_MEGATRON}.enabled to true",
        )
        yield setup.refuse("backend", f"{_MEGATRON}.enabled", what, fix)
    for name in megatron.env_vars:
        if name in _OF_THE_LAUNCHER or name.startswith("TORCHELASTIC_") or not name or "=" in name:
            what, fix = f"{name!r} must not be set here: the launcher tells each process its rank", "take it out"
            if not name or "=" in name:
                what, fix = f"the name of a variable must not be empty or contain =, got {name!r}", "write NAME: value"
            yield setup.refuse("environment", f"{_MEGATRON}.env_vars.{name}", what, fix)
    for key, part in _SWITCHED_OFF.items():
        if _look_up(setup.job, key):
            fix = f"set {key} to false"
            yield setup.refuse("switched_on", key, f"this job does not have {part}", fix)


def check_paths(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse empty paths, which would stand for the folder that the job is started in (R-SETUP-20)."""
    for key in _PATHS:
        if _look_up(setup.job, key) == "":
            yield setup.refuse(
                "no_folder", key, "must not be empty, got ''", "name a folder or a file, or leave the key out"
            )


def check_layout(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse a world that the layout's dimensions do not divide (R-SETUP-8)."""
    job, megatron = setup.job, setup.job.megatron
    if setup.world_size > _MOST_RANKS:
        what = f"the number of ranks must be at most {_MOST_RANKS}, got {setup.world_size}"
        yield setup.refuse("world_size", "cluster.num_nodes", what, "start fewer ranks")
    below = [key for key in _DIMENSIONS if _look_up(job, key) < 1]
    for key in below:
        yield setup.refuse("layout", key, f"must be at least 1, got {_look_up(job, key)}", "give at least 1")
    if not below:
        yield from _check_world(setup)
        yield from _check_experts(setup)
        yield from _check_heads(setup)
    several = megatron.tensor_model_parallel_size > 1
    if megatron.sequence_parallel is not several:
        word = "with" if several else "without"
        what = (
            f"must be {str(several).lower()} {word} tensor parallelism, got {str(megatron.sequence_parallel).lower()}"
        )
        fix = (
            f"leave it out, or set it to {str(several).lower()}: the model shares norms over the tensor parallel ranks"
        )
        yield setup.refuse("sequence_parallel", f"{_MEGATRON}.sequence_parallel", what, fix)


def _check_world(setup: Setup) -> Iterator[SetupRefused]:
    job, layout = setup.job, sizes(setup.job)
    if setup.world_size < 1 or setup.world_size % layout.of_a_replica:
        what = (
            f"the number of ranks must be a multiple of tp {layout.tensor} x cp {layout.context} x pp {layout.pipeline}"
            f" = {layout.of_a_replica}, got {setup.world_size}"
        )
        fix = (
            f"start a multiple of {layout.of_a_replica} ranks (torchrun --nproc-per-node), or make a dimension smaller"
        )
        sizes_by_name = {"tensor_model": layout.tensor, "context": layout.context, "pipeline_model": layout.pipeline}
        name = max(sizes_by_name, key=sizes_by_name.__getitem__)  # the largest, since it is the one to look at
        yield setup.refuse("world_size", f"{_MEGATRON}.{name}_parallel_size", what, fix)
        return
    experts = layout.expert * layout.expert_tensor * layout.pipeline
    if setup.world_size % experts:
        what = (
            f"the number of ranks must be a multiple of ep {layout.expert} x etp {layout.expert_tensor}"
            f" x pp {layout.pipeline} = {experts}, got {setup.world_size}"
        )
        fix = f"start a multiple of {experts} ranks, or make a dimension smaller"
        yield setup.refuse("expert_parallel_size", f"{_MEGATRON}.expert_model_parallel_size", what, fix)
    cluster = job.cluster
    if cluster.ranks not in {None, setup.world_size}:
        what = f"the run must have {cluster.num_nodes} nodes x {cluster.gpus_per_node} processes = {cluster.ranks} ranks, got {setup.world_size}"
        fix = f"start {cluster.ranks} ranks, or leave cluster.num_nodes out"
        yield setup.refuse("world_size", "cluster.num_nodes", what, fix)


def _check_experts(setup: Setup) -> Iterator[SetupRefused]:
    layout, experts = sizes(setup.job), setup.job.model.num_moe_experts
    if experts is None and (layout.expert > 1 or layout.expert_tensor > 1):
        key = f"{_MEGATRON}.expert_{'model' if layout.expert > 1 else 'tensor'}_parallel_size"
        size = layout.expert if layout.expert > 1 else layout.expert_tensor
        what = f"must be 1 for a model without experts, got {size}"
        fix = "set it to 1, or set model.num_moe_experts"
        yield setup.refuse("expert_parallel_size", key, what, fix)
    if experts is not None and experts % layout.expert:
        what = f"must divide model.num_moe_experts, {experts}, got {layout.expert}"
        fix = f"make model.num_moe_experts a multiple of {layout.expert}, or expert parallelism smaller"
        yield setup.refuse("expert_parallel_size", f"{_MEGATRON}.expert_model_parallel_size", what, fix)


def _check_heads(setup: Setup) -> Iterator[SetupRefused]:
    tensor, model = setup.job.megatron.tensor_model_parallel_size, setup.job.model
    groups = model.num_query_groups or model.num_attention_heads
    if groups is not None and groups % tensor:
        key = "model.num_query_groups" if model.num_query_groups else "model.num_attention_heads"
        what = f"must be a multiple of the {tensor} tensor parallel ranks, which share the key and value heads, got {groups}"
        yield setup.refuse("heads", key, what, f"make the heads a multiple of {tensor}, or tensor parallelism smaller")
    if model.vocab_size is not None and model.vocab_size % tensor:
        what = f"must be a multiple of the {tensor} tensor parallel ranks, which share the embedding, got {model.vocab_size}"
        yield setup.refuse("vocab_size", "model.vocab_size", what, f"make it a multiple of {tensor}, or leave it out")


def _look_up(job: Job, key: str) -> Any:
    found: Any = job
    for name in key.split("."):
        found = getattr(found, name)
    return found
