"""Measure other projects' packing: `python -m tools.peers [NAME …] [--folder build/peers] [--record]`, or `make conformance`.

Each peer gets an environment of its own, is measured on its own and is compared with the record. A peer that cannot be installed is told of and is no
failure; a peer that changed, or that broke, is one: exit status 1. What is built is kept for the next time.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from production import exits
from tools.peers import results
from tools.peers.environment import ADAPTERS, ROOT, Peer, UnavailableError, build, read_peers

DRAWN = 20
"""Drawn cases beside the test vectors."""
SECONDS = "600"
"""How long a peer may take for one answer: the first one imports the peer."""
NO_ANSWER = "gave no answer within"
GOOD, CHANGED = 0, 1


class BrokenError(Exception):
    """A peer that is installed gives no report."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Console script. Return 0 where all is as recorded, 1 where a result changed or a peer broke, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m tools.peers", description="Measure other projects' packing.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="peers of examples/adapters/peers.toml (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="where environments are built")
    parser.add_argument(
        "--record", action="store_true", help="record what is measured, and write the page's tables anew"
    )
    options = parser.parse_args(arguments)
    peers, shared = read_peers()
    unknown = sorted(set(options.names) - {peer.name for peer in peers})
    if unknown:
        print(
            f"no peer is called {', '.join(unknown)}; known are {', '.join(peer.name for peer in peers)}",
            file=sys.stderr,
        )
        return exits.CANNOT_RUN
    try:
        options.folder.mkdir(parents=True, exist_ok=True)  # else pip's failure would pass for a peer that cannot be had
    except OSError as error:
        print(f"--folder must be a folder that can be written, got {options.folder} ({error})", file=sys.stderr)
        return exits.CANNOT_RUN
    recorded, failed = results.read_record(), []
    measured: dict[str, results.Result] = {}
    for peer in peers:
        if options.names and peer.name not in options.names:
            continue
        if not _measure(peer, options.folder.resolve(), shared, recorded, measured):
            failed.append(peer.name)
        if options.record and peer.name in measured:
            whole = {**results.read_record(), peer.name: measured[peer.name]}  # another run may record as well
            results.write_record(whole)
            results.write_page(peers, whole)
    print("\n" + results.table(peers, measured))
    if failed and not options.record:
        print(f"changed or broken: {', '.join(failed)}")
    return CHANGED if failed and not options.record else GOOD


def _measure(
    peer: Peer,
    folder: Path,
    shared: list[str],
    recorded: dict[str, results.Result],
    measured: dict[str, results.Result],
) -> bool:
    """Measure one peer, tell how it went, and return whether nothing is wrong with it."""
    start = time.monotonic()
    try:
        subject = peer.subject or _command(build(peer, folder, shared), peer)
        measured[peer.name] = _report(peer, subject, folder)
    except UnavailableError as error:
        print(f"{peer.name}: cannot be installed here: {error}", flush=True)
        return True
    except BrokenError as error:
        print(f"{peer.name}: BROKEN: {error}", flush=True)
        return False
    found = results.changes(recorded.get(peer.name), measured[peer.name])
    told = "as recorded" if not found else "CHANGED: " + "; ".join(found)
    print(f"{peer.name}: {told} ({time.monotonic() - start:.0f} s)", flush=True)
    return not found


def _command(python: Path, peer: Peer) -> str:
    # PYTHONPATH would come before the peer's own packages.
    return "exec:" + shlex.join(["env", "-u", "PYTHONPATH", str(python), str(ADAPTERS / peer.adapter)])


def _report(peer: Peer, subject: str, folder: Path) -> results.Result:
    """Hold a subject to the levels with the command that users have. BrokenError has its last words."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{peer.name}.json"
    path.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "tools",
        "conformance",
        "--subject",
        subject,
        "--drawn",
        str(DRAWN),
        "--json",
        str(path),
    ]
    environ = {"PACKPROOF_SUBJECT_SECONDS": SECONDS, **os.environ}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    if not path.is_file():
        raise BrokenError((done.stderr or done.stdout).strip()[-600:])
    report = json.loads(path.read_text(encoding="utf-8"))
    first = report["levels"][0]
    what = first.get("miss", {}).get("what", "")
    if first["missed"] == first["cases"] or NO_ANSWER in what:
        raise BrokenError(f"{first['missed']} of {first['cases']} cases are refused or wrong: {what}")
    return results.result_of(report, dt.datetime.now(tz=dt.UTC).date().isoformat())


if __name__ == "__main__":
    raise SystemExit(exits.run(main))
