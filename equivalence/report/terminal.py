"""Print a run on a terminal: one progress line that stays in place (plain lines elsewhere), and one table at the end."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from equivalence.checks.blame import CONVENTION
from equivalence.report.summary import WHAT, alike, differences_of, first_results, kind_key, more_alike
from equivalence.runner.alone import DIFFERENT, EQUAL
from equivalence.runner.outcome import Outcome
from equivalence.subjects import PROMPT_FORMATS

PLAIN_EVERY = 5.0
"""Seconds between plain lines."""
FIRST_LOOK = "first_look"
"""Kind of the jobs that end before anything is planned; the first of them is a table of its own."""
FIRST = ("starting", FIRST_LOOK, "corpus", "own", "smallest")
"""Kinds of jobs whose results are the first table of a run without a first look."""
WORTH_A_TABLE = 1000.0
"""Planned work, in rows' worth, below which the table at the end comes soon enough."""
TELLING_SHARE = 0.1
"""Fraction of a run before which no remaining time is printed."""
STYLES = {"equal": "bold green", "interrupted": "bold yellow"}


class Reporter:
    """Progress with rate and time left. Used as a context manager; no thread, since workers fork after it starts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[said]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, said="")
        self._title = "starting"
        self._pace: list[tuple[float, float]] = []
        """When, and how much was done then: from the first call on, before which all is loaded."""
        self._told = 0
        """Differences printed so far; one of each kind is printed when it is found."""
        self._kinds: set[tuple[str, ...]] = set()
        self._has_table = False

    def __enter__(self) -> Self:
        """Show the line."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it away."""
        self._bar.stop()

    def __call__(self, title: str, outcome: Outcome) -> None:
        """Say where the run is; `title` is what just ended, if anything did."""
        self._title = title.partition(" ")[0] or self._title
        now = time.monotonic()
        self._tell(outcome)
        if not self._pace or outcome.done > self._pace[-1][1]:
            self._pace.append((now, outcome.done))
        said = self._said(outcome)
        if self._console.is_terminal:
            self._bar.update(
                self._task,
                description=self._title,
                total=outcome.planned,
                completed=outcome.done,
                said=said,
                refresh=True,
            )
        elif now - self._last >= PLAIN_EVERY:
            self._last = now
            self._console.print(f"{self._title}: {said}", highlight=False)

    def _tell(self, outcome: Outcome) -> None:
        """Print the first table once the first pieces are done, and the first difference of each kind when it is found."""
        title = self._title
        is_first = title not in FIRST if outcome.planned else title == FIRST_LOOK
        is_long = outcome.planned is None or outcome.planned > WORTH_A_TABLE
        if not self._has_table and outcome.tally.rows and is_first and is_long:
            self._has_table = True
            checks, own = first_results(outcome)
            console = self._bar.console
            console.print(checks_table(checks, f"first results, after {_clock(time.monotonic() - self._started)}"))
            if own and own["compared"]:
                console.print(own_line(own), highlight=False)
        differences, self._told = outcome.tally.differences[self._told :], len(outcome.tally.differences)
        for kind in alike(differences_of(differences)):
            if (key := kind_key(kind[0])) not in self._kinds:
                self._kinds.add(key)
                difference_lines(kind[0], self._bar.console, f"differs ({_clock(time.monotonic() - self._started)}): ")

    def _said(self, outcome: Outcome) -> str:
        elapsed = time.monotonic() - self._started
        rows = sum(outcome.tally.rows.values())
        parts = [f"{rows:,} rows in {_clock(elapsed)}"]
        if outcome.rate:
            parts.append(f"{outcome.rate:,.0f} generated rows/s")
        if outcome.planned and outcome.done:
            share = outcome.done / outcome.planned
            left = self._left(outcome.planned) if share >= TELLING_SHARE else None
            parts.append(f"{100 * share:.0f} %" + ("" if left is None else f", about {_clock(left)} left"))
        if count := sum(outcome.tally.differing.values()):
            parts.append(f"{count} differing")
        return ", ".join(parts)

    def _left(self, planned: float) -> float | None:
        """Return the remaining seconds at the pace of the later half of the finished pieces, because replays and cold starts come first."""
        now, done = self._pace[-1]
        then, before = max((each for each in self._pace if 2 * each[1] <= done), default=self._pace[0])
        return None if done <= before else (planned - done) * (now - then) / (done - before)


def own_line(own: dict[str, Any]) -> Text:
    """Say how many rows of the file were compared in its own settings."""
    whole = own["compared"] == own["rows"]
    text = Text(f"{own['file']}: ").append(
        f"{own['compared']:,} of {own['rows']:,} rows in their own settings", "bold green" if whole else "bold yellow"
    )
    if own["differing"]:
        text.append(f", {own['differing']:,} differing", "bold red")
    if own["refused"]:
        text.append(f", {own['refused']:,} refused alike")
    return text.append(f" ({own['told']})", "default")


def show(summary: dict[str, Any], console: Console, files: list[str]) -> None:
    """Print the summary: witnesses, one table of checks, what was not exercised, differences, the verdict."""
    for witness in summary["witnesses"]:
        line = Text(f"{witness['name']:<12}", "bold").append(f" {witness['version']}", "default")
        console.print(line, highlight=False)
        for each in witness["stand_ins"]:
            console.print(Text(f"{'':<13}not as it comes: {each}", "dim"))
    console.print(checks_table(summary["checks"], spent=summary["cpu_seconds_by_check"]))
    if summary["own_settings"]:
        console.print(own_line(summary["own_settings"]), highlight=False)
    for each in summary["left_out"]:
        console.print(Text(f"left out: {each}", "yellow"))
    if summary["layouts"]:
        console.print(_layouts(summary))
        console.print(Text("third witness of steps: the installed package's own pieces, but for", "dim"))
        for name, what in summary["third_witness"]["stand_ins"].items():
            console.print(Text(f"  {name}: {what}", "dim"))
    console.print(_classes(summary), highlight=False)
    _differences(summary, console)
    for each in summary["unhit"]:
        console.print(Text(f"not exercised: {each}", "red"))
    for each in summary["errors"]:
        console.print(Text(f"could not run: {each}", "red"))
    if summary["stopped_early"]:
        console.print(Text("stopped early: enough differs; fix these first", "yellow"))
    verdict = Text(summary["verdict"].upper(), STYLES.get(summary["verdict"], "bold red"))
    verdict.append(
        f"  {_generated(summary['generated'])}, {_clock(summary['seconds'])} in all "
        f"(size {summary['size']}, seed {summary['seed']}, {summary['workers']} worker{'s' if summary['workers'] != 1 else ''})",
        "default",
    )
    console.print(verdict, highlight=False)
    console.print(Text("report: " + ", ".join(files), "dim"))


def _generated(generated: dict[str, Any]) -> str:
    """Return the generated rows with their rate; without a rate if the run ended before a row was timed."""
    if not generated["rows"]:
        return "no generated rows"
    rows = f"{generated['rows']:,} generated rows of {generated['messages_per_row']:.0f} messages"
    if not generated["rows_per_second"]:
        return rows
    return f"{rows}, {generated['rows_per_second']:,.0f} rows/s ({generated['cpu_milliseconds_per_row']:.1f} ms of CPU a row)"


def checks_table(
    checks: list[dict[str, Any]], title: str = "rows by check and format", *, spent: dict[str, float] | None = None
) -> Table:
    """Return a table with a line for each check and format."""
    table = Table(title=title, title_justify="left")
    for name in ("check", "format"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "equal", "refused alike", "differing"):
        table.add_column(name, justify="right")
    if spent is not None:
        table.add_column("CPU s", justify="right")
    before = None
    for each in checks:
        if before not in (None, each["check"]):
            table.add_section()
        differing = Text(f"{each['differing']:,}", "bold red" if each["differing"] else "dim")
        is_first, before = before != each["check"], each["check"]
        what = WHAT[each["check"]] if is_first else ""
        counts = (f"{each[name]:,}" for name in ("rows", "equal", "refused_alike"))
        seconds = [_seconds(spent, each["check"], is_first=is_first)] if spent is not None else []
        table.add_row(what, each["format"], *counts, differing, *seconds)
    return table


def _seconds(spent: dict[str, float], check: str, *, is_first: bool) -> str:
    """Return the seconds of the processor of a check on its first line; a check that runs within another's jobs has none of its own."""
    return f"{spent[check]:.1f}" if is_first and check in spent else ""


def _layouts(summary: dict[str, Any]) -> Table:
    table = Table(title="training steps by layout", title_justify="left")
    table.add_column("layout", no_wrap=True)
    for name in ("ranks", "cases", "checks", "third witness", "ties", "differing", "seconds"):
        table.add_column(name, justify="right")
    before = None
    for each in summary["layouts"]:
        if before not in (None, each["ranks"]):
            table.add_section()
        before = each["ranks"]
        witnessed = f"yes ({each['third_witness']})" if each["third_witness"] else Text("no", "dim")
        differing = Text(f"{each['differing']:,}", "bold red" if each["differing"] else "dim")
        counts = [f"{each[name]:,}" for name in ("ranks", "cases", "checks")]
        table.add_row(each["layout"], *counts, witnessed, f"{each['ties']}", differing, f"{each['seconds']:.1f}")
    return table


def _classes(summary: dict[str, Any]) -> Text:
    hit: list[int] = []
    applicable = missed = 0
    for each in summary["classes"]:
        for found in each["formats"].values():
            if "hit" in found and found["aimed"]:
                applicable += 1
                missed += not found["hit"]
                hit.append(found["hit"])
    text = Text(f"{len(summary['classes'])} fault classes in {len(PROMPT_FORMATS)} formats: ")
    if not applicable:
        return text.append("none was aimed at", "yellow")
    text.append(f"{applicable - missed} of {applicable} hit", "green" if not missed else "bold red")
    return text.append(f", each by {min(hit):,} to {max(hit):,} rows; the page lists them")


def _differences(summary: dict[str, Any], console: Console) -> None:
    """Print one entry for each kind of difference: its first case with the command that shows it, and the number of similar cases."""
    kinds = alike(summary["differences"])
    count = len(summary["differences"]) + sum(each["count"] for each in summary["alike"])
    if len(kinds) < count:
        of = "1 kind" if len(kinds) == 1 else f"{len(kinds)} kinds"
        console.print(Text(f"{count:,} differing cases of {of}; the first of each:", "bold red"))
    for kind in kinds:
        each, more = kind[0], len(kind) - 1
        difference_lines(each, console)
        counted = more_alike(summary, each)
        if more or counted:
            told = f"         and {more + counted:,} more like it" + (", in the page" if not counted else "")
            console.print(told, style="dim", highlight=False)


def difference_lines(each: dict[str, Any], console: Console, head: str = "differs: ") -> None:
    """Print a difference: its class, its place, the command that shows it, and whether the case alone shows it."""
    first = each["first"]
    place = "" if first["position"] is None else f"[{first['position']}]"
    if first["class"] == CONVENTION:
        text = f"{each['right']} {first['right']}, {each['check']} {each['prompt_format']}\n         {each['path'] or each['where']}"
        console.print(Text(head, "bold red").append(text, "default"))
    else:
        _value_lines(each, place, console, head)
    if each["command"]:
        console.print(f"         {each['command']}", style="cyan", highlight=False, soft_wrap=True)
    if said := alone_line(each):
        console.print(f"         {said}", style="yellow", highlight=False, soft_wrap=True, markup=False)


def _value_lines(each: dict[str, Any], place: str, console: Console, head: str) -> None:
    first = each["first"]
    console.print(
        Text(head, "bold red")
        .append(str(first["class"]).replace("_", " "), "bold")
        .append(
            f": {each['left']} and {each['right']}, {each['check']} {each['prompt_format']}, {each['count']} values, "
            f"first {first['tensor']}{place}: {first['left']} / {first['right']}\n"
            f"         {each['path'] or each['where']}",
            "default",
        )
    )


def alone_line(each: dict[str, Any]) -> str:
    """Return the outcome of a replay of the smallest case alone, if it was not the difference."""
    if each["alone"] == EQUAL:
        return (
            "alone this case is equal: it needs others before it (something is kept between cases); drawn with them by "
            + str(each["together"])
        )
    return "" if each["alone"] in ("", DIFFERENT) else str(each["alone"])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
