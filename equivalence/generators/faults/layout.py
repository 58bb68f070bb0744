"""Fault classes of lengths, boundaries, empty conversations, and what comes after a full row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from equivalence.generators.drafts import Draft, divisible, exactly, roomy
from equivalence.generators.faults.fault_class import (
    DEFAULT,
    IDENTITY,
    NANO,
    Faults,
    at_least,
    built,
    fault,
    lenient,
    refused,
    undivided,
)
from equivalence.generators.row_facts import NEMOTRON, Facts, lengths
from equivalence.generators.texts import SURROGATES
from equivalence.subjects import Row

FAULTS: Faults = {}

_LATER_RENDER = "a conversation after the first begins with a system message, which renders tokens"


def _total_is(delta: int) -> Any:
    return lambda f, r: built(r) and f.total == f.pack_length + delta


@fault(
    FAULTS,
    "length_p_minus_1",
    "layout",
    "P - 1 tokens in all: one of padding, and the one for the shift",
    hits=_total_is(-1),
)
def _(d: Draft) -> None:
    undivided(d)
    d.pack = exactly(1)


@fault(FAULTS, "length_p", "layout", "exactly P tokens in all", hits=_total_is(0))
def _(d: Draft) -> None:
    d.pack = exactly(0)


@fault(FAULTS, "length_p_plus_1", "layout", "P + 1 tokens in all: one is cut", hits=_total_is(1))
def _(d: Draft) -> None:
    undivided(d)
    d.pack = exactly(-1)


def _near_multiple(d: Draft, rest: int) -> None:
    """Lengthen a drawn conversation word by word until 2·cp leaves this rest."""
    d.context_parallel_size = d.one_of((2, 3, 4))
    at_least(d, 1)
    chosen = d.one_of(d.conversations)
    for _ in range(2 * d.granularity):
        found = lengths(chosen, d.prompt_format, d.tokenizer)
        if not found or found[0] % d.granularity == rest % d.granularity:
            break
        last = chosen[-1]
        last["content"] = f"{last['content']} w0"
    d.pack = roomy


def _has_rest(f: Facts, row: Row, rest: int) -> bool:
    inside = [len(ids) for ids, end in zip(f.tokens, f.ends, strict=True) if ids and end <= f.pack_length]
    return built(row) and f.granularity > 1 and any(n % f.granularity == rest % f.granularity for n in inside)


@fault(
    FAULTS,
    "multiple_minus_1",
    "layout",
    "a conversation one short of a multiple of 2·cp",
    hits=lambda f, r: _has_rest(f, r, -1),
)
def _(d: Draft) -> None:
    _near_multiple(d, -1)


@fault(
    FAULTS,
    "multiple",
    "layout",
    "a conversation of a multiple of 2·cp: no padding",
    hits=lambda f, r: _has_rest(f, r, 0),
)
def _(d: Draft) -> None:
    _near_multiple(d, 0)


@fault(
    FAULTS,
    "multiple_plus_1",
    "layout",
    "a conversation one over a multiple of 2·cp",
    hits=lambda f, r: _has_rest(f, r, 1),
)
def _(d: Draft) -> None:
    _near_multiple(d, 1)


@fault(
    FAULTS,
    "p_not_divisible",
    "layout",
    "P is not a multiple of 2·cp: a ragged last segment",
    hits=lambda f, r: f.pack_length % f.granularity != 0 and (built(r) or refused(r, "indivisible_segment")),
)
def _(d: Draft) -> None:
    d.context_parallel_size = d.one_of((2, 3, 4))
    ragged = d.one_of((1, -1, 3))
    d.pack = lambda draft, ends: divisible(draft, ends[-1]) + ragged


@fault(FAULTS, "pack_length_1", "layout", "P is 1", hits=lambda f, r: f.pack_length == 1 and built(r))
def _(d: Draft) -> None:
    undivided(d)
    d.pack = lambda *_: 1


@fault(FAULTS, "pack_length_2", "layout", "P is 2", hits=lambda f, r: f.pack_length == 2 and built(r))
def _(d: Draft) -> None:
    undivided(d)
    d.pack = lambda *_: 2


def empty_conversation(d: Draft) -> list[Mapping[str, Any]]:
    """Insert a conversation that renders no token; in the Nemotron formats only the first can be empty."""
    if d.prompt_format in NEMOTRON:
        return [{"role": d.one_of(("tool", "Tool")), "content": d.one_of(("w0", ""))}]
    d.tokenizer = d.one_of(("word", "huge-words", "only-unk") if d.prompt_format == DEFAULT else (d.tokenizer,))
    roles = d.one_of((("system",), ("system", "user", "user")))
    return [{"role": role, "content": ""} for role in roles]


def _empty_at(f: Facts, row: Row, places: Sequence[int]) -> bool:
    looked = built(row) or refused(row, "empty_conversation", "too_many_boundaries")
    here = [
        place
        for place in places
        if 0 <= place < len(f.tokens) and not f.tokens[place] and f.ends[place] <= f.pack_length
    ]
    return looked and bool(here) and any(f.tokens)


@fault(
    FAULTS, "empty_first", "layout", "a conversation of no token comes first", hits=lambda f, r: _empty_at(f, r, [0])
)
def _(d: Draft) -> None:
    d.conversations.insert(0, empty_conversation(d))
    if d.prompt_format in NEMOTRON:
        lenient(d)
    d.pack = roomy


@fault(
    FAULTS,
    "empty_middle",
    "layout",
    "a conversation of no token between others",
    hits=lambda f, r: _empty_at(f, r, range(1, len(f.conversations) - 1)),
    not_in=dict.fromkeys(NEMOTRON, _LATER_RENDER),
)
def _(d: Draft) -> None:
    at_least(d, 2)
    d.conversations.insert(d.one_of(range(1, len(d.conversations))), empty_conversation(d))
    d.pack = roomy


@fault(
    FAULTS,
    "empty_last",
    "layout",
    "a conversation of no token comes last and takes the tail padding",
    hits=lambda f, r: _empty_at(f, r, [len(f.conversations) - 1]),
    not_in=dict.fromkeys(NEMOTRON, _LATER_RENDER),
)
def _(d: Draft) -> None:
    lenient(d)
    d.conversations.insert(len(d.conversations), empty_conversation(d))
    d.pack = roomy


@fault(
    FAULTS,
    "empty_only",
    "layout",
    "messages, but no token in the whole row",
    hits=lambda f, r: f.total == 0 and bool(f.case.messages) and refused(r, "empty_row", "empty_conversation"),
)
def _(d: Draft) -> None:
    lenient(d)
    empty = empty_conversation(d)
    d.conversations = [list(empty) for _ in range(d.one_of((1, 2, 3)))]


@fault(FAULTS, "no_message", "layout", "a row of no message", hits=lambda f, _: not f.case.messages)
def _(d: Draft) -> None:
    d.conversations = []


def _too_many(f: Facts, row: Row) -> bool:
    entries = len(f.seen) + 1
    return entries > f.pack_length + 1 and (built(row) or refused(row, "too_many_boundaries"))


@fault(FAULTS, "more_boundaries_than_p", "layout", "more segments than P has room for", hits=_too_many)
def too_many_boundaries(d: Draft) -> None:
    """Make one-token conversations, or an empty conversation before a row of one token."""
    d.context_parallel_size = 1
    preset = d.one_of(("megatron-lm-0.19", "megatron-lm-main"))
    d.semantics = d.one_of((preset, f"{preset},boundaries_beyond_pack_length=stop", f"{preset},exact_fill=stop"))
    if d.prompt_format in NEMOTRON:
        d.conversations.insert(0, empty_conversation(d))
        d.pack = lambda *_: 1
        return
    count = d.one_of((2, 3, 5))
    d.tokenizer = d.one_of(("word", "huge-words"))
    d.conversations = [[{"role": "system", "content": f"w{number}"}] for number in range(count)]
    for _ in range(d.one_of((0, 1, 2))):
        d.conversations.insert(d.one_of(range(len(d.conversations))), [{"role": "system", "content": ""}])
    d.pack = lambda *_: count - 1


@fault(
    FAULTS,
    "one_token_conversations",
    "layout",
    "conversations of a single token",
    hits=lambda f, r: built(r) and any(len(ids) == 1 for ids in f.tokens[: len(f.seen)]),
    not_in={NANO: "every rendered message has at least the special token and its role's name"},
)
def _(d: Draft) -> None:
    lenient(d)
    d.tokenizer = d.one_of(("word", "huge-words"))
    if d.prompt_format in NEMOTRON:  # an answer of white space that wraps to a tool message, which renders nothing
        d.conversations.insert(0, [{"role": "assistant", "content": " "}, {"role": "tool", "content": "w0"}])
    else:
        single = [[{"role": "system", "content": f"w{number}"}] for number in range(d.one_of((2, 3, 6)))]
        d.conversations = [*single, *d.conversations]
    d.pack = roomy


@fault(
    FAULTS,
    "hundreds_of_conversations",
    "layout",
    "100 conversations and more in one row",
    hits=lambda f, r: built(r) and len(f.seen) >= 100,
    weight=0.2,
)
def _(d: Draft) -> None:
    lenient(d)
    small = [[{"role": role, "content": f"w{n}"} for role in ("system", "user", "assistant")] for n in range(7)]
    d.conversations = [list(small[number % 7]) for number in range(d.draw(st.integers(100, 250)))]
    d.pack = d.one_of((roomy, exactly(-1), exactly(0)))


@fault(
    FAULTS,
    "after_exact_fill",
    "layout",
    "conversations after one that fills the row exactly",
    hits=lambda f, r: built(r) and f.pack_length in f.ends[:-1] and f.pack_length > 0,
)
def after_exact_fill(d: Draft) -> None:
    """Make the row full at the end of an inner conversation."""
    at_least(d, 2)
    inner = d.one_of(range(len(d.conversations) - 1))
    d.pack = lambda _, ends: ends[min(inner, len(ends) - 1)]


@fault(
    FAULTS,
    "after_overflow",
    "layout",
    "conversations after one that is cut",
    hits=lambda f, r: built(r) and f.cut is not None and f.cut < len(f.conversations) - 1,
)
def _(d: Draft) -> None:
    undivided(d)
    at_least(d, 2)
    inner = d.one_of(range(len(d.conversations) - 1))
    short = d.one_of((1, 2, 3))
    d.pack = lambda _, ends: ends[min(inner, len(ends) - 1)] - short


def _is_broken(conversation: Sequence[Any], f: Facts) -> bool:
    for message in conversation:
        content = message.get("content")
        if isinstance(content, str) and any("\ud800" <= letter <= "\udfff" for letter in content):
            return True
        if f.format in NEMOTRON and (content is None or (message["role"] == "assistant" and content == "")):
            return True
    return False


@fault(
    FAULTS,
    "error_after_full",
    "layout",
    "a conversation that would be refused, after the row is full: it never surfaces",
    hits=lambda f, r: built(r) and f.cut is not None and any(_is_broken(c, f) for c in f.conversations[f.cut + 1 :]),
)
def _(d: Draft) -> None:
    undivided(d)
    at_least(d, 1)
    length = (d.ends() or [2])[-1] - 1
    bad = [{"role": "user", "content": d.one_of(SURROGATES)}, {"role": "assistant", "content": "w1"}]
    if d.prompt_format not in (IDENTITY, DEFAULT):
        empty = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": ""}]
        null = [{"role": "user", "content": None}, {"role": "assistant", "content": "w1"}]
        bad = d.one_of((bad, empty, null))
    d.conversations.insert(len(d.conversations), [{"role": "system", "content": "w0"}, *bad])
    d.pack = lambda *_: length
