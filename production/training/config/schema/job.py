"""Declare the whole resolved configuration of a job, and the source of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from production.training.config.refusal import SetupRefused
from production.training.config.schema.data import Data
from production.training.config.schema.model import Model
from production.training.config.schema.plain import plain
from production.training.config.schema.policy import MegatronCfg, Policy
from production.training.config.schema.sections import Checkpointing, Cluster, Logger, Loss, Sft


@dataclass(frozen=True, kw_only=True)
class Source:
    """Names the source of one value."""

    kind: Literal["default", "file", "override", "derived"]
    """Kind of source that set the value."""
    place: str = ""
    """`job.yaml:12`, the override as typed, or what it was derived from; empty for a default."""
    expression: str = ""
    """The interpolation that it was written as, such as `${policy.model_name}`; empty where it was written plainly."""
    written: str = ""
    """The key that the file has for it where that is another: an option of megatron-core that stands directly in `megatron_cfg`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A resolved job: every interpolation replaced, every derived value filled in, every type checked, nothing validated yet."""

    sft: Sft
    """Length of the run and validation."""
    policy: Policy
    """Model name, tokenizer, batch sizes, precision and megatron-core's options."""
    model: Model
    """The shape of the model."""
    data: Data
    """Data to train on."""
    loss: Loss
    """Divisor of the token losses."""
    checkpointing: Checkpointing
    """Checkpoints."""
    logger: Logger
    """Logs and reports."""
    cluster: Cluster
    """Machines of the job."""
    sources: Mapping[str, Source] = field(default_factory=dict)
    """Dotted key of each value (lists as `[0]`) to its source."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Dotted key of NeMo-RL's that no section has and that has no effect here, to the reason (SPEC R-SETUP-24)."""
    unsupported: tuple[SetupRefused, ...] = ()
    """Refusals of what the files ask for in NeMo-RL's keys and this job does not have; `validate` raises them."""
    loaded_files: tuple[str, ...] = ()
    """The files that it was loaded from, as `load` was given them."""
    loaded_overrides: tuple[str, ...] = ()
    """The overrides that it was loaded with, as they were typed."""

    @property
    def megatron(self) -> MegatronCfg:
        """Return `policy.megatron_cfg`."""
        return self.policy.megatron_cfg

    @property
    def is_packed(self) -> bool:
        """Return whether the job takes the direct path: its training rows were packed ahead of time."""
        return not self.data.train or self.data.train[0].is_packed

    def where(self, key: str) -> str:
        """Return `key` with the place that set it, for messages: `policy.precision (job.yaml:7)`."""
        source = self.sources.get(key)
        if source is None:
            return f"{key} (default)"
        return f"{self.written(key)} ({'derived from ' if source.kind == 'derived' else ''}{source.place})"

    def written(self, key: str) -> str:
        """Return the key as the file writes it (`Source.written`)."""
        return (self.sources[key].written if key in self.sources else "") or key

    def dataset_key(self, split: str, index: int) -> str:
        """Return the dotted key of a dataset, as the file wrote it: `data.train`, or `data.train[0]` where a list
        stands there.
        """
        key = f"data.{split}"
        return f"{key}[{index}]" if any(each.startswith(f"{key}[{index}]") for each in self.sources) else key

    def describe(self) -> dict[str, Any]:
        """Return the resolved configuration as plain mappings, lists and values, for checkpoints and logs."""
        return dict(plain(self))
