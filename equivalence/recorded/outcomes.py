"""Read the recorded outcomes of other people's code, the third side of rules that nothing installed can judge (README.md beside this file).

A missing, damaged or replaced file raises InputError: a comparison without its recorded outcome must never pass.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equivalence.cases.row import RowCase
from equivalence.errors import InputError
from equivalence.subjects.protocol import ROW_TENSORS, Refusal, Row, RowSettings

FOLDER = Path(__file__).resolve().parent
"""Folder of the files."""
SHA256 = {
    "nemorl_packers.jsonl.gz": "1886f1ab69888bd631142a36389b8cf7b6196ab7e2dee09b977d1bf6f2b9ebdc",
    "nemorl_rows.jsonl.gz": "aa15b2d196952209036621eb9cab77a3aedf3bd4616b3380929e0e201b208060",
    "nemorl_overrides.jsonl.gz": "0b30948764ee76e64ba917fc77eefb764aee4d4d7e1f7c178fb49a549905b1e3",
    "nemorl_batches.jsonl.gz": "0c9458cb67024689e0501ae907b2448b91fbf6b73f19b3e46a9c73275d97719a",
    "nemorl_conversations.jsonl.gz": "148a496436942b89a6fe5ee7c90a6c83de8e05ad1e1b370ecdc9de5c51b89364",
    "megatron_lm_rows.jsonl.gz": "663005b2d6de491cf06f1850c6681886930be7fc943308a851155c563b4999f9",
    "te_partition.jsonl.gz": "67549893b601b3289418c8f65afd412f486b5f4d5aa65a7cc6c917e61bea40cd",
}
"""The files by name, and what each must hash to."""
CONVERSATION_MULTIPLE, CONVERSATION_PAD = 8, 77
"""What recorded conversations are padded to a multiple of, and with."""
DIRECT_PRESET = "nemo-rl-direct"
"""The semantics that NeMo-RL's recorded rows are a witness of."""
MEGATRON_VERSIONS = {
    "megatron-lm-0.19": "0.19.0",
    "megatron-lm-main": "main-2026-08-22",
    "megatron-lm-0.18": "0.18.2",
    "megatron-lm-0.17": "0.17.1",
}
"""The recorded version of Megatron-LM that is a witness of each preset."""
_MEGATRON_NAMES = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
"""Megatron-LM's names of the tensors of ROW_TENSORS, in that order."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """One call of a packer of NeMo-RL."""

    algorithm: str
    lengths: tuple[int, ...]
    capacity: int
    multiple_of: int
    order: tuple[int, ...] | None
    """The order that the shuffle of `first_fit_shuffle` drew; None for the other packers."""
    bins: tuple[tuple[int, ...], ...] | None
    """Indices in order, bin by bin; None where the packer refused."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The positions that Transformer Engine's kernel gives one context-parallel rank."""

    cu_seqlens: tuple[int, ...]
    size: int
    rank: int
    index: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedBatch:
    """Rows that NeMo-RL collated, and padded as its last validation batch."""

    rows: tuple[Row, ...]
    context_parallel_size: int
    """Settings of the rows."""
    data_parallel_size: int
    """Number of ranks to whose multiple the batch was padded."""
    batch: Mapping[str, torch.Tensor]
    """The collated batch, by the names of docs/SPEC.md#batch."""
    padded: Mapping[str, torch.Tensor]
    """The same after the padding."""


@dataclass(frozen=True, kw_only=True)
class RecordedConversation:
    """A conversation that NeMo-RL tokenized, padded to a multiple of CONVERSATION_MULTIPLE with CONVERSATION_PAD."""

    template: str
    """The tokenizer's chat template; the tokenizer is the generators' `word`."""
    messages: tuple[Any, ...]
    tools: Any
    max_length: int
    without_bos_token: bool
    """Whether the tokenizer has no BOS."""
    add_bos: bool
    add_eos: bool
    add_generation_prompt: bool
    input_ids: tuple[int, ...]
    token_mask: tuple[float, ...]
    input_length: int
    """0 for a conversation of which nothing is left: NeMo-RL goes on with it, and SPEC has none."""
    weight: float


@dataclass(frozen=True, kw_only=True)
class RecordedRow:
    """One row, and the outcome of the recorded code."""

    case: RowCase
    outcome: Row | None
    """The row or its refusal; None where only the class of the exception is known."""
    error: str = ""
    """Class of the exception, where `outcome` is None."""


@functools.cache
def packings() -> tuple[Packing, ...]:
    """Return NeMo-RL's packings of sequences that have at least one token."""
    return tuple(packing_of(read) for read in read_lines("nemorl_packers.jsonl.gz") if min(read["lengths"]) >= 1)


def packing_of(read: Mapping[str, Any]) -> Packing:
    """Return a line of the packings."""
    return Packing(
        algorithm=read["algorithm"],
        lengths=tuple(read["lengths"]),
        capacity=read["capacity"],
        multiple_of=read["multiple_of"],
        order=tuple(read["order"]) if "order" in read else None,
        bins=None if "refused" in read else tuple(map(tuple, read["bins"])),
    )


@functools.cache
def partitions() -> tuple[Partition, ...]:
    """Return Transformer Engine's cuts."""
    return tuple(
        Partition(cu_seqlens=tuple(read["cu_seqlens"]), size=read["cp"], rank=read["rank"], index=tuple(read["index"]))
        for read in read_lines("te_partition.jsonl.gz")
    )


@functools.cache
def batches() -> tuple[RecordedBatch, ...]:
    """Return NeMo-RL's batches, of rows that NeMo-RL built itself."""
    built = read_lines("nemorl_rows.jsonl.gz")
    return tuple(
        RecordedBatch(
            rows=tuple(_direct_outcome(built[line]) for line in read["lines"]),
            context_parallel_size=read["cp"],
            data_parallel_size=read["dp"],
            batch=_tensors(read["batch"]),
            padded=_tensors(read["padded"]),
        )
        for read in read_lines("nemorl_batches.jsonl.gz")
    )


@functools.cache
def conversations() -> tuple[RecordedConversation, ...]:
    """NeMo-RL's conversations of the online path."""
    sequences = ("messages", "input_ids", "token_mask")

    def made(read: dict[str, Any]) -> RecordedConversation:
        fields: dict[str, Any] = {name: tuple(each) if name in sequences else each for name, each in read.items()}
        return RecordedConversation(**fields)

    return tuple(map(made, read_lines("nemorl_conversations.jsonl.gz")))


@functools.cache
def rows(preset: str) -> tuple[RecordedRow, ...]:
    """Return the rows recorded for `nemo-rl-direct` or for one of MEGATRON_VERSIONS, with that preset as their semantics.

    The rows are sorted by tokenizer, so that few jobs load the large one.
    """
    if preset == DIRECT_PRESET:
        found = [
            RecordedRow(case=case_of(read, preset), outcome=_direct_outcome(read))
            for read in (*read_lines("nemorl_rows.jsonl.gz"), *read_lines("nemorl_overrides.jsonl.gz"))
        ]
    else:
        found = [
            row for row in megatron_rows(MEGATRON_VERSIONS[preset], preset) if not _hands_a_null_to_a_template(row.case)
        ]
    return tuple(sorted(found, key=lambda row: row.case.tokenizer))


def _hands_a_null_to_a_template(case: RowCase) -> bool:
    """Return whether a chat template of 0.17 sees a null, which the installed transformers 5 takes out before: `null_content` is of
    the format identity alone.
    """
    is_template = case.settings.prompt_format == "default" and case.settings.semantics == "megatron-lm-0.17"
    return is_template and any(isinstance(each, dict) and each.get("content", "") is None for each in case.messages)


def megatron_rows(version: str, preset: str) -> list[RecordedRow]:
    """Return the rows as one recorded version of Megatron-LM built them, with `preset` as their semantics."""
    return [
        RecordedRow(
            case=case_of(read, preset),
            outcome=_megatron_outcome(read["outcomes"][version], read["pack_length"]),
            error=read["outcomes"][version].get("error", ""),
        )
        for read in read_lines("megatron_lm_rows.jsonl.gz")
    ]


def case_of(read: Mapping[str, Any], preset: str) -> RowCase:
    """Return the input of a line of recorded rows, with `preset` as its semantics."""
    settings = RowSettings(
        pack_length=read["pack_length"],
        prompt_format=read["prompt_format"],
        context_parallel_size=read["cp"],
        semantics=preset,
        pad_token=read.get("pad_token"),
        assistant_prefix_len=read.get("assistant_prefix_len"),
    )
    origin = f"recorded: {read['origin']}"
    return RowCase(messages=tuple(read["messages"]), settings=settings, tokenizer=read["tokenizer"], origin=origin)


def _direct_outcome(read: Mapping[str, Any]) -> Row:
    if "refused" in read:
        return Row(refusal=Refusal(kind=read["refused"]))
    return _row([read[name] for name in ROW_TENSORS], read["max_seqlen"])


def _megatron_outcome(read: Mapping[str, Any], pack_length: int) -> Row | None:
    if "error" in read:
        return None
    tensors = [read[name] for name in _MEGATRON_NAMES]
    boundaries = tensors[-1]
    tensors[-1] = boundaries[: boundaries.index(pack_length) + 1]  # right-filled with P (R-CU-1)
    return _row(tensors, read["max_seqlen"])


def _tensors(read: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors by name from their values and the names of their dtypes."""
    return {name: torch.tensor(values, dtype=getattr(torch, dtype)) for name, (values, dtype) in read.items()}


def _row(values: list[list[int]], max_seqlen: int) -> Row:
    dtypes = (torch.int64, torch.int64, torch.float32, torch.int64, torch.int32)
    tensors: dict[str, Any] = {
        name: torch.tensor(value, dtype=dtype) for name, value, dtype in zip(ROW_TENSORS, values, dtypes, strict=True)
    }
    return Row(**tensors, max_seqlen=int(max_seqlen))


def read_lines(name: str) -> list[dict[str, Any]]:
    """Return the lines of a recorded file. Raises InputError for a file that differs from the recorded one."""
    path = FOLDER / name
    fix = "restore it from the repository or install packproof again"
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise InputError(f"the recorded outcomes {path} cannot be read ({error.strerror}); {fix}") from error
    found = hashlib.sha256(packed).hexdigest()
    if found != SHA256[name]:
        what = f"its sha256 is {found[:12]}… where {SHA256[name][:12]}… was recorded"
        raise InputError(f"the recorded outcomes {path} are damaged or replaced: {what}; {fix}")
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]
