"""The online path's tokens: a conversation message by message, with the mask of each, as NeMo-RL publishes it (docs/SPEC.md#online-path)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reference import prompts
from reference.prompts import Conversation, Message, Prompt, Tokenizer
from reference.refusals import RowRefused

TRAINED_ROLE = "assistant"
PROMPTING_ROLES = ("user", "tool")
"""Roles after which the template may open the assistant's turn."""
STUB_TOKENS = 4
"""Tokens that each message of a conversation that is too long keeps at most."""


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Settings that decide how the online path turns conversations into tokens."""

    bos_token: str | None = None
    """BOS text, put before a first message that does not begin with this text; None adds nothing."""
    eos_token: str | None = None
    """EOS text, put behind a last message that does not end with this text; None adds nothing."""
    add_generation_prompt: bool = False
    """Whether the template opens the assistant's turn after a user or tool message, whose tokens that header then belongs to."""
    on_unjoined_pieces: str = "refuse"
    """`refuse` or `allow`: R-ONLINE-9."""


@dataclass(frozen=True, kw_only=True)
class MessageTokens:
    """One message's piece of a conversation."""

    tokens: list[int]
    is_trained: bool


def tokenize_messages(
    conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer, settings: ChatSettings, tools: Any = None
) -> list[MessageTokens]:
    """Return the tokens of each message. R-ONLINE-1, R-ONLINE-9.

    `tools` are those of the conversation's line, which only a template can render.
    """
    prompts.split_conversations(conversation)  # each message must be one: R-SPLIT-2
    check_tools(conversation, prompt, tokenizer, tools)
    pieces: list[MessageTokens] = []
    before = ""
    for number, message in enumerate(conversation):
        so_far = rendered(conversation[: number + 1], prompt, tokenizer, settings, tools)
        if settings.on_unjoined_pieces == "refuse" and not so_far.startswith(before):
            why = f"the template renders the messages before it in other words once message {number} follows"
            raise RowRefused("unjoined_pieces", f"{why}; choose another template, or allow it", turn=number)
        text = so_far[first_difference(before, so_far) :]
        before = so_far
        bos, eos = settings.bos_token, settings.eos_token
        if number == 0 and bos is not None and not text.startswith(bos):
            text = bos + text
        if number == len(conversation) - 1 and eos is not None and not text.rstrip("\n").endswith(eos):
            text = text + eos
        pieces.append(MessageTokens(tokens=prompts.encode(text, tokenizer), is_trained=message["role"] == TRAINED_ROLE))
    return pieces


def joined(pieces: Sequence[MessageTokens]) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and a mask with 1 for each token of an assistant message. R-ONLINE-1."""
    tokens = [token for piece in pieces for token in piece.tokens]
    mask = [int(piece.is_trained) for piece in pieces for _ in piece.tokens]
    return tokens, mask


def weighted(pieces: Sequence[MessageTokens], max_length: int) -> tuple[list[int], list[int], float]:
    """Return tokens, mask and weight of a conversation. A conversation that is too long is cut to a stub of weight 0. R-ONLINE-8."""
    tokens, mask = joined(pieces)
    if len(tokens) < max_length:
        return tokens, mask, 1.0
    kept = min(STUB_TOKENS, max_length // len(pieces))
    cut = [MessageTokens(tokens=piece.tokens[:kept], is_trained=piece.is_trained) for piece in pieces]
    return *joined(cut), 0.0


def check_tools(conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer, tools: Any) -> None:
    """Refuse a conversation whose tools or tool calls do not change its rendered text, and so would be lost. R-ONLINE-10."""
    bare: list[Message] = [{key: message[key] for key in message if key != "tool_calls"} for message in conversation]
    has_calls = any(message.get("tool_calls") for message in conversation)
    if prompt.format != "default":
        if tools or has_calls:
            raise RowRefused("tools_not_rendered", f"the format {prompt.format} renders no tools; use a template")
        return
    whole = prompts.render(conversation, prompt, tokenizer, **given(tools)) if tools or has_calls else ""
    if tools and whole == text_or_none(conversation, prompt, tokenizer, None):
        raise RowRefused("tools_not_rendered", "the chat template does not render the tools; use one that renders them")
    if has_calls and whole == text_or_none(bare, prompt, tokenizer, tools):
        raise RowRefused(
            "tools_not_rendered", "the chat template does not render the tool calls; use one that renders them"
        )


def text_or_none(conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer, tools: Any) -> str | None:
    """Return the text of a conversation rendered with these tools (None: without tools), or None if the template refuses."""
    try:
        return prompts.render(conversation, prompt, tokenizer, **given(tools))
    except RowRefused:
        return None


def rendered(
    messages: Sequence[Message], prompt: Prompt, tokenizer: Tokenizer, settings: ChatSettings, tools: Any
) -> str:
    """Return the text of the first messages of a conversation."""
    opens_turn = settings.add_generation_prompt and messages[-1]["role"] in PROMPTING_ROLES
    opened = {"add_generation_prompt": True} if opens_turn else {}
    return prompts.render(messages, prompt, tokenizer, **given(tools), **opened)


def given(tools: Any) -> dict[str, Any]:
    """Return the template option that passes the tools; empty without tools."""
    return {"tools": tools} if tools is not None else {}


def first_difference(before: str, now: str) -> int:
    """Return the first index at which two texts differ; the length of the shorter text if the other text begins with it."""
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return place
    return min(len(before), len(now))
