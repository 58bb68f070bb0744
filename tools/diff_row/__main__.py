"""Shows a row as several sides build it, and where they differ first.

    packproof-diff-row FILE --row N --tokenizer DIR          a row of a packed file
    packproof-diff-row --case CASE.json                      a saved case
    packproof-diff-row --dump BATCH.safetensors              what a job really fed, on its own
    packproof-diff-row FILE --row N --tokenizer DIR --dump BATCH.safetensors --dump-row B

Exit status: 0 all sides are equal, 1 they differ (or a lone dump is inconsistent in itself), 2 bad input.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from equivalence import exits
from tools.diff_row.dump import NAMES, write_dump
from tools.diff_row.findings import Findings
from tools.diff_row.inputs import Request, find
from tools.diff_row.machine import as_json
from tools.diff_row.page import render_page
from tools.diff_row.problems import BadInput
from tools.diff_row.terminal import show

PIPED_WIDTH = 100
"""Columns where there is no terminal to ask."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the command line says."""

    file: Annotated[Path | None, tyro.conf.Positional] = None
    """A packed file: .jsonl, .jsonl.packed, .jsonl.gz or .jsonl.zst."""
    row: int | None = None
    """The row of the file, from 0."""
    case: Path | None = None
    """A saved case instead of a file; it brings its tokenizer and settings, which the options below override."""
    dump: Path | None = None
    """A dumped batch: a side of its own beside the others, or alone."""
    dump_row: int = 0
    """The row of the dumped batch, from 0."""
    tokenizer: str | None = None
    """Folder of a Hugging Face tokenizer, or the name of one that packproof's cases use."""
    prompt_format: str | None = None
    """nemotron-nano-v2 (if not given), nemotron-h-aligned, identity or default."""
    pack_length: int | None = None
    """Tokens a row has in the model; if not given, the dump's, else 4096."""
    context_parallel_size: int | None = None
    """cp, 1 if not given."""
    semantics: str | None = None
    """A preset, megatron-lm-0.19 if not given, optionally with overrides: strict,lost_conversations=refuse."""
    pad_token: str | None = None
    """Instead of the format's pad token."""
    assistant_prefix_len: int | None = None
    """Instead of the format's assistant prefix, in tokens."""
    sides: str | None = None
    """Two or more of reference, production, megatron_lm, module:object, with commas between; if not given, all built-in
    ones that are witnesses of the semantics, beside a dump the reference."""
    chat_key: str = "messages"
    """The key of a row's messages in the file."""
    json: bool = False
    """Print everything for machines instead of the screen."""
    html: Path | None = None
    """Also write one self-contained page with every token of the row."""
    write_dump: Path | None = None
    """Also write the first built side's row as a dump."""
    dump_names: str = "packproof"
    """The names in a written dump: packproof or megatron_lm."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return exits.run(_main, arguments)


def _main(arguments: Sequence[str] | None) -> int:
    asked = tyro.cli(Arguments, args=arguments, description=__doc__, prog="packproof-diff-row", use_underscores=False)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Says at import that there is no CUDA, which nothing here needs.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        findings = find(_request(asked))
        if asked.html is not None:
            _write_page(asked.html, findings)
        if asked.write_dump is not None:
            _write_dump(asked, findings)
    except BadInput as error:
        print(f"packproof-diff-row: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if asked.json:
        print(as_json(findings))
    else:
        console = Console()
        width = min(console.width, 120) if console.is_terminal or "COLUMNS" in os.environ else PIPED_WIDTH
        show(findings, Console(width=width), page=None if asked.html is None else str(asked.html))
    return 0 if findings.equal else 1


def _request(asked: Arguments) -> Request:
    names = ("prompt_format", "pack_length", "context_parallel_size", "semantics", "pad_token", "assistant_prefix_len")
    given = tuple((name, getattr(asked, name)) for name in names if getattr(asked, name) is not None)
    sides = None if asked.sides is None else tuple(side.strip() for side in asked.sides.split(",") if side.strip())
    return Request(
        file=asked.file,
        row=asked.row,
        chat_key=asked.chat_key,
        case=asked.case,
        dump=asked.dump,
        dump_row=asked.dump_row,
        tokenizer=asked.tokenizer,
        sides=sides,
        settings=given,
    )


def _write_page(path: Path, findings: Findings) -> None:
    if not findings.built:
        raise BadInput(f"--html {path}: no side built the row, so there is no token to show")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(findings), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--html {path} cannot be written ({error.strerror}): choose another place") from error


def _write_dump(asked: Arguments, findings: Findings) -> None:
    assert asked.write_dump is not None
    if asked.dump_names not in NAMES:
        raise BadInput(f"--dump-names {asked.dump_names}: choose one of {', '.join(NAMES)}")
    if not findings.built:
        raise BadInput(f"--write-dump {asked.write_dump}: no side built the row, so there is nothing to write")
    try:
        write_dump(asked.write_dump, [findings.built[0].row], names=asked.dump_names)
    except OSError as error:
        raise BadInput(f"--write-dump {asked.write_dump} cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    sys.exit(main())
