"""Put the parts of a check together as a certificate: plain JSON that a job can be held to."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from production.files.cache import write_file
from production.training.certificate import FORMAT
from production.training.metrics.versions import versions
from tools.check.result import PartResult, Verdict, summary_of

JSON_NAME = "check.json"
HTML_NAME = "check.html"


def certificate(
    verdict: Verdict,
    results: Mapping[str, PartResult],
    *,
    absent: Mapping[str, str],
    request: Mapping[str, Any],
    fingerprints: Mapping[str, Any] | None,
    made: str,
    seconds: float,
) -> dict[str, Any]:
    """Return the certificate. `absent` has the reason of each part without a result. `request` is what was asked for: files of the job, overrides, ranks, rows, parts."""
    return {
        "format": FORMAT,
        "verdict": verdict,
        "summary": summary_of(verdict, results),
        "made": made,
        "request": dict(request),
        "parts": {name: _part(each) for name, each in results.items()},
        "not_shown": [
            *(f"{name}: {why}" for name, why in absent.items()),
            *(f"{name}: {each}" for name, part in results.items() for each in part.not_shown),
        ],
        "overhead": overhead(results, seconds),
        "versions": {**versions(), "tokenizers": metadata.version("tokenizers"), "python": platform.python_version()},
        **({} if fingerprints is None else {"fingerprints": dict(fingerprints)}),
    }


def overhead(results: Mapping[str, PartResult], seconds: float) -> dict[str, float]:
    """Return the seconds of bare inspection and of everything else."""
    inspection = results["file"].seconds if "file" in results else 0.0
    return {"inspection_seconds": round(inspection, 3), "other_seconds": round(seconds - inspection, 3)}


def write_json(certified: Mapping[str, Any], folder: Path) -> Path:
    """Write the certificate, whole or not at all."""
    return write_text(folder / JSON_NAME, json.dumps(certified, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all, and return its path."""
    return write_file(path, text.encode("utf-8", errors="backslashreplace"))


def _part(result: PartResult) -> dict[str, Any]:
    return {
        "title": result.title,
        "status": result.status,
        "compared": result.compared,
        "summary": result.summary,
        "witnesses": list(result.witnesses),
        "findings": [_finding(each) for each in result.findings],
        "notes": list(result.notes),
        "not_shown": list(result.not_shown),
        "numbers": result.numbers,
        "seconds": round(result.seconds, 3),
    }


def _finding(finding: Any) -> dict[str, str]:
    return dataclasses.asdict(finding)


def lines_of(values: Sequence[str], most: int) -> list[str]:
    """Return at most `most` lines, the last of which says how many more there are."""
    return (
        list(values)
        if len(values) <= most
        else [*values[: most - 1], f"… and {len(values) - most + 1} more in the certificate"]
    )
