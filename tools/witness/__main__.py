"""Keep other versions of Megatron-LM and a checkout of NeMo-RL as witnesses: `packproof witness add megatron-core==0.18.2`, `add nemo-rl --source DIR`,
`list`, `remove`, `compare`, `record`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from equivalence.errors import InputError
from equivalence.subjects import load
from equivalence.witnesses import store
from equivalence.witnesses.comparison import compare, recorded_cases
from equivalence.witnesses.nemo_rl import checkout as nemo_rl
from equivalence.witnesses.serve_steps import INSTALLED
from production import exits

CANNOT_RUN = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 a witness differs from the preset of its version, 2 bad input, or a part of NeMo-RL that was not compared."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except (InputError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return CANNOT_RUN
    return status


def _add(options: argparse.Namespace) -> int:
    if options.requirement in nemo_rl.COMMAND_NAMES:
        return _add_nemo_rl(options.source)
    made = store.add(options.requirement, source=options.source)
    print(f"{store.PREFIX}{made.version} is made of {made.made_of}, in {made.root}")
    if made.own_transformers:
        print("with a transformers of its own, below 5")
    print(f"compare it: packproof witness compare {made.version}")
    return 0


def _add_nemo_rl(source: Path | None) -> int:
    if source is None:
        raise InputError("nemo-rl must be given a checkout: packproof witness add nemo-rl --source DIR")
    kept = nemo_rl.add(source)
    lacking = kept.lacking()
    print(f"{nemo_rl.NAME} is {kept.text}")
    print(f"it has {', '.join(part for part in nemo_rl.PARTS if part not in lacking)}")
    for part, names in lacking.items():
        print(f"it has no {part}: it lacks {', '.join(names)}")
    print("compare it: packproof witness compare nemo-rl")
    return 0


def _list(_: argparse.Namespace) -> int:
    for made in store.witnesses():
        print(f"{store.PREFIX}{made.version:<12}{made.made_of:<28}{made.root}")
    if (kept := nemo_rl.find()) is not None:
        print(f"{nemo_rl.NAME:<24} {kept.text}")
    return 0


def _remove(options: argparse.Namespace) -> int:
    if options.version in nemo_rl.COMMAND_NAMES:
        nemo_rl.remove()
    else:
        store.remove(options.version)
    return 0


def _compare(options: argparse.Namespace) -> int:
    versions = [each for each in options.versions if each not in nemo_rl.COMMAND_NAMES]
    parts = [word for part in options.part for word in ("--part", part)]
    statuses = [_compare_versions(versions)] if versions else []
    if versions and not options.rows_only:
        statuses.append(_compare_steps(versions))
    if len(versions) < len(options.versions):
        statuses.append(_run_nemo_rl("compare", "--drawn", str(options.drawn), *parts))
    return max(statuses)


def _record(options: argparse.Namespace) -> int:
    return _run_nemo_rl("record", "--out", str(options.out))


def _run_nemo_rl(*words: str) -> int:
    """Run NeMo-RL's modules in a process of their own: they change the libraries that they import."""
    # Without warnings: on import megatron-core says a dozen times that CUDA and optional kernels are absent.
    command = [sys.executable, "-W", "ignore", "-m", "equivalence.witnesses.nemo_rl", *words]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - this Python, and words of this file


def _compare_versions(versions: Sequence[str]) -> int:
    cases, reference, is_wrong = recorded_cases(), load("reference"), False
    for version in versions:
        witness = load(f"{store.PREFIX}{version}")
        print(f"{witness.name}: {getattr(witness, 'version', '')}")
        (own,) = witness.hello.takes["semantics"]  # type: ignore[attr-defined]  # an external subject
        for verdict in compare(witness, own, reference, cases=cases):
            print(verdict.text + ("  <- its own preset" if verdict.preset == own else ""))
            is_wrong |= verdict.preset == own and verdict.equal < verdict.rows
    return int(is_wrong)


def _compare_steps(versions: Sequence[str]) -> int:
    """Compare training steps; those that a version cannot run are told, and are a difference."""
    # Late: generators and checks of steps are wanted by no other command.
    from equivalence.witnesses.step_comparison import compare_steps, run_steps, step_cases  # noqa: PLC0415

    witnesses, cases, is_wrong = [store.find(version) for version in versions], step_cases(), False
    installed_version, installed = run_steps(INSTALLED, cases)
    for witness in witnesses:
        name = f"{store.PREFIX}{witness.version}"
        try:
            version, steps = run_steps(witness.root, cases)
        except InputError as error:
            print(f"{name}: training steps: 0 of {len(cases)} equal; {error}")
            is_wrong = True
            continue
        verdicts = compare_steps(version, cases, installed, steps)
        equal, known = sum(each.equal for each in verdicts), sum(sum(each.known.values()) for each in verdicts)
        told = f", {known} differ as known" if known else ""
        print(
            f"{name}: training steps against megatron-core {installed_version}: {equal} of {len(cases)} equal to the bit{told}"
        )
        for verdict in verdicts:
            print(verdict.text)
            is_wrong |= not verdict.is_expected
    return int(is_wrong)


def _count(text: str) -> int:
    """Return a number of cases. argparse tells of one below 1, for which every comparison would be of nothing."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of cases must be 1 or more, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="packproof witness", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("add", help="install a version beside the project, or name a checkout")
    add.add_argument(
        "requirement",
        help="megatron-core==VERSION, or with --source the name that the checkout gets; nemo-rl for a checkout of NeMo-RL",
    )
    add.add_argument("--source", type=Path, help="root of a checkout: Megatron-LM's main, a fork, or NeMo-RL")
    add.set_defaults(run=_add)
    commands.add_parser("list", help="all witnesses").set_defaults(run=_list)
    remove = commands.add_parser("remove", help="remove a witness; a checkout stays")
    remove.add_argument("version")
    remove.set_defaults(run=_remove)
    compared = commands.add_parser("compare", help="say for each version and preset: equal, or which fields differ")
    compared.add_argument("versions", nargs="+", metavar="VERSION", help="a version, or nemo-rl")
    compared.add_argument(
        "--drawn",
        type=_count,
        default=200,
        help="cases that are drawn for each part of NeMo-RL, beside the recorded ones",
    )
    compared.add_argument(
        "--part",
        action="append",
        default=[],
        choices=list(nemo_rl.PARTS),
        help="a part of NeMo-RL, several times for several; all without",
    )
    compared.add_argument("--rows-only", action="store_true", help="compare a version's rows and no training steps")
    compared.set_defaults(run=_compare)
    recorded = commands.add_parser("record", help="make the recorded outcomes of NeMo-RL anew, from its checkout")
    recorded.add_argument("name", choices=nemo_rl.COMMAND_NAMES)
    recorded.add_argument("out", type=Path, metavar="OUT", help="folder for the files")
    recorded.set_defaults(run=_record)
    return parser


if __name__ == "__main__":
    raise SystemExit(exits.run(main))
