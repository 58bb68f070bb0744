"""Fault classes of roles, contents and messages."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from equivalence.generators import texts, tokenizers
from equivalence.generators.drafts import GENTLE, MEGATRON, Draft, override, roomy
from equivalence.generators.faults.fault_class import (
    DEFAULT,
    IDENTITY,
    NANO,
    Faults,
    at_least,
    built,
    fault,
    lenient,
    looked_at,
    refused,
)
from equivalence.generators.row_facts import ROLES, Facts
from equivalence.subjects import Row

FAULTS: Faults = {}

_CONTENT_ROLES = ("user", "assistant", "system")


def _text_class(
    name: str, what: str, pool: Sequence[str], has: Callable[[str], Any], tokenizer: Sequence[str] = GENTLE
) -> None:
    """Register a class of texts: one to three contents come from the pool; hit where a built row renders one."""

    @fault(FAULTS, name, "contents", what, hits=lambda f, r: built(r) and any(map(has, f.rendered_texts)))
    def edit(d: Draft) -> None:
        d.tokenizer = d.one_of(tokenizer)
        end = "" if name == "edge_newlines" else d.one_of((d.separator, ""))
        for _ in range(d.one_of((1, 2, 3))):
            d.message(*d.one_of((("user",), ("assistant",), ("system",))))["content"] = d.one_of(pool) + end
        d.pack = d.one_of((roomy, None))


def _has_category(*categories: str) -> Callable[[str], bool]:
    return lambda text: any(unicodedata.category(letter) in categories for letter in text)


@functools.cache
def _added(tokenizer: str) -> Sequence[str]:
    return tuple(tokenizers.load(tokenizer).get_added_vocab())


_text_class("multilingual", "scripts beyond Latin: right to left, Indic, Thai, CJK, Cyrillic", texts.MULTILINGUAL,
            lambda text: any("\u0370" <= letter <= "\u1fff" or "\u3040" <= letter <= "\ud7ff" for letter in text))  # fmt: skip
_text_class("emoji", "emoji with joiners, skin tones and flags", texts.EMOJI, lambda text: any(c in text for c in "\u200d\ufe0f") or any(c > "\uffff" for c in text))  # fmt: skip
_text_class("combining", "combining marks, also first in a content", texts.COMBINING, _has_category("Mn"), ("word", "bytes", "eos-pad", "normalizing"))  # fmt: skip
_text_class("code", "code: tabs, braces, backslashes, template syntax, CR LF", texts.CODE, re.compile(r"[\t{}\\`]|\r\n|/>|--").search)  # fmt: skip
_text_class("separators", "U+2028, U+2029, U+0085, vertical tab: white space to str.strip", texts.SEPARATORS, re.compile("[\u2028\u2029\x85\x0b\x0c\x1c]").search)  # fmt: skip
_text_class("nul", "NUL in a content", texts.NUL, lambda text: "\0" in text)
_text_class("edge_newlines", "newlines at the ends of a content", texts.EDGE_NEWLINES, lambda text: text.strip("\n") != text, ("word", "bos", "bytes"))  # fmt: skip


@fault(
    FAULTS,
    "any_text",
    "contents",
    "arbitrary Unicode text",
    hits=lambda f, r: built(r) and any(any(ord(letter) > 127 for letter in text) for text in f.rendered_texts),
)
def _(d: Draft) -> None:
    lenient(d)
    for _ in range(2):
        d.message(d.one_of(_CONTENT_ROLES))["content"] = d.draw(st.text(max_size=30)) or "é"


@fault(
    FAULTS,
    "special_strings",
    "contents",
    "the text of special tokens inside a content",
    hits=lambda f, r: (
        built(r) and any(token in text for text in f.rendered_texts for token in _added(f.case.tokenizer))
    ),
)
def _(d: Draft) -> None:
    for _ in range(d.one_of((1, 2))):
        d.message(d.one_of(_CONTENT_ROLES))["content"] = d.one_of(texts.SPECIAL)


def _prompts(f: Facts) -> list[str]:
    return [m["content"] for m in f.messages if m["role"] in ("system", "user") and isinstance(m.get("content"), str)]


@fault(FAULTS, "think", "contents", "/think and /no_think in system and user contents",
       hits=lambda f, r: built(r) and any(re.search("/(no_)?think", text) for text in _prompts(f)))  # fmt: skip
def _(d: Draft) -> None:
    d.message(d.one_of(("user", "system")))["content"] = d.one_of(texts.THINK)


@fault(FAULTS, "think_inside", "contents", "/think inside words, and where one removal makes another",
       hits=lambda f, r: built(r) and any(re.search(r"\w/think|/think\w|/no_/|/no_thinker|/th/", text) for text in _prompts(f)))  # fmt: skip
def _(d: Draft) -> None:
    d.message(d.one_of(("user", "system")))["content"] = d.one_of(texts.THINK_INSIDE)


@fault(FAULTS, "think_in_answers", "contents", "/think and /no_think in answers, where every format keeps them",
       hits=lambda f, r: built(r) and any(
           m["role"] == "assistant" and isinstance(m.get("content"), str) and re.search("/(no_)?think", m["content"])
           for m in f.messages))  # fmt: skip
def _(d: Draft) -> None:
    d.message("assistant")["content"] = d.one_of(texts.THINK)


def _token(d: Draft, which: str) -> str:
    loaded = tokenizers.load(d.tokenizer)
    if which == "pad":
        named = {"nemotron-h-aligned": "<SPECIAL_233>", DEFAULT: loaded.pad_token or loaded.eos_token}
        return str(named.get(d.prompt_format, "<unk>"))
    return str(loaded.eos_token if which == "eos" else loaded.unk_token)


def _put_token(d: Draft, which: str) -> None:
    d.message(d.one_of(("assistant", "user")))["content"] = d.one_of(("w0 {} w1", "{}", "w0{}")).format(
        _token(d, which)
    )
    d.pack = roomy


@fault(FAULTS, "pad_in_content", "contents", "the pad id as a real token",
       hits=lambda f, r: built(r) and f.pad_id in f.seen_ids and f.pad_id is not None)  # fmt: skip
def _(d: Draft) -> None:
    _put_token(d, "pad")


@fault(FAULTS, "eos_in_content", "contents", "the eos id as a real token",
       hits=lambda f, r: built(r) and tokenizers.load(f.case.tokenizer).eos_token_id in f.seen_ids)  # fmt: skip
def _(d: Draft) -> None:
    _put_token(d, "eos")


@fault(FAULTS, "unk_in_content", "contents", "the unknown id as a real token",
       hits=lambda f, r: built(r) and tokenizers.load(f.case.tokenizer).unk_token_id in f.seen_ids)  # fmt: skip
def _(d: Draft) -> None:
    _put_token(d, "unk")


@fault(FAULTS, "huge_ids", "contents", f"ids from {tokenizers.HUGE_ID} on",
       hits=lambda f, r: built(r) and max(f.seen_ids, default=0) >= tokenizers.HUGE_ID)  # fmt: skip
def _(d: Draft) -> None:
    d.tokenizer = "huge-words"


def merge_turns(d: Draft, tokenizer: str) -> None:
    """Let an answer start with what the tokenizer merges with the newline before it, and keep the row whole."""
    d.tokenizer = tokenizer
    answer = d.message("assistant")
    answer["content"] = d.one_of(texts.MERGING if tokenizer == "bytes" else ("ab", "ab w0"))
    for each in d.conversations:
        place = next((number for number, message in enumerate(each) if message is answer), 0)
        if place and isinstance(each[place - 1], dict):
            each[place - 1]["content"] = "w0\n"
    d.pack = roomy


@fault(
    FAULTS,
    "newline_merge",
    "contents",
    "neighbouring turns merge at a newline",
    hits=lambda f, r: looked_at(r) and bool(f.merged),
)
def _(d: Draft) -> None:
    choices = {NANO: ("only-unk", "stripping"), DEFAULT: ("only-unk", "huge", "normalizing")}
    merge_turns(d, d.one_of(choices.get(d.prompt_format, ("bytes", "only-unk"))))


def _is_relative(whole: Sequence[int], alone: Sequence[int]) -> bool:
    return len(whole) == len(alone) and all(abs(a - b) <= 1e-8 + 1e-5 * b for a, b in zip(whole, alone, strict=True))


@fault(
    FAULTS,
    "relative_tolerance",
    "contents",
    "turns whose ids differ from the whole by one, from 100,000 on: equal under the relative check alone",
    hits=lambda f, r: (built(r) or refused(r, "turn_mismatch")) and any(_is_relative(*pair) for pair in f.merged),
    not_in={DEFAULT: "the template renders a conversation as a whole; turns are not checked"},
)
def _(d: Draft) -> None:
    merge_turns(d, "huge")
    preset = "megatron-lm-main" if d.prompt_format == IDENTITY else "megatron-lm-0.19"
    d.semantics = d.one_of((preset, f"{preset},turn_check=exact", "strict", preset))
    if d.semantics == "strict":
        d.pad_token = "<unk>"


# Roles


def _roles(f: Facts) -> set[str]:
    return {message["role"] for message in f.messages}


@fault(FAULTS, "no_system", "roles", "the row starts without a system message",
       hits=lambda f, r: bool(f.messages) and f.messages[0]["role"] != "system" and (built(r) or refused(r, "row_start")))  # fmt: skip
def _(d: Draft) -> None:
    at_least(d, 1)
    del d.conversations[0][0]


@fault(FAULTS, "capital_roles", "roles", "System, USER, Assistant: not split, not rendered, yet masked",
       hits=lambda f, r: looked_at(r) and any(role not in ROLES and role.lower() in ROLES for role in _roles(f)))  # fmt: skip
def _(d: Draft) -> None:
    message = d.message(d.one_of(_CONTENT_ROLES))
    message["role"] = d.one_of((message["role"].capitalize(), message["role"].upper()))


@fault(FAULTS, "tool_role", "roles", "tool messages", hits=lambda f, r: built(r) and "tool" in _roles(f))
def _(d: Draft) -> None:
    d.message("user")["role"] = "tool"


@fault(FAULTS, "unknown_role", "roles", "roles that no format knows",
       hits=lambda f, r: looked_at(r) and any(role.lower() not in ROLES for role in _roles(f)))  # fmt: skip
def unknown_role(d: Draft) -> None:
    """Set a role that is not one of the four."""
    d.message(d.one_of(("user", "assistant")))["role"] = d.one_of(("function", "developer", "", "ipython"))


@fault(FAULTS, "odd_role", "roles", "a role that is no text",
       hits=lambda f, r: looked_at(r) and any(isinstance(m, dict) and not isinstance(m.get("role", ""), str) for c in f.seen for m in c))  # fmt: skip
def _(d: Draft) -> None:
    lenient(d)
    d.message(d.one_of(("user", "assistant")))["role"] = d.one_of((None, 7, ["user"], True))


def _rules(d: Draft) -> None:
    masked = MEGATRON if d.prompt_format != IDENTITY else MEGATRON[1:]
    d.semantics = d.one_of((*masked, *masked, override("turn_rules=no_wrap"), override("turn_rules=every_format")))


@fault(FAULTS, "assistant_first_wraps", "roles", "an assistant turn first, a user or tool turn last: the check wraps",
       hits=lambda f, r: looked_at(r) and any(turn[0] == "assistant" and turn[1] is None and turn[2] in ("user", "tool") for turn in f.predecessors()))  # fmt: skip
def _(d: Draft) -> None:
    _rules(d)
    at_least(d, 1)
    last = {"role": d.one_of(("user", "tool")), "content": "w0"}
    d.conversations[0] = [*d.conversations[0][2:], last]


@fault(FAULTS, "assistant_first_refused", "roles", "an assistant turn first, and an assistant turn last",
       hits=lambda f, r: looked_at(r) and any(turn[0] == "assistant" and turn[1] is None and turn[2] not in ("user", "tool") for turn in f.predecessors()))  # fmt: skip
def _(d: Draft) -> None:
    _rules(d)
    at_least(d, 1)
    del d.conversations[0][:2]


@fault(FAULTS, "assistant_twice", "roles", "two assistant turns in a row",
       hits=lambda f, r: looked_at(r) and any(turn[:2] == ("assistant", "assistant") for turn in f.predecessors()))  # fmt: skip
def assistant_twice(d: Draft) -> None:
    """Repeat the last message of a conversation."""
    at_least(d, 1)
    chosen = d.one_of(d.conversations)
    chosen.append(dict(chosen[-1]))


@fault(FAULTS, "assistant_empty", "roles", "an assistant turn of no content",
       hits=lambda f, r: looked_at(r) and any(m["role"].lower() == "assistant" and m.get("content") == "" for m in f.messages))  # fmt: skip
def assistant_empty(d: Draft) -> None:
    """Empty an answer."""
    d.message("assistant")["content"] = ""


@fault(FAULTS, "assistant_white", "roles", "an assistant turn of white space: its end trains alone",
       hits=lambda f, r: looked_at(r) and any(m["role"] == "assistant" and m.get("content") and not str(m["content"]).strip() for m in f.messages))  # fmt: skip
def _(d: Draft) -> None:
    d.message("assistant")["content"] = d.one_of(texts.WHITE)


# Messages that are not what they should be


def _any_content(test: Callable[[Mapping[str, Any]], bool]) -> Callable[[Facts, Row], bool]:
    return lambda f, r: looked_at(r) and any(map(test, f.messages))


@fault(
    FAULTS,
    "null_content",
    "contents",
    "content null",
    hits=_any_content(lambda m: "content" in m and m["content"] is None),
)
def _(d: Draft) -> None:
    d.message(d.one_of(_CONTENT_ROLES))["content"] = None


@fault(FAULTS, "missing_content", "contents", "no key content", hits=_any_content(lambda m: "content" not in m))
def _(d: Draft) -> None:
    del d.message(d.one_of(_CONTENT_ROLES))["content"]


@fault(FAULTS, "number_content", "contents", "a number or a truth value as content",
       hits=_any_content(lambda m: isinstance(m.get("content"), (int, float))))  # fmt: skip
def number_content(d: Draft) -> None:
    """Set a content that has no length."""
    d.message(d.one_of(("assistant", "user")))["content"] = d.one_of((7, 0, 1.5, True, 10**20))


@fault(FAULTS, "list_content", "contents", "parts or a mapping as content",
       hits=_any_content(lambda m: isinstance(m.get("content"), (list, dict))))  # fmt: skip
def _(d: Draft) -> None:
    d.message(d.one_of(_CONTENT_ROLES))["content"] = d.one_of(
        (["w0"], [{"type": "text", "text": "w0"}], [], {"w0": None})
    )


@fault(FAULTS, "lone_surrogate", "contents", "half a surrogate pair, which cannot be encoded",
       hits=lambda f, r: looked_at(r) and any("\ud800" <= letter <= "\udfff" for text in f.rendered_texts for letter in text))  # fmt: skip
def lone_surrogate(d: Draft) -> None:
    """Insert text that no tokenizer encodes."""
    d.message(d.one_of(_CONTENT_ROLES))["content"] = d.one_of(texts.SURROGATES)


@fault(FAULTS, "missing_role", "contents", "a message without a role",
       hits=lambda f, _: any(isinstance(m, dict) and "role" not in m for m in f.case.messages))  # fmt: skip
def missing_role(d: Draft) -> None:
    """Remove a message's role."""
    del d.message(d.one_of(("user", "assistant")))["role"]


@fault(FAULTS, "no_mapping", "contents", "a message that is not a mapping",
       hits=lambda f, _: not all(isinstance(m, dict) for m in f.case.messages))  # fmt: skip
def _(d: Draft) -> None:
    at_least(d, 1)
    chosen = d.one_of(d.conversations)
    chosen.insert(d.one_of(range(len(chosen), 0, -1)), d.one_of(("w0", None, 3, ["user", "w0"])))


@fault(FAULTS, "unknown_keys", "contents", "tool_calls and other keys that no format reads",
       hits=lambda f, r: built(r) and any(m.keys() - {"role", "content"} for m in f.messages))  # fmt: skip
def _(d: Draft) -> None:
    call = [{"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    key, value = d.one_of((("tool_calls", call), ("name", "w0"), ("reasoning_content", "w1"), ("tool_calls", None)))
    d.message(d.one_of(("assistant", "user")))[key] = value
