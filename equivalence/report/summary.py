"""A run's outcome as one JSON document of a stable schema, from which the terminal and the HTML page are made."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equivalence.generators.fault_classes import classes
from equivalence.run import Outcome
from equivalence.subjects import PROMPT_FORMATS
from equivalence.witnesses import versions

SCHEMA = 1
WHAT = {
    "corpus": "saved cases",
    "files": "file readers",
    "recorded": "recorded outcomes",
    "sample": "packed sample",
    "rows": "generated rows",
    "batches": "batches",
    "divergences": "divergences",
    "context_parallel": "cp cuts",
    "multi_token": "MTP depths",
    "packing": "packers",
    "direct_microbatches": "direct microbatches",
    "online_microbatches": "online microbatches",
    "meeting": "direct and online rows",
    "loss": "losses",
    "online_loss": "online losses",
    "cross_entropy": "cross entropies",
    "order": "data order",
    "shares": "stride and bins",
    "guards": "guards of batches",
    "loader": "batches of the loader",
    "packed_files": "packed files",
    "models": "training steps",
    "third_witness": "steps of Megatron-LM",
    "invariance": "steps in other layouts",
    "leaks": "leaks across boundaries",
    "paths": "direct and online steps",
    "trainer": "runs of twenty steps",
    "distributed_optimizer": "distributed optimizer",
}
CHECKS = tuple(WHAT)


def summarise(outcome: Outcome, command: str) -> dict[str, Any]:
    """The document. All counts are rows unless a name says otherwise."""
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
                witness.name: round(tally.seconds[witness.name], 2) for witness in outcome.witnesses
            },
        },
        "versions": versions(),
        "witnesses": [dataclasses.asdict(witness) for witness in outcome.witnesses],
        "witnessed": _by_format(tally.witnessed),
        "checks": _checks(outcome),
        "refusals": _by_format(tally.refusals),
        "classes": _classes(outcome),
        "file_layers": tally.layers,
        "layouts": _layouts(outcome),
        "third_witness": _third_witness() if tally.layouts else {},
        "steps": dict(sorted(tally.features.items())),
        "divergences": _by_format(Counter({key: count for key, count in tally.fired.items() if key[1] != "any"})),
        "shown": {name: count for (name, where), count in sorted(tally.fired.items()) if where == "any"},
        "differences": [
            {key: value for key, value in dataclasses.asdict(each).items() if key != "case"}
            for each in tally.differences
        ],
        "unhit": outcome.unhit,
        "errors": tally.errors,
        "stopped_early": outcome.stopped,
    }


def alike(differences: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Differences of one kind together: the same sides, check, tensor and class. The kinds with most cases first, cases in order."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in differences:
        first = each["first"]
        # Where a tensor's name has the rank, row or depth in it, those are not another kind.
        tensor = re.sub(r"\d+", "N", str(first["tensor"]))
        key = (each["check"], each["left"], each["right"], tensor, str(first["class"]))
        found.setdefault(key, []).append(each)
    return sorted(found.values(), key=len, reverse=True)


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
    """Layouts of training steps, those of few ranks first."""
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
    """What Megatron-LM's side of a step is made of."""
    from equivalence.model_jobs import witness_facts  # noqa: PLC0415 - megatron-core, which a run with steps has loaded

    return witness_facts()


def _by_format(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (name, prompt_format), count in sorted(counts.items()):
        found.setdefault(name, {})[prompt_format] = count
    return found
