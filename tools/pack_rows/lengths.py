"""Measures conversations with the code that builds rows, and says by name which ones a prompt format refuses."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from production.conversations import ConversationTokenizer
from production.errors import PackproofError, RowRefused
from production.prompts import FORMATS, TURN_ROLES, Message, RowMessages, count_unrendered
from production.refusals import refusal
from production.semantics import parse
from production.turns import IGNORE_INDEX
from tools.pack_rows.conversations import Conversation, Refusal

PromptFormat = Literal["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"]
_MOST_CHARACTERS = 1 << 22
"""Text tokenized at once: enough for the tokenizer's threads."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The size of one conversation, before any padding."""

    tokens: int
    """Tokens."""
    trained: int
    """Tokens that the format does not mask."""
    silent_messages: int
    """Messages with content of which nothing is rendered, such as tool messages in the Nemotron formats."""


class LengthMeter:
    """Measures conversations in one prompt format with one tokenizer."""

    def __init__(self, tokenizer_folder: Path, prompt_format: str, semantics: str) -> None:
        """Load the tokenizer; PackproofError where the folder, the format or the semantics are of no use."""
        if prompt_format not in FORMATS:
            raise PackproofError(
                what=f"unknown prompt format {prompt_format!r}",
                where="prompt_format",
                mend=f"choose one of {', '.join(FORMATS)}",
            )
        self._format = FORMATS[prompt_format]
        # Whatever the job would let pass: a packer has no reason to write a conversation of no token, or one whose
        # masks lie beside its turns.
        self._semantics = dataclasses.replace(parse(semantics), empty_conversation="refuse", turn_check="exact")
        if self._format.render is None and self._semantics.default_format == "refuse":
            raise PackproofError(
                what=f"the semantics {semantics} have no format 'default'",
                where="prompt_format",
                mend="choose another format or other semantics",
            )
        tokenizer = _load(tokenizer_folder)
        self.vocab_size: int = len(tokenizer)
        """Ids in the vocabulary, added ones included."""
        if self._format.render is None and not tokenizer.chat_template:
            raise PackproofError(
                what="the format 'default' renders with the tokenizer's own chat template, and it has none",
                where=str(tokenizer_folder),
                mend="add chat_template.jinja, or choose another format",
            )
        self._tokenizer = ConversationTokenizer(
            tokenizer=tokenizer,
            prompt_format=self._format,
            semantics=self._semantics,
            assistant_prefix_len=self._format.assistant_prefix_len,
        )

    def measure(self, conversations: Sequence[Conversation]) -> list[Measured | Refusal]:
        """Return the size of each conversation, or why it is refused."""
        results: list[Measured | Refusal | None] = [self._refusal(conversation) for conversation in conversations]
        left = [index for index, result in enumerate(results) if result is None]
        row = _as_row([conversations[index].messages for index in left])
        # The tokenizer stops at a refusal, and what it read beyond is lost: behind one, go on in small steps.
        done, characters = 0, _MOST_CHARACTERS
        while done < len(left):
            found = self._tokenizer.tokenize(row, first=done, last=row.count, characters=characters)
            ends = np.cumsum(found.lengths)
            trained = np.concatenate([[0], np.cumsum(found.targets != IGNORE_INDEX)])
            for end, length in zip(ends.tolist(), found.lengths.tolist(), strict=True):
                results[left[done]] = Measured(
                    tokens=length,
                    trained=int(trained[end] - trained[end - length]),
                    silent_messages=count_unrendered(_as_row([conversations[left[done]].messages]), self._format)[0]
                    or 0,
                )
                done += 1
            characters = min(8 * characters, _MOST_CHARACTERS)
            if found.refused is not None:
                results[left[done]] = _placed(conversations[left[done]], found.refused)
                done += 1
                characters = 1_024
        assert None not in results
        return [result for result in results if result is not None]

    def _refusal(self, conversation: Conversation) -> Refusal | None:
        """Return what a row takes without a word, and takes for something else than it was meant for."""
        is_masked = self._format.is_masked(self._semantics)
        for turn, message in enumerate(conversation.messages):
            role = message["role"]
            if role not in TURN_ROLES and role.lower() in TURN_ROLES and (is_masked or role.lower() == "system"):
                return _refuse(
                    conversation,
                    "role_case",
                    f"message {turn - conversation.system_inserted} has the role {role!r}, which neither splits a row nor is rendered; "
                    f"write {role.lower()!r}",
                )
            if is_masked and role == "assistant" and not message["content"]:
                # nemotron-h-aligned would call it a mismatch of the turn before, which helps nobody find it.
                return _placed(
                    conversation, refusal("empty_assistant", "an assistant message without content", turn=turn)
                )
        last = conversation.messages[-1]["role"]
        if self._semantics.row_ends == "system_to_assistant" and last != "assistant":
            return _refuse(conversation, "row_end", f"the last message has the role {last!r}; end with an answer")
        return None


def _placed(conversation: Conversation, error: RowRefused) -> Refusal:
    # Messages are numbered as in the file, where an inserted one does not stand.
    turn = "" if error.turn is None else f"message {error.turn - conversation.system_inserted}: "
    return _refuse(conversation, error.kind, f"{turn}{error.what}; {error.mend}")


def _refuse(conversation: Conversation, kind: str, detail: str) -> Refusal:
    return Refusal(place=conversation.place, kind=kind, detail=detail)


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise PackproofError(
            what="no such tokenizer folder",
            where=str(folder),
            mend="give the folder that holds tokenizer.json; packproof-build-tokenizer writes one",
        )
    from transformers import AutoTokenizer  # noqa: PLC0415 - its import takes seconds, and --help needs none of it

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise PackproofError(
            what=f"not a tokenizer that transformers can load: {error}",
            where=str(folder),
            mend="give the folder that holds tokenizer.json and tokenizer_config.json",
        ) from error


def _as_row(conversations: Sequence[Sequence[Message]]) -> RowMessages:
    """Conversations end to end, split where they were split: one may lack the system message that a row splits at."""
    messages = [message for conversation in conversations for message in conversation]
    bounds = [0, *itertools.accumulate(map(len, conversations))]
    return RowMessages(messages=messages, roles=[message["role"] for message in messages], bounds=bounds)
