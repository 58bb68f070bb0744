"""Prove once per tokenizer which added tokens cut a text so that its parts may be encoded apart.

Where the proof fails a text is encoded as it stands, at the price of encoding it more than once (R-ENCODE-1, R-TURN-1).
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PIECEWISE = frozenset(
    {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend"),
        *("Replace", "Sequence", "Strip", "StripAccents"),
        *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split"),
        *("UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    }
)
"""Normalizers and pre-tokenizers of the library that look at one piece of text at a time and at nothing around it."""


ENDS_LINES = frozenset(
    {
        # Mistral's Tekken, which Nemotron has
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Patterns of pre-tokenizers that end a word behind a word of letters and one newline, if no white space follows.

In each the letters end before the newline, `\\s*[\\r\\n]+` alone matches a newline behind letters, and that takes no more than
white space. No pattern looks back, so what follows is split as if it stood alone.
"""


class HardBoundaries:
    """Answers whether `encode(a + token + b) == encode(a) + [id of token] + encode(b)` for all texts a and b, empty ones too.

    The argument, after tokenizers' AddedVocabulary. A text is encoded in these steps:

    1. Added tokens that are not normalized are searched in the raw text, leftmost first and the longest at a place.
       What they match becomes one id each, and only the pieces between go on.
    2. Each piece is normalized, searched for normalized added tokens, pre-tokenized and given to the model, alone.
    3. The results are put together. Without special tokens to add, a post-processor adds none.

    Step 2 depends on the piece alone if each component does: `_works_piece_by_piece`. In step 1 `token` is matched wherever it
    stands, and the matches in `a` and `b` are those of `a` and `b` alone, if (`holds`) it is searched for in step 1; no added
    token reaches into it from the left or goes on after it, so that none straddles either of its ends; it takes no white
    space from its neighbours itself; and the characters at its ends are punctuation, so that its neighbours' `lstrip`,
    `rstrip` and `single_word` see at it what they see at the end of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.ends_lines = False
        """Whether `encode(token + "Word\\n" + text) == encode(token + "Word\\n") + encode(text)` for each token that `holds`, each word of ASCII
        letters and each text whose first character is visible: the pre-tokenizer's pattern is of ENDS_LINES, and no added token
        reaches across the newline.
        """
        self._searched: dict[str, Any] = {}
        self._possible = has_plain_backend(tokenizer) and not tokenizer.split_special_tokens
        if self._possible:
            backend = tokenizer.backend_tokenizer
            self._possible = _works_piece_by_piece(backend) and not tokenizer("", add_special_tokens=False)["input_ids"]
            added = backend.get_added_tokens_decoder().values()
            self.ends_lines = (
                self._possible
                and backend.normalizer is None
                and _first_pattern(backend.pre_tokenizer) in ENDS_LINES
                and not any(token.lstrip or "\n" in token.content for token in added)
            )
            self._searched = {token.content: token for token in added if not token.normalized}

    def holds(self, content: str) -> bool:
        """Return whether the added token `content` is proven to cut every text."""
        token = self._searched.get(content)
        return (
            self._possible
            and token is not None
            and not (token.lstrip or token.rstrip or token.single_word)
            and _is_punctuation(content[0])
            and _is_punctuation(content[-1])
            and not self._is_clashing(content)
        )

    def _is_clashing(self, content: str) -> bool:
        """Return whether an added token can match across an end of `content`: it goes on after `content`, a part of it
        from within begins `content`, or `content` stands within it.
        """
        beginnings = tuple(content[:count] for count in range(1, len(content) + 1))
        return any(
            (other != content and other.startswith(content)) or other.endswith(beginnings, 1) or content in other[1:]
            for other in self._searched
        )

    def separator(self) -> str | None:
        """Return a special token that cuts every text, the least likely one to stand in any; None if no token does."""
        return next((content for content in self._rarest_first() if self.holds(content)), None)

    def _rarest_first(self) -> Iterator[str]:
        """Yield special tokens from the last one added; a few, since a tokenizer without one among these has none at
        all.
        """
        special = [content for content, token in self._searched.items() if token.special]
        yield from special[: -SEPARATORS_TRIED - 1 : -1]


SEPARATORS_TRIED = 8


def has_plain_backend(tokenizer: Any) -> bool:
    """Return whether transformers only hands the text to a `tokenizers.Tokenizer`."""
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer).__call__ is PreTrainedTokenizerBase.__call__
        and type(tokenizer)._encode_plus is PreTrainedTokenizerFast._encode_plus  # noqa: SLF001 (asked, not called)
    )


def _works_piece_by_piece(backend: Any) -> bool:
    """Return whether every component treats a piece of text by that piece alone, and the same each time."""
    model = backend.model
    name = type(model).__name__
    if name == "BPE":
        steady = not model.dropout
    elif name == "Unigram":
        steady = not (model.nbest_size or model.alpha)  # else it samples
    else:
        steady = name in {"WordLevel", "WordPiece"}
    return steady and all(_is_piecewise(part) for part in (backend.normalizer, backend.pre_tokenizer))


def _is_piecewise(component: Any) -> bool:
    if component is None:
        return True
    try:
        state = json.loads(component.__getstate__())
    except Exception:  # noqa: BLE001 (the library raises a bare Exception for a component written in Python)
        return False
    return all(
        # Metaspace's prepend_scheme "first" asks whether the piece is the first of its text.
        kind in PIECEWISE and not (kind == "Metaspace" and part.get("prepend_scheme") == "first")
        for part in _parts(state)
        if (kind := part["type"])
    )


def _parts(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield state
    for part in (*state.get("pretokenizers", ()), *state.get("normalizers", ())):
        yield from _parts(part)


def _first_pattern(pre_tokenizer: Any) -> str | None:
    """Return the pattern by which a pre-tokenizer first splits a piece of text; None where it begins otherwise."""
    if pre_tokenizer is None:
        return None
    state = json.loads(pre_tokenizer.__getstate__())
    first = state["pretokenizers"][0] if state["type"] == "Sequence" and state["pretokenizers"] else state
    if first["type"] != "Split" or first["behavior"] != "Isolated" or first["invert"]:
        return None
    pattern: str | None = first["pattern"].get("Regex")
    return pattern


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation and character != "_"
