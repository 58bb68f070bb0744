"""Start `packproof conformance` with every kind of subject: a function, an adapter in another environment, a side of the suite.

`exec:"COMMAND"` is an adapter that serves `pack` (docs/protocol.md); `reference`, `production` and `megatron_lm`, with `@preset`, are
the suite's own sides as packing functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equivalence.conformance import witnesses
from equivalence.errors import SuiteError
from equivalence.subjects.external.subject import ExternalSubject
from packproof.commands import conformance
from packproof.commands.options import CommandError

EXTERNAL = "exec:"
Loaded = tuple[Callable[..., Any], Mapping[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Console script. Return 0 where the level is reached, 1 where it is not, 2 for bad input."""
    started: list[ExternalSubject] = []
    try:
        return conformance.main(arguments, load=lambda name: load(name, started))
    finally:
        for subject in started:
            subject.close()


def load(name: str, started: list[ExternalSubject]) -> Loaded:
    """Return the packing function of a name and its conventions; a process that it starts is added to `started`. CommandError says what is wrong."""
    if name.startswith(EXTERNAL):
        subject = ExternalSubject(name[len(EXTERNAL) :])
        started.append(subject)
        if "pack" not in subject.hello.seams:
            raise CommandError(f"{name} offers no packing function: call packproof_subject.serve(pack=FUNCTION)")

        def pack(conversations: Any, pack_length: int, pad_id: int, eos_id: int, context_parallel_size: int) -> Any:
            return subject.pack(
                conversations,
                pack_length=pack_length,
                pad_id=pad_id,
                eos_id=eos_id,
                context_parallel_size=context_parallel_size,
            )

        # Whose rows L10 is about, unless the command line says so.
        pack.semantics = tuple(subject.hello.takes.get("semantics", ()))  # type: ignore[attr-defined]
        return pack, subject.hello.conventions
    if ":" in name:
        return conformance.load_function(name)
    try:
        return witnesses.load(name)
    except SuiteError as error:
        raise CommandError(str(error)) from error
