"""List keys of NeMo-RL's SFT files that have no effect on this job's path, and keys that ask for what the job does
not have (SPEC R-SETUP-24).

`data.*` in a key stands for each dataset of both splits and for `data.default`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY = object()
"""Stands for every value of a key."""


@dataclass(frozen=True, kw_only=True)
class NemoRlKey:
    """A key that NeMo-RL's files have and no section of this job."""

    harmless: tuple[Any, ...]
    """Values at which the key has no effect here; `(ANY,)` for all."""
    why: str
    """Reason why these values have no effect here."""
    what: str = ""
    """What another value asks for; that is refused."""
    fix: str = ""
    """What to do instead."""
    parts: frozenset[str] = frozenset()
    """Keys that a mapping below the key may have; with others it is not a key of NeMo-RL. Empty: any."""

    def is_shaped(self, value: Any) -> bool:
        """Return whether `value` has the shape that the key has in NeMo-RL's files."""
        return not self.parts or value is None or (isinstance(value, Mapping) and self.parts >= value.keys())

    def has_no_effect(self, value: Any) -> bool:
        """Return whether the key has no effect at `value`."""
        return any(each is ANY or (each == value and type(each) is type(value)) for each in self.harmless)


def _without_effect(why: str) -> NemoRlKey:
    return NemoRlKey(harmless=(ANY,), why=why)


_ABSENT: tuple[Any, ...] = (None, {})
_SAVED_AT_ONCE = "all ranks write a checkpoint together, and training goes on once it is whole"
_HUB = "only datasets of a hub have splits and columns; files are named by data_path"
_PROMPT = "a prompt template that NeMo-RL puts around the first user message"

NEMO_RL_KEYS: Mapping[str, NemoRlKey] = {
    "policy.optimizer": NemoRlKey(
        harmless=(ANY,),
        why="it is the DTensor backend's; policy.megatron_cfg.optimizer is megatron-core's",
        parts=frozenset(("name", "kwargs")),
    ),
    "policy.tokenizer.chat_template_kwargs": NemoRlKey(
        harmless=_ABSENT,
        why="it passes nothing to the chat template",
        what="values that are passed to the chat template",
        fix="write them into policy.tokenizer.chat_template ({% set name = value %} at its head), and take this out",
    ),
    "policy.hf_config_overrides": NemoRlKey(
        harmless=_ABSENT,
        why="it changes nothing of the model",
        what="changes of the Hugging Face configuration (YaRN and other scaling of positions among them)",
        fix="set the shape in section model, by megatron-core's options in policy.megatron_cfg where it has one; YaRN is not here",
    ),
    "policy.sequence_packing.microbatch_order": NemoRlKey(
        harmless=(None, "packer"),
        why="microbatches come in the packer's order",
        what="microbatches in another order than the packer's, which sums gradients in another order",
        fix="write packer, or take it out",
    ),
    "policy.megatron_cfg.checkpoint": _without_effect(_SAVED_AT_ONCE),
    "policy.megatron_cfg.force_reconvert_from_hf": _without_effect("weights are converted at every start from them"),
    "policy.megatron_cfg.fused_linear_logprobs_chunk_size": _without_effect(
        "only use_fused_linear_logprobs reads it, which must be off"
    ),
    "policy.megatron_cfg.use_gloo_process_groups": _without_effect("no gloo group is made beside the device's own"),
    "data.*.split": _without_effect(_HUB),
    "data.*.output_key": _without_effect(_HUB),
    "data.*.seed": _without_effect("only split_validation_size draws by it; the order of rows has data.seed"),
    "data.*.split_validation_size": NemoRlKey(
        harmless=(None, 0, 0.0),
        why="no part of the training data is held out",
        what="a validation set drawn from the training data",
        fix="write the held-out lines to a file of their own, name it in data.validation, and set this to 0",
    ),
    "data.*.max_samples": NemoRlKey(
        harmless=(None,),
        why="all lines are read",
        what="only the first lines of a dataset",
        fix="write these lines to a file of their own (head -n), and take this out",
    ),
    "data.*.prompt_file": NemoRlKey(
        harmless=(None,),
        why="messages are rendered as they are",
        what=_PROMPT,
        fix="write the prompt into the messages of the file, and set this to null",
    ),
    "data.*.system_prompt_file": NemoRlKey(
        harmless=(None,),
        why="no system message is added",
        what="a system prompt that NeMo-RL puts before each conversation",
        fix="write it as the first message of each conversation, and set this to null",
    ),
    "data.*.processor": NemoRlKey(
        harmless=(None, "sft_processor"),
        why="conversations are processed as NeMo-RL's sft_processor does",
        what="another processor than sft_processor",
        fix="write sft_processor, or take it out",
    ),
    "logger.swanlab": _without_effect("SwanLab is not here, and logger.swanlab_enabled must be false"),
    "logger.gpu_monitoring": _without_effect("memory is reported with each step"),
    "cluster.segment_size": _without_effect("the launcher places the nodes"),
}
"""Dotted key to its meaning here. A key below one of these goes with it."""

NEMO_RL_DATASETS = frozenset(
    (
        "audiomcq", "arrow_text", "avqa", "AIME2024", "AIME2025", "AIME2026", "clevr-cogent", "daily-omni",
        "general-conversation-jsonl", "DAPOMath17K", "DAPOMathAIME2024", "DeepScaler", "GSM8K", "geometry3k", "mmpr-tiny",
        "HelpSteer3", "intent-train", "intent-bench", "open_assistant", "OpenMathInstruct-2", "NuminaMath-1.5",
        "OpenR1-Math-220k", "refcoco", "squad", "tulu3_sft_mixture", "gsm8k", "Nemotron-Cascade-2-SFT-Math",
        "NemoGymDataset", "ResponseDataset",
    )
)  # fmt: skip
"""Names of datasets that NeMo-RL downloads or converts itself."""

DEAD_SECTIONS: Mapping[str, str] = {
    "policy.dtensor_cfg": "the DTensor backend is off",
    "policy.dynamic_batching": "dynamic batching is off",
    "policy.draft": "the draft model is off",
    "policy.router_replay": "router replay is off",
    "policy.megatron_cfg.peft": "adapters are off",
}
"""Sections whose other keys nothing reads while their `enabled` is false."""
