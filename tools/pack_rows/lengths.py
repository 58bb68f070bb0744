"""Measures conversations with the code that builds rows, and says by name which ones a prompt format refuses."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from production.errors import PackproofError, RowRefused
from production.refusals import refusal
from production.rows.builder import LONGEST, RowSettings, find_pad
from production.rows.token_facts import ControlTokens, prompt_messages, removed_switches, tokenizer_notes
from production.semantics import parse
from production.tokens.conversations import ConversationTokenizer, Tokenized
from production.tokens.fingerprint import fingerprint_tokenizer
from production.tokens.folder import load_folder
from production.tokens.format_fit import MISFIT_FIX, format_misfits, misfit_text
from production.tokens.message_keys import MessageKeys
from production.tokens.prompts import FORMATS, TURN_ROLES, Message, RowMessages, format_of
from production.tokens.turn_tokens import IGNORE_INDEX
from tools.pack_rows.conversation import Conversation, Refusal

PromptFormat = Literal["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"]
_MOST_CHARACTERS = 1 << 22
"""Text tokenized at once: enough for the tokenizer's threads."""
_NO_ID = -1
"""An id that no token has."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The size of one conversation, before any padding."""

    tokens: int
    """Tokens."""
    trained: int
    """Labels that count in a row, but for the first token's, as far as a row holds them."""
    trained_first: int
    """1 if the first token's label counts in a row where another conversation stands before this one, else 0."""
    masked_as_padding: int
    """Labels that would count if they were not the pad token's id (`padding_mask=by_value`)."""
    silent_messages: int
    """Messages with content of which nothing is rendered, such as tool messages in the Nemotron formats."""
    control_tokens: int
    """Control tokens that stand in contents as text."""
    prompt_messages: int
    """Messages of the system, users and tools that are trained, since the format masks none."""
    removed_switches: int
    """Messages that lose `/think` or `/no_think`, also within a word."""


class LengthMeter:
    """Measures conversations in one prompt format with one tokenizer."""

    def __init__(
        self,
        tokenizer_folder: Path,
        prompt_format: str,
        semantics: str,
        *,
        pack_length: int = LONGEST - 1,
        allow_format_misfit: bool = False,
        ignore_keys: Sequence[str] = (),
        pad_token: str | None = None,
    ) -> None:
        """Load the tokenizer; PackproofError where the folder, the format or the semantics are of no use, or do not fit each other.

        Labels beyond `pack_length` are not counted: a row cuts them off.
        """
        if prompt_format not in FORMATS:
            raise PackproofError(
                what=f"unknown prompt format {prompt_format!r}",
                where="prompt_format",
                fix=f"choose one of {', '.join(FORMATS)}",
            )
        self._format = format_of(prompt_format, parse(semantics))
        # Whatever the job would let pass: a packer has no reason to write a conversation of no token, or one whose
        # masks lie beside its turns.
        self._semantics = dataclasses.replace(parse(semantics), empty_conversation="refuse", turn_check="exact")
        if self._format.render is None and self._semantics.default_format == "refuse":
            raise PackproofError(
                what=f"the semantics {semantics} have no format 'default'",
                where="prompt_format",
                fix="choose another format or other semantics",
            )
        tokenizer = load_folder(tokenizer_folder)
        self.fingerprint = fingerprint_tokenizer(tokenizer)
        """How the tokenizer behaves."""
        self.vocab_size: int = len(tokenizer)
        """Ids in the vocabulary, added ones included."""
        if self._format.render is None and not tokenizer.chat_template:
            raise PackproofError(
                what="the format 'default' renders with the tokenizer's own chat template, and it has none",
                where=str(tokenizer_folder),
                fix="add chat_template.jinja, or choose another format",
            )
        if (misfits := format_misfits(tokenizer, prompt_format)) and not allow_format_misfit:
            raise PackproofError(
                what=misfit_text(prompt_format, misfits),
                where=str(tokenizer_folder),
                fix=f"{MISFIT_FIX}; --allow-format-misfit packs all the same",
            )
        settings = RowSettings(
            pack_length=pack_length, prompt_format=prompt_format, semantics=parse(semantics), pad_token=pad_token
        )
        self._pack_length, self._pad = pack_length, _pad(tokenizer, settings, tokenizer_folder)
        self.notes = tuple(tokenizer_notes(tokenizer, settings))
        """Facts about the rows that do not depend on their contents."""
        self.keys = MessageKeys.of_format(
            prompt_format, self._semantics, tokenizer, ignored=ignore_keys, ignore="--ignore-keys"
        )
        """Checks of message keys."""
        self._control_tokens = ControlTokens(tokenizer)
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
        is_masked = self._format.is_masked(self._semantics)
        while done < len(left):
            found = self._tokenizer.tokenize(row, first=done, last=row.count, characters=characters)
            for tokens, trained, trained_first, masked in self._labels(found):
                messages = conversations[left[done]].messages
                results[left[done]] = Measured(
                    tokens=tokens,
                    trained=trained,
                    trained_first=trained_first,
                    masked_as_padding=masked,
                    silent_messages=self._silent(messages),
                    control_tokens=self._control_tokens.count(messages),
                    prompt_messages=0 if is_masked else prompt_messages(messages),
                    removed_switches=removed_switches(messages, self._format.name),
                )
                done += 1
            characters = min(8 * characters, _MOST_CHARACTERS)
            if found.refused is not None:
                results[left[done]] = _placed(conversations[left[done]], found.refused)
                done += 1
                characters = 1_024
        assert None not in results
        return [result for result in results if result is not None]

    def _labels(self, found: Tokenized) -> Iterator[tuple[int, int, int, int]]:
        """Yield each conversation's tokens, its labels that count, its first label, and its labels masked as padding."""
        starts = found.lengths.cumsum() - found.lengths
        first = starts + 1  # the first token's label stands in the row before it
        last = np.maximum(starts + np.minimum(found.lengths, self._pack_length), first)
        counts = found.targets != IGNORE_INDEX
        is_pad = counts & (found.targets == self._pad)
        counts &= ~is_pad
        trained, masked = (_before(flags, last) - _before(flags, first) for flags in (counts, is_pad))
        is_first = counts[starts] & (self._semantics.boundary_label == "next")
        columns = (found.lengths, trained, is_first.astype(np.int64), masked)
        return zip(*(column.tolist() for column in columns), strict=True)

    def _silent(self, messages: Sequence[Message]) -> int:
        """Return how many messages with content have a role of which the format renders nothing."""
        rendered = self._format.rendered_roles
        if rendered is None:
            return 0
        return sum(message["role"] not in rendered and bool(message.get("content")) for message in messages)

    def _refusal(self, conversation: Conversation) -> Refusal | None:
        """Refuse a conversation that a row would accept but change in meaning."""
        is_masked = self._format.is_masked(self._semantics)
        for turn, message in enumerate(conversation.messages):
            role = message["role"]
            if len(message) > 2 and (fault := self.keys.fault(message)) is not None:
                number = turn - conversation.system_inserted
                return _refuse(conversation, fault[0], f"message {number}: {fault[1]}; {self.keys.fix(fault[0])}")
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


def _before(flags: NDArray[np.bool_], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many flags before each end are set."""
    return np.concatenate([[0], flags.cumsum(dtype=np.int64)])[ends]


def _pad(tokenizer: Any, settings: RowSettings, folder: Path) -> int:
    """Return the pad id if labels equal to it do not count, else an id that no token has. Raises PackproofError if the job's rows would have no pad id."""
    pad = find_pad(tokenizer, settings)
    if pad.id is None or not (pad.is_known or settings.semantics.unknown_pad_token == "unk"):
        lacks = "has no pad token and no end-of-text token" if pad.token is None else f"lacks the pad token {pad.token}"
        raise PackproofError(
            what=f"the tokenizer {lacks}, so a job refuses every row (no_pad_token)",
            where=str(folder),
            fix="name a token that it has with --pad-token, and with megatron_sft_pad_token in the job",
        )
    return pad.id if settings.semantics.padding_mask == "by_value" else _NO_ID


def _placed(conversation: Conversation, error: RowRefused) -> Refusal:
    # Messages are numbered as in the file, where an inserted one does not stand.
    turn = "" if error.turn is None else f"message {error.turn - conversation.system_inserted}: "
    return _refuse(conversation, error.kind, f"{turn}{error.what}; {error.fix}")


def _refuse(conversation: Conversation, kind: str, detail: str) -> Refusal:
    return Refusal(place=conversation.place, kind=kind, detail=detail)


def _as_row(conversations: Sequence[Sequence[Message]]) -> RowMessages:
    """Lay conversations end to end, split as in the file: a conversation may lack the system message at which a row splits."""
    messages = [message for conversation in conversations for message in conversation]
    bounds = [0, *itertools.accumulate(map(len, conversations))]
    return RowMessages(messages=messages, roles=[message["role"] for message in messages], bounds=bounds)
