"""The installed Megatron-LM as a subject: its unmodified SFTDataset and SFTTokenizer, and its collate and flatten.

What it is asked for beyond its defaults is set on instances, never patched into the package; `stand_ins` lists it.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import logging
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from equivalence.subjects.protocol import MEGATRON_PRESETS, Batch, Messages, Refusal, Row, RowSettings
from equivalence.subjects.tokenizers import folder_of
from production.library_warnings import quiet_libraries

with quiet_libraries():
    from megatron.core import utils as core_utils
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset

logging.getLogger("megatron.core.datasets").setLevel(logging.ERROR)

IDENTITY_PROMPT = {
    **dict(zip(MEGATRON_PRESETS, ("trained", "masked"), strict=True)),
    "megatron-lm-0.18": "trained",
    "megatron-lm-0.17": "masked",
}
"""The presets this subject is a witness of, and what tells them apart."""


class MegatronLM:
    """The installed Megatron-LM as a subject."""

    name = "megatron_lm"
    is_witness = True
    """An exception of it ends the run instead of being a difference."""

    @property
    def version(self) -> str:
        """Installed version, and the preset that it matches, determined by its behavior and not by its number."""
        return f"megatron-core {importlib.metadata.version('megatron-core')}"

    def covers(self, settings: RowSettings) -> bool:
        """Return whether this side is a witness of these semantics. It never replaces another path."""
        return settings.semantics in MEGATRON_PRESETS

    def build_row(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> Row:
        """Return the row that SFTDataset returns, or its error as a refusal. Raises ValueError for semantics that SFTDataset does not have."""
        dataset = _dataset(tokenizer, settings)
        dataset.dataset = [messages]
        return _row(dataset, 0, settings)

    def open_file(self, path: Path, tokenizer: Any, settings: RowSettings) -> FileRows:
        """Return the rows of a packed file through Megatron-LM's own file reader."""
        return FileRows(read_file(path), tokenizer, settings)

    def collate(self, rows: Sequence[Row], settings: RowSettings) -> Batch:
        """Collate the rows by torch's default collate and Megatron-LM's flatten, as its training loop does."""
        length, size = settings.pack_length, len(rows)
        samples = [
            {
                "tokens": row.input_ids,
                "labels": row.target_ids,
                "loss_mask": row.token_mask,
                "position_ids": row.position_ids,
                "cu_seqlens": _right_filled(row, length),
                "max_seqlen": torch.tensor(row.max_seqlen, dtype=torch.int32),
            }
            for row in rows
        ]
        # New in 0.19: a witness of an older version builds rows alone.
        flat = core_utils.flatten_batch_for_packed_sequences(torch.utils.data.default_collate(samples))
        return Batch(
            input_ids=flat["tokens"].reshape(size, length),
            target_ids=flat["labels"].reshape(size, length),
            token_mask=flat["loss_mask"].reshape(size, length),
            position_ids=flat["position_ids"].reshape(size, length),
            packed_cu_seqlens=None,
            packed_cu_seqlens_lengths=None,
            packed_max_seqlen=None,
            input_lengths=None,
            sample_mask=None,
            flat_cu_seqlens=flat["cu_seqlens"].squeeze(0),
            flat_max_seqlen=int(flat["max_seqlen"]),
        )

    def stand_ins(self) -> list[str]:
        """Return the parts that differ from the installed package, in words for the report."""
        return [
            (
                "the preset that the installed package does not ship (masked or trained `identity`): the format's name is changed "
                "on the SFTTokenizer instance, so that its own list of unmasked formats decides the other way"
            ),
            "overrides of pad token and assistant prefix: set on the instance's prompt configuration",
            "generated rows are handed to SFTDataset directly; the packed sample goes through its own file reader",
        ]


class FileRows(Sequence[Row]):
    """Rows of a file that Megatron-LM's own reader opened."""

    def __init__(self, low_level: Any, tokenizer: Any, settings: RowSettings) -> None:
        self._settings = settings
        self._dataset = _of_rows(low_level, tokenizer, settings, samples=len(low_level))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return _row(self._dataset, index, self._settings)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def read_file(path: Path) -> Any:
    """Return Megatron-LM's low-level dataset of a JSONL file; its copy of the data is removed when the process ends."""
    import datasets  # noqa: PLC0415 - half a second, and only files need it

    datasets.disable_progress_bars()
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = _datasets_cache().name
    try:
        return SFTDataset.build_low_level_dataset(str(path), None)
    finally:
        datasets.config.HF_DATASETS_CACHE = before


def training_dataset(path: Path, tokenizer: Any, settings: RowSettings, *, samples: int) -> Any:
    """Return the SFTDataset of a packed file for a job of `samples` samples; it starts again at the end of the rows."""
    return _of_rows(_rows_once(Path(path).resolve()), tokenizer, settings, samples=samples)


@functools.lru_cache(maxsize=8)
def _rows_once(path: Path) -> Any:
    """Read once a process, so that forked ranks share it."""
    return read_file(path)


def _of_rows(low_level: Any, tokenizer: Any, settings: RowSettings, *, samples: int) -> Any:
    dataset = copy.copy(_dataset(tokenizer, settings))
    dataset.dataset = low_level
    dataset.indices = np.arange(len(low_level))
    dataset.num_samples = samples
    return dataset


@functools.cache
def _datasets_cache() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="packproof-datasets-")


@functools.lru_cache(maxsize=16)
def _megatron_tokenizer(folder: Path, prompt_format: str) -> Any:
    return MegatronTokenizer.from_pretrained(str(folder), metadata_path={"library": "sft"}, prompt_format=prompt_format)


@functools.lru_cache(maxsize=64)
def masks_identity(folder: Path) -> bool:
    """Return whether the installed SFTTokenizer masks prompts in the format identity: 0.17 and main do, 0.18 to 0.19.2 do not."""
    conversation = [{"role": "user", "content": "a"}]
    tokenizer = _megatron_tokenizer(folder, "identity")
    _, targets = tokenizer.tokenize_conversation(conversation, return_target=True, add_generation_prompt=False)
    return bool(len(targets)) and all(target == IGNORE_INDEX for target in targets.tolist())


@functools.lru_cache(maxsize=64)
def _asked_tokenizer(
    folder: Path, prompt_format: str, semantics: str, pad_token: str | None, assistant_prefix_len: int | None
) -> Any:
    tokenizer = copy.copy(_megatron_tokenizer(folder, prompt_format))
    sft = tokenizer._tokenizer = copy.copy(tokenizer._tokenizer)  # noqa: SLF001 - the instance, as stand_ins says
    sft._prompt_config = copy.copy(sft._prompt_config)  # noqa: SLF001
    if pad_token is not None:
        sft._prompt_config.pad_token_id = sft.tokens_to_ids(pad_token)  # noqa: SLF001
    if assistant_prefix_len is not None:
        sft._prompt_config.assistant_prefix_len = assistant_prefix_len  # noqa: SLF001
    if prompt_format == "identity":
        masks = masks_identity(folder)
        if masks != (IDENTITY_PROMPT[semantics] == "masked"):
            # Its code masks every format but those it lists by name; `default` is on that list, this word is not.
            sft._prompt_format = "default" if masks else "identity, masked"  # noqa: SLF001
    return tokenizer


def _dataset(tokenizer: Any, settings: RowSettings) -> Any:
    if settings.semantics not in IDENTITY_PROMPT:
        raise ValueError(
            f"the installed Megatron-LM is not a witness of the semantics {settings.semantics!r}, only of "
            f"{' and '.join(IDENTITY_PROMPT)}: leave megatron_lm out, or choose one of these"
        )
    return _cached_dataset(folder_of(tokenizer), settings)


@functools.lru_cache(maxsize=256)
def _cached_dataset(folder: Path, settings: RowSettings) -> Any:
    tokenizer = _asked_tokenizer(
        folder, settings.prompt_format, settings.semantics, settings.pad_token, settings.assistant_prefix_len
    )
    with quiet_libraries():  # of a pad id that another token has: the rows below are what is looked at
        config = GPTDatasetConfig(
            random_seed=0,
            sequence_length=settings.pack_length,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            context_parallel_size=settings.context_parallel_size,
        )
        return SFTDataset([], None, np.arange(1), 1, Split.train, config)


def _row(dataset: Any, index: int, settings: RowSettings) -> Row:
    try:
        sample = dataset[index]
    except Exception as error:
        kind = refusal_kind(error, settings.prompt_format)
        if kind is None:
            raise
        return Row(refusal=Refusal(kind=kind, message=f"{type(error).__name__}: {error}"[:500]))
    boundaries = sample["cu_seqlens"]
    ends = (boundaries == settings.pack_length).nonzero()
    return Row(
        input_ids=sample["tokens"],
        target_ids=sample["labels"],
        token_mask=sample["loss_mask"],
        position_ids=sample["position_ids"],
        # The row is right-filled with P; Megatron-LM's batch function cuts it after the first one.
        cu_seqlens=boundaries[: int(ends[0]) + 1],
        max_seqlen=int(sample["max_seqlen"]),
    )


def _right_filled(row: Row, pack_length: int) -> torch.Tensor:
    assert row.cu_seqlens is not None
    filled = torch.full((pack_length + 1,), pack_length, dtype=torch.int32)
    filled[: len(row.cu_seqlens)] = row.cu_seqlens
    return filled


def refusal_kind(error: Exception, prompt_format: str) -> str | None:
    """Return SPEC's kind for an error of Megatron-LM, by the code that raised the error; None for an error that SPEC does not know."""
    frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    names = [name for _, name in frames]
    text = str(error)
    in_template = any(file in {"<template>", "<unknown>"} for file, _ in frames)
    if in_template or isinstance(error, jinja2.TemplateError):
        return "template_error" if prompt_format == "default" else "bad_content"
    if isinstance(error, ValueError) and "chat_template is not set" in text:
        return "no_chat_template"
    if (isinstance(error, TypeError) and "TextEncodeInput" in text) or isinstance(error, UnicodeEncodeError):
        return "bad_text"
    if isinstance(error, TypeError) and "unhashable type" in text and prompt_format == "default":
        return "template_error"  # a set of named templates, handed over as if it were one
    if "isclose" in names and isinstance(error, ValueError):
        return "turn_mismatch"
    if names[-1] == "_split_conversations":
        return "bad_message"
    if names[-1] == "extend_with_padding" and isinstance(error, IndexError):
        return "empty_row"
    if names[-1] == "tokenize_conversation":
        return _turn_kind(error, text)
    if names[-1] == "__getitem__" and isinstance(error, (RuntimeError, TypeError)):
        return "no_pad_token" if "NoneType" in text else "too_many_boundaries" if "size" in text else None
    return None


def _turn_kind(error: Exception, text: str) -> str | None:
    if isinstance(error, AssertionError):
        return "turn_mismatch" if text else "role_order"
    if isinstance(error, AttributeError):
        return "bad_message"
    if isinstance(error, (KeyError, TypeError)):
        return "bad_content"
    if isinstance(error, ValueError):
        return (
            "empty_assistant" if text.startswith("empty assistant turn") else "unknown_role" if "role" in text else None
        )
    return None


SUBJECT = MegatronLM()
