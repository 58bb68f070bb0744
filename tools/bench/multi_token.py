"""Measures packed multi-token prediction under context parallelism: tables from the whole row against megatron-core's roll.

Processes on gloo over a file store, forked from one parent that has imported everything; each holds both sides' tensors equal
before the clock runs, and counts its messages.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed

from production.errors import PackproofError
from production.parallel.context_parallel import shard_batch
from production.parallel.multi_token import depth_tables
from production.rows.batch import FlatBatch
from tools.bench.shards import make_row

_NAMES = ("input_ids", "position_ids", "target_ids", "token_mask")
_PATIENCE_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One size of the context parallel group."""

    cp: int
    roll_seconds: float
    """megatron-core's roll: four tensors at each depth, slowest rank, median."""
    tables_seconds: float
    """All depths of all tensors from the whole row, cut; slowest rank, median."""
    roll_messages: int
    """Sent by all ranks together, for one row."""
    tables_messages: int


def multi_token(
    *,
    pack_length: int = 65_536,
    segment_tokens: int = 1_024,
    depths: int = 2,
    cp: tuple[int, ...] = (2, 4),
    repeats: int = 5,
) -> list[Measured]:
    """Shift ids, positions, labels and mask of one row to all depths; prints and returns what both sides take and send."""
    if pack_length % segment_tokens:
        raise PackproofError(
            what=f"must be a multiple of {segment_tokens}, the tokens of a segment, got {pack_length}",
            where="pack_length",
            fix="make it a multiple of segment_tokens",
        )
    import megatron.core.transformer.multi_token_prediction  # noqa: F401, PLC0415 - once, before the fork

    segments = pack_length // segment_tokens
    measured = [_world(size, pack_length, segment_tokens, depths, repeats) for size in cp]
    title = f"{segments} segments of {segment_tokens:,} tokens, {depths} depths, medians of {repeats}"
    table = Table(title=title)
    for heading in ("cp", "core's roll", "messages", "tables", "messages", "ratio", "aim"):
        table.add_column(heading, justify="right")
    for each in measured:
        table.add_row(
            str(each.cp),
            f"{each.roll_seconds * 1e3:.1f} ms",
            f"{each.roll_messages:,}",
            f"{each.tables_seconds * 1e3:.2f} ms",
            f"{each.tables_messages:,}",
            f"{each.roll_seconds / each.tables_seconds:.0f} ×",
            "≥ 40 ×, 0",
        )
    Console().print(table)
    return measured


def _world(size: int, pack_length: int, segment_tokens: int, depths: int, repeats: int) -> Measured:
    context = multiprocessing.get_context("fork")
    # Forked children must find no thread of a pool that the parent has lost.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="packproof-bench-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(
                target=_work,
                args=(rank, size, Path(folder) / "store", pack_length, segment_tokens, depths, repeats, pipes[rank][1]),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            answers = [_receive(pipe, rank) for rank, (pipe, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
    # A step waits for its slowest rank.
    roll, tables = (
        statistics.median(map(max, zip(*(answer[side] for answer in answers), strict=True))) for side in (0, 1)
    )
    return Measured(
        cp=size,
        roll_seconds=roll,
        tables_seconds=tables,
        roll_messages=sum(answer[2] for answer in answers),
        tables_messages=sum(answer[3] for answer in answers),
    )


def _receive(pipe: Connection, rank: int) -> Any:
    if not pipe.poll(_PATIENCE_SECONDS):
        raise TimeoutError(f"rank {rank} has not answered in {_PATIENCE_SECONDS} s")
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(f"rank {rank} failed:\n{answer}")  # noqa: TRY004 - the text is a traceback
    return answer


def _work(
    rank: int,
    size: int,
    store: Path,
    pack_length: int,
    segment_tokens: int,
    depths: int,
    repeats: int,
    pipe: Connection,
) -> None:
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        pipe.send(_measure(rank, size, pack_length, segment_tokens, depths, repeats))
        distributed.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        pipe.send(traceback.format_exc())
    sys.stdout.flush()
    # megatron-core's and gloo's threads need no goodbye.
    os._exit(0)


def _measure(
    rank: int, size: int, pack_length: int, segment_tokens: int, depths: int, repeats: int
) -> tuple[list[float], list[float], int, int]:
    from megatron.core.packed_seq_params import PackedSeqParams  # noqa: PLC0415 - imported before the fork

    row = make_row(pack_length=pack_length, segments=1, granularity=pack_length)
    row = FlatBatch(**vars(row) | {"cu_seqlens": torch.arange(0, pack_length + 1, segment_tokens, dtype=torch.int32)})
    cut = shard_batch(row, rank, size)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=row.cu_seqlens)
    sent = _count_messages()

    rolled = _roll(cut, params, depths)
    roll_messages = len(sent)
    sent.clear()
    tables = depth_tables(row, depths, rank=rank, size=size)
    tables_messages = len(sent)
    for name in _NAMES:
        if not torch.equal(getattr(tables, name)[1:], torch.stack(rolled[name])):
            raise AssertionError(f"rank {rank}: {name} of the tables and of megatron-core's roll differ")

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        distributed.barrier()
        start = time.perf_counter()
        _roll(cut, params, depths)
        times[0].append(time.perf_counter() - start)
        distributed.barrier()
        start = time.perf_counter()
        depth_tables(row, depths, rank=rank, size=size)
        times[1].append(time.perf_counter() - start)
    return (*times, roll_messages, tables_messages)


def _roll(cut: FlatBatch, params: Any, depths: int) -> dict[str, list[torch.Tensor]]:
    from megatron.core.transformer.multi_token_prediction import roll_tensor  # noqa: PLC0415

    rolled: dict[str, list[torch.Tensor]] = {}
    for name in _NAMES:
        tensor, rolled[name] = getattr(cut, name), []
        for _ in range(depths):
            tensor, _sum = roll_tensor(tensor, -1, -1, distributed.group.WORLD, params)
            rolled[name].append(tensor)
    return rolled


def _count_messages() -> list[None]:
    """Return a list that grows by one with each message, in this process only, which ends soon."""
    sent: list[None] = []
    for name in ("isend", "send", "all_gather", "all_to_all_single", "batch_isend_irecv", "broadcast", "all_reduce"):
        call = getattr(distributed, name)

        def counted(*args: Any, _call: Any = call, **kwargs: Any) -> Any:
            sent.append(None)
            return _call(*args, **kwargs)

        setattr(distributed, name, counted)
    return sent


if __name__ == "__main__":
    import tyro

    tyro.cli(multi_token)
