"""The report as one self-contained HTML page: no script, no resource from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equivalence.report.summary import alike, more_alike
from equivalence.report.templates import environment
from equivalence.report.terminal import alone_line
from equivalence.subjects import PROMPT_FORMATS


def write_html(summary: dict[str, Any], path: Path) -> None:
    """Render the document of `summary.summarise`."""
    templates = environment("equivalence.report")
    templates.filters["alone"] = alone_line
    kinds = alike(summary["differences"])
    page = templates.get_template("report.html").render(
        formats=PROMPT_FORMATS,
        groups=_groups(summary),
        kinds=kinds,
        counted=[more_alike(summary, kind[0]) for kind in kinds],
        **summary,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate of a case may stand in an error's text; a page cannot hold one.
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _groups(summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for each in summary["classes"]:
        found.setdefault(each["group"], []).append(each)
    return found
