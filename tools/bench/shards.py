"""Measures one rank's cut of a row against a single `index_select` of the same bytes, both in one run."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from production.errors import PackproofError
from production.parallel.context_parallel import ROW_TENSORS, shard_batch, shard_index
from production.rows.batch import FlatBatch


def shards(*, pack_length: int = 262_144, segments: int = 1_000, cp: int = 16, repeats: int = 200) -> float:
    """Cut a row for one of `cp` ranks, index and four tensors; prints and returns its ratio to one index_select.

    The row has `segments` segments of random lengths that 2·cp divides. The yardstick is one `index_select` that reads
    and writes the bytes of the four tensors: int64 values, at the rank's positions in 3.5 rows. A second one takes the
    four tensors as records of 28 bytes with the rank's index itself, a quarter as many values.
    """
    torch.set_num_threads(1)
    batch = make_row(pack_length=pack_length, segments=segments, granularity=2 * cp)
    rank = cp // 3
    cut = shard_batch(batch, rank, cp)
    index = shard_index(batch.cu_seqlens, rank, cp)
    size = sum(getattr(cut, name).nbytes for name in ROW_TENSORS)
    copies = -(-size // (8 * len(index)))
    values = batch.input_ids.view(-1).repeat(copies)
    same_bytes = torch.cat([index + copy * pack_length for copy in range(copies)])[: size // 8]
    records = torch.zeros(pack_length, size // len(index), dtype=torch.uint8)
    measured = medians(
        {
            "one index_select of the same bytes": functools.partial(values.index_select, 0, same_bytes),
            "one index_select of records": functools.partial(records.index_select, 0, index),
            "the index": lambda: shard_index(batch.cu_seqlens, rank, cp, total_tokens=pack_length),
            "one rank's cut": lambda: shard_batch(batch, rank, cp),
        },
        repeats,
    )
    unit = measured["one index_select of the same bytes"]
    title = f"{pack_length:,} tokens in {segments:,} segments, cp {cp}: {size:,} bytes a rank, medians of {repeats}"
    table = Table(title=title)
    for heading in ("what", "µs of processor time", "ratio", "aim"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, seconds in measured.items():
        table.add_row(name, f"{seconds * 1e6:.0f}", f"{seconds / unit:.2f} ×", "≤ 2.5 ×" if "cut" in name else "")
    Console().print(table)
    return measured["one rank's cut"] / unit


def make_row(*, pack_length: int, segments: int, granularity: int, seed: int = 0) -> FlatBatch:
    """Return a row of random values in segments of random lengths, all multiples of `granularity`."""
    made = torch.Generator().manual_seed(seed)
    units = pack_length // granularity
    if pack_length % granularity or not 1 <= segments <= units:
        raise PackproofError(
            what=f"must be a multiple of {granularity} with room for {segments} segments, got {pack_length}",
            where="pack_length",
            fix="give a multiple of 2·cp that is long enough",
        )
    inner = (torch.randperm(units - 1, generator=made)[: segments - 1] + 1).sort().values
    cu_seqlens = torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([units])]) * granularity
    lengths = cu_seqlens.diff()
    return FlatBatch(
        input_ids=torch.randint(0, 131_072, (1, pack_length), generator=made),
        target_ids=torch.randint(0, 131_072, (1, pack_length), generator=made),
        token_mask=torch.randint(0, 2, (1, pack_length), generator=made).float(),
        position_ids=(torch.arange(pack_length) - cu_seqlens[:-1].repeat_interleave(lengths))[None],
        cu_seqlens=cu_seqlens.int(),
        max_seqlen=int(lengths.max()),
    )


def medians(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return median seconds of this thread's processor time. The contenders take turns, so that other load affects all equally."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 3):
        for name, action in actions.items():
            start = time.thread_time()
            action()
            if repeat >= 3:  # the first ones warm up
                times[name].append(time.thread_time() - start)
    return {name: statistics.median(each) for name, each in times.items()}


if __name__ == "__main__":
    import tyro

    tyro.cli(shards)
