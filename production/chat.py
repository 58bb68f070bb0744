"""Ordinary chat conversations to tokens and masks, message by message, as the online path wants them (R-ONLINE-1).

All messages of all conversations are encoded in one batch. A chat template is rendered once for every message of a
conversation, since only that tells where each begins: quadratic in its length, as it is where NeMo-RL does it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from production.encoder import TextEncoder, UnencodableError
from production.errors import PackproofError
from production.prompts import FORMATS, Message, RowMessages, render_messages, render_template, split_conversations
from production.rectangle import Conversation
from production.refusals import refusal
from production.semantics import nearest

TRAINED_ROLE = "assistant"


class ChatTokenizer:
    """Tokenizes conversations in one prompt format. The tokenizer must not be changed meanwhile.

    `add_bos` and `add_eos` let the first and last message begin and end with the tokenizer's token where they do not yet
    (NeMo-RL's `data.add_bos` and `data.add_eos`); a tokenizer without that token is then refused: PackproofError.
    """

    def __init__(self, *, tokenizer: Any, prompt_format: str, add_bos: bool, add_eos: bool) -> None:
        if prompt_format not in FORMATS:
            raise PackproofError(
                what=f"unknown prompt format {prompt_format!r}; the nearest is {nearest(prompt_format, FORMATS)!r}",
                where="prompt_format",
                mend=f"choose one of {', '.join(FORMATS)}",
            )
        self._format = FORMATS[prompt_format]
        self._tokenizer = tokenizer
        self._bos = _special(tokenizer.bos_token, "add_bos") if add_bos else None
        self._eos = _special(tokenizer.eos_token, "add_eos") if add_eos else None
        self._encoder = TextEncoder(tokenizer)

    def tokenize(self, conversations: Sequence[Sequence[Any]]) -> list[Conversation]:
        """Token ids and mask of each conversation, a list of messages. Raises RowRefused (`bad_message`, `bad_content`, `bad_text`, …)."""
        texts = [self._texts(conversation, number) for number, conversation in enumerate(conversations)]
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
            Conversation(
                token_ids=torch.from_numpy(of_one.take(None).astype(np.int64)),
                token_mask=torch.from_numpy(_trained(conversation).repeat(of_one.lengths)),
            )
            for conversation, of_one in zip(conversations, encoded, strict=True)
        ]

    def _texts(self, conversation: Sequence[Any], number: int) -> list[str]:
        """The text of each message, which together are what the conversation renders to."""
        if not len(conversation):
            return []
        row = split_conversations(conversation)
        texts = self._rendered(row, number)
        if self._bos is not None and not texts[0].startswith(self._bos):
            texts[0] = self._bos + texts[0]
        if self._eos is not None and not texts[-1].rstrip("\n").endswith(self._eos):
            texts[-1] += self._eos
        return texts

    def _rendered(self, row: RowMessages, number: int) -> list[str]:
        if self._format.render is not None:
            return render_messages(row.messages, self._format, number)
        texts, before = [], ""
        for end in range(1, len(row.messages) + 1):
            now = render_template(row.messages[:end], self._tokenizer, number)
            shared = os.path.commonprefix([before, now])  # noqa: RUF071 - of texts, character by character
            texts.append(now[len(shared) :])
            before = now
        return texts


def _trained(conversation: Sequence[Message]) -> Any:
    return np.array([message["role"] == TRAINED_ROLE for message in conversation], dtype=np.float32)


def _special(token: str | None, option: str) -> str:
    if token is None:
        raise PackproofError(
            what="the tokenizer has no such token",
            where=option,
            mend=f"set {option} to false, or the tokenizer's token",
        )
    return token
