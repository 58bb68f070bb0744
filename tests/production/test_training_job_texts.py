"""What a job says of a resume, an end, a rank, a logger or a file, in the words of its configuration; no world is needed for it."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import training_job_worlds as jobs
from torch._C._distributed_c10d import HashStore

from production.errors import PackproofError
from production.parallel.sizes import RankCoordinates
from production.training.checkpoint.manifest import CheckpointRefused
from production.training.checkpoint.weights import _check_rows
from production.training.config import load, refusals
from production.training.config.schema.sections import Sft
from production.training.data.batch_stream import BatchStream
from production.training.data.fingerprint import FIX, ResumeRefused, check_resume, option
from production.training.distributed import heartbeat
from production.training.export import _settings
from production.training.resume import check_same
from production.training.run_identity import identity
from production.training.run_record import config_hash, open_run_loggers
from production.training.shutdown import length_reached, nothing_left

MEGATRON = "policy.megatron_cfg"
PLACE = RankCoordinates(
    rank=0, world_size=1, tensor_rank=0, context_rank=0, context_size=1, data_rank=0, data_size=1, pipeline_rank=0,
    pipeline_size=1,
)  # fmt: skip
DIRECT = {
    f"{MEGATRON}.mtp_num_layers": 1,
    f"{MEGATRON}.moe_layer_freq": [0, 1],
    f"{MEGATRON}.optimizer.weight_decay": 0.1,
    f"{MEGATRON}.distributed_data_parallel_config.bucket_size": 100,
    "data.shuffle": True,
}
ONLINE = {
    "data.train.dataset_name": "openai_format",
    "policy.sequence_packing.enabled": True,
    "loss.normalization": "global_valid_tokens",
}


def identity_of(folder, data, changes):
    config = jobs.write_job(folder, data, **changes, **{"data.num_workers": 0})
    job = load(config)
    with BatchStream(job, PLACE) as feed:
        return config, identity(job, feed.identity(), world_size=PLACE.world_size, vocab_size=4096, run_steps=4)


@pytest.mark.parametrize("changes", [DIRECT, ONLINE], ids=["direct", "online"])
def test_the_key_that_fixes_a_resume_is_one_that_a_configuration_takes(tmp_path, changes):
    write = jobs.write_chat if changes is ONLINE else jobs.write_rows
    config, saved = identity_of(tmp_path, write(tmp_path / "rows.jsonl"), changes)
    named = 0
    for key, value in saved.items():
        now = {each: other for each, other in saved.items() if each != key}
        with pytest.raises(ResumeRefused) as caught:
            check_resume(saved, now)
        if key in FIX:
            assert caught.value.fix == FIX[key]
            continue
        assert re.match(rf"set {re.escape(option(key))} (\(or [^)]*\) )?to ", caught.value.fix)
        job = load(config, [f"{option(key)}={json.dumps(value)}"])
        # An option that was moved to its section stands there; null may be derived again.
        there = option(key) if option(key) in job.sources else f"{MEGATRON}.{key}"
        assert value is None or job.sources[there].kind == "override"
        named += 1
    assert named > 40
    with pytest.raises(ResumeRefused) as caught:
        check_resume(saved, saved | {"transformer.init_method_std": 0.5})
    told = f"take {MEGATRON}.init_method_std (or {MEGATRON}.transformer.init_method_std, where it stands there) out"
    assert told in caught.value.fix


def test_other_files_are_reported_with_rows_and_short_fingerprints():
    saved = {"files": [{"fingerprint": "0123456789abcdef", "rows": 12}]}
    with pytest.raises(ResumeRefused) as caught:
        check_resume(saved, {"files": [{"fingerprint": "fedcba9876543210", "rows": 22}]})
    told = "files: saved 12 rows (fingerprint 01234567), now 22 rows (fingerprint fedcba98)"
    assert caught.value.what == f"the run must have the settings and files that it was saved with, and differs: {told}"
    assert caught.value.fix.startswith("give data.train.data_path the files")


def test_a_resumed_run_past_its_last_step_ends_and_says_so():
    four = Sft(max_num_steps=4, max_num_epochs=None)
    assert length_reached(6, four) == length_reached(4, four) == "sft.max_num_steps: 4"
    assert length_reached(3, Sft(max_num_steps=4, max_num_epochs=1)) == "sft.max_num_epochs: 1"
    told = nothing_left(6, 4, reason="finished", why=length_reached(6, four))
    assert told == "step 6 is already past sft.max_num_steps 4: nothing to train"
    assert nothing_left(4, 4, reason="finished", why=length_reached(4, four)).startswith("step 4 is already at sft.max")
    cut = nothing_left(2, 2, reason="data ended", why="the epoch's last 2 rows fill no global batch of 5")
    assert cut == "step 2 is already at its end (the epoch's last 2 rows fill no global batch of 5): nothing to train"


def naps(woken):
    while not woken.is_set():
        time.sleep(0.02)


def watch(store, rank, watched):
    made = object.__new__(heartbeat._Watch)
    vars(made).update(_store=store, _rank=rank, _size=3, _job=1, _watched=watched, _ended=threading.Event())
    return made


def test_a_rank_that_reported_its_hang_counts_as_alive_for_a_third_rank(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.05)
    ended = []
    monkeypatch.setattr(heartbeat.os, "_exit", ended.append)
    store, woken = HashStore(), threading.Event()
    sleeper = threading.Thread(target=naps, args=(woken,))
    sleeper.start()
    one, hung, third = (watch(store, rank, sleeper.ident) for rank in range(3))
    third._store.set(third._key("waited", 2), "")
    answers = threading.Thread(target=hung._answer)
    answers.start()
    try:
        while not one._said("hangs", 1):
            time.sleep(0.01)
        before = one._counts()[1]
        time.sleep(0.3)
        assert one._counts()[1] >= before + 2
        told = one.verdict()
        answers.join()
        assert ended == [1]
        # Its note counts also once it has ended and is silent.
        for lost_rank in (told, third.verdict()):
            assert "rank 1 is alive" in lost_rank.what
            assert "but hangs at " in lost_rank.what
    finally:
        hung._ended.set()
        woken.set()
        answers.join()
        sleeper.join()


@pytest.mark.parametrize(
    ("stored", "rows", "ranks", "fix"),
    [
        (4608, 4096, 1, "set model.vocab_size to 4608"),
        (4096, 4608, 2, "set model.vocab_size to 4096"),
        (4097, 4100, 2, "set model.vocab_size to 4098, the checkpoint's padded to a multiple of tensor_model_parallel_size 2"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_vocabulary_is_refused_with_both_sizes(stored, rows, ranks, fix):
    name = "embedding.word_embeddings.weight"
    with pytest.raises(CheckpointRefused, match=fix) as caught:
        _check_rows(Path("there"), name, stored=stored, model=(rows, ranks))
    assert f"{stored} rows, got {rows} ({name})" in caught.value.what
    assert ("cut off" if rows < stored else "left zero") in caught.value.what


def test_only_the_padding_for_tensor_parallelism_may_add_vocabulary_rows():
    for stored, rows, ranks in ((4096, 4096, 2), (4097, 4098, 2), (4097, 4097, 1)):
        _check_rows(Path("there"), "output_layer.weight", stored=stored, model=(rows, ranks))
    _check_rows(Path("there"), "decoder.final_layernorm.weight", stored=16, model=None)


STAGES = {
    "a pattern in stages": {
        "model.architecture": "hybrid",
        "model.hybrid_layer_pattern": "*-|*-",
        "model.num_layers": None,
    },
    "uneven stages": {"model.num_layers": 4, f"{MEGATRON}.num_layers_in_first_pipeline_stage": 1},
    "a layout": {f"{MEGATRON}.pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]]},
    "the embedding counted": {
        "model.num_layers": 3,
        f"{MEGATRON}.account_for_embedding_in_pipeline_split": True,
    },
}


@pytest.mark.parametrize("case", STAGES)
def test_an_export_builds_the_model_of_a_pipeline_in_one_stage(tmp_path, case):
    changes = STAGES[case] | {f"{MEGATRON}.pipeline_model_parallel_size": 2}
    config = load(jobs.write_job(tmp_path, tmp_path / "none", **changes)).describe()
    before = json.dumps(config)
    made = _settings(SimpleNamespace(config=config, fingerprint={"model.vocab_size": 4096}))
    assert "|" not in (made.hybrid_layer_pattern or "")
    assert not [name for name in made.transformer if "pipeline" in name and "parallel_size" not in name]
    assert json.dumps(config) == before
    assert dataclasses.is_dataclass(made)


def test_a_file_of_fewer_rows_than_a_global_batch_is_refused_by_its_keys(tmp_path):
    rows = jobs.write_rows(tmp_path / "rows.jsonl", rows=3)
    job = load(jobs.write_job(tmp_path, rows))
    with pytest.raises(PackproofError, match=r"at least 4 rows, one global batch .* got 3") as caught:
        BatchStream(job, PLACE)
    assert str(rows) in caught.value.where
    for key in ("policy.train_global_batch_size", "data.last_batch"):
        assert key in caught.value.what
        assert key in caught.value.fix


def test_an_option_that_only_another_ranks_file_sets_is_named(monkeypatch):
    """In either direction, with both values: a rank would train another model without it."""
    key, told = "transformer.qk_layernorm", "policy.megatron_cfg.qk_layernorm: {} and {}"
    for first, other, values in (({}, {key: True}, ("(not there)", True)), ({key: True}, {}, (True, "(not there)"))):
        ranks = [{"seed": 1} | first, {"seed": 1}, {"seed": 1} | other]

        def gather(found, _mine, ranks=ranks):
            found[:] = ranks

        monkeypatch.setattr("production.training.resume.distributed.all_gather_object", gather)
        with pytest.raises(PackproofError) as caught:
            check_same(ranks[0], SimpleNamespace(world_size=3))
        assert f"{key} differ (" in caught.value.what
        assert told.format(*values) in caught.value.what
        assert "rank 0 and rank " in caught.value.where
    monkeypatch.setattr(
        "production.training.resume.distributed.all_gather_object",
        lambda found, mine: found.__setitem__(slice(None), [mine]),
    )
    check_same({"seed": 1}, SimpleNamespace(world_size=1))


def test_a_rank_whose_torchrun_was_killed_saves_and_ends_by_itself(tmp_path):
    """It is asked for an end at once, and ended where it does not come to one in the time that a collective has."""
    rank = (
        "import sys, time, pathlib\n"
        "from production.training.distributed import orphan\n"
        "orphan.POLL_SECONDS = 0.05\n"
        "asked, folder = [], pathlib.Path(sys.argv[1])\n"
        "with orphan.outliving_no_launcher(asked, timeout_seconds=0.5):\n"
        "    (folder / 'pid').write_text('')\n"
        "    while not asked: time.sleep(0.02)\n"
        "    (folder / 'asked').write_text(asked[0])\n"
        "    time.sleep(60)\n"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}, {str(tmp_path)!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "one", "PYTHONPATH": str(Path(__file__).parents[2])}
    with (tmp_path / "printed").open("w") as printed:
        started = subprocess.Popen([sys.executable, "-c", launcher], env=environment, stderr=printed)
    child = wait_for(lambda: (tmp_path / "pid").exists() and psutil.Process(started.pid).children()[0])
    started.kill()
    started.wait()
    child.wait(timeout=30)
    assert (tmp_path / "asked").read_text() == "LAUNCHER_GONE"
    told = (tmp_path / "printed").read_text()
    assert f"torchrun (process {started.pid}) is gone: this rank saves and ends" in told
    assert "failed: torchrun is gone, and this rank did not come to the end of a step" in told


def wait_for(found):
    until = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return value


def test_a_metric_that_no_checkpoint_has_differs_from_one_that_some_have(tmp_path):
    validated = {"data.validation.dataset_name": "megatron_sft_packed", "data.validation.data_path": "none"}
    config = jobs.write_job(tmp_path, tmp_path / "none", **validated, **{"checkpointing.metric_name": "val:val_loss"})
    for period, every, at_end, is_refused in (
        (3, 2, "false", True),
        (3, 2, "true", False),
        (2, 2, "false", False),
        (4, 3, "false", False),
    ):
        overrides = [f"sft.val_period={period}", f"checkpointing.save_period={every}", f"sft.val_at_end={at_end}"]
        keys = [each.key for each in refusals(load(config, overrides), 1, device="cpu")]
        assert keys == (["checkpointing.metric_name"] if is_refused else []), overrides


def test_wandb_continues_the_run_of_the_checkpoint(tmp_path, monkeypatch):
    opened = {}
    monkeypatch.setattr(
        "production.training.run_record.open_loggers",
        lambda settings, **more: opened.update(more, settings=settings),
    )
    job = load(jobs.write_job(tmp_path, tmp_path / "none", **{"logger.wandb_enabled": True}))
    open_run_loggers(job, SimpleNamespace(place=PLACE, device="cpu"), run="abc", finished_steps=3, skipped_rows=2)
    assert (opened["settings"].wandb.run_id, opened["finished_steps"]) == ("abc", 3)
    assert (opened["run"]["run"], opened["run"]["rows_skipped"]) == ("abc", 2)


def test_a_configurations_hash_depends_on_its_values_and_not_on_their_spelling(tmp_path):
    first, same, other = (
        load(jobs.write_job(tmp_path, tmp_path / "none"), overrides)
        for overrides in ([], ["sft.seed=42"], ["sft.seed=43"])
    )
    assert config_hash(first) == config_hash(same) != config_hash(other)


@pytest.mark.parametrize(
    "key", ["logger.log_dir", "checkpointing.checkpoint_dir", "data.cache_folder", "policy.tokenizer.name"]
)
def test_an_empty_path_is_refused_by_its_key(tmp_path, key):
    job = load(jobs.write_job(tmp_path, tmp_path / "none"), [f'{key}=""'])
    assert [each.key for each in refusals(job, 1, device="cpu")] == [key]
