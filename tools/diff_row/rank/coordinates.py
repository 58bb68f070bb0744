"""Define the rank to show: its coordinate in each dimension, its pipeline stage, its slice."""

from __future__ import annotations

from dataclasses import dataclass

from tools.diff_row.errors import problem

MOST_RANKS = 1 << 20
"""Ranks of the largest layout that is followed."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank of a job. Ranks count tp fastest, then cp, then dp, pp slowest, as megatron-core's own order has it."""

    rank: int
    """Among all ranks, from 0."""
    tp: int
    """Tensor parallel size."""
    cp: int
    """Context parallel size."""
    dp: int
    """Data parallel size."""
    pp: int
    """Pipeline parallel size."""
    sequence_parallel: bool = True
    """Whether tensor parallel ranks each hold a slice of the tokens; it means nothing at tp 1."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def tensor_rank(self) -> int:
        """Place in tp."""
        return self.rank % self.tp

    @property
    def context_rank(self) -> int:
        """Place in cp."""
        return self.rank // self.tp % self.cp

    @property
    def data_rank(self) -> int:
        """Place in dp."""
        return self.rank // (self.tp * self.cp) % self.dp

    @property
    def pipeline_rank(self) -> int:
        """Place in pp, the stage."""
        return self.rank // (self.tp * self.cp * self.dp)

    @property
    def is_last_stage(self) -> bool:
        """True if this rank computes losses, including those of multi-token prediction."""
        return self.pipeline_rank == self.pp - 1

    @property
    def stage(self) -> str:
        """Role of this pipeline stage; every stage receives the whole microbatch."""
        if self.pp == 1:
            return "the only stage: embeds tokens, computes losses"
        if self.pipeline_rank == 0:
            return f"stage 0 of {self.pp}: embeds tokens; labels and mask are there and not read"
        if self.is_last_stage:
            return f"stage {self.pipeline_rank} of {self.pp}: computes losses, and embeds the ids of multi-token depths"
        return f"stage {self.pipeline_rank} of {self.pp}: neither embeds nor computes losses; reads only boundaries (attention)"

    @property
    def same_data(self) -> str:
        """Ranks that hold the same share as this one: those of other tp and pp coordinates."""
        others = [
            place
            for place in range(self.ranks)
            if (place // self.tp) % (self.cp * self.dp) == (self.rank // self.tp) % (self.cp * self.dp)
            and place != self.rank
        ]
        if not others:
            return "no other rank is given this share"
        shown = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
        return f"rank{'s' if len(others) > 1 else ''} {shown} {'are' if len(others) > 1 else 'is'} given the same share (other tp or pp places)"


def find_place(*, tp: int, cp: int, dp: int, pp: int, rank: int, sequence_parallel: bool = True) -> RankPlace:
    """Return the coordinates of a rank. Raises BadInput for a size below 1 and for a rank outside the layout."""
    for name, size in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
        if size < 1:
            raise problem(f"must be at least 1, got {size}", where=f"--{name}", fix="give at least 1")
    ranks = tp * cp * dp * pp
    if ranks > MOST_RANKS:
        raise problem(
            f"{ranks:,} ranks, where no machine has more than {MOST_RANKS:,}",
            where="--tp, --cp, --dp, --pp",
            fix="give smaller sizes",
        )
    if not 0 <= rank < ranks:
        sizes = f"tp {tp} · cp {cp} · dp {dp} · pp {pp} = {ranks} rank{'s' if ranks > 1 else ''}"
        raise problem(
            f"there is no rank {rank} among {sizes}",
            where="--rank",
            fix=f"give a rank from 0 to {ranks - 1}, which counts tp fastest, then cp, dp, pp slowest",
        )
    return RankPlace(rank=rank, tp=tp, cp=cp, dp=dp, pp=pp, sequence_parallel=sequence_parallel)
