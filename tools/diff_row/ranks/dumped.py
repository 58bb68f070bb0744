"""Reads what a training job dumped of a step: `rank_R.safetensors` and `rank_R.rows.json` of each rank (`production.training.dumps`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tools.diff_row.dump import RANK_FILE
from tools.diff_row.ranks.place import RankPlace, find_place, problem
from tools.diff_row.ranks.steps import TENSORS

_NEEDED = frozenset({"place", "rows", "normalization", "depths", "padding", "made_with"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Dumped:
    """One rank's part of a dumped step."""

    place: RankPlace
    normalization: str
    depths: int
    """Of multi-token prediction, whose shares are dumped too."""
    made_with: Mapping[str, Any]
    """`tokenizer`, `chat_template`, `chat_key`, `rows` (settings of rows) and `bins` (of the online path, else None)."""
    rows: Sequence[Mapping[str, Any]]
    """`file`, `line` (from 1), `row` of each row; online of each conversation of the global batch."""
    tensors: Mapping[str, torch.Tensor]

    @property
    def is_online(self) -> bool:
        """Whether the job packed conversations itself."""
        return self.made_with["bins"] is not None

    @property
    def microbatches(self) -> int:
        """How many this rank fed."""
        return len({name.partition(".")[0] for name in self.tensors})

    def chosen(self, wanted: int | None) -> Sequence[int]:
        """All microbatches, or the one that is wanted. Raises BadInput."""
        if wanted is None:
            return range(self.microbatches)
        if not 0 <= wanted < self.microbatches:
            raise problem(
                f"rank {self.place.rank} fed {self.microbatches} microbatches",
                where="--microbatch",
                mend=f"give 0 to {self.microbatches - 1}",
            )
        return [wanted]

    def of(self, number: int, what: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors of microbatch `number`: `what` is row, squeezed, share or depth_K. Raises BadInput where one is missing."""
        try:
            return {name: self.tensors[f"microbatch_{number}.{what}.{name}"] for name in names}
        except KeyError as error:
            raise problem(
                f"no tensor {error}",
                where=f"rank {self.place.rank}, microbatch {number}",
                mend="dump the step again",
            ) from error

    def way(self, number: int) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank's model was given, by step: the share and its depths."""
        names = ("input_ids", "target_ids", "target_mask", "cu_seqlens")
        found = self.of(number, "share", names)
        positions = f"microbatch_{number}.share.position_ids"
        if positions in self.tensors:  # online the model is given none without multi-token prediction
            found["position_ids"] = self.tensors[positions]
        found["token_mask"] = found.pop("target_mask")
        ways = {"share": found}
        for depth in range(1, self.depths + 1):
            ways[f"share, depth {depth}"] = self.of(number, f"depth_{depth}", TENSORS)
        return {step: {name: tensor.reshape(-1) for name, tensor in has.items()} for step, has in ways.items()}


def ranks_of(folder: Path, rank: int | None) -> list[int]:
    """The ranks whose files lie in the folder, or the one that is asked for. Raises BadInput."""
    if (number := re.match(RANK_FILE, folder.name)) and folder.is_file():
        raise problem(
            f"{folder} is one rank's file of a dump",
            where="--fed",
            mend=f"give its folder, and the rank: --fed {folder.parent} --rank {number[1]}",
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


def read_rank(folder: Path, rank: int, *, sequence_parallel: bool) -> Dumped:
    """What a rank dumped. Raises BadInput with what is wrong with its files."""
    rows, tensors = folder / f"rank_{rank}.rows.json", folder / f"rank_{rank}.safetensors"
    try:
        said = json.loads(rows.read_bytes())
        found = load_file(tensors)
    except (OSError, ValueError, SafetensorError) as error:
        raise problem(
            f"rank {rank} cannot be read ({error})", where=f"{rows} and {tensors.name}", mend="dump the step again"
        ) from error
    missing = _NEEDED - said.keys() if isinstance(said, dict) else _NEEDED
    if missing:
        raise problem(f"it does not say {', '.join(sorted(missing))}", where=str(rows), mend="dump the step again")
    return Dumped(
        place=_place(said["place"], sequence_parallel=sequence_parallel),
        normalization=str(said["normalization"]),
        depths=int(said["depths"]),
        made_with=said["made_with"],
        rows=said["rows"],
        tensors=found,
    )


def _place(said: Mapping[str, Any], *, sequence_parallel: bool) -> RankPlace:
    cp, dp, pp, world = (int(said[name]) for name in ("context_size", "data_size", "pipeline_size", "world_size"))
    place = find_place(
        tp=max(1, world // (cp * dp * pp)),
        cp=cp,
        dp=dp,
        pp=pp,
        rank=int(said["rank"]),
        sequence_parallel=sequence_parallel,
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
