"""Measure attention within segments against torch's own SDPA called once per segment, forward and backward, in one run.

Also measure the memory of one long segment, in a process of its own for each length: the memory must grow linearly with the length.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from rich.console import Console
from rich.table import Table

from production.errors import PackproofError
from production.model.device.attention_share import Share, attend, runs_of
from tools.bench.shards import make_row

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_PATIENCE_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One row: medians of seconds of one thread's processor time, taken in turns."""

    segments: int
    sdpa_forward: float
    sdpa: float
    """Forward and backward."""
    ours_forward: float
    ours: float

    @property
    def ratio(self) -> float:
        """Rate of packproof over the rate of SDPA, forward and backward."""
        return self.ours / self.sdpa


def attention(
    *,
    pack_length: int = 16_384,
    segments: tuple[int, ...] = (4, 32, 256),
    heads: int = 8,
    key_value_heads: int = 2,
    head_dim: int = 64,
    dtype: str = "float32",
    memory_lengths: tuple[int, ...] = (8_192, 16_384, 32_768),
    repeats: int = 5,
) -> list[Timed]:
    """Attend within segments of random lengths, and of equal ones; prints and returns what both ways take.

    Both sides' outputs and gradients are held together before the clock runs. `memory_lengths` are those of the rows of
    one segment whose memory is measured; give none to leave it out.
    """
    if dtype not in _DTYPES:
        raise PackproofError(
            what=f"must be one of {', '.join(_DTYPES)}, got {dtype!r}",
            where="dtype",
            fix=f"choose one of {', '.join(_DTYPES)}",
        )
    shape = (heads, key_value_heads, head_dim)
    # First, while this process has done no work that a fork could not take along.
    memory = [_memory(length, shape, _DTYPES[dtype]) for length in memory_lengths]
    torch.set_num_threads(1)
    rows = []
    for number in segments:
        even = torch.linspace(0, pack_length, number + 1).round().int().tolist()
        uneven = make_row(pack_length=pack_length, segments=number, granularity=1).cu_seqlens.tolist()
        rows += [
            ("equal", _time(even, shape, _DTYPES[dtype], repeats)),
            ("random", _time(uneven, shape, _DTYPES[dtype], repeats)),
        ]
    title = f"{pack_length:,} tokens, {heads} heads on {key_value_heads} of {head_dim}, {dtype}, forward and both ways, medians of {repeats}"
    table = Table(title=title)
    for heading in ("segments", "lengths", "SDPA", "ours", "SDPA, both", "ours, both", "ratio", "aim"):
        table.add_column(heading, justify="right")
    for lengths, each in rows:
        times = (each.sdpa_forward, each.ours_forward, each.sdpa, each.ours)
        table.add_row(
            str(each.segments),
            lengths,
            *(f"{1e3 * seconds:.1f} ms" for seconds in times),
            f"{each.ratio:.2f} ×",
            "≤ 1.3 ×",
        )
    Console().print(table)
    if memory:
        _print_memory(memory_lengths, memory)
    return [each for _, each in rows]


def _print_memory(lengths: Sequence[int], memory: Sequence[int]) -> None:
    table = Table(title="memory of one segment, forward and backward, beyond the inputs")
    for heading in ("tokens", "peak", "bytes a token", "one mask of booleans would be"):
        table.add_column(heading, justify="right")
    for length, taken in zip(lengths, memory, strict=True):
        table.add_row(
            f"{length:,}", f"{taken / 2**20:.0f} MiB", f"{taken / length:,.0f}", f"{length**2 / 2**20:,.0f} MiB"
        )
    Console().print(table)


def _time(boundaries: list[int], shape: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> Timed:
    query, key, value, upper = _inputs(boundaries[-1], shape, dtype)
    leaves = [each.requires_grad_() for each in (query, key, value)]
    scale = shape[2] ** -0.5
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "sdpa": lambda: _sdpa(leaves, boundaries, scale),
        "ours": lambda: _ours(leaves, boundaries, scale),
    }
    _hold_together([_found(side, leaves, upper) for side in sides.values()])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.thread_time()
            output = side()
            middle = time.thread_time()
            torch.autograd.backward(output, upper)
            times[name].append((middle - start, time.thread_time() - start))
    forward, both = (
        {name: statistics.median(pair[which] for pair in pairs) for name, pairs in times.items()} for which in (0, 1)
    )
    return Timed(
        segments=len(boundaries) - 1,
        sdpa_forward=forward["sdpa"],
        sdpa=both["sdpa"],
        ours_forward=forward["ours"],
        ours=both["ours"],
    )


def _found(side: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], upper: torch.Tensor) -> list[torch.Tensor]:
    output = side()
    return [output.detach(), *torch.autograd.grad(output, leaves, upper)]


def _hold_together(both: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check that both compute the same: kernels and order are the same, so only half precision may differ, in the last bit of a sum."""
    for name, theirs, ours in zip(("output", "query", "key", "value"), *both, strict=True):
        off = float((theirs.double() - ours.double()).norm() / theirs.double().norm())
        if not off <= torch.finfo(ours.dtype).eps:
            raise AssertionError(f"{name} differs by {off:.1e} of its norm between SDPA and attention within segments")


def _ours(inputs: Sequence[torch.Tensor], boundaries: list[int], scale: float) -> torch.Tensor:
    query, key, value = inputs
    return attend(query, key, value, Share(runs=runs_of(boundaries), exchange=None, rank=0, size=1), scale=scale)


def _sdpa(inputs: Sequence[torch.Tensor], boundaries: list[int], scale: float) -> torch.Tensor:
    lengths = [end - start for start, end in itertools.pairwise(boundaries)]
    # Split, not sliced: each slice's gradient would be as long as the row.
    parts = zip(*(torch.split(each, lengths) for each in inputs), strict=True)
    found = []
    for part in parts:
        query, key, value = (each.transpose(0, 1)[None] for each in part)
        found.append(
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        )
    return torch.cat([each[0].transpose(0, 1) for each in found])


def _inputs(total: int, shape: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    heads, key_value_heads, width = shape
    made = torch.Generator().manual_seed(0)
    counts = (heads, key_value_heads, key_value_heads, heads)
    return [torch.randn(total, count, width, generator=made).to(dtype) for count in counts]


def _memory(length: int, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Return the peak bytes that one segment's attention uses beyond its inputs, forward and backward, in a fresh process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_memory, args=(length, shape, dtype, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(_PATIENCE_SECONDS):
            raise TimeoutError(f"attention over {length:,} tokens has not ended in {_PATIENCE_SECONDS} s")
        taken: int = receiver.recv()
    finally:
        process.kill()
        process.join()
    return taken


def _measure_memory(length: int, shape: tuple[int, int, int], dtype: torch.dtype, pipe: Connection) -> None:
    torch.set_num_threads(1)
    # Once at a small size, so that what is set up at first use does not count.
    for size in (64, length):
        query, key, value, upper = _inputs(size, shape, dtype)
        before = _peak()
        leaves = [each.requires_grad_() for each in (query, key, value)]
        torch.autograd.backward(_ours(leaves, [0, size], 0.1), upper)
    pipe.send(_peak() - before)


def _peak() -> int:
    """Return the peak memory of this process in bytes."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024
