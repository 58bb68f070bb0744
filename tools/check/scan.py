"""Inspect every row of a dataset as the job would build it, and collect the rows near an edge for the witnesses."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from production.files.source import PackedSource
from production.training.config import Job
from tools.check.edges import EdgeRows
from tools.check.progress import Progress
from tools.check.target import CheckedDataset, Target
from tools.inspect_rows.inspection import Finding, Inspection
from tools.inspect_rows.scan import scan as inspect
from tools.ordered_pool import cores

FEW_BYTES = 1 << 22
"""Bytes of files that one process inspects sooner than several would start."""
DRAWN = ("fill", "trained_share", "conversation_tokens")
"""Histograms of an inspection that a certificate holds and draws."""
_EDGE_OF_KIND = {
    "truncated": "overfull",
    "dropped": "overfull",
    "pad_in_content": "pad id in content",
    "control_tokens": "control token in content",
    "empty_conversations": "empty conversation",
    "empty_conversation": "empty conversation",
    "empty_row": "empty conversation",
    "hidden_segments": "many boundaries",
    "more_boundaries_than_tokens": "many boundaries",
    "too_many_boundaries": "many boundaries",
    "boundary_labels": "boundary label",
    "unrendered": "unrendered message",
    "row_trains_nothing": "trains nothing",
    "turn_mismatch": "merge across turns",
    "indivisible_segment": "indivisible segment",
    "exactly_full": "exact fill",
    "longest": "longest",
    "shortest": "shortest",
}
"""Edge of each kind of finding, and of each kind of edge, of an inspection."""


@dataclass(kw_only=True)
class Scanned:
    """An inspection of one dataset, and its rows near an edge."""

    job: Job
    dataset: CheckedDataset
    inspection: Inspection
    edges: EdgeRows
    idle: list[Finding] = field(default_factory=list)
    """The first rows that train nothing although nothing of them is cut."""
    idle_count: int = 0
    """How many such rows there are."""

    @property
    def rows(self) -> int:
        """Return the rows that were looked at."""
        return self.inspection.counts["rows"]

    @property
    def total(self) -> int:
        """Return the lines of the dataset."""
        return len(self.dataset.source)


def scan(
    target: Target,
    dataset: CheckedDataset,
    *,
    most: int,
    deadline: float,
    progress: Progress,
    processes: int | None = None,
) -> Scanned:
    """Inspect every row up to `deadline` (seconds of Python's monotonic clock), and collect at most `most` rows of each edge.

    `processes` is the number of processes that build rows; None: 1 for few bytes, else the cores that this process may use.
    """
    collector = _Collector(dataset, EdgeRows(most))
    settings, job = dataset.dataset, target.job
    found = inspect(
        [file.path for file in settings.data_path],
        str(target.tokenizer.name_or_path),
        dataset.settings,
        processes=processes_for([dataset.source], processes),
        progress=lambda done, total: progress.update(done, total, "rows"),
        loaded=target.tokenizer,
        chat_key=settings.chat_key,
        on_bad_row=settings.on_bad_row,
        ignore_keys=settings.ignore_keys,
        ignore=" and ".join(f"{key}.ignore_keys" for key in dataset.keys),
        vocab_size=target.vocabulary,
        on_finding=collector.take,
        budget_seconds=None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0),
        cache_folder=job.data.cache_folder,
    )
    for kind, rows in found.edges.items():
        edge = "refused by one preset" if kind.startswith(("refused_by_", "accepted_by_")) else _EDGE_OF_KIND.get(kind)
        # A finding has already brought in the rows of its kind.
        if edge is not None and (edge == "refused by one preset" or kind not in found.findings_by_kind):
            for row in rows:
                collector.put(edge, row)
    collector.edges.counts["exact fill"] = max(collector.edges.counts["exact fill"], found.counts["rows_exactly_full"])
    return Scanned(
        job=job,
        dataset=dataset,
        inspection=found,
        edges=collector.edges,
        idle=collector.idle,
        idle_count=collector.idle_count,
    )


def processes_for(sources: Sequence[PackedSource], asked: int | None) -> int:
    """Return how many processes build the rows of these files: the asked number, else 1 for few bytes, else one for each core."""
    files: list[Any] = [file for source in sources for file in source.describe()["files"]]  # type: ignore[attr-defined]
    few = sum(each["plain_bytes"] for each in files) < FEW_BYTES
    return asked or (1 if few else cores())


class _Collector:
    """Takes the findings of an inspection in the order of the rows."""

    def __init__(self, dataset: CheckedDataset, edges: EdgeRows) -> None:
        files: Any = dataset.source.describe()["files"]
        starts = itertools.accumulate((each["rows"] for each in files), initial=0)
        self._first = {each["file"]: start for each, start in zip(files, starts, strict=False)}
        self.edges = edges
        self.idle: list[Finding] = []
        self.idle_count = 0
        self._put: dict[str, int] = {}
        self._cut = -1

    def take(self, finding: Finding) -> None:
        """Take a finding."""
        if finding.is_unreadable:
            return  # no side builds a row of it
        row = self._first[finding.file] + finding.row
        if finding.severity == "fails":
            self.put("refused", row)
        if finding.kind in ("truncated", "dropped"):
            self._cut = row
        if finding.kind == "row_trains_nothing" and row != self._cut:
            self.idle_count += 1
            if len(self.idle) < 3:
                self.idle.append(finding)
        if (edge := _EDGE_OF_KIND.get(finding.kind)) is not None:
            self.put(edge, row)

    def put(self, edge: str, row: int) -> None:
        """Put a row near an edge, once where several findings of one row follow each other."""
        if self._put.get(edge) != row and row not in self.edges.rows.get(edge, ())[-1:]:
            self._put[edge] = row
            self.edges.put(edge, row)


def place_of(dataset: CheckedDataset, row: int) -> str:
    """Return where a row stands: file, line and row."""
    location = dataset.source.locate(row)
    return f"{location.file}, line {location.line} (row {row})"


def plain_scan(found: Scanned) -> dict[str, Any]:
    """Return an inspection as plain JSON for the certificate: counts, kinds of findings, worst rows, histograms."""
    inspection = found.inspection
    return {
        "dataset": list(found.dataset.keys),
        "files": [dict(each) for each in inspection.files],
        "settings": dict(inspection.settings),
        "rows": found.rows,
        "rows_of_the_file": found.total,
        "counts": dict(inspection.counts),
        "findings": dict(inspection.findings_by_kind),
        "edges": dict(sorted(found.edges.counts.items())),
        "worst_rows": [
            {"row": row, "place": place_of(found.dataset, row), "lost_tokens": tokens}
            for row, tokens in inspection.worst
        ],
        "duplicates": {
            "rows": inspection.duplicate_rows.redundant,
            "conversations": inspection.duplicate_conversations.redundant,
        },
        "presets": {
            each.name: {"equal": each.rows_equal, "different": each.rows_different, "refused": dict(each.rows_refused)}
            for each in inspection.presets
        },
        "histograms": [dataclasses.asdict(each) for each in inspection.histograms if each.name in DRAWN],
        "processes": inspection.processes,
        "seconds": round(inspection.seconds, 3),
    }
