"""Find everything for which a job must not run, before any model is built: `refusals` finds all, `validate` raises
the first (docs/spec-setup.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from production.errors import PackproofError
from production.files.file_state import is_there
from production.files.manifest import Manifest, other_files, read_manifest
from production.tokens.fingerprint import differences_from_json, fingerprint_tokenizer
from production.tokens.folder import load_folder
from production.training.config.checks.batches import check_batches, check_data, check_length
from production.training.config.checks.layers import check_pattern
from production.training.config.checks.megatron import (
    check_contradictions,
    check_megatron,
    check_overlap,
    check_precision,
)
from production.training.config.checks.model import check_model, check_optimizer
from production.training.config.checks.options import check_kernels, check_unsupported, check_values
from production.training.config.checks.run import check_checkpoints, check_schedule, check_start, check_steps
from production.training.config.checks.setup import (
    Setup,
    check_layout,
    check_nemo_rl,
    check_paths,
    check_switches,
)
from production.training.config.refusal import SetupRefused
from production.training.config.schema.job import Job

_CHECKS: tuple[Callable[[Setup], Iterator[SetupRefused]], ...] = (
    check_nemo_rl,
    check_switches,
    check_paths,
    check_unsupported,
    check_layout,
    check_batches,
    check_data,
    check_length,
    check_contradictions,
    check_overlap,
    check_precision,
    check_kernels,
    check_steps,
    check_schedule,
    check_checkpoints,
    check_start,
    check_model,
    check_pattern,
    check_optimizer,
    check_values,
)


def validate(job: Job, world_size: int, *, device: str | None = None) -> None:
    """Raise the first SetupRefused of `refusals` for a job that must not run on `world_size` ranks. Needs no process
    group.

    `device` is `cpu` or `cuda` where it is known. None stands for the value of `cluster.device`; where that is
    `auto`, checks that depend on the device are left out.
    """
    for refusal in refusals(job, world_size, device=device):
        raise refusal


def refusals(job: Job, world_size: int, *, device: str | None = None) -> list[SetupRefused]:
    """Return all reasons why a job must not run on `world_size` ranks, in the order of docs/spec-setup.md; empty where
    it may run.

    A missing kernel package is not a reason on a machine without CUDA that the job does not run on: see `notes`.
    """
    found, is_elsewhere = _look(job, world_size, device)
    return [each for each in found if not (is_elsewhere and each.kind == "not_installed")]


def notes(job: Job, world_size: int, *, device: str | None = None) -> list[str]:
    """Return what could not be checked here, for lack of a kernel package that the job's own machine must have."""
    found, is_elsewhere = _look(job, world_size, device)
    return [f"not checked here: {each}" for each in found if is_elsewhere and each.kind == "not_installed"]


def packed_otherwise(job: Job) -> list[str]:
    """Return the settings in which the manifest beside a packed file differs from the job.

    The differences are notes, not refusals (R-SETUP-21): such rows are cut or padded by the rules, as Megatron-LM
    does silently.
    """
    found: dict[str, list[str]] = {}
    for split, datasets in (("train", job.data.train), ("validation", job.data.validation)):
        for index, dataset in enumerate(datasets):
            if not dataset.is_packed:
                continue
            key = job.dataset_key(split, index)
            trained = {
                "pack_length": (job.policy.max_total_sequence_length, "policy.max_total_sequence_length"),
                "prompt_format": (dataset.megatron_sft_prompt_format, f"{key}.megatron_sft_prompt_format"),
                "context_parallel_size": (
                    dataset.megatron_sft_context_parallel_size,
                    "policy.megatron_cfg.context_parallel_size",
                ),
                "semantics": (dataset.semantics, f"{key}.semantics"),
            }
            for file in dataset.data_path:
                for each in _otherwise(Path(file.path), trained, Path(job.policy.tokenizer.name or "")):
                    found.setdefault(each, []).append(f"{key}.data_path")
    return [f"{', '.join(keys)}: {told}" for told, keys in found.items()]


def _otherwise(file: Path, trained: Mapping[str, tuple[Any, str]], tokenizer: Path) -> Iterator[str]:
    try:
        manifest = read_manifest(file)
    except PackproofError as error:
        yield str(error)
        return
    if manifest is None:
        return
    for name, said in manifest.settings.items():
        value, key = trained[name]
        # Segments that 2·cp divides are divided by less, too: they only have more padding than they need.
        if value == said or (name == "context_parallel_size" and said % value == 0):
            continue
        told = f"{file} was packed for {name} {said} (its manifest says so), and is trained with {value} ({key})"
        is_cut = name == "pack_length" and value < said
        yield told + (": what lies behind that in a row is cut off, and conversations there are lost" if is_cut else "")
    if not (tokenizer.name and tokenizer.is_dir()):
        return
    other = other_files(manifest, tokenizer)
    if manifest.tokenizer and not other:
        return  # the very files
    shifted = [] if manifest.tokenizer_fingerprint is None else _shifted(manifest, tokenizer)
    if shifted or (other and manifest.tokenizer_fingerprint is None):
        are = f"{', '.join(other)} {'is' if len(other) == 1 else 'are'} not what its manifest says" if other else "it is not what the manifest says"  # fmt: skip
        yield (
            f"{file} was packed with another tokenizer than policy.tokenizer.name {tokenizer}: {are}, so conversations may be longer than their places in a row"
            + (f". {' '.join(shifted)}" if shifted else "")
        )


def _shifted(manifest: Manifest, tokenizer: Path) -> list[str]:
    """Return how a tokenizer behaves otherwise than the one that packed the rows; a folder that cannot be loaded is refused elsewhere."""
    try:
        now = fingerprint_tokenizer(load_folder(tokenizer))
    except PackproofError:
        return ["The tokenizer cannot be loaded here."]
    return differences_from_json(manifest.tokenizer_fingerprint, now, name=str(manifest.path))


def missing_files(job: Job) -> list[SetupRefused]:
    """Return data and weights that are not on this machine: notes of a dry run, refusals of a run (R-SETUP-19)."""
    setup = Setup(job=job, world_size=1, device=None)
    wanted = {
        file.path: f"{job.dataset_key(split, index)}.data_path"
        for split, datasets in (("train", job.data.train), ("validation", job.data.validation))
        for index, dataset in enumerate(datasets)
        for file in dataset.data_path
    }
    if job.model.initial == "megatron" and job.model.initial_path is not None:
        wanted[job.model.initial_path] = "model.initial_path"
    if job.data.certificate is not None:
        wanted[job.data.certificate] = "data.certificate"
    template = job.policy.tokenizer.chat_template
    if template is not None and template.endswith(".jinja"):
        wanted[template] = "policy.tokenizer.chat_template"
    found = []
    for path, key in wanted.items():
        is_folder = is_there(path) and Path(path).is_dir()
        if not path or not is_there(path):
            fix = "give a path that exists; paths are relative to the folder in which the job is started"
            found.append(setup.refuse("no_file", key, f"{path or 'a file without a name'} is not on this machine", fix))
        elif is_folder != (key == "model.initial_path"):
            is_one, wants = ("a folder", "a file") if is_folder else ("a file", "the folder of a checkpoint")
            found.append(setup.refuse("no_file", key, f"{path} must be {wants}, got {is_one}", f"name {wants}"))
    return found


def device_here(job: Job) -> str:
    """Return `cpu` or `cuda`: the value of `cluster.device`, or the device here.

    SetupRefused where CUDA is asked for and absent (R-SETUP-13).
    """
    is_here = torch.cuda.is_available()
    if job.cluster.device == "cuda" and not is_here:
        fix = "set it to cpu, or start the job on a machine with a GPU"
        raise Setup(job=job, world_size=1, device=None).refuse(
            "device", "cluster.device", "must be cpu or auto without a CUDA device, got cuda", fix
        )
    return job.cluster.device if job.cluster.device != "auto" else "cuda" if is_here else "cpu"


def _look(job: Job, world_size: int, device: str | None) -> tuple[list[SetupRefused], bool]:
    chosen = device if device is not None or job.cluster.device == "auto" else job.cluster.device
    setup = Setup(job=job, world_size=world_size, device=chosen)
    found = [refusal for check in _CHECKS for refusal in check(setup)]
    # megatron-core's own word comes last, and only where its reasons are not already among ours in other words.
    found = found or list(check_megatron(setup))
    return found, chosen != "cpu" and not torch.cuda.is_available()
