"""Summarize a run from its file of JSON lines (R-RECORD-2): one table for the terminal, one plot of its losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from production.errors import PackproofError
from production.training.metrics.loggers import FILE, Record, Value, read_records
from production.training.metrics.plot import Line, draw
from production.training.metrics.progress import compact, duration
from production.training.metrics.step_numbers import DIMENSIONS

COLOURS = ("#316dca", "#8250df", "#0b8a6f", "#b3591e")
VALIDATION_COLOUR = "#c2410c"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Holds a run's numbers. Steps that ran twice, around a resumption, count as they ran last."""

    steps: int
    """The last step."""
    losses: Sequence[tuple[int, float]]
    """(step, loss), the steps rising."""
    untrained: Sequence[int]
    """Steps in which no token was trained, which have no loss."""
    mtp_losses: Sequence[Sequence[tuple[int, float]]]
    """The losses of each depth, as Megatron-LM reports them."""
    mtp_token_losses: Sequence[Sequence[tuple[int, float]]]
    """Losses by token, which shares without targets do not dilute; empty where the records lack them."""
    mtp_empty_shares: Sequence[float]
    """Mean share of each depth's shares without targets, 0 to 1; 0 where the records do not say."""
    validation_losses: Sequence[tuple[int, float]]
    """Validation losses as (step, loss)."""
    not_finite: Sequence[int]
    """Steps whose loss is NaN or infinite."""
    median_step_seconds: float
    """Median seconds of a step, without the first step after each start, which builds what the others use."""
    seconds: float
    """Seconds of all steps together."""
    tokens_per_second: float
    """Positions over those seconds."""
    trained_tokens: int
    """Trained tokens of all steps together."""
    padding_share: float
    """Share of padding in all positions, 0 to 1."""
    data_wait_share: float
    """Share of the steps' time spent waiting for rows."""
    rows_truncated: int
    """Truncated rows of all steps together."""
    conversations_dropped: int
    """Dropped conversations of all steps together."""
    conversations_masked_out: int
    """Online conversations that were too long, of all steps together."""
    control_tokens: int
    """Control tokens that stood in contents as text, of all steps together."""
    labels_masked_as_padding: int
    """Labels of contents that did not count, since they are the pad token's id."""
    prompt_messages_trained: int
    """Labels of contents that did not count because they are the pad token's id, of all steps together."""
    notes: Sequence[str]
    """Notes of the run's first record on all its rows."""
    tflops_per_second: float | None
    """Model TFLOP/s per device, median over steps; None where not measured, as the next."""
    mfu: float | None
    """MFU, median over steps."""
    memory_mebibytes: float
    """Memory of the step that used the most."""
    memory_rank: int | None
    """Rank of the world that used the most memory; None where the records do not say, as the next three."""
    slowest_rank: int | None
    """Rank of the world that was slowest in most steps."""
    slowest_rank_place: str
    """Coordinates of the slowest rank, such as `tp 1, cp 0, dp 3, pp 0`."""
    slowest_rank_steps: int
    """Steps in which that rank was slowest."""
    slowest_rank_behind_seconds: float
    """Median of that rank's seconds above the mean of all ranks in those steps."""
    consumed_samples: int
    """Rows since the beginning of the job."""
    starts: int
    """Number of starts and resumptions."""
    ended: str
    """Reason of the run's end in the job's words; empty where the run did not say."""


def summarize(records: Iterable[Record]) -> Summary | None:
    """Return the summary of a run's records; None where no step was finished."""
    steps: dict[int, dict[str, Value]] = {}
    validations: dict[int, float] = {}
    firsts: list[int] = []
    ended = ""
    notes: list[str] = []
    for record in records:
        if record.kind == "run":
            firsts.append(record.step + 1)
            notes = [str(value) for name, value in record.values.items() if name.startswith("note_")]
            ended = ""
            # What was measured beyond the checkpoint that the run went on from is run again.
            steps = {step: values for step, values in steps.items() if step <= record.step}
            validations = {step: loss for step, loss in validations.items() if step <= record.step}
        elif record.kind == "step":
            steps[record.step] = dict(record.values)
        elif record.kind == "validation" and "validation_loss" in record.values:
            validations[record.step] = float(record.values["validation_loss"])
        elif record.kind == "end":
            ended = ": ".join(str(record.values[name]) for name in ("reason", "why") if name in record.values)
    return _summary(steps, validations, firsts, ended, notes) if steps else None


def show(summary: Summary, console: Console, *, folder: Path) -> None:
    """Return the closing table."""
    table = Table(title="summary of the run", title_justify="left", show_header=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value")
    for name, value in _lines(summary):
        table.add_row(name, value)
    console.print(table)
    if summary.not_finite:
        console.print(f"[bold red]no finite loss at steps {_some(summary.not_finite)}[/]", highlight=False)
    console.print(f"numbers: {folder / FILE}", style="dim", highlight=False, soft_wrap=True)


def write_picture(summary: Summary, path: Path) -> None:
    """Write the losses as a self-contained SVG file."""
    lines = [Line(name="loss", points=summary.losses, colour=COLOURS[0], dots=len(summary.losses) <= 40)]
    for depth, losses in enumerate(summary.mtp_losses, 1):
        lines.append(
            Line(name=f"mtp {depth} loss", points=losses, colour=COLOURS[depth % len(COLOURS)], width=1.2, dashes="5 3")
        )
    if summary.validation_losses:
        lines.append(
            Line(name="validation loss", points=summary.validation_losses, colour=VALIDATION_COLOUR, dots=True)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(lines, title="loss", x_title="step", y_title="loss"), encoding="utf-8")


def close_run(folder: Path, console: Console) -> Summary | None:
    """Read the folder's `metrics.jsonl`, print the table and write `loss.svg` beside it; a fault here is printed and
    does not fail the run.
    """
    summary = None
    try:
        summary = summarize(read_records(folder / FILE))
        if summary is None:
            console.print("no step was finished")
            return None
        show(summary, console, folder=folder)
        write_picture(summary, folder / "loss.svg")
    except (OSError, PackproofError) as error:
        console.print(f"no summary or picture: {error}", highlight=False, markup=False)
        return summary
    console.print(f"picture: {folder / 'loss.svg'}", style="dim", highlight=False, soft_wrap=True)
    return summary


def _summary(
    steps: dict[int, dict[str, Value]],
    validations: dict[int, float],
    firsts: Sequence[int],
    ended: str,
    notes: Sequence[str],
) -> Summary:
    order = sorted(steps)

    def of(name: str) -> list[float]:
        return [float(steps[step][name]) for step in order if name in steps[step]]

    steady = [float(steps[step]["step_seconds"]) for step in order if step not in firsts]
    seconds, tokens = sum(of("step_seconds")), sum(of("tokens"))
    padding = sum(share * count for share, count in zip(of("padding_share"), of("tokens"), strict=True))

    def points(name: str) -> list[tuple[int, float]]:
        # An all-masked step has no loss; records of before said 0, with `all_masked` beside it.
        known = [step for step in order if name in steps[step] and not steps[step].get("all_masked")]
        return [(step, float(steps[step][name])) for step in known]

    losses = points("loss")
    depths = max(
        sum(name.startswith("mtp_") and name.endswith("_loss") for name in values) for values in steps.values()
    )
    return Summary(
        steps=order[-1],
        losses=losses,
        untrained=[step for step in order if steps[step].get("all_masked")],
        mtp_losses=[points(f"mtp_{depth}_loss") for depth in range(1, depths + 1)],
        mtp_token_losses=[points(f"mtp_{depth}_loss_by_tokens") for depth in range(1, depths + 1)],
        mtp_empty_shares=[
            statistics.fmean([share for _, share in points(f"mtp_{depth}_empty_shares")] or [0.0])
            for depth in range(1, depths + 1)
        ],
        validation_losses=sorted(validations.items()),
        not_finite=[step for step, loss in losses if not math.isfinite(loss)],
        median_step_seconds=statistics.median(steady or of("step_seconds")),
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        trained_tokens=int(sum(of("trained_tokens"))),
        padding_share=padding / tokens if tokens else 0.0,
        data_wait_share=sum(of("data_wait_seconds")) / seconds if seconds else 0.0,
        rows_truncated=int(sum(of("rows_truncated"))),
        conversations_dropped=int(sum(of("conversations_dropped"))),
        conversations_masked_out=int(sum(of("conversations_masked_out"))),
        control_tokens=int(sum(of("control_tokens"))),
        labels_masked_as_padding=int(sum(of("labels_masked_as_padding"))),
        prompt_messages_trained=int(sum(of("prompt_messages_trained"))),
        notes=notes,
        tflops_per_second=statistics.median(found) if (found := of("tflops_per_second")) else None,
        mfu=statistics.median(found) if (found := of("mfu")) else None,
        memory_mebibytes=max(of("memory_mebibytes"), default=0.0),
        memory_rank=_fullest(steps),
        **_slowest(steps),
        consumed_samples=int(max(of("consumed_samples"), default=0)),
        starts=max(1, len(firsts)),
        ended=ended,
    )


def _lines(summary: Summary) -> list[tuple[str, str]]:
    lines = [("steps", f"{summary.steps:,}" + (f", started {summary.starts} times" if summary.starts > 1 else ""))]
    if summary.ended:
        lines.append(("ended", summary.ended))
    lines.append(("loss", _first_and_last(summary.losses)))
    if summary.untrained:
        lines.append(("nothing trained", f"at {len(summary.untrained):,} steps: {_some(summary.untrained)}"))
    for depth, losses in enumerate(summary.mtp_losses, 1):
        lines.append((f"mtp {depth} loss", _first_and_last(losses) + _dilution(summary, depth)))
    if summary.validation_losses:
        best = min(summary.validation_losses, key=lambda pair: (not math.isfinite(pair[1]), pair[1]))
        at, loss = summary.validation_losses[-1]
        lines.append(("validation loss", f"{loss:.4f} at step {at}, best {best[1]:.4f} at step {best[0]}"))
    lines += [
        ("time", f"{duration(summary.seconds)}, {duration(summary.median_step_seconds)} a step (median)"),
        ("waiting for rows", f"{summary.data_wait_share:.2%} of the time"),
        ("tokens", f"{compact(summary.tokens_per_second)} a second, {summary.trained_tokens:,} trained on"),
        ("padding", f"{summary.padding_share:.2%} of the positions"),
        ("rows", f"{summary.consumed_samples:,}, {summary.rows_truncated:,} cut within a conversation"),
        ("conversations dropped", f"{summary.conversations_dropped:,}"),
        *_masked_out(summary),
        ("memory", f"{summary.memory_mebibytes:,.0f} MiB a rank at most" + _of_rank(summary.memory_rank)),
    ]
    if summary.control_tokens:
        lines.append(("control tokens in contents", f"{summary.control_tokens:,}"))
    if summary.labels_masked_as_padding:
        lines.append(
            ("labels masked as padding", f"{summary.labels_masked_as_padding:,}, since contents hold the pad token")
        )
    if summary.prompt_messages_trained:
        count = f"{summary.prompt_messages_trained:,} messages of the system, users and tools"
        lines.append(("prompts trained", f"{count}, since the format masks none"))
    lines += [("note", note) for note in summary.notes]
    if summary.slowest_rank_behind_seconds > 0:  # else there is one rank
        where = f"{summary.slowest_rank} ({summary.slowest_rank_place}) at {summary.slowest_rank_steps:,} steps"
        behind = f"{duration(summary.slowest_rank_behind_seconds)} behind the mean (median)"
        lines.append(("slowest rank", f"{where}, {behind}"))
    if summary.tflops_per_second is not None:
        of_peak = "the device's peak is not known: no MFU" if summary.mfu is None else f"MFU {summary.mfu:.1%}"
        lines.append(("TFLOP/s a device", f"{summary.tflops_per_second:.3g}, {of_peak}"))
    return lines


def _first_and_last(losses: Sequence[tuple[int, float]]) -> str:
    if not losses:
        return "none: no step trained a token"
    (first, loss), (last, at_end) = losses[0], losses[-1]
    return f"{loss:.4f} at step {first}, {at_end:.4f} at step {last}"


def _dilution(summary: Summary, depth: int) -> str:
    """Return the note on a depth whose number counts shares without targets as 0."""
    share, by_token = summary.mtp_empty_shares[depth - 1], summary.mtp_token_losses[depth - 1]
    if not share or not by_token:
        return ""
    return f"; diluted: {share:.1%} of its shares have no target and count as 0; by token {_first_and_last(by_token)}"


def _masked_out(summary: Summary) -> list[tuple[str, str]]:
    """Return the line on conversations that were too long and trained nothing; empty without such conversations."""
    count = summary.conversations_masked_out
    return [("too long", f"{count:,} conversations trained nothing (data.on_long_conversation)")] if count else []


def _fullest(steps: dict[int, dict[str, Value]]) -> int | None:
    known = [values for values in steps.values() if "memory_rank" in values]
    return int(max(known, key=lambda values: float(values["memory_mebibytes"]))["memory_rank"]) if known else None


def _slowest(steps: dict[int, dict[str, Value]]) -> dict[str, Any]:
    """Return the fields of `Summary` on the slowest rank."""
    by_rank: dict[int, list[dict[str, Value]]] = {}
    for values in steps.values():
        if "slowest_rank" in values:
            by_rank.setdefault(int(values["slowest_rank"]), []).append(values)
    rank = max(by_rank, key=lambda each: len(by_rank[each]), default=None)
    found = [] if rank is None else by_rank[rank]
    places = [
        f"{name} {found[-1][key]}" for name in DIMENSIONS if found and (key := f"slowest_rank_{name}") in found[-1]
    ]
    return {
        "slowest_rank": rank,
        "slowest_rank_place": ", ".join(places),
        "slowest_rank_steps": len(found),
        "slowest_rank_behind_seconds": statistics.median(
            [float(values["slowest_rank_behind_seconds"]) for values in found] or [0.0]
        ),
    }


def _of_rank(rank: int | None) -> str:
    return "" if rank is None else f", on rank {rank}"


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:8])) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
