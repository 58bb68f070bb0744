"""The online path's tokens: a conversation message by message, with the mask of each, as NeMo-RL publishes it (SPEC section 15)."""

from __future__ import annotations

from collections.abc import Sequence

from reference import prompts
from reference.prompts import Conversation, Message, Prompt, Tokenizer

TRAINED_ROLE = "assistant"


def tokenize_messages(
    conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer, *, bos_token: str | None, eos_token: str | None
) -> tuple[list[int], list[int]]:
    """Tokens, and a 1 for each that belongs to an assistant message. R-ONLINE-1.

    `bos_token` and `eos_token` are texts that the first and last message get where they lack them; None adds nothing.
    """
    prompts.split_conversations(conversation)  # each message must be one: R-SPLIT-2
    tokens: list[int] = []
    mask: list[int] = []
    before = ""
    for number, message in enumerate(conversation):
        so_far = rendered(conversation[: number + 1], prompt, tokenizer)
        text = so_far[first_difference(before, so_far) :]
        before = so_far
        if number == 0 and bos_token is not None and not text.startswith(bos_token):
            text = bos_token + text
        if number == len(conversation) - 1 and eos_token is not None and not text.rstrip("\n").endswith(eos_token):
            text = text + eos_token
        own = prompts.encode(text, tokenizer)
        tokens += own
        mask += [1 if message["role"] == TRAINED_ROLE else 0] * len(own)
    return tokens, mask


def rendered(messages: Sequence[Message], prompt: Prompt, tokenizer: Tokenizer) -> str:
    """The text of the first messages of a conversation."""
    return prompts.render(messages, prompt, tokenizer)


def first_difference(before: str, now: str) -> int:
    """Where two texts begin to differ; where one begins the other, its length."""
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return place
    return min(len(before), len(now))
