"""Read Megatron-LM's console log: one line for an iteration, one for a validation, after any prefix of a launcher.

The reader follows the driver's meaning: the learning rate is that of the next step; losses and times are means over the iterations since
the last line; since 0.16 the first line of each start is also part of the sums of the second line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.compare_runs.readers.megatron_lines import SKIPPED, Line, Log, read_lines_of, sessions, whole
from tools.compare_runs.readers.names import MICROBATCH_MEANS, Meaning, Names, UnknownKindError, no_loss
from tools.compare_runs.run import FLOAT32_BITS, Gathered, Run, is_mean, seen, to_number


def read_log(path: Path, names: Names) -> Run:
    """Return the run of a log. Raises InputError for a log without an iteration or without a loss, or with the output of several processes."""
    lines, validations, begins = read_lines_of(path)
    if not lines:
        raise UnknownKindError(f"{path}: no line of Megatron-LM such as ' iteration        3/     200 | …'")
    recorded = {name for line in lines for name in line.fields}
    found = names.find(recorded)
    if not any(meaning.series == "loss" for meaning in found.values()):
        raise no_loss(path, recorded)
    log = sessions(path, whole(lines, found), validations, begins)
    return _Reader(log, found).run(path)


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Over which iterations a line's sums go."""

    line: Line
    count: int
    """Iterations."""
    first: Line | None = None
    """The line before, whose one iteration is in the sums too."""
    is_known: bool = True
    """Whether `count` is."""

    @property
    def width(self) -> int:
        """Number of iterations that only this line covers."""
        return self.count - (self.first is not None)


class _Reader:
    def __init__(self, log: Log, found: Mapping[str, Meaning]) -> None:
        self._log, self._found = log, found
        self._gathered = Gathered()
        self._every = _interval(log)
        self._skipped = 0
        self._unknown: list[int] = []

    def run(self, path: Path) -> Run:
        for number, session in enumerate(self._log.sessions):
            if number and session.lines:
                self._gathered.restart(session.lines[0].step)
            self._take(session.lines)
            for step, text in session.validations:
                self._gathered.put("validation_loss", step, float(text), text=text)
        self._gathered.set_untrained_aside()
        gathered = self._gathered
        return Run(
            name=path.stem,
            source="Megatron-LM log",
            place=str(path),
            series=gathered.series,
            precisions=gathered.precisions(),
            widths=gathered.widths,
            loose=gathered.loose,
            untrained=frozenset(gathered.untrained),
            validation=MICROBATCH_MEANS,
            remarks=[*gathered.remarks(), *self._remarks()],
        )

    def _take(self, lines: Sequence[Line]) -> None:
        present = {name for line in lines for name in line.fields}
        for span in _spans(lines, self._every):
            line = span.line
            if not line.is_whole:
                continue
            self._skipped += _skipped(line) - (0 if span.first is None else _skipped(span.first))
            if span.width > 1:
                self._gathered.widths[line.step] = span.width
            for name, meaning in self._found.items():
                if name not in present:
                    continue
                if is_mean(meaning.series):
                    self._put_mean(span, name, meaning)
                elif (number := to_number(line.fields.get(name))) is not None:
                    step = line.step + meaning.shift
                    self._gathered.put(meaning.series, step, number * meaning.factor, text=line.fields[name])

    def _put_mean(self, span: _Span, name: str, meaning: Meaning) -> None:
        """Store a line's mean, without the first line's iteration where the sums included it."""
        is_loss = meaning.series.endswith("loss")
        line, first = span.line, span.first
        # Losses are summed over iterations that the optimizer did not skip; times over all.
        before = 0 if first is None or not first.is_whole else 1 - (_skipped(first) if is_loss else 0)
        count = span.count - (_skipped(line) if is_loss else 0)
        if not span.is_known or (first is not None and not first.is_whole) or 0 < count - before < span.width:
            self._unknown.append(line.step)
            return
        if count == before:
            return  # every iteration was skipped
        text = line.fields.get(name)
        number = to_number(text)
        earlier = None if first is None or not before else to_number(first.fields.get(name))
        if number is None:  # Megatron-LM leaves a loss out that is NaN
            if first is not None and before and earlier is None and not _is_zero(line.fields, self._found):
                self._unknown.append(line.step)  # of the first iteration or of this one: nobody can tell
            else:
                self._gathered.put(meaning.series, line.step, math.nan)
            return
        if before and earlier is None:
            self._unknown.append(line.step)
            return
        value = number if earlier is None else (number * count - earlier * before) / (count - before)
        self._gathered.put(meaning.series, line.step, value * meaning.factor, text=text if is_loss else None)
        if is_loss and count > 1:
            loose = _loose(text or "", number, count, before)
            if earlier is not None:
                loose += _half(first.fields[name], earlier) * before / (count - before)  # type: ignore[union-attr] # not None
            self._gathered.loose.setdefault(meaning.series, {})[line.step] = loose

    def _remarks(self) -> list[str]:
        precisions = self._gathered.precisions()
        named = [f"{name.replace('_', ' ')} to {precision.words}" for name, precision in sorted(precisions.items())]
        unknown = sorted({*self._unknown})
        return [
            *(["the log has " + ", ".join(named)] if named else []),
            *(
                [f"one line in {self._every} iterations: its losses and time are means over them"]
                if self._every > 1
                else []
            ),
            *([f"{self._skipped} iterations were skipped by the optimizer"] if self._skipped else []),
            *(
                [
                    f"lines that are not whole, cut or with another print in them, are left out: {_some(self._log.broken)}"
                ]
                if self._log.broken
                else []
            ),
            *(
                [
                    f"several processes printed into this log, {self._log.copies} lines twice with the same numbers: the first counts"
                ]
                if self._log.copies
                else []
            ),
            *(
                [
                    f"which iterations the losses of a line are a mean of cannot be told, and they are left out: {_some(unknown)}"
                ]
                if unknown
                else []
            ),
        ]


def _interval(log: Log) -> int:
    """Return the driver's `--log-interval`: every line except the first of a start is at a multiple of the interval."""
    later = [line.step for session in log.sessions for line in session.lines[1:]]
    return math.gcd(*later) if later else math.gcd(*(line.step for session in log.sessions for line in session.lines))


def _spans(lines: Sequence[Line], every: int) -> list[_Span]:
    spans: list[_Span] = []
    for at, line in enumerate(lines):
        if at == 0:
            keeps = line.keeps_sums or line.step % every
            # A driver before 0.16 prints its first line after a whole interval, or, after a restart, after what was left of one.
            is_known = bool(keeps) or every in (1, line.step)
            spans.append(_Span(line=line, count=1 if keeps else every, is_known=is_known))
            continue
        first = lines[0]
        keeps = first.keeps_sums or first.step % every
        is_second = line.step == every * (first.step // every + 1)
        if at == 1 and keeps and is_second:
            spans.append(_Span(line=line, count=line.step - first.step + 1, first=first))
        else:
            spans.append(_Span(line=line, count=every))
    return spans


def _skipped(line: Line) -> int:
    return int(to_number(line.fields.get(SKIPPED)) or 0)


def _is_zero(fields: Mapping[str, str], found: Mapping[str, Meaning]) -> bool:
    return any(to_number(fields.get(name)) == 0 for name, each in found.items() if each.series == "gradient_norm")


def _half(text: str, value: float) -> float:
    precision = seen([text])
    return 0.0 if precision is None else precision.half_unit(value)


def _loose(text: str, value: float, count: int, before: int) -> float:
    """Return the possible error of a mean beyond the rounding of its own digits.

    The driver adds `count` losses in float32, rounding each sum by up to half a unit in its last place. Subtracting `before` of the losses
    enlarges the error by count / (count - before).
    """
    summed = abs(value) * math.ldexp(1.0, -FLOAT32_BITS) * (count + 1) / 2
    rest = count - before
    return (_half(text, value) * before + summed * count) / rest


def _some(steps: Sequence[int]) -> str:
    told = ", ".join(map(str, steps[:6]))
    return f"iteration{'s' * (len(steps) > 1)} {told}" + (f" and {len(steps) - 6} more" if len(steps) > 6 else "")
