"""`packproof-bench`: what packproof's parts cost, each next to what it replaces, in one run on one machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from equivalence.runner import exits
from production.errors import PackproofError
from tools.bench.attention import attention
from tools.bench.cache import cache
from tools.bench.files import inspect_files, inspect_memory, pack_chats, packers
from tools.bench.loader import loader
from tools.bench.multi_token import multi_token
from tools.bench.rows import rows
from tools.bench.shards import shards
from tools.bench.source import source
from tools.bench.subject import subject
from tools.bench.suite import suite


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code: 0, or 2 for bad input."""
    return exits.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    commands: dict[str, Callable[..., Any]] = {
        "rows": rows,
        "source": source,
        "shards": shards,
        "multi_token": multi_token,
        "loader": loader,
        "cache": cache,
        "attention": attention,
        "suite": suite,
        "subject": subject,
        "inspect": inspect_files,
        "inspect_memory": inspect_memory,
        "pack": pack_chats,
        "packers": packers,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(commands, args=argv, prog="packproof-bench")
    except (PackproofError, OSError) as error:
        print(f"packproof-bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
