"""Note and count tokens that differ from what their author may have meant, by tokenizer, format and file (SPEC
R-TOLD-1 and 2).

No note changes a row: rows are Megatron-LM's. docs/spec-tokens.md says what `strict` does about each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from production.rows.builder import RowSettings, find_pad
from production.tokens.format_fit import format_misfits, misfit_text
from production.tokens.prompts import FORMATS, Message

_MARKER_IN_TEMPLATE = re.compile(r"<\|[A-Za-z0-9_]+\|>|<SPECIAL_\d+>|<(?:start|end)_of_turn>")


@dataclass(frozen=True, kw_only=True)
class Note:
    """Holds one note for the user."""

    kind: str
    """One word for the note's kind."""
    text: str
    """The fact, and how to change it."""


def tokenizer_notes(tokenizer: Any, settings: RowSettings) -> list[Note]:
    """Return what must be known of rows of these settings whatever stands in them."""
    chosen, semantics = FORMATS[settings.prompt_format], settings.semantics
    notes = [*_pad_notes(tokenizer, settings)]
    if misfits := format_misfits(tokenizer, chosen.name, assistant_prefix_len=settings.assistant_prefix_len):
        notes.append(Note(kind="format_misfit", text=misfit_text(chosen.name, misfits)))
    if not chosen.is_masked(semantics):
        fix = (
            "semantics with identity_prompt=masked mask them"
            if chosen.name == "identity"
            else "a format with masks does not"
        )
        text = f"the format {chosen.name} trains prompts, since it masks no message: system, user and tool messages count in the loss; {fix}"
        notes.append(Note(kind="trains_prompts", text=text))
    if chosen.render is None:
        notes += template_notes(tokenizer)
    return notes


def template_notes(tokenizer: Any) -> list[Note]:
    """Return what must be known of a tokenizer's chat template."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return []
    notes = []
    if "strftime_now" in template:
        text = (
            "the chat template reads the clock (strftime_now): the same conversation has other tokens tomorrow, so neither lengths nor a "
            "resume can be repeated; write the date into the template, or into the system messages"
        )
        notes.append(Note(kind="reads_clock", text=text))
    for marker in dict.fromkeys(_MARKER_IN_TEMPLATE.findall(template)):
        ids = tokenizer(marker, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            text = f"the chat template writes {marker}, which is {len(ids)} tokens of this tokenizer, not one: use the template of this tokenizer"
            notes.append(Note(kind="split_marker", text=text))
    return notes


def _pad_notes(tokenizer: Any, settings: RowSettings) -> Iterable[Note]:
    chosen, by_value = FORMATS[settings.prompt_format], settings.semantics.padding_mask == "by_value"
    pad = find_pad(tokenizer, settings)
    if pad.id is None:
        return
    if not pad.is_known:
        text = (
            f"the vocabulary lacks the pad token {pad.token}: padding gets the unknown id {pad.id}"
            + (", and contents with unknown characters are not trained there (padding_mask=by_value)" if by_value else "")
            + "; name a pad token that the tokenizer has"
        )  # fmt: skip
        yield Note(kind="pad_missing", text=text)
    ends = {
        tokenizer.convert_tokens_to_ids(token): token
        for token in (*chosen.markers, tokenizer.eos_token)
        if token is not None
    }
    if pad.is_known and pad.id in ends:
        does = (
            "padding_mask=by_value masks it wherever it stands, so the end of an answer is never trained; name another pad token, or "
            "choose semantics with padding_mask=by_position"
            if by_value
            else "padding is masked by its position, so the end of an answer is trained"
        )
        also = "which the format writes" if ends[pad.id] in chosen.markers else "the end-of-text token"
        yield Note(
            kind="pad_is_eos", text=f"the pad token {pad.token} (id {pad.id}) is also {ends[pad.id]}, {also}: {does}"
        )


class ControlTokens:
    """Counts control tokens that stand in contents as text: encoded, they become the tokens themselves (R-ENCODE-1)."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._texts = frozenset(text for text in texts if text)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        # A token's first characters are looked for at once; the bracket alone begins too much of a web page.
        begins = {text[: min(3, self._lengths[-1])] for text in self._texts}
        self._first = re.compile("|".join(sorted(map(re.escape, begins)))) if begins else None
        self._characters = sorted({text[0] for text in self._texts})

    def find(self, text: str) -> list[str]:
        """Return the control tokens in a text, in order, the longest at a place."""
        found: list[str] = []
        end = 0
        for match in self._first.finditer(text) if self._first is not None else ():
            start = match.start()
            if start < end:
                continue
            for length in self._lengths:
                if (piece := text[start : start + length]) in self._texts:
                    found.append(piece)
                    end = start + length
                    break
        return found

    def count(self, messages: Sequence[Message]) -> int:
        """Return the number of control tokens in the contents of these messages."""
        contents = [content for message in messages if isinstance(content := message.get("content"), str)]
        together = "\n".join(contents)  # most messages have none of the characters with which control tokens begin
        if not any(character in together for character in self._characters):
            return 0
        return sum(len(self.find(content)) for content in contents)


def holds_several(messages: Sequence[Message]) -> bool:
    """Return whether a line holds several conversations, as only a packed row does."""
    return [message.get("role") for message in messages].count("system") > 1


def chat_file_note(file: str, rows: Sequence[Sequence[Message]], *, has_manifest: bool) -> str | None:
    """Return the note on a chat file that is read as packed rows, by its first rows; None for rows that are packed."""
    if len(rows) < 2 or has_manifest or any(map(holds_several, rows)):
        return None
    return (
        f"{file}: each of its first {len(rows)} lines is one conversation, and it has no manifest of packed rows: every row will be one "
        "conversation and padding. If it is a chat file, pack it (packproof-pack-rows), or train it on the online path (dataset_name: openai_format)"
    )


def prompt_messages(messages: Sequence[Message]) -> int:
    """Return how many messages are of another role than the assistant's; a format without masks trains these, too."""
    return sum(message.get("role") != "assistant" and bool(message.get("content")) for message in messages)


def removed_switches(messages: Sequence[Message], prompt_format: str) -> int:
    """Return how many messages lose `/think` or `/no_think` from their content, also within a word (R-RENDER-1)."""
    if prompt_format != "nemotron-nano-v2":
        return 0
    contents = [
        content
        for message in messages
        if message.get("role") in ("system", "user") and isinstance(content := message.get("content"), str)
    ]
    together = "\n".join(contents)
    if "/think" not in together and "/no_think" not in together:  # neither spans a line
        return 0
    return sum("/think" in content or "/no_think" in content for content in contents)
