"""Run the jobs of a run, each small enough for a few seconds of one worker, and deterministic by its own fields.

Worker or parent makes no difference: a job carries its seed, and counts into a tally.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hypothesis.strategies import SearchStrategy

from equivalence import subjects
from equivalence.cases import store
from equivalence.cases.data import DataCase
from equivalence.cases.result import CheckResult, Finding
from equivalence.cases.row import RowCase
from equivalence.cases.step import ModelCase
from equivalence.cases.store import Case
from equivalence.checks.blame import is_of_production, raised, told
from equivalence.checks.rows.rows import attempt, build, compare_all, covers
from equivalence.divergences import registry
from equivalence.generators import rows as row_strategies
from equivalence.generators import tokenizers
from equivalence.generators.faults.registry import classes
from equivalence.runner import known
from equivalence.runner.counters import Tally, differing
from equivalence.runner.job import Job
from equivalence.runner.row_cases import PRESET_PAIRS, check_case, check_rows_of_batch, smallest_case, walk
from equivalence.runner.search import Check, CouldNotRun, Differs, search
from equivalence.subjects import Row, RowSettings, Subject
from equivalence.subjects.protocol import row_of


def run(job: Job) -> Tally:
    """Run a job. An exception of production or of a subject is among the tally's differences, one of a witness among its errors."""
    tally = Tally()
    started, used, spent = time.perf_counter(), time.process_time(), sum(os.times()[:4])
    RUNNERS[job.kind](job, [subject(name) for name in job.subjects], tally)
    tally.spent[job.check] += sum(os.times()[:4]) - spent
    if job.kind == "rows":
        tally.seconds["generated"] += time.perf_counter() - started
        tally.seconds["generated_cpu"] += time.process_time() - used
    return tally


def subject(name: str) -> Subject:
    """Return a subject, loaded once a process (before the fork, where there is one)."""
    if name not in _LOADED:
        _LOADED[name] = subjects.load(name)
    return _LOADED[name]


_LOADED: dict[str, Subject] = {}


def release(name: str) -> None:
    """End what a subject runs beside this process, before a fork; it starts again when it is asked."""
    close = getattr(subject(name), "close", None)
    if callable(close):
        close()


def forget(name: str) -> None:
    """End a subject outside the process after a run: the next run starts the adapter as it is then."""
    if name.startswith(subjects.EXTERNAL):
        release(name)
        del _LOADED[name]


def _corpus(job: Job, sides: list[Subject], tally: Tally) -> None:
    """Replay saved cases; one whose settings no side but one takes is left out and counted."""
    for path in job.paths:
        text = store.text_of(Path(path))
        with attributed(tally, path, check="corpus", command=_again(text, path, job.subjects)):
            case = store.parse(text, where=path)
            if isinstance(case, ModelCase):
                from equivalence.runner import step_jobs  # noqa: PLC0415 - megatron-core, which rows do without

                step_jobs.run_saved(case, path, tally)
                continue
            prompt_format = case.settings.prompt_format if isinstance(case, RowCase) else "any"
            for result in store.check(case, sides):
                counted = replace(result, check="corpus")
                tally.count(counted, prompt_format)
                found = differing(
                    result, prompt_format=prompt_format, where=path, command=_again(text, path, job.subjects)
                )
                # It stands where it was saved already: the case is there to be replayed alone, and is not saved again.
                tally.differences += [replace(each, check="corpus", case=text, path=path) for each in found]


def _again(text: str, path: str, sides: Sequence[str]) -> str:
    return store.command(store.parse(text, where=path), path, sides)


def _files(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    from equivalence.checks.input.files import check_file_layers  # noqa: PLC0415 - opens Megatron-LM's file reader

    folder = Path(job.paths[0])
    folder.mkdir(parents=True, exist_ok=True)
    with attributed(tally, "file layers", check="files"):
        for layer, result in check_file_layers(folder):
            tally.count(CheckResult(check="files", findings=result.findings), "any")
            if result.findings:
                case = DataCase(check="files", value=layer, origin=job.title).to_json()
                where = f"file layer {layer.name} in {folder}"
                tally.differences += differing(result, prompt_format="any", where=where, case=case)
            tally.layers.append(
                {"name": layer.name, "diverges": layer.diverges, "equal": result.equal, "why": layer.why}
            )


def _sample(job: Job, sides: list[Subject], tally: Tally) -> None:
    """Rows of a packed file: read by Megatron-LM's own reader where it is a witness, line by line for the others."""
    path = Path(job.paths[0])
    tokenizer = tokenizers.load(job.tokenizer)
    check = job.check
    settings = RowSettings(
        prompt_format=job.prompt_format,
        pack_length=job.pack_length,
        context_parallel_size=job.context_parallel_size,
        semantics=job.semantics,
    )
    with attributed(tally, f"{path} ({job.title})", check=check):
        left_out = [side.name for side in sides if not covers(side, settings)]
        sides = [side for side in sides if covers(side, settings)]
        readers = {
            side.name: _opened(cast("Any", side), path, job.tokenizer, settings)
            for side in sides
            if hasattr(side, "open_file")
        }
        wanted = range(job.first, job.first + job.step * job.examples, job.step)
        for number, messages in packed_rows(path, wanted):
            built: dict[str, Row | Finding] = {}
            seconds: dict[str, float] = {}
            for side in sides:
                began = time.perf_counter()
                made = (
                    _from_file(side, readers[side.name], number)
                    if side.name in readers
                    else build(side, messages, tokenizer, settings)
                )
                if made is not None:
                    built[side.name] = made
                    seconds[side.name] = time.perf_counter() - began
            not_comparable = [side.name for side in sides if side.name not in built]
            result = compare_all(check, built, seconds, left_out=[*left_out, *not_comparable])
            tally.count(result, job.prompt_format)
            if not result.equal:
                where = f"{path} row {number}"
                tally.differences += differing(
                    result,
                    prompt_format=job.prompt_format,
                    where=where,
                    case=_case_of_row(messages, settings, job, where, sides),
                    command=f"python -m tools.diff_row {path} --row {number} --tokenizer {tokenizers.folder(job.tokenizer)} "
                    f"--prompt-format {job.prompt_format} --pack-length {job.pack_length} --context-parallel-size "
                    f"{job.context_parallel_size} --semantics {job.semantics} --sides {shlex.quote(subjects.join_names(_asked(job, built)))}",
                )


def _case_of_row(
    messages: Sequence[Any], settings: RowSettings, job: Job, where: str, sides: Sequence[Subject]
) -> str | None:
    """Return a file's row as a case; None where it only differs when read from its file, which the command then names."""
    case = RowCase(messages=tuple(messages), settings=settings, tokenizer=job.tokenizer, origin=where)
    return None if check_case(case, sides).equal else case.to_json()


def _from_file(side: Subject, rows: Any, number: int) -> Row | Finding:
    return attempt(side, lambda: row_of(rows[number]))


def _asked(job: Job, built: Mapping[str, object]) -> list[str]:
    """Return how the sides that built a row were asked for: a subject's own name loads nothing."""
    return [name for name in job.subjects if subject(name).name in built]


@functools.lru_cache(maxsize=4)
def _opened(side: Any, path: Path, tokenizer: str, settings: RowSettings) -> Any:
    return side.open_file(path, tokenizers.load(tokenizer), settings)


def packed_rows(path: Path, wanted: range) -> Iterator[tuple[int, list[Any]]]:
    """Yield (number, messages) of some rows of a packed JSONL file, read with Python's own JSON. ValueError names a bad line."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number in wanted:
                try:
                    read = json.loads(line)
                    messages = read["messages"]
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise ValueError(
                        f"{path} line {number + 1} must be a packed row with a key messages: {error!r}"
                    ) from error
                yield number, messages


def _rows(job: Job, sides: list[Subject], tally: Tally) -> None:
    aim = classes()[job.aim] if job.aim else None
    names = [side.name for side in sides]

    def check(case: RowCase, counts: Tally | None) -> tuple[CheckResult, RowCase]:
        case = job.restriction.moved(case)
        result = check_case(case, sides)
        if counts is not None:
            counts.count(result, job.prompt_format)
            counts.messages += len(case.messages)
            if job.aim:
                counts.aimed[job.aim, job.prompt_format] += 1
            first = next(iter(result.rows.values()), None)
            if first is not None:
                counts.hits.update((name, job.prompt_format) for name in row_strategies.hits(case, first))
        return known.unseen(result, counts, names), case

    _search(job, row_strategies.rows(job.prompt_format, aim), check, tally)


def _batches(job: Job, sides: list[Subject], tally: Tally) -> None:
    def check(cases: tuple[RowCase, ...], counts: Tally | None) -> tuple[CheckResult, RowCase]:
        cases = tuple(job.restriction.moved(case) for case in cases)
        result = check_rows_of_batch(cases, sides)
        if counts is not None:
            counts.count(result, job.prompt_format)
        result = known.unseen(result, counts, [side.name for side in sides])
        return result, cases[0].with_(check="batches", others=tuple(case.messages for case in cases[1:]))

    _search(job, row_strategies.batches(job.prompt_format), check, tally)


def _divergences(job: Job, sides: list[Subject], tally: Tally) -> None:
    turn = itertools.count(job.seed)
    names = [side.name for side in sides]

    def check(case: RowCase, counts: Tally | None) -> tuple[CheckResult, RowCase]:
        case = case.with_(check="divergences")
        if counts is None:  # while shrinking: whichever pair shows it
            return known.unseen(check_case(case, sides), None, names), case
        result = walk(case, sides, PRESET_PAIRS[next(turn) % len(PRESET_PAIRS)])
        counts.count(result, job.prompt_format)
        return known.unseen(result, counts, names), case

    _search(job, row_strategies.rows(job.prompt_format, None), check, tally)


def _search(job: Job, strategy: SearchStrategy[Any], check: Check, tally: Tally) -> None:
    found = search(strategy, check, tally, number=job.seed, examples=job.examples, shrink=job.shrink)
    if found is None:
        return
    if isinstance(found, Differs):
        known.show(found.result)
    tell(found, replace(found.case, origin=job.title), job.title, tally, prompt_format=job.prompt_format)


def tell(found: Differs | CouldNotRun, case: Case, where: str, tally: Tally, *, prompt_format: str = "any") -> None:
    """Add what a search found to a tally: the differences with their smallest case, or the error with its own."""
    if isinstance(found, Differs):
        tally.differences += differing(found.result, prompt_format=prompt_format, where=where, case=case.to_json())
    else:
        tally.errors.append(f"{where}: {found}\non the case\n{case.to_json()}")


def _recorded(job: Job, sides: list[Subject], tally: Tally) -> None:
    assert job.aim is not None
    from equivalence.runner import recorded_jobs  # noqa: PLC0415 - megatron-core's training code takes seconds

    with attributed(tally, job.title, check="recorded"):
        recorded_jobs.run(job.aim, range(job.first, job.first + job.examples), sides, tally)


def _layouts(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    assert job.aim is not None
    from equivalence.runner.layout_jobs import draw_layouts  # noqa: PLC0415 - megatron-core's model code takes seconds: see run._preload

    try:
        drawn = draw_layouts(job.aim, number=job.seed, examples=job.examples, plain=job.plain, shrink=job.shrink)
        for result, case in drawn:
            tally.count(result, "any")
            if case is not None:
                tell(Differs(result, case), replace(case, origin=job.title), job.title, tally)
    except CouldNotRun as error:
        tell(error, replace(error.case, origin=job.title), job.title, tally)


def _models(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    assert job.layout is not None
    from equivalence.runner import step_jobs  # noqa: PLC0415 - megatron-core, as above

    with attributed(tally, job.title, check="models"):
        step_jobs.run_drawn(job, job.layout, tally)


def _trainer(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    from equivalence.runner import trainer_jobs  # noqa: PLC0415

    with attributed(tally, job.title, check="trainer"):
        trainer_jobs.run_drawn(job, tally)


def _whole_run(job: Job, sides: list[Subject], tally: Tally) -> None:
    del sides
    from equivalence.runner import whole_run_jobs  # noqa: PLC0415

    with attributed(tally, job.title, check="whole_run"):
        whole_run_jobs.run_drawn(job, tally)


def _smallest(_: Job, sides: list[Subject], tally: Tally) -> None:
    for entry in registry.REGISTRY:
        case = smallest_case(entry)
        prompt_format = entry.settings.prompt_format
        with attributed(tally, case.origin, check="divergences", case=case.to_json(), prompt_format=prompt_format):
            result = check_case(case, sides)
            tally.count(result, prompt_format)
            tally.differences += differing(result, prompt_format=prompt_format, where=case.origin, case=case.to_json())
            if not any(result.fired.values()):
                tally.errors.append(
                    f"divergence {case.labels[0]} does not show in its smallest row; fix equivalence/divergences/registry.py"
                )


@contextlib.contextmanager
def attributed(
    tally: Tally, where: str, *, check: str, case: str | None = None, command: str = "", prompt_format: str = "any"
) -> Iterator[None]:
    """End a part, not the run, with an exception: one of production is a difference, one of a witness or of the suite an error."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - told with its place
        if not is_of_production(error):
            tally.errors.append(f"{where}: {told(error)}")
            return
        result = CheckResult(check=check, findings=[raised("production", error, expected="a result")])
        tally.count(result, prompt_format)
        tally.differences += differing(result, prompt_format=prompt_format, where=where, case=case, command=command)


RUNNERS: dict[str, Callable[[Job, list[Subject], Tally], None]] = {
    "corpus": _corpus,
    "files": _files,
    "recorded": _recorded,
    "sample": _sample,
    "first_look": _sample,
    "rows": _rows,
    "batches": _batches,
    "divergences": _divergences,
    "layouts": _layouts,
    "models": _models,
    "trainer": _trainer,
    "whole_run": _whole_run,
    "smallest": _smallest,
}
