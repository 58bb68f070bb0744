"""From messages to tokens and targets: the split, the four prompt formats, which tokens train, the turn checks.

Slow and literal: a conversation is rendered and encoded whole, then each of its turns again alone, as Megatron-LM does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

from reference.refusals import RowRefused
from reference.semantics import Semantics

IGNORE_INDEX = -100
"""The label of a token that does not train."""

Message = Mapping[str, Any]
Conversation = Sequence[Message]


class Tokenizer(Protocol):
    """Methods of a tokenizer that the rules use."""

    unk_id: int | None
    """The id of an unknown token, if the tokenizer has one."""
    pad_id: int | None
    eos_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without added special tokens; special strings inside the text become their ids. Raises TypeError for a text that cannot be encoded."""
        ...

    def render(self, conversation: Conversation, *, tools: Any = None, add_generation_prompt: bool = False) -> str:
        """Render a conversation by the tokenizer's own chat template. Raises LookupError for a tokenizer without a template.

        On the online path the template is also given the tools of the line, and may open the assistant's turn behind the last message.
        """
        ...

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks the token."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt format with its overrides (docs/SPEC.md#prompts)."""

    format: str
    """`nemotron-nano-v2`, `nemotron-h-aligned`, `identity` or `default`."""
    pad_token: str | None = None
    """Replaces the format's pad token."""
    assistant_prefix_len: int | None = None
    """Replaces the format's assistant prefix, in tokens."""
    null_content: str = "nothing"
    """`Semantics.null_content`, which `tokenize_conversation` fills in."""


PAD_TOKENS = {"nemotron-nano-v2": "<unk>", "nemotron-h-aligned": "<SPECIAL_233>", "identity": "<unk>"}
ASSISTANT_PREFIX = {"nemotron-nano-v2": 3, "nemotron-h-aligned": 0, "identity": 0, "default": 0}
ROLES = ("system", "user", "assistant", "tool")
RENDERED_ROLES = ("system", "user", "assistant")
"""Roles that the two Nemotron formats render; all others render nothing."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn's place in its conversation."""

    role: str
    start: int
    """First token, counted in the conversation."""
    end: int


@dataclass(frozen=True, kw_only=True)
class TokenizedConversation:
    """Tokens and targets of one conversation, not yet shifted."""

    tokens: list[int]
    targets: list[int]
    """The token where it trains, IGNORE_INDEX where not."""
    turns: list[Turn]
    """Place of each turn; empty in formats that are not masked."""


def split_conversations(messages: Sequence[Message]) -> list[list[Message]]:
    """Split a row before every system message. R-SPLIT-1, R-SPLIT-2."""
    conversations: list[list[Message]] = []
    for number, message in enumerate(messages):
        check_message(message, number)
        if message["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def check_message(message: object, number: int) -> None:
    """Refuse a value that is not a message. R-SPLIT-2."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise RowRefused("bad_message", f"message {number} of the row must be a mapping with a role")


def check_row_ends(messages: Sequence[Message], semantics: Semantics) -> None:
    """Refuse a row that does not run from a system to an assistant message, where that is asked. R-ENDS-1."""
    if semantics.row_ends == "system_to_assistant":
        check_message(messages[0], 0)
        if messages[0]["role"] != "system":
            raise RowRefused("row_start", f"the row starts with role {messages[0]['role']!r}; it must be 'system'")
        check_message(messages[-1], len(messages) - 1)
        if messages[-1]["role"] != "assistant":
            raise RowRefused("row_end", f"the row ends with role {messages[-1]['role']!r}; it must be 'assistant'")


def pad_id(tokenizer: Tokenizer, prompt: Prompt) -> int | None:
    """Return the pad id of a format: the unknown id, or None, if the vocabulary lacks the pad token. R-PAD-1."""
    if prompt.format == "default" and prompt.pad_token is None:
        return tokenizer.pad_id if tokenizer.pad_id is not None else tokenizer.eos_id
    found = tokenizer.token_to_id(pad_token(prompt))
    return found if found is not None else tokenizer.unk_id


def check_pad_token(tokenizer: Tokenizer, prompt: Prompt, semantics: Semantics) -> None:
    """Refuse a pad token that the vocabulary lacks, where that is asked. R-PAD-1."""
    if semantics.unknown_pad_token == "refuse":
        if prompt.format == "default" and prompt.pad_token is None:
            if pad_id(tokenizer, prompt) is None:
                raise RowRefused("no_pad_token", "the tokenizer has neither a pad nor an eos token; set pad_token")
        elif tokenizer.token_to_id(pad_token(prompt)) is None:
            raise RowRefused("no_pad_token", f"the vocabulary lacks {pad_token(prompt)!r}; set pad_token to one it has")


def pad_token(prompt: Prompt) -> str:
    """Return the pad token's text, for a format that has one."""
    return prompt.pad_token if prompt.pad_token is not None else PAD_TOKENS[prompt.format]


def is_masked(prompt: Prompt, semantics: Semantics) -> bool:
    """Return whether the format masks the prompt and checks its turns (docs/SPEC.md#targets-and-turns)."""
    if prompt.format == "identity":
        return semantics.identity_prompt == "masked"
    return prompt.format != "default"


def render(conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer, **options: Any) -> str:
    """Return the text of a conversation; `options` are those of `Tokenizer.render`. R-RENDER-1 to R-RENDER-4."""
    if prompt.format == "default":
        return render_own_template(conversation, tokenizer, **options)
    return "".join(render_message(message, prompt.format, prompt.null_content) for message in conversation)


def render_message(message: Message, prompt_format: str, null_content: str = "nothing") -> str:
    """Return the text of one message in a format that renders messages one by one. R-RENDER-1, R-RENDER-2, R-RENDER-3."""
    if prompt_format == "identity":
        content = message.get("content", "")
        return "" if content is None and null_content == "nothing" else str(content)
    if message["role"] not in RENDERED_ROLES:
        return ""
    content = message.get("content")
    if not isinstance(content, str):
        raise RowRefused(
            "bad_content", f"content of role {message['role']!r} must be text, got {type(content).__name__}"
        )
    if prompt_format == "nemotron-h-aligned":
        content = content.strip()
        return {
            "system": f"<SPECIAL_10>System\n{content}\n",
            "user": f"<SPECIAL_11>User\n{content}\n<SPECIAL_11>Assistant\n",
            "assistant": f"{content}\n",
        }[message["role"]]
    if message["role"] != "assistant":
        content = content.replace("/think", "").replace("/no_think", "")
    content = content.strip()
    return {
        "system": f"<SPECIAL_10>System\n{content}\n",
        "user": f"<SPECIAL_11>User\n{content}\n",
        "assistant": f"<SPECIAL_11>Assistant\n{content}\n<SPECIAL_12>\n",
    }[message["role"]]


def render_own_template(conversation: Conversation, tokenizer: Tokenizer, **options: Any) -> str:
    """Render by the tokenizer's own chat template. R-RENDER-4."""
    try:
        return tokenizer.render(conversation, **options)
    except LookupError as error:
        if isinstance(error, (KeyError, IndexError)):  # the template's own, not "there is none"
            raise RowRefused("template_error", f"the tokenizer's chat template failed: {error!r}") from error
        raise RowRefused("no_chat_template", "the tokenizer has no chat template; choose another format") from error
    except Exception as error:  # a template may raise anything
        raise RowRefused("template_error", f"the tokenizer's chat template failed: {error!r}") from error


def encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text. R-ENCODE-1."""
    try:
        return tokenizer.encode(text)
    except TypeError as error:
        raise RowRefused("bad_text", "the text cannot be encoded (a lone surrogate?); correct the content") from error


def tokenize_conversation(
    conversation: Conversation, prompt: Prompt, tokenizer: Tokenizer, semantics: Semantics
) -> TokenizedConversation:
    """Return tokens and targets of a conversation. R-ENCODE-1, R-TARGET-1, R-TURN-1 to R-TURN-3, R-EMPTY-1."""
    prompt = replace(prompt, null_content=semantics.null_content)
    tokens = encode(render(conversation, prompt, tokenizer), tokenizer)
    targets = list(tokens)
    turns: list[Turn] = []
    masked = is_masked(prompt, semantics)

    idx = 0
    for number, message in enumerate(conversation):
        if masked or semantics.turn_rules == "every_format":
            check_turn(conversation, number, semantics)
        if masked:
            turn_tokens = encode(render([message], prompt, tokenizer), tokenizer)
            end = idx + masked_length(message, len(turn_tokens), number, prompt, semantics)
            for position in range(idx, min(end, len(tokens))):
                targets[position] = IGNORE_INDEX
            if not matches(tokens[idx : idx + len(turn_tokens)], turn_tokens, semantics):
                raise RowRefused(
                    "turn_mismatch",
                    "the turn has other tokens encoded alone than in its place; choose a format whose turns do not merge",
                    turn=number,
                )
            turns.append(Turn(role=message["role"], start=idx, end=idx + len(turn_tokens)))
            idx += len(turn_tokens)
    if masked and idx != len(tokens):
        raise RowRefused(
            "turn_mismatch",
            f"the turns encoded alone have {idx} tokens, and the whole conversation {len(tokens)}; the numbers must be equal",
        )

    if not tokens and semantics.empty_conversation == "refuse":
        raise RowRefused("empty_conversation", "the conversation has no token; remove it")
    return TokenizedConversation(tokens=tokens, targets=targets, turns=turns)


def check_turn(conversation: Conversation, number: int, semantics: Semantics) -> None:
    """Refuse a turn for its role, its order or its emptiness. R-TURN-1a to 1d, R-TURN-2."""
    exact = semantics.turn_rules == "every_format"
    if not isinstance(conversation[number]["role"], str):
        raise RowRefused("bad_message", "the role is not text", turn=number)
    role = conversation[number]["role"]
    if exact and role not in ROLES:
        raise RowRefused("unknown_role", f"role must be exactly one of {', '.join(ROLES)}, got {role!r}", turn=number)

    if role.lower() == "assistant":
        content = conversation[number].get("content")
        if not isinstance(content, Sized):
            raise RowRefused(
                "bad_content",
                "an assistant turn's content must be text, and is missing or of another type",
                turn=number,
            )
        if len(content) == 0:
            raise RowRefused("empty_assistant", "an assistant turn is empty; remove the conversation", turn=number)

        if number == 0 and semantics.turn_rules != "masked_formats":
            raise RowRefused("role_order", "the conversation starts with an assistant turn", turn=number)
        before = conversation[number - 1]["role"]  # the first turn's predecessor is the last turn: upstream wraps
        if not isinstance(before, str):
            raise RowRefused("bad_message", "the role before an assistant turn is not text", turn=number)
        if before.lower() not in ("user", "tool"):
            raise RowRefused(
                "role_order", f"an assistant turn follows {before!r}, not a user or tool turn", turn=number
            )

    if role.lower() not in ROLES:
        raise RowRefused("unknown_role", f"role must be one of {', '.join(ROLES)}, got {role!r}", turn=number)


def masked_length(message: Message, length: int, number: int, prompt: Prompt, semantics: Semantics) -> int:
    """Return the number of tokens at the start of a turn of this length that do not train. R-TARGET-1, R-PREFIX-1, R-TURN-3."""
    if message["role"].lower() != "assistant":
        return length
    prefix = prompt.assistant_prefix_len
    prefix = ASSISTANT_PREFIX[prompt.format] if prefix is None else prefix
    if prefix > length and semantics.long_assistant_prefix == "refuse":
        why = f"the assistant prefix is {prefix} tokens, the turn {length}; set assistant_prefix_len"
        raise RowRefused("prefix_too_long", why, turn=number)
    return prefix


def matches(whole: list[int], alone: list[int], semantics: Semantics) -> bool:
    """Return whether a turn's tokens within the conversation equal the turn's tokens encoded alone. R-TURN-1e."""
    if semantics.turn_check == "exact":
        return whole == alone
    if len(whole) != len(alone):
        if 1 not in (len(whole), len(alone)):
            return False
        length = 0 if 0 in (len(whole), len(alone)) else max(len(whole), len(alone))
        whole, alone = (ids if len(ids) == length else (ids * length)[:length] for ids in (whole, alone))
    return all(abs(a - b) <= 1e-8 + 1e-5 * abs(b) for a, b in zip(whole, alone, strict=True))
