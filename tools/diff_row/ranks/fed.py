"""`--fed FOLDER`: what each rank of a job really fed in a step (its dump), beside what the reference makes of the same rows.

The direct path only: a dump of the online path does not say how its bins were packed and padded, and is refused.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from equivalence.subjects import BATCH_TENSORS, Row
from tools.diff_row.dump import RANK_FILE
from tools.diff_row.findings import Side
from tools.diff_row.inputs import Beside
from tools.diff_row.ranks.asked import RankRequest, checked, for_cp
from tools.diff_row.ranks.journey import travel
from tools.diff_row.ranks.place import RankPlace, find_place, problem
from tools.diff_row.ranks.steps import RankFindings

FED = "fed"
"""The side that the dump is."""
_SHARE = {
    "input_ids": "input_ids",
    "target_ids": "target_ids",
    "token_mask": "target_mask",
    "position_ids": "position_ids",
    "cu_seqlens": "cu_seqlens",
}
"""Our names to a dump's."""


@dataclass(frozen=True, kw_only=True)
class Fed:
    """One microbatch of one rank, and how it compares."""

    rank: int
    microbatch: int
    file: str
    row: int
    """In its file, from 0."""
    line: int
    """In its file, from 1."""
    equal: bool
    first: str
    """The first step and tensor that differ; empty if all is equal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FedFindings:
    """A dumped step."""

    folder: str
    normalization: str
    looked_at: tuple[Fed, ...]
    """Every microbatch of every rank that was compared."""
    shown: RankFindings
    """The first that differs, else the first."""
    shown_as: Fed

    @property
    def equal(self) -> bool:
        """Whether all ranks fed what the reference makes."""
        return all(each.equal for each in self.looked_at)


def find_fed(request: RankRequest, microbatch: int | None = None) -> FedFindings:
    """Compare the dump's ranks (or the one of `--rank`), all microbatches or one. Raises BadInput."""
    assert request.fed is not None
    _check(request)
    beside: dict[int, Beside] = {}
    looked_at: list[Fed] = []
    shown: tuple[Fed, RankFindings] | None = None
    normalization = ""
    for rank in _ranks(request.fed, request.rank):
        said, tensors = _read(request.fed, rank)
        normalization = str(said["normalization"])
        place = _place(said["place"], request)
        builder = beside.setdefault(place.cp, Beside(for_cp(request.row, place.cp)))
        for number in _microbatches(said["rows"], tensors, rank, microbatch):
            found = _compare(request, place, builder, said["rows"][number], tensors, number)
            each = _told(found, rank, number, said["rows"][number])
            looked_at.append(each)
            if shown is None or (shown[0].equal and not each.equal):
                shown = (each, found)
    assert shown is not None
    return FedFindings(
        folder=str(request.fed),
        normalization=normalization,
        looked_at=tuple(looked_at),
        shown=shown[1],
        shown_as=shown[0],
    )


def _check(request: RankRequest) -> None:
    """What contradicts a dump."""
    sizes = (("tp", request.tp), ("cp", request.cp), ("dp", request.dp), ("pp", request.pp))
    if given := [f"--{name}" for name, size in sizes if size is not None]:
        raise problem("the dump says its own layout", where=", ".join(given), mend="leave them out with --fed")
    if request.row.row is not None or request.row.case is not None or request.row.dump is not None:
        raise problem(
            "the dump names its own rows (rank_R.rows.json)",
            where="--row, --case or --dump with --fed",
            mend="leave them out; --rank and --microbatch choose among the dump's",
        )
    if request.row.sides is not None:
        raise problem("a dump is held against the reference", where="--sides", mend="leave it out with --fed")
    depths, stop_at = checked(request)
    if depths or stop_at in ("depth", "weights"):
        raise problem(
            "a dump holds rows and shares, no depth and no weights",
            where="--depth" if depths else f"--stop-at {stop_at}",
            mend="leave it out; the same row with FILE --row N --depth K shows the depths of both sides",
        )


def _ranks(folder: Path, rank: int | None) -> list[int]:
    if re.match(RANK_FILE, folder.name) and folder.is_file():
        number = re.match(RANK_FILE, folder.name)
        raise problem(
            f"{folder} is one rank's file of a dump",
            where="--fed",
            mend=f"give its folder, and the rank: --fed {folder.parent} --rank {number[1] if number else 0}",
        )
    found = sorted(
        int(name[1]) for path in folder.glob("rank_*.safetensors") if (name := re.match(RANK_FILE, path.name))
    )
    if not found:
        steps = sorted(path.name for path in folder.glob("step_*") if next(path.glob("rank_*.safetensors"), None))
        raise problem(
            f"{folder} has no rank_R.safetensors",
            where="--fed",
            mend=f"give one of the steps in it: --fed {folder / steps[0]}"
            if steps
            else "give the folder of one step, such as logs/dumps/step_00000010 (--dump-batch STEP of the job makes it)",
        )
    if rank is None:
        return found
    if rank not in found:
        raise problem(
            f"{folder} has no rank {rank}", where="--rank", mend=f"choose one of {', '.join(map(str, found))}"
        )
    return [rank]


def _read(folder: Path, rank: int) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
    rows, tensors = folder / f"rank_{rank}.rows.json", folder / f"rank_{rank}.safetensors"
    try:
        said = json.loads(rows.read_bytes())
        found = load_file(tensors)
    except (OSError, ValueError, SafetensorError) as error:
        raise problem(
            f"rank {rank} cannot be read ({error})", where=f"{rows} and {tensors.name}", mend="dump the step again"
        ) from error
    if not isinstance(said, dict) or not {"place", "rows", "normalization"} <= said.keys():
        raise problem("no place, rows or normalization in it", where=str(rows), mend="dump the step again")
    return said, found


def _place(said: Mapping[str, Any], request: RankRequest) -> RankPlace:
    cp, dp, pp, world = (int(said[name]) for name in ("context_size", "data_size", "pipeline_size", "world_size"))
    place = find_place(
        tp=max(1, world // (cp * dp * pp)),
        cp=cp,
        dp=dp,
        pp=pp,
        rank=int(said["rank"]),
        sequence_parallel=request.sequence_parallel,
    )
    here = (place.tensor_rank, place.context_rank, place.data_rank, place.pipeline_rank)
    theirs = tuple(int(said[name]) for name in ("tensor_rank", "context_rank", "data_rank", "pipeline_rank"))
    if here != theirs:
        raise problem(
            f"rank {place.rank} says tp {theirs[0]} · cp {theirs[1]} · dp {theirs[2]} · pp {theirs[3]}, and counts to tp {here[0]} · cp {here[1]} · dp {here[2]} · pp {here[3]}",
            where="rows.json",
            mend="dump with ranks that count tp fastest, then cp, dp, pp slowest",
        )
    return place


def _microbatches(
    rows: Sequence[Any], tensors: Mapping[str, torch.Tensor], rank: int, wanted: int | None
) -> Sequence[int]:
    if "microbatch_0.row.packed_cu_seqlens" not in tensors:
        raise problem(
            f"rank {rank} fed the online path, whose dump does not say how its bins were made",
            where="--fed",
            mend="dump a job of packed rows (megatron_sft_packed)",
        )
    if wanted is None:
        return range(len(rows))
    if not 0 <= wanted < len(rows):
        raise problem(
            f"rank {rank} fed {len(rows)} microbatches", where="--microbatch", mend=f"give 0 to {len(rows) - 1}"
        )
    return [wanted]


def _compare(
    request: RankRequest,
    place: RankPlace,
    builder: Beside,
    named: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    number: int,
) -> RankFindings:
    prefix = f"microbatch_{number}."
    try:
        fields = {name: tensors[f"{prefix}row.{name}"] for name in BATCH_TENSORS[:9]}
        share = {ours: tensors[f"{prefix}share.{theirs}"].reshape(-1) for ours, theirs in _SHARE.items()}
    except KeyError as error:
        raise problem(
            f"no tensor {error}", where=f"rank {place.rank}, {prefix[:-1]}", mend="dump the step again"
        ) from error
    count = int(fields["packed_cu_seqlens_lengths"][0])
    # The job's rows were collated together, so -1 fills each up to the longest of them; this row stands alone.
    fields["packed_cu_seqlens"] = fields["packed_cu_seqlens"][:, :count]
    row = Row(
        input_ids=fields["input_ids"][0],
        target_ids=fields["target_ids"][0],
        token_mask=fields["token_mask"][0],
        position_ids=fields["position_ids"][0],
        cu_seqlens=fields["packed_cu_seqlens"][0, :count],
        max_seqlen=int(fields["packed_max_seqlen"][0]),
    )
    file = request.row.file or Path(str(named["file"]))
    findings = builder.findings(
        Side(name=FED, version=f"microbatch {number} of the dump", row=row),
        file=file,
        row=_row_at(file, int(named["line"]), request.row.chat_key),
    )
    batch = SimpleNamespace(**fields, flat_cu_seqlens=None, flat_max_seqlen=None)
    return travel(
        findings,
        place,
        subjects={FED: SimpleNamespace(collate=lambda *_: batch)},
        depths=0,
        layout=request.layout,
        stop_at=request.stop_at or ("slice" if place.tp > 1 and place.sequence_parallel else "share"),
        at=request.at,
        ways={FED: ("the job", {"share": share})},
    )


def _row_at(file: Path, line: int, chat_key: str) -> int:
    """The row that stands at a line: lines without a row are counted in one and not in the other."""
    from production.errors import PackproofError  # noqa: PLC0415
    from production.files.source import open_source  # noqa: PLC0415

    if not file.is_file():
        raise problem(
            f"there is no file {file}",
            where="rows.json",
            mend="go where the job ran, or name the file: FILE --fed FOLDER",
        )
    try:
        with open_source([file], chat_key=chat_key) as source:
            row = bisect.bisect_left(range(len(source)), line, key=lambda each: source.locate(each).line)
            if row < len(source) and source.locate(row).line == line:
                return row
    except PackproofError as error:
        raise problem(str(error), where="rows.json", mend="give the file that the job read") from error
    raise problem(f"no row stands at line {line} of {file}", where="rows.json", mend="give the file that the job read")


def _told(found: RankFindings, rank: int, number: int, named: Mapping[str, Any]) -> Fed:
    step = found.first
    first = "" if step is None else f"{step.label}: {step.differences[0].tensor}"
    return Fed(
        rank=rank,
        microbatch=number,
        file=str(named["file"]),
        row=found.row.source.row if found.row.source.row is not None else -1,
        line=int(named["line"]),
        equal=found.equal,
        first=first,
    )
