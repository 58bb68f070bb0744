"""Write a report as a table for the terminal, as Markdown, as JSON and as JUnit XML."""

from __future__ import annotations

import json
import textwrap
from typing import Any, Sequence
from xml.sax.saxutils import quoteattr

from packproof.conventions import MEGATRON_LM
from packproof.judging import FAILED, NOT_SHOWN, NOT_UNDONE, PASSED, LevelResult, Report

SCHEMA = 1
"""Version of the JSON report."""
WIDTH = 100
MOST_VALUES = 24
"""Values of a row that are printed."""


def text(report: Report, level: str, below: Sequence[LevelResult]) -> str:
    """Return the terminal's screen: one line a level, the smallest row of each miss, and the verdict on `level`."""
    conventions = ", ".join(
        "{}: {}".format(*pair) for pair in sorted(report.conventions.items()) if pair[1] != MEGATRON_LM[pair[0]]
    )
    lines = [
        f"{report.subject}, held to {report.preset}",
        "declared: " + (conventions or "Megatron-LM's conventions"),
        "",
    ]
    titles = max(len(each.level.title) for each in report.levels)
    lines.append("%-5s %-*s  %-10s  %6s  %6s  %s" % ("level", titles, "property", "result", "cases", "missed", ""))
    for each in report.levels:
        lines.append(  # noqa: PERF401 - one line a level
            (
                "%-5s %-*s  %-10s  %6d  %6d  %s"
                % (each.level.name, titles, each.level.title, each.status, each.cases, each.missed, each.note)
            ).rstrip()
        )
    for each in report.levels:
        if each.miss is not None and each.status != PASSED:
            lines += ["", *smallest(each)]
    again = next((each for each in below if each.case is not None), None)
    if again is not None:
        lines += ["", f"{again.level.name} again, alone: add --case '{question(again)}'"]
    lines += ["", verdict(report, level, below)]
    return "\n".join(lines) + "\n"


def verdict(report: Report, level: str, below: Sequence[LevelResult]) -> str:
    """Return the last line: whether the subject reaches the level that was asked for."""
    if not below:
        return f"{report.subject} reaches {level}."
    names = ", ".join(f"{each.level.name} ({_result_of(each)})" for each in below)
    return f"{report.subject} does not reach {level}: {names}."


def _result_of(each: LevelResult) -> str:
    return f"{each.status} ({each.note})" if each.note == NOT_UNDONE else each.status


def smallest(result: LevelResult) -> list[str]:
    """Return the lines that show a level's first miss in its smallest case."""
    assert result.miss is not None
    assert result.case is not None
    place = "" if result.miss.pack is None else " in row %d" % result.miss.pack
    place += "" if result.miss.position is None else " at position %d" % result.miss.position
    head = f"{result.level.name}{place}: {result.miss.what}. Rule: {result.level.rules}."
    lines = textwrap.wrap(head, WIDTH, subsequent_indent="   ")
    case = result.case
    lines.append(
        "   pack_length %d, cp %d, pad_id %d, eos_id %d (%s)"
        % (case.pack_length, case.context_parallel_size, case.pad_id, case.eos_id, case.id)
    )
    for number, each in enumerate(case.conversations):
        lines.append(
            "   conversation %d   tokens %s   trained %s" % (number, _values(each["tokens"]), _values(each["trained"]))
        )
    if isinstance(result.returned, (list, tuple)):
        for number, pack in enumerate(result.returned):
            lines += [
                "   row %d  %-12s %s" % (number, name, _values(_listed(value)))
                for name, value in _fields(pack)
                if name not in ("shards", "depths") and value is not None and len(value)
            ]
    return lines


def question(result: LevelResult) -> str:
    """Return a miss's smallest case as one line of JSON, which `--case` takes."""
    return json.dumps(result.case.question(), separators=(",", ":")) if result.case is not None else ""


def _fields(pack: Any) -> Sequence[Any]:
    return list(pack.items()) if hasattr(pack, "items") else []


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _values(values: Any) -> str:
    listed = _listed(values)
    if not isinstance(listed, (list, tuple)):
        return str(listed)
    shown = " ".join(str(each) for each in list(listed)[:MOST_VALUES])
    return shown + (" …" if len(listed) > MOST_VALUES else "")


def markdown(report: Report) -> str:
    """Return the table as Markdown, with the smallest row of each miss below it."""
    lines = [
        f"## {report.subject}, held to {report.preset}",
        "",
        "| level | property | result | cases | missed | note |",
        "|---|---|---|---|---|---|",
    ]
    lines.extend(
        "| %s | %s | %s | %d | %d | %s |"
        % (each.level.name, each.level.title, each.status, each.cases, each.missed, each.note)
        for each in report.levels
    )
    for each in report.levels:
        if each.miss is not None and each.status != PASSED:
            lines += ["", "```", *smallest(each), "```"]
    return "\n".join(lines) + "\n"


def as_json(report: Report, level: str, below: Sequence[LevelResult]) -> str:
    """Return the report as JSON."""
    levels = []
    for each in report.levels:
        found: dict[str, Any] = {
            "level": each.level.name,
            "property": each.level.title,
            "rules": each.level.rules,
            "result": each.status,
            "cases": each.cases,
            "missed": each.missed,
            "note": each.note,
        }
        if each.miss is not None and each.case is not None and each.status != PASSED:
            found["miss"] = {
                "what": each.miss.what,
                "pack": each.miss.pack,
                "position": each.miss.position,
                "case": each.case.question(),
            }
        levels.append(found)
    whole = {
        "schema": SCHEMA,
        "subject": report.subject,
        "preset": report.preset,
        "declared": report.conventions,
        "undeclared": report.undeclared,
        "level": level,
        "reached": not below,
        "levels": levels,
    }
    return json.dumps(whole, indent=1) + "\n"


def junit(report: Report, below: Sequence[LevelResult]) -> str:
    """Return the levels as JUnit XML: a failure for each level that was asked for and not passed."""
    wanted = {each.level.name for each in below}
    lines = ['<?xml version="1.0" encoding="utf-8"?>']
    skipped = [each for each in report.levels if each.status != PASSED and each.level.name not in wanted]
    lines.append(
        '<testsuite name=%s tests="%d" failures="%d" skipped="%d">'
        % (quoteattr("packproof " + report.subject), len(report.levels), len(wanted), len(skipped))
    )
    for each in report.levels:
        name = quoteattr(f"{each.level.name} {each.level.title}")
        lines.append("  <testcase classname={} name={}>".format(quoteattr(f"packproof.{report.subject}"), name))
        told = each.note or (each.miss.what if each.miss is not None else each.status)
        if each.level.name in wanted:
            shown = "\n".join(smallest(each)) if each.miss is not None else told
            lines.append(
                "    <failure message={}>{}</failure>".format(quoteattr(f"{each.status}: {told}"), _escaped(shown))
            )
        elif each.status in (FAILED, NOT_SHOWN) or each.status != PASSED:
            lines.append("    <skipped message={}/>".format(quoteattr(f"{each.status}: {told}")))
        lines.append("  </testcase>")
    return "\n".join([*lines, "</testsuite>", ""])


def _escaped(shown: str) -> str:
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
