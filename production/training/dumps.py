"""What a rank fed in one step, on disk: for `diff_row`, and for a second look at a loss that was no number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from production.files.source import Location
from production.microbatches import MicrobatchSettings, process_microbatch
from production.parallel import Place
from production.training.feed import Fed
from production.training.step import StepSettings


def dump(folder: Path, fed: Fed, *, place: Place, settings: StepSettings, locations: Sequence[Location]) -> Path:
    """Write `rank_R.safetensors` (whole rows, and this rank's share) and `rank_R.rows.json` (where they stand); gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {} if fed.padding is None else {"padding": fed.padding}
    made_for = MicrobatchSettings(
        context_parallel_rank=place.context_rank, context_parallel_size=place.context_size, **options
    )
    tensors: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(fed.microbatches):
        for field in dataclasses.fields(batch):
            tensors[f"microbatch_{number}.row.{field.name}"] = getattr(batch, field.name).contiguous()
        share = process_microbatch(batch, made_for)
        for name in ("input_ids", "position_ids", "target_ids", "target_mask"):
            if (value := getattr(share, name)) is not None:
                tensors[f"microbatch_{number}.share.{name}"] = value.contiguous()
        tensors[f"microbatch_{number}.share.cu_seqlens"] = share.packed_seq_params.cu_seqlens_q_padded.contiguous()
    save_file(_apart(tensors), folder / f"rank_{place.rank}.safetensors")
    said = {
        "place": dataclasses.asdict(place),
        "normalization": settings.normalization,
        "rows": [
            {"file": str(where.file), "line": where.line, "row": sample.row}
            for where, sample in zip(locations, fed.samples, strict=True)
        ],
    }
    (folder / f"rank_{place.rank}.rows.json").write_bytes(msgspec.json.format(msgspec.json.encode(said), indent=2))
    return folder


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies: views of one memory cannot be saved, and at cp 1 a share is a view of its row."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
