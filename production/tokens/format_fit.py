"""Check that a prompt format and a tokenizer were made for each other, before any row is built (SPEC R-FIT-1 and 2).

A tokenizer without the format's markers encodes them as ordinary text: the row is built, and trains the marker's letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from production.tokens.prompts import FORMATS

_ANSWERS = ("Hello", "a", "1", "{", '"', "-", "é", "あ", "<")
"""Beginnings of answers: the header must be the same tokens before each."""


def format_misfits(
    tokenizer: Any, prompt_format: str, *, assistant_prefix_len: int | None = None, has_prefix: bool = True
) -> list[str]:
    """Return why the format must not be used with this tokenizer, a sentence each; empty if it may.

    `assistant_prefix_len` overrides the format's own prefix; the online path has none and trains the header. The formats `identity` and `default` write no markers of their own.
    """
    chosen = FORMATS[prompt_format]
    if not chosen.markers:
        return []
    found = [why for marker in chosen.markers if (why := _marker_misfit(tokenizer, marker)) is not None]
    ids = [tuple(_encode(tokenizer, marker)) for marker in chosen.markers]
    if not found and len(set(ids)) < len(ids):
        found.append(f"its markers {', '.join(chosen.markers)} are not different tokens of this tokenizer")
    prefix = chosen.assistant_prefix_len if assistant_prefix_len is None else assistant_prefix_len
    if has_prefix and (why := _header_misfit(tokenizer, chosen.assistant_header, prefix)) is not None:
        found.append(why)
    return found


def misfit_text(prompt_format: str, misfits: Sequence[str]) -> str:
    """Return the misfits as one sentence."""
    return f"the prompt format {prompt_format} does not fit this tokenizer: {'; '.join(misfits)}"


MISFIT_FIX = "use the tokenizer that the format was made for, or another prompt format"
"""Fix for a misfit."""


def _marker_misfit(tokenizer: Any, marker: str) -> str | None:
    """Return why the marker is not a single token, alone or between letters."""
    alone = _encode(tokenizer, marker)
    if len(alone) != 1:
        return f"its marker {marker} is {len(alone)} tokens of this tokenizer, not one"
    if alone[0] == tokenizer.unk_token_id and marker != tokenizer.unk_token:
        return f"its marker {marker} is the unknown token of this tokenizer"
    if _encode(tokenizer, f"a{marker}a").count(alone[0]) != 1:
        return f"its marker {marker} is one token alone, and another one between letters"
    return None


def _header_misfit(tokenizer: Any, header: str, prefix: int) -> str | None:
    """Return why the tokens that are not trained are not those of the header."""
    alone = _encode(tokenizer, header) if header else []
    if len(alone) != prefix:
        # A format without a header has a prefix of 0, and another one would mask the answer itself.
        return f"its assistant header {header!r} is {len(alone)} tokens of this tokenizer, and the assistant prefix, which is not trained, {prefix}"
    for answer in _ANSWERS if header else ():
        if _encode(tokenizer, header + answer)[:prefix] != alone:
            return f"its assistant header {header!r} is other tokens of this tokenizer before an answer that begins with {answer!r}"
    return None


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
