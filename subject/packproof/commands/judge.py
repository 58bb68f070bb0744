"""`packproof judge ANSWERS`: the level that a file of answers to the test vectors reaches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence

from packproof.answers import read_answers
from packproof.cases import load_vectors, manifest
from packproof.commands.options import PRESET, add_judging, asked, conventions_of, finish, guarded, known_preset
from packproof.judging import judge_outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return 0 (the level is reached), 1 (it is not) or 2 (bad input)."""
    return guarded("judge", _main, arguments)


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="packproof judge", description="Judge answers to the test vectors.")
    parser.add_argument(
        "answers",
        type=Path,
        metavar="ANSWERS",
        help='JSON lines: {"id": …, "packs": […]} or {"id": …, "refused": …} for each case',
    )
    parser.add_argument(
        "--vectors", type=Path, metavar="FOLDER", help="vectors that were answered (default: those of this version)"
    )
    add_judging(parser)
    options = parser.parse_args(arguments)
    asked(options)
    known_preset(options.preset, manifest(options.vectors)["presets"])
    outcomes, declared = read_answers(options.answers, load_vectors(options.vectors))
    conventions, preset = conventions_of(options, declared), options.preset or PRESET
    report = judge_outcomes(outcomes, subject=str(options.answers), conventions=conventions, preset=preset)
    return finish(report, options)
