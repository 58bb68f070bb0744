"""Print the kill matrix on a terminal: a column for each check of rows; faults of layouts, whose checks are too many for columns, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from equivalence.mutants.matrix import Kills


def show_columns(matrix: Iterable[Kills], checks: Sequence[str], console: Console) -> list[Kills]:
    """Print what finds each fault as it comes, a column a check; the whole matrix at the end."""
    table = Table(
        title="faults put into production's rows, and the jobs each check ran until it found them", title_justify="left"
    )
    table.add_column("fault")
    for check in checks:
        table.add_column(check, justify="right")

    def cells(kills: Kills) -> list[str]:
        return [_count(kills.found[check]) for check in checks]

    return _shown(matrix, table, cells, console)


def show_words(matrix: Iterable[Kills], console: Console) -> list[Kills]:
    """Print the matrix with one column for all checks."""
    table = Table(
        title="faults put into production's layouts, and the cases each check ran until it found them",
        title_justify="left",
    )
    table.add_column("fault")
    table.add_column("found by")
    table.add_column("not by")

    def cells(kills: Kills) -> list[str]:
        asked = {check: count for check, count in kills.found.items() if count is not None}
        found = ", ".join(f"{check} {count}" for check, count in asked.items() if count)
        return [found, ", ".join(check for check, count in asked.items() if not count)]

    return _shown(matrix, table, cells, console)


def _shown(matrix: Iterable[Kills], table: Table, cells: Callable[[Kills], list[str]], console: Console) -> list[Kills]:
    made = []
    with Live(table, console=console, vertical_overflow="visible", transient=True):
        for kills in matrix:
            made.append(kills)
            table.add_row(kills.mutant, *cells(kills), style="red" if kills.survives else None)
    console.print(table)
    return made


def _count(count: int | None) -> str:
    return "" if count is None else str(count) if count else "·"
