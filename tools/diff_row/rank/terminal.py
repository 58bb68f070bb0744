"""Print the trace of a row to a rank: the rank's coordinates, its positions, every step with its verdict, the first difference."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.console import Console
from rich.text import Text

from tools.diff_row.rank.compare_dump import FedFindings
from tools.diff_row.rank.ownership import owned_runs
from tools.diff_row.rank.position import followed_lines
from tools.diff_row.rank.steps import ABOUT, RankFindings, Refused, Step, StepDifference
from tools.diff_row.render.columns import Column, draw
from tools.diff_row.render.detail_table import closeup
from tools.diff_row.render.terminal import flaws, header, refusals
from tools.diff_row.tokens import fit, visible

MOST_SEGMENTS = 4
"""Largest number of segments whose runs are printed."""
MOST_LINES = 10
"""Largest number of tensors of the first differing step whose cause is printed."""
MOST_FED = 12
"""Microbatches of a dump that are listed."""


def show_rank(findings: RankFindings, console: Console, *, page: str | None = None) -> None:
    """Print the screen."""
    for part in (_head, _place, _steps, _refused, _first, followed_lines):
        lines = list(part(findings, console.width))
        for line in lines:
            console.print(line, no_wrap=False, soft_wrap=False, highlight=False)
        if lines:
            console.print()
    line = Text("next  ", "dim")
    line.append(
        f"all tokens of each step: {page}" if page else "all tokens of each step: the same command with --html FILE"
    )
    console.print(line, highlight=False)


def show_fed(fed: FedFindings, console: Console, *, page: str | None = None) -> None:
    """Print what each rank fed, then the screen of the one that is shown."""
    differing = [each for each in fed.looked_at if not each.equal]
    line = Text("EQUAL " if fed.equal else "DIFFERENT ", "bold green" if fed.equal else "bold red")
    count = len(fed.looked_at)
    line.append(f"{visible(fed.folder)}: {count:,} microbatch{'es' if count > 1 else ''} of ", "")
    ranks = len({each.rank for each in fed.looked_at})
    line.append(f"{ranks:,} rank{'s' if ranks > 1 else ''} against the reference")
    line.append("" if fed.equal else f", {len(differing):,} differ")
    console.print(line, highlight=False)
    rest = [each for each in fed.looked_at if each.equal]
    listed = sorted(
        [*differing[:MOST_FED], *rest[: max(0, MOST_FED - len(differing))]], key=lambda e: (e.rank, e.microbatch)
    )
    columns = [
        Column(title="rank", right=True),
        Column(title="microbatch", right=True),
        Column(title="row"),
        Column(title="first difference"),
    ]
    lines: list[list[Text] | str] = [
        [
            Text(f"{'▶ ' if each is fed.shown_as else ''}{each.rank}", "bold" if each is fed.shown_as else ""),
            Text(str(each.microbatch)),
            Text(f"{visible(each.file)} {each.told}"),
            Text(each.first or "equal", "bold red" if each.first else "green"),
        ]
        for each in listed
    ]
    if len(fed.looked_at) > len(listed):
        lines.append(f"… {len(fed.looked_at) - len(listed):,} more")
    for each in draw(columns, lines, console.width):
        console.print(each, highlight=False)
    console.print()
    show_rank(fed.shown, console, page=page)


def _head(findings: RankFindings, width: int) -> Iterator[Text]:
    yield from header(findings.row, width)
    others = {side: who for side, who in findings.ways.items() if side not in (who, "megatron_lm", "fed")}
    for side, who in others.items():
        yield Text(f"       {visible(side)} builds the row; from there on it goes the {who}'s way", "dim")


def _place(findings: RankFindings, width: int) -> Iterator[Text]:
    place = findings.place
    line = Text("rank ", "bold").append(f"{place.rank}", "bold").append(f" of {place.ranks}   ")
    dimensions = (
        ("tp", place.tensor_rank, place.tp),
        ("cp", place.context_rank, place.cp),
        ("dp", place.data_rank, place.dp),
        ("pp", place.pipeline_rank, place.pp),
    )
    for number, (name, rank, size) in enumerate(dimensions):
        line.append(" · " if number else "", "dim").append(f"{name} ").append(f"{rank}", "bold cyan")
        line.append(f" of {size}", "" if size > 1 else "dim")
    yield line.append("   (tp counts fastest, then cp, dp, pp)", "dim")
    yield Text("pp    ", "dim").append(place.stage, "")
    if place.pp > 1:
        yield Text(
            "      every stage is given the same microbatch, share and boundaries; nothing is sent for it", "dim"
        )
    if findings.depths and not place.is_last_stage:
        yield Text("      depths are made on the last stage only (here they are shown as it has them)", "dim")
    if place.ranks > 1:
        yield Text("same  ", "dim").append(place.same_data)
    for note in findings.notes:
        yield Text("note  ", "yellow").append(note, "")
    yield from _owned(findings, width)


def _owned(findings: RankFindings, width: int) -> Iterator[Text]:
    share = findings.share
    if share is None or share.origin is None:
        return
    total = findings.row.length
    line = Text("owns  ", "dim").append(f"{len(share.origin):,} of {total:,} positions", "bold")
    if findings.place.cp > 1:
        if findings.layout == "zigzag":
            chunks = 2 * findings.place.cp
            line.append(
                f": chunks {findings.place.context_rank} and {chunks - 1 - findings.place.context_rank} of the {chunks} of each segment"
            )
        else:
            line.append(f": one run of the row ({findings.layout})")
    yield line
    columns = max(20, min(width - 8, 96))
    yield from _strip(findings, columns)
    segments = owned_runs(findings)
    for each in segments[:MOST_SEGMENTS] if findings.place.cp > 1 else ():
        runs = " then ".join(f"{start:,}..{end:,}" for start, end in each.runs) or "nothing"
        yield (
            Text(f"      segment {each.number}  ", "dim")
            .append(f"{each.start:,}..{each.end:,}")
            .append("  owns ", "dim")
            .append(runs)
        )
    if len(segments) > MOST_SEGMENTS and findings.place.cp > 1:
        yield Text(f"      … {len(segments) - MOST_SEGMENTS:,} segments more", "dim")


def _strip(findings: RankFindings, columns: int) -> Iterator[Text]:
    """Draw the row from left to right: this rank's positions are full, and the positions of its tp slice bright."""
    share, total = findings.share, findings.row.length
    assert share is not None
    assert share.origin is not None
    slices = [step.origin for step in findings.steps if step.name == "slice" and step.origin is not None]
    held = slices[0] if slices else share.origin
    if findings.place.cp == 1 and len(held) == total:
        return
    columns = min(columns, total)
    owned, sliced, all_of = [0] * columns, [0] * columns, [0] * columns
    for counts, positions in ((owned, share.origin), (sliced, held)):
        for column in (positions * columns // total).tolist():
            counts[column] += 1
    for column in (torch.arange(total) * columns // total).tolist():
        all_of[column] += 1
    ends = {each.end * columns // total for each in owned_runs(findings)[:-1]}
    line = Text("      ")
    for column in range(columns):
        full = owned[column] * 2 > all_of[column]
        style = "cyan" if sliced[column] * 2 > all_of[column] else "blue" if full else "dim"
        mark = "█" if style == "cyan" else "▓" if full else "▒" if owned[column] else "│" if column in ends else "·"
        line.append(mark, "bold " + style if column in ends else style)
    yield line
    if len(held) < len(share.origin):
        yield Text(
            f"      █ held by tp {findings.place.tensor_rank} after embedding  ▓ by other tp ranks  · other cp ranks  │ boundary",
            "dim",
        )
    else:
        yield Text("      █ owned   ▒ in part   · other cp ranks   │ boundary", "dim")


def _steps(findings: RankFindings, width: int) -> Iterator[Text]:
    names = [side.name for side in findings.row.sides]
    letters = findings.row.letters
    first = findings.first
    columns = [Column(title="step"), Column(title="holds")]
    columns += [Column(title=letters[name]) for name in names]
    columns += [Column(title="what it is")]
    conversations = findings.row.map.conversations
    messages, tokens = sum(len(each.roles) for each in conversations), sum(each.tokens or 0 for each in conversations)
    lines: list[list[Text] | str] = []
    if messages:
        blank = [Text("") for _ in names]
        lines.append(
            [Text("messages"), Text(f"{messages:,}"), *blank, Text(f"of {len(conversations):,} conversations", "dim")]
        )
        lines.append([Text("tokens"), Text(f"{tokens:,}"), *blank, Text("rendered and encoded, padding apart", "dim")])
    begun = next((n for n, step in enumerate(findings.steps) if step is first), len(findings.steps))
    for number, step in enumerate(findings.steps):
        marks = [_mark(step, name, names[0], after=number > begun) for name in names]
        told = step.note or ABOUT[step.name][0]
        mark = "▶ " if step is first else ""
        lines.append(
            [
                Text(mark + step.label, "bold red" if step is first else "bold"),
                Text(_holds(step)),
                *marks,
                Text(told, "dim"),
            ]
        )
    used = sum(
        column.needed([line[n] for line in lines if not isinstance(line, str)]) + 2
        for n, column in enumerate(columns[:-1])
    )
    for line in lines:
        if not isinstance(line, str):
            line[-1] = Text(fit(line[-1].plain, max(10, min(width - used - 3, len(line[-1].plain)))), "dim")
    yield from draw(columns, lines, width)


def _mark(step: Step, name: str, base: str, *, after: bool) -> Text:
    has = step.sides.get(name)
    if has is None:
        return Text("–", "dim")
    if isinstance(has, Refused):
        return Text("refused", "bold yellow") if has.kind is not None else Text("–", "dim")
    found = [each for each in step.differences if each.right == name]
    if found:
        return Text(f"≠ {sum(each.count for each in found):,}", "red" if after else "bold red")
    return Text("·" if name == base else "=", "green")


def _holds(step: Step) -> str:
    has = next((has for has in step.sides.values() if not isinstance(has, Refused)), None)
    if has is None:
        return "–"
    tensor = has.get("input_ids", next(iter(has.values())))
    return "[" + ", ".join(f"{size:,}" for size in tensor.shape) + "]"


def _refused(findings: RankFindings, width: int) -> Iterator[Text]:
    yield from refusals(findings.row, width)
    told: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for step in findings.steps:
        for side, has in step.sides.items():
            if isinstance(has, Refused) and has.kind is not None and step.name != "row":
                told.setdefault((step.name, has.kind), (has.message, []))[1].append(side)
    for (step_name, kind), (message, sides) in told.items():
        line = Text("REFUSED ", "bold yellow")
        line.append(f"at {step_name} by {', '.join(map(visible, dict.fromkeys(sides)))}: ").append(kind, "bold")
        yield line
        yield Text(f"        {visible(message)}", "")
        if kind == "indivisible_segment":
            yield Text(
                f"        To fix it: build the row for cp {findings.place.cp} (leave --context-parallel-size out), with a pack length that is a multiple of 2·cp",
                "dim",
            )
    yield from flaws(findings.row, width)


def _first(findings: RankFindings, width: int) -> Iterator[Text]:
    step = findings.first
    if step is None:
        if findings.steps and len(findings.row.sides) > 1:
            names = " = ".join(visible(side.name) for side in findings.row.sides)
            last = findings.steps[-1].label
            line = Text("EQUAL ", "bold green").append(f"{names}: every tensor at every step up to {last}")
            yield line.append(_uncompared(findings))
        return
    found = step.differences[0]
    line = Text("DIFFERENT ", "bold red").append(f"first at step {step.label}", "bold")
    line.append(f" in {found.tensor}")
    line.append("" if found.place is None else f" at place {found.place:,}", "bold")
    line.append("" if found.position is None else f" = position {found.position:,} of the row", "bold")
    yield line
    where = "" if found.position is None else findings.row.map.place(found.position)
    values = Text(f"          {visible(found.left)} ").append(_told(found, found.left_value, findings), "bold")
    values.append(" ≠ ", "bold red").append(f"{visible(found.right)} ")
    values.append(_told(found, found.right_value, findings), "bold")
    yield values.append(f"  (conversation {where})" if where else "")
    for each in step.differences[:MOST_LINES]:
        yield _line_of(each)
    if len(step.differences) > MOST_LINES:
        yield Text(f"          … {len(step.differences) - MOST_LINES} tensors more", "dim")
    if step.view is not None and found.place is not None and found.place < step.view.length:
        yield Text("")
        origin = None if step.origin is None or step.name == "row" else step.origin.tolist()
        yield from closeup(step.view, found.place, width, origin=origin)


def _uncompared(findings: RankFindings) -> str:
    """Name the steps that a side does not have, at which it is not compared."""
    told = [f"{visible(name)} has no {', '.join(labels)}" for name, labels in findings.without.items()]
    return f" ({'; '.join(told)}: not compared there)" if told else ""


def _line_of(found: StepDifference) -> Text:
    line = Text(f"          {found.tensor}", "").append(f" {found.count:,} differ", "red")
    line.append(f" in {visible(found.right)}", "dim")
    return line.append(f": {found.cause}", "bold" if found.cause != "differs" else "dim")


def _told(found: StepDifference, value: object, findings: RankFindings) -> str:
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if found.tensor in ("input_ids", "target_ids") and isinstance(value, int):
        text += f" {findings.row.texts.text(value)}"
    return visible(text)
