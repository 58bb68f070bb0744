"""Fault classes of settings: presets, context parallelism, overrides, tokenizers; and one class for each kind of refusal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from equivalence.generators import tokenizers
from equivalence.generators.drafts import MEGATRON, OVERRIDES, PRESET_NAMES, Draft, divisible, exactly, override, roomy
from equivalence.generators.faults import contents, layout
from equivalence.generators.faults.fault_class import (
    DEFAULT,
    IDENTITY,
    NANO,
    Faults,
    at_least,
    built,
    fault,
    looked_at,
    refused,
)
from equivalence.generators.row_facts import NEMOTRON, Facts, encode, render, vocabulary
from equivalence.subjects import Row

FAULTS: Faults = {}

_NO_PREFIX = {
    IDENTITY: "it renders no prefix; settings refuse another length than 0",
    DEFAULT: "nothing is masked, so no prefix is looked at",
}


@fault(FAULTS, "pad_token_known", "settings", "pad_token overridden with a token of the vocabulary",
       hits=lambda f, r: built(r) and f.settings.pad_token in vocabulary(f.case.tokenizer))  # fmt: skip
def _(d: Draft) -> None:
    d.pad_token = d.one_of(("</s>", "<s>", "<SPECIAL_12>", "w0" if d.tokenizer == "word" else "</s>"))


@fault(FAULTS, "pad_token_unknown", "settings", "pad_token overridden with a token that the vocabulary lacks",
       hits=lambda f, r: looked_at(r) and f.settings.pad_token is not None and f.settings.pad_token not in vocabulary(f.case.tokenizer))  # fmt: skip
def _(d: Draft) -> None:
    d.pad_token = d.one_of(("<nope>", "", "<SPECIAL_999999>"))


@fault(
    FAULTS,
    "prefix_zero",
    "settings",
    "assistant_prefix_len 0",
    hits=lambda f, r: built(r) and f.settings.assistant_prefix_len == 0,
)
def _(d: Draft) -> None:
    d.assistant_prefix_len = 0


def _long_prefix(f: Facts, row: Row) -> bool:
    prefix = f.settings.assistant_prefix_len
    if not prefix or not (built(row) or refused(row, "prefix_too_long")):
        return False
    answers = [m for m in f.messages if m["role"].lower() == "assistant"]
    turns = [encode(f.case.tokenizer, render([m], f.format, f.case.tokenizer)) for m in answers]
    return any(turn is not None and len(turn) < prefix for turn in turns)


@fault(
    FAULTS, "prefix_long", "settings", "an assistant prefix longer than a turn", hits=_long_prefix, not_in=_NO_PREFIX
)
def _(d: Draft) -> None:
    d.assistant_prefix_len = d.one_of((50, 1000, 12))


@fault(
    FAULTS,
    "field_override",
    "settings",
    "a preset with a single field changed",
    hits=lambda f, r: built(r) and "," in f.settings.semantics,
)
def _(d: Draft) -> None:
    d.semantics = f"{d.one_of(PRESET_NAMES[:2])},{d.one_of(OVERRIDES)}"


def _settings_class(name: str, what: str, edit: Callable[[Draft], None], hits: Callable[[Facts], bool],
                    not_in: Mapping[str, str] | None = None) -> None:  # fmt: skip
    fault(FAULTS, name, "settings", what, hits=lambda f, r: built(r) and hits(f), not_in=not_in, weight=0.5)(edit)


def _with_cp(context_parallel_size: int, d: Draft) -> None:
    at_least(d, 2)
    d.context_parallel_size = context_parallel_size


for _preset in PRESET_NAMES:
    _settings_class(
        f"preset {_preset}",
        "rows built under this preset",
        lambda d, preset=_preset: setattr(d, "semantics", preset),  # type: ignore[misc]
        lambda f, preset=_preset: f.settings.semantics == preset,  # type: ignore[misc]
        {DEFAULT: "it has no `default` (R-FORMAT-1)"} if _preset == "nemo-rl-direct" else None,
    )
for _cp in (1, 2, 3, 4):
    _settings_class(
        f"cp {_cp}",
        "rows of two segments and more at this context parallel size",
        functools.partial(_with_cp, _cp),
        lambda f, cp=_cp: f.settings.context_parallel_size == cp and len(f.seen) > 1,  # type: ignore[misc]
    )
for _name, _what in (
    *((name, recipe.what) for name, recipe in tokenizers.RECIPES.items()),
    ("nemotron-mini", "a real one, cut down"),
):
    fault(
        FAULTS,
        f"tokenizer {_name}",
        "tokenizers",
        _what,
        hits=lambda f, r, name=_name: f.case.tokenizer == name and looked_at(r),  # type: ignore[misc]
        weight=0.5,
    )(lambda d, name=_name: setattr(d, "tokenizer", name))  # type: ignore[misc]


# Refusals: each kind of docs/SPEC.md#refusals must come up.


def _checked(d: Draft) -> None:
    """Choose a preset that checks this format's turns."""
    d.tokenizer = "word"
    if d.prompt_format == DEFAULT:
        d.semantics = override("turn_rules=every_format")
    else:
        d.semantics = d.one_of(MEGATRON if d.prompt_format != IDENTITY else ("megatron-lm-main", "megatron-lm-main"))


def _with(semantics: str, *edits: Callable[[Draft], None]) -> Callable[[Draft], None]:
    def edit(d: Draft) -> None:
        for each in edits:
            each(d)
        d.semantics = semantics

    return edit


def _checked_then(edit: Callable[[Draft], None]) -> Callable[[Draft], None]:
    def both(d: Draft) -> None:
        _checked(d)
        edit(d)

    return both


def _bad_content(d: Draft) -> None:
    _checked(d)
    d.message("assistant")["content"] = d.one_of((7, True) if d.prompt_format == DEFAULT else (None, 7))


def _no_pad(d: Draft) -> None:
    """Make conversations of one turn, so that no turns merge before the missing pad token is noticed."""
    d.tokenizer = "plain" if d.prompt_format != DEFAULT else "plain-template"
    d.semantics = d.one_of((*MEGATRON, "strict"))
    d.conversations = [[{"role": "system", "content": "w0"}] for _ in range(d.one_of((1, 2)))]


def _template_error(d: Draft) -> None:
    d.semantics = d.one_of(MEGATRON)
    d.tokenizer = "raising"
    d.message("user")["role"] = d.one_of(("tool", "function"))


def _row_start(d: Draft) -> None:
    at_least(d, 1)
    d.conversations[0] = d.conversations[0][1:]
    d.semantics = d.one_of(("strict", override("row_ends=system_to_assistant")))


def _row_end(d: Draft) -> None:
    at_least(d, 1)
    d.conversations[-1] = d.conversations[-1][:-1]
    d.semantics = d.one_of(("strict", override("row_ends=system_to_assistant")))


def _empty_row(d: Draft) -> None:
    d.semantics = d.one_of(MEGATRON)
    d.conversations = [layout.empty_conversation(d)]


def _empty_first(d: Draft) -> None:
    d.conversations.insert(0, layout.empty_conversation(d))
    d.pack = roomy


def _prefix(d: Draft) -> None:
    d.assistant_prefix_len = 50


def _merged_turns(d: Draft) -> None:
    contents.merge_turns(d, d.one_of(("only-unk", "stripping")) if d.prompt_format == NANO else "bytes")
    d.semantics = "megatron-lm-main"


def _indivisible(d: Draft) -> None:
    d.context_parallel_size = d.one_of((2, 3, 4))
    d.pack = lambda draft, ends: divisible(draft, ends[-1]) + 1
    d.semantics = d.one_of(("strict", override("indivisible_segment=refuse")))


def _truncated(d: Draft) -> None:
    d.context_parallel_size = 1
    d.pack = exactly(-1)


def _boundaries(d: Draft) -> None:
    layout.too_many_boundaries(d)
    d.semantics = d.one_of(MEGATRON)


_NOT_DEFAULT = {DEFAULT: "its turns are not compared"}
_REFUSALS: Mapping[str, tuple[Callable[[Draft], None], Mapping[str, str]]] = {
    "bad_message": (contents.missing_role, {}),
    "bad_content": (_bad_content, {}),
    "bad_text": (_with("megatron-lm-0.19", contents.lone_surrogate), {}),
    "template_error": (_template_error, dict.fromkeys((*NEMOTRON, IDENTITY), "it has its own rendering, no template")),
    "no_chat_template": (
        lambda d: setattr(d, "tokenizer", "plain"),
        dict.fromkeys((*NEMOTRON, IDENTITY), "it has its own rendering, no template"),
    ),
    "unsupported_format": (
        _with("nemo-rl-direct"),
        dict.fromkeys((*NEMOTRON, IDENTITY), "every preset supports it"),
    ),
    "no_pad_token": (_no_pad, {}),
    "row_start": (_row_start, {}),
    "row_end": (_row_end, {}),
    "empty_row": (_empty_row, {}),
    "empty_conversation": (_with(override("empty_conversation=refuse"), _empty_first), {}),
    "empty_assistant": (_checked_then(contents.assistant_empty), {}),
    "role_order": (_checked_then(contents.assistant_twice), {}),
    "unknown_role": (_checked_then(contents.unknown_role), {}),
    "prefix_too_long": (_with(override("long_assistant_prefix=refuse"), _prefix), _NO_PREFIX),
    "turn_mismatch": (_merged_turns, _NOT_DEFAULT),
    "too_many_boundaries": (_boundaries, {}),
    "indivisible_segment": (_indivisible, {}),
    "dropped": (_with(override("lost_conversations=refuse"), layout.after_exact_fill), {}),
    "truncated": (_with(override("lost_conversations=refuse"), _truncated), {}),
}
for _kind, (_edit, _not_in) in _REFUSALS.items():
    fault(
        FAULTS,
        f"refused {_kind}",
        "refusals",
        "refused with this kind",
        hits=lambda _, r, kind=_kind: refused(r, kind),  # type: ignore[misc]
        not_in=_not_in,
        weight=0.5,
    )(_edit)
