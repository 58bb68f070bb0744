"""Make a tokenizer folder that the transformers of another environment can load, version 4 as well as 5."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import transformers

from equivalence.cache import cache_root, whole_folder
from equivalence.subjects.tokenizers import folder_of

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_CLASS_OF_5, _CLASS_OF_BOTH = "TokenizersBackend", "PreTrainedTokenizerFast"


def portable_folder(tokenizer: Any) -> Path:
    """Return the folder of a tokenizer, or a copy of it that transformers 4 reads, too.

    transformers 5 names a class that transformers 4 does not have, and writes lists where 4 expects mappings. The copy stands in the
    cache under a hash of the folder's contents and of the version of transformers.
    """
    return _portable(folder_of(tokenizer))


@functools.lru_cache(maxsize=64)
def _portable(folder: Path) -> Path:
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    if config.get("tokenizer_class") != _CLASS_OF_5:
        return folder
    files = sorted(path for path in folder.iterdir() if path.is_file())
    digest = hashlib.sha256(transformers.__version__.encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    place = cache_root() / "tokenizers" / f"portable-{digest.hexdigest()[:16]}"
    if place.is_dir():  # it appears by one rename, so what is there is whole
        return place
    with whole_folder(place) as half:
        half.mkdir()
        for path in files:
            shutil.copyfile(path, half / path.name)
        (half / _CONFIG).write_text(json.dumps(_config_of_both(config, folder), indent=2), encoding="utf-8")
    return place


def _config_of_both(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    made = {**config, "tokenizer_class": _CLASS_OF_BOTH}
    extra = made.pop("extra_special_tokens", None)
    if extra:
        made["additional_special_tokens" if isinstance(extra, list) else "extra_special_tokens"] = extra
    template = folder / _TEMPLATE
    if template.is_file() and "chat_template" not in made:  # the first versions of 4 do not look for the file
        made["chat_template"] = template.read_text(encoding="utf-8")
    return made
