"""Describe a row case without any side of the comparison, by rendering and counting of its own, to aim generators and to detect hits.

These facts are enough to aim; the reference alone says whether and why a row is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from equivalence.cases.row import RowCase
from equivalence.generators import tokenizers

PAD_TOKENS = {"nemotron-nano-v2": "<unk>", "nemotron-h-aligned": "<SPECIAL_233>", "identity": "<unk>"}
NEMOTRON = ("nemotron-nano-v2", "nemotron-h-aligned")
ROLES = ("system", "user", "assistant", "tool")


class Facts:
    """A case, looked at once; everything is computed when first asked for."""

    def __init__(self, case: RowCase) -> None:
        self.case = case
        self.settings = case.settings
        self.format = case.settings.prompt_format
        self.pack_length = case.settings.pack_length
        self.granularity = 2 * case.settings.context_parallel_size if case.settings.context_parallel_size > 1 else 1

    @functools.cached_property
    def conversations(self) -> list[list[Any]]:
        """Messages, split before each system message."""
        return split(self.case.messages)

    @functools.cached_property
    def tokens(self) -> list[Sequence[int]]:
        """Tokens of each conversation, up to the first that cannot be rendered or encoded."""
        found = []
        for conversation in self.conversations:
            ids = encode(self.case.tokenizer, render(conversation, self.format, self.case.tokenizer))
            if ids is None:
                break
            found.append(ids)
        return found

    @functools.cached_property
    def ends(self) -> list[int]:
        """End of each conversation in a row without limit, padding for context parallelism included."""
        return ends([len(ids) for ids in self.tokens], self.granularity)

    @functools.cached_property
    def total(self) -> int:
        """Accumulated length of the whole row; -1 if a conversation cannot be rendered."""
        if len(self.tokens) < len(self.conversations) or not self.ends:
            return -1
        return self.ends[-1]

    @functools.cached_property
    def cut(self) -> int | None:
        """Index of the first conversation that reaches beyond the pack length; later conversations are not read."""
        return next((number for number, end in enumerate(self.ends) if end > self.pack_length), None)

    @functools.cached_property
    def seen(self) -> list[list[Any]]:
        """Conversations that are read, if none is refused."""
        return self.conversations if self.cut is None else self.conversations[: self.cut + 1]

    @functools.cached_property
    def messages(self) -> list[Mapping[str, Any]]:
        """The messages of `seen` that are mappings with a text as role."""
        return [m for each in self.seen for m in each if isinstance(m, dict) and isinstance(m.get("role"), str)]

    @functools.cached_property
    def texts(self) -> list[str]:
        """The contents of `messages` that are text and not empty."""
        return [m["content"] for m in self.messages if isinstance(m.get("content"), str) and m["content"]]

    @functools.cached_property
    def rendered_texts(self) -> list[str]:
        """`texts` without those of roles that the format does not render."""
        if self.format not in NEMOTRON:
            return self.texts
        kept = [m for m in self.messages if m["role"] in ROLES[:3]]
        return [m["content"] for m in kept if isinstance(m.get("content"), str) and m["content"]]

    @functools.cached_property
    def seen_ids(self) -> set[int]:
        """Ids of all conversations in `seen` that could be encoded."""
        return {token for ids in self.tokens[: len(self.seen)] for token in ids}

    @functools.cached_property
    def pad_id(self) -> int | None:
        """Id of the pad token."""
        tokenizer = tokenizers.load(self.case.tokenizer)
        name = self.settings.pad_token or PAD_TOKENS.get(self.format)
        if name is None:
            found = tokenizer.pad_token_id
            return cast("int | None", found if found is not None else tokenizer.eos_token_id)
        return cast("int | None", vocabulary(self.case.tokenizer).get(name, tokenizer.unk_token_id))

    @functools.cached_property
    def merged(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Conversations in `seen` whose turns encoded alone differ from the whole: (whole, turns joined)."""
        found: list[tuple[Sequence[int], Sequence[int]]] = []
        for conversation, whole in zip(self.seen, self.tokens, strict=False):
            texts = [render([message], self.format, self.case.tokenizer) for message in conversation]
            if self.format == "default" and "".join(map(str, texts)) != render(
                conversation, self.format, self.case.tokenizer
            ):
                continue
            turns = [encode(self.case.tokenizer, text) for text in texts]
            alone = [token for ids in turns if ids is not None for token in ids]
            if alone != list(whole):
                found.append((whole, alone))
        return found

    def predecessors(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield (role, the role before or None, the conversation's last role) of each turn in `seen`, in lower case."""
        for conversation in self.seen:
            roles = [str(m.get("role")).lower() if isinstance(m, dict) else "" for m in conversation]
            for number, role in enumerate(roles):
                yield role, roles[number - 1] if number else None, roles[-1]


def split(messages: Sequence[Any]) -> list[list[Any]]:
    """Split messages into runs, each from a system message to before the next."""
    found: list[list[Any]] = []
    for message in messages:
        if not found or (isinstance(message, dict) and message.get("role") == "system"):
            found.append([])
        found[-1].append(message)
    return found


def ends(lengths: Sequence[int], granularity: int) -> list[int]:
    """Return running sums, each rounded up to the granularity."""
    found, total = [], 0
    for length in lengths:
        total = -(-(total + length) // granularity) * granularity
        found.append(total)
    return found


def lengths(messages: Sequence[Any], prompt_format: str, tokenizer: str) -> list[int]:
    """Return the number of tokens of each conversation, up to the first that cannot be rendered."""
    found = []
    for conversation in split(messages):
        ids = encode(tokenizer, render(conversation, prompt_format, tokenizer))
        if ids is None:
            break
        found.append(len(ids))
    return found


def render(conversation: Sequence[Any], prompt_format: str, tokenizer: str) -> str | None:
    """Return the text of a conversation; None if the conversation cannot be rendered."""
    if not all(isinstance(message, dict) and "role" in message for message in conversation):
        return None
    if prompt_format == "default":
        return _template(tokenizer, conversation)
    parts = [_render_one(message, prompt_format) for message in conversation]
    return None if None in parts else "".join(part for part in parts if part)


def encode(tokenizer: str, text: str | None) -> Sequence[int] | None:
    """Return the ids of a text without added special tokens; None for a text that cannot be encoded."""
    return None if text is None else _encode(tokenizer, text)


@functools.cache
def vocabulary(tokenizer: str) -> Mapping[str, int]:
    """Return the tokenizer's vocabulary."""
    return dict(tokenizers.load(tokenizer).get_vocab())


@functools.lru_cache(maxsize=1 << 16)
def _encode(tokenizer: str, text: str) -> Sequence[int] | None:
    try:
        return tuple(tokenizers.load(tokenizer).backend_tokenizer.encode(text, add_special_tokens=False).ids)
    except TypeError:
        return None


def _template(tokenizer: str, conversation: Sequence[Any]) -> str | None:
    loaded = tokenizers.load(tokenizer)
    if loaded.chat_template == tokenizers.PLAIN_TEMPLATE and all(type(m.get("content")) is str for m in conversation):
        return "".join(m["content"] for m in conversation)
    try:
        return str(loaded.apply_chat_template(list(conversation), tokenize=False))
    except Exception:  # noqa: BLE001 - a template may raise anything
        return None


def _render_one(message: Mapping[str, Any], prompt_format: str) -> str | None:
    role, content = message["role"], message.get("content")
    if prompt_format == "identity":
        return "" if content is None else str(content)
    if role not in ROLES[:3]:
        return ""
    if not isinstance(content, str):
        return None
    if prompt_format == "nemotron-nano-v2":
        if role != "assistant":
            content = content.replace("/think", "").replace("/no_think", "")
        opening = {"system": "<SPECIAL_10>System", "user": "<SPECIAL_11>User", "assistant": "<SPECIAL_11>Assistant"}[
            role
        ]
        closing = "<SPECIAL_12>\n" if role == "assistant" else ""
        return f"{opening}\n{content.strip()}\n{closing}"
    opening = {"system": "<SPECIAL_10>System\n", "user": "<SPECIAL_11>User\n", "assistant": ""}[role]
    return f"{opening}{content.strip()}\n" + ("<SPECIAL_11>Assistant\n" if role == "user" else "")
