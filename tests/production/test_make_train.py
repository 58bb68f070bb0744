"""`make train` as the Makefile has it, made small by overrides: what it prints, saves, logs and draws is what its metrics.jsonl says."""

import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import distributed
from torch._C._distributed_c10d import HashStore

from production.training.config import load
from production.training.metrics.progress import compact, duration
from production.training.metrics.summary import COLOURS, VALIDATION_COLOUR
from production.training.resume import checkpoints_of, found_checkpoint

pytestmark = pytest.mark.worlds

ROOT = Path(__file__).parents[2]
STEPS = [1, 2, 3]
SVG = "{http://www.w3.org/2000/svg}"
WANDB_READER = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

data, place, part, found = Path(sys.argv[1]).read_bytes(), 7, b"", {"history": [], "config": {}}
while place < len(data):
    if (room := 32768 - place % 32768) < 7:
        place += room
        continue
    _, length, kind = struct.unpack_from("<IHB", data, place)
    part += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind not in (1, 4):  # whole, or the last piece
        continue
    record, part = Record.FromString(part), b""
    named = lambda items: {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in items}
    if record.WhichOneof("record_type") == "history":
        found["history"].append(named(record.history.item))
    elif record.WhichOneof("record_type") == "run":
        found |= {"project": record.run.project, "name": record.run.display_name}
        found["config"] |= named(record.run.config.update)
print(json.dumps(found))
"""
"""Reads a run of W&B, a log of records as LevelDB writes it, in a process of its own: importing wandb leaves hooks behind."""


def overrides(folder):
    """What makes the job of `make train` a matter of seconds, with all that it writes in a folder."""
    return {
        "sft.max_num_steps": 3,
        "sft.val_at_start": "false",
        "sft.val_batches": 1,
        "policy.train_global_batch_size": 2,
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_attention_heads": 2,
        "model.ffn_hidden_size": 32,
        "checkpointing.checkpoint_dir": folder / "checkpoints",
        "logger.log_dir": folder / "logs",
        "logger.wandb_enabled": "true",
        "logger.wandb.mode": "offline",
        "logger.wandb.project": "small",
        "logger.wandb.name": "one",
    }


def recipe(given):
    """The Makefile's command, with these arguments."""
    (command,) = re.findall(r"^train:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = command.replace("$(BIN)", str(Path(sys.executable).parent)).replace("$(ARGS)", shlex.join(given))
    assert "$" not in command
    return command


def run(command, cwd, environment):
    """Exit status, standard output and standard error; no process is left, whatever happens."""
    job = subprocess.Popen(
        ["/bin/bash", "-c", command],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = job.communicate(timeout=480)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return job.returncode, printed, errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the run left behind, in a folder that looks like a checkout from the inside."""
    folder, checkout = tmp_path_factory.mktemp("train"), tmp_path_factory.mktemp("checkout")
    (checkout / "examples").symlink_to(ROOT / "examples")
    given = [f"{key}={value}" for key, value in overrides(folder).items()]
    wandb = {f"WANDB_{name}_DIR": str(folder / "of-wandb" / name) for name in ("CONFIG", "CACHE", "DATA")}
    environment = {"GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "160", **wandb}
    status, printed, errors = run(recipe(given), checkout, environment)
    assert status == 0, errors
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    return SimpleNamespace(
        folder=folder,
        job=load([str(ROOT / "examples" / "jobs" / "small-cpu.yaml")], given),
        records=[json.loads(line) for line in lines],
        printed=printed,
        errors=errors,
        left_in_checkout=sorted(each.name for each in checkout.iterdir()),
    )


def of_kind(trained, kind):
    return [each for each in trained.records if each["kind"] == kind]


def values(record):
    """What a record measured: its kind, step and time are what every logger has beside it."""
    assert abs(record["time"] - time.time()) < 3600
    return {name: value for name, value in record.items() if name not in ("kind", "step", "time")}


def test_it_takes_its_steps_validates_once_and_ends(trained):
    kinds = [(each["kind"], each["step"]) for each in trained.records]
    assert kinds == [("run", 0), ("step", 1), ("step", 2), ("step", 3), ("validation", 3), ("end", 3)]
    begun, ended = trained.records[0], trained.records[-1]
    assert (begun["world_size"], begun["data_parallel_size"], begun["device"]) == (2, 2, "cpu")
    assert values(ended) == {"reason": "finished", "why": "sft.max_num_steps: 3", "consumed_samples": 6}
    for step in of_kind(trained, "step"):
        assert all(7 < step[name] < 10 for name in ("loss", "mtp_1_loss", "mtp_2_loss"))  # log 4096 is 8.3
        assert step["consumed_samples"] == 2 * step["step"]
        assert step["tokens"] == 2 * 2048
    assert trained.printed == ""
    assert "Traceback" not in trained.errors
    # Trained as the sample was packed: the only note says how to make a certificate.
    notes = [line for line in trained.errors.splitlines() if "note: " in line]
    assert ["certificate" in note for note in notes] == [True]
    for step in of_kind(trained, "step"):
        assert f"step {step['step']}/3  loss {step['loss']:.4f}  mtp 1 {step['mtp_1_loss']:.4f}" in trained.errors
    assert trained.left_in_checkout == ["examples"]


def test_the_closing_table_has_the_numbers_of_the_file(trained):
    steps = of_kind(trained, "step")
    (validation,) = of_kind(trained, "validation")
    first, last = steps[0], steps[-1]

    def total(name):
        return sum(each[name] for each in steps)

    seconds, valid = total("step_seconds"), f"{validation['validation_loss']:.4f} at step 3"
    padding = sum(each["padding_share"] * each["tokens"] for each in steps) / total("tokens")
    fullest = max(steps, key=lambda each: each["memory_mebibytes"])
    ((rank, count),) = Counter(each["slowest_rank"] for each in steps).most_common(1)
    behind = statistics.median(each["slowest_rank_behind_seconds"] for each in steps if each["slowest_rank"] == rank)
    expected = {
        "steps": "3",
        "ended": "finished: sft.max_num_steps: 3",
        "loss": f"{first['loss']:.4f} at step 1, {last['loss']:.4f} at step 3",
        "mtp 1 loss": f"{first['mtp_1_loss']:.4f} at step 1, {last['mtp_1_loss']:.4f} at step 3",
        "mtp 2 loss": f"{first['mtp_2_loss']:.4f} at step 1, {last['mtp_2_loss']:.4f} at step 3",
        "validation loss": f"{valid}, best {valid}",
        "time": f"{duration(seconds)}, {duration((steps[1]['step_seconds'] + steps[2]['step_seconds']) / 2)} a step (median)",
        "waiting for rows": f"{total('data_wait_seconds') / seconds:.2%} of the time",
        "tokens": f"{compact(total('tokens') / seconds)} a second, {total('trained_tokens'):,} trained on",
        "padding": f"{padding:.2%} of the positions",
        "rows": f"6, {total('rows_truncated')} cut within a conversation",
        "conversations dropped": f"{total('conversations_dropped')}",
        "memory": f"{fullest['memory_mebibytes']:,.0f} MiB a rank at most, on rank {fullest['memory_rank']}",
        "slowest rank": f"{rank} (tp 0, cp 0, dp {rank}, pp 0) at {count} steps, {duration(behind)} behind the mean (median)",
        "TFLOP/s a device": f"{statistics.median(each['tflops_per_second'] for each in steps):.3g}, "
        "the device's peak is not known: no MFU",
    }
    table = trained.errors.partition("summary of the run")[2]
    assert dict(re.findall(r"^│ (\S.*?) +│ (\S.*?) +│$", table, re.MULTILINE)) == expected
    assert f"numbers: {trained.folder / 'logs' / 'metrics.jsonl'}\n" in table
    assert f"picture: {trained.folder / 'logs' / 'loss.svg'}\n" in table


def test_its_checkpoint_is_one_that_a_resume_begins_with(trained):
    (saved,) = (trained.folder / "checkpoints").iterdir()
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        path, manifest = found_checkpoint(trained.job, checkpoints_of(trained.job))  # which verifies every byte
    finally:
        distributed.destroy_process_group()
    assert (path, path.name) == (saved, "step_00000003")
    assert (manifest.step, manifest.consumed_samples) == (3, 6)
    last, (validation,) = of_kind(trained, "step")[-1], of_kind(trained, "validation")
    assert manifest.metrics == {"train:loss": last["loss"], "val:val_loss": validation["validation_loss"]}


def test_tensorboard_has_every_number_of_the_file(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (trained.folder / "logs" / "tensorboard").iterdir()
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    found = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = {}
    for record in trained.records[1:]:
        for name, value in values(record).items():
            if not isinstance(value, str):
                expected.setdefault(name, []).append((record["step"], float(np.float32(value))))
    assert [step for step, _ in expected["loss"]] == STEPS
    assert found == expected


def test_wandb_kept_every_number_of_the_file_offline(trained):
    (file,) = (trained.folder / "logs" / "wandb").glob("offline-run-*/run-*.wandb")
    command = [sys.executable, "-c", WANDB_READER, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["project"], found["name"]) == ("small", "one")
    facts = values(trained.records[0])
    assert {name: value for name, value in found["config"].items() if name != "_wandb"} == facts
    rows = {}
    for row in found["history"]:
        rows.setdefault(row["_step"], {}).update({name: each for name, each in row.items() if name[0] != "_"})
    expected = {}
    for record in trained.records[1:]:
        expected.setdefault(record["step"], {}).update(values(record))
    assert rows == expected


def test_the_picture_has_a_point_for_each_step_where_its_loss_is(trained):
    steps, (validation,) = of_kind(trained, "step"), of_kind(trained, "validation")
    drawn = ET.parse(trained.folder / "logs" / "loss.svg").getroot()
    assert drawn.tag == f"{SVG}svg"
    labels = [each for each in drawn.iter(f"{SVG}text") if each.get("class") is None and each.get("transform") is None]
    # The axes' own labels say where a number lies: those of losses stand 4 below their line.
    across = {float(each.text): float(each.get("x")) for each in labels if each.get("y") == "277"}
    up = {float(each.text): float(each.get("y")) - 4 for each in labels if each.get("text-anchor") == "end"}
    (low, bottom), (high, top) = min(up.items()), max(up.items())

    def assert_at(points, losses):
        assert [x for x, _ in points] == [across[step] for step, _ in losses]
        for (_, y), (_, loss) in zip(points, losses, strict=True):
            assert y == pytest.approx(bottom + (loss - low) / (high - low) * (top - bottom), abs=0.11)

    paths = {each.get("stroke"): each.get("d") for each in drawn.iter(f"{SVG}path")}
    for colour, name in zip(COLOURS, ("loss", "mtp_1_loss", "mtp_2_loss"), strict=False):
        points = [tuple(map(float, each.split())) for each in paths.pop(colour)[1:].split("L")]
        assert_at(points, [(each["step"], each[name]) for each in steps])
    assert not paths
    dots = [(each.get("fill"), float(each.get("cx")), float(each.get("cy"))) for each in drawn.iter(f"{SVG}circle")]
    by_colour = {
        colour: [each[1:] for each in group] for colour, group in itertools.groupby(dots, lambda each: each[0])
    }
    assert by_colour.keys() == {COLOURS[0], VALIDATION_COLOUR}
    assert_at(by_colour[COLOURS[0]], [(each["step"], each["loss"]) for each in steps])
    assert_at(by_colour[VALIDATION_COLOUR], [(3, validation["validation_loss"])])
