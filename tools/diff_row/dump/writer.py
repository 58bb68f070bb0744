"""Writes tensors as safetensors: a dumped batch, and every step of the way of a row to a rank.

A training job calls `write_dump` where its batch is ready; `tools.diff_row.dump.batch_reader` reads the file for `--dump`. In the file of
`write_steps` tensors are called `STEP/SIDE/TENSOR`; `STEP/origin` are the positions of the row that its places hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from equivalence.subjects import Row
from tools.diff_row.errors import BadInput
from tools.diff_row.rank.steps import RankFindings, Refused

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
NO_BOUNDARY = -1
"""Filling of ragged rows of `packed_cu_seqlens`."""


def write_dump(
    path: str | Path, batch: Sequence[Row] | Mapping[str, torch.Tensor], *, names: str = "packproof"
) -> None:
    """Write rows of one length, or a batch as a job has it, so that `--dump` can read it.

    Rows become [B, P] tensors under one of `NAMES`. A mapping is written as it is: its tensors are copied to the host,
    and values that are no tensors are left out. Raises BadInput if there is no tensor, no row, a refused row, or rows of several lengths.
    """
    if isinstance(batch, Mapping):
        tensors = {str(name): value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        if not tensors:
            raise BadInput(f"the batch for {path} holds no tensor: give a mapping from names to tensors")
    else:
        tensors = _stack(batch, names)
    _save(Path(path), tensors, {"packproof": "a dumped batch", "names": names})


def write_steps(path: Path, findings: RankFindings) -> None:
    """Write every tensor of every side at every step to one safetensors file. Raises OSError."""
    tensors: dict[str, torch.Tensor] = {}
    for step in findings.steps:
        name = step.label.replace(", ", "_").replace(" ", "_")
        if step.origin is not None:
            tensors[f"{name}/origin"] = step.origin
        for side, has in step.sides.items():
            if not isinstance(has, Refused):
                tensors |= {f"{name}/{side}/{tensor}": value for tensor, value in has.items()}
    _save(path, tensors, {"packproof": "the way of a row to a rank", "rank": str(findings.place.rank)})


def _save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write copies: views of one memory cannot be saved, and at cp 1 a share is a view of its row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: each.detach().cpu().contiguous().clone() for name, each in tensors.items()}, str(path), metadata=metadata
    )


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
