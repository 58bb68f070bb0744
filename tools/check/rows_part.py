"""Part `rows`: rows of the job's own file by reference, production and the installed Megatron-LM, compared to the bit.

The rows are those near an edge and a sample spread over the file, in the job's own settings.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from equivalence.cases.result import CheckResult
from equivalence.checks.rows.rows import check_row
from equivalence.subjects import Subject
from production.errors import BadInput, RowRefused
from production.rows.builder import RowBuilder
from tools.check.edges import spread
from tools.check.progress import Progress
from tools.check.result import Finding, PartResult
from tools.check.scan import Scanned, place_of
from tools.check.target import CheckedDataset, Target
from tools.counted import counted

MOST_FINDINGS = 5
"""Differing rows that are told; the largest difference is among them."""


@dataclass(kw_only=True)
class _Compared:
    """Comparisons of all datasets."""

    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Rows that all sides refused, by kind."""
    edges: Counter[str] = field(default_factory=Counter)
    differing: list[tuple[int, Finding]] = field(default_factory=list)
    """(values that differ, finding) of each row that differs."""
    left_out: set[str] = field(default_factory=set)
    """Sides that do not take the settings."""


def check_rows(
    target: Target,
    scans: Sequence[Scanned],
    sides: Mapping[str, Subject],
    *,
    rows: int,
    deadline: float,
    progress: Progress,
) -> PartResult:
    """Compare rows of every dataset: those near an edge that the scans kept, and at most `rows` spread over the file.

    `sides` are subjects by the name that their user wrote, which the printed command takes. Rows are compared in an order that mixes edges and sample, so that a budget that ends early leaves some of both.
    """
    started = time.monotonic()
    result = PartResult(name="rows")
    compared = _Compared()
    for scanned in scans:
        _add_merges(target, scanned)
        chosen = scanned.edges.chosen()
        for row in spread(len(scanned.dataset.source), rows):
            chosen.setdefault(row, [])
        progress.start(
            f"{counted(len(chosen), 'row')} of {scanned.dataset.names} against {', '.join(each.name for each in sides.values())}"
        )
        done = _compare(target, scanned.dataset, chosen, sides, compared, deadline, progress)
        if done < len(chosen):
            result.not_shown.append(
                f"{scanned.dataset.names}: {done:,} of {counted(len(chosen), 'chosen row')} were compared before the budget was spent"
            )
        result.not_shown += [
            f"{scanned.dataset.names}: {counted(more, 'more row')} near the edge “{edge}” {'was' if more == 1 else 'were'} not compared (--rows takes more)"
            for edge, more in scanned.edges.left_out().items()
        ]
        others = scanned.total - done
        if others > 0:
            result.not_shown.append(
                f"{scanned.dataset.names}: {others:,} of {counted(scanned.total, 'row')} {'was' if others == 1 else 'were'} built by production alone, and not compared with a witness"
            )
    result.compared = compared.rows
    compared.differing.sort(key=lambda each: -each[0])
    result.findings = [finding for _, finding in compared.differing[:MOST_FINDINGS]]
    if len(compared.differing) > MOST_FINDINGS:
        result.notes.append(
            f"{len(compared.differing):,} rows differ; the {MOST_FINDINGS} with the most differing values are told"
        )
    for name in sorted(compared.left_out):
        result.not_shown.append(f"{name} is not a witness of the job's preset, so it built no row")
    result.witnesses = tuple(
        f"{each.name} ({getattr(each, 'version', 'this package')})"
        for each in sides.values()
        if each.name not in compared.left_out
    )
    if len(result.witnesses) < 2:
        result.not_shown.append("fewer than two sides take the job's settings: nothing was compared")
        result.compared = 0
    differ = len(compared.differing)
    result.status = "differs" if differ else "equal" if result.compared else "not run"
    result.summary = f"{counted(compared.rows, 'row')} compared, {differ:,} differ"
    if compared.refused:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in compared.refused.most_common())
        result.summary += f"; refused alike by all sides: {kinds}"
    result.numbers = {"edges": dict(sorted(compared.edges.items())), "refused_alike": dict(compared.refused)}
    result.seconds = time.monotonic() - started
    return result


def _compare(
    target: Target,
    dataset: CheckedDataset,
    chosen: dict[int, list[str]],
    sides: Mapping[str, Subject],
    compared: _Compared,
    deadline: float,
    progress: Progress,
) -> int:
    settings = dataset.subject_settings
    for done, row in enumerate(_mixed(chosen)):
        if time.monotonic() > deadline:
            return done
        progress.update(done, len(chosen), "rows")
        try:
            messages = dataset.source[row]
        except BadInput:
            continue  # the part `file` tells it
        found = check_row(messages, target.tokenizer, settings, list(sides.values()))
        compared.rows += 1
        compared.edges.update(chosen[row] or ["sample"])
        compared.left_out.update(found.left_out)
        if found.equal and found.refused:
            compared.refused[found.refused] += 1
        elif not found.equal:
            compared.differing.append((_size(found), _finding(target, dataset, row, chosen[row], found, sides)))
    return len(chosen)


def _mixed(chosen: dict[int, list[str]]) -> list[int]:
    """Return the rows edge by edge in turn: a sample first, then one of each edge, and so on."""
    by_kind: dict[str, list[int]] = {}
    for row, edges in chosen.items():
        by_kind.setdefault(edges[0] if edges else "", []).append(row)
    order = []
    while by_kind:
        for kind in list(by_kind):
            order.append(by_kind[kind].pop(0))
            if not by_kind[kind]:
                del by_kind[kind]
    return order


def _size(found: CheckResult) -> int:
    return max(len(each.differences) for each in found.findings)


def _finding(
    target: Target,
    dataset: CheckedDataset,
    row: int,
    edges: Sequence[str],
    found: CheckResult,
    sides: Mapping[str, Subject],
) -> Finding:
    worst = max(found.findings, key=lambda each: len(each.differences))
    first = worst.differences[0]
    at = "" if first.position is None else f" at {first.position}"
    near = f" (near the edge: {', '.join(edges)})" if edges else ""
    return Finding(
        what=(
            f"{worst.left} and {worst.right} differ in {counted(len(worst.differences), 'value')}, first in {first.tensor}{at}: "
            f"{first.left} and {first.right} ({first.kind}){near}"
        ),
        where=place_of(dataset, row),
        fix="look at the row with the command below; docs/guides/your-loss-is-off.md says what each pattern means",
        command=diff_row_command(target, dataset, row, list(sides)),
    )


def diff_row_command(target: Target, dataset: CheckedDataset, row: int, sides: Sequence[str]) -> str:
    """Return the command line that shows a row of the dataset in the job's own settings."""
    location, settings = dataset.source.locate(row), dataset.subject_settings
    words = [
        *("python", "-m", "tools.diff_row", location.file, "--row", str(location.line - 1)),
        *("--tokenizer", str(target.tokenizer.name_or_path), "--prompt-format", settings.prompt_format),
        *("--pack-length", str(settings.pack_length), "--context-parallel-size", str(settings.context_parallel_size)),
        *("--semantics", settings.semantics, "--ignore-manifest", "--sides", ",".join(sides)),
    ]
    if settings.pad_token is not None:
        words += ["--pad-token", settings.pad_token]
    if settings.assistant_prefix_len is not None:
        words += ["--assistant-prefix-len", str(settings.assistant_prefix_len)]
    if dataset.dataset.chat_key != "messages":
        words += ["--chat-key", dataset.dataset.chat_key]
    return shlex.join(words)


def _add_merges(target: Target, scanned: Scanned) -> None:
    """Name the rows whose turns merge, among those on which presets do not agree: only an exact turn check refuses them."""
    dataset = scanned.dataset
    exact = RowBuilder(
        tokenizer=target.tokenizer,
        settings=dataclasses.replace(
            dataset.settings, semantics=dataclasses.replace(dataset.settings.semantics, turn_check="exact")
        ),
    )
    for row in scanned.edges.rows.get("refused by one preset", ()):
        if _refusal(exact, dataset.source[row]) == "turn_mismatch":
            scanned.edges.put("merge across turns", row)


def _refusal(builder: RowBuilder, messages: Sequence[object]) -> str:
    try:
        builder.build(messages)
    except RowRefused as error:
        return error.kind
    return ""
