"""`make fuzz` (or `python -m tools.fuzz`): damaged inputs without end for the readers of files and manifests.

Each input has a number, from which it is drawn alone; the next number is kept, so that a later run goes on there. An input
fails that ends in anything but a result or an error of ours, and a line that production reads otherwise than the
reference. Exit status: 0 none failed, 1 one failed, 2 bad input.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
import zstandard

from production import exits
from production.errors import BadInput
from production.files.cache import atomic_file
from production.files.faults import LineError
from production.files.manifest import FORMAT, read_manifest, write_manifest
from production.files.parse import parse_row
from production.files.source import open_source
from reference.files import LineRefused, read_row

_KEY = "messages"
_PIECES = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n", b"\t", b" ", b'"', b"\\", b"\\u", b"\\ud800", b"\\u0000",
    b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"NaN", b"-0", b"1e999", b"9" * 400, b"[" * 300, b'"role"', b'"content"',
    b'"messages"', b'{"messages": []}', "é\u2028\U0001f600".encode(), b'"role": "user", ',
)  # fmt: skip
"""Pieces that readers have stumbled on."""
_TEXTS = ("", "a", 'say "so"', "two\nlines", "\\", "é\u2028\U0001f600", "\ud83d", "<|im_end|>", "0" * 70)
_SEVERAL = {"invalid_json", "duplicate_key", "lone_surrogate"}
"""Faults of the JSON that may stand in one line, of which the sides may name another: production names the first one."""
_BEYOND = ("number_out_of_range", "nested_too_deep")
"""Faults that Python's reader, which is the reference, does not see."""
_SHARES = {"line": 0.94, "manifest": 0.04, "file": 0.02}
"""Share of each kind of input: a file costs a hundred lines."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the command line."""

    count: int = 10_000
    """Inputs."""
    seed: int = 0
    """Seed of all inputs."""
    first: int | None = None
    """Number of the first input; where it is not given, the run goes on behind the last one of this seed."""
    state: Path = Path("build/fuzz.json")
    """Where the next number of each seed is kept."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Records an input that a reader answered wrongly: with an unexpected exception, or otherwise than the reference."""

    number: int
    """Number of the input."""
    kind: str
    """What it is: line, manifest or file."""
    what: str
    """What came of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    return exits.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    options = tyro.cli(Arguments, args=argv, prog="python -m tools.fuzz", description=__doc__)
    state = json.loads(options.state.read_text()) if options.state.is_file() else {}
    first = options.first if options.first is not None else int(state.get(str(options.seed), 0))
    outcomes: Counter[str] = Counter()
    failures, started = 0, time.monotonic()
    for number, outcome in fuzz(options.seed, range(first, first + options.count)):
        if isinstance(outcome, Failure):
            failures += 1
            print(f"input {number} of seed {options.seed}, a {outcome.kind}: {outcome.what}", flush=True)
        else:
            outcomes[outcome] += 1
        if number % 10_000 == 9_999 or number == first + options.count - 1:
            state[str(options.seed)] = number + 1
            with atomic_file(options.state) as file:
                file.write(json.dumps(state).encode())
    seconds = time.monotonic() - started
    print(
        f"{options.count:,} inputs of seed {options.seed} from number {first:,} in {seconds:,.0f} s; {failures:,} failed"
    )
    for outcome, number in outcomes.most_common():
        print(f"{number:>12,}  {outcome}")
    return 1 if failures else 0


def fuzz(seed: int, numbers: range) -> Iterator[tuple[int, str | Failure]]:
    """Yield the number of each input, and the name of its outcome or its failure."""
    tries: dict[str, Callable[[random.Random, Path], str]] = {"line": _line, "manifest": _manifest, "file": _file}
    with tempfile.TemporaryDirectory(prefix="packproof-fuzz-") as folder:
        for number in numbers:
            draw = random.Random(f"{seed}/{number}")  # noqa: S311 - repeatable, not secret
            (kind,) = draw.choices(list(_SHARES), list(_SHARES.values()))
            try:
                outcome: str | Failure = f"{kind}: {tries[kind](draw, Path(folder))}"
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                outcome = Failure(number=number, kind=kind, what=f"{type(error).__name__}: {str(error)[:500]}")
            yield number, outcome


def _line(draw: random.Random, _: Path) -> str:
    line = _damaged(draw, _row(draw)).replace(b"\n", b"")
    try:
        expected: object = read_row(line + b"\n", _KEY)
    except LineRefused as refused:
        expected = refused.kind
    try:
        found: object = parse_row(line, chat_key=_KEY)
    except LineError as fault:
        found = fault.kind
    both_refuse = isinstance(found, str) and isinstance(expected, str)
    several = both_refuse and {found, expected} <= _SEVERAL
    if repr(found) != repr(expected) and not several and found not in _BEYOND:
        raise AssertionError(f"{line!r} is {found!r} to production and {expected!r} to the reference")
    return found if isinstance(found, str) else "read"


def _manifest(draw: random.Random, folder: Path) -> str:
    """Check that a manifest in which bytes changed is refused, or says what it said."""
    file = folder / "rows.packed"
    if not file.exists():
        file.write_bytes(b"{}\n")
    settings = {
        "pack_length": draw.randrange(1, 1 << 20), "prompt_format": "identity", "context_parallel_size": 1, "semantics": "strict"
    }  # fmt: skip
    path = write_manifest(file, {"output": {"bytes": 3, "rows": 1}, "settings": settings, "counts": {"rows": 1}})
    before, whole = read_manifest(file), path.read_bytes()
    path.write_bytes(_damaged(draw, whole))
    try:
        after = read_manifest(file)
    except BadInput as error:
        return error.kind
    if after != before and FORMAT.encode() in path.read_bytes() and b'"checksum"' in path.read_bytes():
        raise AssertionError(f"{path.read_bytes()!r} is read as {after}")
    return "read"


def _file(draw: random.Random, folder: Path) -> str:
    """Check that a damaged file gives rows and errors of ours, and a damaged index the rows of a whole one."""
    suffix = draw.choice(["", "", ".gz", ".zst"])
    plain = b"".join(_row(draw) + b"\n" for _ in range(draw.randrange(1, 6)))
    is_index = draw.random() < 0.3
    content = plain if is_index else _damaged(draw, plain)
    content = (
        gzip.compress(content, 1) if suffix == ".gz" else zstandard.compress(content) if suffix == ".zst" else content
    )
    if suffix and not is_index and draw.random() < 0.5:
        content = _damaged(draw, content)
    for each in folder.iterdir():
        each.unlink()
    path = folder / f"rows{suffix}"
    path.write_bytes(content)
    cache = folder
    read = _read(path, cache)
    if is_index:
        (index,) = folder.glob("*-index")
        index.write_bytes(_damaged(draw, index.read_bytes()))
        if (again := _read(path, cache)) != read:
            raise AssertionError(f"with a damaged index {again!r}, before {read!r}")
        return "read by a damaged index"
    return read if isinstance(read, str) else "read"


def _read(path: Path, cache: Path) -> object:
    found: list[object] = []
    try:
        for on_bad_row in ("error", "skip"):
            with open_source(path, on_bad_row=on_bad_row, cache_folder=cache) as source:
                for row in range(len(source)):
                    try:
                        found.append(source[row])
                    except BadInput as error:
                        found.append(error.kind)
    except BadInput as error:
        return error.kind
    return found


def _row(draw: random.Random) -> bytes:
    messages = [
        {"role": draw.choice(["system", "user", "assistant"]), "content": draw.choice(_TEXTS)}
        for _ in range(draw.randrange(1, 5))
    ]
    return json.dumps({_KEY: messages}, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")


def _damaged(draw: random.Random, content: bytes) -> bytes:
    """Return the bytes with one to four changes: a bit, a piece put in, a part cut out, doubled or moved."""
    found = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at, end = sorted(draw.randrange(len(found) + 1) for _ in range(2))
        how = draw.randrange(6)
        if how == 0 and found:
            found[min(at, len(found) - 1)] ^= 1 << draw.randrange(8)
        elif how == 1:
            found[at:at] = draw.choice(_PIECES)
        elif how == 2:
            del found[at : min(end, at + draw.choice([1, 2, 40]))]
        elif how == 3:
            found[at:at] = found[at : min(end, at + 60)]
        elif how == 4:
            del found[end:]
        else:
            piece = draw.choice(_PIECES)
            found[at : at + len(piece)] = piece
    return bytes(found)


if __name__ == "__main__":
    sys.exit(main())
