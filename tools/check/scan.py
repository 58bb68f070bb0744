"""Build every row of a dataset as the job's loader does, and keep what a check needs of it in bounded memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from production.errors import PackproofError
from production.rows.batch import BatchSettings
from production.rows.builder import Row
from production.training.data.dataset import PackedData
from production.training.data.order import Sample
from tools.check.edges import EdgeRows, RowFacts
from tools.check.progress import Progress
from tools.check.target import CheckedDataset, Target

BINS = 20
"""Bins of the histograms of shares."""
FIRST_PLACES = 3
"""Rows of each fault that are named."""
WORST = 10
"""Rows with the largest losses that are named."""
LOSSES = ("truncated", "dropped", "truncated_tokens", "unrendered_messages", "unknown_keys", "empty_conversations")
"""Counts of docs/SPEC.md#report that are lost data."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row that a run would refuse, or that trains nothing."""

    kind: str
    what: str
    where: str
    fix: str


@dataclass(kw_only=True)
class Scanned:
    """Counts of a scan."""

    dataset: CheckedDataset
    rows: int = 0
    """Rows that were built or refused."""
    total: int
    """Rows of the dataset."""
    positions: int = 0
    """Tokens of all built rows, padding included."""
    totals: Counter[str] = field(default_factory=Counter)
    """Sums of the reports of all rows."""
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    """First places of each kind of fault."""
    fault_counts: Counter[str] = field(default_factory=Counter)
    fill: Counter[int] = field(default_factory=Counter)
    """Rows by the bin of the share of a row that is not padding."""
    trained: Counter[int] = field(default_factory=Counter)
    """Rows by the bin of the share of their own tokens that trains."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Segments by the power of two that their length reaches."""
    worst: list[tuple[int, int, dict[str, int]]] = field(default_factory=list)
    """(lost tokens, row, losses) of the rows that lose most."""
    edges: EdgeRows
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Return whether every row was looked at."""
        return self.rows == self.total

    @property
    def refused(self) -> int:
        """Return the rows that a run would refuse."""
        return sum(count for kind, count in self.fault_counts.items() if kind != "trains_nothing")


def scan(target: Target, dataset: CheckedDataset, *, most: int, deadline: float, progress: Progress) -> Scanned:
    """Build every row up to `deadline` (of `time.monotonic`), and collect at most `most` rows of each edge."""
    found = Scanned(dataset=dataset, total=len(dataset.source), edges=EdgeRows(most))
    data = PackedData(
        sources=[dataset.source],
        tokenizer=target.tokenizer,
        settings=dataset.settings,
        guards=BatchSettings(
            context_parallel_size=dataset.settings.context_parallel_size, data_parallel_size=1, global_batch_size=None
        ),
        keys=dataset.message_keys,
    )
    started = time.monotonic()
    for start in range(0, found.total, data.group):
        samples = [Sample(0, row, 0) for row in range(start, min(start + data.group, found.total))]
        for sample, built in zip(samples, data.prepare(samples), strict=True):
            _take(found, sample.row, built)
        progress.update(found.rows, found.total, "rows")
        if time.monotonic() > deadline:
            break
    found.seconds = time.monotonic() - started
    return found


def _take(found: Scanned, row: int, built: Row | PackproofError) -> None:
    length = found.dataset.settings.pack_length
    found.rows += 1
    if isinstance(built, PackproofError):
        kind = str(getattr(built, "kind", "refused"))
        _put_fault(found, Fault(kind=kind, what=built.what, where=built.where, fix=built.mend))
        found.edges.add(RowFacts(row=row, pack_length=length, refusal=kind, counts={}))
        return
    counts = {name: value or 0 for name, value in built.report.items()}
    lengths = built.cu_seqlens.diff()
    cp = built.context_parallel_size
    facts = RowFacts(
        row=row,
        pack_length=length,
        counts=counts,
        segments=len(lengths),
        is_divisible=cp == 1 or not bool(torch.any(lengths % (2 * cp))),
    )
    found.edges.add(facts)
    found.totals.update(counts)
    found.positions += length
    own = max(facts.tokens, 1)
    found.fill[_bin(facts.tokens / length)] += 1
    found.trained[_bin(counts["trained_tokens"] / own)] += 1
    found.lengths.update(int(each).bit_length() - 1 for each in lengths.tolist() if each > 0)
    losses = {name: counts[name] for name in LOSSES if counts.get(name)}
    if losses:
        found.worst.append((counts.get("truncated_tokens", 0), row, losses))
        found.worst.sort(key=lambda each: (-each[0], each[1]))
        del found.worst[WORST:]
    if not counts["trained_tokens"] and not (counts.get("truncated") or counts.get("dropped")):
        what = "no token of the row trains, although nothing of it is cut"
        fix = (
            "look at the row (packproof diff-row) and give the prompt format, roles and assistant prefix that the file was written for, "
            "or leave the row out"
        )
        _put_fault(found, Fault(kind="trains_nothing", what=what, where=place_of(found.dataset, row), fix=fix))


def place_of(dataset: CheckedDataset, row: int) -> str:
    """Return where a row stands: file, line and row."""
    location = dataset.source.locate(row)
    return f"{location.file}, line {location.line} (row {row})"


def _put_fault(found: Scanned, fault: Fault) -> None:
    found.fault_counts[fault.kind] += 1
    kept = found.faults.setdefault(fault.kind, [])
    if len(kept) < FIRST_PLACES:
        kept.append(fault)


def _bin(share: float) -> int:
    return min(int(share * BINS), BINS - 1)


def shares_of(counts: Counter[int]) -> Iterator[tuple[float, int]]:
    """Yield (lower end of the bin in percent, rows) of every bin."""
    return ((100 * number / BINS, counts.get(number, 0)) for number in range(BINS))


def plain_counts(found: Scanned) -> dict[str, Any]:
    """Return the counts of a scan as plain JSON, for the certificate."""
    return {
        "dataset": list(found.dataset.keys),
        "files": [file.path for file in found.dataset.dataset.data_path],
        "rows": found.rows,
        "rows_of_the_file": found.total,
        "refused": dict(found.fault_counts),
        "counts": dict(sorted(found.totals.items())),
        "edges": dict(sorted(found.edges.counts.items())),
        "worst_rows": [{"row": row, "place": place_of(found.dataset, row), **losses} for _, row, losses in found.worst],
        "histograms": {
            "fill_percent": [list(each) for each in shares_of(found.fill)],
            "trained_percent": [list(each) for each in shares_of(found.trained)],
            "segment_tokens": [[2**power, found.lengths[power]] for power in sorted(found.lengths)],
        },
        "seconds": round(found.seconds, 3),
    }
