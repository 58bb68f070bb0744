"""`packproof conformance --subject module:function`: the level that a packing function reaches, and the smallest row of each miss."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any, Callable, Mapping, Sequence, Tuple

from packproof.cases import Case, VectorsError, case_of, drawn_cases, load_vectors, manifest
from packproof.commands.options import (
    PRESET,
    CommandError,
    add_judging,
    asked,
    conventions_of,
    finish,
    guarded,
    known_preset,
)
from packproof.judging import conformance_of

Loaded = Tuple[Callable[..., Any], Mapping[str, str]]


def main(arguments: Sequence[str] | None = None, *, load: Callable[[str], Loaded] | None = None) -> int:
    """Run the command and return 0 (the level is reached), 1 (it is not) or 2 (bad input). `load` finds a subject by its name."""
    return guarded("conformance", lambda given: _main(given, load or load_function), arguments)


def _main(arguments: Sequence[str], load: Callable[[str], Loaded]) -> int:
    parser = argparse.ArgumentParser(
        prog="packproof conformance", description="Judge the packs of a packing function, level by level."
    )
    parser.add_argument(
        "--subject",
        required=True,
        metavar="MODULE:FUNCTION",
        help='a packing function, or exec:"COMMAND" of one in another environment',
    )
    add_judging(parser, default=f"what the subject declares as its semantics, else {PRESET}")
    parser.add_argument(
        "--drawn", type=int, default=100, metavar="N", help="drawn cases beside the test vectors (default: 100)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn cases")
    parser.add_argument("--sets", default="valid,divergent,refused", help="sets of test vectors; none leaves them out")
    parser.add_argument("--case", metavar="JSON", help="judge this one case instead, as a JSON report names it")
    options = parser.parse_args(arguments)
    asked(options)
    known_preset(options.preset, manifest()["presets"])
    cases = _cases(options)
    pack, declared = load(options.subject)
    report = conformance_of(
        pack,
        cases,
        subject=options.subject,
        conventions=conventions_of(options, declared),
        preset=options.preset or declared_preset(pack),
    )
    return finish(report, options)


def _cases(options: argparse.Namespace) -> Sequence[Case]:
    if options.case is not None:
        try:
            return [case_of(json.loads(options.case), "--case")]
        except ValueError as error:
            raise CommandError(
                str(error) if isinstance(error, VectorsError) else f"--case is not JSON: {error}"
            ) from error
    sets = {name.strip() for name in options.sets.split(",")}
    unknown = sets - {"valid", "divergent", "refused", "none"}
    if unknown:
        raise CommandError(
            "--sets must list only valid, divergent, refused or none, got {}".format(", ".join(sorted(unknown)))
        )
    if options.drawn < 0:
        raise CommandError("--drawn must not be negative, got %d" % options.drawn)
    found = [case for case in load_vectors() if case.set in sets] + drawn_cases(options.drawn, options.seed)
    if not found:
        raise CommandError("no case is left: give --drawn a number above 0, or name a set in --sets")
    return found


def declared_preset(pack: Callable[..., Any]) -> str:
    """Return the preset that a packing function declares, by the decorator or as the first of its `semantics` that vectors hold."""
    declared = getattr(pack, "packproof_conformance", None)
    if declared is not None:
        return str(declared.preset)
    known = manifest()["presets"]
    return next((name for name in getattr(pack, "semantics", None) or () if name in known), PRESET)


def load_function(name: str) -> Loaded:
    """Return `module:function` with the conventions that it declares as `conventions`. CommandError where there is none."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise CommandError(f"--subject must be module:function, got {name!r}")
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds texts
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise CommandError(f"module {module_name!r} cannot be imported: {error}") from error
    except Exception as error:
        told = "module %r raised %s at import: %s" % (module_name, type(error).__name__, error)
        raise CommandError(told) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise CommandError(f"module {module_name!r} has no function {attribute!r}; give module:function")
    declared = getattr(found, "packproof_conformance", None)
    if declared is not None:
        return found, declared.conventions
    return found, getattr(found, "conventions", None) or getattr(module, "CONVENTIONS", {})
