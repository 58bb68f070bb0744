"""Writes a real tokenizer folder from the vocabulary that the package mistral-common ships; no hub is asked."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from equivalence.generators.real_tokenizers import build_tokenizer
from production import exits
from production.errors import PackproofError


@dataclass(frozen=True, kw_only=True)
class BuildTokenizer:
    """Write a Hugging Face tokenizer folder from the vocabulary that the package mistral-common ships.

    Exit codes: 0 written, 2 the vocabulary is missing or another one, or the folder cannot be written.
    """

    out: Annotated[Path, tyro.conf.Positional]
    """The folder to write; it is created, and the files of an earlier build are replaced."""
    name: Literal["nemotron-like", "nemotron-mini"] = "nemotron-like"
    """nemotron-like: 131,072 ids, 7 MB. nemotron-mini: the same cut down to 4,096 ids, 0.24 MB."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    return exits.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    options = tyro.cli(BuildTokenizer, args=argv, prog="packproof-build-tokenizer")
    try:
        folder = build_tokenizer(options.name, options.out)
    except (PackproofError, OSError) as error:
        print(f"packproof-build-tokenizer: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {options.name}, {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
