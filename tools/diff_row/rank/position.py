"""One position of the row at every step, as lines of the screen: each side that has other values than the first has its own line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from tools.diff_row.rank.ownership import follow
from tools.diff_row.rank.steps import RankFindings
from tools.diff_row.render.columns import Column, draw
from tools.diff_row.tokens import fit

SHORT = {
    "positions": "reads",
    "per_token": "per token",
    "mean_of_means": "means",
    "global_valid_tokens": "global",
}
"""Heading of the last column, for tensors without a column of their own."""

ROOM, NARROW, WIDE = 22, 12, 100
"""Columns of a token with its text, on a terminal of at least WIDE columns and on a narrower one."""


def followed_lines(findings: RankFindings, width: int) -> Iterator[Text]:
    """Yield one position at every step: each side that has other values than the first gets a line of its own."""
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
