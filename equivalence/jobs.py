"""The jobs of a run, each small enough for a few seconds of one worker, and deterministic by its own fields.

Worker or parent makes no difference: a job carries its seed, and counts into a tally.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hypothesis.strategies import SearchStrategy

from equivalence import divergences, subjects
from equivalence.cases import RowCase, differs_from_expected, read_case
from equivalence.checks.batches import check_batch
from equivalence.checks.divergences import check_divergences, check_smallest
from equivalence.checks.result import CheckResult, Finding
from equivalence.checks.rows import check_row, compare_all, covers
from equivalence.compare import Difference
from equivalence.generators import rows as row_strategies
from equivalence.generators import tokenizers
from equivalence.generators.fault_classes import classes
from equivalence.generators.models import Layout
from equivalence.search import Check, Differs, last_line, search
from equivalence.subjects import RowSettings, Subject
from equivalence.tally import Tally, differing

PRESET_PAIRS = (
    ("megatron-lm-0.19", "strict"),
    ("megatron-lm-main", "nemo-rl-direct"),
    ("megatron-lm-0.19", "megatron-lm-0.19,lost_conversations=refuse"),
    ("nemo-rl-direct", "strict"),
)
"""Between which semantics rows walk by single fields; together they pass every entry of the registry."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One piece of a run."""

    kind: str
    """corpus, model_corpus, files, recorded, sample, rows, batches, divergences, layouts, models, trainer or smallest."""
    subjects: tuple[str, ...]
    prompt_format: str = ""
    seed: int = 0
    examples: int = 0
    plain: int = 0
    """Of `layouts`: draws of plain random numbers beside the `examples` of Hypothesis."""
    aim: str | None = None
    """The fault class of `rows`, the check of `layouts`, the kind of model of `trainer`, the outcomes of `recorded`."""
    paths: tuple[str, ...] = ()
    """Saved cases; or the packed file of `sample`, the folder of `files`."""
    tokenizer: str = ""
    semantics: str = ""
    context_parallel_size: int = 1
    pack_length: int = 0
    first: int = 0
    """Of `sample`: the first row, then every `step`th, `examples` in all. Of `recorded`: the first outcome. Of `trainer`: the number of ranks, 0 for a few layouts."""
    step: int = 1
    layout: Layout | None = None
    """Of `models`."""
    counts: tuple[int, ...] = ()
    """Of `models`: cases for each of model_cases.CHECKS; `examples` in all, and `first` says which of AIMS the first one has."""
    shrink: bool = True
    """Whether what differs is made small; the kill matrix only asks whether anything does."""

    @property
    def title(self) -> str:
        """What a person calls it."""
        parts = (self.kind, self.aim or "", self.prompt_format, self.semantics, self.layout.name if self.layout else "")
        return " ".join(part for part in parts if part) + (f" seed {self.seed}" if self.seed else "")


def run(job: Job) -> Tally:
    """Run a job. An error of a side is in the tally's errors; only an error of this suite's own goes through."""
    tally = Tally()
    started, used = time.perf_counter(), time.process_time()
    RUNNERS[job.kind](job, [subject(name) for name in job.subjects], tally)
    if job.kind == "rows":
        tally.seconds["generated"] += time.perf_counter() - started
        tally.seconds["generated_cpu"] += time.process_time() - used
    return tally


@functools.cache
def subject(name: str) -> Subject:
    """A subject, loaded once a process (before the fork, where there is one)."""
    return subjects.load(name)


def check_case(case: RowCase, sides: Sequence[Subject]) -> CheckResult:
    """All sides of a case against each other in the check that it was saved for, and against what it expects."""
    if case.check == "batches":
        return _check_batch([case, *(case.with_(messages=each) for each in case.others)], sides)
    if case.check == "divergences":
        found = [_walk(case, sides, pair) for pair in PRESET_PAIRS]
        return next((each for each in found if not each.equal), found[0])
    result = check_row(case.messages, tokenizers.load(case.tokenizer), case.settings, sides)
    if case.expected is not None:
        for name, row in result.rows.items():
            for line in differs_from_expected(row, case.expected):
                wrong = Difference(tensor="expected", position=None, left="expected", right=line, klass="other")
                result.findings.append(Finding(left="expected", right=name, differences=[wrong]))
    return result


def diff_row_command(path: str, sides: Sequence[str]) -> str:
    """The command that shows a case's difference on one screen."""
    return f"packproof-diff-row --case {path} --sides {','.join(sides)}"


def _corpus(job: Job, sides: list[Subject], tally: Tally) -> None:
    for path in job.paths:
        case = read_case(Path(path))
        with _named_errors(tally, path):
            result = check_case(case, sides)
            result = replace(result, check="corpus")
            tally.count(result, case.settings.prompt_format)
            tally.differences += differing(
                result,
                prompt_format=case.settings.prompt_format,
                where=path,
                command=diff_row_command(path, job.subjects),
            )


def _files(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    from equivalence.checks.files import check_file_layers  # noqa: PLC0415 - opens Megatron-LM's file reader

    folder = Path(job.paths[0])
    folder.mkdir(parents=True, exist_ok=True)
    with _named_errors(tally, "file layers"):
        for layer, result in check_file_layers(folder):
            tally.count(CheckResult(check="files", findings=result.findings), "any")
            tally.differences += differing(result, prompt_format="any", where=f"file layer {layer.name} in {folder}")
            tally.layers.append(
                {"name": layer.name, "diverges": layer.diverges, "equal": result.equal, "why": layer.why}
            )


def _sample(job: Job, sides: list[Subject], tally: Tally) -> None:
    """Rows of a packed file: read by Megatron-LM's own reader where it is a witness, line by line for the others."""
    path = Path(job.paths[0])
    tokenizer = tokenizers.load(job.tokenizer)
    settings = RowSettings(
        prompt_format=job.prompt_format,
        pack_length=job.pack_length,
        context_parallel_size=job.context_parallel_size,
        semantics=job.semantics,
    )
    with _named_errors(tally, f"{path} ({job.title})"):
        sides = [side for side in sides if covers(side, settings)]
        readers = {
            side.name: _opened(cast("Any", side), path, job.tokenizer, settings)
            for side in sides
            if hasattr(side, "open_file")
        }
        wanted = range(job.first, job.first + job.step * job.examples, job.step)
        for number, messages in packed_rows(path, wanted):
            built, seconds = {}, {}
            for side in sides:
                began = time.perf_counter()
                built[side.name] = (
                    readers[side.name][number]
                    if side.name in readers
                    else side.build_row(messages, tokenizer, settings)
                )
                seconds[side.name] = time.perf_counter() - began
            result = compare_all("sample", built, seconds)
            tally.count(result, job.prompt_format)
            if not result.equal:
                tally.differences += differing(
                    result,
                    prompt_format=job.prompt_format,
                    where=f"{path} row {number}",
                    command=f"packproof-diff-row {path} --row {number} --tokenizer {tokenizers.folder(job.tokenizer)} "
                    f"--prompt-format {job.prompt_format} --pack-length {job.pack_length} --context-parallel-size "
                    f"{job.context_parallel_size} --semantics {job.semantics} --sides {','.join(built)}",
                )


@functools.lru_cache(maxsize=4)
def _opened(side: Any, path: Path, tokenizer: str, settings: RowSettings) -> Any:
    return side.open_file(path, tokenizers.load(tokenizer), settings)


def packed_rows(path: Path, wanted: range) -> Iterator[tuple[int, list[Any]]]:
    """(number, messages) of some rows of a packed JSONL file, read with Python's own JSON. ValueError names a bad line."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number in wanted:
                try:
                    read = json.loads(line)
                    messages = read["messages"]
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(
                        f"{path} line {number + 1} is no packed row: {error!r}; it needs a key messages"
                    ) from error
                yield number, messages


def _rows(job: Job, sides: list[Subject], tally: Tally) -> None:
    aim = classes()[job.aim] if job.aim else None

    def check(case: RowCase, counts: Tally | None) -> tuple[CheckResult, RowCase]:
        result = check_case(case, sides)
        if counts is not None:
            counts.count(result, job.prompt_format)
            counts.messages += len(case.messages)
            if job.aim:
                counts.aimed[job.aim, job.prompt_format] += 1
            first = next(iter(result.rows.values()), None)
            if first is not None:
                counts.hits.update((name, job.prompt_format) for name in row_strategies.hits(case, first))
        return result, case

    _search(job, row_strategies.rows(job.prompt_format, aim), check, tally)


def _batches(job: Job, sides: list[Subject], tally: Tally) -> None:
    def check(cases: tuple[RowCase, ...], counts: Tally | None) -> tuple[CheckResult, RowCase]:
        result = _check_batch(cases, sides)
        if counts is not None:
            counts.count(result, job.prompt_format)
        return result, cases[0].with_(check="batches", others=tuple(case.messages for case in cases[1:]))

    _search(job, row_strategies.batches(job.prompt_format), check, tally)


def _check_batch(cases: Sequence[RowCase], sides: Sequence[Subject]) -> CheckResult:
    """Collate the rows that no side refuses; whether they are equal is the row check's."""
    settings, tokenizer = cases[0].settings, tokenizers.load(cases[0].tokenizer)
    each = [check_row(case.messages, tokenizer, settings, sides) for case in cases]
    kept = [result.rows for result in each if all(row.refusal is None for row in result.rows.values())]
    return check_batch(kept, settings, sides) if kept else CheckResult(check="batches", refused=each[0].refused)


def _divergences(job: Job, sides: list[Subject], tally: Tally) -> None:
    turn = itertools.count(job.seed)

    def check(case: RowCase, counts: Tally | None) -> tuple[CheckResult, RowCase]:
        case = case.with_(check="divergences")
        if counts is None:  # while shrinking: whichever pair shows it
            return check_case(case, sides), case
        result = _walk(case, sides, PRESET_PAIRS[next(turn) % len(PRESET_PAIRS)])
        counts.count(result, job.prompt_format)
        return result, case

    _search(job, row_strategies.rows(job.prompt_format, None), check, tally)


def _walk(case: RowCase, sides: Sequence[Subject], pair: tuple[str, str]) -> CheckResult:
    return check_divergences(case.messages, tokenizers.load(case.tokenizer), case.settings, sides, presets=pair)


def _search(job: Job, strategy: SearchStrategy[Any], check: Check, tally: Tally) -> None:
    found = search(strategy, check, tally, number=job.seed, examples=job.examples, shrink=job.shrink)
    if found is None:
        return
    case = found.case.with_(origin=job.title)
    if isinstance(found, Differs):
        tally.differences += differing(
            found.result, prompt_format=job.prompt_format, where=job.title, case=case.to_json()
        )
    else:
        tally.errors.append(f"{job.title}: {found}\non the case\n{case.to_json()}")


def _recorded(job: Job, sides: list[Subject], tally: Tally) -> None:
    assert job.aim is not None
    from equivalence import recorded_jobs  # noqa: PLC0415 - megatron-core's training code takes seconds

    with _named_errors(tally, job.title):
        recorded_jobs.run(job.aim, range(job.first, job.first + job.examples), sides, tally)


def _layouts(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    assert job.aim is not None
    from equivalence.layouts import draw_layouts  # noqa: PLC0415 - megatron-core's model code takes seconds: see run._preload

    with _named_errors(tally, job.title):
        for result, where in draw_layouts(job.aim, number=job.seed, examples=job.examples, plain=job.plain):
            tally.count(result, "any")
            tally.differences += differing(result, prompt_format="any", where=f"{job.title}: {where}")


def _models(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    assert job.layout is not None
    from equivalence import model_jobs  # noqa: PLC0415 - megatron-core, as above

    with _named_errors(tally, job.title):
        model_jobs.run_drawn(job, job.layout, tally)


def _model_corpus(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    from equivalence import model_jobs  # noqa: PLC0415

    for path in job.paths:
        with _named_errors(tally, path):
            model_jobs.run_saved(path, tally)


def _trainer(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    from equivalence import training_runs  # noqa: PLC0415

    with _named_errors(tally, job.title):
        training_runs.run_drawn(job, tally)


def _smallest(_: Job, sides: list[Subject], tally: Tally) -> None:
    for entry in divergences.REGISTRY:
        name = f"{entry.field}: {entry.permissive}/{entry.strict}"
        with _named_errors(tally, f"the smallest row of {name}"):
            result = check_smallest(entry, tokenizers.load(entry.tokenizer), sides)
            tally.count(result, entry.settings.prompt_format)
            tally.differences += differing(
                result, prompt_format=entry.settings.prompt_format, where=f"the smallest row of {name}"
            )
            if not any(result.fired.values()):
                tally.errors.append(
                    f"divergence {name} does not show in its smallest row; mend equivalence/divergences.py"
                )


@contextlib.contextmanager
def _named_errors(tally: Tally, where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a side that could not run ends its part, not the run
        tally.errors.append(f"{where}: {last_line(error)}")


RUNNERS: dict[str, Callable[[Job, list[Subject], Tally], None]] = {
    "corpus": _corpus,
    "files": _files,
    "recorded": _recorded,
    "sample": _sample,
    "rows": _rows,
    "batches": _batches,
    "divergences": _divergences,
    "layouts": _layouts,
    "models": _models,
    "model_corpus": _model_corpus,
    "trainer": _trainer,
    "smallest": _smallest,
}
