"""Fingerprint a tokenizer: a digest of what decides its ids, and the ids of fixed hard texts.

The digest is equal for folders that tokenize the same, whatever the order of keys, the formatting or other files in
them. Where two digests differ, the probe texts tell which texts get other ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

VERSION = 1
"""Version of the digest and the probe texts, raised whenever either changes: fingerprints of two versions cannot be compared."""
PROBES: dict[str, str] = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "newlines": "one\ntwo\n\nthree\n\n\nfour\r\nfive\n \nsix",
    "answer after a header": "<SPECIAL_11>Assistant\n\n  indented answer\n<SPECIAL_12>\n",
    "white space": "  two   three\t\ttab \u00a0nbsp\u2003em space \u2028line\u2029paragraph  ",
    "digits": "7 42 007 1234567890 3.14159 1e-5 12:34:56 1,000,000",
    "code": "def f(x):\n    return x**2  # comment\n\n\nif __name__ == '__main__':\n\tf(1)\n",
    "markers": "<SPECIAL_10>System\n<SPECIAL_11>User\n<SPECIAL_12><SPECIAL_233>",
    "chat markers": "<|im_start|>system\nhi<|im_end|><|endoftext|><|eot_id|><|start_header_id|>",
    "brackets": "<s></s><unk><pad>[INST] [/INST] <<SYS>> <</SYS>> <think></think> <tool_call>",
    "switches": "/think /no_think a/thinking",
    "joiners": "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 क\u094d\u200dष a\u200bb\u2060c\ufeffd",
    "composed": "é e\u0301 Å A\u030a ﬁ ① ½ Ω Ω",
    "scripts": "Привет мир 你好世界 こんにちは 안녕하세요 שלום مرحبا สวัสดี",
    "case": "HELLO hello HeLLo iPhone McDonald İstanbul ß ẞ",
    "apostrophes": "don't I'll they've we're it's DON'T ’s",
    "punctuation": '!!! ??? ... --- *** ### ``` ~~~ $%^&*() [{}] \\n \\\\ "quoted"',
    "long run": "a" * 70 + " " * 40 + "=" * 50,
    "control": "bell\a form\f vertical\v escape\u001b delete\u007f",
    "rare": "\U0001d54f\U0001d7d8 \U00010348 \U0002070e \ufffd",
}
"""Name and text of each probe."""
_TEXT_SHOWN = 48


@dataclass(frozen=True, kw_only=True)
class TokenizerFingerprint:
    """Identifies how a tokenizer behaves."""

    version: int
    """`VERSION` of the module that made it."""
    digest: str
    """32 hex digits of everything below and of the definition: equal where folders tokenize and render the same."""
    definition: str
    """32 hex digits of vocabulary, merges, normalizer, pre-tokenizer, post-processor and added tokens."""
    chat_template: str | None
    """32 hex digits of the chat template; None without one."""
    special_tokens: Mapping[str, Sequence[Any]]
    """Text and id of bos_token, eos_token, unk_token and pad_token, where there are such."""
    vocab_size: int
    """Tokens, added ones included."""
    probes: Mapping[str, Sequence[int]]
    """Ids of each text of `PROBES`, no special token added; -1 alone where the tokenizer refuses the text."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "version": self.version,
            "digest": self.digest,
            "definition": self.definition,
            "chat_template": self.chat_template,
            "special_tokens": {name: list(value) for name, value in self.special_tokens.items()},
            "vocab_size": self.vocab_size,
            "probes": {name: list(ids) for name, ids in self.probes.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> TokenizerFingerprint:
        """Return the fingerprint of these JSON values. Raises ValueError where they are none."""
        try:
            fields = dict(value)
            probes = {str(name): [int(each) for each in ids] for name, ids in fields.pop("probes").items()}
            special = {str(name): list(pair) for name, pair in fields.pop("special_tokens").items()}
            whole = cls(**fields, probes=probes, special_tokens=special)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"it is not a fingerprint of a tokenizer ({error})") from error
        if not (type(whole.version) is int and type(whole.digest) is str and type(whole.definition) is str):
            raise ValueError(
                "it is not a fingerprint of a tokenizer (version must be a whole number, digest and definition must be text)"
            )
        return whole


def fingerprint_tokenizer(tokenizer: Any) -> TokenizerFingerprint:
    """Return the fingerprint of a loaded tokenizer, with the chat template that it has now."""
    template = getattr(tokenizer, "chat_template", None)
    special = {
        name: [str(text), tokenizer.convert_tokens_to_ids(str(text))]
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := getattr(tokenizer, name, None)) is not None
    }
    parts: dict[str, Any] = {
        "version": VERSION,
        "definition": _digest(_definition(tokenizer)),
        "chat_template": None if template is None else _digest(template),
        "special_tokens": special,
        "vocab_size": len(tokenizer),
        "probes": {name: _ids(tokenizer, text) for name, text in PROBES.items()},
    }
    return TokenizerFingerprint(digest=_digest(parts), **parts)


def tokenizer_differences(saved: TokenizerFingerprint, now: TokenizerFingerprint) -> list[str]:
    """Return in whole sentences how two tokenizers differ, with both sides' values; empty where they are the same."""
    if saved == now:
        return []
    if saved.version != now.version:
        return [f"The fingerprints are of versions {saved.version} and {now.version}, which cannot be compared: make the older one again."]  # fmt: skip
    told = [f"The tokenizer was {saved.digest[:12]} and is {now.digest[:12]}."]
    if saved.vocab_size != now.vocab_size:
        told.append(f"It had {saved.vocab_size:,} tokens and has {now.vocab_size:,}.")
    for name in dict.fromkeys([*saved.special_tokens, *now.special_tokens]):
        old, new = saved.special_tokens.get(name), now.special_tokens.get(name)
        if (None if old is None else list(old)) != (None if new is None else list(new)):
            told.append(f"Its {name} was {_token(old)} and is {_token(new)}.")
    if saved.chat_template != now.chat_template:
        told.append("Its chat template is another text.")
    shifted = [name for name in PROBES if list(saved.probes.get(name, ())) != list(now.probes.get(name, ()))]
    told += [_shift(name, saved.probes.get(name, ()), now.probes.get(name, ())) for name in shifted[:3]]
    if len(shifted) > 3:
        told.append(f"{len(shifted) - 3} more of {len(PROBES)} probe texts have other ids: {', '.join(shifted[3:])}.")
    if saved.definition != now.definition and not shifted:
        told.append(f"Its definition is another, although all {len(PROBES)} probe texts have the same ids.")
    return told


def differences_from_json(saved: Any, now: TokenizerFingerprint, *, name: str) -> list[str]:
    """Return how a tokenizer differs from a fingerprint that a file holds; a fingerprint that cannot be read is a difference.

    `name` says in errors whose fingerprint it is.
    """
    try:
        known = TokenizerFingerprint.from_json(saved)
    except ValueError as error:
        return [f"The fingerprint in {name} cannot be read: {error}."]
    return tokenizer_differences(known, now)


def _definition(tokenizer: Any) -> Any:
    """Return everything that decides ids, as JSON values whose equality does not hang on order or formatting.

    A tokenizer without a fast backend cannot be asked for its model: class and vocabulary stand for it then.
    """
    splits = bool(getattr(tokenizer, "split_special_tokens", False))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), splits]
    definition = json.loads(backend.to_str())
    # Truncation and padding are as the last call left them; the decoder makes text of ids; the version is the format's.
    for passing in ("truncation", "padding", "decoder", "version"):
        definition.pop(passing, None)
    definition["added_tokens"] = sorted(definition.get("added_tokens") or [], key=lambda token: token["id"])
    return [definition, splits]


def _ids(tokenizer: Any, text: str) -> list[int]:
    try:
        return [int(each) for each in tokenizer(text, add_special_tokens=False)["input_ids"]]
    except Exception:  # noqa: BLE001 - tokenizers raise what they like; a refusal is a behaviour too
        return [-1]


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, ensure_ascii=True).encode())


def _token(pair: Sequence[Any] | None) -> str:
    return "not there" if pair is None else f"{pair[0]!r} (id {pair[1]})"


def _shift(name: str, old: Sequence[int], new: Sequence[int]) -> str:
    at = next(
        (at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new))
    )
    text = PROBES[name]
    shown = text if len(text) <= _TEXT_SHOWN else f"{text[: _TEXT_SHOWN - 1]}…"
    return (
        f"The probe text {name!r} ({shown!r}) had {len(old)} ids and has {len(new)}; from id {at} on it was "
        f"{list(old[at : at + 4])} and is {list(new[at : at + 4])}."
    )
