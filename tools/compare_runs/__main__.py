"""Compare two runs step by step: the published comparison as a command.

    packproof compare-runs recorded megatron.log our/run --steps 3-20 --html runs.html
    packproof compare-runs live --config job.yaml --layout cp2 --html live.html

`live` runs Megatron-LM's own pieces and packproof beside each other. Two paths without a command mean `recorded`. Exit status: 0
compared as asked, 1 a loss is not a number or a limit does not hold, 2 bad input.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from production import exits

COMMANDS = {"recorded": "tools.compare_runs.recorded", "live": "tools.compare_runs.live"}
"""By word: the module whose `main` takes the rest of the command line; imported only when it is asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    return exits.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        print(f"commands: {', '.join(COMMANDS)}; each tells its options with --help")
        return 0 if arguments else exits.CANNOT_RUN
    command = arguments.pop(0) if arguments[0] in COMMANDS else "recorded"
    status: int = importlib.import_module(COMMANDS[command]).main(arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
