"""Compare NeMo-RL's parts, or make its recorded outcomes anew, in a process that does nothing else: started by `packproof witness`."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from equivalence.errors import SuiteError, WitnessError
from equivalence.witnesses.nemo_rl.checkout import NAME, PARTS, Checkout, find, needed
from equivalence.witnesses.nemo_rl.outcomes_again import record
from equivalence.witnesses.nemo_rl.parts import RECORDED_PARTS, Verdict, from_checkout, from_recorded
from equivalence.witnesses.nemo_rl.stand_ins import CheckoutModules, checkout_modules, stand_ins
from production import exits
from production.model.device.shim import cpu_shim

CANNOT_RUN = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 all is equal, 1 a difference, 2 bad input, a checkout that cannot run, or a part that was not compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("compare", "record"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drawn", type=int, default=200)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    options = parser.parse_args(argv)
    try:
        if options.command == "record":
            return _record(needed(), options.out)
        return _compare(find(), tuple(options.part or PARTS), options.drawn)
    except SuiteError as error:
        print(f"refused: {error}", file=sys.stderr)
        return CANNOT_RUN


def _compare(checkout: Checkout | None, parts: Sequence[str], drawn: int) -> int:
    if checkout is None:
        print(f"{NAME}: recorded outcomes; there is no checkout (packproof witness add nemo-rl --source DIR)")
    else:
        print(f"{NAME}: {checkout.text}")
        for line in stand_ins():
            print(f"  stand-in: {line}")
    is_different, served = False, dict.fromkeys(parts, "")
    for verdict in _verdicts(checkout, parts, drawn):
        print(verdict.text, flush=True)
        if verdict.first:
            print(f"  first: {verdict.first[:2000]}")
        is_different |= verdict.equal < verdict.cases
        if not verdict.why:
            served[verdict.part] = verdict.served
    print(_summary(served))
    if is_different:
        return 1
    # As in `make equivalence`: a witness that could not run is no equality.
    return 0 if all(served.values()) else CANNOT_RUN


def _summary(served: Mapping[str, str]) -> str:
    """Return how many parts were compared, and what served: the checkout, recorded outcomes, or both."""
    by = list(dict.fromkeys(each for each in served.values() if each))
    compared = sum(map(bool, served.values()))
    told = f"{compared} of {len(served)} part{'' if len(served) == 1 else 's'} compared" + (
        f" ({' and '.join(by)})" if by else ""
    )
    lacking = [part for part, each in served.items() if not each]
    if not lacking:
        return told
    names = " ".join(f"--part {shlex.quote(part)}" for part in served if part not in lacking)
    return f"{told}; not compared: {', '.join(lacking)}" + (f". To ask for the others alone: {names}" if names else "")


def _verdicts(checkout: Checkout | None, parts: Sequence[str], drawn: int) -> Iterator[Verdict]:
    if checkout is None:
        yield from map(from_recorded, parts)
        return
    lacking = checkout.lacking()
    with cpu_shim(), checkout_modules(Path(checkout.root)) as modules:
        for part in parts:
            if part not in lacking:
                yield _from_checkout(part, modules, drawn)
                continue
            why = f"the checkout lacks {', '.join(lacking[part])}"
            yield Verdict(part=part, served="checkout", why=why)
            if part in RECORDED_PARTS:
                yield from_recorded(part)


def _from_checkout(part: str, modules: CheckoutModules, drawn: int) -> Verdict:
    """Compare a part. WitnessError says where an exception was raised that no side has for a refusal."""
    try:
        return from_checkout(part, modules, drawn)
    except SuiteError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        raise WitnessError(
            f"{part} could not be compared: {type(error).__name__}: {error} (at {where}); the checkout may be of another version, leave the part "
            "out by --part, or correct equivalence/witnesses/nemo_rl"
        ) from error


def _record(checkout: Checkout, folder: Path) -> int:
    for part in RECORDED_PARTS:
        checkout.require(part)
    with checkout_modules(Path(checkout.root)) as modules:
        same = record(modules, folder)
    for name, is_same in same.items():
        print(f"{folder / name}: {'as recorded' if is_same else 'another content than recorded'}")
    return int(not all(same.values()))


if __name__ == "__main__":
    raise SystemExit(exits.run(main))
