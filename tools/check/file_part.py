"""Part `file`: inspect every row of every file under the job's own format, preset, pack length and cp."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tools.check.line_texts import look_through, notes_of
from tools.check.progress import Progress
from tools.check.result import Finding, PartResult
from tools.check.scan import Scanned, place_of, plain_counts, scan
from tools.check.target import Target

OVERFULL_SHARE = 0.01
UNDERFULL = 0.6
"""Shares from which a file looks as if it had been packed for something else; below them nothing is said."""


def check_file(target: Target, *, most: int, deadline: float, progress: Progress) -> tuple[PartResult, list[Scanned]]:
    """Scan every dataset; the scans have the rows near an edge, at most `most` of each kind."""
    result = PartResult(name="file")
    scans = []
    for dataset in target.datasets:
        progress.start(f"every row of {dataset.names}")
        scans.append(scan(target, dataset, most=most, deadline=deadline, progress=progress))
        for file in dict.fromkeys(each.path for each in dataset.dataset.data_path):
            texts = look_through(file, deadline=deadline)
            result.notes += notes_of(texts, target.tokenizer)
    for each in scans:
        result.findings += _findings(each)
        result.notes += _notes(each)
        if not each.is_whole:
            result.not_shown.append(
                f"{each.dataset.names}: {each.rows:,} of {each.total:,} rows were inspected before the budget was spent"
            )
    result.compared = sum(each.rows for each in scans)
    result.status = "loses" if result.findings else "equal" if result.compared else "not run"
    result.witnesses = ("production",)
    trained = sum(each.totals["trained_tokens"] for each in scans)
    refused = sum(each.refused for each in scans)
    result.summary = f"{result.compared:,} rows inspected, {trained:,} trained tokens, {refused:,} rows refused"
    result.numbers = {"scans": [plain_counts(each) for each in scans]}
    result.seconds = sum(each.seconds for each in scans)
    return result, scans


def _findings(found: Scanned) -> Iterator[Finding]:
    for kind, faults in found.faults.items():
        count = found.fault_counts[kind]
        first, others = faults[0], faults[1:]
        also = f" ({count:,} rows; also {'; '.join(each.where for each in others)})" if others else ""
        stops = "" if kind == "trains_nothing" else f"a run would stop here, {kind}: "
        yield Finding(what=f"{stops}{first.what}{also}", where=first.where, fix=first.fix)


def _notes(found: Scanned) -> Sequence[str]:
    return [*itertools.chain(_losses(found), _looks_packed_otherwise(found))]


def _losses(found: Scanned) -> Iterator[str]:
    name, totals = found.dataset.names, found.totals
    if skipped := found.dataset.source.skipped:
        first = skipped[0]
        yield (
            f"{name}: {len(skipped):,} lines that cannot be read are left out (on_bad_row: skip), the first at line {first.line} "
            f"({first.kind})"
        )
    if totals["truncated"] or totals["dropped"]:
        lost, row, _ = found.worst[0]
        yield (
            f"{name}: {totals['truncated']:,} conversations are cut and {totals['dropped']:,} are dropped ({totals['truncated_tokens']:,} "
            f"tokens and more), most in {place_of(found.dataset, row)} ({lost:,} tokens). The preset {found.dataset.dataset.semantics} "
            "allows it, as Megatron-LM does; with lost_conversations=refuse the check fails on it"
        )
    for count, what in (
        (totals["unrendered_messages"], "messages render to nothing in this format"),
        (totals["unknown_keys"], "keys of messages are passed over"),
        (totals["empty_conversations"], "conversations render to no token"),
        (totals["labels_masked_as_padding"], "labels are taken for padding, since the content has the pad id"),
        (totals["control_tokens"], "control tokens stand in contents as text, and become the tokens themselves"),
        (totals["boundary_labels"], "labels reach across a boundary and train"),
        (totals["hidden_segments"], "segments are hidden behind others, since they are empty"),
    ):
        if count:
            yield f"{name}: {count:,} {what}"


def _looks_packed_otherwise(found: Scanned) -> Iterator[str]:
    """Say that a file without a word about its settings looks as if it had been packed for others."""
    built = found.rows - found.refused
    if not built:
        return
    overfull = found.edges.counts["overfull"] / built
    fill = 1 - found.totals["padding_tokens"] / max(found.positions, 1)
    fix = "find out which tokenizer, prompt format, pack length and cp it was packed for, and give the job those or pack it anew"
    if overfull > OVERFULL_SHARE:
        yield (
            f"{found.dataset.names}: {100 * overfull:.1f} % of its rows are overfull, as if packed for another tokenizer, format or a "
            f"longer row: {fix}"
        )
    elif fill < UNDERFULL:
        yield (
            f"{found.dataset.names}: only {100 * fill:.0f} % of its rows is filled, as if packed for another tokenizer, format or a "
            f"shorter row: {fix}"
        )
