"""What goes wrong in a running job ends it with a message that names it: a rank that hangs, a full disk, a loss that is not a number."""

import json
import threading
import time
from collections import Counter

import pytest
import training_job_worlds as jobs

from equivalence.workers import CaseFailed
from production.files.source import open_source
from production.parallel.sizes import RankCoordinates
from production.training.config import load
from production.training.data.batch_stream import BatchStream
from production.training.data.order import Order
from production.training.metrics.loggers import read_records
from production.training.metrics.summary import summarize

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

MEGATRON = "policy.megatron_cfg"


HUNG = {
    "sleeps": "rank 1 is alive and did not come to the collective that others wait in, but hangs at ",
    "is_halted": "rank 1 is gone: no sign of life for 2 s",
}


@pytest.mark.parametrize(("layout", "happens"), [("data", "is_halted"), ("context", "sleeps")])
def test_a_rank_that_hangs_is_named_in_the_configured_time_and_ends(world, rows, tmp_path, happens, layout):
    changes = {"cluster.timeout_seconds": 6, "checkpointing.enabled": False}
    if layout == "context":
        changes[f"{MEGATRON}.context_parallel_size"] = 2
    config = str(jobs.write_job(tmp_path, rows, **changes))
    payload = {"config": config, "step": 2, "rank": 1, "happens": happens, "folder": str(tmp_path), "silent_seconds": 2}
    began = time.monotonic()
    with pytest.raises(CaseFailed) as failed:
        # The one that hangs ends by itself; one that is halted cannot, and is killed with its world.
        world(2, "train_disturbed_apart", payload, after_failure_s=30 if happens == "sleeps" else 0)
    assert time.monotonic() - began < 60
    waiting = json.loads((tmp_path / "0.json").read_text())
    assert waiting["kind"] == "RankLost"
    assert HUNG[happens] in waiting["refused"]
    if happens == "sleeps":
        assert "training_job_worlds.py" in waiting["refused"]
        assert "in sleeps, called from" in waiting["refused"]
        assert "failed: rank 1 hangs at the call above: it did not come to a collective" in str(failed.value)


FULL = {
    "tensors": ({"rank": 1}, "rank 1: [Errno 27] File too large"),
    "manifest": ({"rank": 0}, "rank 0: the disk is full: [Errno 28] No space left on device"),
}


@pytest.mark.parametrize("what", FULL)
def test_a_disk_that_fills_up_leaves_the_checkpoint_before_and_is_named_by_all(world, rows, tmp_path, what):
    options, named = FULL[what]
    config = str(jobs.write_job(tmp_path, rows, **{"checkpointing.save_period": 1}))
    for found in world(2, "train_on_full_disk", {"config": config, "what": what, "full_at": 2, **options}):
        assert found["kind"] == "CheckpointFailed", found
        assert named in found["refused"]
        assert "step_00000001, is as it was" in found["refused"]
        assert f"saving a checkpoint to {tmp_path / 'checkpoints'}" in found["refused"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    for found in world(2, "train", {"config": config}):
        assert list(found["losses"]) == [2, 3, 4]


def blend(folder):
    parts = [jobs.write_rows(folder / f"{first}.jsonl", rows=7, first=first) for first in (0, 20)]
    return {
        "data.train.data_path": [
            {"path": str(path), "weight": weight} for path, weight in zip(parts, (3, 1), strict=True)
        ],
        "data.last_batch": "wrap",
        "data.shuffle": True,
        "data.num_workers": 2,
    }


def tokens(fed):
    return [each.input_ids.tolist() for each in fed.microbatches]


def test_a_rebuilt_step_equals_the_fed_step_while_later_steps_are_prepared(tmp_path, monkeypatch):
    config = jobs.write_job(tmp_path, tmp_path / "none", **blend(tmp_path), **{"data.prefetch": 64})
    place = RankCoordinates(
        rank=0, world_size=1, tensor_rank=0, context_rank=0, context_size=1, data_rank=0, data_size=1,
        pipeline_rank=0, pipeline_size=1,
    )  # fmt: skip
    compared, planned, asked = 0, Counter(), Order.batch_at

    def batch_at(order, consumed_samples):
        planned[id(order), threading.current_thread().name] += 1
        return asked(order, consumed_samples)

    monkeypatch.setattr(Order, "batch_at", batch_at)
    with BatchStream(load(str(config)), place) as feed:
        steps, fed = feed.steps(), []
        for _ in range(30):
            fed.append(next(steps))
            for one in fed[-1::-7]:
                again = feed.rebuild_step(one.consumed_samples - 4)
                assert again.samples == one.samples
                assert tokens(again) == tokens(one)
                compared += 1
        own = {thread: count for (order, thread), count in planned.items() if order == id(feed.order)}
    assert compared > 60
    # The first step is planned at the loader's opening, to refuse what is refused; from then on its order is its thread's alone.
    assert own.pop("MainThread") == 1
    assert list(own) == ["packproof-loader"]


def test_a_loss_that_is_not_a_number_dumps_the_rows_of_its_step_of_a_blend(world, tmp_path):
    changes = blend(tmp_path) | {"logger.report_period": 10, "checkpointing.enabled": False, "sft.max_num_steps": 6}
    fed = str(jobs.write_job(tmp_path / "fed", tmp_path / "none", **changes, **{"logger.dump_batch_steps": [3]}))
    bad = str(jobs.write_job(tmp_path / "bad", tmp_path / "none", **changes))
    world(2, "train", {"config": fed})
    for found in world(2, "train_disturbed", {"config": bad, "step": 3, "happens": "poisons"}):
        assert found["kind"] == "NotFinite", found
    for rank in (0, 1):
        name = f"logs/dumps/step_00000003/rank_{rank}.rows.json"
        told = [json.loads((tmp_path / each / name).read_text())["rows"] for each in ("fed", "bad")]
        assert len(told[0]) == 2
        assert told[0] == told[1]


def test_stop_ends_a_job_before_an_incomplete_global_batch_and_says_so(world, rows, tmp_path):
    changes = {
        "policy.train_global_batch_size": 5,
        "sft.max_num_steps": None,
        "sft.max_num_epochs": 3,
        "data.last_batch": "stop",
    }
    config = str(jobs.write_job(tmp_path, rows, **changes))
    longer = {"config": config, "overrides": ["sft.max_num_epochs=7"]}
    found, again = world(1, "train_in_turn", [{"config": config}, longer])[0]
    assert (found["reason"], found["step"], found["consumed_samples"]) == ("data ended", 2, 10)
    assert (again["reason"], again["step"], again["losses"]) == ("data ended", 2, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    end, _ = jobs.records(tmp_path, "end")
    why = "the epoch's last 2 rows fill no global batch of 5 (data.last_batch: stop)"
    assert end.pop("time") > 1.7e9
    assert end == {"kind": "end", "step": 2, "reason": "data ended", "why": why, "consumed_samples": 10}
    assert summarize(read_records(tmp_path / "logs" / "metrics.jsonl")).ended == f"data ended: {why}"
    assert len(open_source(rows)) == 12


def test_stop_ends_at_the_epochs_where_they_are_whole(world, rows, tmp_path):
    changes = {"sft.max_num_steps": None, "sft.max_num_epochs": 2, "data.last_batch": "stop"}
    config = str(jobs.write_job(tmp_path, rows, **changes, **{"checkpointing.enabled": False}))
    (found,) = world(1, "train", {"config": config})
    assert (found["reason"], found["step"], found["consumed_samples"]) == ("finished", 6, 24)
    (end,) = jobs.records(tmp_path, "end")
    assert end["why"] == "sft.max_num_epochs: 2"


def test_a_weight_decay_grows_over_the_steps_of_the_run_whose_length_then_stays(world, rows, tmp_path):
    changes = {
        "sft.max_num_steps": None,
        "sft.max_num_epochs": 2,
        f"{MEGATRON}.scheduler.lr_decay_iters": 3,
        f"{MEGATRON}.scheduler.start_weight_decay": 0.0,
        f"{MEGATRON}.scheduler.end_weight_decay": 0.6,
        f"{MEGATRON}.scheduler.weight_decay_incr_style": "linear",
        "checkpointing.save_period": 4,
    }
    config = str(jobs.write_job(tmp_path, rows, **changes))
    found, decays = world(1, "weight_decays", {"config": config})[0]
    assert found["step"] == 6
    # Six steps of the run, not the three after which the rate has decayed: a tenth a step.
    assert decays == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], abs=1e-15)
    (longer,) = world(1, "train", {"config": config, "overrides": ["sft.max_num_epochs=3"]})
    assert "scheduler.weight_decay_steps: saved 6, now 9" in longer["refused"]
    assert "sft.max_num_epochs" in longer["refused"]
