"""Shows a row as several sides build it, and where they differ first.

    packproof-diff-row FILE --row N --tokenizer DIR          a row of a packed file
    packproof-diff-row --case CASE.json                      a saved case
    packproof-diff-row FILE --tokenizer DIR --dump BATCH.safetensors --dump-row B     what a trainer fed; its row is found by its ids
    packproof-diff-row --dump BATCH.safetensors              the same on its own: is it consistent in itself?
    packproof-diff-row FILE --row N --tokenizer DIR --cp 4 --rank 2 --depth 1     its way to one rank
    packproof-diff-row --fed DUMPS/step_00000010                                  what each rank of a job fed

Exit status: 0 all sides are equal, 1 they differ (or a lone dump is inconsistent in itself), 2 bad input.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from safetensors import SafetensorError

from equivalence.subjects import split_names
from production import exits
from tools.diff_row.dump.batch_reader import Conventions, field_of
from tools.diff_row.dump.writer import NAMES, write_dump, write_steps
from tools.diff_row.dump_report import find_fed
from tools.diff_row.errors import BadInput
from tools.diff_row.inputs import Request, find
from tools.diff_row.notes import token_notes
from tools.diff_row.rank_report import RankRequest, find_rank
from tools.diff_row.render.json_output import as_json
from tools.diff_row.render.page import render_page
from tools.diff_row.render.terminal import show
from tools.diff_row.report import Report
from tools.diff_row.sides import end_external


def _whole(text: str) -> int:
    """Parse a whole number of the command line. Raises ValueError with a readable text."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not one whole number, such as 2") from None


def _hint(default: str) -> str:
    """Return the help text of a default; empty for an option without one."""
    return "" if default in ("None", "'not given'", "") else f"(default: {default})"


Quiet = tyro.conf.arg(help_behavior_hint=_hint)
"""An option whose help names its default only where there is one."""
Whole = Annotated[
    int | None,
    Quiet,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: _whole(texts[0]),
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: ["not given" if value is None else str(value)],
    ),
]
"""A whole number, or nothing where the option is not given."""
Text = Annotated[str | None, Quiet, tyro.conf.arg(metavar="TEXT")]
"""A word, or nothing where the option is not given."""
OptionalPath = Annotated[Path | None, Quiet, tyro.conf.arg(metavar="PATH")]
"""A path, or nothing where the option is not given."""
PIPED_WIDTH = 100
"""Columns where there is no terminal to ask."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Row to show, and settings for building it."""

    file: Annotated[OptionalPath, tyro.conf.Positional] = None
    """A packed file: .jsonl, .jsonl.packed, .jsonl.gz or .jsonl.zst."""
    row: Whole = None
    """The row of the file, from 0: line N is row N - 1. Beside --dump it is found by the dump's ids where it is not given."""
    case: OptionalPath = None
    """A saved case instead of a file; it brings its tokenizer and settings, which the options below override."""
    tokenizer: Text = None
    """Folder of a Hugging Face tokenizer, or the name of one that packproof's cases use."""
    prompt_format: Text = None
    """nemotron-nano-v2, nemotron-h-aligned, identity or default; if not given, the manifest's, else nemotron-nano-v2."""
    pack_length: Whole = None
    """Tokens a row has in the model; if not given, the dump's, else what FILE.manifest.json says, else 4096."""
    context_parallel_size: Whole = None
    """cp; if not given, the manifest's, else 1."""
    semantics: Text = None
    """A preset, optionally with overrides: strict,lost_conversations=refuse; if not given, the manifest's, else megatron-lm-0.19."""
    pad_token: Text = None
    """Instead of the format's pad token."""
    assistant_prefix_len: Whole = None
    """Instead of the format's assistant prefix, in tokens."""
    ignore_manifest: bool = False
    """Take nothing from FILE.manifest.json."""
    sides: Text = None
    """Two or more of reference, production, megatron_lm, module:object, exec:"PYTHON my_adapter.py", with commas between; if not
    given, all built-in ones that are witnesses of the semantics, beside a dump the reference."""
    chat_key: str = "messages"
    """The key of a row's messages in the file."""


@dataclass(frozen=True, kw_only=True)
class DumpOptions:
    """Dump of a trainer's batch, beside the sides or alone."""

    dump: OptionalPath = None
    """A dumped batch (safetensors): a side of its own. The names of packproof and of Megatron-LM are known."""
    dump_row: int = 0
    """The row of the dumped batch, from 0."""
    name: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TENSOR=FIELD", help_behavior_hint=_hint)
    ] = ()
    """Field of a tensor in the dump that has another name: --name y=target_ids. Fields: input_ids, target_ids, token_mask,
    position_ids, cu_seqlens, max_seqlen. May be given several times."""
    labels: str = "shifted"
    """shifted: label i is what position i predicts; unshifted: label i is token i, and the model shifts."""
    only_trained_labels: bool = False
    """Compare no label that neither side trains, such as -100 against the pad id under padding."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The way of the row to one rank of a parallel layout, shown with any of these, or what a job's ranks fed."""

    tp: Whole = None
    """Tensor parallel size."""
    cp: Whole = None
    """Context parallel size; the row is built for it, too."""
    dp: Whole = None
    """Data parallel size."""
    pp: Whole = None
    """Pipeline parallel size."""
    rank: Whole = None
    """The rank among all, from 0: tp counts fastest, then cp, dp, pp slowest."""
    depth: Whole = None
    """Number of depths of multi-token prediction, each a step: 2 makes depths 1 and 2."""
    stop_at: Text = None
    """row, batch, microbatch, depth, share, slice or weights: the last step; if not given the share, at tp > 1 the slice."""
    at: Whole = None
    """A position of the row to follow through the steps; if not given, the first that differs."""
    layout: str = "zigzag"
    """Cut of the row among cp ranks: zigzag or contiguous."""
    sequence_parallel: bool = True
    """Whether tp ranks each hold a slice of the share after embedding."""
    global_batch_size: Whole = None
    """Rows of the global batch, in sequential order, for --stop-at weights; dp if not given."""
    fed: OptionalPath = None
    """A job's dump of a step (a folder): what its ranks fed, against what the reference makes of the same rows."""
    microbatch: Whole = None
    """Only this microbatch of the dump."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Outputs."""

    json: bool = False
    """Print everything for machines instead of the screen."""
    html: OptionalPath = None
    """Also write one self-contained page with every token of the row."""
    write_dump: OptionalPath = None
    """Also write the first built side's row as a dump; with a rank, every tensor of every step of all sides."""
    dump_names: str = "packproof"
    """The names in a written dump: packproof or megatron_lm."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the command line."""

    row: RowOptions
    dump: DumpOptions
    rank: RankOptions
    output: OutputOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        return exits.run(_main, arguments)
    finally:
        end_external()


def parse(arguments: Sequence[str] | None) -> Arguments:
    """Parse the command line; exit as argparse does if it cannot be parsed."""
    return tyro.cli(
        Arguments,
        args=arguments,
        description=__doc__,
        prog="packproof-diff-row",
        use_underscores=False,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _main(arguments: Sequence[str] | None) -> int:
    asked = parse(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Says at import that there is no CUDA, which nothing here needs.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    output = asked.output
    try:
        report = _find(asked)
        made = (asked.row.chat_key, None) if report.fed is None else (report.fed.chat_key, report.fed.chat_template)
        for note in token_notes(report.row, *made):
            print(f"note: {note}", file=sys.stderr)
        if output.html is not None:
            _write("--html", output.html, report, lambda path: path.write_text(render_page(report), encoding="utf-8"))
        if output.write_dump is not None:
            _write_dump(output, output.write_dump, report)
    except BadInput as error:
        print(f"packproof-diff-row: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if output.json:
        print(as_json(report))
    else:
        show(report, _console(), page=None if output.html is None else str(output.html))
    return 0 if report.equal else 1


def _console() -> Console:
    console = Console()
    return Console(width=min(console.width, 120) if console.is_terminal or "COLUMNS" in os.environ else PIPED_WIDTH)


def _find(asked: Arguments) -> Report:
    """Return the report that was asked for: of a row, of its way to a rank, or of a job's dump. Raises BadInput."""
    request = RankRequest(row=_request(asked), **vars(asked.rank))
    if request.fed is not None:
        return find_fed(request)
    return find_rank(request) if request.is_asked else Report(row=find(request.row))


def _request(asked: Arguments) -> Request:
    names = ("prompt_format", "pack_length", "context_parallel_size", "semantics", "pad_token", "assistant_prefix_len")
    row, dump = asked.row, asked.dump
    given = tuple((name, getattr(row, name)) for name in names if getattr(row, name) is not None)
    sides = None if row.sides is None else split_names(row.sides)
    return Request(
        file=row.file,
        row=row.row,
        chat_key=row.chat_key,
        case=row.case,
        dump=dump.dump,
        dump_row=dump.dump_row,
        conventions=Conventions(names=_mapped(dump.name), labels=dump.labels),
        only_trained_labels=dump.only_trained_labels,
        ignore_manifest=row.ignore_manifest,
        tokenizer=row.tokenizer,
        sides=sides,
        settings=given,
    )


def _mapped(pairs: Sequence[str]) -> dict[str, str]:
    """Return the field of each tensor, from TENSOR=FIELD. Raises BadInput."""
    mapped: dict[str, str] = {}
    for pair in pairs:
        tensor, equals, meant = pair.partition("=")
        if not (tensor and equals and meant):
            raise BadInput(f"--name must be TENSOR=FIELD, such as y=target_ids, got {pair!r}")
        if tensor in mapped:
            raise BadInput(f"--name names the tensor {tensor} twice: name it once")
        mapped[tensor] = field_of(meant)
    return mapped


def _write(option: str, path: Path, report: Report, write: Callable[[Path], object]) -> None:
    if not report.row.built:
        lacks = "no token to show" if option == "--html" else "nothing to write"
        raise BadInput(f"{option} {path}: no side built the row, so there is {lacks}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"{option} {path} cannot be written ({why}): choose another place") from error


def _write_dump(output: OutputOptions, path: Path, report: Report) -> None:
    if output.dump_names not in NAMES:
        raise BadInput(f"--dump-names {output.dump_names}: choose one of {', '.join(NAMES)}")
    rank, row = report.rank, report.row
    if rank is not None:
        _write("--write-dump", path, report, lambda to: write_steps(to, rank))
    else:
        _write("--write-dump", path, report, lambda to: write_dump(to, [row.built[0].row], names=output.dump_names))


if __name__ == "__main__":
    sys.exit(main())
