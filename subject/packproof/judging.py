"""Hold a packing function to all cases: statuses of the levels, conventions that it has and does not declare, the first miss made small."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from packproof.cases import Case
from packproof.conventions import MEGATRON_LM, declare
from packproof.levels import LEVELS, NAMES, Level, judge
from packproof.shrinking import shrink
from packproof.verdict import Miss, Refused, Verdict
from packproof_subject import CONVENTIONS
from packproof_subject import Refused as RefusedBySubject

PASSED, FAILED, UNDECLARED, NOT_SHOWN = "yes", "no", "undeclared", "not shown"
NOT_UNDONE = "conventions are not undone"
"""Note of a missed L10 where the function has conventions other than Megatron-LM's."""
Pack = Callable[..., Any]
Outcome = Any
MOST_UNDECLARED = 4
"""Conventions that are looked for one after the other where a function declares none of them."""


@dataclass
class LevelResult:
    """Holds the result of all cases for one level."""

    level: Level
    status: str
    """`yes`, `no`, `undeclared` (a convention that is not declared explains every miss), or `not shown`."""
    cases: int
    """Cases that could have shown a fault."""
    missed: int
    """Cases that miss the level."""
    note: str = ""
    """What a reader has to know: the field that is missing, or what the level was judged from."""
    miss: Miss | None = None
    """The first miss, in its smallest case."""
    case: Case | None = None
    """That case."""
    returned: Any = None
    """What the function returned for it."""


@dataclass
class Report:
    """Holds the levels that a subject reached, and its conventions."""

    subject: str
    preset: str
    conventions: dict[str, str]
    """Conventions as they were declared; the others are Megatron-LM's."""
    undeclared: dict[str, str]
    """Conventions that the function seems to have, and does not declare."""
    levels: list[LevelResult] = field(default_factory=list)

    def below(self, level: str, allowed: Sequence[str] = ()) -> list[LevelResult]:
        """Return the levels up to `level` that are not passed; `allowed` names levels that need not be shown."""
        upto = self.levels[: NAMES.index(level) + 1]
        return [
            each
            for each in upto
            if each.status != PASSED and not (each.status == NOT_SHOWN and each.level.name in allowed)
        ]


def call(pack: Pack, case: Case) -> Outcome:
    """Call a packing function with a case. An exception of its own is a refusal, with its type and text.

    ImportError goes through: a function that lacks a library is not judged.
    """
    try:
        return pack(*case.arguments())
    except ImportError:
        raise  # the function cannot run here, which says nothing of its rows
    except RefusedBySubject as refused:
        return Refused(f"{refused.kind}: {refused.message}")
    except Exception as error:  # noqa: BLE001 - the function is not ours: whatever it raises is its outcome
        return Refused("{}: {}".format(type(error).__name__, str(error).split("\n")[0][:300]))


def conformance_of(
    pack: Pack,
    cases: Sequence[Case],
    *,
    subject: str,
    conventions: Mapping[str, str] | None = None,
    preset: str = "megatron-lm-0.19",
    smallest: bool = True,
) -> Report:
    """Hold a function to cases on every level; `smallest` makes the first miss of each level small by calling the function again."""
    outcomes = [(case, call(pack, case)) for case in cases]
    report = judge_outcomes(outcomes, subject=subject, conventions=conventions, preset=preset)
    if smallest:
        for each in report.levels:
            _make_small(each, pack, report)
    return report


def judge_outcomes(
    outcomes: Sequence[tuple[Case, Outcome]], *, subject: str, conventions: Mapping[str, str] | None, preset: str
) -> Report:
    """Judge outcomes that are there already, such as those of a file of answers."""
    declared = declare(conventions)
    verdicts = _judge_all(outcomes, declared, preset)
    assumed = _assume(outcomes, declared, verdicts, preset)
    undeclared = {name: value for name, value in assumed.items() if declared[name] != value}
    after = _judge_all(outcomes, assumed, preset) if undeclared else verdicts
    explains = _explain(outcomes, declared, assumed, preset) if undeclared else {}
    report = Report(subject=subject, preset=preset, conventions=dict(conventions or {}), undeclared=undeclared)
    for level in LEVELS:
        # L10 compares rows as they are.
        note = NOT_UNDONE if level.name == "L10" and assumed != MEGATRON_LM else ""
        report.levels.append(_result(level, outcomes, verdicts, after, explains.get(level.name, {}), note))
    return report


def _judge_all(outcomes: Sequence[tuple[Case, Outcome]], conventions: Mapping[str, str], preset: str) -> list[Verdict]:
    return [judge(case, outcome, conventions, preset) for case, outcome in outcomes]


def _count(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Count the cases that miss each level. L10 knows no conventions."""
    return {name: sum(name in verdict.misses for verdict in verdicts) for name in NAMES[:-1]}


def _assume(
    outcomes: Sequence[tuple[Case, Outcome]], declared: dict[str, str], verdicts: Sequence[Verdict], preset: str
) -> dict[str, str]:
    """Return the conventions under which the outcomes miss least.

    A convention is taken for one that the function has if it takes every miss of some level away and adds a miss to no level.
    """
    assumed = dict(declared)
    counts = _count(verdicts)
    for _ in range(MOST_UNDECLARED):
        best: tuple[int, str, str, dict[str, int]] | None = None
        if not any(counts.values()):
            break
        for name, values in CONVENTIONS.items():
            if assumed[name] != declared[name]:
                continue
            for value in values:
                if value == assumed[name]:
                    continue
                found = _count(_judge_all(outcomes, dict(assumed, **{name: value}), preset))
                cleared = any(counts[each] and not found[each] for each in counts)
                if (
                    cleared
                    and all(found[each] <= counts[each] for each in counts)
                    and (best is None or sum(found.values()) < best[0])
                ):
                    best = (sum(found.values()), name, value, found)
        if best is None:
            break
        assumed[best[1]], counts = best[2], best[3]
    return assumed


def _explain(
    outcomes: Sequence[tuple[Case, Outcome]], declared: Mapping[str, str], assumed: Mapping[str, str], preset: str
) -> dict[str, dict[str, str]]:
    """Return the undeclared conventions that each level needs: those without which cases miss it."""
    found: dict[str, dict[str, str]] = {}
    for name in CONVENTIONS:
        if assumed[name] != declared[name]:
            counts = _count(_judge_all(outcomes, dict(assumed, **{name: declared[name]}), preset))
            for level, count in counts.items():
                if count:
                    found.setdefault(level, {})[name] = assumed[name]
    return found


def _result(
    level: Level,
    outcomes: Sequence[tuple[Case, Outcome]],
    verdicts: Sequence[Verdict],
    after: Sequence[Verdict],
    undeclared: Mapping[str, str],
    missed_note: str,
) -> LevelResult:
    name = level.name
    cases = sum(name in verdict.exercised for verdict in verdicts)
    lacking = sorted({verdict.not_shown[name] for verdict in after if name in verdict.not_shown})
    derived = sorted({verdict.derived[name] for verdict in after if name in verdict.derived})
    note = "judged from " + ", ".join(derived) if derived else ""
    still = [number for number, verdict in enumerate(after) if name in verdict.misses]
    before = [number for number, verdict in enumerate(verdicts) if name in verdict.misses]
    if before and not still and name != "L10":
        looks = ", ".join("{}: {}".format(*pair) for pair in undeclared.items())
        first = before[0]
        return LevelResult(
            level,
            UNDECLARED,
            cases,
            len(before),
            f"looks like {looks}; declare it" + _if_meant(undeclared),
            verdicts[first].misses[name],
            *outcomes[first],
        )
    if still:
        return LevelResult(
            level,
            FAILED,
            cases,
            len(still),
            missed_note or note or _where(name, outcomes, after),
            after[still[0]].misses[name],
            *outcomes[still[0]],
        )
    if lacking or not cases:
        return LevelResult(level, NOT_SHOWN, cases, 0, "the rows have no " + lacking[0] if lacking else _nothing(name))
    return LevelResult(level, PASSED, cases, 0, note)


def _if_meant(undeclared: Mapping[str, str]) -> str:
    """Say what else than a convention the hint can mean: rows longer than P are a fault of most packers."""
    return " if it is meant; otherwise rows are not cut to P" if "row_length" in undeclared else ""


def _where(name: str, outcomes: Sequence[tuple[Case, Outcome]], after: Sequence[Verdict]) -> str:
    """Say what sets the missed cases apart from those that pass, where that is a condition of the level's rule."""
    missed = [case for (case, _), verdict in zip(outcomes, after) if name in verdict.misses]
    passed = [case for (case, _), verdict in zip(outcomes, after) if name in verdict.exercised and case not in missed]
    if not passed:
        return ""
    if name == "L8" and all(case.pack_length % case.granularity for case in missed):
        return "only where 2·cp does not divide the pack length"
    if name == "L6" and all(case.context_parallel_size > 1 for case in missed):
        return "only at cp > 1"
    return ""


def _nothing(name: str) -> str:
    if name == "L10":
        return "no case has a row of the preset: judge test vectors"
    return {"L6": "no row has padding", "L3": "no row has two conversations"}.get(name, "no case is about it")


def _make_small(result: LevelResult, pack: Pack, report: Report) -> None:
    """Replace a level's first miss by one of the smallest case that still misses the level. L10 keeps its case, whose row is known."""
    if result.miss is None or result.case is None or result.level.name == "L10":
        return
    conventions = declare(report.conventions)
    if result.status == FAILED:
        conventions.update(report.undeclared)

    def misses(case: Case) -> tuple[Miss, Outcome] | None:
        outcome = call(pack, case)
        miss = judge(case, outcome, conventions, report.preset).misses.get(result.level.name)
        return (miss, outcome) if miss is not None else None

    small, found = shrink(result.case, misses)
    if found is not None:
        result.case, (result.miss, result.returned) = small, found
