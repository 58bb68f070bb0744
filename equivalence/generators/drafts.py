"""A row while it is being drawn: well-formed conversations and joint settings, which a fault class then edits.

What is drawn are short lists and choices from small pools, simplest first, so that drawing takes about 2 ms and shrinks well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from hypothesis import strategies as st

from equivalence.cases.row import RowCase
from equivalence.generators import row_facts, texts
from equivalence.subjects import RowSettings
from reference.semantics import PRESETS, Semantics

Draw = Callable[[st.SearchStrategy[Any]], Any]

OLDER = ("megatron-lm-0.18", "megatron-lm-0.17")
"""Presets of versions that the installed one is no witness of: their fields are drawn as overrides, and recorded rows hold them."""
PRESET_NAMES = tuple(name for name in PRESETS if name not in OLDER)
OVERRIDES = tuple(
    f"{name}={value}" for name, hint in get_type_hints(Semantics).items() for value in get_args(hint)
)  # fmt: skip
"""Every field of the semantics with each of its values."""
GENTLE = ("word", "bytes", "bos", "eos-pad", "huge-words")
"""Tokenizers that build most rows in every format."""
WORD_LEVEL = ("word", "bos", "huge-words", "raising")
ROUGH = ("normalizing", "stripping", "prefix-space", "only-unk", "plain", "plain-template", "raising", "huge")
"""Tokenizers with which most rows of some format are refused."""
MEGATRON = ("megatron-lm-0.19", "megatron-lm-main")
SEMANTICS = ((*MEGATRON, *MEGATRON, "strict", "nemo-rl-direct"), (*MEGATRON, *MEGATRON, "strict"))
"""Presets to draw from: most often the two with three witnesses; `nemo-rl-direct` has no `default`, which a class of its own covers."""

MOST_PAIRS = 3
CONVERSATIONS = st.lists(st.integers(0, MOST_PAIRS * len(texts.PLAIN) - 1), min_size=1, max_size=6)
"""Of each conversation one number: its pairs of user and assistant turns, and a stride through the plain contents."""
PACK = Literal["roomy", "exact", "one_more", "one_less", "inner_end", "anywhere"]


@dataclass(kw_only=True)
class Draft:
    """Row case that a fault class edits in place."""

    draw: Draw
    prompt_format: str
    conversations: list[list[Any]]
    tokenizer: str
    semantics: str
    context_parallel_size: int
    pad_token: str | None = None
    assistant_prefix_len: int | None = None
    pack: Callable[[Draft, Sequence[int]], int] | None = None
    """Chooses the pack length from where the conversations end; None: any of PACK."""
    labels: list[str] = field(default_factory=list)

    @property
    def separator(self) -> str:
        """Return text that ends a content, so that the next content starts with its own token where a format puts nothing between."""
        return separator_of(self.prompt_format, self.tokenizer)

    @property
    def granularity(self) -> int:
        """2·cp, or 1 where nothing is padded."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def masked(self) -> bool:
        """Return whether the format's turns are checked one by one."""
        preset = self.semantics.partition(",")[0]
        return self.prompt_format in row_facts.NEMOTRON or (
            self.prompt_format == "identity" and preset in ("megatron-lm-main", "strict")
        )

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Draw one; the first is the simplest."""
        return choose(self.draw, choices)

    def message(self, *roles: str) -> dict[str, Any]:
        """Draw a message of one of these roles, to change in place; add a user message if there is none."""
        found = [m for each in self.conversations for m in each if isinstance(m, dict) and m.get("role") in roles]
        if not found:
            found = [{"role": roles[0], "content": "w0"}]
            self.conversations.insert(0, [{"role": "system", "content": "w0"}, *found])
        return self.one_of(found)  # type: ignore[no-any-return]

    def lengths(self) -> list[int]:
        """Return the number of tokens of each conversation, up to the first that cannot be rendered."""
        messages = [message for each in self.conversations for message in each]
        return row_facts.lengths(messages, self.prompt_format, self.tokenizer)

    def ends(self) -> list[int]:
        """Return the end of each conversation, padding included."""
        return row_facts.ends(self.lengths(), self.granularity)


def conversation(pairs: int, stride: int, separator: str) -> list[Any]:
    """Draw a well-formed conversation; with stride 0 every content is the simplest."""
    roles = ["system", *["user", "assistant"] * pairs]
    contents = [texts.PLAIN[stride * (turn + 1) % len(texts.PLAIN)] + separator for turn in range(len(roles))]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


def conversations(drawn: Sequence[int], separator: str) -> list[list[Any]]:
    """Draw well-formed conversations from CONVERSATIONS."""
    pairs_and_strides = (divmod(each, len(texts.PLAIN)) for each in drawn)
    return [conversation(pairs + 1, stride, separator) for pairs, stride in pairs_and_strides]


def separator_of(prompt_format: str, tokenizer: str) -> str:
    """See `Draft.separator`."""
    if prompt_format in row_facts.NEMOTRON:
        return ""
    return " " if tokenizer in WORD_LEVEL else "\n"


def start(draw: Draw, prompt_format: str) -> Draft:
    """Draw well-formed conversations and joint settings."""
    draft = Draft(
        draw=draw,
        prompt_format=prompt_format,
        conversations=[],
        tokenizer=choose(draw, GENTLE),
        semantics=choose(draw, SEMANTICS[prompt_format == "default"]),
        context_parallel_size=1 + draw(index(4)),
    )
    draft.conversations = conversations(draw(CONVERSATIONS), draft.separator)
    return draft


@functools.cache
def index(count: int) -> st.SearchStrategy[int]:
    """Draw an index of a sequence, which is cheaper than making a strategy for each sequence."""
    return st.integers(0, count - 1)


def choose(draw: Draw, choices: Sequence[Any]) -> Any:
    """Draw one of the choices; the first is the simplest."""
    return choices[draw(index(len(choices)))]


def finish(draft: Draft, origin: str) -> RowCase:
    """Measure the conversations, choose the pack length, and settle the case."""
    ends = draft.ends() or [8]
    pack_length = draft.pack(draft, ends) if draft.pack else any_pack(draft, ends)
    return RowCase(
        messages=tuple(message for each in draft.conversations for message in each),
        settings=RowSettings(
            pack_length=max(1, pack_length),
            prompt_format=draft.prompt_format,
            context_parallel_size=draft.context_parallel_size,
            semantics=draft.semantics,
            pad_token=draft.pad_token,
            assistant_prefix_len=draft.assistant_prefix_len,
        ),
        tokenizer=draft.tokenizer,
        labels=tuple(draft.labels),
        origin=origin,
    )


def any_pack(draft: Draft, ends: Sequence[int]) -> int:
    """Draw a pack length near the length of the conversations, most often divisible as context parallelism needs."""
    kind: PACK = draft.one_of(get_args(PACK))
    if kind == "anywhere":
        length = draft.draw(st.integers(1, max(1, ends[-1])))
    elif kind == "inner_end":
        length = draft.one_of(ends)
    else:
        length = ends[-1] + {"roomy": 5, "exact": 0, "one_more": 1, "one_less": -1}[kind]
    return divisible(draft, length) if draft.one_of((True, False)) or draft.semantics not in MEGATRON else length


def divisible(draft: Draft, length: int) -> int:
    """Round up to a multiple of 2·cp, where padding applies."""
    return -(-max(1, length) // draft.granularity) * draft.granularity


def roomy(draft: Draft, ends: Sequence[int]) -> int:
    """Return a pack length that holds all conversations."""
    return divisible(draft, ends[-1] + draft.one_of((1, 0, 7)))


def exactly(delta: int) -> Callable[[Draft, Sequence[int]], int]:
    """Return the exact length of the whole row plus `delta` as the pack length."""
    return lambda _, ends: ends[-1] + delta


def override(name: str) -> str:
    """Draw a preset with one field changed."""
    return f"{PRESET_NAMES[0]},{name}"
