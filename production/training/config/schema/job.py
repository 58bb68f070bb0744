"""The whole configuration of a job, resolved: what every part of the training job reads, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from production.training.config.schema.data import Data
from production.training.config.schema.model import Model
from production.training.config.schema.plain import plain
from production.training.config.schema.policy import MegatronCfg, Policy
from production.training.config.schema.sections import Checkpointing, Cluster, Logger, Loss, Sft


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one value came from."""

    kind: Literal["default", "file", "override", "derived"]
    """What set it."""
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
    """What trains."""
    model: Model
    """The shape of the model."""
    data: Data
    """What is trained on."""
    loss: Loss
    """What token losses are divided by."""
    checkpointing: Checkpointing
    """What is saved."""
    logger: Logger
    """What is reported."""
    cluster: Cluster
    """What the job runs on."""
    sources: Mapping[str, Source] = field(default_factory=dict)
    """Dotted key of each value (lists as `[0]`) to where it came from."""

    @property
    def megatron(self) -> MegatronCfg:
        """Short for `policy.megatron_cfg`."""
        return self.policy.megatron_cfg

    @property
    def is_packed(self) -> bool:
        """Whether the job takes the direct path: its training rows were packed ahead of time."""
        return not self.data.train or self.data.train[0].is_packed

    def where(self, key: str) -> str:
        """`key` with the place that set it, for messages: `policy.precision (job.yaml:7)`."""
        source = self.sources.get(key)
        if source is None:
            return f"{key} (default)"
        return f"{self.written(key)} ({'derived from ' if source.kind == 'derived' else ''}{source.place})"

    def written(self, key: str) -> str:
        """The key as the file has it (`Source.written`)."""
        return (self.sources[key].written if key in self.sources else "") or key

    def dataset_key(self, split: str, index: int) -> str:
        """Dotted key of a dataset, as the file wrote it: `data.train`, or `data.train[0]` where a list stands there."""
        key = f"data.{split}"
        return f"{key}[{index}]" if any(each.startswith(f"{key}[{index}]") for each in self.sources) else key

    def describe(self) -> dict[str, Any]:
        """The resolved configuration as plain mappings, lists and values: what a checkpoint or a log keeps of it."""
        return dict(plain(self))
