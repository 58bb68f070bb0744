"""A comparison on a terminal or in a log."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.compare_runs import words
from tools.compare_runs.comparison import Comparison


def show(comparison: Comparison, console: Console, *, broken: Sequence[str] = ()) -> None:
    """Print both tables, remarks and the verdict; `broken` are the limits that do not hold."""
    for letter, run in zip("AB", comparison.runs, strict=True):
        line = Text(f"{letter}  ", "dim").append(run.name, "bold").append(f"  {run.source}, {run.place}", "dim")
        console.print(line, soft_wrap=True)
    if rows := words.time_rows(comparison):
        table = Table(title="step time", title_justify="left")
        # Numbers are never cut: on a narrow screen the names are folded.
        table.add_column("system", overflow="fold")
        for heading in ("mean step time", "window", _folded("relative throughput", console)):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(words.bound(comparison), highlight=False)
    console.print(_differences(comparison, console))
    for remark in comparison.remarks:
        console.print(Text(f"· {remark}", "dim"))
    style = "bold green" if comparison.equal else "bold"
    for number, found in enumerate(words.findings(comparison)):
        console.print(Text(found if number == 0 else f"  {found}", style if number == 0 else ""), soft_wrap=True)
    for limit in broken:
        console.print(Text(f"does not hold: {limit}", "bold red"), soft_wrap=True)


def _folded(heading: str, console: Console) -> str:
    """Fold the heading into two lines on a narrow screen, so that no number is cut."""
    return heading if console.width >= 100 else "\n".join(heading.rsplit(" ", 1))


def _differences(comparison: Comparison, console: Console) -> Table:
    table = Table(title=f"B against A, steps {comparison.window}", title_justify="left")
    table.add_column("series", overflow="fold")
    for heading in ("mean", "largest", "at step", _folded("of A's value", console), "steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("finite", no_wrap=True)
    for row in words.difference_rows(comparison):
        finite = Text(row.finite, "green" if row.fine else "bold red")
        table.add_row(row.what, row.mean, row.largest, row.largest_at, row.relative, row.steps, finite)
    return table
