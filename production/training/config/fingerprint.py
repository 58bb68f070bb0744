"""Fingerprint a job's configuration: every value that decides a number of the run, and no other.

A key counts unless it is listed here, so that a new key cannot be forgotten. Paths of data and of the tokenizer and its template do not
count, because the files themselves have fingerprints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import xxhash

from production.training.config.schema.job import Job

VERSION = 1
"""Version of the list of keys, raised whenever the list changes."""
FREE = (
    "logger.*", "checkpointing.*", "cluster.timeout_seconds", "data.default.*", "data.num_workers", "data.prefetch",
    "data.cache_folder", "data.verify_files", "data.train.*.data_path.*.path", "data.validation.*.data_path.*.path",
    "policy.tokenizer.*", "sft.val_period", "sft.val_at_start", "sft.val_at_end",
    "policy.megatron_cfg.empty_unused_memory_level", "data.certificate", "data.cache_dir",
)  # fmt: skip
"""Patterns of dotted keys that decide no number."""
MISSING = "(not there)"
"""Stands for the value of a key that one side lacks."""


@dataclass(frozen=True, kw_only=True)
class ConfigFingerprint:
    """Identifies what a job's configuration makes of its files."""

    version: int
    """`VERSION` of the module that made it."""
    digest: str
    """32 hex digits of the values."""
    values: Mapping[str, Any]
    """Dotted key to value, for all that decides a number."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {"version": self.version, "digest": self.digest, "values": dict(self.values)}

    @classmethod
    def from_json(cls, value: Any) -> ConfigFingerprint:
        """Return the fingerprint of these JSON values. Raises ValueError where they are none."""
        try:
            whole = cls(**value)
        except TypeError as error:
            raise ValueError(f"it is not a fingerprint of a configuration ({error})") from error
        if not (type(whole.version) is int and type(whole.digest) is str and isinstance(whole.values, Mapping)):
            raise ValueError(
                "it is not a fingerprint of a configuration (version must be a whole number, digest must be text, values must be a mapping)"
            )
        return whole


def fingerprint_config(job: Job) -> ConfigFingerprint:
    """Return the fingerprint of a resolved job."""
    values = {
        key: value for key, value in _flat("", job.describe()) if not any(fnmatchcase(key, pattern) for pattern in FREE)
    }
    values = json.loads(json.dumps(values, sort_keys=True))
    digest = xxhash.xxh3_128_hexdigest(json.dumps([VERSION, values], sort_keys=True).encode())
    return ConfigFingerprint(version=VERSION, digest=digest, values=values)


def config_differences(saved: ConfigFingerprint, now: ConfigFingerprint) -> list[str]:
    """Return each key that decides a number and differs, with both values, in whole sentences."""
    if saved.version != now.version:
        return [f"The fingerprints are of versions {saved.version} and {now.version}, which cannot be compared: make the older one again."]  # fmt: skip
    keys = sorted({*saved.values, *now.values})
    pairs = ((key, saved.values.get(key, MISSING), now.values.get(key, MISSING)) for key in keys)
    return [f"{key} was {json.dumps(old)} and is {json.dumps(new)}." for key, old, new in pairs if old != new]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        parts: Any = value.items()
    elif isinstance(value, list) and value:
        parts = enumerate(value)
    else:
        yield prefix, value
        return
    for name, part in parts:
        yield from _flat(f"{prefix}.{name}" if prefix else str(name), part)
