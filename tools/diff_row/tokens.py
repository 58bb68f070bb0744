"""Show a token's text with nothing hidden, safe for a column of a terminal or a cell."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len

IGNORED = "ignored"
"""Text shown for the label -100."""
LEFT_TO_RIGHT = "\u200e"
"""A mark that keeps the column after a right-to-left token in its place; it takes no width."""


class TokenTexts:
    """Texts of ids by one tokenizer; without a tokenizer the id itself."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._special = frozenset(int(token) for token in tokenizer.added_tokens_decoder) if tokenizer else frozenset()
        self._size = len(tokenizer) if tokenizer else 0

    def special(self, token: int) -> bool:
        """Return whether the id is a special or added token, and not ordinary text that looks like one."""
        return token in self._special

    def text(self, token: int) -> str:
        """Return the token with every hidden character shown: text in quotes, a special token bare, -100 as `ignored`."""
        if token not in self._known:
            self.learn([token])
        return self._known[token]

    def learn(self, tokens: Iterable[int]) -> None:
        """Look up many ids at once, which is much faster than one by one."""
        new = sorted({int(token) for token in tokens} - self._known.keys())
        inside = [token for token in new if 0 <= token < self._size]
        for token in set(new) - set(inside):
            self._known[token] = IGNORED if token == -100 else "(no such id)" if self._tokenizer else ""
        if inside and self._tokenizer is not None:
            names = self._tokenizer.convert_ids_to_tokens(inside)
            texts = self._tokenizer.batch_decode([[token] for token in inside], clean_up_tokenization_spaces=False)
            for token, name, text in zip(inside, names, texts, strict=True):
                self._known[token] = visible(name) if token in self._special else quoted(name, text)


def value_and_text(tensor: str, value: object, texts: TokenTexts) -> tuple[str, str]:
    """Return a value of a tensor, whole where it is whole, and the text of its token, empty for what is no id; both are visible."""
    if tensor == "cu_seqlens" and value is None:
        return "no boundary", ""
    text = texts.text(value) if tensor in ("input_ids", "target_ids") and isinstance(value, int) else ""
    return visible(str(int(value) if isinstance(value, float) and value.is_integer() else value)), text


def quoted(name: str | None, text: str) -> str:
    """Return a token of text in quotes. Part of a character, which has no text, is shown as bytes."""
    if name is None:
        return "(no such id)"
    if "\ufffd" in text and (raw := _bytes(name)) is not None:
        return "'" + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in raw) + "'"
    return f"'{visible(text)}'"


def visible(text: str) -> str:
    """Return the text with line feeds, controls, joiners, direction marks and lone combining characters made visible.

    The result has a width that `rich.cells` knows, so that columns stay aligned. A text with right-to-left letters ends with
    a left-to-right mark; otherwise a terminal would draw the numbers of the next column on its other side.
    """
    shown = "".join(_character(character) for character in text)
    if shown and unicodedata.category(shown[0]) in ("Mn", "Me", "Mc"):
        shown = "\u25cc" + shown  # a combining character needs something to stand on
    if any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in shown):
        shown += LEFT_TO_RIGHT
    return shown


def fit(text: str, width: int) -> str:
    """Cut or fill the text to exactly this many columns; an ellipsis marks a cut."""
    if cell_len(text) > width:
        kept = ""
        for character in text:
            if cell_len(kept + character) > width - 1:
                break
            kept += character
        text = kept + "…" + (LEFT_TO_RIGHT if LEFT_TO_RIGHT in text else "")
    return text + " " * max(0, width - cell_len(text))


def _character(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")
    strange_space = character != " " and unicodedata.category(character) == "Zs"
    # Variation selectors, skin tones and regional letters change the width of what stands before them.
    widening = 0xFE00 <= code <= 0xFE0F or 0x1F3FB <= code <= 0x1F3FF or 0x1F1E6 <= code <= 0x1F1FF
    if hidden or strange_space or widening:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def _bytes(name: str) -> bytes | None:
    """Return the bytes of a token of a byte-level vocabulary (or `<0xE2>` of a vocabulary with byte fallback), else None."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    alphabet = _byte_alphabet()
    if any(character not in alphabet for character in name):
        return None
    return bytes(alphabet[character] for character in name)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return the characters by which byte-level vocabularies write bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
