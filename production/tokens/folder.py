"""Load a tokenizer from a folder, or say which of the folder's files is missing or damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from production.errors import PackproofError
from production.files.file_state import is_there, read_regular

CONFIG = "tokenizer_config.json"
"""File without which transformers would load a tokenizer that has no special token."""
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""Vocabulary files, of which a tokenizer has at least one."""
_OTHERS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "config.json")
"""Files that a tokenizer may have beside its configuration."""


def load_folder(folder: Path) -> Any:
    """Load the tokenizer of a folder; no hub is asked and no code of the folder is run.

    Raises PackproofError where there is no such folder, or where a file of it is missing or damaged.
    """
    if not (is_there(folder) and folder.is_dir()):
        raise PackproofError(
            what="the tokenizer folder does not exist",
            where=str(folder),
            fix="give the folder that holds tokenizer.json; packproof-build-tokenizer writes one",
        )
    fix = f"give the folder that holds tokenizer.json and {CONFIG}"
    if (why := folder_fault(folder)) is not None:
        raise PackproofError(what=f"no tokenizer can be loaded from the folder: {why}", where=str(folder), fix=fix)
    from transformers import AutoTokenizer  # noqa: PLC0415 - its import takes seconds, and --help needs none of it

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # a damaged tokenizer.json raises Exception itself, others of its parts what they like
        said = " ".join(str(error).split())
        raise PackproofError(
            what=f"not a tokenizer that transformers can load: {said}", where=str(folder), fix=fix
        ) from error


def folder_fault(folder: Path) -> str | None:
    """Return the missing or damaged file for which a folder is not a tokenizer; None where no fault is seen."""
    return missing_file(folder, CONFIG) if not (folder / CONFIG).is_file() else next(folder_faults(folder), None)


def folder_faults(folder: Path) -> Iterator[str]:
    """Return the tokenizer's files that are missing or damaged."""
    if not any((folder / each).is_file() for each in _VOCABULARIES):
        yield missing_file(folder, "tokenizer.json")
    for name in (CONFIG, *_VOCABULARIES, *_OTHERS):
        why = _damage(folder / name) if (folder / name).exists() else None
        if why is not None:
            yield f"{name} is damaged: {why}"


def missing_file(folder: Path, name: str) -> str:
    """Say that a folder lacks a file, and what it has."""
    there = sorted(each.name + "/" * each.is_dir() for each in folder.iterdir())
    more = f" and {len(there) - 8} more" if len(there) > 8 else ""
    return f"{name} is missing; the folder has {', '.join(there[:8]) or 'nothing'}{more}"


def _damage(path: Path) -> str | None:
    """Return the fault of one of its files; None where no fault is seen."""
    if path.suffix not in (".json", ".jinja"):
        return None
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        return str(error)
    if path.suffix == ".jinja":
        return None
    if not text.strip():
        return "it is empty"
    try:
        return _no_tokenizer(text) if path.name == "tokenizer.json" else _no_object(text)
    except json.JSONDecodeError as error:
        return f"it is not JSON: {error}"


def _no_object(text: str) -> str | None:
    return None if isinstance(json.loads(text), dict) else "it is not a JSON object"


def _no_tokenizer(text: str) -> str | None:
    from tokenizers import Tokenizer  # noqa: PLC0415 - as transformers

    if (why := _no_object(text)) is not None:
        return why
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - it raises nothing narrower
        return f"the tokenizers library refuses it: {error}"
    return None
