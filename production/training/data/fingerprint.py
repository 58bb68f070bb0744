"""Record what a run's rows depend on, as plain JSON beside a checkpoint, and refuse a resume with other data
(R-ORDER-8).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from production.errors import PackproofError
from production.files.source import PackedSource
from production.rows.builder import RowSettings
from production.training.config import Job, order_settings, row_settings, sizes
from production.training.order_settings import OrderSettings

BUCKETS = "distributed_data_parallel_config.overlap_grad_reduce"
"""Key that decides the buckets of the distributed optimizer's state in a checkpoint."""
FIX = {
    BUCKETS: "set policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce to what it was, since the distributed "
    "optimizer's state is saved by the buckets that it makes (dp_reshardable), or begin a new run",
    "tokenizer": "give policy.tokenizer.name the tokenizer that the run began with, or begin a new run",
    "files": "give data.train.data_path the files that the run began with (names may differ, contents may not), or begin a new run",
    "semantics": "give data.train.semantics the preset and overrides that the run began with, or begin a new run",
    "weights": "give each file of data.train.data_path the weight that the run began with, or begin a new run",
    "path": "give data.train.dataset_name the kind that the run began with (direct: megatron_sft_packed, online: openai_format), "
    "or begin a new run",
    "world_size": "start as many ranks as before, or begin a new run",
    "scheduler.weight_decay_steps": "let the run be as long as it was to be (sft.max_num_steps, sft.max_num_epochs), since its weight "
    "decay grows over it, or begin a new run",
    **{
        f"chat.{name}": f"set data.{name} to what the run began with (false, where nothing was saved), or begin a new run"
        for name in ("add_bos", "add_eos", "add_generation_prompt")
    },
    "chat.tool_key": "set data.train.tool_key to what the run began with (null, where nothing was saved), or begin a new run",
    "run_steps": "let the run be as long as it was to be (sft.max_num_steps), since its order permutes the samples of all its steps at "
    "once, or begin a new run",
    "data_parallel_size": "start with as many data-parallel ranks as before, or begin a new run",
}
"""Fixes for keys that differ; a key without an entry is set back to the saved value."""
_MEGATRON = "policy.megatron_cfg"
_OPTIONS = {
    "prompt_format": "data.train.megatron_sft_prompt_format",
    "pad_token": "data.train.megatron_sft_pad_token",
    "assistant_prefix_len": "data.train.megatron_sft_assistant_prefix_len",
    "pack_length": "policy.max_total_sequence_length",
    "global_batch_size": "policy.train_global_batch_size",
    "order": "data.order",
    "last_batch": "data.last_batch",
    "seed": "data.seed",
    "tensor_parallel_size": f"{_MEGATRON}.tensor_model_parallel_size",
    "context_parallel_size": f"{_MEGATRON}.context_parallel_size",
    "pipeline_parallel_size": f"{_MEGATRON}.pipeline_model_parallel_size",
    "expert_parallel_size": f"{_MEGATRON}.expert_model_parallel_size",
    "expert_tensor_parallel_size": f"{_MEGATRON}.expert_tensor_parallel_size",
    "precision": "policy.precision",
    "sequence_packing.make_sequence_length_divisible_by": "policy.make_sequence_length_divisible_by",
    "sequence_packing.max_input_seq_length": "data.max_input_seq_length",
}
"""Fingerprint key to the job's configuration key; sections are below."""
_SECTIONS = {
    "multi_token": _MEGATRON,
    "transformer": _MEGATRON,
    "optimizer": f"{_MEGATRON}.optimizer",
    "scheduler": f"{_MEGATRON}.scheduler",
    "distributed_data_parallel_config": f"{_MEGATRON}.distributed_data_parallel_config",
    "fp8": f"{_MEGATRON}.fp8_cfg",
    "sequence_packing": "policy.sequence_packing",
}
"""Sections of `BatchStream.identity` that the configuration names otherwise."""
MISSING = "(not there)"
"""Printed for a key that one side lacks."""


class ResumeRefused(PackproofError):  # noqa: N818 - reads as the verdict it is
    """A run cannot continue with this data; `differing` has (saved, now) of each key."""

    differing: dict[str, tuple[Any, Any]]
    """Saved and current value of each key that differs."""

    def __init__(self, *, what: str, where: str, fix: str, differing: dict[str, tuple[Any, Any]]) -> None:
        super().__init__(what=what, where=where, fix=fix)
        self.differing = differing


def fingerprint(
    *, sources: Sequence[PackedSource], tokenizer: Any, rows: RowSettings, order: OrderSettings
) -> dict[str, Any]:
    """Return everything that decides which row each rank gets at each step, as plain JSON.

    The length of the run (`max_epochs`) is left out, except where the order permutes the whole run (`run_steps`).
    """
    return {
        "files": described(sources),
        "tokenizer": tokenizer_identity(tokenizer),
        "semantics": msgspec.to_builtins(rows.semantics),
        "prompt_format": rows.prompt_format,
        "pad_token": rows.pad_token,
        "assistant_prefix_len": rows.assistant_prefix_len,
        "pack_length": rows.pack_length,
        "context_parallel_size": rows.context_parallel_size,
        "data_parallel_size": order.data_parallel_size,
        "global_batch_size": order.global_batch_size,
        "order": order.kind,
        "last_batch": order.last_batch,
        "seed": order.seed,
        "weights": None if order.weights is None else list(order.weights),
        **({} if order.run_steps is None else {"run_steps": order.run_steps}),
    }


def described(sources: Sequence[PackedSource]) -> list[dict[str, Any]]:
    """Return fingerprint and rows of each source."""
    return [{"fingerprint": source.fingerprint, "rows": len(source)} for source in sources]


def fed_identity(
    job: Job, files: Sequence[Mapping[str, Any]], *, tokenizer: Any, data_parallel_size: int
) -> dict[str, Any]:
    """Return everything that decides what each rank is fed, with the layout (R-ORDER-8).

    `files` holds the fingerprint and the rows of each source, as `fingerprint` has them.
    """
    rows, order = row_settings(job, job.data.train[0]), order_settings(job, data_parallel_size)
    found = fingerprint(sources=(), tokenizer=tokenizer, rows=rows, order=order) | {"files": [*files]}
    layout = {f"{name}_parallel_size": size for name, size in dataclasses.asdict(sizes(job)).items()}
    return found | layout | {"path": "direct" if job.is_packed else "online"}


def check_resume(saved: Mapping[str, Any], now: Mapping[str, Any], *, free: Sequence[str] = ()) -> list[str]:
    """Raise ResumeRefused, with both values of each differing key, where two fingerprints differ.

    Keys of `free` may differ; those that do are returned.
    """
    # Through JSON, as the saved one went: a tuple and a list are the same.
    before, after = (msgspec.json.decode(msgspec.json.encode(dict(one))) for one in (saved, now))
    differing = {
        key: (before.get(key, MISSING), after.get(key, MISSING))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, MISSING) != after.get(key, MISSING)
    }
    changed = [key for key in free if differing.pop(key, None) is not None]
    if not differing:
        return changed
    told = "; ".join(
        f"{key}: saved {_said(key, old)}, now {_said(key, new)}"
        for key, (old, new) in ((key, _apart(*pair)) for key, pair in differing.items())
    )
    fixes = [_fix(key, old) for key, (old, _) in differing.items()]
    raise ResumeRefused(
        what=f"the run must have the settings and files that it was saved with, and differs: {told}",
        where="resume",
        fix="; ".join(dict.fromkeys(fixes)),
        differing=differing,
    )


def option(key: str) -> str:
    """Return the dotted configuration key of a fingerprint key that `FIX` does not list."""
    section, _, name = key.partition(".")
    return _OPTIONS.get(key) or (f"{_SECTIONS[section]}.{name}" if section in _SECTIONS else key)


def tokenizer_identity(tokenizer: Any) -> str:
    """Return 32 hex digits of a tokenizer's behaviour: its whole definition, special tokens and chat template.

    A tokenizer without a fast backend cannot be asked for its model; the digits then cover class, vocabulary and the
    rest. A newer release of the library may write the same definition otherwise; a resume is then refused, never let
    through wrongly.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        definition: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        definition = json.loads(backend.to_str())
        for passing in ("truncation", "padding"):  # as the last call left them
            definition.pop(passing, None)
    special = {
        name: str(value)
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (value := getattr(tokenizer, name, None)) is not None
    }
    splits = getattr(tokenizer, "split_special_tokens", False)
    whole = [definition, special, getattr(tokenizer, "chat_template", None), splits]
    return xxhash.xxh3_128_hexdigest(json.dumps(whole, sort_keys=True).encode())


def _fix(key: str, saved: object) -> str:
    if key in FIX:
        return FIX[key]
    name = option(key)
    if key.startswith("transformer."):  # a file may say it in either place, not in both
        name += f" (or {_MEGATRON}.{key}, where it stands there)"
    back = f"take {name} out" if saved == MISSING else f"set {name} to {_short(saved)}"
    return f"{back} to go on, or begin a new run"


def _apart(old: Any, new: Any) -> tuple[Any, Any]:
    """Reduce two mappings to the entries that differ, which a long mapping could hide."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old, new
    keys = [key for key in {**old, **new} if old.get(key, MISSING) != new.get(key, MISSING)]
    return {key: old[key] for key in keys if key in old}, {key: new[key] for key in keys if key in new}


def _said(key: str, value: Any) -> str:
    """Return a value in words where its JSON would say little."""
    if value == MISSING:
        return MISSING
    if key != "files":  # of a mapping only what differs is left, and all of it is said
        return json.dumps(value, sort_keys=True) if isinstance(value, dict) else _short(value)
    return " and ".join(f"{each['rows']} rows (fingerprint {str(each['fingerprint'])[:8]})" for each in value)


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else f"{text[:297]}..."
