"""Decide whether a run may go on in another layout (`checkpointing.reshard`): where no number depends on the layout and
the checkpoint can be read by the other ranks (docs/checkpoints.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from production.errors import PackproofError
from production.files.manifest import read_manifest
from production.tokens.fingerprint import TokenizerFingerprint, differences_from_json
from production.training.checkpoint.manifest import RESHARDABLE, CheckpointRefused, Manifest
from production.training.config import Job, multi_token_depths
from production.training.config.settings import uses_distributed_optimizer
from production.training.data.fingerprint import BUCKETS, ResumeRefused, check_resume

_DIMENSIONS = ("data", "tensor", "context", "pipeline", "expert", "expert_tensor")
_SIZES = ("world_size", *(f"{name}_parallel_size" for name in _DIMENSIONS))
_OF_A_LAYOUT = tuple(
    f"transformer.{name}"
    for name in (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "sequence_parallel",
        "cp_comm_type",
    )
)
"""Options that say how a layout shares the same work out."""
_FORMAT = "checkpointing.optimizer_format"
_START_ANEW = "start a new run from the weights (model.initial: megatron)"


def check_going_on(
    job: Job, checkpoint: Manifest, now: Mapping[str, Any], tokenizer: TokenizerFingerprint | None = None
) -> bool:
    """Compare this run with the one that a checkpoint was saved by; return True where it continues in another layout.

    Consumed samples alone decide the order of rows, and weights and optimizer are laid out again. Raises ResumeRefused
    for keys that may not differ, CheckpointRefused where a number or the checkpoint's format depends on the layout; of
    a tokenizer the error says which probe text has other ids.
    """
    saved: Mapping[str, Any] = checkpoint.fingerprint
    told: list[str] = []
    if checkpoint.tokenizer and tokenizer is not None:
        told = differences_from_json(checkpoint.tokenizer, tokenizer, name="the checkpoint")
        if not told:  # the same tokenizer, though a library may write its definition otherwise now
            saved = {**saved, "tokenizer": now.get("tokenizer")}
    try:
        return _check_going_on(job, checkpoint, saved, now)
    except ResumeRefused as error:
        if not told or "tokenizer" not in error.differing:
            raise
        what = f"{error.what}. {' '.join(told)}"
        raise ResumeRefused(what=what, where=error.where, fix=error.fix, differing=error.differing) from None


def _check_going_on(job: Job, checkpoint: Manifest, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    unbound = () if checkpoint.sharding_type == "dp_reshardable" else (BUCKETS,)
    if not job.checkpointing.reshard:
        check_resume(saved, now, free=unbound)
        return False
    sizes = tuple(key for key in _SIZES if key in saved)
    changed = [key for key in check_resume(saved, now, free=(*sizes, *_OF_A_LAYOUT, *unbound)) if key in sizes]
    if changed:
        dimensions = {key.removesuffix("_parallel_size") for key in changed}
        reason = next(_reasons(job, checkpoint, now, dimensions), None)
        if reason is not None:
            told = ", ".join(f"{key} (saved {saved[key]}, now {now[key]})" for key in changed)
            raise CheckpointRefused(
                what=f"{told} differ, and {reason[0]}", where=job.where("checkpointing.reshard"), fix=reason[1]
            )
    return bool(changed)


def _reasons(job: Job, checkpoint: Manifest, now: Mapping[str, Any], changed: set[str]) -> Iterator[tuple[str, str]]:
    """Yield why this run cannot go on in another layout, each with its fix."""
    back = f"start the job in the layout that it had, or {_START_ANEW}"
    contexts = (int(checkpoint.fingerprint["context_parallel_size"]), int(now["context_parallel_size"]))
    for why in (
        *_of_each_rank(job),
        *_of_rows(job, changed, contexts),
        *_of_losses(job, changed),
        *_of_experts(job, changed),
    ):
        yield why, back
    if not uses_distributed_optimizer(job):
        return
    elsewhere = sorted(changed - {"world_size", "data", "context"})
    rewrite = f"resume it once in the layout that it had with {_FORMAT}={RESHARDABLE}, and go on from the checkpoint that this saves"
    if elsewhere and checkpoint.sharding_type != RESHARDABLE:
        yield (
            f"the distributed optimizer was saved as {checkpoint.sharding_type}, which only other data and context sizes can read",
            f"{rewrite}; or {_START_ANEW}",
        )
    if checkpoint.sharding_type == "dp_reshardable" and _buckets(job, checkpoint.fingerprint) != _buckets(job, now):
        yield (
            "megatron-core sizes the buckets, by which the distributed optimizer was saved, by the number of these ranks",
            f"{rewrite}; or {_START_ANEW}",
        )


def _of_each_rank(job: Job) -> Iterator[str]:
    """Yield what each rank keeps for itself, which another number of ranks cannot go on with."""
    options = job.megatron.transformer
    draws = [name for name in ("hidden_dropout", "attention_dropout") if getattr(job.model, name) > 0]
    draws += [name for name in ("moe_input_jitter_eps",) if options.get(name)]
    if draws:
        yield f"{', '.join(draws)} draws on each rank for itself: nobody can go on with those draws"
    if job.megatron.fp8_cfg.enabled or options.get("fp8"):
        yield "fp8 scales each rank's part of a tensor by what that part held before"


def _of_rows(job: Job, changed: set[str], contexts: Sequence[int]) -> Iterator[str]:
    """Yield why the rows that are fed depend on a changed dimension."""
    if "data" in changed and job.data.order == "megatron-cyclic-sharded":
        yield "the order megatron-cyclic-sharded shares rows out by the data-parallel size"
    if "context" in changed and job.is_packed and (file := _unroomy(job, contexts)):
        yield (
            f"context parallelism pads segments by its size, so that a row may lose tokens: only a manifest that says that {file} was "
            f"packed for a multiple of both sizes, and for no more than {job.policy.max_total_sequence_length} tokens, rules it out"
        )


def _of_losses(job: Job, changed: set[str]) -> Iterator[str]:
    """Yield why what a token weighs depends on a changed dimension."""
    if "context" in changed and job.loss.normalization == "mean_of_means":
        yield "loss.normalization mean_of_means averages over each rank's share of a row"
    if not multi_token_depths(job):
        return
    if "context" in changed and job.loss.mtp_weights == "rank":
        yield "loss.mtp_weights rank weighs depths by each rank's share of a row (loss.mtp_weights rows does not)"
    if "data" in changed and not job.is_packed:
        yield "losses of depths are averaged by bin, and the data-parallel size decides which conversations share one"


def _of_experts(job: Job, changed: set[str]) -> Iterator[str]:
    """Yield why what experts are dealt, or how they are balanced, depends on a changed dimension."""
    if not job.model.num_moe_experts:
        return
    options = job.megatron.transformer
    if options.get("moe_expert_capacity_factor") is not None:
        yield "moe_expert_capacity_factor drops tokens by what each rank holds"
    if "context" in changed or (not job.is_packed and changed - {"world_size", "expert", "expert_tensor"}):
        yield "the layout decides how much padding rows have, which is dealt to experts like any token"
    balancing = options.get("moe_router_load_balancing_type")
    if "data" in changed and "global_aux_loss" in (balancing if isinstance(balancing, list) else [balancing]):
        yield "global_aux_loss balances over what the data-parallel ranks hold at once"


def _unroomy(job: Job, contexts: Sequence[int]) -> str | None:
    """Return the first file without a manifest by which its rows have room in both context parallel sizes.

    Rows with room for the padding of 2·C divide into those of any divisor of C without losing a token.
    """
    for file in (file.path for dataset in job.data.train for file in dataset.data_path):
        try:
            manifest = read_manifest(Path(file))
        except PackproofError:
            return file
        settings: Mapping[str, Any] = {} if manifest is None else manifest.settings
        context, length = settings.get("context_parallel_size"), settings.get("pack_length")
        if context is None or length is None or length > job.policy.max_total_sequence_length:
            return file
        if any(context % size for size in contexts):
            return file
    return None


def _buckets(job: Job, identity: Mapping[str, Any]) -> int | None:
    """Return the size of megatron-core's buckets in a layout: of a set size, or of one that grows with the ranks."""
    options = job.megatron.distributed_data_parallel_config
    if not options.get("overlap_grad_reduce"):
        return None
    ranks = int(identity["data_parallel_size"]) * int(identity["context_parallel_size"])
    return int(options.get("bucket_size") or max(40_000_000, 1_000_000 * ranks))
