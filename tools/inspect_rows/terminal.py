"""Say what an inspection found: the tables of the terminal, and the words that the page shares with them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tools.counted import counted
from tools.inspect_rows.inspection import Histogram, Inspection

SHOWN = 3
"""Findings of each kind that the table shows."""
_COLOURS = {"fails": "bold red", "loses": "yellow", "note": "dim"}


def show(found: Inspection, console: Console, *, shown: int = SHOWN) -> None:
    """Print the verdict, the totals, the findings and the tables."""
    console.print(Text(verdict(found), style="bold"), soft_wrap=True)
    console.print(_pairs("what the rows hold", list(totals(found))))
    for table in _tables(found):
        console.print(table)
    for line in findings(found, shown):
        console.print(line, soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def verdict(found: Inspection) -> str:
    """Return one sentence that answers whether a run may start on these files."""
    counts = found.counts
    seen = f"{'' if found.rows_complete else 'the first '}{counted(counts['rows'], 'row')}"
    if found.fails:
        stops = counts["rows_unreadable"] + counts["rows_refused"]
        why = f"at {stops:,} of {seen}" if stops else f"on ids outside the model's vocabulary in {seen}"
        return f"A run with these settings fails {why}."
    if found.loses:
        lost = counts["truncated"] + counts["dropped"]
        parts = []
        if lost:
            is_are = "is" if lost == 1 else "are"
            parts.append(f"{lost:,} of {counted(counts['conversations'], 'conversation')} {is_are} cut or left out")
        if counts["unrendered_messages"]:
            parts.append(f"{counted(counts['unrendered_messages'], 'message', 'renders', 'render')} to nothing")
        if not parts:
            parts.append("unreadable lines are skipped")
        return f"A run loses data: of {seen}, {' and '.join(parts)}."
    return f"A run feeds all of {seen}."


def totals(found: Inspection) -> Iterator[tuple[str, str]]:
    """Yield name and value of each total."""
    counts = found.counts
    yield "rows", f"{counts['rows']:,}" + ("" if found.rows_complete else " (the scan ended early)")
    for name in ("rows_unreadable", "rows_refused", "rows_that_train_nothing", "rows_exactly_full"):
        yield name.replace("_", " "), f"{counts[name]:,}"
    for name in ("conversations", "truncated", "dropped", "empty_conversations", "conversations_that_train_nothing"):
        yield name.replace("_", " "), f"{counts[name]:,}"
    yield "messages", f"{counts['messages']:,}"
    for name in ("content_tokens", "trained_tokens", "truncated_tokens"):
        yield name.replace("_", " "), f"{counts[name]:,}"
    yield "rows filled", share(counts["content_tokens"], counts["row_tokens"])
    yield "trained share", share(counts["trained_tokens"], counts["content_tokens"])
    yield "duplicate rows", f"{found.duplicate_rows.redundant:,}"
    yield "duplicate conversations", f"{found.duplicate_conversations.redundant:,}"
    rate = counts["rows"] / max(found.seconds, 1e-9)
    yield "rows a second", f"{rate:,.0f} ({found.processes} process{'' if found.processes == 1 else 'es'})"


def findings(found: Inspection, shown: int) -> Iterator[Text]:
    """Yield the first findings of each kind, the worst kinds first, and how many more there are."""
    order = {"fails": 0, "loses": 1, "note": 2}
    for kind in sorted(found.findings_by_kind, key=lambda kind: (order[found.severities[kind]], kind)):
        of_kind = [each for each in found.findings if each.kind == kind]
        for each in of_kind[:shown]:
            place = f"{each.file} line {each.line}"
            place += "" if each.conversation is None else f" conversation {each.conversation}"
            place += "" if each.turn is None else f" turn {each.turn}"
            text = Text(f"{each.severity} {kind}: ", style=_COLOURS[each.severity])
            yield text.append(f"{place}: {each.what}. To fix it: {each.fix}", style="default")
        if (more := found.findings_by_kind[kind] - min(shown, len(of_kind))) > 0:
            yield Text(f"  … and {more:,} more of {kind}", style="dim")


def preset_rows(found: Inspection) -> list[list[str]]:
    """Return the table of the presets: name, equal, different, refused with kinds, accepted, difference of trained tokens."""
    return [
        [
            each.name,
            f"{each.rows_equal:,}",
            f"{each.rows_different:,}",
            ", ".join(f"{number:,} {kind}" for kind, number in each.rows_refused.items()) or "0",
            f"{each.rows_accepted:,}",
            f"{each.trained_tokens:+,}" if each.trained_tokens else "0",
        ]
        for each in found.presets
    ]


PRESET_COLUMNS = (
    "preset",
    "equal",
    "other",
    "refused there",
    "only here",
    "trained tokens",
)


def worst_rows(found: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the place of each row that loses most, with its file where there are several, and the tokens lost."""
    for number, tokens in found.worst:
        row, at = number, 0
        while row >= found.files[at]["rows"]:
            row, at = row - found.files[at]["rows"], at + 1
        file = f"{found.files[at]['file']} " if len(found.files) > 1 else ""
        yield f"{file}line {row + 1}, row {row}", f"{tokens:,}"


def context_rows(found: Inspection) -> list[list[str]]:
    """Return the table of context parallel sizes."""
    return [
        [
            str(each.size),
            f"{each.indivisible_conversations:,}",
            f"{each.padding_tokens:,}",
            f"{each.rows_that_lose:,}",
            f"{each.lost_tokens:,}",
        ]
        for each in found.context_parallel
    ]


CONTEXT_COLUMNS = (
    "cp",
    "conversations that 2·cp does not divide",
    "tokens of padding",
    "rows that lose",
    "tokens lost",
)


def histogram_rows(found: Inspection) -> list[list[str]]:
    """Return the table of the histograms: name, values, least, mean, most."""
    return [
        [
            each.name.replace("_", " "),
            f"{each.count:,}",
            *(_value(each, value) for value in (each.least, each.mean, each.most)),
        ]
        for each in found.histograms
    ]


HISTOGRAM_COLUMNS = ("what", "values", "least", "mean", "most")


def share(part: float, whole: float) -> str:
    """Return a share in percent."""
    return f"{part / whole:.2%}" if whole else "none"


def _value(histogram: Histogram, value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.2%}" if histogram.unit == "share" else f"{value:,.1f}".removesuffix(".0")


def _tables(found: Inspection) -> Iterator[RenderableType]:
    yield _table("distributions", HISTOGRAM_COLUMNS, histogram_rows(found))
    if found.presets:
        yield _table(
            "under each preset (equal: rows refused alike included; trained tokens: the difference)",
            PRESET_COLUMNS,
            preset_rows(found),
        )
    yield _table("under another context parallel size", CONTEXT_COLUMNS, context_rows(found))


def _pairs(title: str, pairs: list[tuple[str, str]]) -> Group:
    return Group(_table(title, ("", ""), [list(pair) for pair in pairs], header=False))


def _table(title: str, columns: tuple[str, ...], rows: list[list[str]], *, header: bool = True) -> Table:
    table = Table(title=title, show_header=header)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
