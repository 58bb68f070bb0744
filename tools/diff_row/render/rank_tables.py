"""Draw what only the screen of a rank has: the rank among all, what it owns of the row, every step, and one position at every step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.text import Text

from tools.diff_row.rank.steps import ABOUT, RankFindings, Refused, Step, follow, owned_runs
from tools.diff_row.render.tables import Column, draw
from tools.diff_row.report import Report
from tools.diff_row.tokens import fit, visible

MOST_SEGMENTS = 4
"""Largest number of segments whose runs are printed."""
SHORT = {
    "positions": "reads",
    "per_token": "per token",
    "mean_of_means": "means",
    "global_valid_tokens": "global",
}
"""Heading of the last column, for tensors without a column of their own."""

ROOM, NARROW, WIDE = 22, 12, 100
"""Columns of a token with its text, on a terminal of at least WIDE columns and on a narrower one."""


def rank_place(report: Report, width: int) -> Iterator[Text]:
    """Print the rank's coordinates, its stage, the ranks with the same share, and what it owns of the row."""
    assert report.rank is not None
    findings, place = report.rank, report.rank.place
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
    count, _, which = findings.owned.partition(":")
    yield Text("owns  ", "dim").append(count, "bold").append(f":{which}" if which else "")
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


def step_table(report: Report, width: int) -> Iterator[Text]:
    """Print every step with the verdict on each side."""
    assert report.rank is not None
    findings = report.rank
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
                Text(step.shape),
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
    verdict, count = step.verdict(name)
    if verdict == "different":
        return Text(f"≠ {count:,}", "red" if after else "bold red")
    return {
        "none": Text("–", "dim"),
        "refused": Text("refused", "bold yellow"),
        "equal": Text("·" if name == base else "=", "green"),
    }[verdict]


def refused_at_steps(findings: RankFindings) -> Iterator[Text]:
    """Print the refusals of sides after the row, each step and kind once."""
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


def followed_position(report: Report, width: int) -> Iterator[Text]:
    """Print one position at every step: each side that has other values than the first gets a line of its own."""
    assert report.rank is not None
    findings = report.rank
    followed = follow(findings)
    if not followed or findings.at is None:
        return
    where = findings.row.map.place(findings.at)
    yield (
        Text("position ", "bold")
        .append(f"{findings.at:,}", "bold")
        .append(f" of the row, conversation {where}, step by step")
    )
    columns = [Column(title="step"), Column(title="place", right=True), Column(title="side")]
    columns += [
        Column(title="token"),
        Column(title="target"),
        Column(title="mask", right=True),
        Column(title="pos", right=True),
        Column(title="else"),
    ]
    lines: list[list[Text] | str] = []
    room = ROOM if width >= WIDE else NARROW
    share_has = any(each.step.name == "share" and each.place is not None for each in followed)
    for each in followed:
        if each.place is None:
            lines.append(
                [
                    Text(each.step.label),
                    Text("–", "dim"),
                    Text(
                        "another rank's"
                        if each.step.name == "share" or findings.place.tp == 1
                        else "another tp's"
                        if share_has
                        else "another rank's",
                        "dim",
                    ),
                    *(Text("") for _ in range(5)),
                ]
            )
            continue
        seen: dict[str, tuple[list[str], dict[str, object]]] = {}
        for side, values in each.values.items():
            if values:
                seen.setdefault(repr([_plain(value) for value in values.values()]), ([], dict(values)))[0].append(side)
        groups = _merged(list(seen.values()))
        for number, (names, has) in enumerate(groups):
            who = "all" if len(groups) == 1 else " ".join(findings.row.letters[side] for side in names)
            label = Text("" if number else each.step.label)
            differs = "bold red" if number else ""
            cells = [Text(_token(has, name, findings, room), differs) for name in ("input_ids", "target_ids")]
            cells += [Text(_plain(has.get(name)), differs) for name in ("token_mask", "position_ids")]
            rest = " ".join(
                f"{SHORT.get(n, n)} {_plain(v)}"
                for n, v in has.items()
                if n not in ("input_ids", "target_ids", "token_mask", "position_ids")
            )
            lines.append(
                [label, Text("" if number else f"{each.place:,}"), Text(who, "dim"), *cells, Text(rest, differs)]
            )
    yield from draw(columns, lines, width)


def _merged(groups: list[tuple[list[str], dict[str, object]]]) -> list[tuple[list[str], dict[str, object]]]:
    """Return a side that has fewer tensors, and the same values in those, stands with the one that has more."""
    found: list[tuple[list[str], dict[str, object]]] = []
    for sides, values in groups:
        for others, theirs in found:
            if all(theirs[name] == value for name, value in values.items() if name in theirs):
                others.extend(sides)
                theirs.update(values)
                break
        else:
            found.append((list(sides), dict(values)))
    return found


def _token(values: dict[str, object], name: str, findings: RankFindings, room: int) -> str:
    value = values.get(name)
    if not isinstance(value, int):
        return ""
    text = findings.row.texts.text(value)
    return fit(f"{value} {text}", min(room, len(f"{value} {text}")))


def _plain(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
