"""Refuse impossible batches, datasets and lengths of rows (SPEC R-SETUP-9 to R-SETUP-11)."""

from __future__ import annotations

from collections.abc import Iterator

from production.errors import PackproofError
from production.online.bins import HYBRID_EXPERT_MULTIPLE, ROW_MULTIPLES, domain_factor
from production.training.config.checks.setup import Setup
from production.training.config.refusal import SetupRefused
from production.training.config.schema.data import CHAT, PACKED, Dataset
from production.training.config.schema.job import Job
from production.training.config.settings import order_settings, row_settings

_MEGATRON = "policy.megatron_cfg"
_FP8 = {"blockwise": "fp8_blockwise", "mxfp8": "fp8_mxfp8"}


def check_batches(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse impossible micro and global batch sizes, and check which side packs (R-SETUP-9)."""
    job, policy = setup.job, setup.job.policy
    for key, size in (
        ("policy.train_micro_batch_size", policy.train_micro_batch_size),
        ("sft.val_micro_batch_size", job.sft.val_micro_batch_size),
    ):
        if size != 1:
            yield setup.refuse(
                "micro_batch_size", key, f"must be 1, got {size}: one row is one microbatch", f"set {key} to 1"
            )
    data_parallel = setup.data_parallel_size
    batches = [("policy.train_global_batch_size", policy.train_global_batch_size)]
    # Where no key says it and nothing is validated, the size is derived from the training's, which is refused itself.
    source = job.sources.get("sft.val_global_batch_size")
    if job.data.validation or (source is not None and source.kind != "derived"):
        batches.append(("sft.val_global_batch_size", job.sft.val_global_batch_size or policy.train_global_batch_size))
    for key, rows in batches:
        if rows < 1 or (data_parallel is not None and rows % data_parallel):
            what = f"must be a multiple of the {data_parallel or 1} data-parallel ranks and at least 1, got {rows}"
            yield setup.refuse("global_batch_size", key, what, f"make it a multiple of {data_parallel or 1}")
    packing = policy.sequence_packing
    if not job.is_packed and not packing.enabled:
        what, fix = f"must be true with {CHAT}, got false: the online path always packs", "set it to true"
        yield setup.refuse("sequence_packing", "policy.sequence_packing.enabled", what, fix)
    if not job.is_packed and job.loss.normalization != "global_valid_tokens":
        what = f"must be global_valid_tokens on the online path, got {job.loss.normalization}: the loss is computed outside the model there"
        fix = "set it to global_valid_tokens, or train on packed rows"
        yield setup.refuse("online_normalization", "loss.normalization", what, fix)


def check_data(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse datasets that may not stand together, and impossible settings of their rows and their order
    (R-SETUP-10).
    """
    job = setup.job
    splits = {"train": job.data.train, "validation": job.data.validation}
    if not job.data.train:
        yield setup.refuse("no_data", "data.train", "must have a dataset to train on", "give data.train a dataset")
        return
    kinds = {dataset.dataset_name for datasets in splits.values() for dataset in datasets}
    if len(kinds) > 1:
        key = next(
            f"{job.dataset_key(split, index)}.dataset_name"
            for split, datasets in splits.items() for index, dataset in enumerate(datasets)
            if dataset.dataset_name != job.data.train[0].dataset_name
        )  # fmt: skip
        what = f"all datasets of a job must have one dataset_name, got {PACKED} and {CHAT}"
        yield setup.refuse("mixed_datasets", key, what, f"set dataset_name of every dataset to {PACKED}, or to {CHAT}")
    for split, datasets in splits.items():
        packed = [index for index, dataset in enumerate(datasets) if dataset.is_packed]
        if len(packed) > 1:
            what = f"data.{split} must have at most one packed dataset, got {len(packed)}"
            fix = "keep one, and name several files in its data_path, with weights for a blend"
            yield setup.refuse("two_packed_datasets", f"{job.dataset_key(split, packed[1])}.dataset_name", what, fix)
        for index, dataset in enumerate(datasets):
            yield from _check_dataset(setup, dataset, job.dataset_key(split, index))
    yield from _check_order(setup)


def check_length(setup: Setup) -> Iterator[SetupRefused]:
    """Refuse lengths that layout and kernels cannot take (R-SETUP-11)."""
    job, policy = setup.job, setup.job.policy
    factor = _domain_factor(job)
    multiple = factor * kernel_divisor(job)
    length, key = policy.max_total_sequence_length, "policy.max_total_sequence_length"
    if length < 1 or length % multiple:
        what = f"must be a multiple of {multiple} = {factor} (2 x cp, x tp with sequence parallelism) x {kernel_divisor(job)} (kernels), got {length}"
        yield setup.refuse(
            "pack_length",
            key,
            what,
            f"pack the rows for {max(1, -(-length // multiple)) * multiple} tokens, and set it to that",
        )
    if job.is_packed:
        return
    each, bins = policy.make_sequence_length_divisible_by or 1, policy.sequence_packing.train_mb_tokens or length
    if each < 1 or each % factor:
        key, what = (
            "policy.make_sequence_length_divisible_by",
            f"must be a multiple of {factor}, by which the ranks divide a sequence, got {each}",
        )
        yield setup.refuse("divisible_by", key, what, f"give a multiple of {factor}, or leave it out")
    if not 1 <= bins <= length:
        what = f"must be from 1 to policy.max_total_sequence_length, {length}, got {bins}"
        yield setup.refuse("bin", "policy.sequence_packing.train_mb_tokens", what, f"give at most {length}")
    longest = job.data.max_input_seq_length or length
    padded = -(-longest // each) * each if each > 0 else longest
    if longest < 1 or padded > bins:
        what = f"must be at least 1 and, rounded up to a multiple of {each}, at most the {bins} tokens of a bin, got {longest} (rounded up {padded})"
        fix = f"give at most {bins // max(each, 1) * max(each, 1)}"
        yield setup.refuse("bin", "data.max_input_seq_length", what, fix)


def kernel_divisor(job: Job) -> int:
    """Return the multiple that the kernels need of a rank's share of a row (R-ONLINE-5, as on the direct path)."""
    given, fp8 = job.megatron.transformer, job.megatron.fp8_cfg
    recipe = fp8.fp8_recipe if fp8.enabled else given.get("fp8_recipe", "delayed")
    is_fp8 = fp8.enabled or given.get("fp8") is not None
    kernel = ROW_MULTIPLES[_FP8.get(str(recipe), "fp8_other") if is_fp8 else "unquantized"]
    is_hybrid = (
        given.get("moe_token_dispatcher_type") == "flex" and given.get("moe_flex_dispatcher_backend") == "hybridep"
    )
    return max(kernel, HYBRID_EXPERT_MULTIPLE if is_hybrid else 1)


def _check_dataset(setup: Setup, dataset: Dataset, key: str) -> Iterator[SetupRefused]:
    context = setup.job.megatron.context_parallel_size
    if dataset.megatron_sft_context_parallel_size != context:
        what = f"must be {_MEGATRON}.context_parallel_size, {context}, got {dataset.megatron_sft_context_parallel_size}"
        fix = f"write ${{{_MEGATRON}.context_parallel_size}}, or leave it out"
        yield setup.refuse("context_parallel_size", f"{key}.megatron_sft_context_parallel_size", what, fix)
    if dataset.is_packed and dataset.megatron_sft_prompt_format is None:
        what, fix = (
            "must be set for packed rows",
            "set the prompt format that the file was packed for, here or in data.default",
        )
        yield setup.refuse("prompt_format", f"{key}.megatron_sft_prompt_format", what, fix)
    prefix = dataset.megatron_sft_assistant_prefix_len or 0
    if prefix < 0 or (prefix and dataset.megatron_sft_prompt_format == "identity"):
        wanted = "must be 0 with the format identity" if prefix > 0 else "must be at least 0"
        yield setup.refuse(
            "prefix", f"{key}.megatron_sft_assistant_prefix_len", f"{wanted}, got {prefix}", "give 0, or leave it out"
        )
    elif setup.job.policy.max_total_sequence_length >= 1 and dataset.megatron_sft_context_parallel_size >= 1:
        try:
            settings = row_settings(setup.job, dataset)
        except PackproofError as error:
            yield setup.refuse("semantics", f"{key}.semantics", f"{error.where}: {error.what}", error.fix)
            return
        if settings.prompt_format == "default" and settings.semantics.default_format == "refuse":
            what = f"must not be default with the semantics {dataset.semantics}, which refuses that format"
            fix = "name another format, or override the preset: default_format=supported"
            yield setup.refuse("prompt_format", f"{key}.megatron_sft_prompt_format", what, fix)


def _check_order(setup: Setup) -> Iterator[SetupRefused]:
    job = setup.job
    if job.data.shuffle and job.data.order != "shuffle":
        what = f"must be shuffle where data.shuffle is true, got {job.data.order}"
        fix = "leave data.shuffle or data.order out"
        yield setup.refuse("order", "data.order", what, fix)
    if job.data.num_workers < 0 or job.data.prefetch < 1:
        key = "data.num_workers" if job.data.num_workers < 0 else "data.prefetch"
        least, given = (0, job.data.num_workers) if job.data.num_workers < 0 else (1, job.data.prefetch)
        yield setup.refuse("order", key, f"must be at least {least}, got {given}", f"give {least} or more")
    if job.data.cache_dir is not None and not job.is_packed:
        what = f"must not be set on the online path, got {job.data.cache_dir!r}: rows packed during training are not cached"
        yield setup.refuse("order", "data.cache_dir", what, "leave data.cache_dir out, or train on packed rows")
    if job.data.cache_limit_gb <= 0:
        what = f"must be more than 0, got {job.data.cache_limit_gb:g}"
        yield setup.refuse(
            "order", "data.cache_limit_gb", what, "give a size in gigabytes, or leave data.cache_dir out"
        )
    files = [
        (f"{job.dataset_key('train', index)}.data_path", file)
        for index, dataset in enumerate(job.data.train) for file in dataset.data_path
    ]  # fmt: skip
    without = [key for key, file in files if file.weight is None]
    if without and len(without) < len(files):
        what = (
            f"all files of a blend must have a weight, or no file, got {len(without)} of {len(files)} files without one"
        )
        fix = "give every file a weight, or take all weights out"
        yield setup.refuse("weights", without[0], what, fix)
        return
    data_parallel = setup.data_parallel_size
    rows = job.policy.train_global_batch_size
    if data_parallel is None or rows < 1 or rows % data_parallel:
        return
    try:
        order_settings(job, data_parallel)
    except PackproofError as error:
        known = {
            "seed": "data.seed",
            "last_batch": "data.last_batch",
            "kind": "data.order",
            "weights": files[0][0],
            "max_epochs": "sft.max_num_epochs",
            "run_steps": "sft.max_num_steps",
        }
        key = next((key for name, key in known.items() if name in error.where), "data.order")
        yield setup.refuse("order", key, error.what, error.fix)


def _domain_factor(job: Job) -> int:
    return domain_factor(
        context_parallel_size=max(1, job.megatron.context_parallel_size),
        tensor_parallel_size=max(1, job.megatron.tensor_model_parallel_size),
        sequence_parallel=bool(job.megatron.sequence_parallel),
    )
