"""The job whose ranks are walked, and the segments of its rows: drawn, or read from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from production.errors import PackproofError
from production.files.file_state import read_regular
from production.parallel.context_parallel import find_layout

_MOST = {"depths": 1024, "pack_length": 1 << 26, "rows": 1 << 20, "tp·cp·dp": 1 << 20}
"""Greatest numbers of a job that is walked."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A parallel layout and what its model sends. Raises PackproofError where no job can be laid out so."""

    tp: int
    """Tensor parallel size."""
    cp: int
    """Context parallel size."""
    ep: int
    """Expert parallel size; experts are spread over tensor, context and data parallel ranks."""
    dp: int
    """Data parallel size."""
    pp: int = 1
    """Pipeline parallel size: each stage holds the same tokens, and sends activations to the next."""
    pack_length: int
    """P: tokens a row has in the model."""
    rows: int
    """Rows of the global batch."""
    layout: str
    """Cut of a row among context-parallel ranks."""
    sequence_parallel: bool
    """Whether tensor parallel ranks each hold a slice of the tokens between attention and experts."""
    depths: int
    """Depths of multi-token prediction."""
    hidden: int
    """Hidden size."""
    kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Size of a head."""
    topk: int
    """Experts a token is sent to."""
    value_bytes: int
    """Bytes of an activation."""

    def __post_init__(self) -> None:
        """Refuse a job that cannot be."""
        for name in (
            "tp",
            "cp",
            "ep",
            "dp",
            "pp",
            "pack_length",
            "rows",
            "hidden",
            "kv_heads",
            "head_dim",
            "topk",
            "value_bytes",
        ):
            if getattr(self, name) < 1:
                raise _wrong(name, f"must be at least 1, got {getattr(self, name)}", "give at least 1")
        if self.depths < 0:
            raise _wrong("depths", f"must be at least 0, got {self.depths}", "give 0 or more")
        sizes = {"depths": self.depths, "pack_length": self.pack_length, "rows": self.rows, "tp·cp·dp": self.ranks}
        for name, most in _MOST.items():  # indices of all ranks are held at once
            if sizes[name] > most:
                raise _wrong(name, f"must be at most {most:,}, got {sizes[name]:,}", f"give at most {most:,}")
        find_layout(self.layout)
        if self.rows % self.dp:
            raise _wrong("rows", f"must be a multiple of dp, {self.dp}, got {self.rows}", "make rows a multiple of dp")
        of_a_stage = self.ranks // self.pp
        if of_a_stage % self.ep:
            raise _wrong("ep", f"must divide tp·cp·dp, {of_a_stage}, got {self.ep}", "give an ep that divides tp·cp·dp")
        if self.sequence_parallel and self.pack_length % (self.cp * self.tp):
            fix = "make pack_length a multiple of cp·tp, or leave sequence parallelism out"
            raise _wrong("pack_length", f"{self.pack_length} tokens over {self.cp} × {self.tp} ranks", fix)

    @property
    def ranks(self) -> int:
        """Number of ranks; megatron-core counts tp fastest, then cp, then dp, then pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def granularity(self) -> int:
        """g: every segment length is a multiple of g."""
        return 2 * self.cp if self.cp > 1 else 1


def draw_rows(job: Job, *, segments: int, seed: int) -> list[torch.Tensor]:
    """Draw boundaries [K] int32 of each row: `segments` segments of random lengths, multiples of 2·cp where cp exceeds 1."""
    units, rest = divmod(job.pack_length, job.granularity)
    if rest:
        fix = f"make pack_length a multiple of {job.granularity} (2·cp)"
        raise _wrong("pack_length", f"{job.pack_length} tokens at cp {job.cp}", fix)
    if not 1 <= segments <= units:
        raise _wrong(
            "segments",
            f"must be from 1 to {units}, the units of {job.granularity} tokens in a row, got {segments}",
            f"give 1 to {units}",
        )
    made = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(job.rows):
        inner = (
            (torch.randperm(units - 1, generator=made)[: segments - 1] + 1).sort().values
            if units > 1
            else torch.arange(0)
        )
        rows.append((torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([units])]) * job.granularity).int())
    return rows


def read_rows(path: Path) -> list[torch.Tensor]:
    """Read the boundaries of each row from JSON lines; a line is a list of segment lengths, or an object with `cu_seqlens`.

    Raises PackproofError naming file and line.
    """
    rows = []
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(str(path), f"cannot be read: {error}", "name a file of JSON lines") from error
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong(f"{path}, line {number}", f"the line must be JSON: {error}", _SHAPE) from error
        numbers = found.get("cu_seqlens") if isinstance(found, dict) else found
        is_whole = isinstance(numbers, list) and all(type(each) is int and 0 <= each < 2**31 for each in numbers)
        if not is_whole or not numbers:
            raise _wrong(f"{path}, line {number}", "the line must have lengths of segments or cu_seqlens", _SHAPE)
        cu_seqlens = torch.tensor(numbers if isinstance(found, dict) else [0, *numbers])
        rows.append(cu_seqlens.int() if isinstance(found, dict) else cu_seqlens.cumsum(0).int())
    if not rows:
        raise _wrong(str(path), "must have at least one row, got 0", _SHAPE)
    return rows


def first(rows: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return the first `count` rows. Raises PackproofError if there are fewer rows."""
    if len(rows) < count:
        raise _wrong(
            "rows", f"must be at most the {len(rows)} rows of the file, got {count}", "lower --rows, or add to the file"
        )
    return rows[:count]


_SHAPE = 'write a row a line, as [12, 20, 32] (lengths of segments) or {"cu_seqlens": [0, 12, 32, 64]}'


def _wrong(where: str, what: str, fix: str) -> PackproofError:
    return PackproofError(what=what, where=where, fix=fix)
