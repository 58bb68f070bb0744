"""Split rows into conversations, and render conversations to text in the four prompt formats.

Rendering is plain Python per message, about 1 µs each, a tenth of what a template engine takes.

Reference: `reference/prompts.py`, docs/SPEC.md#input and #prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from production.refusals import refusal
from production.semantics import Semantics

Message = Mapping[str, Any]
Conversation = Sequence[Message]

TURN_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """Holds one format of the table in docs/SPEC.md#prompts."""

    name: str
    """One of FORMATS."""
    render: Callable[[Conversation, list[str]], None] | None
    """Appends the text of each message; None where only the tokenizer's template knows."""
    turn_starts: tuple[str, ...] = ()
    """Special tokens that a rendered message may begin with."""
    markers: tuple[str, ...] = ()
    """Texts that the format writes around contents, each of which must be one token of the tokenizer (R-FIT-1)."""
    assistant_header: str = ""
    """Beginning of an assistant turn, whose tokens are the prefix that is not trained (R-FIT-2)."""
    rendered_roles: tuple[str, ...] | None = None
    """Roles that render; None if all do."""
    pad_token: str | None = None
    """The format's pad token; None: the tokenizer's pad token, else its eos token."""
    assistant_prefix_len: int = 0
    """Number of tokens at the start of an assistant turn that are not trained."""

    def is_masked(self, semantics: Semantics) -> bool:
        """Return whether prompts are not trained (docs/SPEC.md#targets-and-turns)."""
        return self.assistant_format or (self.name == "identity" and semantics.identity_prompt == "masked")

    @property
    def assistant_format(self) -> bool:
        """Return whether the format is one of the two Nemotron formats."""
        return self.rendered_roles is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMessages:
    """Holds the messages of a row, and the beginnings of its conversations."""

    messages: Sequence[Message]
    """All messages of the row."""
    roles: list[Any]
    """The role of each."""
    bounds: list[int]
    """[C + 1]: conversation i is `messages[bounds[i]:bounds[i + 1]]`."""

    @property
    def count(self) -> int:
        """Return C, the number of conversations."""
        return len(self.bounds) - 1

    def conversation(self, number: int) -> Conversation:
        """Return the messages of one conversation."""
        return self.messages[self.bounds[number] : self.bounds[number + 1]]


def split_conversations(messages: Sequence[Any]) -> RowMessages:
    """Split a row into conversations, each of which begins at a message with the role `system` (R-SPLIT-1).

    Refuses `bad_message` (R-SPLIT-2).
    """
    roles: list[Any] | None = None
    if set(map(type, messages)) == {dict}:
        with contextlib.suppress(KeyError):  # the usual row, in one sweep; what is wrong with another is found below
            roles = [message["role"] for message in messages]
    if roles is None:
        roles = list(_roles_one_by_one(messages))
    starts = [index for index, role in enumerate(roles) if role == "system" and index]
    return RowMessages(messages=messages, roles=roles, bounds=[0, *starts, len(messages)])


def check_row_ends(messages: Sequence[Any]) -> None:
    """Refuse a row that does not run from a system to an assistant message, or whose first or last message has no role (R-ENDS-1)."""
    for index, role, kind, name in ((0, "system", "row_start", "first"), (-1, "assistant", "row_end", "last")):
        message = messages[index]
        if not isinstance(message, Mapping) or "role" not in message:
            raise refusal("bad_message", f"the row's {name} message {_lacks(message)}")
        if message["role"] != role:
            raise refusal(kind, f"the {name} message has the role {message['role']!r}")


def count_unrendered(row: RowMessages, prompt_format: PromptFormat) -> tuple[int | None, int | None]:
    """Return `unrendered_messages` and `unknown_keys` of the report (R-REPORT-3)."""
    if prompt_format.render is None:
        return None, None
    rendered = prompt_format.rendered_roles
    other = [] if rendered is None else [index for index, role in enumerate(row.roles) if role not in rendered]
    # A message has a role; two keys of which one is the content leave no room for another.
    odd = [message for message in row.messages if len(message) > 2 or "content" not in message]
    return sum(bool(row.messages[index].get("content")) for index in other), sum(map(_has_unknown_key, odd))


def render_messages(conversation: Conversation, prompt_format: PromptFormat, number: int) -> list[str]:
    """Return the text of each message (R-RENDER-1 to 3).

    Refuses `bad_content`; `number` is the conversation's place in the row.
    """
    assert prompt_format.render is not None
    texts: list[str] = []
    try:
        prompt_format.render(conversation, texts)
    except _ContentError as error:
        raise refusal("bad_content", str(error), conversation=number, turn=len(texts)) from None
    return texts


def render_template(
    conversation: Conversation, tokenizer: Any, number: int, *, tools: Any = None, add_generation_prompt: bool = False
) -> str:
    """Return the text of a conversation through the tokenizer's own template (R-RENDER-4). Raises RowRefused where there is none or it fails.

    `tools` and `add_generation_prompt` are the online path's (R-ONLINE-1).
    """
    template = tokenizer.chat_template
    if template is None:
        raise refusal("no_chat_template", "the tokenizer has no chat template", conversation=number)
    try:
        text: str = tokenizer.apply_chat_template(
            conversation,
            chat_template=template,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            return_assistant_token_mask=False,  # no option of transformers: a variable that the template sees, as in Megatron-LM
        )
    except Exception as error:  # a template raises what it likes
        raise refusal("template_error", f"{type(error).__name__}: {error}", conversation=number) from error
    return text


_RENDERED_ROLES = ("system", "user", "assistant")  # a tuple: a role may be a list, which a set cannot be asked for


class _ContentError(TypeError):
    """A content is not text; the caller knows the turn."""


def _text(message: Message, content: Any) -> str:
    if isinstance(content, str):
        return content
    raise _ContentError(
        f"the content must be text, got {type(content).__name__}"
        if "content" in message
        else "the message must have content"
    )


def _nemotron_nano_v2(conversation: Conversation, texts: list[str]) -> None:
    for message in conversation:
        role = message["role"]
        if role not in _RENDERED_ROLES:
            texts.append("")
            continue
        content = message.get("content")
        text = content if type(content) is str else _text(message, content)
        if role == "assistant":
            texts.append(f"<SPECIAL_11>Assistant\n{text.strip()}\n<SPECIAL_12>\n")
            continue
        if "/" in text:
            text = text.replace("/think", "").replace("/no_think", "")
        if role == "user":
            texts.append(f"<SPECIAL_11>User\n{text.strip()}\n")
        else:
            texts.append(f"<SPECIAL_10>System\n{text.strip()}\n")


def _nemotron_h_aligned(conversation: Conversation, texts: list[str]) -> None:
    for message in conversation:
        role = message["role"]
        if role not in _RENDERED_ROLES:
            texts.append("")
            continue
        content = message.get("content")
        text = content if type(content) is str else _text(message, content)
        if role == "assistant":
            texts.append(f"{text.strip()}\n")
        elif role == "user":
            texts.append(f"<SPECIAL_11>User\n{text.strip()}\n<SPECIAL_11>Assistant\n")
        else:
            texts.append(f"<SPECIAL_10>System\n{text.strip()}\n")


def _identity(conversation: Conversation, texts: list[str]) -> None:
    for message in conversation:
        content = message.get("content")
        texts.append(content if isinstance(content, str) else "" if content is None else str(content))


def _identity_with_nulls(conversation: Conversation, texts: list[str]) -> None:
    texts.extend(str(message.get("content", "")) for message in conversation)


def _roles_one_by_one(messages: Sequence[Any]) -> Iterator[Any]:
    conversation = start = 0
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            what = f"the message {_lacks(message)}"
            raise refusal("bad_message", what, conversation=conversation, turn=index - start)
        if message["role"] == "system" and index:
            conversation, start = conversation + 1, index
        yield message["role"]


def _lacks(message: object) -> str:
    return "has no role" if isinstance(message, Mapping) else f"is a {type(message).__name__}, no object"


def _has_unknown_key(message: Message) -> bool:
    return any(value is not None and key not in {"role", "content"} for key, value in message.items())


FORMATS: dict[str, PromptFormat] = {
    known.name: known
    for known in (
        PromptFormat(
            name="nemotron-nano-v2",
            render=_nemotron_nano_v2,
            turn_starts=("<SPECIAL_10>", "<SPECIAL_11>"),
            markers=("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
            assistant_header="<SPECIAL_11>Assistant\n",
            rendered_roles=_RENDERED_ROLES,
            pad_token="<unk>",
            assistant_prefix_len=3,
        ),
        PromptFormat(
            name="nemotron-h-aligned",
            render=_nemotron_h_aligned,
            turn_starts=("<SPECIAL_10>", "<SPECIAL_11>"),
            markers=("<SPECIAL_10>", "<SPECIAL_11>"),
            rendered_roles=_RENDERED_ROLES,
            pad_token="<SPECIAL_233>",
        ),
        PromptFormat(name="identity", render=_identity, pad_token="<unk>"),
        PromptFormat(name="default", render=None),
    )
}
"""The four prompt formats, by name."""


def format_of(name: str, semantics: Semantics) -> PromptFormat:
    """Return the format called `name` as it renders under these semantics (R-RENDER-3)."""
    if name == "identity" and semantics.null_content == "text":
        return replace(FORMATS[name], render=_identity_with_nulls)
    return FORMATS[name]
