"""Hold a job to the certificate that `packproof check` wrote for it: files, tokenizer and configuration must still be
those that were checked (SPEC R-SETUP-23).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from production.errors import PackproofError
from production.files.file_state import is_there
from production.files.lines import link_cached
from production.files.source import open_source
from production.tokens.fingerprint import TokenizerFingerprint, fingerprint_tokenizer, tokenizer_differences
from production.training.config.fingerprint import ConfigFingerprint, config_differences, fingerprint_config
from production.training.config.refusal import SetupRefused
from production.training.config.schema.job import Job

FORMAT = "packproof-check/1"
"""Value of `format` in a certificate; raised when an old certificate can no longer be read as it was meant."""
HELD = ("proven", "partial")
"""Verdicts of which a job may start: everything that was checked is equal. `partial` leaves parts of the check out."""
KEY = "data.certificate"
_MOST_SHOWN = 6
_NAME = "check.json"
"""File of the certificate in the folder that `packproof check --out` is given."""
_NOT_REPEATED = (KEY, "logger.dump_batch_steps")
"""Keys whose overrides decide nothing of a check."""


def fingerprints(job: Job, tokenizer: Any, ranks: int, *, verify: bool = False) -> dict[str, Any]:
    """Return what a certificate holds a job to, as plain JSON: ranks, tokenizer, files of each dataset, configuration.

    A file is known by the hash of its index, which is built where it is missing or where size, time or samples of the
    file have changed; `verify` reads every byte again. Raises BadInput for a file that cannot be opened.
    """
    return {
        "ranks": ranks,
        "tokenizer": fingerprint_tokenizer(tokenizer).to_json(),
        "files": [_files(job, split, index, verify=verify) for split, index in _datasets(job)],
        "config": fingerprint_config(job).to_json(),
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return, in words, where two results of `fingerprints` differ; empty where they are the same.

    Raises PackproofError for fingerprints that cannot be read.
    """
    told = [] if saved["ranks"] == now["ranks"] else [f"ranks: {saved['ranks']} were checked, now {now['ranks']}"]
    try:
        tokenizers = [TokenizerFingerprint.from_json(each["tokenizer"]) for each in (saved, now)]
        configs = [ConfigFingerprint.from_json(each["config"]) for each in (saved, now)]
        told += [f"tokenizer: {each.removesuffix('.')}" for each in tokenizer_differences(*tokenizers)]
        told += _other_files(saved["files"], now["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise PackproofError(
            what=f"the certificate's fingerprints cannot be read: {error}", where="certificate", fix=_FIX
        ) from error
    keys = [f"configuration: {each.removesuffix('.')}" for each in config_differences(*configs)]
    more = len(keys) - _MOST_SHOWN
    return [*told, *keys[:_MOST_SHOWN], *([f"configuration: {more} more keys differ"] if more > 0 else [])]


def read_certificate(path: Path, where: str = "") -> dict[str, Any]:
    """Return the certificate of a file. PackproofError names the file (or `where`) and what is wrong with it."""
    place = where or str(path)
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise PackproofError(what=f"the certificate {path} cannot be read ({error})", where=place, fix=_FIX) from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        found = read.get("format") if isinstance(read, dict) else type(read).__name__
        raise PackproofError(
            what=f"the certificate {path} must have the format {FORMAT}, got {found!r}", where=place, fix=_FIX
        )
    held = read.get("fingerprints")
    kinds = {"ranks": int, "tokenizer": dict, "files": list, "config": dict}
    if not isinstance(held, dict) or any(type(held.get(name)) is not kind for name, kind in kinds.items()):
        what = f"the certificate {path} has no fingerprints of ranks, tokenizer, files and configuration"
        raise PackproofError(what=what, where=place, fix=_FIX)
    return read


def check_certificate(job: Job, tokenizer: Any, ranks: int) -> None:
    """Refuse a job that is not the one its certificate was made for; do nothing without `data.certificate`.

    Raises SetupRefused (kind `certificate`), alike on every rank.
    """
    if job.data.certificate is None:
        return
    held = _held(job, ranks)
    _compare(job, held, fingerprints(job, tokenizer, ranks, verify=job.data.verify_files), ranks)


def certificate_outlook(job: Job, tokenizer: Any | None, ranks: int) -> tuple[list[PackproofError], list[str]]:
    """Return (reasons, notes) for a dry run: why the run would refuse its certificate, and what could not be compared
    because it is not on this machine.

    Both lists are empty if the job names no `data.certificate`. An index that is missing is built in a temporary folder.
    """
    if job.data.certificate is None:
        return [], []
    try:
        held = _held(job, ranks)
        with tempfile.TemporaryDirectory(prefix="packproof-certificate-") as folder:
            now, notes = _what_is_here(job, tokenizer, ranks, held, Path(folder))
        _compare(job, held, now, ranks)
    except PackproofError as error:
        return [error], []
    return [], [f"not compared with the certificate {job.data.certificate}: {each}" for each in notes]


def without_certificate(job: Job, ranks: int) -> list[str]:
    """Return the note of a packed job that names no certificate: how to make one of `ranks` ranks."""
    if job.data.certificate is not None or not job.is_packed:
        return []
    how = f"{_command(job, ranks)} compares rows of this file with Megatron-LM's"
    return [f"this job has no certificate: {how}, and {KEY}: check/{_NAME} then holds the job to what was checked"]


_FIX = "make the certificate again with packproof check JOB.yaml --out DIR, or take data.certificate out"


def _held(job: Job, ranks: int) -> dict[str, Any]:
    """Return the fingerprints of the job's certificate; SetupRefused where it cannot be read or proves nothing."""
    path = Path(job.data.certificate or "")
    fix = f"make the certificate again ({_anew(job, ranks)}), or take {KEY} out"
    try:
        read = read_certificate(path, job.where(KEY))
    except PackproofError as error:
        raise _refused(job, error.what, fix) from error
    if read.get("verdict") not in HELD:
        raise _refused(
            job,
            f"the certificate's verdict must be one of {', '.join(HELD)}, got {read.get('verdict')!r}: {read.get('summary', 'no summary')}",
            fix,
        )
    held: dict[str, Any] = read["fingerprints"]
    return held


def _compare(job: Job, held: Mapping[str, Any], now: Mapping[str, Any], ranks: int) -> None:
    try:
        told = differences(held, now)
    except PackproofError as error:
        raise _refused(
            job, error.what, f"make the certificate again ({_anew(job, ranks)}), or take {KEY} out"
        ) from error
    if told:
        fix = f"give the job the file, tokenizer and configuration that were checked, or check the job again ({_anew(job, ranks)})"
        raise _refused(job, "; ".join(told), fix)


def _what_is_here(
    job: Job, tokenizer: Any | None, ranks: int, held: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return fingerprints in which what is not on this machine is as the certificate has it, and what that is, in words."""
    kept = None if job.data.cache_folder is None else Path(job.data.cache_folder)
    elsewhere = dataclasses.replace(job, data=dataclasses.replace(job.data, cache_folder=str(folder)))
    files: list[Any] = []
    notes: list[str] = []
    for number, (split, index) in enumerate(_datasets(job)):
        names = [file.path for file in (job.data.train if split == "train" else job.data.validation)[index].data_path]
        if absent := [name for name in names if not (is_there(name) and Path(name).is_file())]:
            notes += [f"the file {name}, which is not on this machine" for name in absent]
            files += held["files"][number : number + 1] or [{}]
            continue
        for name in names:
            link_cached(name, kept, folder)
        files.append(_files(elsewhere, split, index, verify=job.data.verify_files))
    if tokenizer is None:
        name = job.policy.tokenizer.name
        why = "cannot be loaded" if name and is_there(name) else "is not"
        notes.append(f"the tokenizer {name}, which {why} on this machine")
    now = {
        "ranks": ranks,
        "tokenizer": held["tokenizer"] if tokenizer is None else fingerprint_tokenizer(tokenizer).to_json(),
        "files": files,
        "config": fingerprint_config(job).to_json(),
    }
    return now, list(dict.fromkeys(notes))


def _command(job: Job, ranks: int) -> str:
    """Return the command that checks this very job on as many ranks; its certificate goes where the job looks for it."""
    path = Path(job.data.certificate or _NAME)
    folder = os.fspath(path.parent) if job.data.certificate and path.name == _NAME else "check"
    said = [each for each in job.loaded_overrides if each.partition("=")[0] not in _NOT_REPEATED]
    size = ["--world-size", str(ranks)]
    return shlex.join(["packproof", "check", *(job.loaded_files or ("JOB.yaml",)), *said, *size, "--out", folder])


def _anew(job: Job, ranks: int) -> str:
    is_found = Path(job.data.certificate or "").name == _NAME
    return _command(job, ranks) + ("" if is_found else f", then {KEY}: check/{_NAME}")


def _refused(job: Job, what: str, fix: str) -> SetupRefused:
    return SetupRefused(kind="certificate", key=KEY, what=what, where=job.where(KEY), fix=fix)


def _datasets(job: Job) -> Iterator[tuple[str, int]]:
    for split, datasets in (("train", job.data.train), ("validation", job.data.validation)):
        yield from ((split, index) for index in range(len(datasets)))


def _files(job: Job, split: str, index: int, *, verify: bool) -> dict[str, Any]:
    dataset = (job.data.train if split == "train" else job.data.validation)[index]
    with open_source(
        [file.path for file in dataset.data_path],
        chat_key=dataset.chat_key,
        on_bad_row=dataset.on_bad_row,
        cache_folder=job.data.cache_folder,
        verify=verify,
        takes_tool_calls=not dataset.is_packed,
    ) as source:
        return {
            "dataset": job.dataset_key(split, index),
            "names": [file.path for file in dataset.data_path],
            "rows": len(source),
            "fingerprint": source.fingerprint,
        }


def _other_files(saved: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(saved) != len(now):
        yield f"files: {len(saved)} datasets were checked, now {len(now)}"
    for before, after in zip(saved, now, strict=False):
        if (before["fingerprint"], before["rows"]) != (after["fingerprint"], after["rows"]):
            sides = (f"{each['rows']:,} rows ({str(each['fingerprint'])[:12]})" for each in (before, after))
            yield f"file: {', '.join(after['names'])} ({after['dataset']}): " + "{} were checked, now {}".format(*sides)
