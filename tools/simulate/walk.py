"""Walks every rank of a job in one process, with the indices that a real rank would use.

Each token carries its place in the global batch as its id, so that what a rank holds says itself whether it belongs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from production.errors import BatchRefused
from production.parallel.context_parallel import check_boundaries, find_layout
from production.parallel.multi_token import DepthTables, depth_tables
from production.rows.batch import FlatBatch
from tools.simulate.layout import Job

MOST_FAULTS = 20
"""Number of faults to print; one wrong index causes one fault on every rank."""


@dataclass(kw_only=True, eq=False)
class Walk:
    """Result of the walk; tables [dp, microbatches, cp] are per rank of a tensor-parallel group."""

    job: Job
    rows: list[torch.Tensor]
    """Boundaries of each row."""
    tokens: torch.Tensor
    """[dp, microbatches, cp, tp] int64: tokens that each rank holds."""
    work: torch.Tensor
    """[dp, microbatches, cp] int64: keys that the owned queries see, summed; heads are spread over tp."""
    segments: torch.Tensor
    """[dp, microbatches] int64: segments that are not empty."""
    faults: list[str] = field(default_factory=list)
    """Faults, with row and rank; empty if every token is owned once and labels stay with their tokens."""


def walk(job: Job, rows: Sequence[torch.Tensor]) -> Walk:
    """Cut every row for every rank and check it. Raises BatchRefused for rows that cannot be cut."""
    count = job.rows // job.dp
    found = Walk(
        job=job,
        rows=list(rows),
        tokens=torch.zeros(job.dp, count, job.cp, job.tp, dtype=torch.int64),
        work=torch.zeros(job.dp, count, job.cp, dtype=torch.int64),
        segments=torch.zeros(job.dp, count, dtype=torch.int64),
    )
    for number, cu_seqlens in enumerate(rows):
        _walk_row(found, number, cu_seqlens)
    return found


def _walk_row(found: Walk, number: int, cu_seqlens: torch.Tensor) -> None:
    job = found.job
    data_rank, microbatch = number % job.dp, number // job.dp  # R-BATCH-3
    _check(job, number, cu_seqlens)
    row = _make_row(number, cu_seqlens, job.pack_length)
    # Where each position's segment begins and ends, found by searching and not as production does.
    positions = torch.arange(job.pack_length)
    place = torch.searchsorted(cu_seqlens.long(), positions, right=True)
    starts, ends = cu_seqlens.long()[place - 1], cu_seqlens.long()[place]
    owners = torch.zeros(job.pack_length, dtype=torch.int32)
    for rank in range(job.cp):
        where = f"row {number}, data-parallel rank {data_rank}, context-parallel rank {rank}"
        tables = depth_tables(row, job.depths, rank=rank, size=job.cp, layout=job.layout)
        owned = tables.input_ids[0, 0] - number * job.pack_length
        if int(owned.min()) < 0 or int(owned.max()) >= job.pack_length:
            _fault(found, f"{where}: tokens of another row")
            continue
        for tensor_rank, part in enumerate(owned.chunk(job.tp) if job.sequence_parallel else [owned] * job.tp):
            owners.index_add_(0, part, torch.ones_like(part, dtype=torch.int32))
            found.tokens[data_rank, microbatch, rank, tensor_rank] = len(part)
        found.work[data_rank, microbatch, rank] = (owned - starts[owned] + 1).sum()
        for name, depth in _strays(row, tables, owned, ends):
            _fault(found, f"{where}: {name} at depth {depth} does not belong to its token")
    times = 1 if job.sequence_parallel else job.tp
    if wrong := (owners != times).nonzero().view(-1).tolist():
        what = f"position {wrong[0]} is held {owners[wrong[0]]} times, not {times}"
        _fault(found, f"row {number}: {what} (and {len(wrong) - 1} more)")
    found.segments[data_rank, microbatch] = (cu_seqlens.diff() > 0).sum()


def _check(job: Job, number: int, cu_seqlens: torch.Tensor) -> None:
    """Refuse a row that cannot be cut, by its number in the global batch."""
    layout = find_layout(job.layout)
    pieces = layout.pieces(job.cp) if layout.unit == "segment" and job.cp > 1 else 1
    try:
        check_boundaries(cu_seqlens.long(), pieces, rows=1, total=job.pack_length)
    except BatchRefused as error:
        raise BatchRefused(kind=error.kind, row=number, what=error.what, where=f"row {number}", fix=error.fix) from None


def _strays(row: FlatBatch, tables: DepthTables, owned: torch.Tensor, ends: torch.Tensor) -> list[tuple[str, int]]:
    """Return the tensors and depths at which a position does not hold the value of the token `depth` positions ahead in the same segment."""
    strays = []
    for depth in range(len(tables.input_ids)):
        source = owned + depth
        inside = source < ends[owned]
        source = source.clamp(max=row.input_ids.shape[1] - 1)
        for name in ("input_ids", "target_ids", "position_ids", "token_mask"):
            expected = torch.where(inside, getattr(row, name)[0, source], 0)
            if not torch.equal(getattr(tables, name)[depth, 0], expected):
                strays.append((name, depth))
    return strays


def _make_row(number: int, cu_seqlens: torch.Tensor, pack_length: int) -> FlatBatch:
    """Make a row whose ids are positions in the global batch, and whose labels, positions and mask are derived from the ids."""
    ids = torch.arange(pack_length)[None] + number * pack_length
    lengths = cu_seqlens.long().diff()
    starts = cu_seqlens.long()[:-1].repeat_interleave(lengths)
    return FlatBatch(
        input_ids=ids,
        target_ids=3 * ids + 1,
        token_mask=((ids * 2_654_435_761) % 7 < 4).float(),
        position_ids=torch.arange(pack_length)[None] - starts,
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()),
    )


def _fault(found: Walk, what: str) -> None:
    if len(found.faults) < MOST_FAULTS:
        found.faults.append(what)
