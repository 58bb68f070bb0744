"""Cut built rows short for a small model: a few of their segments, around their trained tokens, with ids numbered again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from equivalence.cases.step import batch_of
from production.rows.batch import Batch
from production.rows.builder import Row

MOST_SEGMENTS = 4
MOST_TOKENS = 64


def cut_rows(
    rows: Sequence[Row], *, unit: int, segment_unit: int, pad_id: int
) -> tuple[list[Batch], list[tuple[int, ...]], int]:
    """Return each row as a batch of one short row, the lengths of its segments, and how many ids there are.

    All short rows have one length, a multiple of `unit`; each segment's is a multiple of `segment_unit`. Equal ids stay
    equal and other ids stay other: they are numbered again from 0 over all rows, so that a small vocabulary holds them.
    """
    length = unit * max(1, MOST_TOKENS // unit)
    cut = [_cut(row, length, segment_unit, pad_id) for row in rows]
    known = torch.unique(torch.cat([torch.cat([ids, targets[targets >= 0]]) for _, ids, targets, _ in cut]))
    batches = []
    for lengths, ids, targets, mask in cut:
        again = torch.where(targets >= 0, torch.searchsorted(known, targets.clamp(min=0)), targets)
        batches.append(batch_of([lengths], torch.searchsorted(known, ids)[None], again[None], mask[None]))
    return batches, [lengths for lengths, *_ in cut], len(known)


def _cut(
    row: Row, length: int, segment_unit: int, pad_id: int
) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    spans = [(a, b) for a, b in itertools.pairwise(row.cu_seqlens.tolist()) if b > a]
    trained = [int(row.token_mask[a:b].sum()) for a, b in spans]
    # Those that train most, in the order of the row.
    count = min(len(spans), MOST_SEGMENTS, length // segment_unit)
    kept = sorted(sorted(range(len(spans)), key=lambda at: -trained[at])[:count])
    share = length // count // segment_unit * segment_unit
    lengths = tuple([share] * (count - 1) + [length - share * (count - 1)])
    ids = torch.full((length,), pad_id)
    targets = torch.full((length,), pad_id)
    mask = torch.zeros(length)
    begin = 0
    for at, room in zip(kept, lengths, strict=True):
        start, end = spans[at]
        inside = row.token_mask[start:end].nonzero().view(-1)
        first = int(inside[0]) if len(inside) else 0
        start += max(0, min(first - room // 2, end - start - room))
        taken = min(room, end - start)
        place, source = slice(begin, begin + taken), slice(start, start + taken)
        ids[place], targets[place], mask[place] = row.input_ids[source], row.target_ids[source], row.token_mask[source]
        begin += room
    return lengths, ids, targets, mask
