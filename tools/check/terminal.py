"""Print the parts of a check and its verdict for a terminal or a log."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape

from tools.check.certificate import lines_of, overhead
from tools.check.result import PartResult, Verdict, summary_of

_MARKS = {
    "equal": ("✓", "green"),
    "cached": ("✓", "green"),
    "not cached": ("✗", "bold red"),
    "differs": ("✗", "bold red"),
    "stops": ("✗", "bold red"),
    "loses": ("✗", "bold red"),
    "refused": ("✗", "bold red"),
}
_MOST = 12


def show_part(result: PartResult, console: Console) -> None:
    """Print one part as soon as it has run."""
    mark, style = _MARKS.get(result.status, ("–", "yellow"))
    console.print(
        f"[{style}]{mark} {escape(result.title)}[/]  {escape(result.summary)} [dim]({result.seconds:.1f} s)[/]",
        highlight=False,
        soft_wrap=True,
    )
    for each in result.findings[:_MOST]:
        console.print(
            f"    [red]{escape(each.where)}[/]{': ' if each.where else ''}{escape(each.what)}",
            highlight=False,
            soft_wrap=True,
        )
        if each.fix:
            console.print(f"      to fix it: {escape(each.fix)}", highlight=False, soft_wrap=True)
        if each.command:
            console.print(f"      {escape(each.command)}", highlight=False, soft_wrap=True)
    if len(result.findings) > _MOST:
        console.print(f"    … and {len(result.findings) - _MOST} more in the certificate", highlight=False)
    for note in lines_of(result.notes, _MOST):
        console.print(f"    [yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)


def show_verdict(
    verdict: Verdict, results: Mapping[str, PartResult], absent: Mapping[str, str], seconds: float, console: Console
) -> None:
    """Print what was not shown, the overhead over bare inspection, and the verdict."""
    not_shown = [
        *(f"{name}: {why}" for name, why in absent.items()),
        *(f"{name}: {each}" for name, part in results.items() for each in part.not_shown),
    ]
    if not_shown:
        console.print("not shown:", highlight=False)
        for line in lines_of(not_shown, 2 * _MOST):
            console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)
    times = overhead(results, seconds)
    if times["inspection_seconds"]:
        share = times["other_seconds"] / times["inspection_seconds"]
        console.print(
            f"time: {times['inspection_seconds']:.1f} s of bare inspection, {times['other_seconds']:.1f} s for everything else ({share:.2f} ×), "
            "which grows with --rows and not with the file",
            highlight=False,
            soft_wrap=True,
        )
    style = {"proven": "bold green", "partial": "bold yellow"}.get(verdict, "bold red")
    console.print(f"[{style}]{escape(summary_of(verdict, results))}[/]", highlight=False, soft_wrap=True)
