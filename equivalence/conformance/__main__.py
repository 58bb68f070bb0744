"""Write the test vectors again: `python -m equivalence.conformance FOLDER` (default: those that `packproof` ships)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from equivalence.conformance import vectors
from equivalence.errors import SuiteError
from packproof.cases import FOLDER


def main(arguments: list[str]) -> int:
    """Write the vectors; exit status 2 where the sides differ, and then nothing is written."""
    folder = Path(arguments[0]) if arguments else FOLDER
    try:
        manifest = vectors.write(folder, vectors.generate())
    except SuiteError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{manifest['cases']} cases in {folder}: {manifest['sets']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
