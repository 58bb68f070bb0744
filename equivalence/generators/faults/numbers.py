"""Fault classes of many and of nearly equal: rows of a thousand segments, turns that are twins but for a letter, tokens that hold a turn's own."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from equivalence.generators.drafts import Draft, exactly, override, roomy
from equivalence.generators.faults.fault_class import DEFAULT, Faults, at_least, built, fault, lenient, looked_at
from equivalence.generators.row_facts import NEMOTRON, Facts, render
from equivalence.generators.tokenizers import AROUND, SPANNING
from equivalence.subjects import Row

FAULTS: Faults = {}

MANY = 1024


@fault(
    FAULTS,
    "more_than_1024_conversations",
    "layout",
    "more than 1,024 conversations in one row",
    hits=lambda f, r: built(r) and len(f.seen) > MANY,
    weight=0.1,
)
def _(d: Draft) -> None:
    lenient(d)
    if (
        d.prompt_format not in NEMOTRON
    ):  # no prompt is masked: labels at all boundaries train and are counted, or all are ignored
        d.semantics = "megatron-lm-0.19" if d.prompt_format == DEFAULT else override("boundary_label=ignore")
    d.tokenizer = "word"
    d.context_parallel_size = d.one_of((1, 2))
    d.conversations = [[{"role": "system", "content": f"w{number % 97}"}] for number in range(MANY + d.one_of((40, 2)))]
    d.conversations[0].append({"role": "user", "content": "w1"})
    d.conversations[0].append({"role": "assistant", "content": "w2"})
    d.pack = d.one_of((roomy, exactly(0)))


def _one_token_each(f: Facts, row: Row) -> bool:
    return built(row) and len(f.seen) == f.pack_length and all(len(ids) == 1 for ids in f.tokens)


@fault(
    FAULTS,
    "p_one_token_segments",
    "layout",
    "P conversations of one token each, also more than 1,024",
    hits=_one_token_each,
    not_in=dict.fromkeys(NEMOTRON, "a rendered message has more than one token"),
    weight=0.4,
)
def _(d: Draft) -> None:
    lenient(d)
    d.tokenizer = "word"
    d.context_parallel_size = 1
    count = d.one_of((3, MANY + 1, 17))
    d.conversations = [[{"role": "system", "content": f"w{number % 97}"}] for number in range(count)]
    d.pack = exactly(0)


def _twins(d: Draft, first: str, second: str, tokenizers: Sequence[str]) -> None:
    """Give two messages of one role these contents."""
    lenient(d)
    at_least(d, 2)
    d.tokenizer = d.one_of(tokenizers)
    role = d.one_of(("user", "system", "assistant"))
    found = [m for each in d.conversations for m in each if isinstance(m, dict) and m.get("role") == role]
    for message, content in zip(found, d.one_of(((first, second), (second, first))), strict=False):
        message["content"] = content + d.separator
    d.pack = roomy


def _are_twins(key: Callable[[str], str], *, beyond: int = 0) -> Callable[[Facts, Row], bool]:
    """Return a detector of two different contents, longer than `beyond` characters, with equal keys."""

    def hits(f: Facts, row: Row) -> bool:
        texts = {text for text in f.rendered_texts if len(text) > beyond} if built(row) else set()
        return len(texts) > 1 and len({key(text) for text in texts}) < len(texts)

    return hits


for _length in (64, 256, 2000):

    def _edit(d: Draft, length: int = _length) -> None:
        start = "w0 " * (length // 3 + 1)
        _twins(d, f"{start}w1", f"{start}w2", ("word", "bytes", "eos-pad"))

    fault(
        FAULTS,
        f"twins_beyond_{_length}",
        "contents",
        f"two turns that are equal up to {_length} characters",
        hits=_are_twins(lambda text, length=_length: text[:length], beyond=_length),  # type: ignore[misc]
        weight=0.4,
    )(_edit)


@fault(FAULTS, "twins_in_case", "contents", "two turns that are equal but for their case",
       hits=_are_twins(str.casefold), weight=0.5)  # fmt: skip
def _(d: Draft) -> None:
    _twins(d, "Is it w0?", "is it W0?", ("bytes", "eos-pad"))


@fault(FAULTS, "twins_in_form", "contents", "two turns that are equal but for how a letter is composed",
       hits=_are_twins(lambda text: unicodedata.normalize("NFC", text)), weight=0.5)  # fmt: skip
def _(d: Draft) -> None:
    _twins(d, "caf\u00e9 w0", "cafe\u0301 w0", ("bytes", "eos-pad"))


@fault(FAULTS, "twins_in_space", "contents", "two turns that are equal but for white space at their ends",
       hits=_are_twins(str.strip), weight=0.5)  # fmt: skip
def _(d: Draft) -> None:
    _twins(d, "w0 w1", d.one_of(("w0 w1 ", " w0 w1", "w0 w1\t")), ("bytes", "eos-pad"))


@fault(
    FAULTS,
    "token_over_turns",
    "contents",
    "an added token that holds the start of a turn matches over the end of the turn before",
    hits=lambda f, r: (
        looked_at(r) and f.case.tokenizer == "spanning" and any(SPANNING in text for text in _rendered(f))
    ),
    not_in=dict.fromkeys(("identity", "default"), "no format's own token stands between two turns"),
    weight=0.5,
)
def _(d: Draft) -> None:
    lenient(d)
    at_least(d, 1)
    d.tokenizer = "spanning"
    for each in d.conversations[:2]:
        each[0]["content"] = d.one_of(("w0", "w1 w0"))
    d.pack = roomy


@fault(
    FAULTS,
    "token_around_turns",
    "contents",
    "an added token matches from the end of a turn into the next one, around the special token that begins it",
    hits=lambda f, r: looked_at(r) and f.case.tokenizer == "around" and any(AROUND in text for text in _rendered(f)),
    not_in=dict.fromkeys(("identity", "default"), "no format's own token stands between two turns"),
    weight=0.5,
)
def _(d: Draft) -> None:
    lenient(d)
    at_least(d, 1)
    d.tokenizer = "around"
    d.pack = roomy


def _rendered(f: Facts) -> list[str]:
    return [render(conversation, f.format, f.case.tokenizer) or "" for conversation in f.seen]


def _ends(f: Facts) -> tuple[Any, ...]:
    """Return the first and last role of the first conversation, and the last role of the row."""
    first, last = f.conversations[0], f.conversations[-1]
    return first[0].get("role"), first[-1].get("role"), last[-1].get("role")


def _wraps(f: Facts, roles: tuple[str, str, str]) -> bool:
    sound = len(f.conversations) > 1 and all(isinstance(m, dict) for c in f.conversations for m in c)
    return sound and _ends(f) == roles


def _first_answer(d: Draft, last_of_first: str, last_of_row: str) -> None:
    lenient(d)
    at_least(d, 2)
    answer, question = {"role": "assistant", "content": "w1"}, {"role": "user", "content": "w2"}
    d.conversations[0] = [answer, question, *([dict(answer)] if last_of_first == "assistant" else [])]
    if last_of_row == "user":
        d.conversations[1:] = [each[:2] for each in d.conversations[1:]]
    for each in d.conversations:
        for message in each:
            message["content"] = str(message["content"]).rstrip() + d.separator
    d.pack = roomy


@fault(
    FAULTS,
    "answer_first_user_last",
    "roles",
    "a row that begins with an answer, whose first conversation ends with one and whose last with a user: no turn wraps over the row",
    hits=lambda f, r: looked_at(r) and _wraps(f, ("assistant", "assistant", "user")),
    weight=0.5,
)
def _(d: Draft) -> None:
    _first_answer(d, "assistant", "user")


@fault(
    FAULTS,
    "answer_first_answer_last",
    "roles",
    "a row that begins with an answer, whose first conversation ends with a user and whose last with an answer: the turn wraps within its own",
    hits=lambda f, r: looked_at(r) and _wraps(f, ("assistant", "user", "assistant")),
    weight=0.5,
)
def _(d: Draft) -> None:
    _first_answer(d, "user", "assistant")
