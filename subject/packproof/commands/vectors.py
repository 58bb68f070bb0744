"""`packproof vectors OUT`: write the test vectors to a folder, unpacked, with their manifest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Sequence

from packproof.cases import FOLDER, manifest, read_lines
from packproof.commands.options import GOOD, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return 0, or 2 where the folder cannot be written."""
    return guarded("vectors", _main, arguments)


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="packproof vectors", description="Write the test vectors to a folder.")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="folder for the vectors; it is created if it does not exist"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("vectors.jsonl", "messages.jsonl"):
        text = "\n".join(read_lines(FOLDER, name)) + "\n"
        (options.out / name).write_bytes(text.encode("utf-8"))
    about = manifest()
    (options.out / "manifest.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    sets = ", ".join("%d %s" % (count, name) for name, count in about["sets"].items())
    print(
        "%s: %d cases (%s), format %d. Answer each line of vectors.jsonl, then run `packproof judge ANSWERS`."
        % (options.out, about["cases"], sets, about["format"])
    )
    return GOOD
