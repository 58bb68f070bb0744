"""Refuse an impossible course of a run: steps, schedule, checkpoints, source of the weights (SPEC R-SETUP-15 to 18)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from production.training.config.checks.setup import Setup
from production.training.config.megatron_options import option_class
from production.training.config.refusal import SetupRefused
from production.training.config.settings import multi_token_depths, uses_distributed_optimizer

_MEGATRON = "policy.megatron_cfg"
_OPTIMIZER = f"{_MEGATRON}.optimizer"
_SCHEDULER = f"{_MEGATRON}.scheduler"
METRICS = ("train:loss", "val:val_loss")
"""Metrics by which the best checkpoints can be chosen."""
_DURATION = re.compile(r"\d{1,5}:\d{1,2}:\d{1,2}:\d{1,2}", re.ASCII)
_YEAR = 366 * 24 * 3600
_MOST_ROWS = 1 << 24
"""Rows of a global batch at most, and thousands of positions of a row: a batch's numbers are computed before a file
is read.
"""


def check_steps(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse an impossible length of the job, or period of validation (R-SETUP-15)."""
    job, sft = setup.job, setup.job.sft
    if sft.max_num_steps is None and sft.max_num_epochs is None:
        what = "sft.max_num_steps or sft.max_num_epochs must be set, or the job never ends"
        yield setup.refuse("endless", "sft.max_num_steps", what, "set sft.max_num_steps or sft.max_num_epochs")
    sizes = {
        "sft.max_num_steps": (sft.max_num_steps, 1), "sft.max_num_epochs": (sft.max_num_epochs, 1),
        "sft.val_batches": (sft.val_batches, 1), "sft.val_period": (sft.val_period, 0), "sft.seed": (sft.seed, 0),
        "logger.report_period": (job.logger.report_period, 1), "cluster.timeout_seconds": (job.cluster.timeout_seconds, 1),
        "sft.val_global_batch_size": (sft.val_global_batch_size, 1), "data.max_input_seq_length": (job.data.max_input_seq_length, 1),
        "policy.make_sequence_length_divisible_by": (job.policy.make_sequence_length_divisible_by, 1),
        "policy.sequence_packing.train_mb_tokens": (job.policy.sequence_packing.train_mb_tokens, 1),
        "cluster.num_nodes": (job.cluster.num_nodes, 1), "cluster.gpus_per_node": (job.cluster.gpus_per_node, 1),
    }  # fmt: skip
    most = {
        "cluster.timeout_seconds": (job.cluster.timeout_seconds, _YEAR), "data.num_workers": (job.data.num_workers, 1024),
        "data.prefetch": (job.data.prefetch, 1 << 20), "policy.train_global_batch_size": (job.policy.train_global_batch_size, _MOST_ROWS),
        "sft.val_global_batch_size": (sft.val_global_batch_size, _MOST_ROWS),
        "policy.max_total_sequence_length": (job.policy.max_total_sequence_length, (1 << 31) - 1),
    }  # fmt: skip
    for key, (size, limit) in most.items():
        is_derived = key in job.sources and job.sources[key].kind == "derived"
        if size is not None and size > limit and not is_derived:
            yield setup.refuse("size", key, f"must be at most {limit}, got {size}", f"give {limit} or less")
    for key, (size, least) in sizes.items():
        is_derived = key in job.sources and job.sources[key].kind == "derived"  # refused where it comes from
        if size is not None and size < least and not is_derived:
            yield setup.refuse("size", key, f"must be at least {least}, got {size}", f"give {least} or more")
    beyond = [step for step in job.logger.dump_batch_steps if not 1 <= step <= (sft.max_num_steps or step)]
    if beyond:
        what = (
            "each step must be at least 1"
            + (f" and at most {sft.max_num_steps}" if sft.max_num_steps else "")
            + f", got {beyond[0]}"
        )
        yield setup.refuse("size", "logger.dump_batch_steps", what, "name steps that the job takes")
    if (sft.val_period or sft.val_at_start or sft.val_at_end) and not job.data.validation:
        key = "sft.val_period" if sft.val_period else "sft.val_at_start" if sft.val_at_start else "sft.val_at_end"
        fix = "give data.validation a dataset, or set val_period 0, val_at_start and val_at_end false"
        yield setup.refuse("no_validation", key, "must be off without a dataset in data.validation", fix)


def check_schedule(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse a learning rate or a course of it that megatron-core's scheduler cannot take (R-SETUP-16)."""
    job, schedule = setup.job, setup.job.megatron.scheduler
    optimizer = job.megatron.optimizer
    rate, least = float(optimizer["lr"] or 0.0), optimizer.get("min_lr")
    if rate <= 0:
        yield setup.refuse(
            "schedule", f"{_OPTIMIZER}.lr", f"must be above 0, got {optimizer['lr']}", "give a learning rate above 0"
        )
        return
    if least is None and schedule.lr_decay_style != "constant":
        what = f"the decay {schedule.lr_decay_style} needs {_OPTIMIZER}.min_lr, the rate at its end"
        yield setup.refuse("schedule", f"{_SCHEDULER}.lr_decay_style", what, f"set {_OPTIMIZER}.min_lr")
    if least is not None and not 0 <= least <= rate:
        what = f"must be between 0 and lr, {rate}, got {least}"
        yield setup.refuse("schedule", f"{_OPTIMIZER}.min_lr", what, f"give a rate from 0 to {rate}")
    if not 0 <= schedule.lr_warmup_init <= rate:
        what = f"must be between 0 and lr, {rate}, got {schedule.lr_warmup_init}"
        yield setup.refuse("schedule", f"{_SCHEDULER}.lr_warmup_init", what, f"give a rate from 0 to {rate}")
    decay = schedule.lr_decay_iters
    if decay is None and schedule.lr_decay_style != "constant":
        what = f"must be set for the decay {schedule.lr_decay_style} where sft.max_num_steps is not set"
        yield setup.refuse("schedule", f"{_SCHEDULER}.lr_decay_iters", what, "set lr_decay_iters or sft.max_num_steps")
    is_derived = _kind_of(setup, f"{_SCHEDULER}.lr_decay_iters") == "derived"  # refused where it comes from
    if is_empty := decay is not None and decay < 1 and not is_derived:
        yield setup.refuse(
            "schedule", f"{_SCHEDULER}.lr_decay_iters", f"must be at least 1, got {decay}", "give 1 or more"
        )
    warmup = schedule.lr_warmup_iters
    if warmup < 0:
        yield setup.refuse(
            "schedule", f"{_SCHEDULER}.lr_warmup_iters", f"must be at least 0, got {warmup}", "give 0 or more"
        )
    elif decay is not None and not is_empty and warmup >= max(1, decay):
        where = job.where(f"{_SCHEDULER}.lr_decay_iters")
        what = f"must be below lr_decay_iters, {decay}, which counts the warm-up too ({where}), got {warmup}"
        fix = f"set it below {decay}, or {_SCHEDULER}.lr_decay_iters above {warmup}"
        yield setup.refuse("schedule", f"{_SCHEDULER}.lr_warmup_iters", what, fix)
    if schedule.lr_decay_style == "WSD" and None in {schedule.lr_wsd_decay_style, schedule.lr_wsd_decay_iters}:
        fix = f"set {_SCHEDULER}.lr_wsd_decay_style and lr_wsd_decay_iters"
        yield setup.refuse(
            "schedule",
            f"{_SCHEDULER}.lr_decay_style",
            "WSD needs lr_wsd_decay_style and lr_wsd_decay_iters, its final decay",
            fix,
        )
    last = schedule.lr_wsd_decay_iters
    room = max(1, decay - max(0, warmup)) if decay is not None else last
    if last is not None and room is not None and not 1 <= last <= room:
        what = f"must be from 1 to {room}, the steps after the warm-up, got {last}"
        yield setup.refuse("schedule", f"{_SCHEDULER}.lr_wsd_decay_iters", what, f"give 1 to {room}")
    yield from _check_weight_decay(setup)


def _kind_of(setup: Setup, key: str) -> str:
    """Return what set the value at `key`: a file, an override, a derivation, or nothing."""
    return setup.job.sources[key].kind if key in setup.job.sources else "default"


def _check_weight_decay(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse first and last weight decays that the scheduler cannot take; unset ones are the optimizer's or
    megatron-core's default.
    """
    schedule, default = setup.job.megatron.scheduler, setup.job.megatron.optimizer.get("weight_decay")
    said = f"{_OPTIMIZER}.weight_decay"
    if default is None:
        default, said = option_class("optimizer").weight_decay, f"megatron-core's default of {said}"
    first = float(default if schedule.start_weight_decay is None else schedule.start_weight_decay)
    last = float(default if schedule.end_weight_decay is None else schedule.end_weight_decay)
    names = ("start_weight_decay", "end_weight_decay")
    sources = [setup.job.sources.get(f"{_SCHEDULER}.{name}") for name in names]
    derived = {
        name: getattr(schedule, name) is None or (source is not None and source.kind == "derived")
        for name, source in zip(names, sources, strict=True)
    }
    for name, value in zip(names, (first, last), strict=True):
        if not value >= 0 and not derived[name]:  # else refused where it comes from
            yield setup.refuse("schedule", f"{_SCHEDULER}.{name}", f"must be at least 0, got {value}", "give 0 or more")
            return
    if first > last or (schedule.weight_decay_incr_style == "constant" and first != last):
        told = [
            f"{value}{f' ({said})' if derived[name] else ''}"
            for name, value in zip(derived, (first, last), strict=True)
        ]
        wanted = "stay constant" if schedule.weight_decay_incr_style == "constant" else "not fall"
        what = f"weight decay must {wanted} (weight_decay_incr_style {schedule.weight_decay_incr_style}), got {told[0]} to {told[1]}"
        key = f"{_SCHEDULER}.{'start' if derived['end_weight_decay'] else 'end'}_weight_decay"
        yield setup.refuse(
            "schedule",
            key,
            what,
            "make start_weight_decay and end_weight_decay equal, or let weight decay grow (weight_decay_incr_style)",
        )


def check_checkpoints(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse checkpoints that cannot be written or read again (R-SETUP-17)."""
    job, saved = setup.job, setup.job.checkpointing
    yield from _check_time_limit(setup)
    if not saved.enabled:
        return
    if saved.save_period < 1:
        yield setup.refuse(
            "checkpoint", "checkpointing.save_period", f"must be at least 1, got {saved.save_period}", "give 1 or more"
        )
    if saved.keep_top_k is not None and saved.keep_top_k < 1:
        what, fix = f"must be at least 1, got {saved.keep_top_k}", "give 1 or more, or null to keep all checkpoints"
        yield setup.refuse("checkpoint", "checkpointing.keep_top_k", what, fix)
    metric = saved.metric_name
    if metric is not None and metric not in METRICS:
        what, fix = (
            f"must be one of {', '.join(METRICS)}, got {metric!r}",
            f"choose one of {', '.join(METRICS)}, or null to keep the newest",
        )
        yield setup.refuse("checkpoint", "checkpointing.metric_name", what, fix)
    if metric == "val:val_loss" and not job.sft.val_period:
        what, fix = (
            f"{metric} needs a job that validates during training",
            "set sft.val_period, or set metric_name to null",
        )
        yield setup.refuse("checkpoint", "checkpointing.metric_name", what, fix)
    yield from _check_measured(setup)
    if job.model.tie_embeddings and multi_token_depths(job) and job.megatron.pipeline_model_parallel_size > 1:
        what = "must be false with multi-token prediction over several pipeline stages, got true: megatron-core cannot save a tied embedding there"
        fix = "set it to false, or use one pipeline stage, or set checkpointing.enabled to false"
        yield setup.refuse("checkpoint", "model.tie_embeddings", what, fix)
    if saved.save_optimizer and uses_distributed_optimizer(job) and setup.device == "cpu":
        if saved.optimizer_format == "fully_sharded_model_space":
            what = "must be dp_reshardable or fully_reshardable on the CPU, got fully_sharded_model_space: saving it fails over gloo"
            fix = "set it to dp_reshardable or fully_reshardable"
            yield setup.refuse("checkpoint", "checkpointing.optimizer_format", what, fix)
        elif saved.optimizer_format == "dp_reshardable" and job.megatron.pipeline_model_parallel_size > 1:
            what = "must be false on the CPU with several pipeline stages and optimizer_format dp_reshardable: saving it fails over gloo"
            fix = f"set checkpointing.optimizer_format to fully_reshardable, use the plain optimizer ({_OPTIMIZER}.use_distributed_optimizer=false), or use one pipeline stage"
            yield setup.refuse("checkpoint", f"{_OPTIMIZER}.use_distributed_optimizer", what, fix)


def _check_measured(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse a validation metric that no saved step has: a validation loss belongs to the step that made it."""
    sft, saved = setup.job.sft, setup.job.checkpointing
    last = sft.max_num_steps
    if saved.metric_name != "val:val_loss" or sft.val_period < 1 or saved.save_period < 1 or last is None:
        return
    at_end = last % sft.val_period == 0 or sft.val_at_end  # the last step is always saved
    if math.lcm(sft.val_period, saved.save_period) > last and not at_end:
        what = (
            f"val:val_loss needs a step with a validation and a checkpoint, and none of the {last} steps has both: validations "
            f"come every {sft.val_period} steps, checkpoints every {saved.save_period}"
        )
        fix = f"make checkpointing.save_period a multiple of sft.val_period ({sft.val_period}), or set metric_name to null"
        yield setup.refuse("checkpoint", "checkpointing.metric_name", what, fix)


def _check_time_limit(setup: Setup) -> Iterator[SetupRefused]:
    key, limit = "checkpointing.checkpoint_must_save_by", setup.job.checkpointing.checkpoint_must_save_by
    if limit is not None and not _DURATION.fullmatch(limit):
        what = f"must be a duration as days:hours:minutes:seconds, got {limit!r}"
        fix = 'write "days:hours:minutes:seconds", in quotes'
        yield setup.refuse("checkpoint", key, what, fix)
    elif limit is not None and not setup.job.checkpointing.enabled:
        what, fix = (
            f"must be null where checkpointing.enabled is false, got {limit!r}",
            "set it to null, or set checkpointing.enabled to true",
        )
        yield setup.refuse("checkpoint", key, what, fix)


def check_start(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse a source of weights that contradicts the job, or a shape that is not known (R-SETUP-18)."""
    model, policy = setup.job.model, setup.job.policy
    if model.initial == "huggingface" and model.initial_path is None and policy.model_name is None:
        what = "must be set where model.initial is huggingface and policy.model_name is not set"
        fix = "set model.initial_path or policy.model_name"
        yield setup.refuse("start", "model.initial_path", what, fix)
    if model.initial == "megatron" and model.initial_path is None:
        yield setup.refuse(
            "start",
            "model.initial_path",
            "must be set where model.initial is megatron",
            "give the folder of a checkpoint",
        )
    if model.initial == "scratch" and model.initial_path is not None:
        what = f"must not be set where model.initial is scratch, got {model.initial_path!r}"
        fix = "take it out, or set model.initial to megatron or huggingface"
        yield setup.refuse("start", "model.initial_path", what, fix)
    needed = ("hidden_size", "num_attention_heads") + (() if model.hybrid_layer_pattern else ("num_layers",))
    unset = [f"model.{name}" for name in needed if not getattr(model, name)]
    if unset:
        what, fix = (
            f"{', '.join(unset)} must be set: the model is built before weights are loaded",
            f"set {', '.join(unset)}",
        )
        yield setup.refuse("shape", unset[0], what, fix)
    if (model.architecture == "hybrid") != (model.hybrid_layer_pattern is not None):
        what = (
            f"must {'be set' if model.hybrid_layer_pattern is None else 'not be set'} where model.architecture is "
            f"{model.architecture}, got {model.hybrid_layer_pattern!r}"
        )
        yield setup.refuse(
            "shape", "model.hybrid_layer_pattern", what, "give a pattern to the architecture hybrid only"
        )
    if model.hybrid_layer_pattern is not None:
        layers = len(model.hybrid_layer_pattern.split("/")[0].replace("|", ""))
        if model.num_layers is not None and model.num_layers != layers:
            what = f"must be the number of layers in model.hybrid_layer_pattern, {layers}, got {model.num_layers}"
            yield setup.refuse("shape", "model.num_layers", what, "take it out: the pattern sets it")
        depths, said = model.hybrid_layer_pattern.count("/"), setup.job.megatron.mtp_num_layers
        if said is not None and said != depths:
            what = f"must be the number of depths in model.hybrid_layer_pattern, {depths}, got {said}"
            yield setup.refuse("shape", f"{_MEGATRON}.mtp_num_layers", what, "take it out: the pattern sets it")
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(model, name) < 1:
            yield setup.refuse(
                "shape",
                f"model.{name}",
                f"must be at least 0 and below 1, got {getattr(model, name)}",
                "give a number from 0 to below 1",
            )
