"""Load a job from files and overrides: layers, interpolations, derived values, sections, in this order (SPEC
R-SETUP-1 to 5).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from production.online.bins import domain_factor
from production.training.config.building import Builder, missing_values
from production.training.config.layers import MISSING, Overlay
from production.training.config.megatron_options import option_fields
from production.training.config.nemo_rl import take_nemo_rl_keys
from production.training.config.schema.data import CHAT
from production.training.config.schema.job import Job, Source
from production.training.config.schema.policy import MegatronCfg
from production.training.config.yaml_reader import read_file

_MEGATRON = "policy.megatron_cfg"


def load(paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Job:
    """Load the job of one YAML file, or of several laid over each other in order, with `key=value` overrides on top.

    A file may name others under it by `defaults`. Nothing is validated yet: call `validate` for that. ConfigRefused
    names the dotted key, the file and the line of an unknown key, a wrong type, a missing value, a duplicate key, a
    bare `no`, or an interpolation that leads nowhere (SPEC R-SETUP-1 to 5).
    """
    overlay = Overlay()
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    for path in files:
        for layer in read_file(path):
            overlay.lay(layer)
    for text in overrides:
        overlay.override(text)
    builder = Builder(overlay)
    builder.check_keys(Job, overlay.values)
    overlay.resolve()
    taken = take_nemo_rl_keys(overlay)
    _hoist(overlay)
    _derive(overlay)
    missing_values(overlay.values, overlay.where)
    job = builder.section(Job, overlay.values, "")
    return dataclasses.replace(
        job,
        sources=dict(overlay.sources),
        without_effect=taken.without_effect,
        unsupported=tuple(taken.refused),
        loaded_files=tuple(map(str, files)),
        loaded_overrides=tuple(overrides),
    )


def _hoist(overlay: Overlay) -> None:
    """Move megatron-core's options that stand directly in `megatron_cfg`, as in NeMo-RL's files, to `transformer`."""
    section = overlay.values["policy"]["megatron_cfg"]
    own = {each.name for each in dataclasses.fields(MegatronCfg)}
    direct = {
        name: value for name, value in section.items() if name not in own and name in option_fields("transformer")
    }
    if not direct or not isinstance(section["transformer"], dict):
        return
    for name in direct:
        key, new = f"{_MEGATRON}.{name}", f"{_MEGATRON}.transformer.{name}"
        if name in section["transformer"]:
            Builder(overlay).refuse_twice(key, new)
        for old in [each for each in overlay.sources if each == key or each.startswith((f"{key}.", f"{key}["))]:
            overlay.sources[new + old[len(key) :]] = dataclasses.replace(overlay.sources[old], written=old)
    rest = {name: value for name, value in section.items() if name not in direct}
    overlay.values["policy"]["megatron_cfg"] = {**rest, "transformer": {**section["transformer"], **direct}}


def _derive(overlay: Overlay) -> None:
    """Derive values from other values; each derived value names its source (SPEC R-SETUP-5)."""
    values = overlay.values
    policy, megatron = values["policy"], values["policy"]["megatron_cfg"]
    if policy["tokenizer"]["name"] == MISSING and policy["model_name"] is not None:
        _fill(overlay, "policy.tokenizer.name", policy["model_name"], "policy.model_name", str)
    _fill(overlay, "sft.val_global_batch_size", policy["train_global_batch_size"], "policy.train_global_batch_size")
    if isinstance(values["data"]["shuffle"], bool):
        _fill(overlay, "data.order", "shuffle" if values["data"]["shuffle"] else "sequential", "data.shuffle", str)
    if type(megatron["tensor_model_parallel_size"]) is int:
        several = megatron["tensor_model_parallel_size"] > 1
        _fill(overlay, f"{_MEGATRON}.sequence_parallel", several, f"{_MEGATRON}.tensor_model_parallel_size", bool)
    _fill(overlay, "data.seed", values["sft"]["seed"], "sft.seed")
    _fill(overlay, "data.max_input_seq_length", policy["max_total_sequence_length"], "policy.max_total_sequence_length")
    _fill(
        overlay, "policy.sequence_packing.train_mb_tokens",
        policy["max_total_sequence_length"], "policy.max_total_sequence_length",
    )  # fmt: skip
    if "loss.normalization" not in overlay.sources and _trains_conversations(values["data"]):
        values["loss"]["normalization"] = "global_valid_tokens"  # the online path has no other
        overlay.sources["loss.normalization"] = Source(kind="derived", place="data.train's dataset_name")
    _fill(overlay, f"{_MEGATRON}.pipeline_dtype", policy["precision"], "policy.precision", str)
    _fill(overlay, f"{_MEGATRON}.scheduler.lr_decay_iters", values["sft"]["max_num_steps"], "sft.max_num_steps")
    if isinstance(megatron["optimizer"], dict):
        decay = megatron["optimizer"].get("weight_decay")
        for name in ("start_weight_decay", "end_weight_decay"):
            _fill(overlay, f"{_MEGATRON}.scheduler.{name}", decay, f"{_MEGATRON}.optimizer.weight_decay", int | float)
        if policy["max_grad_norm"] is not None and "clip_grad" not in megatron["optimizer"]:
            megatron["optimizer"] = {**megatron["optimizer"], "clip_grad": None}
            _fill(
                overlay,
                f"{_MEGATRON}.optimizer.clip_grad",
                policy["max_grad_norm"],
                "policy.max_grad_norm",
                int | float,
            )
        if "lr" not in megatron["optimizer"]:
            megatron["optimizer"] = {**megatron["optimizer"], "lr": MISSING}
    tensor, context = megatron["tensor_model_parallel_size"], megatron["context_parallel_size"]
    if type(tensor) is int and type(context) is int:
        factor = domain_factor(
            context_parallel_size=context,
            tensor_parallel_size=tensor,
            sequence_parallel=megatron["sequence_parallel"] is True,
        )
        place = f"{_MEGATRON}'s context and tensor parallel sizes"
        _fill(overlay, "policy.make_sequence_length_divisible_by", factor, place)


def _trains_conversations(data: Any) -> bool:
    """Return whether the first training dataset is ordinary conversations."""
    train = data["train"][0] if isinstance(data["train"], list) and data["train"] else data["train"]
    given = train.get("dataset_name") if isinstance(train, dict) else None
    return (given or (data["default"]["dataset_name"] if isinstance(data["default"], dict) else None)) == CHAT


def _fill(overlay: Overlay, key: str, value: Any, place: str, kind: type | types.UnionType = int) -> None:
    *parents, name = key.split(".")
    section = overlay.values
    for parent in parents:
        section = section[parent]
    is_unset = section[name] is None or section[name] == MISSING
    # What has the wrong type is refused where it was set, not where it would be copied to.
    if (
        is_unset
        and isinstance(value, bool | int | float | str)
        and isinstance(value, bool) == (kind is bool)
        and isinstance(value, kind)
    ):
        section[name] = value
        overlay.sources[key] = Source(kind="derived", place=place)
