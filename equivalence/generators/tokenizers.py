"""Small tokenizers made in memory, each with one trait that a row builder can get wrong, and the real ones, all by name.

Each is saved once into the cache (Megatron-LM's SFTTokenizer wants a folder); making and loading one takes about 10 ms.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers import __version__ as transformers_version

from equivalence.cache import cache_root, whole_folder
from equivalence.generators.real_tokenizers import cached_tokenizer
from equivalence.subjects.tokenizers import load_folder

HUGE_ID = 128_000
"""Ids from here on count as huge; from 100,000 on, neighbouring ids are equal under the relative turn check."""
WORDS = tuple(f"w{number}" for number in range(100))
"""The words of the word-level tokenizers; w0 has id 12, as in semantics.md."""
FIRST_WORD_ID = 12
REAL = ("nemotron-mini", "nemotron-like")
_MINI = Path(__file__).resolve().parents[2] / "examples" / "tokenizers" / "nemotron-mini"

PLAIN_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""Contents only: the one with which `default` has empty and one-token conversations."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
RAISING_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('only system, user and assistant are known') }}{% endif %}{{ m['content'] + '\n' }}{% endfor %}"
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe of a tokenizer, and its purpose."""

    what: str
    """Its trait, for the report."""
    make: Callable[[], Tokenizer]
    special: Mapping[str, str]
    """bos_token, eos_token, pad_token, unk_token: those it has."""
    chat_template: str | None


def names() -> tuple[str, ...]:
    """Return all names that `load` knows."""
    return (*RECIPES, *REAL)


def folder(name: str) -> Path:
    """Return the folder of a tokenizer by name, made at the first call; a path to a folder is returned unchanged.

    Raises ValueError for any other text.
    """
    if name in RECIPES:
        return _made(name)
    if name == "nemotron-mini" and (_MINI / "tokenizer.json").is_file():
        return _MINI
    if name in REAL:
        return cached_tokenizer(name)
    if (Path(name) / "tokenizer_config.json").is_file():
        return Path(name).resolve()
    raise ValueError(
        f"no tokenizer is called {name!r}: choose one of {', '.join(names())}, or give the folder of a "
        "Hugging Face tokenizer (with a tokenizer_config.json)"
    )


@functools.cache
def load(name: str) -> Any:
    """Load the tokenizer by name as a transformers tokenizer whose name_or_path is its folder; once in a process."""
    return load_folder(folder(name))


@functools.cache
def _made(name: str) -> Path:
    recipe = RECIPES[name]
    tokenizer = recipe.make()
    # What one version of transformers writes another may not read.
    made_of = [json.loads(tokenizer.to_str()), dict(recipe.special), recipe.chat_template, transformers_version]
    settled = json.dumps(made_of, sort_keys=True)
    place = cache_root() / "tokenizers" / f"made-{name}-{hashlib.sha256(settled.encode()).hexdigest()[:12]}"
    if not (place / "tokenizer_config.json").is_file():
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **recipe.special)
        fast.chat_template = recipe.chat_template
        with whole_folder(place) as half:
            fast.save_pretrained(str(half))
    return place


_SPECIAL_IDS = {
    "<unk>": 0,
    "<s>": 1,
    "</s>": 2,
    "<pad>": 3,
    "<SPECIAL_10>": 4,
    "<SPECIAL_11>": 5,
    "<SPECIAL_12>": 6,
    "<SPECIAL_233>": 7,
}
_ALL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def _special(tokenizer: Tokenizer, tokens: Mapping[str, int] | tuple[str, ...], **how: bool) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True, **how) for token in tokens])
    return tokenizer


def _word_level(offset: int = 0) -> Tokenizer:
    """Make a tokenizer in which spaces separate and vanish, newlines are tokens, and unknown text is <unk>, the pad token of two formats."""
    others = {"System": 8, "User": 9, "\n": 10, "Assistant": 11}
    words = {word: FIRST_WORD_ID + number for number, word in enumerate(WORDS)}
    vocabulary = {token: number + offset for token, number in {**_SPECIAL_IDS, **others, **words}.items()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    return _special(tokenizer, _SPECIAL_IDS)


def _word_level_with_bos() -> Tokenizer:
    tokenizer = _word_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


_MERGES = (  # in order of priority; Ċ is the newline, Ġ the space
    "Ċ Ċ", "Ċ a", "Ċ <", "< S", "a b", "Ġ w", "w 0", "Ġw 0", "Ġ a", "s y", "e r", "e m", "s t", "s s",
    "A ss", "ĊĊ ĊĊ", "Ġ Ġ", "Ġ Ċ", "a Ċ", "b Ċ", "1 Ċ", "> Ċ", ". Ċ",
)  # fmt: skip


def _letters() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_level(special: Mapping[str, int], *, merges: tuple[str, ...] = _MERGES, **how: bool) -> Tokenizer:
    """Make a byte-level BPE that merges across newlines, spaces and words, so that neighbouring turns can merge."""
    vocabulary = dict(special)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    known = set(_letters()) | {left + right for left, right in pairs}
    pairs = [pair for pair in pairs if set(pair) <= known]
    for piece in (*_letters(), *(left + right for left, right in pairs)):
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _special(tokenizer, special, **how)


def _huge() -> Tokenizer:
    """Make a tokenizer with ids from 128,000 on. `⏎ab` is ⏎a·b, while turns encoded alone give ⏎ and ab: as many ids, each off by one."""
    neighbours = ("Ċa", "Ċ", "Ċ<", "<S", "S", "ab", "b")  # a whole row has Ċa b or Ċ< S, its turns Ċ ab or Ċ <S
    letters = [letter for letter in _letters() if letter not in neighbours]
    pieces = {piece: HUGE_ID + 2_000 + number for number, piece in enumerate((*neighbours, *letters))}
    vocabulary = {"<unk>": HUGE_ID, "</s>": HUGE_ID + 1, **pieces}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "a"), ("Ċ", "<"), ("<", "S"), ("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _special(tokenizer, ("<unk>", "</s>"))


def _prefix_space() -> Tokenizer:
    """Make a Metaspace tokenizer like SentencePiece's: a text encoded alone begins with a space that it does not have in its place."""
    tokenizer = _byte_level(_SPECIAL_IDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]
    )
    return tokenizer


def _normalizing() -> Tokenizer:
    """Make a tokenizer that composes (NFC) and folds white space, so that the edge of a turn changes with its neighbour."""
    tokenizer = _byte_level(_SPECIAL_IDS)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\n[ \t]+"), "\n")])
    return tokenizer


SPANNING = "w0\n<SPECIAL_11>"
"""An added token that ends as a user's turn begins, behind what a turn may end with."""


AROUND = "\n<SPECIAL_11>User"
"""An added token that holds the beginning of a user's turn between what ends the turn before and what goes on behind it."""


def _around() -> Tokenizer:
    """Byte-level BPE with one added token that holds a format's own strictly inside."""
    tokenizer = _byte_level(_SPECIAL_IDS)
    tokenizer.add_tokens([AddedToken(AROUND, normalized=False)])
    return tokenizer


def _spanning() -> Tokenizer:
    """Make a byte-level BPE with added tokens that contain a format's own: one reaches over the end of a turn, one continues behind its start."""
    tokenizer = _byte_level(_SPECIAL_IDS)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (SPANNING, "<SPECIAL_10>Sys")])
    return tokenizer


RECIPES: Mapping[str, Recipe] = {
    "word": Recipe(
        what="word level, w0 is 12; unknown words are the pad id of three formats",
        make=_word_level,
        special=_ALL,
        chat_template=PLAIN_TEMPLATE,
    ),
    "bytes": Recipe(
        what="byte-level BPE with merges across newlines",
        make=functools.partial(_byte_level, _SPECIAL_IDS),
        special=_ALL,
        chat_template=CHAT_TEMPLATE,
    ),
    "bos": Recipe(
        what="its post-processor adds BOS and EOS; no pad token, so default pads with EOS",
        make=_word_level_with_bos,
        special={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        chat_template=CHAT_TEMPLATE,
    ),
    "eos-pad": Recipe(
        what="its pad token is its EOS, and its template ends turns with it",
        make=functools.partial(_byte_level, _SPECIAL_IDS),
        special={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"},
        chat_template=CHAT_TEMPLATE,
    ),
    "plain": Recipe(
        what="byte-level BPE without any special token and without a chat template",
        make=functools.partial(_byte_level, {}),
        special={},
        chat_template=None,
    ),
    "plain-template": Recipe(
        what="byte-level BPE without any special token, contents only as its template",
        make=functools.partial(_byte_level, {}),
        special={},
        chat_template=PLAIN_TEMPLATE,
    ),
    "only-unk": Recipe(
        what="byte-level BPE with <unk> and </s> but no <SPECIAL_i>: turns merge in every format",
        make=functools.partial(_byte_level, {"<unk>": 0, "</s>": 1}),
        special={"eos_token": "</s>", "unk_token": "<unk>"},
        chat_template=PLAIN_TEMPLATE,
    ),
    "stripping": Recipe(
        what="special tokens swallow white space before them, so a turn's last newline vanishes in its place",
        make=functools.partial(_byte_level, _SPECIAL_IDS, lstrip=True),
        special=_ALL,
        chat_template=CHAT_TEMPLATE,
    ),
    "prefix-space": Recipe(
        what="a text encoded alone begins with a space",
        make=_prefix_space,
        special=_ALL,
        chat_template=PLAIN_TEMPLATE,
    ),
    "normalizing": Recipe(
        what="NFC and folded white space: a turn's edge changes with its neighbour",
        make=_normalizing,
        special=_ALL,
        chat_template=PLAIN_TEMPLATE,
    ),
    "raising": Recipe(
        what="its chat template refuses roles other than system, user and assistant",
        make=_word_level,
        special=_ALL,
        chat_template=RAISING_TEMPLATE,
    ),
    "huge": Recipe(
        what="ids from 128,000 on; turns that merge differ from the whole by one in each id",
        make=_huge,
        special={"eos_token": "</s>", "unk_token": "<unk>"},
        chat_template=PLAIN_TEMPLATE,
    ),
    "spanning": Recipe(
        what="added tokens that hold the special tokens of a turn, or reach over its end",
        make=_spanning,
        special=_ALL,
        chat_template=CHAT_TEMPLATE,
    ),
    "around": Recipe(
        what="an added token that holds the special token of a turn between other text",
        make=_around,
        special=_ALL,
        chat_template=CHAT_TEMPLATE,
    ),
    "huge-words": Recipe(
        what="word level with ids from 130,000 on",
        make=functools.partial(_word_level, HUGE_ID + 2_000),
        special=_ALL,
        chat_template=PLAIN_TEMPLATE,
    ),
}
