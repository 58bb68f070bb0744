"""Honour or refuse message keys that say what to train, or hold text that is not rendered (SPEC R-KEYS-1, R-KEYS-2).

Megatron-LM reads `role` and `content` alone, so a row never honours another key: what it would ignore is refused before it is built.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from production.errors import RowRefused
from production.semantics import Semantics
from production.tokens.prompts import FORMATS, Message

TRAIN_KEYS = (
    "weight",
    "train",
    "training",
    "trainable",
    "loss",
    "loss_scale",
    "loss_weight",
    "loss_mask",
    "train_detail",
)
"""Keys by which other trainers learn that a message trains: true or 1, or by how much."""
MASK_KEYS = ("mask", "masked", "ignore_loss", "no_loss")
"""Keys by which other trainers learn that a message does not train."""
TEXT_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call")
"""Keys of a message that hold text beside its content."""
LINE_TEXT_KEYS = ("tools", "functions", "system", "documents")
"""Keys of a line that hold text beside its messages."""

TRAINING_KEY, UNREAD_KEY = "training_key", "unread_key"
"""The kinds of refusal."""


class MessageKeys:
    """Checks the keys of messages under one format; `ignored` are the keys that a user has said to pass over."""

    def __init__(
        self, *, trained_roles: Collection[str] | None, template: str | None, ignored: Collection[str], ignore: str
    ) -> None:
        """`trained_roles` None: all train. `template` reads keys by name. `ignore` names the option or key that lists the ignored ones."""
        self._trained_roles = trained_roles
        self._template = template
        self._ignored = frozenset(ignored)
        self._ignore = ignore

    @classmethod
    def of_format(
        cls, prompt_format: str, semantics: Semantics, tokenizer: Any, *, ignored: Collection[str], ignore: str
    ) -> MessageKeys:
        """Return the checks of packed rows in a prompt format."""
        chosen = FORMATS[prompt_format]
        template = getattr(tokenizer, "chat_template", None) if chosen.render is None else None
        return cls(
            trained_roles=("assistant",) if chosen.is_masked(semantics) else None,
            template=template if isinstance(template, str) else None,
            ignored=ignored,
            ignore=ignore,
        )

    def check(self, messages: Sequence[Any]) -> None:
        """Refuse the first message with a key that its row would ignore. Raises RowRefused (`training_key`, `unread_key`)."""
        if set(map(type, messages)) == {dict} and max(map(len, messages)) <= 2:
            return  # the usual row: role and content leave no room for another key
        conversation = start = 0
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                continue  # refused where rows are built
            if index and message.get("role") == "system":
                conversation, start = conversation + 1, index
            if len(message) > 2 and (why := self.fault(message)) is not None:
                raise self._refused(*why, conversation, index - start)

    def fault(self, message: Message) -> tuple[str, str] | None:
        """Return the kind and the text of the fault of a message's keys; None without a fault."""
        role = message.get("role")
        known = self._trained_roles
        trains = known is None or (isinstance(role, str) and role.lower() in known)
        for key, value in message.items():
            if value is None or key in self._ignored:
                continue
            if key in TRAIN_KEYS or key in MASK_KEYS:
                wanted = _as_bool(value)
                wanted = wanted if wanted is None or key in TRAIN_KEYS else not wanted
                if wanted is not trains:
                    does = "trains" if trains else "does not train"
                    return TRAINING_KEY, f"the key {key!r} is {_shown(value)}, and a row {does} a message of the role {role!r} whatever it says"  # fmt: skip
            elif key in TEXT_KEYS and value and not (self._template and key in self._template):
                return UNREAD_KEY, f"the key {key!r} holds text that is not rendered, so it is neither read nor trained"
        return None

    def fault_of_line(self, keys: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return the fault of the keys that stand beside the messages in a line."""
        for key, value in keys.items():
            if value is None or key in self._ignored:
                continue
            if (key in TRAIN_KEYS and _as_bool(value) is not True) or (
                key in MASK_KEYS and _as_bool(value) is not False
            ):
                return TRAINING_KEY, f"the key {key!r} beside the messages is {_shown(value)}, and a row cannot hold it"
            if key in LINE_TEXT_KEYS and value:
                return UNREAD_KEY, f"the key {key!r} beside the messages holds text that is not rendered"
        return None

    def fix(self, kind: str) -> str:
        """Return the fix for the user."""
        first = (
            "split the conversation so that what trains stands in messages that do, or take the key out"
            if kind == TRAINING_KEY
            else "write the text into the content, as the model should read it, or take the key out"
        )
        return f"{first}; to train as if the key were not there, name it in {self._ignore}"

    def _refused(self, kind: str, what: str, conversation: int, turn: int) -> RowRefused:
        where = f"conversation {conversation}, turn {turn}"
        return RowRefused(
            kind=kind, what=what, where=where, fix=self.fix(kind), conversation=conversation, turn=turn
        )  # fmt: skip


def _as_bool(value: Any) -> bool | None:
    """Return True for True and 1, False for False and 0; None for anything else, such as a share."""
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
