"""`python -m packproof COMMAND …`, in an environment that has this package and no other part of packproof."""

from __future__ import annotations

import sys
from typing import Sequence

from packproof.commands import conformance, judge, vectors

COMMANDS = {"conformance": conformance.main, "vectors": vectors.main, "judge": judge.main}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is named first; 2 where there is none of that name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        print("usage: python -m packproof {{{}}} …".format(",".join(COMMANDS)), file=sys.stderr)
        return 2
    return COMMANDS[given[0]](given[1:])


if __name__ == "__main__":
    raise SystemExit(main())
