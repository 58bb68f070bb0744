"""Build rows with NeMo-RL's own dataset and preprocessor of the direct path, and name what they refuse by SPEC's kinds."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import jinja2

from equivalence.subjects.protocol import Messages, Refusal, Row, RowSettings
from equivalence.witnesses.nemo_rl.stand_ins import CheckoutModules

PRESET = "nemo-rl-direct"
"""The semantics that NeMo-RL's rows are a witness of."""
FORMATS = ("nemotron-nano-v2", "nemotron-h-aligned", "identity")
_TEXTS = {
    "must start with a system message": "row_start",
    "must end with an assistant message": "row_end",
    "tokenized to zero tokens": "empty_conversation",
    "empty assistant turn": "empty_assistant",
    "An assistant turn must follow": "role_order",
    "Wrong role value": "unknown_role",
    "exceeds assistant turn": "prefix_too_long",
    "expected turn tokens to match": "turn_mismatch",
    "mismatch in target masking": "turn_mismatch",
    "must be divisible by": "indivisible_segment",
    "requires a pad token": "no_pad_token",
    "chat_template is not set": "no_chat_template",
}
"""Part of a ValueError's text to SPEC's kind."""


class Rows:
    """NeMo-RL's way from messages to a row."""

    def __init__(self, modules: CheckoutModules) -> None:
        dataset = modules.get("nemo_rl.data.datasets.response_datasets.megatron_sft_packed", "MegatronSFTPackedDataset")
        # Without a file: only what it does to one line is asked for.
        self._dataset = object.__new__(dataset)
        self._dataset.chat_key, self._dataset.task_name = "messages", "megatron_sft_packed"
        self._preprocess = modules.get("nemo_rl.data.megatron_sft_packed", "megatron_sft_packed_preprocessor")

    def build_row(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> Row:
        """Return the row or its refusal. An exception that stands for none of SPEC's refusals is raised."""
        try:
            built = self.datum(messages, tokenizer, settings)
        except Exception as error:
            kind = refusal_kind(error)
            if kind is None:
                raise
            if kind == "row_start" and not messages:
                kind = "empty_row"  # NeMo-RL has one text for a row that begins otherwise and for one that is empty
            return Row(refusal=Refusal(kind=kind, message=f"{type(error).__name__}: {error}"[:500]))
        names = ("input_ids", "target_ids", "token_mask", "position_ids")
        tensors = {name: built[name] for name in names}
        return Row(**tensors, cu_seqlens=built["packed_cu_seqlens"], max_seqlen=int(built["packed_max_seqlen"]))

    def datum(self, messages: Messages, tokenizer: Any, settings: RowSettings, idx: int = 0) -> dict[str, Any]:
        """Return what NeMo-RL's loader would hand to its collate function."""
        line = self._dataset.format_data({"messages": list(messages)})
        preprocess = functools.partial(
            self._preprocess,
            prompt_format=settings.prompt_format,
            pad_token=settings.pad_token,
            assistant_prefix_len=settings.assistant_prefix_len,
            context_parallel_size=settings.context_parallel_size,
        )
        built: dict[str, Any] = preprocess(line, None, tokenizer, settings.pack_length, idx)
        return built


def refusal_kind(error: Exception) -> str | None:
    """Return SPEC's kind for an exception of NeMo-RL's rows, by the code that raised it; None for one that SPEC does not know."""
    frames = traceback.extract_tb(error.__traceback__)
    functions = {frame.name for frame in frames}
    text = str(error)
    if any(frame.filename in {"<template>", "<unknown>"} for frame in frames) or isinstance(
        error, jinja2.TemplateError
    ):
        return "bad_content"
    if isinstance(error, UnicodeEncodeError) or (isinstance(error, TypeError) and "TextEncodeInput" in text):
        return "bad_text"
    if isinstance(error, ValueError):
        return next((kind for part, kind in _TEXTS.items() if part in text), None)
    if isinstance(error, NotImplementedError) and "prompt format" in text:
        return "unsupported_format"
    if isinstance(error, TypeError) and "_resolve_pad_token_id" in functions:
        return "no_pad_token"
    if functions & {"format_data", "split_megatron_sft_conversations"} and isinstance(error, (KeyError, TypeError)):
        return "bad_message"
    if frames and frames[-1].name == "_tokenize_megatron_sft_conversation":
        return _turn_kind(error)
    return None


def _turn_kind(error: Exception) -> str | None:
    if isinstance(error, AttributeError):
        return "bad_message"  # a role that is no text
    return "bad_content" if isinstance(error, (KeyError, TypeError)) else None
