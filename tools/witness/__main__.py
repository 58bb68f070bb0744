"""Keep other versions of Megatron-LM as witnesses: `packproof witness add megatron-core==0.18.2`, `list`, `remove`, `compare`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from equivalence.errors import InputError
from equivalence.subjects import load
from equivalence.witnesses import store
from equivalence.witnesses.comparison import compare, recorded_cases

CANNOT_RUN = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 a witness differs from the preset of its version, 2 bad input."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except (InputError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return CANNOT_RUN
    return status


def _add(options: argparse.Namespace) -> int:
    made = store.add(options.requirement, source=options.source)
    print(f"{store.PREFIX}{made.version} is made of {made.made_of}, in {made.root}")
    if made.own_transformers:
        print("with a transformers of its own, below 5")
    print(f"compare it: packproof witness compare {made.version}")
    return 0


def _list(_: argparse.Namespace) -> int:
    for made in store.witnesses():
        print(f"{store.PREFIX}{made.version:<12}{made.made_of:<28}{made.root}")
    return 0


def _remove(options: argparse.Namespace) -> int:
    store.remove(options.version)
    return 0


def _compare(options: argparse.Namespace) -> int:
    cases, reference, is_wrong = recorded_cases(), load("reference"), False
    for version in options.versions:
        witness = load(f"{store.PREFIX}{version}")
        print(f"{witness.name}: {getattr(witness, 'version', '')}")
        (own,) = witness.hello.takes["semantics"]  # type: ignore[attr-defined]  # an external subject
        for verdict in compare(witness, own, reference, cases=cases):
            print(verdict.text + ("  <- its own preset" if verdict.preset == own else ""))
            is_wrong |= verdict.preset == own and verdict.equal < verdict.rows
    return int(is_wrong)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="packproof witness", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("add", help="install a version beside the project, or name a checkout")
    add.add_argument("requirement", help="megatron-core==VERSION, or with --source the name that the checkout gets")
    add.add_argument("--source", type=Path, help="root of a Megatron-LM checkout: main, or a fork")
    add.set_defaults(run=_add)
    commands.add_parser("list", help="all witnesses").set_defaults(run=_list)
    remove = commands.add_parser("remove", help="remove a witness; a checkout stays")
    remove.add_argument("version")
    remove.set_defaults(run=_remove)
    compared = commands.add_parser("compare", help="say for each version and preset: equal, or which fields differ")
    compared.add_argument("versions", nargs="+", metavar="VERSION")
    compared.set_defaults(run=_compare)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
