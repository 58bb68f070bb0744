"""Keeps what was measured of each peer: a record beside the adapters, and the table of docs/conformance.md made from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packproof.conventions import MEGATRON_LM
from packproof.levels import NAMES
from tools.peers.environment import ADAPTERS, ROOT, Peer

RECORD = ADAPTERS / "results.json"
PAGE = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"

Result = dict[str, Any]


def result_of(report: Mapping[str, Any], date: str) -> Result:
    """Return the part of a JSON report of `packproof conformance` that is recorded, with the day of the measurement."""
    levels = {each["level"]: _level(each) for each in report["levels"]}
    return {"date": date, "declared": report["declared"], "undeclared": report["undeclared"], "levels": levels}


def _level(level: Mapping[str, Any]) -> Result:
    kept = {name: level[name] for name in ("result", "cases", "missed", "note")}
    if "miss" in level:
        case = level["miss"]["case"]
        kept["miss"] = {"what": level["miss"]["what"].split(" (at ")[0], "pack_length": case["pack_length"]}
        kept["miss"]["context_parallel_size"] = case["context_parallel_size"]
        kept["miss"]["conversations"] = [each["tokens"] for each in case["conversations"]]
    return kept


def read_record(path: Path = RECORD) -> dict[str, Result]:
    """Return the recorded result of each peer; none where there is no record yet."""
    found: dict[str, Result] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def write_record(results: Mapping[str, Result], path: Path = RECORD) -> None:
    """Write the results, so that the same results give the same bytes."""
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def changes(recorded: Mapping[str, Any] | None, measured: Mapping[str, Any]) -> list[str]:
    """Return what a measurement has other than the record, in words; the day and the wording of misses are left out."""
    if recorded is None:
        return ["nothing is recorded of it"]
    found = [
        f"{name} is {measured[name]}, and {recorded[name]} is recorded"
        for name in ("declared", "undeclared")
        if measured[name] != recorded[name]
    ]
    for level in NAMES:
        ours, theirs = (
            [each["levels"][level][key] for key in ("result", "missed", "cases")] for each in (measured, recorded)
        )
        if ours != theirs:
            found.append("{} is {} ({} of {}), and {} ({} of {}) is recorded".format(level, *ours, *theirs))
    return found


def table(peers: list[Peer], results: Mapping[str, Result]) -> str:
    """Return the results as Markdown: a line a peer, what each declares, and the smallest row of each miss."""
    known = [peer for peer in peers if peer.name in results]
    lines = ["| peer | " + " | ".join(NAMES) + " |", "|---" * (len(NAMES) + 1) + "|"]
    for peer in known:
        cells = [_cell(results[peer.name]["levels"][name]) for name in NAMES]
        lines.append("| " + " | ".join([peer.name, *cells]) + " |")
    lines += ["", "| peer | what makes the row | declared | stand-ins | measured |", "|---|---|---|---|---|"]
    for peer in known:
        result = results[peer.name]
        others = {name: value for name, value in result["declared"].items() if value != MEGATRON_LM[name]}
        declared = ", ".join(f"`{name}: {value}`" for name, value in sorted(others.items())) or "nothing"
        lines.append(f"| {peer.name} | {peer.title} | {declared} | {peer.stand_ins} | {result['date']} |")
    lines += ["", "The smallest row of each miss below L10:", ""]
    for peer in known:
        lines += [
            f"- {peer.name}, {name}: {_miss(results[peer.name]['levels'][name]['miss'])}"
            for name in NAMES[:-1]
            if "miss" in results[peer.name]["levels"][name]
        ]
    return "\n".join(lines) + "\n"


def _cell(level: Mapping[str, Any]) -> str:
    if level["result"] == "no":
        return f"no ({level['missed']} of {level['cases']})"
    return "–" if level["result"] == "not shown" else str(level["result"])


def _miss(miss: Mapping[str, Any]) -> str:
    conversations = " ".join(f"`{each}`" for each in miss["conversations"])
    size = f" at cp {miss['context_parallel_size']}" if miss["context_parallel_size"] > 1 else ""
    return f"{conversations} in a row of {miss['pack_length']}{size}: {miss['what']}."


def write_page(peers: list[Peer], results: Mapping[str, Result], path: Path = PAGE) -> None:
    """Replace the tables between the page's markers. ValueError where the markers are not there."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{path} must have the lines {BEGIN} and {END}, between which the tables go")
    path.write_text(f"{before}{BEGIN}\n{table(peers, results)}{END}{after}", encoding="utf-8")
