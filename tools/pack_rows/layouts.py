"""Turn lines of other chat layouts, ShareGPT and Alpaca, into messages; what a layout cannot say is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tools.pack_rows.conversation import ConversationError

Layout = Literal["auto", "messages", "sharegpt", "alpaca"]
LAYOUTS = ("messages", "sharegpt", "alpaca")
SHAREGPT_KEY = "conversations"
_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
"""ShareGPT's names of speakers, and our roles."""
_ALPACA = ("instruction", "input", "output", "system", "history")


def layout_of(record: Mapping[str, Any], chat_key: str) -> str:
    """Return the layout that a line has; `messages` where it resembles none, whose reader then names the fault."""
    if isinstance(record.get(chat_key), list) and not _is_turns(record[chat_key]):
        return "messages"
    if any(_is_turns(record.get(key)) for key in (SHAREGPT_KEY, chat_key)):
        return "sharegpt"
    return "alpaca" if {"instruction", "output"} <= record.keys() else "messages"


def messages_of(record: Mapping[str, Any], layout: str, chat_key: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a line's messages, and the keys beside them that no message holds. Raises ConversationError."""
    return _sharegpt(record, chat_key) if layout == "sharegpt" else _alpaca(record)


def _is_turns(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and {"from", "value"} <= value[0].keys()
    )


def _sharegpt(record: Mapping[str, Any], chat_key: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    key = SHAREGPT_KEY if SHAREGPT_KEY in record else chat_key
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        raise ConversationError(
            "sharegpt_shape", f"the line has no list of turns under {key!r}; give --layout if it is of another layout"
        )
    messages = []
    if (system := record.get("system")) is not None and system != "":
        messages.append({"role": "system", "content": _text(system, "sharegpt_shape", "system")})
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
            raise ConversationError("sharegpt_shape", f"turn {index} lacks `from` or `value`; write both")
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise ConversationError(
                "unknown_role",
                f"turn {index} is from {speaker!r}; the speakers are {', '.join(_ROLES)}; the Nemotron formats render nothing of the last three, whose role becomes tool",
            )
        message = {"role": _ROLES[speaker], "content": _text(turn["value"], "sharegpt_shape", f"turn {index}")}
        messages.append(message | {name: value for name, value in turn.items() if name not in ("from", "value")})
    return messages, {name: value for name, value in record.items() if name not in (key, "system")}


def _alpaca(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if not {"instruction", "output"} <= record.keys():
        raise ConversationError(
            "alpaca_shape", "the line lacks `instruction` or `output`; give --layout if it is of another layout"
        )
    messages = []
    if system := record.get("system"):
        messages.append({"role": "system", "content": _text(system, "alpaca_shape", "system")})
    for question, answer in _history(record.get("history")):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = _text(record["instruction"], "alpaca_shape", "instruction")
    if more := record.get("input"):
        asked = f"{asked}\n\n{_text(more, 'alpaca_shape', 'input')}"
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": _text(record["output"], "alpaca_shape", "output")})
    return messages, {name: value for name, value in record.items() if name not in _ALPACA}


def _history(value: Any) -> Iterator[tuple[str, str]]:
    for index, pair in enumerate(value or ()):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise ConversationError("alpaca_shape", f"entry {index} of history must be a pair of texts")
        yield pair[0], pair[1]


def _text(value: Any, kind: str, name: str) -> str:
    if not isinstance(value, str):
        raise ConversationError(kind, f"{name} is a {type(value).__name__}, not text")
    return value
