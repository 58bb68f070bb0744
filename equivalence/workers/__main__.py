"""`torchrun --nproc-per-node N -m equivalence.workers module:function payload.json`: a target in a launched world.

For a subject that needs its own launcher or devices. Write a function of `(payload, worker)` in a module that every rank can
import; `payload.json` holds one payload, `payloads.jsonl` one a line. Rank 0 prints one JSON line a case,
`{"case": 0, "target": …, "results": [rank 0's, rank 1's, …]}`; tensors are written out with all their values, so return
verdicts of large ones. The first failure ends the run with status 1: the rank that raised prints its traceback, each other rank
what the broken connection raised there, or where it stood when the launcher ended it. The command line is argparse's: every rank pays for imports.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from equivalence.errors import InputError
from equivalence.workers.launched import plain, run_launched
from equivalence.workers.worker import check_name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a target over the payloads of a file, on this rank."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m equivalence.workers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("target", help="module:function, called as function(payload, worker) on every rank")
    parser.add_argument("payloads", type=Path, help=".json: one payload; .jsonl: one a line")
    parser.add_argument("--enter", help="module:function that gives a context manager for all cases")
    parser.add_argument("--entry", type=json.loads, help="its payload, as JSON")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds a case may take (default: %(default)s)")
    parser.add_argument("--backend", default="gloo", help="of the default process group (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        for name in (options.target, *([options.enter] if options.enter else [])):
            check_name(name)
        payloads = list(_payloads(options.payloads))
    except (InputError, OSError) as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        parser.error("no launched world here (RANK is not set): start this with torchrun")
    outcomes = run_launched(
        options.target,
        payloads,
        enter=options.enter,
        entry=options.entry,
        deadline_s=options.deadline,
        backend=options.backend,
    )
    for number, results in enumerate(outcomes):
        if results is not None:
            print(json.dumps({"case": number, "target": options.target, "results": plain(results)}), flush=True)
    return 0


def _payloads(path: Path) -> Iterator[Any]:
    texts = (
        path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text(encoding="utf-8")]
    )
    for number, text in enumerate(texts, start=1):
        try:
            yield json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number + error.lineno - 1}: not JSON: {error.msg}") from error


if __name__ == "__main__":
    sys.exit(record(main)())
