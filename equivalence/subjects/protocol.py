"""Define a subject: an object that builds a row and a batch, or refuses. All sides are compared in these terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

PROMPT_FORMATS = ("nemotron-nano-v2", "nemotron-h-aligned", "identity", "default")
MEGATRON_PRESETS = ("megatron-lm-0.19", "megatron-lm-main")
"""Presets of which the installed Megatron-LM is a witness."""
ROW_TENSORS = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens")
BATCH_TENSORS = (
    "input_ids",
    "target_ids",
    "token_mask",
    "position_ids",
    "packed_cu_seqlens",
    "packed_cu_seqlens_lengths",
    "packed_max_seqlen",
    "input_lengths",
    "sample_mask",
    "flat_cu_seqlens",
    "flat_max_seqlen",
)

LONGEST = 1 << 31
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings of a row. Raises ValueError for settings that no row could satisfy (docs/SPEC.md#refusals)."""

    pack_length: int
    """P: tokens a row has in the model."""
    prompt_format: str = "nemotron-nano-v2"
    """One of PROMPT_FORMATS."""
    context_parallel_size: int = 1
    """cp: segments are padded to multiples of 2·cp where it exceeds 1."""
    semantics: str = "megatron-lm-0.19"
    """A preset of docs/SPEC.md#presets, optionally with overrides: `strict,lost_conversations=refuse`."""
    pad_token: str | None = None
    """Override of the format's pad token."""
    assistant_prefix_len: int | None = None
    """Override of the format's assistant prefix, in tokens."""

    def __post_init__(self) -> None:
        """Refuse settings that no row could satisfy."""
        if self.prompt_format not in PROMPT_FORMATS:
            raise ValueError(
                f"prompt_format {self.prompt_format!r} is unknown; choose one of {', '.join(PROMPT_FORMATS)}"
            )
        if self.pack_length < 1:
            raise ValueError(f"pack_length must be at least 1, got {self.pack_length}")
        if self.context_parallel_size < 1:
            raise ValueError(f"context_parallel_size must be at least 1, got {self.context_parallel_size}")
        if max(self.pack_length, 2 * self.context_parallel_size) >= LONGEST:
            raise ValueError(f"pack_length and 2·context_parallel_size must be below {LONGEST}: boundaries are int32")
        if self.assistant_prefix_len is not None:
            if self.assistant_prefix_len < 0:
                raise ValueError(f"assistant_prefix_len must be at least 0, got {self.assistant_prefix_len}")
            if self.assistant_prefix_len > 0 and self.prompt_format == "identity":
                raise ValueError("assistant_prefix_len must be 0 with prompt_format identity, which renders no prefix")

    def replace(self, **changes: Any) -> RowSettings:
        """Return the same settings with some changed."""
        return dataclasses.replace(self, **changes)


def overridden(semantics: str, **changes: str) -> str:
    """Return the name of the same semantics with some fields changed; each field is named once."""
    preset, *overrides = semantics.split(",")
    fields = dict(override.split("=", 1) for override in overrides) | changes
    return ",".join([preset, *(f"{name}={value}" for name, value in fields.items())])


class NotComparable(Exception):  # noqa: N818 - no fault of anybody's
    """Raised by a subject for a row that it builds otherwise by design, so that nothing is compared. Such rows are left out and counted."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A row that a side will not build. Compared by its kind (docs/SPEC.md#refusals)."""

    kind: str
    """One of SPEC's kinds."""
    message: str = ""
    """The side's own words."""
    conversation: int | None = None
    """Place, if the side names one."""
    turn: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One built row, or its refusal: exactly one of `refusal` and the tensors is None."""

    input_ids: torch.Tensor | None = None
    """[P] int64."""
    target_ids: torch.Tensor | None = None
    """[P] int64."""
    token_mask: torch.Tensor | None = None
    """[P] float32."""
    position_ids: torch.Tensor | None = None
    """[P] int64."""
    cu_seqlens: torch.Tensor | None = None
    """[K] int32, from 0 to its first P (R-CU-1)."""
    max_seqlen: int | None = None
    report: Mapping[str, int | None] | None = None
    """docs/SPEC.md#report; None from a side that counts nothing (Megatron-LM)."""
    refusal: Refusal | None = None


def as_row(built: Any) -> Row:
    """Convert a side's own row, whose fields have the same names, to the common row."""
    return Row(
        **{field.name: getattr(built, field.name) for field in dataclasses.fields(Row) if field.name != "refusal"}
    )


def as_batch(collated: Any, *, flat_cu_seqlens: torch.Tensor, flat_max_seqlen: int) -> Batch:
    """Return a collated batch of either side, whose fields have the same names, with its flattened boundaries."""
    same = {name: getattr(collated, name) for name in BATCH_TENSORS if not name.startswith("flat_")}
    return Batch(**same, flat_cu_seqlens=flat_cu_seqlens, flat_max_seqlen=flat_max_seqlen)


def row_of(returned: Any) -> Row:
    """Return what a subject's `build_row` returned as a row: a Row, or a dict of tensors by the names of Row's fields.

    TypeError names what is missing or unknown. Lists become tensors, and `max_seqlen` is derived where the boundaries are there.
    """
    if isinstance(returned, Row):
        return returned
    values = _values_of(returned, Row, needed=ROW_TENSORS, method="build_row")
    refusal = values.pop("refusal", None)
    if refusal is not None:
        return Row(refusal=refusal if isinstance(refusal, Refusal) else Refusal(kind=str(refusal)))
    row: dict[str, Any] = {name: _tensor(name, values[name]) for name in ROW_TENSORS}
    longest = values.get("max_seqlen")
    lengths = row["cu_seqlens"].diff()
    derived = int(lengths.max()) if len(lengths) else 0
    return Row(**row, max_seqlen=derived if longest is None else int(longest), report=values.get("report"))


def batch_of(returned: Any) -> Batch:
    """Return what a subject's `collate` returned as a batch: a Batch, or a dict of tensors by the names of Batch's fields."""
    if isinstance(returned, Batch):
        return returned
    values = _values_of(returned, Batch, needed=BATCH_TENSORS[:4], method="collate")
    tensors = {name: None if value is None else _tensor(name, value) for name, value in values.items()}
    longest = values.get("flat_max_seqlen")
    fields = dict.fromkeys(BATCH_TENSORS) | tensors | {"flat_max_seqlen": None if longest is None else int(longest)}
    return Batch(**fields)  # type: ignore[arg-type] # a field that is left out is None, and is not compared


def _values_of(returned: Any, kind: type, *, needed: Sequence[str], method: str) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"{method} returned {type(returned).__name__}: return equivalence.subjects.{kind.__name__}, or a dict of tensors with the keys "
            f"{', '.join(needed)}"
        )
    unknown = sorted(str(name) for name in returned if name not in known)
    missing = [name for name in needed if name not in returned] if returned.get("refusal") is None else []
    if unknown or missing:
        parts = [f"has unknown keys {', '.join(unknown)}"] if unknown else []
        parts += [f"lacks {', '.join(missing)}"] if missing else []
        raise TypeError(f"the dict that {method} returned {' and '.join(parts)}; known are {', '.join(known)}")
    return dict(returned)


def _tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    made = torch.as_tensor(value)
    return typed(name, made) if isinstance(value, (list, tuple)) else made


def typed(name: str, made: torch.Tensor) -> torch.Tensor:
    """Return what was a list, and has no dtype of its own, in the dtype of its field. Fractions stay what they are."""
    if name.endswith("mask"):
        return made.to(torch.float32)
    if made.is_floating_point() and made.numel():  # of an empty list torch makes floats
        return made
    return made.to(torch.int32 if "cu_seqlens" in name else torch.int64)


def as_refusal(error: Any) -> Row:
    """Convert a side's own error, which has kind, conversation and turn, to a refused row."""
    place = {"conversation": error.conversation, "turn": error.turn}
    return Row(refusal=Refusal(kind=error.kind, message=str(error), **place))


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Collated rows (R-BATCH-1) and the same flattened for THD (R-BATCH-2). A side that has no such field leaves None."""

    input_ids: torch.Tensor
    """[B, P] int64."""
    target_ids: torch.Tensor
    """[B, P] int64."""
    token_mask: torch.Tensor
    """[B, P] float32."""
    position_ids: torch.Tensor
    """[B, P] int64."""
    packed_cu_seqlens: torch.Tensor | None
    """[B, K] int32, right-padded with -1."""
    packed_cu_seqlens_lengths: torch.Tensor | None
    """[B] int64."""
    packed_max_seqlen: torch.Tensor | None
    """[B] int64."""
    input_lengths: torch.Tensor | None
    """[B] int64."""
    sample_mask: torch.Tensor | None
    """[B] float32."""
    flat_cu_seqlens: torch.Tensor
    """[N] int32: boundaries of the batch as one sequence."""
    flat_max_seqlen: int


class Subject(Protocol):
    """A side of the comparison. `tokenizer` is a transformers tokenizer loaded from a folder.

    Optional attributes say what it takes, where it does not take everything: `prompt_formats`, `context_parallel_sizes` and `semantics`
    (each a sequence), or a method `covers(settings)`. Both methods may return a dict of tensors by the field's names instead.
    """

    name: str

    def build_row(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> Row:
        """Return the row of these messages, or its refusal. An exception means that the side could not run."""
        ...

    def collate(self, rows: Sequence[Row], settings: RowSettings) -> Batch:
        """Return the batch of these rows, none of which is refused."""
        ...
