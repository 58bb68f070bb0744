"""Reads what a training job dumped of a step: `rank_R.safetensors` and `rank_R.rows.json` of each rank (`production.training.data.batch_dump`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file

from tools.diff_row.dump.batch_reader import RANK_FILE
from tools.diff_row.errors import problem
from tools.diff_row.rank.coordinates import RankPlace, find_place
from tools.diff_row.rank.steps import TENSORS

Size = Annotated[int, Meta(ge=1)]
Rank = Annotated[int, Meta(ge=0)]


class DumpedCoordinates(msgspec.Struct, frozen=True, kw_only=True):
    """Coordinates of a rank in its job (`production.parallel.sizes.RankCoordinates`)."""

    rank: Rank
    world_size: Size
    tensor_rank: Rank
    context_rank: Rank
    context_size: Size
    data_rank: Rank
    data_size: Size
    pipeline_rank: Rank
    pipeline_size: Size


class NamedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row, or online a conversation, of a file."""

    file: str
    line: Size
    """From 1."""
    row: Rank


class RowsMadeWith(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of RowSettings."""

    pack_length: Size
    prompt_format: str
    context_parallel_size: Size
    semantics: str
    pad_token: str | None
    assistant_prefix_len: int | None


class BinsMadeWith(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for packing and padding on the online path (`production.training.data.online_bins.BinSettings`)."""

    make_sequence_length_divisible_by: Size
    capacity: Size
    algorithm: Literal["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]
    seed: int | None
    data_parallel_size: Size
    context_parallel_size: Size
    tensor_parallel_size: Size
    pipeline_parallel_size: Size
    precision: Literal["unquantized", "fp8_blockwise", "fp8_mxfp8", "fp8_other"]
    hybrid_expert_parallel: bool
    pad_token_id: int


class ChatMadeWith(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for tokenizing a line on the online path (`production.online.chat.ChatSettings`)."""

    prompt_format: str
    add_bos: bool
    add_eos: bool
    add_generation_prompt: bool
    on_unjoined_pieces: Literal["refuse", "allow"]
    max_length: Size
    on_long_conversation: Literal["mask_out", "refuse"]
    tool_key: str | None


class MadeWith(msgspec.Struct, frozen=True, kw_only=True):
    """Facts needed to build the rows again (`BatchStream.provenance`)."""

    tokenizer: str
    chat_template: str | None
    """The job's own, instead of the tokenizer's."""
    chat_key: str
    rows: RowsMadeWith
    bins: BinsMadeWith | None
    """Of the online path; None on the direct one."""
    chat: ChatMadeWith | None
    """As `bins`."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """`rank_R.rows.json`."""

    place: DumpedCoordinates
    normalization: str
    depths: Rank
    """Of multi-token prediction, whose shares are dumped too."""
    made_with: MadeWith
    rows: list[NamedRow]
    """Each row; online each conversation of the global batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dumped:
    """One rank's part of a dumped step."""

    place: RankPlace
    said: Said
    tensors: Mapping[str, torch.Tensor]

    @property
    def is_online(self) -> bool:
        """True if the job packed conversations itself."""
        return self.said.made_with.bins is not None

    @property
    def microbatches(self) -> int:
        """Number of microbatches that this rank fed."""
        return len({name.partition(".")[0] for name in self.tensors})

    def chosen(self, wanted: int | None) -> Sequence[int]:
        """Return all microbatches, or the requested one. Raises BadInput."""
        if wanted is None:
            return range(self.microbatches)
        if not 0 <= wanted < self.microbatches:
            raise problem(
                f"rank {self.place.rank} fed {self.microbatches} microbatches",
                where="--microbatch",
                fix=f"give 0 to {self.microbatches - 1}",
            )
        return [wanted]

    def of(self, number: int, what: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return tensors of microbatch `number`: `what` is row, squeezed, share or depth_K. Raises BadInput for a missing tensor."""
        try:
            return {name: self.tensors[f"microbatch_{number}.{what}.{name}"] for name in names}
        except KeyError as error:
            raise problem(
                f"the dump lacks the tensor {error}",
                where=f"rank {self.place.rank}, microbatch {number}",
                fix="dump the step again",
            ) from error

    def way(self, number: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return the input of this rank's model by step: the share and its depths."""
        names = ("input_ids", "target_ids", "target_mask", "cu_seqlens")
        found = self.of(number, "share", names)
        given = [name for name in TENSORS if name != "position_ids" or not self.is_online]  # R-ONLINE-7
        if not self.is_online:
            found |= self.of(number, "share", ["position_ids"])
        found["token_mask"] = found.pop("target_mask")
        ways = {"share": found}
        for depth in range(1, self.said.depths + 1):
            ways[f"share, depth {depth}"] = self.of(number, f"depth_{depth}", given)
        return {step: {name: tensor.reshape(-1) for name, tensor in has.items()} for step, has in ways.items()}


def ranks_of(folder: Path, rank: int | None) -> list[int]:
    """Return the ranks with files in the folder, or the requested rank. Raises BadInput."""
    if (number := re.match(RANK_FILE, folder.name)) and folder.is_file():
        raise problem(
            f"{folder} is one rank's file of a dump",
            where="--fed",
            fix=f"give its folder, and the rank: --fed {folder.parent} --rank {number[1]}",
        )
    found = sorted(
        int(name[1]) for path in folder.glob("rank_*.safetensors") if (name := re.match(RANK_FILE, path.name))
    )
    if not found:
        steps = sorted(path.name for path in folder.glob("step_*") if next(path.glob("rank_*.safetensors"), None))
        raise problem(
            f"the folder of a dumped step must hold rank_R.safetensors, and {folder} does not",
            where="--fed",
            fix=f"give one of the steps in it: --fed {folder / steps[0]}"
            if steps
            else "give the folder of one step, such as logs/dumps/step_00000010 (--dump-batch STEP of the job makes it)",
        )
    if rank is None:
        return found
    if rank not in found:
        raise problem(f"{folder} has no rank {rank}", where="--rank", fix=f"choose one of {', '.join(map(str, found))}")
    return [rank]


def read_rank(folder: Path, rank: int, *, sequence_parallel: bool) -> Dumped:
    """Read the dump of a rank. Raises BadInput with the fault of its files."""
    rows, tensors = folder / f"rank_{rank}.rows.json", folder / f"rank_{rank}.safetensors"
    try:
        said = msgspec.json.decode(rows.read_bytes(), type=Said)
        found = load_file(tensors)
    except (OSError, ValueError, SafetensorError) as error:  # msgspec's are ValueErrors
        raise problem(
            f"rank {rank} cannot be read ({error})", where=f"{rows} and {tensors.name}", fix="dump the step again"
        ) from error
    dumped = Dumped(place=_place(said.place, sequence_parallel=sequence_parallel), said=said, tensors=found)
    if not said.rows or not found or (not dumped.is_online and dumped.microbatches != len(said.rows)):
        raise problem(
            f"rank {rank} names {len(said.rows)} rows and has {dumped.microbatches} microbatches",
            where=f"{rows} and {tensors.name}",
            fix="dump the step again",
        )
    return dumped


def _place(said: DumpedCoordinates, *, sequence_parallel: bool) -> RankPlace:
    cp, dp, pp = said.context_size, said.data_size, said.pipeline_size
    tp, rest = divmod(said.world_size, cp * dp * pp)
    if rest or not tp or said.rank >= said.world_size:
        raise problem(
            f"rank {said.rank} of {said.world_size} with cp {cp} · dp {dp} · pp {pp}",
            where="rows.json",
            fix="dump the step again",
        )
    place = find_place(tp=tp, cp=cp, dp=dp, pp=pp, rank=said.rank, sequence_parallel=sequence_parallel)
    here = (place.tensor_rank, place.context_rank, place.data_rank, place.pipeline_rank)
    theirs = (said.tensor_rank, said.context_rank, said.data_rank, said.pipeline_rank)
    if here != theirs:
        raise problem(
            f"rank {place.rank} says tp {theirs[0]} · cp {theirs[1]} · dp {theirs[2]} · pp {theirs[3]}, and counts to tp {here[0]} · cp {here[1]} · dp {here[2]} · pp {here[3]}",
            where="rows.json",
            fix="dump with ranks that count tp fastest, then cp, dp, pp slowest",
        )
    return place
