"""Ordinary chat conversations to tokens and masks, message by message, as the online path wants them (R-ONLINE-1, 8 to 10).

All messages of all conversations are encoded in one batch. A chat template is rendered once for every message of a
conversation, since only that tells where each begins: quadratic in its length, as it is where NeMo-RL does it.

Reference: `reference/chat.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from production.errors import PackproofError, RowRefused
from production.online.padded_batch import Conversation
from production.refusals import refusal
from production.semantics import nearest
from production.tokens.encoder import TextEncoder, UnencodableError
from production.tokens.prompts import (
    FORMATS,
    Message,
    RowMessages,
    render_messages,
    render_template,
    split_conversations,
)

TRAINED_ROLE = "assistant"
PROMPTING_ROLES = ("user", "tool")
"""Roles behind which a template may open the assistant's turn."""
STUB_TOKENS = 4
"""Tokens that a message of a conversation that is too long keeps at most (R-ONLINE-8)."""

OnUnjoined = Literal["refuse", "allow"]
OnLong = Literal["mask_out", "refuse"]


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Settings that turn conversations into tokens; the values of a job's section `data`."""

    prompt_format: str = "default"
    """One of `prompts.FORMATS`; `default` is the tokenizer's chat template."""
    add_bos: bool = True
    """Whether the first message begins with the tokenizer's BOS, added where it lacks it. A tokenizer without one adds nothing."""
    add_eos: bool = True
    """Whether the last message ends with the tokenizer's EOS, line feeds aside, added where it lacks it."""
    add_generation_prompt: bool = False
    """Whether the template opens the assistant's turn behind a user or tool message; that header then belongs to the prompt."""
    on_unjoined_pieces: OnUnjoined = "refuse"
    """Treatment of a template that renders earlier messages otherwise once more follow (R-ONLINE-9): `allow` feeds
    what NeMo-RL feeds.
    """
    max_length: int | None = None
    """A conversation of so many tokens or more is too long (R-ONLINE-8); None: any length."""
    on_long_conversation: OnLong = "mask_out"
    """Treatment of a conversation that is too long: `mask_out` cuts it to a stub that counts nowhere, as NeMo-RL
    does; `refuse` refuses it.
    """

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if self.prompt_format not in FORMATS:
            raise PackproofError(
                what=f"must be a prompt format, got {self.prompt_format!r}; the nearest is {nearest(self.prompt_format, FORMATS)!r}",
                where="prompt_format",
                fix=f"choose one of {', '.join(FORMATS)}",
            )
        if self.add_generation_prompt and self.prompt_format != "default":
            raise PackproofError(
                what=f"the format {self.prompt_format} has no generation prompt to add: only a chat template has one",
                where="add_generation_prompt",
                fix="set it to false, or render with the tokenizer's chat template (format default)",
            )
        if self.max_length is not None and self.max_length < 1:
            raise PackproofError(
                what=f"must be at least 1, got {self.max_length}", where="max_length", fix="give 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Holds a line of a chat file."""

    messages: Sequence[Any]
    """Its messages, every key kept."""
    tools: Any = None
    """The tools that the line offers, as JSON; None where it has no such key."""


class ChatTokenizer:
    """Tokenizes conversations. The tokenizer must not be changed meanwhile."""

    def __init__(self, *, tokenizer: Any, settings: ChatSettings) -> None:
        self._format = FORMATS[settings.prompt_format]
        self._tokenizer = tokenizer
        self._settings = settings
        self._bos = tokenizer.bos_token if settings.add_bos else None
        self._eos = tokenizer.eos_token if settings.add_eos else None
        self._encoder = TextEncoder(tokenizer)

    @property
    def missing_tokens(self) -> list[str]:
        """Return the keys of settings that ask for a token which the tokenizer lacks, so that nothing is added."""
        asked = {"add_bos": (self._settings.add_bos, self._bos), "add_eos": (self._settings.add_eos, self._eos)}
        return [key for key, (is_asked, token) in asked.items() if is_asked and token is None]

    def tokenize(self, conversations: Sequence[Chat | Sequence[Any]]) -> list[Conversation]:
        """Return token ids and mask of each conversation, a line or its messages.

        Raises RowRefused (`bad_message`, `bad_content`, `bad_text`, …).
        """
        chats = [each if isinstance(each, Chat) else Chat(messages=each) for each in conversations]
        texts = [self._texts(chat, number) for number, chat in enumerate(chats)]
        try:
            encoded = self._encoder.encode_all(texts)
        except UnencodableError as error:
            ends = list(itertools.accumulate(map(len, texts)))
            bad = int(np.searchsorted(ends, error.index, side="right"))
            turn = error.index - (ends[bad] - len(texts[bad]))
            raise refusal(
                "bad_text", f"the tokenizer refuses its text: {error}", conversation=bad, turn=turn
            ) from error
        return [
            self._conversation(of_one.take(None).astype(np.int64), of_one.lengths, chat, number)
            for number, (chat, of_one) in enumerate(zip(chats, encoded, strict=True))
        ]

    def check_ids(self, chat: Chat) -> None:
        """Refuse a conversation whose pieces, encoded alone, are not the ids of their text encoded whole (R-ONLINE-9).

        Encodes everything once more: for the first conversations of a file. Raises RowRefused as `tokenize`, and `unjoined_pieces`.
        """
        texts = self._texts(chat, 0)
        if self._settings.on_unjoined_pieces == "allow" or not texts:
            return
        try:
            pieces, whole = self._encoder.encode_all([texts, ["".join(texts)]])
        except UnencodableError:
            return  # `tokenize` names the message
        fed, own = pieces.take(None), whole.take(None)
        if np.array_equal(fed, own):
            return
        shared = min(len(fed), len(own))
        differing = np.flatnonzero(fed[:shared] != own[:shared])
        first = int(differing[0]) if len(differing) else shared
        turn = int(np.searchsorted(np.cumsum(pieces.lengths), first, side="right"))
        what = (
            f"its messages are {len(fed)} tokens encoded one by one and {len(own)} encoded together; the first that differs is token {first}: "
            f"{self._named(fed, first)} is fed, {self._named(own, first)} stands in the whole text"
        )
        raise refusal("unjoined_pieces", what, conversation=0, turn=min(turn, len(texts) - 1))

    def _named(self, ids: Any, place: int) -> str:
        return repr(self._tokenizer.convert_ids_to_tokens(int(ids[place]))) if place < len(ids) else "nothing"

    def _conversation(self, ids: Any, lengths: Any, chat: Chat, number: int) -> Conversation:
        """Return the conversation, or its stub (R-ONLINE-8)."""
        trained = _trained(chat.messages)
        longest, weight = self._settings.max_length, 1.0
        if longest is not None and len(ids) >= longest:
            if self._settings.on_long_conversation == "refuse":
                raise RowRefused(
                    kind="truncated",
                    what=f"a conversation must have fewer than {longest} tokens, got {len(ids)}",
                    where=f"conversation {number}",
                    fix="cut the conversation or leave it out, raise data.max_input_seq_length, or set data.on_long_conversation to mask_out",
                    conversation=number,
                )
            kept = np.minimum(lengths, min(STUB_TOKENS, longest // len(lengths)))
            starts = np.cumsum(lengths) - lengths
            ids = np.concatenate([ids[start : start + count] for start, count in zip(starts, kept, strict=True)])
            lengths, weight = kept, 0.0
        return Conversation(
            token_ids=torch.from_numpy(ids), token_mask=torch.from_numpy(trained.repeat(lengths)), weight=weight
        )

    def _texts(self, chat: Chat, number: int) -> list[str]:
        """Return the text of each message; joined, the texts are the rendered conversation."""
        if not len(chat.messages):
            return []
        row = split_conversations(chat.messages)
        texts = self._rendered(row, chat.tools, number)
        if self._bos is not None and not texts[0].startswith(self._bos):
            texts[0] = self._bos + texts[0]
        if self._eos is not None and not texts[-1].rstrip("\n").endswith(self._eos):
            texts[-1] += self._eos
        return texts

    def _rendered(self, row: RowMessages, tools: Any, number: int) -> list[str]:
        has_calls = any(message.get("tool_calls") for message in row.messages)
        if self._format.render is not None:
            if tools or has_calls:
                what = f"the format {self._format.name} renders no tools, and the line has {'tools' if tools else 'tool calls'}"
                raise refusal("tools_not_rendered", what, conversation=number)
            return render_messages(row.messages, self._format, number)
        if tools or has_calls:
            self._check_tools(row.messages, tools, number)
        texts, before = [], ""
        for end in range(1, len(row.messages) + 1):
            opens = self._settings.add_generation_prompt and row.roles[end - 1] in PROMPTING_ROLES
            now = render_template(row.messages[:end], self._tokenizer, number, tools=tools, add_generation_prompt=opens)
            shared = len(os.path.commonprefix([before, now]))  # noqa: RUF071 - of texts, character by character
            if shared < len(before) and self._settings.on_unjoined_pieces == "refuse":
                what = (
                    f"with this message the chat template no longer renders what it rendered before: {before[shared : shared + 40]!r} has become "
                    f"{now[shared : shared + 40]!r}, and what it rendered before is fed already"
                )
                raise refusal("unjoined_pieces", what, conversation=number, turn=end - 1)
            texts.append(now[shared:])
            before = now
        return texts

    def _check_tools(self, messages: Sequence[Message], tools: Any, number: int) -> None:
        """Refuse tools, and calls of them, that the template leaves out (R-ONLINE-10)."""
        whole = render_template(messages, self._tokenizer, number, tools=tools)
        if tools and whole == self._other_text(messages, None, number):
            raise refusal(
                "tools_not_rendered", "the chat template does not render the conversation's tools", conversation=number
            )
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        has_calls = any(message.get("tool_calls") for message in messages)
        if has_calls and whole == self._other_text(bare, tools, number):
            what = "the chat template makes nothing of its tool calls"
            raise refusal("tools_not_rendered", what, conversation=number)

    def _other_text(self, messages: Sequence[Message], tools: Any, number: int) -> str | None:
        """Return the text without some part of the line; None where the template asks for that part."""
        try:
            return render_template(messages, self._tokenizer, number, tools=tools)
        except RowRefused:
            return None


def _trained(conversation: Sequence[Message]) -> Any:
    return np.array([message["role"] == TRAINED_ROLE for message in conversation], dtype=np.float32)
