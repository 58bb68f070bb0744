"""Any value of any option is refused with its key, or the model builds: odd values are drawn by the hundred, with a fixed seed."""

import dataclasses
import enum
import json
import os
import random
import types
import typing

import pytest
import torch
import training_job_worlds as jobs

from production.errors import PackproofError
from production.training.admission import oversized
from production.training.config import ConfigRefused, Job, load, refusals
from production.training.config.keys import PASSED_ON
from production.training.config.megatron_options import option_fields
from production.training.config.schema.plain import ABOUT_THE_FILES

pytestmark = pytest.mark.worlds

MEGATRON = "policy.megatron_cfg"
WHOLE = (0, -1, 1, 3, 99, 10**12, 2**63, 10**40)
REAL = (0.0, -1.0, 0.5, 1e300, ".inf", "-.inf", ".nan")
LISTS = ([], [0], [-1], [10**12], ["x"], [".nan"], [[1]])
DRAWS = 120


def odd_values(hint):
    """As YAML."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [value for each in arguments for value in odd_values(each)]
    if hint is int:
        return [str(each) for each in WHOLE]
    if hint is float:
        return [str(each) for each in REAL]
    if hint is torch.dtype:
        return ["float16", "float64", "nonsense"]
    if origin in (list, tuple) or hint in (list, tuple):
        return [json.dumps(each).replace('".nan"', ".nan") for each in LISTS]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [each.name for each in hint]
    return {bool: ["true", "false", "1"], str: ['""', "x", "null"]}.get(hint, ["null", "[]", "1"])


def keys(kind, key=""):
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        full = f"{key}.{field.name}" if key else field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from keys(hints[field.name], full)
        elif field.name not in (*ABOUT_THE_FILES, "train", "validation", *PASSED_ON):
            yield full, hints[field.name]


@pytest.fixture(scope="module")
def draws(tmp_path_factory):
    """Of each draw the overrides and the job that came of it, or its refusal."""
    folder = tmp_path_factory.mktemp("draws")
    config = str(jobs.write_job(folder, jobs.write_rows(folder / "rows.jsonl")))
    choice = random.Random(7)
    known = [*keys(Job)]
    known += [
        (f"{MEGATRON}.{kind}.{name}", hint) for kind in PASSED_ON for name, hint in option_fields(kind).items()
    ] * 2
    found = []
    for _ in range(DRAWS):
        key, hint = choice.choice(known)
        overrides = [f"{key}={choice.choice(odd_values(hint))}"]
        try:
            job = load(config, overrides)
            refused = refusals(job, 1, device="cpu") or oversized(job, 1, "cpu")
        except ConfigRefused as error:
            job, refused = None, [error]
        found.append((overrides, job, refused))
    return found


def test_whatever_an_option_is_given_it_is_refused_by_key_or_taken(draws):
    refused = [each for _, _, [*reasons] in draws for each in reasons]
    assert all(each.where and each.what and each.fix for each in refused)
    assert 25 < sum(job is not None and not reasons for _, job, reasons in draws) < 100


def test_no_option_takes_nan_infinity_or_a_huge_number(draws):
    for overrides, job, reasons in draws:
        if overrides[0].endswith(("inf", ".nan", ".nan]", str(10**40))):
            assert job is None or reasons, overrides


def builds(job, folder):
    """What megatron-core says where it does not make model and optimizer of the job, in a process of its own that may not take the machine.

    The process stands in `folder`: some options are paths that it writes to.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import resource
        import signal

        os.chdir(folder)
        signal.alarm(60)
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        said = b""
        try:
            from production.training.config import sizes
            from production.training.distributed.launch import launched
            from production.training.engine import Engine

            with launched(sizes(job), device="cpu", timeout_seconds=30, seed=1) as rank:
                Engine(job, rank.place, vocab_size=4096)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the test asks for
            said = f"{type(error).__name__}: {error}".encode()
        os.write(write, said[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return said or (f"ended with {status}" if status else "")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_accepted_configurations_build(draws, tmp_path):
    from production.training.engine import Engine

    assert Engine
    taken = [
        (overrides, job) for overrides, job, reasons in draws
        if job is not None and not reasons and overrides[0].startswith((MEGATRON, "model."))
    ]  # fmt: skip
    for overrides, job in random.Random(1).sample(taken, 8):
        assert builds(job, tmp_path) == "", overrides


LOOPS = [
    (["recompute_num_layers=0"], "recompute_num_layers"),
    (["recompute_num_layers=-1"], "recompute_num_layers"),
    (["recompute_num_layers=99"], "recompute_num_layers"),
]


@pytest.mark.parametrize(("options", "key"), LOOPS)
def test_layers_that_are_recomputed_together_are_as_many_as_there_are(tmp_path, options, key):
    config = str(jobs.write_job(tmp_path, tmp_path / "none"))
    full = [f"{MEGATRON}.recompute_granularity=full", f"{MEGATRON}.recompute_method=uniform"]
    (refused,) = refusals(load(config, [*full, *(f"{MEGATRON}.{each}" for each in options)]), 1, device="cpu")
    assert refused.key == f"{MEGATRON}.{key}"
    assert "give 1 or more, up to 2" in refused.fix


WSD = [f"{MEGATRON}.scheduler.lr_decay_style=WSD", f"{MEGATRON}.scheduler.lr_wsd_decay_style=linear", f"{MEGATRON}.optimizer.min_lr=0.0"]  # fmt: skip
REFUSED = [
    ([*WSD, f"{MEGATRON}.scheduler.lr_wsd_decay_iters=0"], f"{MEGATRON}.scheduler.lr_wsd_decay_iters"),
    ([*WSD, f"{MEGATRON}.scheduler.lr_wsd_decay_iters=5"], f"{MEGATRON}.scheduler.lr_wsd_decay_iters"),
    ([f"{MEGATRON}.scheduler.lr_decay_iters=-1"], f"{MEGATRON}.scheduler.lr_decay_iters"),
    (["model.num_layers=1000000000000"], "model.num_layers"),
    ([f"{MEGATRON}.mtp_num_layers=1000000000000"], f"{MEGATRON}.mtp_num_layers"),
    ([f"{MEGATRON}.init_method_std=-1.0"], f"{MEGATRON}.init_method_std"),
    ([f"{MEGATRON}.env_vars={{RANK: '3'}}"], f"{MEGATRON}.env_vars.RANK"),
    ([f"{MEGATRON}.transformer.pipeline_model_parallel_layout=[]"], f"{MEGATRON}.transformer.pipeline_model_parallel_layout"),
    (["data.num_workers=1000000"], "data.num_workers"),
    (["cluster.timeout_seconds=1000000000000"], "cluster.timeout_seconds"),
    (["sft.val_period=3", "checkpointing.save_period=2", "checkpointing.metric_name=val:val_loss"], "checkpointing.metric_name"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key"), REFUSED)
def test_options_that_would_fail_later_or_train_something_else_are_refused_at_their_key(tmp_path, overrides, key):
    validated = {"data.validation.dataset_name": "megatron_sft_packed", "data.validation.data_path": "none"}
    config = str(jobs.write_job(tmp_path, tmp_path / "none", **validated))
    assert [each.key for each in refusals(load(config, overrides), 1, device="cpu")] == [key]


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_a_learning_rate_that_is_not_a_number_is_refused_at_its_line(tmp_path, value):
    config = str(jobs.write_job(tmp_path, tmp_path / "none"))
    with pytest.raises(PackproofError, match=r"optimizer\.lr") as refused:
        load(config, [f"{MEGATRON}.optimizer.lr={value}"])
    assert "finite number" in refused.value.fix
