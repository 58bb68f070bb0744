"""Read the arguments of a Megatron-LM run: a command line, or the dump at the head of a log."""

from __future__ import annotations

import argparse
import ast
import enum
import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from production.errors import PackproofError
from production.library_warnings import quiet_libraries
from tools.from_megatron_lm.arguments import DERIVED

_BEGIN, _END = "------------------------ arguments ------------------------", "end of arguments"
_LINE = re.compile(r"(?:\[?[\w.:\-]*\]?:?\s*)?\s{2}(?P<name>\w+) \.+ (?P<value>.*)")
_LAUNCHER = ("nproc_per_node", "nnodes")
_VARIABLE = re.compile(r"\$\{?\w+")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of one run."""

    values: Mapping[str, Any]
    """Name of every argument, as Megatron-LM parses it, to its value; defaults filled in."""
    given: frozenset[str] | None
    """Names that the command line has; None for a dump, which does not tell."""
    unknown: tuple[str, ...] = ()
    """Words or names that the installed Megatron-LM has no argument for."""
    launcher: Mapping[str, str] = field(default_factory=dict)
    """Options of torchrun before the script that say how many ranks there are: `nproc_per_node`, `nnodes`."""

    @property
    def is_dump(self) -> bool:
        """Return whether Megatron-LM itself had already derived values from values."""
        return self.given is None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise PackproofError: the usage text of 800 arguments helps nobody."""
        raise PackproofError(
            what=f"Megatron-LM refuses the arguments: {message}", where="command line", fix="correct the command line"
        )


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Return the installed Megatron-LM's own parser."""
    with quiet_libraries():
        from megatron.training.arguments import add_megatron_arguments  # noqa: PLC0415 - takes seconds to import

    made: argparse.ArgumentParser = add_megatron_arguments(_Parser(allow_abbrev=False, add_help=False))
    return made


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Return the value that every argument has where nothing is given."""
    return vars(parser().parse_args([]))


@functools.cache
def flags() -> Mapping[str, str]:
    """Return the word of the command line for every argument; of several words the first."""
    return {each.dest: each.option_strings[0] for each in reversed(parser()._actions)}  # noqa: SLF001 - no public list


def read_text(text: str, *, name: str) -> Arguments:
    """Read a log with an argument dump, else a command line. PackproofError names what cannot be read."""
    if _BEGIN in text:
        return _read_dump(text, name)
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    if unset := _VARIABLE.search(" ".join(words)):
        what = f"{unset[0]} is a variable of a shell that is not run here"
        raise PackproofError(what=what, where=name, fix="write its value (`bash -x` prints the whole line)")
    return read_words(words, name=name)


def read_words(words: Sequence[str], *, name: str) -> Arguments:
    """Read a command line; of the words up to the script (`torchrun … pretrain_gpt.py`) only the number of ranks is read."""
    scripts = [index for index, word in enumerate(words) if Path(word).suffix == ".py"]
    launcher = _launcher(words[: scripts[0]] if scripts else ())
    words = list(words[scripts[0] + 1 :] if scripts else words)
    if not any(word.startswith("--") for word in words):
        fix = "give a file with the arguments, a log that begins with them, or the arguments behind --"
        raise PackproofError(what="there is no argument of Megatron-LM's (--name)", where=name, fix=fix)
    values, unknown = parser().parse_known_args(words)
    only = argparse.Namespace(**dict.fromkeys(vars(values), _NOT_GIVEN))
    parser().parse_known_args(words, only)
    given = frozenset(key for key, value in vars(only).items() if value is not _NOT_GIVEN)
    without_place = tuple(word for word in unknown if word.startswith("-"))
    return Arguments(values=vars(values), given=given, unknown=without_place, launcher=launcher)


def _launcher(words: Sequence[str]) -> dict[str, str]:
    """Return torchrun's numbers of processes and nodes, as they are written: `--nproc-per-node 8`, `--nnodes=2`."""
    found = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if word.startswith("-") and name in _LAUNCHER:
            found[name] = value if equals else next(iter(words[index + 1 : index + 2]), "")
    return found


_NOT_GIVEN = object()


def _read_dump(text: str, name: str) -> Arguments:
    _, _, rest = text.partition(_BEGIN)
    dump, end, _ = rest.partition(_END)
    if not end:
        what = "the argument dump has no end: the log is cut"
        raise PackproofError(what=what, where=name, fix="give the whole head of the log")
    found = {
        line["name"]: _value(line["value"]) for each in dump.splitlines() if (line := _LINE.fullmatch(each.rstrip()))
    }
    if not found:
        raise PackproofError(what="the argument dump is empty", where=name, fix="give the whole head of the log")
    unknown = tuple(key for key in found if key not in defaults() and key not in DERIVED)
    values = {**defaults(), **{key: _as_parsed(key, value) for key, value in found.items()}}
    return Arguments(values=values, given=None, unknown=unknown)


def _value(text: str) -> Any:
    """Return a value as Python wrote it, else its text: a path, or the word of a dtype or of an attention backend."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text.removeprefix("torch.").removeprefix("AttnBackend.")


def _as_parsed(key: str, value: Any) -> Any:
    """Return a dumped enumeration or dtype as the parser has it: `AttnBackend.auto` is its member."""
    default = defaults().get(key)
    is_the_default = isinstance(default, enum.Enum) and value in {default.name, str(default)}
    return default if is_the_default else value
