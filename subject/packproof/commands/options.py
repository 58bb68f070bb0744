"""Options that `conformance` and `judge` share, and the end of both: files written, screen printed, exit status."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable, Mapping, Sequence

from packproof import report as reports
from packproof.cases import manifest
from packproof.conventions import MEANING, declare
from packproof.judging import Report
from packproof.levels import NAMES, level_named

GOOD, BELOW, BAD_INPUT = 0, 1, 2
PRESET = "megatron-lm-0.19"
"""Whose rows L10 is about where neither the command line nor the subject says so."""


class CommandError(ValueError):
    """Bad input to a command: exit status 2, and the text without a traceback."""


def add_judging(parser: argparse.ArgumentParser, *, default: str = PRESET) -> None:
    """Add what is asked of a subject, and where the report goes. `default` says which preset is taken where none is given."""
    parser.add_argument(
        "--level", default="L7", metavar="L1…L10", help="level that must be reached, with all below it (default: L7)"
    )
    parser.add_argument(
        "--not-shown",
        default="",
        metavar="L4,L9",
        help="levels that need not be shown, since the rows have no field for them",
    )
    parser.add_argument(
        "--preset",
        "--semantics",
        metavar="NAME",
        help=f"preset whose rows L10 compares with: {', '.join(manifest()['presets'])} (default: {default})",
    )
    parser.add_argument(
        "--convention",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a convention that the subject has: {}".format(", ".join(MEANING)),
    )
    for kind in ("json", "junit", "markdown"):
        parser.add_argument(
            "--" + kind, type=Path, metavar="FILE", help="write the report to a file; - prints it instead of the table"
        )


def conventions_of(options: argparse.Namespace, declared: Mapping[str, str]) -> dict[str, str]:
    """Return the conventions of the subject and of the command line; the latter win. ValueError for unknown words."""
    found = dict(declared)
    for each in options.convention:
        name, equals, value = each.partition("=")
        if not equals:
            raise CommandError(f"--convention must be NAME=VALUE, got {each!r}")
        found[name] = value
    declare(found)
    return found


def asked(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the level that must be reached, and the levels that need not be shown."""
    allowed = [level_named(name.strip()).name for name in options.not_shown.split(",") if name.strip()]
    return level_named(options.level).name, allowed


def finish(report: Report, options: argparse.Namespace) -> int:
    """Write the files that were asked for, print the screen, and return the exit status."""
    level, allowed = asked(options)
    if getattr(options, "case", None) is not None:
        allowed = list(NAMES)  # one case cannot show every level
    below = report.below(level, allowed)
    texts: dict[str, Callable[[], str]] = {
        "json": lambda: reports.as_json(report, level, below),
        "junit": lambda: reports.junit(report, below),
        "markdown": lambda: reports.markdown(report),
    }
    printed = False
    for kind, make in texts.items():
        path = getattr(options, kind)
        if path is not None and str(path) == "-":
            print(make(), end="")
            printed = True
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make(), encoding="utf-8")
    if not printed:
        print(reports.text(report, level, below), end="")
    return BELOW if below else GOOD


def guarded(name: str, run: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a command; bad input is told in one line with exit status 2."""
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except ImportError as error:
        print("packproof %s: the subject cannot run here: %s" % (name, error), file=sys.stderr)
        return BAD_INPUT
    except (ValueError, OSError) as error:
        print(f"packproof {name}: {error}", file=sys.stderr)
        return BAD_INPUT


def known_preset(name: str | None, presets: Sequence[str]) -> None:
    """Refuse a preset that the vectors have no rows of; None was not given."""
    if name is not None and name not in presets:
        raise CommandError("--preset must be one of {}, got {!r}".format(", ".join(presets), name))
