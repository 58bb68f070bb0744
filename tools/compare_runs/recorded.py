"""`compare_runs recorded`: two runs as they were recorded, by packproof, Megatron-LM or anyone who logs a loss."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from equivalence.errors import SuiteError
from production.errors import PackproofError
from production.exits import CANNOT_RUN
from tools.compare_runs.comparison import Comparison, Window, compare, plain
from tools.compare_runs.page import write_page
from tools.compare_runs.readers import Names, read_run
from tools.compare_runs.run import Run, shifted
from tools.compare_runs.terminal import show


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the command line."""

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """Run to compare with: a Megatron-LM log, a run's folder or metrics.jsonl, TensorBoard event files or
    their folder, an export of W&B (.csv, .json, .jsonl)."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """The other run, of any of these kinds."""
    steps: str = "3-20"
    """Window of steps, both ends included; the first steps are left out, because they fill caches that later steps use."""
    name_a: str | None = None
    """Name of the first run; by default from its file."""
    name_b: str | None = None
    """Name of the second run."""
    offset_a: int = 0
    """Added to each step of the first run, for a system that counts from 0."""
    offset_b: int = 0
    """Added to each step of the second run."""
    names: tuple[str, ...] = ()
    """Names of series that a run recorded under other names: loss=NAME, step_seconds=NAME, gradient_norm=NAME and so on; of one
    run alone: A:loss=NAME."""
    html: Annotated[Path | None, tyro.conf.arg(aliases=["--picture"])] = None
    """Write a self-contained page with pictures of both runs there."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Write all numbers there."""
    most_loss_difference: float | None = None
    """Exit with 1 if the largest absolute difference of losses in the window, losses of depths included, exceeds this number."""
    most_time_ratio: float | None = None
    """Exit with 1 if the paired 95 % bound of B's step time over A's exceeds this number."""


def main(arguments: Sequence[str]) -> int:
    """Compare, print, write; exit status 0: as asked, 1: a loss is not a number or a limit does not hold, 2: bad input."""
    options = tyro.cli(Arguments, args=arguments, prog="packproof compare-runs recorded", description=__doc__)
    try:
        window = Window.parse(options.steps)
        first = _read(options.a, Names(options.names, side="A"), options.name_a, options.offset_a)
        second = _read(options.b, Names(options.names, side="B"), options.name_b, options.offset_b)
        comparison = compare(*_told_apart(first, second), window)
        broken = broken_limits(
            comparison, most_loss_difference=options.most_loss_difference, most_time_ratio=options.most_time_ratio
        )
        deliver(comparison, broken=broken, html=options.html, json_file=options.json_file)
    except (SuiteError, PackproofError) as error:
        print(f"packproof compare-runs: {error}", file=sys.stderr)
        return CANNOT_RUN
    return 1 if broken or not comparison.all_finite else 0


def broken_limits(
    comparison: Comparison, *, most_loss_difference: float | None, most_time_ratio: float | None
) -> list[str]:
    """Return the limits that do not hold or cannot be judged, each in words."""
    broken = []
    for each in comparison.windowed_losses if most_loss_difference is not None else ():
        if not each.largest <= most_loss_difference:  # type: ignore[operator] # not None
            what = "losses differ" if each.name == "loss" else f"{each.name} differs"
            broken.append(f"{what} by {each.largest:.3g}, more than {most_loss_difference:g}")
    if most_time_ratio is not None:
        paired = None if comparison.times is None else comparison.times.paired
        if paired is None:
            broken.append("the ratio of step times cannot be bounded: too few step times")
        elif not paired.upper <= most_time_ratio:
            broken.append(f"the ratio of step times may be {paired.upper:.4f}, more than {most_time_ratio:g}")
    return broken


def deliver(
    comparison: Comparison,
    *,
    broken: Sequence[str],
    html: Path | None,
    json_file: Path | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print the comparison, and write what was asked for; `more` goes into the JSON file."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    show(comparison, console, broken=broken)
    if json_file is not None:
        document = plain(comparison.document() | {"broken_limits": list(broken), **(more or {})})
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        _write("--json", json_file, lambda path: path.write_text(text, encoding="utf-8"))
    if html is not None:
        _write("--html", html, lambda path: write_page(comparison, path, broken=broken))
    if written := [str(path) for path in (json_file, html) if path is not None]:
        console.print("written: " + ", ".join(written), style="dim", highlight=False, soft_wrap=True)


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    """Write a file. Raises PackproofError if the system refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise PackproofError(
            what=f"it cannot be written ({error.strerror or error})",
            where=f"{option} {path}",
            fix="choose another place",
        ) from error


def _read(path: Path, names: Names, called: str | None, offset: int) -> Run:
    run = shifted(read_run(path, names), offset)
    if called is None:
        return run
    return dataclasses.replace(run, name=called)


def _told_apart(first: Run, second: Run) -> tuple[Run, Run]:
    """Give two runs of one name, such as `logs`, the names of the folders in which their paths differ, or a letter each."""
    if first.name != second.name:
        return first, second
    pairs = zip(reversed(Path(first.place).parts), reversed(Path(second.place).parts), strict=False)
    names = next((pair for pair in pairs if pair[0] != pair[1]), (f"{first.name} (A)", f"{second.name} (B)"))
    return dataclasses.replace(first, name=names[0]), dataclasses.replace(second, name=names[1])
