"""Hypothesis strategies for row cases, each aimed at a fault class; one row in four has a second class mixed in."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from equivalence.cases.row import RowCase
from equivalence.generators.drafts import CONVERSATIONS, Draft, choose, conversations, finish, separator_of, start
from equivalence.generators.faults.fault_class import FaultClass
from equivalence.generators.faults.registry import classes
from equivalence.generators.row_facts import Facts
from equivalence.subjects import Row


@st.composite
def rows(draw: st.DrawFn, prompt_format: str, aim: FaultClass | None = None) -> RowCase:
    """Draw a row case in this format that aims at a class, or at any class; a second class may be mixed in.

    Raises ValueError if the class cannot occur in the format.
    """
    return _draw_case(draw, prompt_format, aim)


@st.composite
def batches(draw: st.DrawFn, prompt_format: str) -> tuple[RowCase, ...]:
    """Draw one to four rows with the same settings and tokenizer: the first as `rows` draws it, the others well-formed."""
    first = _draw_case(draw, prompt_format, None)
    separator = separator_of(first.settings.prompt_format, first.tokenizer)
    others = [conversations(drawn, separator) for drawn in draw(st.lists(CONVERSATIONS, max_size=3))]
    return (first, *(first.with_(messages=tuple(itertools.chain(*each)), labels=()) for each in others))


def hits(case: RowCase, row: Row) -> list[str]:
    """Return the names of the classes that a case with this outcome hits, whatever class it aimed at."""
    facts = Facts(case)
    return [
        each.name for each in classes().values() if each.applies(case.settings.prompt_format) and each.hits(facts, row)
    ]


def _draw_case(draw: st.DrawFn, prompt_format: str, aim: FaultClass | None) -> RowCase:
    draft = start(draw, prompt_format)
    if aim is None or choose(draw, (False, False, False, True)):
        _edit(draft, choose(draw, _to_mix_in(prompt_format)))
    if aim is not None:
        if not aim.applies(prompt_format):
            raise ValueError(f"class {aim.name} cannot occur in {prompt_format}: {aim.not_in[prompt_format]}")
        _edit(draft, aim)
    return finish(draft, origin="")


@functools.cache
def _to_mix_in(prompt_format: str) -> Sequence[FaultClass]:
    return [each for each in classes().values() if each.applies(prompt_format) and each.weight == 1]


def _edit(draft: Draft, chosen: FaultClass) -> None:
    chosen.edit(draft)
    draft.labels.append(chosen.name)
