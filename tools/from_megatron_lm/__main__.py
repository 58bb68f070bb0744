"""Write a job's YAML from a Megatron-LM command line, or from the argument dump at the head of a log:
`packproof from-megatron-lm FILE|- | -- ARGUMENTS`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from production.errors import PackproofError
from production.library_warnings import quiet_process
from tools.from_megatron_lm.job_yaml import yaml_text
from tools.from_megatron_lm.reading import Arguments, read_text, read_words
from tools.from_megatron_lm.translate import translate

CANNOT_RUN = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print the YAML. Exit status: 0 all arguments have a place, 2 some argument is refused, and no YAML is written."""
    quiet_process()
    words = list(sys.argv[1:] if argv is None else argv)
    own, behind = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, None)
    options = _parser().parse_args(own)
    try:
        arguments, name = _read(options.source, behind)
        found = translate(arguments)
    except PackproofError as error:
        print(f"refused: {error}", file=sys.stderr)
        return CANNOT_RUN
    if found.refused:
        for argument, fix in found.refused:
            print(f"refused: {argument}: {fix}", file=sys.stderr)
        counted = "1 argument has" if len(found.refused) == 1 else f"{len(found.refused)} arguments have"
        print(f"{counted} no place in a job", file=sys.stderr)
        return CANNOT_RUN
    text = yaml_text(found, name)
    if options.output is None:
        print(text, end="")
    else:
        Path(options.output).write_text(text, encoding="utf-8")
    return 0


def _read(source: str | None, behind: list[str] | None) -> tuple[Arguments, str]:
    if (source is None) == (behind is None):
        fix = "name a file (- for stdin), or write the arguments behind --"
        raise PackproofError(what="there is no one source of arguments", where="command line", fix=fix)
    if behind is not None:
        return read_words(behind, name="the command line"), "a command line"
    assert source is not None
    if source == "-":
        return read_text(sys.stdin.read(), name="stdin"), "stdin"
    try:
        return read_text(Path(source).read_text(encoding="utf-8"), name=source), source
    except (OSError, UnicodeDecodeError) as error:
        raise PackproofError(what=f"cannot be read: {error}", where=source, fix="give a text file") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="packproof from-megatron-lm",
        description="Write a job's YAML from a Megatron-LM command line or log.",
        usage="%(prog)s FILE|- [-o JOB.yaml]   or   %(prog)s [-o JOB.yaml] -- ARGUMENTS",
    )
    parser.add_argument("source", nargs="?", help="a file of arguments, a log that begins with them, or - for stdin")
    parser.add_argument("-o", "--output", help="write the YAML to this file instead of the screen")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
