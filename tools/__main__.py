"""`packproof COMMAND …` (or `python -m tools COMMAND …`): every command of packproof behind one name.

Each command is imported only when it is asked for, so that the list below is there at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from production import exits


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of packproof."""

    module: str
    """The module whose `main` takes the rest of the command line."""
    when: str
    """When to use it, in one line."""


COMMANDS = {
    "check": Command(
        module="tools.check.__main__",
        when="may this job start? Compares its own file, tokenizer and YAML with Megatron-LM, and writes a certificate",
    ),
    "diff-row": Command(
        module="tools.diff_row.__main__", when="my loss is off: what does my trainer feed, and where does it differ?"
    ),
    "compare-runs": Command(
        module="tools.compare_runs.__main__", when="two runs differ: from which step on, and in which series?"
    ),
    "equivalence": Command(
        module="equivalence.__main__",
        when="is this file, or my own loader, equal to Megatron-LM's rows? Also replay, promote, mutants",
    ),
    "inspect": Command(
        module="tools.inspect_rows.__main__",
        when="inspect every row of a packed file: which rows a run refuses, cuts or trains differently; --fix writes a repaired copy",
    ),
    "conformance": Command(
        module="tools.conformance",
        when="which conformance level does a packing function reach, in its own environment?",
    ),
    "vectors": Command(
        module="packproof.commands.vectors",
        when="write test vectors for a CI in which packproof cannot start the code under test",
    ),
    "judge": Command(module="packproof.commands.judge", when="judge answers to the test vectors"),
    "pack": Command(module="tools.pack_rows.cli", when="pack chat files into rows of Megatron-LM's format"),
    "train": Command(
        module="production.training.__main__",
        when="train on packed rows or chat files; --dry-run plans without a machine",
    ),
    "from-megatron-lm": Command(
        module="tools.from_megatron_lm.__main__",
        when="write a job's YAML from a Megatron-LM command line, or from the head of its log",
    ),
    "simulate": Command(
        module="tools.simulate.__main__",
        when="compute the indices of all ranks of a layout: owners of tokens, load, messages and bytes",
    ),
    "witness": Command(
        module="tools.witness.__main__",
        when="keep other versions of Megatron-LM, or a clone of NeMo-RL, beside the installed packages, and compare with them: add, list, remove, compare",
    ),
    "bench": Command(
        module="tools.bench.__main__", when="measure the speed of packproof's parts and of the code that they replace"
    ),
    "build-tokenizer": Command(
        module="tools.build_tokenizer", when="build a real tokenizer without a download from a hub"
    ),
}
ALIASES = {"pack-rows": "pack"}
CANNOT_RUN = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names (default: the process's own) and return its exit status; 2 where it names none."""
    return exits.run(_main, sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(argv or ())
    if arguments and arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    name = ALIASES.get(arguments[0], arguments[0]) if arguments else ""
    if name not in COMMANDS:
        told = f"packproof: there is no command {arguments[0]!r}\n\n" if arguments else ""
        print(told + _help(), file=sys.stderr)
        return CANNOT_RUN
    status: int = importlib.import_module(COMMANDS[name].module).main(arguments[1:])
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.when}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: packproof COMMAND …   (packproof COMMAND --help lists the options of a command)",
            "",
            "Shows that a path for packed SFT rows feeds the model exactly what Megatron-LM would.",
            "",
            *lines,
            "",
            "Exit status: 0 equal or done, 1 a difference, 2 bad input. compare-runs recorded ends with 1 only for a limit that you give.",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
