"""`packproof inspect FILE… --tokenizer DIR` (or `python -m tools.inspect_rows`): look at every row of packed files before a run.

Builds every row as a job with these settings would, and tells every refusal and loss with its place and fix. Settings
that the command line leaves out are those of the manifest beside the first file. Exit status: 0 a run feeds everything,
1 a run would fail or lose data, 2 bad input.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from production import exits
from production.errors import PackproofError
from production.files.cache import atomic_file
from production.files.manifest import read_manifest
from production.files.source import OnBadRow, open_source
from production.rows.builder import RowSettings
from production.semantics import DEFAULT_PRESET, parse
from production.tokens.folder import load_folder
from production.tokens.message_keys import MessageKeys
from tools.counted import counted
from tools.engine import Engine, open_pool
from tools.inspect_rows.file_notes import FIX_PACKING, look_through, notes_of, packed_otherwise
from tools.inspect_rows.fix import FixBy, Fixer, check_place
from tools.inspect_rows.inspection import Finding, Inspection
from tools.inspect_rows.manifest import make_manifest, manifest_notes
from tools.inspect_rows.page import write_page
from tools.inspect_rows.scan import FileWatch, scan
from tools.inspect_rows.terminal import show, verdict
from tools.ordered_pool import OrderedPool

_NAME = "packproof inspect"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the command line."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Packed files, JSON lines, plain or .gz or .zst."""
    tokenizer: Path
    """Folder of the tokenizer that the job will use."""
    pack_length: int | None = None
    """Tokens a row has in the model; needed where no manifest says it."""
    prompt_format: str | None = None
    """Prompt format of the job: nemotron-nano-v2, nemotron-h-aligned, identity or default."""
    context_parallel_size: int | None = None
    """Context parallel size of the job."""
    semantics: str | None = None
    """Semantics of the job: a preset, or preset,field=value."""
    pad_token: str | None = None
    """Pad token of the job, where it is not the prompt format's."""
    assistant_prefix_len: int | None = None
    """Tokens of an assistant turn that are not trained, where it is not the prompt format's number."""
    chat_key: str = "messages"
    """Key of a line that holds the messages."""
    ignore_keys: tuple[str, ...] = ()
    """Keys that a job passes over (ignore_keys of its dataset)."""
    on_bad_row: OnBadRow = "error"
    """What the job does about an unreadable line."""
    vocab_size: int | None = None
    """Ids that the model has (model.vocab_size); the tokenizer's where it is not given."""
    ignore_manifest: bool = False
    """Take nothing from the manifest beside the file."""
    compare_presets: bool = True
    """Whether to tell what the published presets would make of the rows; the format identity takes three times as long."""
    processes: int | None = None
    """Processes that build rows: all cores where it is not given."""
    engine: Engine = "processes"
    """Where rows are built: in processes of this machine, or on the Ray cluster that RAY_ADDRESS names (of this machine where it names none). The result is the same."""
    rows: int | None = None
    """Look at so many rows at most."""
    budget: float | None = None
    """Seconds after which the scan ends with what it has seen."""
    json: bool = False
    """Print one JSON object and nothing else."""
    html: Path | None = None
    """Write one self-contained HTML page there."""
    findings: Path | None = None
    """Write every finding there, one JSON object a line."""
    show: int = 3
    """Findings of each kind that are printed."""
    fix: Path | None = None
    """Write a repaired copy of the files there, and beside it OUT.changes.jsonl, the list of changes."""
    fix_by: FixBy = "split"
    """drop: leave out what does not fit. split: move it into rows of its own. mark: change nothing, name each row's faults under the key packproof."""
    overwrite: bool = False
    """With --fix: replace OUT where it exists."""
    drop_duplicates: bool = False
    """With --fix: leave out conversations that stand earlier in the files."""
    drop_idle: bool = False
    """With --fix: leave out conversations of which no token trains."""
    write_manifest: bool = False
    """Write FILE.manifest.json where there is none, with the settings given here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    return exits.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    options = tyro.cli(Arguments, args=argv, prog=_NAME, description=__doc__)
    complaints = Console(stderr=True)
    try:
        settings = _settings(options)
        with open_pool(options.engine, options.processes) as pool:
            return _run(options, settings, pool, complaints)
    except PackproofError as error:
        complaints.print(Text(f"{_NAME}: {error}"), soft_wrap=True)
    except OSError as error:
        # A write names no file: it is one of the outputs, of which none is kept half.
        place = error.filename or "the outputs"
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        fix = "free some disk" if full else "give paths that this user can read and write"
        complaints.print(Text(f"{_NAME}: {place}: {error.strerror or error}. To fix it: {fix}"), soft_wrap=True)
    return exits.CANNOT_RUN


def _run(options: Arguments, settings: RowSettings, pool: OrderedPool, complaints: Console) -> int:
    if options.fix is not None:
        check_place(options.fix, options.files, overwrite=options.overwrite)
    watch = FileWatch.begin(options.files)  # the repair must be of the rows that were scanned
    tokenizer = load_folder(options.tokenizer)
    found, redundant = _scan(options, tokenizer, settings, pool, complaints)
    if not options.ignore_manifest:
        found = replace(found, notes=(*found.notes, *manifest_notes(options.files, tokenizer)))
    found = replace(found, notes=(*found.notes, *_file_notes(options, found, tokenizer)))
    told: list[str] = []
    if options.write_manifest:
        told += [f"wrote {path}" for path in make_manifest(options.files, found, tokenizer, options.tokenizer)]
    if options.html is not None:
        write_page(found, options.html)
        told.append(f"wrote {options.html}")
    if options.findings is not None:
        told.append(f"wrote {options.findings}")
    if options.fix is not None:
        told += _fix(options, tokenizer, settings, pool, redundant, watch)
    if options.json:
        print(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        screen = Console() if sys.stdout.isatty() else Console(width=110)
        show(found, screen, shown=max(0, options.show))
        for line in told:
            screen.print(Text(line), soft_wrap=True)
    return found.exit_status


def _scan(
    options: Arguments, tokenizer: Any, settings: RowSettings, pool: OrderedPool, complaints: Console
) -> tuple[Inspection, Any]:
    redundant: list[Any] = []
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_progress(complaints))
        on_finding = None
        if options.findings is not None:
            log = stack.enter_context(atomic_file(options.findings))

            def on_finding(finding: Finding) -> None:
                log.write(msgspec.json.encode(finding) + b"\n")

        found = scan(
            options.files,
            options.tokenizer,
            settings,
            progress=bar,
            pool=pool,
            loaded=tokenizer,
            chat_key=options.chat_key,
            on_bad_row=options.on_bad_row,
            ignore_keys=options.ignore_keys,
            vocab_size=options.vocab_size,
            compare_presets=options.compare_presets,
            on_finding=on_finding,
            on_redundant=redundant.append if options.fix is not None and options.drop_duplicates else None,
            most_rows=options.rows,
            budget_seconds=options.budget,
        )
    return found, redundant[0] if redundant else None


def _file_notes(options: Arguments, found: Inspection, tokenizer: Any) -> Iterator[str]:
    """Yield what a check would note of these files; a scan that ends early ends here, too, after its budget."""
    names = [str(file) for file in options.files]
    if (what := packed_otherwise(found)) is not None:
        yield f"{', '.join(names)}: {what}. To fix it: {FIX_PACKING}"
    deadline = float("inf") if options.budget is None else time.monotonic() + options.budget
    for name in dict.fromkeys(names):
        yield from notes_of(look_through(name, deadline=deadline), tokenizer)


def _fix(
    options: Arguments, tokenizer: Any, settings: RowSettings, pool: OrderedPool, redundant: Any, watch: FileWatch
) -> list[str]:
    assert options.fix is not None
    fixer = Fixer(
        tokenizer=tokenizer,
        settings=settings,
        keys=MessageKeys.of_format(
            settings.prompt_format, settings.semantics, tokenizer, ignored=options.ignore_keys, ignore="--ignore-keys"
        ),
        by=options.fix_by,
        redundant=redundant,
        drop_idle=options.drop_idle,
    )
    with open_source([str(file) for file in options.files], chat_key=options.chat_key) as source:
        repair = fixer.write(source, options.fix, check=watch.check)
    done = ", ".join(_done(action, number) for action, number in sorted(repair.by_action.items()))
    told = [f"wrote {repair.out}: {counted(repair.rows, 'row')}; {done or 'nothing was changed'}"]
    told.append(f"wrote {repair.changes}")
    if lost := sum(repair.dropped_lines.values()):
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(repair.dropped_lines.items()))
        told.append(f"{counted(lost, 'line')} could not be read as a row and {'is' if lost == 1 else 'are'} not in the repaired file: {kinds}")  # fmt: skip
    after = scan(
        [repair.out], options.tokenizer, settings, pool=pool, loaded=tokenizer, chat_key=options.chat_key,
        ignore_keys=options.ignore_keys, vocab_size=options.vocab_size, compare_presets=False,
    )  # fmt: skip
    return [*told, f"the repaired file, inspected: {verdict(after)}"]


def _done(action: str, number: int) -> str:
    verb, _, noun = action.partition("_")
    return f"{verb} {counted(number, noun)}"


def _settings(options: Arguments) -> RowSettings:
    """Return the settings of the command line, and of the manifest where it says no other."""
    if not options.files:
        raise PackproofError(what="no file is given", where="the command line", fix="name one or more packed files")
    manifest = None if options.ignore_manifest else read_manifest(options.files[0])
    said = {} if manifest is None else dict(manifest.settings)
    given = {
        name: value
        for name in ("pack_length", "prompt_format", "context_parallel_size", "semantics", "pad_token", "assistant_prefix_len")
        if (value := getattr(options, name)) is not None
    }  # fmt: skip
    chosen = {"semantics": DEFAULT_PRESET, **said, **given}
    if "pack_length" not in chosen:
        raise PackproofError(
            what="nothing says how many tokens a row has: no manifest stands beside the file",
            where=str(options.files[0]),
            fix="give --pack-length, policy.max_total_sequence_length of the job",
        )
    return RowSettings(**{**chosen, "semantics": parse(chosen["semantics"])})


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """Yield a function that shows rows done, rate and time left on a terminal, and nothing elsewhere."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("inspecting"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]} rows/s"), TimeRemainingColumn())  # fmt: skip
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("inspecting", total=None, rate="")

        def advance(done: int, total: int) -> None:
            rate = done / max(time.monotonic() - started, 1e-9)
            progress.update(task, completed=done, total=total, rate=f"{rate:,.0f}")

        yield advance


if __name__ == "__main__":
    sys.exit(main())
