"""Write to disk what a rank fed in one step, for `diff_row` and for finding the cause of a loss that is NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from production.errors import PackproofError
from production.files.source import Location
from production.online.bins import Padding, squeeze
from production.online.padded_batch import PaddedBatch
from production.parallel.microbatches import Microbatch, MicrobatchSettings, process_microbatch
from production.parallel.multi_token_feed import MultiTokenParams
from production.parallel.sizes import RankCoordinates
from production.rows.batch import Batch
from production.training.data.batch_stream import StepBatch

_DEPTH = ("input_ids", "target_ids", "token_mask", "position_ids")


def dump(
    folder: Path,
    fed: StepBatch,
    *,
    place: RankCoordinates,
    normalization: str,
    depths: int,
    provenance: Mapping[str, Any],
    locations: Sequence[Location],
) -> Path:
    """Write `rank_R.safetensors` and `rank_R.rows.json`, which gives the rows' locations and provenance; return the
    folder.

    Tensors are called `microbatch_N.WHAT.NAME`. WHAT is `row` (whole rows; online the bin's padded batch), `squeezed`
    (online only: that bin as one row), `share` (the input of this rank's model) and `depth_K` (the share at depths 1
    to `depths`). `provenance` comes from `BatchStream.provenance`. Raises PackproofError where the files cannot be
    written.
    """
    padding = fed.padding or Padding()
    settings = MicrobatchSettings(
        context_parallel_rank=place.context_rank,
        context_parallel_size=place.context_size,
        padding=padding,
        depths=depths,
    )
    tensors: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(fed.microbatches):
        for what, found in _tensors(batch, padding, process_microbatch(batch, settings)).items():
            tensors |= {f"microbatch_{number}.{what}.{name}": tensor for name, tensor in found.items()}
    said = {
        "place": dataclasses.asdict(place),
        "normalization": normalization,
        "depths": depths,
        "padding": None if fed.padding is None else dataclasses.asdict(fed.padding),
        "made_with": provenance,
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
            what=f"the batch that rank {place.rank} fed cannot be dumped: {error}",
            where=str(folder),
            fix="make room in the folder, or give another logger.log_dir",
        ) from error
    return folder


def _tensors(batch: Batch | PaddedBatch, padding: Padding, made: Microbatch) -> dict[str, dict[str, torch.Tensor]]:
    """Return all tensors of a microbatch by name."""
    found = {"row": _fields(batch)}
    if isinstance(batch, PaddedBatch):
        row = squeeze(batch, padding)
        found["squeezed"] = _fields(row) | {"max_seqlen": torch.tensor(row.max_seqlen)}
    share = {name: getattr(made, name) for name in ("input_ids", "position_ids", "target_ids", "target_mask")}
    found["share"] = {name: tensor for name, tensor in share.items() if tensor is not None}
    found["share"]["cu_seqlens"] = made.packed_seq_params.cu_seqlens_q_padded
    params = made.packed_seq_params
    if isinstance(params, MultiTokenParams) and params.feed is not None:
        tables = params.feed.tables
        for depth in range(1, tables.depths + 1):
            named = {name: getattr(tables, name) for name in _DEPTH}
            found[f"depth_{depth}"] = {name: table[depth] for name, table in named.items() if table is not None}
    return found


def _fields(value: Any) -> dict[str, torch.Tensor]:
    named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}


def _clear(folder: Path, world_size: int) -> None:
    """Remove the files that a run of more ranks left for this step: `diff_row` would read them as a part of this run."""
    for path in folder.glob("rank_*"):
        number = path.name.removeprefix("rank_").partition(".")[0]
        if number.isdecimal() and int(number) >= world_size:
            path.unlink(missing_ok=True)


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies: views of one memory cannot be saved, and at cp 1 a share is a view of its row."""
    return {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
