"""The tables of a walk, for a terminal or a log."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.simulate.costs import Costs
from tools.simulate.walk import Walk


def show(found: Walk, costs: Costs, console: Console) -> None:
    """Print verdict, load and messages."""
    job = found.job
    console.print(
        f"tp {job.tp} · cp {job.cp} · ep {job.ep} · dp {job.dp}{f' · pp {job.pp}' * (job.pp > 1)}: {job.ranks:,} ranks, {job.rows} rows of {job.pack_length:,} tokens, "
        f"{int(found.segments.sum()):,} segments, layout {job.layout}",
        highlight=False,
    )
    if found.faults:
        console.print(f"[bold red]faults ({len(found.faults)} told):[/]")
        for fault in found.faults:
            console.print(f"  {escape(fault)}", highlight=False, soft_wrap=True)
    else:
        held = "once" if job.sequence_parallel or job.tp == 1 else "once per tensor-parallel rank"
        depths = f" at depths 0 to {job.depths}" if job.depths else ""
        console.print(
            f"[green]every token is owned exactly {held}; labels, mask and positions stay with their tokens{depths}[/]"
        )
    console.print(_load(found))
    console.print(_messages(found, costs))


def _load(found: Walk) -> Table:
    table = Table(title="load by data-parallel rank (attention work: visible keys of the owned queries, one layer)")
    for heading in ("dp", "rows", "segments", "tokens a rank", "work a rank", "of the mean", "slowest of cp, by row"):
        table.add_column(heading, justify="right")
    per_rank = found.work.sum(dim=1).double()  # [dp, cp]
    mean = float(per_rank.mean())
    # Context-parallel ranks wait for each other in every layer of every row.
    slowest = found.work.amax(dim=2).double() / found.work.double().mean(dim=2).clamp(min=1)
    tokens = found.tokens.sum(dim=1)  # [dp, cp, tp]
    for rank in range(found.job.dp):
        table.add_row(
            str(rank),
            str(found.tokens.shape[1]),
            f"{int(found.segments[rank].sum()):,}",
            span(int(tokens[rank].min()), int(tokens[rank].max())),
            span(int(per_rank[rank].min()), int(per_rank[rank].max())),
            f"{float(per_rank[rank].mean()) / mean:.3f}",
            f"{float(slowest[rank].max()):.3f} ×",
        )
    return table


def _messages(found: Walk, costs: Costs) -> Table:
    table = Table(title="sent in the forward pass of one global batch")
    for heading in ("what", "messages", "bytes", "how it is counted"):
        table.add_column(heading, justify="left" if heading in ("what", "how it is counted") else "right")
    job = found.job
    table.add_row(
        "MTP, megatron-core's roll",
        f"{costs.roll_messages:,}",
        f"{costs.roll_bytes:,}",
        f"2·N·(cp-1) a roll, 4 rolls a depth, × tp; up to {costs.roll_messages_of_a_row:,} a row",
    )
    table.add_row("MTP, tables of the whole row", str(costs.table_messages), "0", "taken before the cut")
    table.add_row(
        "attention, K and V",
        "",
        f"{costs.attention_bytes_in_all:,}",
        f"a layer; a rank receives {costs.attention_bytes:,} a row",
    )
    if job.ep > 1:
        table.add_row(
            "experts, dispatch",
            "",
            f"{costs.expert_bytes * (job.ranks // job.pp) * (job.rows // job.dp):,}",
            f"a layer, if spread evenly; a rank sends {costs.expert_bytes:,} a row",
        )
    if job.pp > 1:
        table.add_row(
            "stages, hidden states", "", f"{costs.stage_bytes:,}", f"{job.pp - 1} times a row, from stage to stage"
        )
    return table


def span(low: int, high: int) -> str:
    """Return one number, or the range between the smallest and the largest."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
