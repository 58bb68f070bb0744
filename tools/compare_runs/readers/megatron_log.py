"""What Megatron-LM prints: one line an iteration, one a validation, whatever a launcher puts before them."""

from __future__ import annotations

import math
import re
from pathlib import Path

from tools.compare_runs.readers.names import Names, UnknownKindError, no_loss
from tools.compare_runs.run import Gathered, Run, spacing, to_number

ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|(.*)")
VALIDATION = re.compile(r"\bvalidation loss at iteration (\d+)(?: on (\w+) set)? \|(.*)")
SKIPPED, NAN = "number of skipped iterations", "number of nan iterations"
LOSS = "lm loss"


def read_log(path: Path, names: Names) -> Run:
    """The run of a log. Raises InputError where it has no iteration, or none of them a loss."""
    lines: list[tuple[int, dict[str, str]]] = []
    validations: list[tuple[int, int, float]] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := ITERATION.search(line):
                lines.append((int(match[1]), _fields(match[2])))
            elif (match := VALIDATION.search(line)) and match[2] != "test":
                value = to_number(_fields(match[3]).get(f"{LOSS} value"))
                if value is not None:
                    validations.append((len(lines), int(match[1]), value))
    if not lines:
        raise UnknownKindError(f"{path}: no line of Megatron-LM such as ' iteration        3/     200 | …'")
    return _run(path, names, lines, validations)


def looks_like(head: str) -> bool:
    """Whether a line of the text is one of an iteration."""
    return ITERATION.search(head) is not None


def _fields(text: str) -> dict[str, str]:
    parts = (part.rpartition(":") for part in text.split("|"))
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def _run(
    path: Path, names: Names, lines: list[tuple[int, dict[str, str]]], validations: list[tuple[int, int, float]]
) -> Run:
    recorded = {name for _, fields in lines for name in fields}
    found = names.find(recorded)
    losses = [name for name, (series, _) in found.items() if series == "loss" or series.startswith("mtp_")]
    if not any(found[name][0] == "loss" for name in losses):
        raise no_loss(path, recorded)
    gathered = Gathered()
    skipped, before = 0, 0
    left_out: dict[str, list[int]] = {}
    for at, (step, fields) in enumerate(lines):
        for _, validated, value in (each for each in validations if each[0] == at):
            gathered.put("validation_loss", validated, value)
        if step <= before:
            gathered.restart(step)
        before = step
        skipped += int(to_number(fields.get(SKIPPED)) or 0)
        for name, (series, factor) in found.items():
            number = to_number(fields.get(name))
            if number is not None:
                gathered.put(series, step, number * factor)
            elif name in losses and to_number(fields.get(NAN)) != 0:
                gathered.put(series, step, math.nan)  # Megatron-LM leaves a loss out that is NaN, and counts it
            elif name in losses:
                left_out.setdefault(series, []).append(step)
    for _, validated, value in (each for each in validations if each[0] == len(lines)):
        gathered.put("validation_loss", validated, value)
    return Run(
        name=path.stem,
        source="Megatron-LM log",
        place=str(path),
        series=gathered.series,
        precision="7 digits",
        remarks=[
            *gathered.remarks(),
            "the log has losses to 7 digits, gradient norms to 3 decimals, times to 0.1 ms",
            *_interval(sorted(gathered.series["loss"])),
            *([f"{skipped} iterations were skipped by the optimizer"] if skipped else []),
            *(
                f"{series} is missing at {len(steps)} of its lines, first at step {steps[0]}"
                for series, steps in left_out.items()
            ),
        ],
    )


def _interval(steps: list[int]) -> list[str]:
    every = spacing(steps)
    return [f"one line in {every} iterations: its loss and time are means over them"] if every > 1 else []
