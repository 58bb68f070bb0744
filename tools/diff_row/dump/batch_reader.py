"""Reads one row of a dumped batch (`--dump`), whatever names, dtypes and label convention the trainer that dumped it has.

`step_reader` reads what a job of packproof dumped (`--fed`).

Nothing is guessed in silence: what was mapped, cast, shifted or derived is listed in `Dump.notes`, and every output shows it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from equivalence.subjects import Row
from tools.diff_row.dump.writer import NAMES, NO_BOUNDARY
from tools.diff_row.errors import BadInput
from tools.diff_row.row.inspection import DTYPES, IGNORE_INDEX, Flaw

RANK_FILE = r"rank_(\d+)\.safetensors$"
"""Name of a rank's file in a job's dump of a step; `--fed` reads its folder."""
ZIP = b"PK\x03\x04"
"""First bytes of files of torch.save and numpy.savez."""
FIELDS = tuple(NAMES["packproof"])
"""Fields of a row: input_ids, target_ids, token_mask, position_ids, cu_seqlens, max_seqlen."""
NEEDED = ("input_ids", "target_ids")
"""Fields that cannot be derived from other tensors of a dump."""
LABELS = ("shifted", "unshifted")
"""Label conventions: position i of shifted labels holds what position i predicts; of unshifted labels, its own token."""


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """User's options about a dump that its tensors do not contain."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Tensor in the file to the field of a row that it is, such as labels to target_ids."""
    labels: str = "shifted"
    """One of LABELS."""
    pack_length: int | None = None
    """Tokens of a row, by which a batch that was flattened for THD is split into its rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dump:
    """One row of a dumped batch."""

    row: Row
    """Its tensors, in the dtypes of docs/SPEC.md#tensors where that changes no value; boundaries without their filling."""
    names: str
    """Source of the file's names: packproof, megatron_lm, or "your" if some were mapped."""
    rows: int
    """Number of rows in the batch."""
    notes: tuple[Flaw, ...] = ()
    """Notes on tensors that were cast, shifted, derived or split."""


def read_dump(path: str | Path, row: int = 0, conventions: Conventions | None = None) -> Dump:
    """Read row `row` of a dumped batch. Raises BadInput with what is wrong with the file."""
    path, conventions = Path(path), conventions or Conventions()
    _refuse_other_files(path)
    chosen, found, unread = _named_tensors(path, conventions)
    notes: list[Flaw] = []
    if unread:
        notes.append(_note(f"not read: {', '.join(unread)} (--name TENSOR=FIELD says what a tensor is)", "#tensors"))
    tensors = _split_flattened(found, conventions.pack_length, notes)
    count = _count(tensors["input_ids"], path)
    if not 0 <= row < count:
        raise BadInput(f"{path} has rows 0 to {count - 1}, there is no row {row}: choose one with --dump-row")
    one = {name: _row_of(tensor, name, row, count, path) for name, tensor in tensors.items()}
    lengths = {name: one[name].numel() for name in FIELDS[:4] if name in one}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        sizes = ", ".join(f"{chosen[name]} {size}" for name, size in lengths.items())
        raise BadInput(f"{path}: row {row} has {sizes}; each has one value for each of at least one token")
    if "max_seqlen" in one and one["max_seqlen"].numel() != 1:
        raise BadInput(f"{path}: max_seqlen has shape {list(tensors['max_seqlen'].shape)}; one a row")
    if conventions.labels == "unshifted":
        _shift_labels(one, notes)
    if "cu_seqlens" in one:
        one["cu_seqlens"] = _without_filling(one["cu_seqlens"], lengths["input_ids"])
    _derive(one, path, notes)
    longest = int(one.pop("max_seqlen").reshape(-1)[0])
    cast = {name: _cast(name, one[name]) for name in DTYPES}
    if told := [
        f"{name} is {_called(one[name])}, not {_called(cast[name])}"
        for name in DTYPES
        if one[name].dtype != cast[name].dtype
    ]:
        notes.append(_note(f"{', '.join(told)}; values are compared", "#tensors"))
    return Dump(
        row=Row(
            input_ids=cast["input_ids"],
            target_ids=cast["target_ids"],
            token_mask=cast["token_mask"],
            position_ids=cast["position_ids"],
            cu_seqlens=cast["cu_seqlens"],
            max_seqlen=longest,
        ),
        names=_whose(chosen),
        rows=count,
        notes=tuple(notes),
    )


def field_of(name: str) -> str:
    """Return the field of a name: one of packproof's or Megatron-LM's names, or the field's own. Raises BadInput for another word."""
    for fields in ({one: one for one in FIELDS}, *NAMES.values()):
        for one, called in fields.items():
            if name == called:
                return one
    raise BadInput(f"--name …={name}: no field of a row is called {name!r}: choose one of {', '.join(FIELDS)}")


def _refuse_other_files(path: Path) -> None:
    """Refuse a file that is not safetensors; name its format and the line that converts it."""
    folder, name = (path, None) if path.is_dir() else (path.parent, re.match(RANK_FILE, path.name))
    if path.is_dir() and not (next(path.glob("rank_*.safetensors"), None) or next(path.glob("step_*"), None)):
        raise BadInput(f"{path} is a folder: give a safetensors file, such as write_dump makes")
    if path.is_dir() or name is not None:
        rank = "" if name is None else f" --rank {name[1]}"
        raise BadInput(
            f"{path} is a training job's dump of a step, which --dump does not read: "
            f"give --fed {folder}{rank} --tokenizer DIR instead"
        )
    if not path.is_file():
        raise BadInput(f"there is no dump {path}: give a safetensors file, such as write_dump makes")
    with path.open("rb") as file:
        start = file.read(len(ZIP))
    if path.suffix in (".pt", ".pth", ".bin") or start == ZIP:
        out = path.with_suffix(".safetensors").name
        raise BadInput(
            f'{path} was written by torch.save or numpy.savez, and --dump reads safetensors: convert it with   python -c "import torch; '
            f"from safetensors.torch import save_file; batch = torch.load('{path.name}', weights_only=True); "
            f"save_file({{name: value.contiguous() for name, value in batch.items() if isinstance(value, torch.Tensor)}}, '{out}')\""
        )


def _named_tensors(path: Path, conventions: Conventions) -> tuple[dict[str, str], dict[str, torch.Tensor], list[str]]:
    """Return the name in the file of each field, the tensors by field, and the names of tensors that belong to no row."""
    try:
        with safe_open(str(path), framework="pt") as file:
            present = list(file.keys())
            if absent := sorted(set(conventions.names) - set(present)):
                raise BadInput(f"{path} has no tensor {absent[0]} (--name): it has {', '.join(sorted(present))}")
            chosen = _choose_names(present, path, conventions.names)
            return (
                chosen,
                {one: file.get_tensor(called) for one, called in chosen.items()},
                sorted(set(present) - set(chosen.values())),
            )
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} cannot be read as safetensors ({error}): dump it again") from error


def _choose_names(present: Iterable[str], path: Path, mapped: Mapping[str, str]) -> dict[str, str]:
    """Return the name in the file of each field: a mapped name, else the one name of packproof or Megatron-LM that the file has."""
    present = set(present)
    by_field = {field_of(meant): name for name, meant in mapped.items()}
    if len(by_field) < len(mapped):
        raise BadInput("--name: two tensors are mapped to one field: name each field once")
    chosen = dict(by_field)
    for one in FIELDS:
        known = {one, *(fields[one] for fields in NAMES.values())} & present - set(mapped)
        if one not in by_field and len(known) > 1:
            raise BadInput(
                f"{path} has {' and '.join(sorted(known))}, and both mean {one}: say which with --name TENSOR={one}"
            )
        if one not in by_field and known:
            chosen[one] = known.pop()
    if missing := [one for one in NEEDED if one not in chosen]:
        raise BadInput(
            f"{path} has no {', '.join(missing)}; it has {', '.join(sorted(present)) or 'nothing'}: "
            f"dump that too, or say which tensor it is with --name TENSOR={missing[0]}"
        )
    return chosen


def _whose(chosen: Mapping[str, str]) -> str:
    """Return the source of a dump's names: packproof, megatron_lm, or "your" for a mixture or mapped names."""
    for names, fields in NAMES.items():
        if all(fields[one] == name for one, name in chosen.items()):
            return names
    return "your"


def _split_flattened(
    tensors: dict[str, torch.Tensor], pack_length: int | None, notes: list[Flaw]
) -> dict[str, torch.Tensor]:
    """Split a batch that was flattened for THD (R-BATCH-2) into rows [B, P], if one sequence holds several pack lengths."""
    ids = tensors["input_ids"]
    total = ids.numel()
    one_sequence = ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] == 1)
    if pack_length is None or not one_sequence or total <= pack_length or total % pack_length:
        return tensors
    rows = total // pack_length
    split = {
        name: tensor.reshape(rows, pack_length) if tensor.numel() == total else tensor
        for name, tensor in tensors.items()
        if name not in ("cu_seqlens", "max_seqlen")
    }
    if "cu_seqlens" in tensors:
        flat = _without_filling(tensors["cu_seqlens"], total).tolist()
        parts = [
            [end - start for end in flat if start <= end <= start + pack_length]
            for start in range(0, total, pack_length)
        ]
        widest = max(map(len, parts))
        split["cu_seqlens"] = torch.tensor(
            [part + [NO_BOUNDARY] * (widest - len(part)) for part in parts], dtype=tensors["cu_seqlens"].dtype
        )
    what = f"one sequence of {total:,} tokens was split into {rows} rows of {pack_length:,}; choose one with --dump-row"
    notes.append(_note(what, "R-BATCH-2"))
    return split


def _count(tokens: torch.Tensor, path: Path) -> int:
    if tokens.dim() not in (1, 2):
        raise BadInput(f"{path}: tokens have shape {list(tokens.shape)}; a batch is [B, P] or [P]")
    return 1 if tokens.dim() == 1 else int(tokens.shape[0])


def _row_of(tensor: torch.Tensor, name: str, row: int, count: int, path: Path) -> torch.Tensor:
    """Return one row of a field; a field without a batch dimension belongs to the only row."""
    per_row = 1 if name == "max_seqlen" else 2
    if tensor.dim() >= per_row and tensor.shape[0] == count:
        return tensor[row].reshape(-1) if name != "max_seqlen" else tensor[row]
    if count == 1:
        return tensor.reshape(-1)
    raise BadInput(f"{path}: {name} has shape {list(tensor.shape)}, the batch {count} rows: one entry a row is needed")


def _without_filling(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Return the boundaries up to the first one at the end of the row (R-CU-1); without such a boundary, remove -1 at the end (R-BATCH-1)."""
    flat = cu_seqlens.reshape(-1)
    ends = (flat == length).nonzero()
    if len(ends):
        return flat[: int(ends[0]) + 1]
    real = (flat != NO_BOUNDARY).nonzero()
    return flat[: int(real[-1]) + 1] if len(real) else flat[:0]


def _shift_labels(one: dict[str, torch.Tensor], notes: list[Flaw]) -> None:
    """Shift labels (and their mask) by one, as the model that they were made for does; the last position predicts nothing."""
    one["target_ids"] = torch.cat([one["target_ids"][1:], one["target_ids"].new_full((1,), IGNORE_INDEX)])
    shifted = "labels were"
    if "token_mask" in one:
        one["token_mask"] = torch.cat([one["token_mask"][1:], one["token_mask"].new_zeros(1)])
        shifted = "labels and mask were"
    what = f"{shifted} declared unshifted and are shown shifted by one; the last position has no label"
    notes.append(_note(what, "R-SHIFT-1"))


def _derive(one: dict[str, torch.Tensor], path: Path, notes: list[Flaw]) -> None:
    """Derive what the dump leaves out from what it holds, and say so."""
    if "token_mask" not in one:
        one["token_mask"] = (one["target_ids"] != IGNORE_INDEX).to(torch.float32)
        notes.append(_note("no mask was dumped: a label trains where it is not -100", "R-MASK-1"))
    if "cu_seqlens" not in one and "position_ids" not in one:
        raise BadInput(f"{path} has neither boundaries nor positions: dump cu_seqlens or position_ids too")
    length = one["input_ids"].numel()
    if "cu_seqlens" not in one:
        starts = (one["position_ids"] == 0).nonzero().reshape(-1).tolist()
        ends = sorted({0, *starts, length})
        one["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32)
        notes.append(_note("no boundaries were dumped: a segment begins where position_ids are 0", "R-CU-1"))
    ends = [int(end) for end in one["cu_seqlens"].tolist()]
    if "position_ids" not in one:
        counted = [torch.arange(max(0, end - start)) for start, end in itertools.pairwise(ends)]
        positions = torch.cat(counted) if counted else torch.arange(0)
        if positions.numel() != length:
            raise BadInput(f"{path} has no positions, and its boundaries do not cover the row: dump position_ids too")
        one["position_ids"] = positions
        notes.append(_note("no positions were dumped: they restart at 0 at each boundary", "R-LAYOUT-1"))
    if "max_seqlen" not in one:
        longest = max((end - start for start, end in itertools.pairwise(ends)), default=0)
        one["max_seqlen"] = torch.tensor(longest)
        notes.append(_note(f"no max_seqlen was dumped: the longest segment has {longest:,} positions", "R-CU-1"))


def _cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Cast the tensor to the dtype of docs/SPEC.md#tensors if no value changes, because sides are compared by value."""
    cast = tensor.to(DTYPES[name])
    return cast if torch.equal(cast.to(torch.float64), tensor.to(torch.float64)) else tensor


def _called(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _note(what: str, rule: str) -> Flaw:
    return Flaw(what=what, rule=rule, count=1, position=None, note=True)
