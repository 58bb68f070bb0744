"""Take NeMo-RL's keys out of a configuration: keys without effect are listed with the reason, others become refusals
(SPEC R-SETUP-24).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from production.training.config.layers import Overlay
from production.training.config.nemo_rl_keys import DEAD_SECTIONS, NEMO_RL_DATASETS, NEMO_RL_KEYS
from production.training.config.refusal import SetupRefused
from production.training.config.schema.data import CHAT, PACKED
from production.training.config.schema.job import Job

_MEGATRON = "policy.megatron_cfg"
_OF_THE_ONLINE_PATH = (
    "data.add_bos", "data.add_eos", "data.add_generation_prompt", "data.max_input_seq_length",
    "policy.make_sequence_length_divisible_by", "policy.sequence_packing.algorithm",
    "policy.sequence_packing.train_mb_tokens", "policy.tokenizer.chat_template",
)  # fmt: skip
_DATASET = re.compile(r"data\.(?:default|(?:train|validation)(?:\[\d+\])?)\.")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Keys that were taken out of a configuration."""

    without_effect: dict[str, str] = field(default_factory=dict)
    """Dotted key to the reason why it has no effect here."""
    refused: list[SetupRefused] = field(default_factory=list)
    """Refusals of keys that ask for what this job does not have."""


def is_nemo_rl_key(key: str, value: Any) -> bool:
    """Return whether `key` is one that NeMo-RL's files have and no section of this job, and `value` has its shape."""
    known = NEMO_RL_KEYS.get(_general(key))
    return known is not None and known.is_shaped(value)


def take_nemo_rl_keys(overlay: Overlay) -> Taken:
    """Remove NeMo-RL's keys from the resolved values of `overlay`, and judge each by its value."""
    taken = Taken()
    for section, name, key in list(_present(overlay.values)):
        value, meaning = section.pop(name), NEMO_RL_KEYS[_general(key)]
        if meaning.has_no_effect(value):
            taken.without_effect[key] = meaning.why
        else:
            taken.refused.append(
                _refusal(overlay, key, f"it asks for {meaning.what}, which this job does not have", meaning.fix)
            )
    _take_datasets(overlay, taken)
    _take_recomputation(overlay, taken)
    return taken


def without_effect(job: Job) -> dict[str, str]:
    """Return every key of the job's files that has no effect on its path, with the reason."""
    sections = {
        section: why
        for section, why in DEAD_SECTIONS.items()
        if any(
            key.startswith(f"{section}.") and key != f"{section}.enabled" and _is_set(job, key) for key in job.sources
        )
    }
    unread = {key: why for key, why, holds in _unread(job) if holds and _is_set(job, key)}
    return {**job.without_effect, **sections, **unread}


def _unread(job: Job) -> Iterator[tuple[str, str, bool]]:
    """Yield keys of the job's own sections that nothing reads, the reason, and whether it holds for this job."""
    megatron = job.megatron
    yield "logger.monitor_gpus", "memory is reported with each step", job.logger.monitor_gpus
    why = "CUDA's cache stays with the job, which has no generation beside it"
    yield f"{_MEGATRON}.empty_unused_memory_level", why, megatron.empty_unused_memory_level > 0
    why, is_dense = "a model without experts has no router", job.model.num_moe_experts is None
    yield f"{_MEGATRON}.freeze_moe_router", why, megatron.freeze_moe_router and is_dense
    why = "lengths are rounded up to policy.make_sequence_length_divisible_by, as in NeMo-RL"
    packing = job.policy.sequence_packing
    yield "policy.sequence_packing.sequence_length_round", why, packing.sequence_length_round is not None
    why = "no optimizer of megatron-core reads it; parameters have policy.precision"
    yield f"{_MEGATRON}.optimizer.params_dtype", why, "params_dtype" in megatron.optimizer
    yield from ((key, "only the online path reads it", job.is_packed) for key in _OF_THE_ONLINE_PATH)


def _is_set(job: Job, key: str) -> bool:
    source = job.sources.get(key)
    return source is not None and source.kind in {"file", "override"}


def _general(key: str) -> str:
    """Return the key as `NEMO_RL_KEYS` writes it."""
    return _DATASET.sub("data.*.", key)


def _present(values: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield section, name and dotted key of each NeMo-RL key that the values have."""
    for key in NEMO_RL_KEYS:
        parent, _, name = key.rpartition(".")
        for full, section in _sections(values, parent):
            if isinstance(section, dict) and name in section:
                yield section, name, f"{full}.{name}"


def _sections(values: Mapping[str, Any], parent: str) -> Iterator[tuple[str, Any]]:
    if parent != "data.*":
        found: Any = values
        for name in parent.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        yield parent, found
        return
    data = values["data"] if isinstance(values["data"], Mapping) else {}
    yield "data.default", data.get("default")
    for full, section, _ in _datasets(data):
        yield full, section


def _datasets(data: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted key, mapping and default of each dataset."""
    default = data.get("default") if isinstance(data.get("default"), Mapping) else {}
    for split in ("train", "validation"):
        given = data.get(split)
        if isinstance(given, list):
            yield from ((f"data.{split}[{index}]", each, default) for index, each in enumerate(given))
        else:
            yield f"data.{split}", given, default


def _take_datasets(overlay: Overlay, taken: Taken) -> None:
    """Refuse datasets that NeMo-RL downloads, and put conversations of their name in their place, so that everything
    else against the job is found as well.
    """
    data = overlay.values["data"]
    if not isinstance(data, Mapping):
        return
    default = data.get("default")
    if isinstance(default, dict) and _is_of_nemo_rl(default.get("dataset_name")):
        _refuse_dataset(overlay, taken, "data.default", default)
    for key, section, _ in list(_datasets(data)):
        if isinstance(section, dict) and _is_of_nemo_rl(section.get("dataset_name")):
            _refuse_dataset(overlay, taken, key, section)


def _refuse_dataset(overlay: Overlay, taken: Taken, key: str, section: dict[str, Any]) -> None:
    name = section["dataset_name"]
    what = f"must be {PACKED} or {CHAT}, got {name!r}, a dataset that NeMo-RL downloads or converts"
    fix = f"write it as chat JSONL (a line a conversation, key messages) and set dataset_name {CHAT} and data_path, or pack it and set {PACKED}"
    taken.refused.append(_refusal(overlay, f"{key}.dataset_name", what, fix))
    section["dataset_name"] = CHAT
    if key != "data.default":
        section.setdefault("data_path", name)


def _is_of_nemo_rl(name: Any) -> bool:
    return isinstance(name, str) and (name in NEMO_RL_DATASETS or "." in name)


def _take_recomputation(overlay: Overlay, taken: Taken) -> None:
    """Leave full recomputation out where NeMo-RL's own switch for it is off: megatron-core would refuse it without a
    method.
    """
    section = overlay.values["policy"]["megatron_cfg"]
    switch = f"{_MEGATRON}.activation_checkpointing"
    if (
        not isinstance(section, dict)
        or switch not in overlay.sources
        or section["activation_checkpointing"] is not False
    ):
        return
    passed_on = section["transformer"] if isinstance(section["transformer"], dict) else {}
    if section.get("recompute_granularity") == "full" and "recompute_method" not in {*section, *passed_on}:
        section.pop("recompute_granularity")
        taken.without_effect[f"{_MEGATRON}.recompute_granularity"] = f"{switch} is false"


def _refusal(overlay: Overlay, key: str, what: str, fix: str) -> SetupRefused:
    return SetupRefused(kind="nemo_rl", key=key, what=what, where=overlay.where(key), fix=fix)
