"""Draws from a seed alone: what Hypothesis would add from the modules that happen to be imported is kept out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.strategies import SearchStrategy

from equivalence.errors import InputError

_PATCHED = ("_get_local_constants", "CONSTANTS_CACHE")


def each_drawn[Drawn](
    strategy: SearchStrategy[Drawn],
    example: Callable[[Drawn], None],
    *,
    number: int,
    examples: int,
    shrink: bool = False,
) -> None:
    """Call `example` on `examples` draws from the seed `number`; with `shrink`, one that raises is made small and raised again.

    The same number gives the same draws in any process, whatever else it has imported.
    """

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,  # the seed decides
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    @given(strategy)
    def drawn(value: Drawn) -> None:
        example(value)

    with _no_constants_of_modules():
        drawn()


@contextmanager
def _no_constants_of_modules() -> Iterator[None]:
    # Hypothesis draws now and then a constant that it read in the source of an imported module of ours. A case would
    # change with a comment's number elsewhere, or with what ran before in the process. It has no public switch for it.
    if missing := [name for name in _PATCHED if not hasattr(providers, name)]:
        raise InputError(
            f"hypothesis {hypothesis.__version__}: {', '.join(missing)} has moved, so that a seed alone would not "
            "decide the draws; install the release in constraints.txt"
        )
    with (
        mock.patch.object(providers, "_get_local_constants", Constants),
        mock.patch.object(providers, "CONSTANTS_CACHE", {}),
    ):
        yield
