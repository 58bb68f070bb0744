"""Tokenizers as the subjects take them: a transformers tokenizer that lies in a folder, since Megatron-LM wants one."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def as_transformers(tokenizer: Any) -> Any:
    """Return a transformers tokenizer, from a tokenizer or from the path of its folder (loaded once in a process)."""
    if isinstance(tokenizer, (str, os.PathLike)):
        return load_folder(Path(tokenizer).resolve())
    return tokenizer


@functools.lru_cache(maxsize=32)
def load_folder(folder: Path) -> Any:
    """Load a tokenizer folder. FileNotFoundError names what is missing, so that no hub is asked for a local path."""
    if not (folder / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no tokenizer_config.json: give the folder of a Hugging Face tokenizer")
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def folder_of(tokenizer: Any) -> Path:
    """Return the folder from which a tokenizer was loaded; a tokenizer without a folder is saved for the life of the process."""
    tokenizer = as_transformers(tokenizer)
    folder = Path(str(tokenizer.name_or_path or "."))
    if tokenizer.name_or_path and (folder / "tokenizer_config.json").is_file():
        return folder.resolve()
    return _saved(_ById(tokenizer))


class _ById:
    """A cache key that keeps its tokenizer alive, so that its id is not given to another."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __hash__(self) -> int:
        return id(self.tokenizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.tokenizer is self.tokenizer


@functools.lru_cache(maxsize=64)
def _saved(key: _ById) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="packproof-tokenizer-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    key.tokenizer.save_pretrained(str(folder))
    return folder
