"""Part `file`: inspect every row of every file under the job's own format, preset, pack length and cp."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tools.check.progress import Progress
from tools.check.result import PARTS, Finding, PartResult
from tools.check.scan import Scanned, place_of, plain_scan, scan
from tools.check.target import Target
from tools.counted import counted
from tools.inspect_rows.file_notes import FIX_PACKING, is_packed_otherwise, look_through, notes_of, packed_otherwise
from tools.inspect_rows.inspection import Finding as RowFinding

_BY_VALUE = ", which padding_mask=by_value takes for padding"
_ITSELF = ", and becomes the token itself"
FIRST_PLACES = 3
"""Rows of each fault that are named."""


def check_file(
    target: Target,
    *,
    most: int,
    deadline: float,
    progress: Progress,
    told: Sequence[Finding] = (),
    processes: int | None = None,
) -> tuple[PartResult, list[Scanned]]:
    """Inspect every dataset; the scans have the rows near an edge, at most `most` of each kind.

    A fault that is among `told`, the findings of the configuration, is noted with its line and not counted again.
    """
    result = PartResult(name="file")
    scans: list[Scanned] = []
    for dataset in target.datasets:
        progress.start(f"every row of {dataset.names}")
        scans.append(scan(target, dataset, most=most, deadline=deadline, progress=progress, processes=processes))
        for file in dict.fromkeys(each.path for each in dataset.dataset.data_path):
            texts = look_through(file, deadline=deadline)
            result.notes += notes_of(texts, target.tokenizer)
    for each in scans:
        # First, since it explains what else the file loses. Nobody packs most rows so on purpose, whatever the preset allows.
        if (what := packed_otherwise(each.inspection)) is not None:
            fault = Finding(what=what, where=each.dataset.names, fix=FIX_PACKING)
            if is_packed_otherwise(each.inspection):
                result.findings.insert(0, fault)
            else:
                result.notes.insert(0, fault.text())
        for finding, first, count in _findings(each):
            if count == 1 and _is_told(first, told):
                result.notes.append(
                    f"{finding.where}: {first.kind}, {first.what} (counted once, under {PARTS['config']})"
                )
            else:
                result.findings.append(finding)
        result.notes += itertools.chain(_losses(each), _other_presets(each))
        if not each.inspection.rows_complete:
            result.not_shown.append(
                f"{each.dataset.names}: {each.rows:,} of {counted(each.total, 'row')} were inspected before the budget was spent"
            )
    result.compared = sum(each.rows for each in scans)
    stops = any("fails" in each.inspection.severities.values() for each in scans)
    result.status = "stops" if stops else "loses" if result.findings else "equal" if result.compared else "not run"
    result.witnesses = ("production",)
    counts = [each.inspection.counts for each in scans]
    trained = sum(each["trained_tokens"] for each in counts)
    refused = sum(each["rows_refused"] + each["rows_unreadable"] for each in counts)
    result.summary = f"{counted(result.compared, 'row')} inspected, {trained:,} trained tokens, {refused:,} refused"
    result.numbers = {"scans": [plain_scan(each) for each in scans]}
    result.seconds = sum(each.inspection.seconds for each in scans)
    return result, scans


def _findings(found: Scanned) -> Iterator[tuple[Finding, RowFinding, int]]:
    """Yield each kind of fault with its first row and the number of its rows."""
    inspection = found.inspection
    for kind, severity in inspection.severities.items():
        if severity == "fails":
            first = [each for each in inspection.findings if each.kind == kind and each.severity == "fails"]
            count = inspection.findings_by_kind[kind]
            yield _finding(first, count, f"a run would stop here, {kind}: "), first[0], count
    if found.idle:
        yield _finding(found.idle, found.idle_count, "nothing of the row is cut, and "), found.idle[0], found.idle_count


def _is_told(first: RowFinding, told: Sequence[Finding]) -> bool:
    """Return whether the configuration's part tells this fault: it knows the end of a very large file by byte, other rows by line."""
    line = f"{first.file}, line {first.line}"
    places = (f"{line}, ", f"{line} (", f"{first.file}, byte ")
    if first.kind == "truncated_last_line":
        return any(first.kind in each.what and each.where.startswith(places) for each in told)
    same = (first.what, f"{first.kind}: {first.what}")
    return any(each.what in same and each.where.startswith(places[:2]) for each in told)


def _finding(first: list[RowFinding], count: int, begins: str) -> Finding:
    others = "; ".join(_place(each) for each in first[1:FIRST_PLACES])
    also = f" ({count:,} rows; also {others})" if others else ""
    return Finding(what=f"{begins}{first[0].what}{also}", where=_place(first[0]), fix=first[0].fix)


def _place(finding: RowFinding) -> str:
    inner = "" if finding.conversation is None else f", conversation {finding.conversation}"
    inner += "" if finding.turn is None else f", turn {finding.turn}"
    return f"{finding.file}, line {finding.line} (row {finding.row}){inner}"


def _losses(found: Scanned) -> Iterator[str]:
    name, counts, inspection = found.dataset.names, found.inspection.counts, found.inspection
    skipped = [each for each in inspection.findings if each.is_unreadable and each.severity == "loses"]
    if skipped:
        yield (
            f"{name}: {counted(counts['rows_unreadable'], 'unreadable line', 'is', 'are')} left out (on_bad_row: skip); the first is "
            f"line {skipped[0].line} ({skipped[0].kind})"
        )
    if counts["truncated"] or counts["dropped"]:
        worst = ""
        if inspection.worst:
            worst = f", most in {place_of(found.dataset, inspection.worst[0][0])} ({inspection.worst[0][1]:,} tokens)"
        yield (
            f"{name}: {counted(counts['truncated'], 'conversation', 'is', 'are')} cut and {counted(counts['dropped'], 'conversation', 'is', 'are')} "
            f"dropped ({counts['truncated_tokens']:,} tokens and more){worst}. The preset {found.dataset.dataset.semantics} allows it, as "
            f"Megatron-LM does; with {_refusing(found)} the check fails on it"
        )
    copies = inspection.duplicate_rows.redundant, inspection.duplicate_conversations.redundant
    for count, kind, noun, verb, verbs in (
        (
            counts["conversations_that_train_nothing"],
            "trains_nothing",
            "conversation",
            "trains nothing",
            "train nothing",
        ),
        (
            counts["unrendered_messages"],
            "unrendered",
            "message",
            "renders to nothing in this format",
            "render to nothing in this format",
        ),
        (counts["unknown_keys"], "unknown_keys", "unknown key", "is passed over", "are passed over"),
        (
            counts["empty_conversations"],
            "empty_conversations",
            "conversation",
            "renders to no token",
            "render to no token",
        ),
        (counts["pad_labels"], "", "label", "is the pad id" + _BY_VALUE, "are the pad id" + _BY_VALUE),
        (
            counts["control_tokens"],
            "control_tokens",
            "control token",
            "stands in a content as text" + _ITSELF,
            "stand in contents as text, and become the tokens themselves",
        ),
        (
            counts["removed_switches"],
            "removed_switches",
            "message",
            "loses /think or /no_think",
            "lose /think or /no_think",
        ),
        (
            counts["boundary_labels"],
            "boundary_labels",
            "label",
            "reaches across a boundary and trains",
            "reach across a boundary and train",
        ),
        (
            counts["hidden_segments"],
            "hidden_segments",
            "empty segment",
            "is hidden behind another",
            "are hidden behind others",
        ),
        (copies[0], "", "row", "is a copy of another", "are copies of others"),
        (copies[1], "", "conversation", "is a copy of another", "are copies of others"),
    ):
        if count:
            yield f"{name}: {counted(count, noun, verb, verbs)}{_first(found, kind)}"


def _first(found: Scanned, kind: str) -> str:
    """Return where the first row of a kind stands; empty for a kind that the inspection does not place."""
    first = next((each for each in found.inspection.findings if each.kind == kind), None)
    return "" if first is None else f", first in {_place(first)}"


def _refusing(found: Scanned) -> str:
    """Return the overrides under which a loss is refused, with the keys that decide the preset of these rows."""
    sources, keys = found.job.sources, []
    for key in (f"{each}.semantics" for each in found.dataset.keys):
        is_own = key in sources and sources[key] != sources.get("data.default.semantics")
        keys.append(key if is_own else "data.default.semantics")
    preset = [each for each in found.dataset.dataset.semantics.split(",") if not each.startswith("lost_conversations=")]
    return " ".join(f"{key}={','.join([*preset, 'lost_conversations=refuse'])}" for key in dict.fromkeys(keys))


def _other_presets(found: Scanned) -> Iterator[str]:
    for each in found.inspection.presets:
        if refused := sum(each.rows_refused.values()):
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(each.rows_refused.items()))
            yield f"{found.dataset.names}: the preset {each.name} would refuse {counted(refused, 'row')} that this job trains ({kinds})"
