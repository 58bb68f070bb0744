"""What ranks of a world do in the tests of the training job, and the small job that they run."""

import contextlib
import json
from pathlib import Path

import torch

TOKENIZER = str(Path(__file__).parents[2] / "examples" / "tokenizers" / "nemotron-mini")
WORDS = [
    "river",
    "stone",
    "lamp",
    "cloud",
    "paper",
    "seven",
    "green",
    "quick",
    "under",
    "table",
    "music",
    "north",
    "apple",
    "winter",
    "glass",
]
ROWS = 12
PACK_LENGTH = 64
MODULES = (
    "production.training.trainer",
    "production.training.data.batch_dump",
    "equivalence.runner.layout_runs",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "rich.progress",
    "torch.distributed.checkpoint",
)


def words(number, count):
    return " ".join(WORDS[(number * 7 + place * place + place) % len(WORDS)] for place in range(count))


def conversation(number):
    return [
        {"role": "system", "content": ""},
        {"role": "user", "content": words(number, 2)},
        {"role": "assistant", "content": words(number + 1, 4 + number % 3)},
    ]


def write_rows(path, rows=ROWS, first=0):
    """Packed rows that fit PACK_LENGTH."""
    lines = [
        json.dumps({"messages": [*conversation(first + 2 * row), *conversation(first + 2 * row + 1)]})
        for row in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_chat(path, rows=ROWS):
    path.write_text("\n".join(json.dumps({"messages": conversation(row)[1:]}) for row in range(rows)) + "\n")
    return path


def settings(folder, data, **changes):
    """The small job as nested mappings: two layers, two repeated depths, dropout."""
    keys = {
        "sft.max_num_steps": 4,
        "sft.max_num_epochs": None,
        "policy.tokenizer.name": TOKENIZER,
        "policy.train_global_batch_size": 4,
        "policy.max_total_sequence_length": PACK_LENGTH,
        "policy.precision": "float32",
        "policy.megatron_cfg.optimizer.optimizer": "adam",
        "policy.megatron_cfg.optimizer.lr": 2e-3,
        "policy.megatron_cfg.optimizer.clip_grad": 1.0,
        "model.vocab_size": 4096,
        "model.num_layers": 2,
        "model.hidden_size": 16,
        "model.ffn_hidden_size": 32,
        "model.num_attention_heads": 2,
        "model.hidden_dropout": 0.1,
        "data.train.dataset_name": "megatron_sft_packed",
        "data.train.data_path": str(data),
        "data.default.megatron_sft_prompt_format": "nemotron-nano-v2",
        "data.num_workers": 1,
        "checkpointing.checkpoint_dir": str(folder / "checkpoints"),
        "logger.log_dir": str(folder / "logs"),
        "logger.tensorboard_enabled": False,
        "logger.progress": False,
        "cluster.device": "cpu",
        **changes,
    }
    nested = {}
    for key, value in keys.items():
        *parents, name = key.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return nested


def write_job(folder, data, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(json.dumps(settings(folder, data, **changes)))
    return path


def losses(outcome):
    """What must be equal to the bit."""
    return {each.step: (each.loss, each.mtp_losses, each.gradient_norm, each.learning_rate) for each in outcome.numbers}


def train(payload, worker):  # noqa: ARG001 - as a world calls it
    """Run the job of a file with overrides; gives how it ended, or what it was refused with."""
    from production.errors import PackproofError
    from production.training.config import load
    from production.training.trainer import run

    try:
        outcome = run(load(payload["config"], payload.get("overrides", ())))
    except PackproofError as error:
        return {"refused": str(error), "kind": type(error).__name__}
    return {
        "step": outcome.step,
        "reason": outcome.reason,
        "consumed_samples": outcome.consumed_samples,
        "losses": losses(outcome),
    }


def train_in_turn(payload, worker):
    """Several jobs one after the other."""
    return [train(each, worker) for each in payload]


def train_disturbed(payload, worker):
    """`train`, with something that happens on `rank` when its step `step` begins."""
    from unittest import mock

    from production.training.engine import Engine

    whole, taken = Engine.step, 0

    def step(self, batches):
        nonlocal taken
        taken += 1
        if taken == payload["step"] and worker.rank == payload.get("rank", worker.rank):
            globals()[payload["happens"]](self)
        return whole(self, batches)

    with mock.patch.object(Engine, "step", step):
        return train(payload, worker)


def train_disturbed_apart(payload, worker):
    """`train_disturbed` for the last case of a world: each rank leaves a file and ends, as a process of its own would."""
    import os

    from production.training.distributed import heartbeat

    heartbeat.SILENT_SECONDS = payload.get("silent_seconds", heartbeat.SILENT_SECONDS)
    heartbeat.HEARTBEAT_SECONDS = heartbeat.SILENT_SECONDS / 5
    found = train_disturbed(payload, worker)
    Path(payload["folder"], f"{worker.rank}.json").write_text(json.dumps(found))
    os._exit(0)


def asks_to_end(_engine):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGTERM)


def poisons(engine):
    """A weight that every token meets becomes NaN."""
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(torch.nan)
        engine.optimizer.reload_model_params()


def sleeps(_engine):
    import time

    time.sleep(3600)


def is_halted(_engine):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSTOP)


def stops(_engine):
    from production.errors import PackproofError

    raise PackproofError(what="a row that cannot be", where="line 7", fix="take it out")


def train_on_full_disk(payload, worker):
    """`train`, where at a step `rank` may write no file beyond 4 KiB (`tensors`), or no manifest (`manifest`)."""
    import errno
    import resource
    from unittest import mock

    from production.training.checkpoint import manager

    writes, saves = manager.write, manager.dist_checkpointing.save

    def written(path, data):
        if payload["what"] == "manifest" and f"step_{payload['full_at']:08d}" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        writes(path, data)

    def saved(state, folder, **options):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if payload["what"] == "tensors" and worker.rank == payload["rank"] and f"{payload['full_at']:08d}" in folder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        try:
            saves(state, folder, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    with (
        mock.patch.object(manager, "write", written),
        mock.patch.object(manager.dist_checkpointing, "save", saved),
    ):
        return train(payload, worker)


def train_killed_in_save(payload, worker):
    """Rank 0 is killed when tensors are written and the manifest is not."""
    import os
    import signal
    from unittest import mock

    from production.training.checkpoint import manager

    writes = manager.write

    def killed(path, data):
        if f"step_{payload['killed_at']:08d}" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        writes(path, data)

    with mock.patch.object(manager, "write", killed):
        return train(payload, worker)


def weights(payload, worker):
    """What came of a job, with the parts of the whole model's weights that this rank held: as it began, or `after` its last step."""
    from unittest import mock

    from production.model.weights import shards
    from production.training.engine import Engine

    parts, made, whole = [], Engine.__init__, Engine.step

    def keep(engine):
        parts[:] = [
            (each.name, each.shape, each.part, each.values.detach().clone())
            for each in shards(engine.model)
            if each.is_main
        ]

    def begun(self, *args, **options):
        made(self, *args, **options)
        keep(self)

    def stepped(self, batches):
        found = whole(self, batches)
        if payload.get("after"):
            keep(self)
        return found

    with mock.patch.object(Engine, "__init__", begun), mock.patch.object(Engine, "step", stepped):
        return train(payload, worker), [(*each[:2], [(at.start, at.stop) for at in each[2]], each[3]) for each in parts]


def together(results):
    """The whole model's weights as bytes by name."""
    from production.model.weights import assemble

    found = {}
    for _, parts in results:
        for name, shape, part, values in parts:
            found.setdefault(name, []).append((shape, tuple(slice(*each) for each in part), values))
    return {name: tensor.numpy().tobytes() for name, tensor in assemble(found).items()}


def counted(payload, worker):
    """What each step of a job would wait for (`waits_of_a_step`), and which collectives of objects it calls."""
    from unittest import mock

    from torch import distributed
    from waits_of_a_step import counting

    from production.training import engine
    from production.training import step as steps

    objects = []

    def naming(name):
        original = getattr(distributed, name)

        def call(*args, **options):
            objects.append(name)
            return original(*args, **options)

        return call

    step = engine.Engine.step

    def stepped(self, batches):
        names = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
        with mock.patch.multiple(distributed, **{name: naming(name) for name in names}):
            return step(self, batches)

    made = steps.process_microbatch

    def reading(*args, **options):
        microbatch = made(*args, **options)
        for _, read in READS_OF_A_MICROBATCH:
            read(microbatch)
        return microbatch

    with contextlib.ExitStack() as patched:
        if payload.get("reads"):
            patched.enter_context(mock.patch.object(steps, "process_microbatch", reading))
        waits = patched.enter_context(counting())
        patched.enter_context(mock.patch.object(engine.Engine, "step", stepped))
        found = train(payload, worker)
    return found, [dict(each) for each in waits.steps], objects


READS_OF_A_MICROBATCH = [
    ("tolist", lambda microbatch: microbatch.input_ids.tolist()),
    ("numpy", lambda microbatch: microbatch.position_ids.numpy()),
    ("cpu", lambda microbatch: microbatch.loss_mask.cpu()),
    ('to("cpu")', lambda microbatch: microbatch.loss_mask.to("cpu")),
    ("aten::_local_scalar_dense", lambda microbatch: microbatch.loss_mask.sum().item()),
    ("aten::_local_scalar_dense", lambda microbatch: bool((microbatch.packed_seq_params.cu_seqlens_q > 0).any())),
    ("aten::nonzero", lambda microbatch: microbatch.labels.nonzero()),
    ("aten::index", lambda microbatch: microbatch.input_ids[microbatch.loss_mask > 0]),
    ("aten::equal", lambda microbatch: torch.equal(microbatch.labels, microbatch.input_ids)),
]
"""Of what lies on the device, with the name by which each must be counted."""


def counted_in_turn(payload, worker):
    """Several jobs one after the other, counted."""
    return [counted(each, worker) for each in payload]


class BehindClock:
    """Of a device that does its work later: a step takes it 1 s, of which the rank's own share is `share`; nothing may be read but
    in a report."""

    def __init__(self, share):
        self.share, self.marks, self.may_read, self.reads = share, 0, False, 0

    def mark(self):
        # In the order of the loop: begin of the step, first wait, its end.
        self.marks += 1
        place = (self.marks - 2) % 3  # the first is the end of what was before
        return (self.marks - 2) // 3 + [0.0, self.share, 1.0][place]

    def between(self, begin, end):
        def seconds():
            assert self.may_read, "read outside of a report"
            self.reads += 1
            return end - begin

        return seconds


def train_behind(payload, worker):
    """`train` with the clock of a device that is behind, and the memory of a rank as given; with how often it was read."""
    from unittest import mock

    from production.training import engine
    from production.training.metrics import step_metrics

    clock = BehindClock(payload["shares"][worker.rank])
    whole = step_metrics.StepMetrics.report

    def reported(self, **options):
        clock.may_read = True
        try:
            return whole(self, **options)
        finally:
            clock.may_read = False

    with (
        mock.patch.object(engine, "clock_here", return_value=clock),
        mock.patch.object(step_metrics.StepMetrics, "report", reported),
        mock.patch.object(step_metrics, "memory_mebibytes", return_value=payload["memory"][worker.rank]),
    ):
        return train(payload, worker), clock.reads


def unlike(payload, worker):
    """A job whose ranks are given different files."""
    return train({"config": payload["configs"][worker.rank]}, worker)


def records(folder, kind):
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == kind]


def train_measured(payload, worker):
    """`train` whose checkpoints are told these losses by step."""
    from unittest import mock

    from production.training.checkpoint.manager import Checkpoints

    whole = Checkpoints.save

    def save(self, engine, **options):
        return whole(self, engine, **options | {"metrics": {"train:loss": payload["losses"][options["step"]]}})

    with mock.patch.object(Checkpoints, "save", save):
        return train(payload, worker)


def weight_decays(payload, worker):
    """What came of a job, with the weight decay that each of its steps was taken with."""
    from unittest import mock

    from production.training.engine import Engine

    whole, found = Engine.step, []

    def step(self, batches):
        found.append(max(group["weight_decay"] for group in self.optimizer.param_groups))
        return whole(self, batches)

    with mock.patch.object(Engine, "step", step):
        return (train_disturbed if "happens" in payload else train)(payload, worker), found


def weight_decays_in_turn(payload, worker):
    """Several jobs one after the other."""
    return [weight_decays(each, worker) for each in payload]


def exported_to_hugging_face(payload, worker):  # noqa: ARG001 - as a world calls it
    """What a stand-in of Megatron-Bridge is given by the export."""
    import sys
    import types
    from unittest import mock

    from production.training.export import export_huggingface

    kept = {}

    class AutoBridge:
        @classmethod
        def from_hf_pretrained(cls, name):
            kept["name"] = name
            return cls()

        def save_hf_pretrained(self, models, folder):
            kept["folder"] = folder
            kept["weights"] = {name: each.detach().clone() for name, each in models[0].named_parameters()}

    bridge = types.ModuleType("megatron.bridge")
    bridge.AutoBridge = AutoBridge
    with mock.patch.dict(sys.modules, {"megatron.bridge": bridge}):
        export_huggingface(Path(payload["checkpoint"]), "some/model", Path(payload["out"]))
    return kept


def loaded_by_megatron_lm(payload, worker):  # noqa: ARG001 - as a world calls it
    """What the installed Megatron-LM takes of a folder: the arguments of the model, the iteration, and whether its weights are the checkpoint's."""
    import argparse

    from megatron.training import checkpointing, global_vars
    from megatron.training.arguments import add_megatron_arguments

    from production.model.model import build_model
    from production.parallel.sizes import ParallelSizes
    from production.training.checkpoint.manifest import read_manifest
    from production.training.checkpoint.weights import load_weights
    from production.training.distributed.launch import launched
    from production.training.export import _settings

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    given = parser.parse_args(["--load", payload["folder"], "--ckpt-format", "torch_dist", *payload["flags"]])
    given.world_size, given.data_parallel_size, given.use_dist_ckpt, given.rank = 1, 1, True, 0
    checkpoint = Path(payload["checkpoint"])
    with launched(ParallelSizes(), device="cpu", timeout_seconds=600, seed=0, deterministic=False):
        given, of_checkpoint = checkpointing.load_args_from_checkpoint(given)
        global_vars.set_args(given)
        first, second = (build_model(_settings(read_manifest(checkpoint)), ParallelSizes()) for _ in range(2))
        load_weights(checkpoint, first)
        iteration, _ = checkpointing.load_checkpoint([second], None, None)
        pairs = [(mine, theirs) for mine, theirs in zip(first.parameters(), second.parameters(), strict=True)]
        equal = all(torch.equal(mine, theirs) for mine, theirs in pairs)
    return {
        "arguments": vars(given),
        "stored": vars(of_checkpoint),
        "iteration": iteration,
        "equal": equal,
        "weights": len(pairs),
    }


def told(payload, worker):
    """Several jobs one after the other, each with what it printed to standard error."""
    import io

    found = []
    for each in payload:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            found.append((train(each, worker), printed.getvalue()))
    return found


def train_beside_another(payload, worker):
    """`train`, while another run's checkpoint appears where that of step 2 is to stand."""
    from unittest import mock

    import msgspec

    from production.training.checkpoint.manifest import read_manifest, sealed
    from production.training.engine import Engine

    whole, taken, folder = Engine.step, 0, Path(payload["folder"])

    def step(self, batches):
        nonlocal taken
        taken += 1
        if taken == 2 and worker.rank == 0:
            other = msgspec.structs.replace(read_manifest(folder / "step_00000001"), run="another")
            (folder / "step_00000002").mkdir()
            (folder / "step_00000002" / "packproof.json").write_bytes(sealed(other))
        return whole(self, batches)

    with mock.patch.object(Engine, "step", step):
        return train(payload, worker)


def train_disturbed_in_save(payload, worker):
    """`train`, where something removes a file of the second checkpoint while it is written."""
    from unittest import mock

    from production.training.checkpoint import manager

    saves = manager.dist_checkpointing.save

    def saved(state, folder, **options):
        saves(state, folder, **options)
        if "step_00000002" in folder:
            next(Path(folder).glob("*.distcp")).unlink()

    with mock.patch.object(manager.dist_checkpointing, "save", saved):
        return train(payload, worker)


def train_from_copies(payload, worker):
    """Several jobs one after the other, those with a `copy` from a copy of that folder of checkpoints."""
    import shutil

    from torch import distributed

    found = []
    for each in payload:
        if "copy" in each and worker.rank == 0:
            shutil.copytree(*each["copy"])
        distributed.barrier()
        found.append(train(each, worker))
    return found
