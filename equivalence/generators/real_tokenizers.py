"""Real tokenizers without a hub: Hugging Face folders written from the vocabulary that the package mistral-common ships.

The JSON is written here, not saved by a library, so that the same recipe gives the same bytes under every version
of tokenizers; reading 14.8 MB of vocabulary and writing the large folder takes about 2 s, hence the cache.
"""

import base64
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence.cache import cache_root, whole_folder
from production.errors import PackproofError

PACKAGE = "mistral-common"
VOCABULARY_FILE = "tekken_240718.json"
VOCABULARY_SHA256 = "eccd1665d2e477697c33cb7f0daa6f6dfefc57a0a6bceb66d4be52952f827516"
SPECIAL_COUNT = 1000
"""Ids below this are special, as in the vocabulary's own tokenizer."""
NAMED_SPECIALS = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)
"""The special tokens that have a name; the rest are called `<SPECIAL_i>` after their id."""

# Written here from the layout's public description. A null content or an unknown role is an error, never an empty turn.
CHAT_TEMPLATE = r"""{%- for message in messages -%}
{%- set text = message['content'].strip() -%}
{%- if message['role'] == 'system' -%}
{{ '<SPECIAL_10>System\n' + text + '\n' }}
{%- elif message['role'] == 'user' -%}
{{ '<SPECIAL_11>User\n' + text + '\n' }}
{%- elif message['role'] == 'assistant' -%}
{{ '<SPECIAL_11>Assistant\n' + text + '\n<SPECIAL_12>\n' }}
{%- elif message['role'] == 'tool' -%}
{{ '<SPECIAL_11>User\n<TOOL_RESPONSE>[' + text + ']</TOOL_RESPONSE>\n' }}
{%- else -%}
{{ raise_exception('unknown role ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<SPECIAL_11>Assistant\n' }}
{%- endif -%}
"""

_INSTALL = "install the pinned version: pip install 'packproof[tokenizers]'"


class TokenizerSourceError(PackproofError):
    """The vocabulary a recipe reads is missing, or is not the one the recipe was written for."""


@dataclass(frozen=True, kw_only=True)
class TokenizerRecipe:
    """Part of the shipped vocabulary that one folder holds."""

    vocab_size: int
    """Ids in all, special ones included."""
    whole: tuple[bytes, ...] = ()
    """Words that take the last ids so that a cut-down vocabulary keeps them whole; they replace its rarest words."""
    summary: str
    """Changes to the vocabulary, for the folder's provenance."""


RECIPES: Mapping[str, TokenizerRecipe] = {
    "nemotron-like": TokenizerRecipe(
        vocab_size=131_072,
        summary="cut down to 131,072 ids",
    ),
    "nemotron-mini": TokenizerRecipe(
        vocab_size=4_096,
        # An assistant prefix is three ids in the large vocabulary (marker, word, newline): it must be here too.
        whole=(b"Assistant", b"System"),
        summary="cut down to 4,096 ids, 'Assistant' and 'System' kept whole",
    ),
}


def build_tokenizer(name: str, folder: Path) -> Path:
    """Write the tokenizer `name` into `folder` (created, or its files replaced) and return `folder`.

    Raises PackproofError for an unknown name, TokenizerSourceError where mistral-common is missing or is another one.
    """
    recipe = _recipe(name)
    source = _source_file()
    raw = source.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != VOCABULARY_SHA256:
        raise TokenizerSourceError(
            what=f"its sha256 must be {VOCABULARY_SHA256}, for which the recipe was written, got {found}",
            where=f"{VOCABULARY_FILE} of {PACKAGE} {_package_version()}",
            fix=_INSTALL,
        )
    source_json = json.loads(raw)
    words = [base64.b64decode(entry["token_bytes"]) for entry in source_json["vocab"]]
    folder.mkdir(parents=True, exist_ok=True)
    for filename, text in _files(name, recipe, words, source_json["config"]["pattern"]).items():
        (folder / filename).write_bytes(text.encode())
    return folder


def cached_tokenizer(name: str) -> Path:
    """Return the folder of tokenizer `name`, built once into the cache; any number of processes may ask at once.

    The folder is named after a hash of this recipe and of mistral-common's version, so a changed recipe is built again.
    """
    _recipe(name)
    root = cache_root() / "tokenizers"
    folder = root / f"{name}-{_recipe_hash()}"
    if folder.is_dir():  # it appears by one rename, so what is there is whole
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        with whole_folder(folder) as half:  # a file system without working locks lets two builders through
            build_tokenizer(name, half)
    return folder


def _recipe(name: str) -> TokenizerRecipe:
    if name not in RECIPES:
        raise PackproofError(
            what=f"must be one of {', '.join(RECIPES)}, got {name!r}",
            where="tokenizer name",
            fix=f"choose one of {', '.join(RECIPES)}",
        )
    return RECIPES[name]


def _package_version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise TokenizerSourceError(
            what=f"the real tokenizers are built from the vocabulary that {PACKAGE} ships, and it is not installed",
            where="this Python environment",
            fix=_INSTALL,
        ) from None


def _source_file() -> Path:
    version = _package_version()
    # find_spec reads no code of the package, whose import takes seconds.
    spec = importlib.util.find_spec("mistral_common")
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (file := Path(place) / "data" / VOCABULARY_FILE).is_file():
            return file
    raise TokenizerSourceError(what=f"it ships no {VOCABULARY_FILE}", where=f"{PACKAGE} {version}", fix=_INSTALL)


def _recipe_hash() -> str:
    # The recipe is this file: a comment costs a rebuild of 2 s, and no change of it can be forgotten.
    parts = (Path(__file__).read_bytes(), _package_version().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released with the handle
        yield


def _files(name: str, recipe: TokenizerRecipe, words: Sequence[bytes], pattern: str) -> dict[str, str]:
    kept = [*words[: recipe.vocab_size - SPECIAL_COUNT - len(recipe.whole)], *recipe.whole]
    tokenizer = json.dumps(_tokenizer_json(kept, pattern), ensure_ascii=False, separators=(",", ":"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
        "bos_token": "<s>",
        "eos_token": "<SPECIAL_12>",
        "unk_token": "<unk>",
    }
    provenance = {
        "name": name,
        "built_by": "packproof-build-tokenizer",
        "vocabulary": {
            "package": PACKAGE,
            "version": _package_version(),
            "file": VOCABULARY_FILE,
            "sha256": VOCABULARY_SHA256,
            "licence": "Apache-2.0",
        },
        "changes": f"{recipe.summary}; special tokens renamed; chat template written for packproof",
        "tokenizer_json_sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
    }
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
        "provenance.json": json.dumps(provenance, indent=1) + "\n",
    }


def _tokenizer_json(words: Sequence[bytes], pattern: str) -> dict[str, Any]:
    """Return the content of tokenizer.json; `words` are in the order of their ids, the first at SPECIAL_COUNT."""
    specials = [*NAMED_SPECIALS, *(f"<SPECIAL_{i}>" for i in range(len(NAMED_SPECIALS), SPECIAL_COUNT))]
    letters = _byte_letters()

    def spelled(word: bytes) -> str:
        return "".join(letters[byte] for byte in word)

    vocab = {text: i for i, text in enumerate(itertools.chain(specials, map(spelled, words)))}
    if len(vocab) != SPECIAL_COUNT + len(words):
        raise TokenizerSourceError(
            what="two ids have the same text, so no tokenizer can hold both", where=VOCABULARY_FILE, fix=_INSTALL
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    bos: dict[str, Any] = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": letter, "type_id": i}} for i, letter in enumerate("AB"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, text in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                byte_level | {"add_prefix_space": False, "use_regex": False},
            ],
        },
        # The BOS that this adds must never reach a row: that is what having it here can show.
        "post_processor": {
            "type": "Sequence",
            "processors": [
                byte_level | {"trim_offsets": False},
                {
                    "type": "TemplateProcessing",
                    "single": [bos, first],
                    "pair": [bos, first, bos, second],
                    "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}},
                },
            ],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A pre-token that is in the vocabulary is one id without any merge, as in the vocabulary's own tokenizer.
            "ignore_merges": True,
            "vocab": vocab,
            "merges": [[spelled(left), spelled(right)] for left, right in _merges(words)],
        },
    }


def _byte_letters() -> list[str]:
    """Return the printable letter by which byte-level BPE spells each byte: itself, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = itertools.count(0x100)
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _merges(words: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the merges that build each word, by rank of the word, then by the ranks of its two parts."""
    rank = {word: i for i, word in enumerate(words)}
    for word in rank:
        cuts = [(word[:k], word[k:]) for k in range(1, len(word))]
        parts = [cut for cut in cuts if cut[0] in rank and cut[1] in rank]
        yield from sorted(parts, key=lambda cut: (rank[cut[0]], rank[cut[1]]))
