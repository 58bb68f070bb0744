"""Draw the tables of the screen: columns by their width on a terminal, and the surroundings of a position in such columns.

rich's own table has no lines that run across its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from tools.diff_row.render.context_window import ContextPosition, context_window, groups
from tools.diff_row.row.findings import TOKEN_TENSORS, Findings
from tools.diff_row.tokens import fit, visible

GAP = 2
SHORTEST = 8
"""Columns that a token's text has at least."""
SHORT = {"input_ids": "id", "target_ids": "target", "token_mask": "mask", "position_ids": "pos"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column, as wide as its widest cell."""

    title: str
    right: bool = False
    """Whether cells are aligned to the right."""

    def needed(self, cells: Sequence[Text]) -> int:
        """Return the width that the column needs."""
        return max([cell_len(self.title), *(cell_len(cell.plain) for cell in cells)])


def draw(columns: Sequence[Column], lines: Sequence[list[Text] | str], width: int) -> Iterator[Text]:
    """Draw a header, then one line for each row; a text among the rows spans all columns (a text that begins with `─` is extended)."""
    cells = [line for line in lines if not isinstance(line, str)]
    widths = [column.needed([line[n] for line in cells]) for n, column in enumerate(columns)]
    total = min(width, sum(widths) + GAP * len(widths))
    yield _row([Text(column.title, "dim underline") for column in columns], columns, widths)
    for line in lines:
        if isinstance(line, str):
            filled = line + "─" * max(0, total - cell_len(line)) if line.startswith("─") else " " * GAP + line
            yield Text(filled, "cyan" if line.startswith("─") else "dim")
        else:
            yield _row(line, columns, widths)


def _row(cells: Sequence[Text], columns: Sequence[Column], widths: Sequence[int]) -> Text:
    row = Text()
    for cell, column, width in zip(cells, columns, widths, strict=True):
        fill = " " * (width - cell_len(cell.plain))
        row.append(" " * GAP)
        row.append(fill if column.right else "")
        row.append_text(cell)
        row.append("" if column.right or column is columns[-1] else fill)
    return row


def closeup(findings: Findings, position: int, width: int, *, origin: Sequence[int] | None = None) -> Iterator[Text]:
    """Draw the positions around one. A column that all sides share is shown once, other columns once for each group of sides.

    With `origin`, positions are places in a part of the row, and `origin[place]` is the position in the row.
    """
    places = context_window(findings, position)
    if not places:
        return
    letter = findings.letters
    columns = [Column(title="position" if origin is None else "place", right=True)]
    columns += [] if origin is None else [Column(title="in the row", right=True)]
    columns += [Column(title="token"), Column(title="conv·turn")]
    token = len(columns) - 2
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
            at = place.position if origin is None else f"{place.position}, {origin[place.position]} in the row"
            lines.append(f"── boundary {at}{who} ")
        line = _line(place, position, values)
        if origin is not None:
            line.insert(1, Text(f"{origin[place.position]}", "bold red" if place.position == position else "cyan"))
        lines.append(line)

    def needed() -> int:
        return sum(
            column.needed([line[n] for line in lines if not isinstance(line, str)]) + GAP
            for n, column in enumerate(columns)
            if n != token
        )

    rows = [line for line in lines if not isinstance(line, str)]
    # The conversation of the middle one stands above.
    if needed() + (12 if origin is not None else SHORTEST + GAP) > width:
        del columns[token + 1]
        for row in rows:
            del row[token + 1]
    room = max(SHORTEST, min(28, width - needed() - GAP))
    for row in rows:
        row[token] = Text(fit(row[token].plain, min(room, cell_len(row[token].plain))), row[token].style)
    yield from draw(columns, lines, width)


def _line(place: ContextPosition, position: int, values: Sequence[tuple[str, str]]) -> list[Text]:
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
