"""Load a job's tokenizer from its folder or from Hugging Face's cache, and size the embedding for the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from production.errors import PackproofError
from production.files.file_state import is_there, read_regular
from production.online.padded_batch import round_up
from production.tokens.folder import CONFIG, folder_fault, folder_faults, missing_file
from production.training.config import Job

_FIX = f"give a folder with tokenizer.json and {CONFIG}, or a Hugging Face name that can be reached"


def load_tokenizer(job: Job) -> Any:
    """Load the job's tokenizer from its folder or from Hugging Face's cache on this machine.

    Raises PackproofError with the key and its place: for a folder that does not exist, for a missing or damaged file,
    and for a folder without `tokenizer_config.json`, which transformers would load without any special token.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to import

    given = job.policy.tokenizer
    if given.name and Path(given.name).is_dir() and not (Path(given.name) / CONFIG).is_file():
        raise _refused(job, missing_file(Path(given.name), CONFIG))
    try:
        tokenizer = AutoTokenizer.from_pretrained(given.name)
    except Exception as error:  # a damaged tokenizer.json raises Exception itself, others of its parts what they like
        raise _refused(job, _fault(given.name, error)) from error
    if given.chat_template not in {None, "default"}:
        key = job.where("policy.tokenizer.chat_template")
        is_a_file = given.chat_template.endswith(".jinja")
        tokenizer.chat_template = _template(Path(given.chat_template), key) if is_a_file else given.chat_template
        if "{" not in tokenizer.chat_template:
            raise PackproofError(
                what=f"the chat template {tokenizer.chat_template[:60]!r} must contain {{{{ or {{%, or all conversations are rendered as the same text",
                where=key,
                fix="write a template, or give the path of a file that ends in .jinja",
            )
    return tokenizer


def check_tokenizer(job: Job) -> list[PackproofError]:
    """Return why the folder is not a tokenizer, without loading it: a note of a dry run, a refusal of a run
    (R-SETUP-19).

    A name that Hugging Face may have is not looked up.
    """
    name = job.policy.tokenizer.name
    if name and is_there(name) and Path(name).is_dir():
        why = folder_fault(Path(name))
    else:
        why = _absent(name) if name and _is_a_path(name) and not is_there(name) else None
    return [] if why is None else [_refused(job, why)]


def rows_needed(tokenizer: Any) -> int:
    """Return the rows of an embedding that has one for every id of the tokenizer."""
    return int(max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1))


def vocabulary_size(job: Job, tokenizer: Any) -> int:
    """Return the rows of the embedding: the job's, or the tokenizer's rounded up to a multiple of tp.

    Raises PackproofError where ids exceed it.
    """
    needed = rows_needed(tokenizer)
    if job.model.vocab_size is None:
        return round_up(needed, job.megatron.tensor_model_parallel_size)
    if job.model.vocab_size < needed:
        raise PackproofError(
            what=f"must be at least {needed}, since the tokenizer has ids up to {needed - 1}, got {job.model.vocab_size}",
            where=job.where("model.vocab_size"),
            fix=f"give at least {needed}, a multiple of tensor_model_parallel_size, or leave it out",
        )
    return job.model.vocab_size


def _refused(job: Job, why: str) -> PackproofError:
    return PackproofError(
        what=f"no tokenizer can be loaded from {job.policy.tokenizer.name}: {why}",
        where=job.where("policy.tokenizer.name"),
        fix=_FIX,
    )


def _fault(name: str, error: Exception) -> str:
    """Return why the tokenizer cannot be loaded, in the job's words; transformers' message stands only where nothing
    else is known.
    """
    said = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    if name and Path(name).is_dir():
        return next(folder_faults(Path(name)), f"one of its files is damaged: {type(error).__name__}: {said}")
    if name and Path(name).exists():
        return "it is a file, and no folder"
    absent = _absent(name)
    return absent if _is_a_path(name) else f"{absent}, and Hugging Face's of this name cannot be had: {said}"


def _absent(name: str) -> str:
    return f"there is no such folder ({Path(name).absolute()})"


def _is_a_path(name: str) -> bool:
    """Return whether a name is a path: Hugging Face's names are at most `owner/name`."""
    return name.count("/") > 1 or name.startswith((".", "~", "/")) or name.endswith("/")


def _template(path: Path, where: str) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        fix = "name a file of UTF-8 text that is there, or write the template itself"
        raise PackproofError(what=f"the chat template cannot be read: {error}", where=where, fix=fix) from error
