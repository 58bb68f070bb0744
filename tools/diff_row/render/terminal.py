"""The screen of a report: a row, its conversations and the first difference; with a rank, its place and every step; with a dump, all ranks.

Plain text where it is piped: whatever a colour says is also said by a sign (▶ the place, * a value that differs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.text import Text

from tools.counted import counted
from tools.diff_row.rank.steps import RankFindings, StepDifference
from tools.diff_row.render.rank_tables import followed_position, rank_place, refused_at_steps, step_table
from tools.diff_row.render.tables import Column, closeup, draw
from tools.diff_row.report import Report
from tools.diff_row.row.findings import EVERYTHING, IGNORED_LABEL, RULES, Findings, Found, Pair
from tools.diff_row.row.layout import Conversation
from tools.diff_row.tokens import fit, value_and_text, visible

STATES = {
    "kept": "green",
    "truncated": "yellow",
    "dropped": "red",
    "empty": "yellow",
    "unknown": "dim",
    "not built": "dim",
}
MOST_CONVERSATIONS = 6
MOST_TENSORS = 10
"""Largest number of tensors of the first differing step whose cause is printed."""
MOST_FED = 12
"""Microbatches of a dump that are listed."""


def show(report: Report, console: Console, *, page: str | None = None) -> None:
    """Print the screen. `page` is where the page of all tokens was written, if it was."""
    for part in _ROW if report.rank is None else _RANK:
        lines = list(part(report, console.width))
        for line in lines:
            console.print(line, no_wrap=False, soft_wrap=False, highlight=False)
        if lines:
            console.print()
    console.print(_next(report, page), highlight=False)


def _dump(report: Report, width: int) -> Iterator[Text]:
    """Print what each rank of a job fed; the rest of the screen is about the microbatch with the arrow."""
    if (fed := report.fed) is None:
        return
    count, differing = len(fed.looked_at), [each for each in fed.looked_at if not each.equal]
    line = _verdict(is_equal=report.equal)
    line.append(f"{visible(fed.folder)}: {count:,} microbatch{'es' if count > 1 else ''} of ", "")
    line.append(f"{counted(len({each.rank for each in fed.looked_at}), 'rank')} against the reference")
    yield line.append("" if report.equal else f", {len(differing):,} differ")
    rest = [each for each in fed.looked_at if each.equal]
    listed = sorted(
        [*differing[:MOST_FED], *rest[: max(0, MOST_FED - len(differing))]], key=lambda e: (e.rank, e.microbatch)
    )
    columns = [
        Column(title="rank", right=True),
        Column(title="microbatch", right=True),
        Column(title="row"),
        Column(title="first difference"),
    ]
    lines: list[list[Text] | str] = [
        [
            Text(f"{'▶ ' if each is fed.shown else ''}{each.rank}", "bold" if each is fed.shown else ""),
            Text(str(each.microbatch)),
            Text(f"{visible(each.file)} {each.told}"),
            Text(each.first or "equal", "bold red" if each.first else "green"),
        ]
        for each in listed
    ]
    if len(fed.looked_at) > len(listed):
        lines.append(f"… {len(fed.looked_at) - len(listed):,} more")
    yield from draw(columns, lines, width)


def _header(report: Report, _width: int) -> Iterator[Text]:
    """Print the source of the row, its settings, and the sides with their letters."""
    findings = report.row
    source, settings = findings.source, findings.settings
    what = Text()
    if source.file is not None:
        what.append(visible(source.file), "bold")
        what.append(" (saved case)" if source.case else f"  {source.place}".rstrip(), "bold")
    if source.dump is not None:
        what.append("  against  " if source.file is not None else "")
        what.append(f"{visible(source.dump)}  row {source.dump_row} of the batch, from 0", "bold")
    yield what
    facts = []
    if settings is not None:
        told = {name: f" ({origin})" for name, origin in source.settings_from.items()}
        facts = [
            f"{settings.prompt_format}{told.get('prompt_format', '')}",
            f"P {settings.pack_length:,}{told.get('pack_length', '')}",
            f"cp {settings.context_parallel_size}{told.get('context_parallel_size', '')}",
            f"{settings.semantics}{told.get('semantics', '')}",
            *([f"pad {settings.pad_token}"] if settings.pad_token is not None else []),
            *([f"prefix {settings.assistant_prefix_len}"] if settings.assistant_prefix_len is not None else []),
        ]
    elif findings.length:
        facts = [f"P {findings.length:,}"]
    yield Text(" · ".join([*facts, f"tokenizer {visible(findings.tokenizer or 'none, so ids only')}"]))
    sides = Text("sides  ")
    for side in findings.sides:
        sides.append(f"{findings.letters[side.name]} ", "cyan")
        sides.append(visible(side.name), "bold")
        sides.append(f" ({side.version})" if side.version else "", "dim")
        sides.append("   ")
    yield sides
    ways = {} if report.rank is None else report.rank.ways
    for name, who in ways.items():
        if name not in (who, "megatron_lm", "fed"):
            yield Text(f"       {visible(name)} builds the row; from there on it goes the {who}'s way", "dim")


def _conversations(report: Report, width: int) -> Iterator[Text]:
    """Print the conversations, and the report's counts that are not zero, of the first side that counts; the table below shows differing counts."""
    findings = report.row
    yield from _table_of_conversations(findings, width)
    counting = next((side for side in findings.built if side.row.report is not None), None)
    if counting is not None and counting.row.report is not None:
        differs = any(tensor.startswith("report.") for pair in findings.pairs for tensor in pair.counts)
        line = Text(f"report of {visible(counting.name)}  " if differs else "report  ", "dim")
        yield line.append(" · ".join(f"{name} {value:,}" for name, value in counting.row.report.items() if value), "")


def _table_of_conversations(findings: Findings, width: int) -> Iterator[Text]:
    shown = pick(findings)
    if not shown:
        return
    columns = [
        Column(title="conversation", right=True),
        Column(title="messages", right=True),
        Column(title="tokens", right=True),
        Column(title="padding", right=True),
        Column(title="start..end", right=True),
        Column(title="trained", right=True),
        Column(title="state"),
    ]
    first = findings.first.position if findings.first is not None else None
    lines: list[list[Text] | str] = []
    before = -1
    for conversation in shown:
        if conversation.number > before + 1:
            lines.append(f"… {conversation.number - before - 1} more")
        before = conversation.number
        inside = conversation.start is not None and conversation.end is not None
        here = inside and first is not None and conversation.start <= first < conversation.end  # type: ignore[operator]
        lines.append(
            [
                Text(f"{'▶ ' if here else ''}{conversation.number}", "bold red" if here else ""),
                Text(str(len(conversation.roles)) if conversation.roles else "?"),
                *(Text(_count(value)) for value in (conversation.tokens, conversation.padding)),
                Text(f"{conversation.start}..{conversation.end}" if inside else "–"),
                Text(_count(conversation.trained)),
                Text(conversation.state, STATES.get(conversation.state, "")),
            ]
        )
    if (rest := len(findings.map.conversations) - before - 1) > 0:
        lines.append(f"… {rest} more")
    yield from draw(columns, lines, width)


def pick(findings: Findings) -> list[Conversation]:
    """Return the conversations to show: all if few, else the first ones, those around the difference, and the last."""
    every = findings.map.conversations
    if len(every) <= MOST_CONVERSATIONS:
        return list(every)
    chosen = {0, 1, len(every) - 1}
    first = findings.first.position if findings.first is not None else None
    lost = [c.number for c in every if c.state in ("truncated", "dropped", "empty")]
    if first is not None and first < len(findings.map.conversation_at):
        at = int(findings.map.conversation_at[first])
        chosen |= {number for number in (at - 1, at, at + 1) if 0 <= number < len(every)}
    for number in [*lost, *range(len(every))]:
        if len(chosen) >= MOST_CONVERSATIONS:
            break
        chosen.add(number)
    return [every[number] for number in sorted(chosen)]


def _refusals(report: Report, width: int) -> Iterator[Text]:
    """Print the sides that refuse the row, and the results of the others."""
    findings = report.row
    refused = [side for side in findings.sides if side.row.refusal is not None]
    for side in refused:
        refusal = side.row.refusal
        assert refusal is not None
        line = Text("REFUSED ", "bold red" if any(pair.counts for pair in findings.pairs) else "bold yellow")
        line.append(f"by {visible(side.name)}: ")
        line.append(refusal.kind, "bold")
        places = (("conversation", refusal.conversation), ("turn", refusal.turn))
        where = ", ".join(f"{what} {number}" for what, number in places if number is not None)
        line.append(f"  at {where}" if where else "", "bold")
        yield line
        if refusal.message:
            yield Text(f"        {fit(visible(refusal.message), max(20, 2 * width - 24)).rstrip()}", "dim")
    for side in findings.built if refused else ():
        assert side.row.token_mask is not None
        assert side.row.cu_seqlens is not None
        trained, segments = int((side.row.token_mask != 0).sum()), side.row.cu_seqlens.numel() - 1
        line = Text("built", "bold green")
        line.append(
            f"   by {visible(side.name)}: {findings.length:,} positions, {segments:,} segments, {trained:,} trained"
        )
        yield line


def _first(report: Report, width: int) -> Iterator[Text]:
    findings = report.row
    first = findings.first
    if first is None:
        if len(findings.sides) > 1:
            yield from _equal(findings)
        elif (
            flaw := next((f for flaws in findings.flaws.values() for f in flaws if f.position is not None), None)
        ) is not None:
            assert flaw.position is not None
            yield from closeup(findings, flaw.position, width)
        return
    if first.tensor == "refusal":
        return
    line = _verdict(is_equal=False).append(first.kind.replace("_", " "), "bold").append(f" in {first.tensor}")
    if first.position is not None:
        line.append(f" at position {first.position:,}", "bold")
        line.append(f"  (conversation {findings.map.place(first.position)})" if len(findings.map.turn_at) else "")
    yield line
    yield _both_values(first, findings)
    if first.position is not None:
        yield from closeup(findings, first.position, width)


def _first_step(report: Report, width: int) -> Iterator[Text]:
    """Print the first step at which sides differ, what is there, and the places around it."""
    assert report.rank is not None
    findings, step = report.rank, report.rank.first
    if step is None:
        if findings.steps and len(report.row.sides) > 1:
            names = " = ".join(visible(side.name) for side in report.row.sides)
            line = _verdict(is_equal=True).append(
                f"{names}: every tensor at every step up to {findings.steps[-1].label}"
            )
            if report.row.covered != EVERYTHING:
                line.append(f" ({report.row.covered})")
            yield line.append(_uncompared(findings))
        return
    found = step.differences[0]
    line = _verdict(is_equal=False).append(f"first at step {step.label}", "bold").append(f" in {found.tensor}")
    line.append("" if found.place is None else f" at place {found.place:,}", "bold")
    yield line.append("" if found.position is None else f" = position {found.position:,} of the row", "bold")
    where = "" if found.position is None else report.row.map.place(found.position)
    yield _both_values(found, report.row).append(f"  (conversation {where})" if where else "")
    for each in step.differences[:MOST_TENSORS]:
        line = Text(f"          {each.tensor}", "").append(f" {each.count:,} differ", "red")
        line.append(f" in {visible(each.right)}", "dim")
        yield line.append(f": {each.cause}", "bold" if each.cause != "differs" else "dim")
    if len(step.differences) > MOST_TENSORS:
        yield Text(f"          … {len(step.differences) - MOST_TENSORS} tensors more", "dim")
    if step.view is not None and found.place is not None and found.place < step.view.length:
        yield Text("")
        origin = None if step.origin is None or step.name == "row" else step.origin.tolist()
        yield from closeup(step.view, found.place, width, origin=origin)


def _uncompared(findings: RankFindings) -> str:
    """Name the steps that a side does not have, at which it is not compared."""
    told = [f"{visible(name)} has no {', '.join(labels)}" for name, labels in findings.without.items()]
    return f" ({'; '.join(told)}: not compared there)" if told else ""


def _verdict(*, is_equal: bool) -> Text:
    return Text("EQUAL ", "bold green") if is_equal else Text("DIFFERENT ", "bold red")


def _both_values(found: Found | StepDifference, findings: Findings) -> Text:
    line = Text("          ")
    for number, (name, value) in enumerate(((found.left, found.left_value), (found.right, found.right_value))):
        plain, text = value_and_text(found.tensor, value, findings.texts)
        line.append(" ≠ " if number else "", "bold red").append(f"{visible(name)} ").append(plain, "bold")
        line.append(f" {text}" if text else "", "dim")
    return line


def _equal(findings: Findings) -> Iterator[Text]:
    names = " = ".join(visible(side.name) for side in findings.sides)
    line = _verdict(is_equal=True)
    if not findings.built:
        yield line.append(f"{names}: all refuse the row alike")
        return
    row = findings.built[0].row
    assert row.cu_seqlens is not None
    assert row.token_mask is not None
    trained = int((row.token_mask != 0).sum())
    yield line.append(f"{names}: {findings.covered}")
    counts = f"{findings.length:,} positions, {row.cu_seqlens.numel():,} boundaries, {trained:,} trained tokens"
    yield Text(f"      {counts}")


def _flaws(report: Report, _width: int) -> Iterator[Text]:
    """Print the flaws of a side's row in words."""
    findings = report.row
    for side in findings.sides:
        found = findings.flaws.get(side.name, ())
        if side.name == "dump" and all(flaw.note for flaw in found):
            known = not {"cu_seqlens", "position_ids"} & {*side.derived, *side.not_fed}
            also = ", boundaries restart positions" if known else ""
            yield Text(f"consistent in itself: labels are the next tokens{also}", "green")
        for flaw in found:
            line = Text("note  " if flaw.note else "FLAW  ", "dim" if flaw.note else "bold red")
            where = "" if flaw.position is None else f"{flaw.position:,}"
            line.append(f"{visible(side.name)}: {flaw.what}{flaw.times}{where}", "")
            yield line.append(f"  ({flaw.rule})" if flaw.rule else "", "dim")


def _counts(report: Report, width: int) -> Iterator[Text]:
    findings = report.row
    if not any(pair.counts for pair in findings.pairs):
        return
    lines: list[list[Text] | str] = []
    for names, counts, fields in _alike(findings):
        if not counts:
            lines.append([Text(names), Text("all"), Text("0"), Text("equal", "green")])
        for number, (tensor, classes) in enumerate(counts.items()):
            kinds = ", ".join(f"{kind.replace('_', ' ')} {count:,}" for kind, count in classes.items())
            if tensor in fields:
                kinds = " ≠ ".join(value_and_text(tensor, value, findings.texts)[0] for value in fields[tensor])
            total = Text(f"{sum(classes.values()):,}", "bold red")
            lines.append([Text("" if number else names), Text(tensor), total, Text(kinds)])
    columns = [Column(title="sides"), Column(title="tensor"), Column(title="differ", right=True), Column(title="class")]
    yield from draw(columns, lines, width)


def _alike(
    findings: Findings,
) -> Iterator[tuple[str, dict[str, Mapping[str, int]], Mapping[str, tuple[object, object]]]]:
    """Group pairs with the same counts, tensors and reports apart, because not every side counts its losses."""
    found: dict[str, tuple[list[str], dict[str, Mapping[str, int]], Mapping[str, tuple[object, object]]]] = {}
    for pair in findings.pairs:
        reports = {tensor: classes for tensor, classes in pair.counts.items() if tensor.startswith("report.")}
        tensors = {tensor: classes for tensor, classes in pair.counts.items() if tensor not in reports}
        for counts in (tensors, reports) if reports and tensors else (tensors or reports,):
            shown = {tensor: pair.fields[tensor] for tensor in counts if tensor in pair.fields}
            found.setdefault(repr((counts, shown)), ([], counts, shown))[0].append(_names(pair, findings))
    return ((", ".join(names), counts, fields) for names, counts, fields in found.values())


def _names(pair: Pair, findings: Findings) -> str:
    """Name two sides; by letter if there are more than two, or the lines would not fit."""
    letter = findings.letters
    left, right = (
        visible(side) if len(findings.sides) == 2 else letter.get(side, side) for side in (pair.left, pair.right)
    )
    return f"{left} {'≠' if pair.counts else '='} {right}"


def _next(report: Report, page: str | None) -> Text:
    line = Text("next  ", "dim")
    tokens = "all tokens" if report.rank is None else "all tokens of each step"
    if any(IGNORED_LABEL in classes for pair in report.row.pairs for classes in pair.counts.values()):
        line.append("--only-trained-labels leaves out ignored labels, which no side trains; ")
    if report.rank is None and report.row.first is not None:
        line.append(f"docs/SPEC.md {RULES.get(report.row.first.kind, '#targets-and-turns, #row')}; ")
    return line.append(f"{tokens}: {page}" if page else f"{tokens}: the same command with --html FILE")


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _refused_steps(report: Report, width: int) -> Iterator[Text]:
    """Print the sides that refuse the row or a step of its way, and the flaws of the row."""
    yield from _refusals(report, width)
    assert report.rank is not None
    yield from refused_at_steps(report.rank)
    yield from _flaws(report, width)


_ROW = (_header, _conversations, _refusals, _first, _flaws, _counts)
"""Parts of the screen of a row, in order, with an empty line between them."""
_RANK = (_dump, _header, rank_place, step_table, _refused_steps, _first_step, followed_position)
"""Parts of the screen of a rank."""
