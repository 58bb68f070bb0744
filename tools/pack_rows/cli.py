"""The command line of pack_rows: packs chat files, says what it left out and why, and writes all or nothing."""

import contextlib
import errno
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from production import exits
from production.errors import PackproofError
from production.files.file_state import is_there
from production.semantics import DEFAULT_PRESET
from tools.counted import counted
from tools.engine import Engine, open_pool
from tools.pack_rows.conversation import Refusal
from tools.pack_rows.inputs import STDIN
from tools.pack_rows.layouts import Layout
from tools.pack_rows.lengths import PromptFormat
from tools.pack_rows.output import manifest_path, write_rows
from tools.pack_rows.packing import TOO_LONG, Packing, PackSettings, pack_files
from tools.pack_rows.rows import Algorithm

_NAME = "packproof pack"


class _Terminated(KeyboardInterrupt):
    """SIGTERM, to be ended as Ctrl-C is."""


@dataclass(frozen=True, kw_only=True)
class PackRows:
    """Pack chat files into rows for Megatron-LM: one line a row, its conversations end to end under "messages".

    A row splits at every system message, so each conversation starts with one and holds no other. Conversations that
    the prompt format refuses are named and counted. Beside the rows stands OUT.manifest.json: inputs, tokenizer,
    settings, counts, refused lines. Exit codes: 0 written, 1 refused conversations while --on-bad or --on-long is
    error (nothing is written), 2 bad input.
    """

    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Chat files, .jsonl, .gz, .zst or .parquet, folders of them, or - for standard input: one conversation a line."""
    tokenizer: Path
    """Folder of the tokenizer that the job will use."""
    pack_length: int
    """Tokens a row has in the model."""
    out: Path
    """The packed file to write, for example train.jsonl.packed."""
    prompt_format: PromptFormat = "nemotron-nano-v2"
    """Prompt format of the job; lengths and refusals depend on it."""
    semantics: str = DEFAULT_PRESET
    """Semantics of the job, a preset or preset,field=value: nemo-rl-direct and strict refuse more."""
    chat_key: str = "messages"
    """Key of the messages in the chat files; in the packed file it is "messages"."""
    context_parallel_size: int = 1
    """Context parallel size of the job; above 1 each conversation takes a multiple of twice this."""
    layout: Layout = "auto"
    """Layout of the lines: OpenAI messages, ShareGPT or Alpaca; auto looks at each file's first line, and the summary names what it took."""
    algorithm: Algorithm = "first_fit_decreasing"
    """The packer: fewest rows, the input's order kept (concatenative), or one of the others of the online path."""
    missing_system: Literal["insert", "refuse"] = "insert"
    """A conversation without a system message: put an empty one in front (its tokens count), or refuse it."""
    middle_system: Literal["refuse", "split"] = "refuse"
    """A conversation with a system message in the middle: refuse it, or split it there into several."""
    on_bad: Literal["error", "skip"] = "error"
    """Refused conversations: write nothing and exit 1, or leave them out, listed."""
    on_long: Literal["error", "skip", "truncate", "split"] = "error"
    """Conversations longer than a row: write nothing and exit 1, leave them out, let Megatron-LM cut them, or split them between turns (each part has the system message)."""
    pad_token: str | None = None
    """Pad token of the job, where it is not the prompt format's."""
    ignore_keys: tuple[str, ...] = ()
    """Keys that say what to train (weight, loss, …) or hold text that is not rendered (reasoning_content, tools, …): pass over these; conversations with others are refused."""
    allow_format_misfit: bool = False
    """Pack for a tokenizer that lacks the prompt format's markers, which are then trained as text."""
    seed: int | None = None
    """Shuffle by this seed; without it the input's order is kept."""
    overwrite: bool = False
    """Replace OUT where it exists."""
    processes: int | None = None
    """Processes that measure conversations: all cores where it is not given. The rows are the same for any number."""
    engine: Engine = "processes"
    """Where conversations are measured: in processes of this machine, or on the Ray cluster that RAY_ADDRESS names (of this machine where it names none). The rows are the same."""
    resume: bool = False
    """Go on where a packing into the same OUT was killed."""
    restart: bool = False
    """Throw away what a killed packing into the same OUT left, and pack anew."""
    list_refused: int = 20
    """Number of refused conversations to show; the manifest has the lines of all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    return exits.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    options = tyro.cli(PackRows, args=argv, prog=_NAME)
    screen, complaints = Console(), Console(stderr=True)
    try:
        with _terminated_as_interrupted():
            return _run(options, screen, complaints)
    except KeyboardInterrupt as stopped:
        number = signal.SIGTERM if isinstance(stopped, _Terminated) else signal.SIGINT
        complaints.print(Text(f"{_NAME}: ended by {number.name}; {_what_is_left(options)}"), soft_wrap=True)
        return 128 + number
    except PackproofError as error:
        complaints.print(Text(f"{_NAME}: {error}"), soft_wrap=True)
    except OSError as error:
        place = error.filename or options.out
        fix = (
            "free some disk"
            if error.errno in {errno.ENOSPC, errno.EDQUOT}
            else "give paths that this user can read and write"
        )
        complaints.print(Text(f"{_NAME}: {place}: {error.strerror or error}. To fix it: {fix}"), soft_wrap=True)
    return 2


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Raise SIGTERM as an exception, as Python does with SIGINT; a handler that stands there is left."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(*_: Any) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _what_is_left(options: PackRows) -> str:
    journal = work_folder(options.out) / "journal"
    if STDIN in options.inputs or not journal.is_file() or not journal.stat().st_size:
        return "nothing was written"
    return "what was measured is kept, and the same command with --resume goes on"


def _run(options: PackRows, screen: Console, complaints: Console) -> int:
    _check_places(options)
    settings = PackSettings(
        prompt_format=options.prompt_format,
        pack_length=options.pack_length,
        semantics=options.semantics,
        chat_key=options.chat_key,
        context_parallel_size=options.context_parallel_size,
        layout=options.layout,
        algorithm=options.algorithm,
        missing_system=options.missing_system,
        middle_system=options.middle_system,
        on_bad=options.on_bad,
        on_long=options.on_long,
        pad_token=options.pad_token,
        ignore_keys=options.ignore_keys,
        allow_format_misfit=options.allow_format_misfit,
        seed=options.seed,
    )
    with complaints.status("packing"), open_pool(options.engine, options.processes) as pool:  # shows on a terminal only
        packing = pack_files(
            options.inputs,
            options.tokenizer,
            settings,
            pool=pool,
            work=work_folder(options.out),
            resume=options.resume,
            restart=options.restart,
        )
    try:
        if options.resume:
            screen.print(_resumed(packing), soft_wrap=True)
        status = _finish(options, packing, screen, complaints)
    except (OSError, KeyboardInterrupt):
        packing.spool.close()  # measured conversations stay for --resume
        raise
    except PackproofError:
        packing.spool.remove()
        raise
    packing.spool.remove()
    return status


def _resumed(packing: Packing) -> str:
    reused = sum(chunk.conversations for chunk in packing.spool.earlier)
    if not reused:
        return "resumed: nothing was measured before, so all of it was measured now"
    return f"resumed: {counted(reused, 'conversation')} measured before {'is' if reused == 1 else 'are'} used again"


def work_folder(out: Path) -> Path:
    """Return the folder of a packing that is under way."""
    return out.with_name(f".{out.name}.packing")


def _finish(options: PackRows, packing: Packing, screen: Console, complaints: Console) -> int:
    _list_refused(packing, complaints, max(0, options.list_refused))
    if packing.failures:
        complaints.print(Text(_failed(packing)), soft_wrap=True)
        return 1
    if not packing.rows:
        raise PackproofError(
            what="no conversation is left to pack, so nothing was written",
            where="the inputs",
            fix="give other chat files, or correct the conversations listed above",
        )
    screen.print(_table(packing))
    for note in packing.notes:
        screen.print(Text(f"note: {note.text}"), soft_wrap=True)
    for path in write_rows(packing, options.out):
        screen.print(Text(f"wrote {path}"), soft_wrap=True)
    return 0


def _failed(packing: Packing) -> str:
    """Return why nothing was written, with those ways out that help these conversations."""
    ways, kinds = [], {refusal.kind == TOO_LONG for refusal in packing.failures}
    if False in kinds:
        ways.append("leave them out with --on-bad skip")
    if True in kinds:
        ways.append(f"{'for those too long ' if False in kinds else ''}choose {packing.settings.ways_for_long}")
    said = counted(len(packing.failures), "conversation", "is", "are")
    return f"{said} refused, so nothing was written; correct {'it' if len(packing.failures) == 1 else 'them'}, or {', and '.join(ways)}."


def _check_places(options: PackRows) -> None:
    if options.resume and options.restart:
        raise PackproofError(
            what="--resume and --restart are given both",
            where="the command line",
            fix="give --resume to go on, or --restart to begin anew",
        )
    if not options.inputs:
        raise PackproofError(
            what="no chat file is given",
            where="the command line",
            fix="name one or more chat files, a folder of them, or - for standard input",
        )
    if options.out.suffix in {".gz", ".zst"}:
        raise PackproofError(
            what="rows are written plain, and the name says compressed",
            where=str(options.out),
            fix="give another --out, and compress the file afterwards",
        )
    for path in (*options.inputs, options.tokenizer, options.out):
        _check_name(path)
    if options.out.is_dir():
        fix = "give the name of a file, such as train.jsonl.packed, in it"
        raise PackproofError(what="it is a folder", where=str(options.out), fix=fix)
    for place in (options.out, manifest_path(options.out)):
        if is_there(place) and not options.overwrite:
            raise PackproofError(
                what="the file exists", where=str(place), fix="choose another --out, or replace it with --overwrite"
            )
    if options.out.resolve() in {path.resolve() for path in options.inputs if path != STDIN}:
        raise PackproofError(what="--out is one of the inputs", where=str(options.out), fix="choose another --out")


def _check_name(path: Path) -> None:
    """Refuse a path that no manifest can name, or no file system knows."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        what, fix = "the path is not UTF-8, so a manifest could not name it", "rename the file"
        raise PackproofError(what=what, where=ascii(text), fix=fix) from None
    if "\0" in text:
        raise PackproofError(what="the path holds a NUL byte", where=ascii(text), fix="give a path without it")


def _list_refused(packing: Packing, complaints: Console, shown: int) -> None:
    for refusal in packing.refused[:shown]:
        complaints.print(Text(f"{_where(packing, refusal)}: {refusal.kind}: {refusal.detail}"), soft_wrap=True)
    if (left := len(packing.refused) - shown) > 0:
        complaints.print(f"… and {left:,} more; --list-refused N shows more, the manifest has the lines of all.")


def _where(packing: Packing, refusal: Refusal) -> str:
    piece = f" piece {refusal.place.piece}" if refusal.place.piece else ""
    piece += f" part {refusal.place.part}" if refusal.place.part else ""
    return f"{packing.inputs[refusal.place.input].path} line {refusal.place.line}{piece}"


def _table(packing: Packing) -> Table:
    counts = packing.counts()
    table = Table(title="packed rows", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in counts.items():
        if name == "conversations_refused":
            table.add_row(name.replace("_", " "), f"{count:,}")
            for kind, number in sorted(packing.refused_by_kind().items()):
                table.add_row(f"  {kind}", f"{number:,}")
        else:
            table.add_row(name.replace("_", " "), f"{count:,}")
    kept = counts["conversation_tokens"] - counts["truncated_tokens"]
    table.add_row("rows filled", f"{kept / counts['row_tokens']:.2%}")
    for file in packing.inputs:
        table.add_row(Text(f"layout of {file.path.name}"), file.layout or "no line")
    for what, keys in (
        ("key dropped", "dropped_keys"),
        ("key of messages kept", "message_keys"),
    ):
        for file in packing.inputs:
            for key, number in sorted(getattr(file, keys).items()):
                table.add_row(Text(f"{what}: {key} in {file.path.name}"), f"{number:,}")
    return table
