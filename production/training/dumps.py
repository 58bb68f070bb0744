"""What a rank fed in one step, on disk: for `diff_row`, and for a second look at a loss that was no number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from production.errors import PackproofError
from production.files.source import Location
from production.microbatches import MicrobatchSettings, process_microbatch
from production.parallel import Place
from production.training.feed import Fed
from production.training.step import StepSettings


def dump(folder: Path, fed: Fed, *, place: Place, settings: StepSettings, locations: Sequence[Location]) -> Path:
    """Write `rank_R.safetensors` (whole rows, and this rank's share) and `rank_R.rows.json` (where they stand); gives the folder.

    Raises PackproofError where they cannot be written.
    """
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
    said = {
        "place": dataclasses.asdict(place),
        "normalization": settings.normalization,
        "rows": [
            {"file": str(where.file), "line": where.line, "row": sample.row}
            for where, sample in zip(locations, fed.samples, strict=True)
        ],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if place.rank == 0:
            _clear(folder, place.world_size)
        save_file(_apart(tensors), folder / f"rank_{place.rank}.safetensors")
        (folder / f"rank_{place.rank}.rows.json").write_bytes(msgspec.json.format(msgspec.json.encode(said), indent=2))
    except (OSError, SafetensorError) as error:
        raise PackproofError(
            what=f"what rank {place.rank} fed cannot be dumped: {error}",
            where=str(folder),
            mend="make room there, or give another logger.log_dir",
        ) from error
    return folder


def _clear(folder: Path, world_size: int) -> None:
    """Take away what a run of more ranks left of this step: `diff_row` would take it for a part of this one."""
    for path in folder.glob("rank_*"):
        number = path.name.removeprefix("rank_").partition(".")[0]
        if number.isdecimal() and int(number) >= world_size:
            path.unlink(missing_ok=True)


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies: views of one memory cannot be saved, and at cp 1 a share is a view of its row."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
