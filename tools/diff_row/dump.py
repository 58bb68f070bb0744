"""A dumped batch: what a job really fed, written to and read from one safetensors file.

A training job calls `write_dump` where its batch is ready; `--dump` then shows a row of it beside the sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from equivalence.subjects import Row
from tools.diff_row.problems import BadInput

NAMES = {
    "packproof": {
        "input_ids": "input_ids",
        "target_ids": "target_ids",
        "token_mask": "token_mask",
        "position_ids": "position_ids",
        "cu_seqlens": "packed_cu_seqlens",
        "max_seqlen": "packed_max_seqlen",
    },
    "megatron_lm": {
        "input_ids": "tokens",
        "target_ids": "labels",
        "token_mask": "loss_mask",
        "position_ids": "position_ids",
        "cu_seqlens": "cu_seqlens",
        "max_seqlen": "max_seqlen",
    },
}
"""The names that a batch's tensors have, by whose they are (R-BATCH-1; Megatron-LM's get_batch)."""
RANK_FILE = r"rank_(\d+)\.safetensors$"
"""What a job calls a rank's file of a dumped step; `--fed` reads its folder."""
NO_BOUNDARY = -1
"""What fills ragged rows of `packed_cu_seqlens`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dump:
    """One row of a dumped batch."""

    row: Row
    """Its tensors as dumped, dtypes kept; boundaries without their filling."""
    names: str
    """Whose names the file uses: packproof or megatron_lm."""
    rows: int
    """How many rows the batch has."""


def write_dump(
    path: str | Path, batch: Sequence[Row] | Mapping[str, torch.Tensor], *, names: str = "packproof"
) -> None:
    """Write rows of one length, or a batch as a job has it, so that `--dump` can read it.

    Rows become [B, P] tensors under one of `NAMES`. A mapping is written as it is: its tensors, copied to the host,
    what is no tensor left out. Raises BadInput if the rows are none, refused, or of several lengths.
    """
    if isinstance(batch, Mapping):
        tensors = {str(name): value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        _names_of(tensors.keys(), Path(path))
    else:
        tensors = _stack(batch, names)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    host = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(host, str(path), metadata={"packproof": "a dumped batch", "names": names})


def read_dump(path: str | Path, row: int = 0) -> Dump:
    """Read a row of a dumped batch. Raises BadInput with what is wrong with the file."""
    path = Path(path)
    _refuse_a_jobs(path)
    if not path.is_file():
        raise BadInput(f"there is no dump {path}: give a safetensors file, such as write_dump makes")
    try:
        with safe_open(str(path), framework="pt") as file:
            names = _names_of(file.keys(), path)
            tensors = {field: file.get_tensor(name) for field, name in NAMES[names].items()}
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} cannot be read as safetensors ({error}): dump it again") from error
    count = _count(tensors["input_ids"], path)
    if not 0 <= row < count:
        raise BadInput(f"{path} has rows 0 to {count - 1}, there is no row {row}: choose one with --dump-row")
    one = {field: _row_of(tensor, field, row, count, path) for field, tensor in tensors.items()}
    lengths = {NAMES[names][field]: one[field].numel() for field in list(NAMES[names])[:4]}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        sizes = ", ".join(f"{name} {size}" for name, size in lengths.items())
        raise BadInput(f"{path}: row {row} has {sizes}; all four have one value for each of at least one token")
    if one["max_seqlen"].numel() != 1:
        raise BadInput(f"{path}: {NAMES[names]['max_seqlen']} has shape {list(tensors['max_seqlen'].shape)}; one a row")
    return Dump(
        row=Row(
            input_ids=one["input_ids"],
            target_ids=one["target_ids"],
            token_mask=one["token_mask"],
            position_ids=one["position_ids"],
            cu_seqlens=_without_filling(one["cu_seqlens"], one["input_ids"].shape[-1]),
            max_seqlen=int(one["max_seqlen"].reshape(-1)[0]),
        ),
        names=names,
        rows=count,
    )


def _refuse_a_jobs(path: Path) -> None:
    """A training job's own dump of a step has shares and places, which another option reads."""
    folder, name = (path, None) if path.is_dir() else (path.parent, re.match(RANK_FILE, path.name))
    if path.is_dir() and not (next(path.glob("rank_*.safetensors"), None) or next(path.glob("step_*"), None)):
        raise BadInput(f"{path} is a folder: give a safetensors file, such as write_dump makes")
    if path.is_dir() or name is not None:
        rank = "" if name is None else f" --rank {name[1]}"
        raise BadInput(
            f"{path} is a training job's dump of a step, which --dump does not read: "
            f"give --fed {folder}{rank} --tokenizer DIR instead"
        )


def _names_of(found: object, path: Path) -> str:
    """Whose names these are."""
    present = set(found)  # type: ignore[call-overload]  # safetensors has no types: a list or a view of names
    for names, fields in NAMES.items():
        if set(fields.values()) <= present:
            return names
    nearest = max(NAMES, key=lambda names: len(set(NAMES[names].values()) & present))
    missing = ", ".join(sorted(set(NAMES[nearest].values()) - present))
    raise BadInput(f"{path} has no {missing}, and so neither packproof's nor Megatron-LM's names: dump those too")


def _count(tokens: torch.Tensor, path: Path) -> int:
    if tokens.dim() not in (1, 2):
        raise BadInput(f"{path}: tokens have shape {list(tokens.shape)}; a batch is [B, P] or [P]")
    return 1 if tokens.dim() == 1 else int(tokens.shape[0])


def _row_of(tensor: torch.Tensor, field: str, row: int, count: int, path: Path) -> torch.Tensor:
    """One row of a field; a field without a batch dimension belongs to the only row."""
    per_row = 1 if field == "max_seqlen" else 2
    if tensor.dim() >= per_row and tensor.shape[0] == count:
        return tensor[row]
    if count == 1:
        return tensor
    raise BadInput(f"{path}: {field} has shape {list(tensor.shape)}, the batch {count} rows: one entry a row is needed")


def _without_filling(cu_seqlens: torch.Tensor, pack_length: int) -> torch.Tensor:
    """Boundaries up to the first P (R-CU-1). Without one, -1 at the end is filling (R-BATCH-1)."""
    flat = cu_seqlens.reshape(-1)
    ends = (flat == pack_length).nonzero()
    if len(ends):
        return flat[: int(ends[0]) + 1]
    real = (flat != NO_BOUNDARY).nonzero()
    return flat[: int(real[-1]) + 1] if len(real) else flat[:0]


def _stack(rows: Sequence[Row], names: str) -> dict[str, torch.Tensor]:
    if names not in NAMES:
        raise BadInput(f"no names are called {names!r}: choose one of {', '.join(NAMES)}")
    if not rows or any(row.input_ids is None for row in rows):
        raise BadInput("a dump needs rows that were built: this one was refused" if rows else "a dump needs a row")
    lengths = {int(row.input_ids.shape[-1]) for row in rows if row.input_ids is not None}
    if len(lengths) > 1:
        raise BadInput(f"rows of one dump have one length, these have {sorted(lengths)}: dump them apart")
    pack_length = lengths.pop()
    fields: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        for field in ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens"):
            fields.setdefault(field, []).append(getattr(row, field))
        fields.setdefault("max_seqlen", []).append(torch.tensor(row.max_seqlen))
    # Megatron-LM fills boundaries with P, collate with -1.
    filling = NO_BOUNDARY if names == "packproof" else pack_length
    widest = max(len(cu) for cu in fields["cu_seqlens"]) if names == "packproof" else pack_length + 1
    fields["cu_seqlens"] = [
        torch.nn.functional.pad(cu, (0, max(0, widest - len(cu))), value=filling) for cu in fields["cu_seqlens"]
    ]
    return {NAMES[names][field]: torch.stack(tensors) for field, tensors in fields.items()}
