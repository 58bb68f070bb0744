"""A run's outcome as one JSON document of a stable schema, from which the terminal and the HTML page are made."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equivalence.checks.registry import CHECKS
from equivalence.generators.faults.registry import classes
from equivalence.runner.counters import Differing, Kind, kind_of
from equivalence.runner.outcome import Outcome
from equivalence.runner.witnesses import versions
from equivalence.subjects import BUILT_IN, PROMPT_FORMATS

SCHEMA = 1
WHAT = {check.name: check.title for check in CHECKS.values()}


def summarise(outcome: Outcome, command: str) -> dict[str, Any]:
    """Return the summary as a document. All counts are rows unless a name says otherwise."""
    tally, options = outcome.tally, outcome.options
    generated = outcome.generated
    return {
        "schema": SCHEMA,
        "verdict": outcome.verdict,
        "exit_code": outcome.exit_code,
        "command": command,
        "size": options.size,
        "seed": options.seed,
        "shard": list(options.shard),
        "workers": options.workers,
        "sample": str(options.sample) if options.sample else None,
        "tokenizer": options.tokenizer,
        "seconds": round(outcome.seconds, 2),
        "generated": {
            "rows": generated,
            "messages_per_row": round(tally.messages / generated, 2) if generated else 0.0,
            "rows_per_second": round(outcome.rate, 1),
            "cpu_milliseconds_per_row": round(1e3 * tally.seconds["generated_cpu"] / generated, 2)
            if generated
            else 0.0,
            "seconds_by_subject": {
                witness.name: round(tally.seconds[witness.called], 2) for witness in outcome.witnesses
            },
        },
        "versions": versions(),
        "witnesses": [dataclasses.asdict(witness) for witness in outcome.witnesses],
        "witnessed": _by_format(tally.witnessed),
        "checks": _checks(outcome),
        "cpu_seconds_by_check": {name: round(tally.spent[name], 2) for name in CHECKS if name in tally.spent},
        "refusals": _by_format(tally.refusals),
        "classes": _classes(outcome),
        "file_layers": tally.layers,
        "layouts": _layouts(outcome),
        "third_witness": _third_witness() if tally.layouts else {},
        "steps": dict(sorted(tally.features.items())),
        "divergences": _by_format(Counter({key: count for key, count in tally.fired.items() if key[1] != "any"})),
        "shown": {name: count for (name, where), count in sorted(tally.fired.items()) if where == "any"},
        "differences": differences_of(tally.differences),
        "alike": [{"kind": list(kind), "count": count} for kind, count in tally.alike.most_common()],
        "own_settings": _own(outcome),
        "left_out": _left_out(outcome),
        "unhit": outcome.unhit,
        "errors": tally.errors,
        "stopped_early": outcome.stopped,
    }


def _own(outcome: Outcome) -> dict[str, Any] | None:
    """Return the number of the file's rows compared in its own settings; None without a file."""
    own, tally = outcome.own, outcome.tally
    if own is None:
        return None
    of_own = [key for key in tally.rows if key[0] == "own"]
    return {
        "file": str(own.file),
        "rows": own.rows,
        "compared": sum(tally.rows[key] for key in of_own),
        "differing": sum(tally.differing[key] for key in of_own),
        "refused": sum(tally.refused[key] for key in of_own),
        "settings": dataclasses.asdict(own.settings),
        "origins": dict(own.origins),
        "told": own.told,
    }


def _left_out(outcome: Outcome) -> list[str]:
    """Return what was left out, in words: parts of the plan, and cases that a subject does not take."""
    found = list(dict.fromkeys(outcome.left_out))
    for (name, check), count in sorted(outcome.tally.left_out.items()):
        if name not in BUILT_IN:  # of the built-in ones the page says what they are witnesses of
            found.append(f"{count:,} of {WHAT[check]}: settings that {name} does not take")
    return found


def alike(differences: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group differences with the same sides, check, tensor and class; the groups with most cases first, cases in order."""
    found: dict[Kind, list[dict[str, Any]]] = {}
    for each in differences:
        found.setdefault(kind_key(each), []).append(each)
    return sorted(found.values(), key=len, reverse=True)


def more_alike(summary: dict[str, Any], each: dict[str, Any]) -> int:
    """Return how many differences of a kind were counted and not shown."""
    return sum(int(counted["count"]) for counted in summary["alike"] if tuple(counted["kind"]) == kind_key(each))


def kind_key(each: dict[str, Any]) -> Kind:
    """Return the sides, check, tensor and class by which differences are grouped."""
    first = each["first"]
    return kind_of(each["check"], each["left"], each["right"], str(first["tensor"]), str(first["class"]))


def differences_of(differences: Sequence[Differing]) -> list[dict[str, Any]]:
    """Return differences as JSON, without the cases that files hold."""
    return [{key: value for key, value in dataclasses.asdict(each).items() if key != "case"} for each in differences]


def first_results(outcome: Outcome) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the summary's parts `checks` and `own_settings` from the cases counted so far, for a screen during a run."""
    return _checks(outcome), _own(outcome)


def write_json(summary: dict[str, Any], path: Path) -> None:
    """Write the document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _checks(outcome: Outcome) -> list[dict[str, Any]]:
    tally, found = outcome.tally, []
    for check in CHECKS:
        for prompt_format in (*PROMPT_FORMATS, "any"):
            key = check, prompt_format
            if tally.rows[key]:
                counts = {
                    "rows": tally.rows[key],
                    "equal": tally.equal[key],
                    "refused_alike": tally.refused[key],
                    "differing": tally.differing[key],
                }
                found.append({"check": check, "what": WHAT[check], "format": prompt_format, **counts})
    return found


def _classes(outcome: Outcome) -> list[dict[str, Any]]:
    tally, found = outcome.tally, []
    for each in classes().values():
        formats: dict[str, Any] = {}
        for prompt_format in PROMPT_FORMATS:
            key = each.name, prompt_format
            if each.applies(prompt_format):
                formats[prompt_format] = {"hit": tally.hits[key], "aimed": tally.aimed[key]}
            else:
                formats[prompt_format] = {"not_applicable": each.not_in[prompt_format]}
        found.append({"name": each.name, "group": each.group, "what": each.what, "formats": formats})
    return found


def _layouts(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the layouts of training steps, those of few ranks first."""
    found = [
        {
            "layout": name,
            "ranks": int(counts["ranks"]),
            "cases": counts["cases"],
            "checks": counts["checks"],
            "third_witness": counts["third witness"],
            "ties": counts["ties"],
            "differing": counts["differing"],
            "seconds": round(counts["seconds"], 2),
        }
        for name, counts in outcome.tally.layouts.items()
    ]
    return sorted(found, key=lambda each: (each["ranks"], each["layout"]))


def _third_witness() -> dict[str, Any]:
    """Return the facts about Megatron-LM's side of a step."""
    from equivalence.runner.step_jobs import witness_facts  # noqa: PLC0415 - megatron-core, which a run with steps has loaded

    return witness_facts()


def _by_format(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (name, prompt_format), count in sorted(counts.items()):
        found.setdefault(name, {})[prompt_format] = count
    return found
