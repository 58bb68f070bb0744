"""Columns of text by their width on a terminal, with lines that run across them, which rich's own table has not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

GAP = 2


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
