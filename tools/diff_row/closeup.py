"""The neighbourhood of a position as columns: what the screen shows of the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from tools.diff_row.columns import Column, draw
from tools.diff_row.findings import TOKEN_TENSORS, Findings
from tools.diff_row.neighbourhood import Place, groups, neighbourhood
from tools.diff_row.tokens import fit, visible

SHORT = {"input_ids": "id", "target_ids": "target", "token_mask": "mask", "position_ids": "pos"}


def closeup(findings: Findings, position: int, width: int) -> Iterator[Text]:
    """The positions around one. A column that all sides share is shown once, others once for each group of sides."""
    places = neighbourhood(findings, position)
    if not places:
        return
    letter = findings.letters
    columns = [Column(title="position", right=True), Column(title="token"), Column(title="conv·turn")]
    values: list[tuple[str, str]] = []
    for tensor in TOKEN_TENSORS:
        for sides in groups(places, tensor):
            alone = len(groups(places, tensor)) == 1
            title = SHORT[tensor] + ("" if alone else " " + "".join(letter[side] for side in sides))
            columns.append(Column(title=title, right=True))
            values.append((tensor, sides[0]))
    lines: list[list[Text] | str] = []
    for place in places:
        if place.boundary:
            missing = len(place.boundary) < len(findings.built)
            who = f" only in {', '.join(map(visible, place.boundary))}" if missing else ""
            lines.append(f"── boundary {place.position}{who} ")
        lines.append(_line(place, position, values))
    wide = sum(
        column.needed([line[n] for line in lines if not isinstance(line, str)]) + 2
        for n, column in enumerate(columns)
        if n != 1
    )
    room = max(8, min(28, width - wide - 1))
    for line in lines:
        if not isinstance(line, str):
            line[1] = Text(fit(line[1].plain, min(room, cell_len(line[1].plain))), line[1].style)
    yield from draw(columns, lines, width)


def _line(place: Place, position: int, values: Sequence[tuple[str, str]]) -> list[Text]:
    here = place.position == position
    token = " ≠ ".join(dict.fromkeys(place.tokens.values()))
    cells = [
        Text(f"{'▶ ' if here else ''}{place.position}", "bold red" if here else ""),
        Text(token, "bold red" if "input_ids" in place.differs else "" if token.startswith("'") else "magenta"),
        Text(fit(place.where, min(14, cell_len(place.where))), "dim"),
    ]
    for tensor, side in values:
        value = place.values[tensor][side]
        differs = tensor in place.differs
        text = "–" if value is None else str(value)
        style = "bold red" if differs else "dim" if value == -100 or (tensor == "token_mask" and value == 0) else ""
        cells.append(Text(text + ("*" if differs else " "), style))
    return cells
