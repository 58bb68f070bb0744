"""Checkpoints on disk: which stay, what of a damaged one is said, and the weights of one in a file of their own."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training_job_worlds as jobs
from safetensors import safe_open

from production.training.checkpoint import manifest
from production.training.checkpoint.megatron_state import not_finite

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

MEGATRON = "policy.megatron_cfg"


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """A job of tp 2 with a gated MLP, experts and a depth, with a checkpoint after each of two steps, and its weights at its end."""
    folder = tmp_path_factory.mktemp("saved")
    changes = {
        f"{MEGATRON}.mtp_num_layers": 1,
        f"{MEGATRON}.tensor_model_parallel_size": 2,
        "model.num_moe_experts": 2,
        "model.moe_ffn_hidden_size": 16,
        f"{MEGATRON}.moe_layer_freq": [0, 1],
        "model.gated_linear_unit": True,
        "model.activation": "silu",
        "checkpointing.save_period": 1,
        "sft.max_num_steps": 2,
    }
    config = jobs.write_job(folder, jobs.write_rows(folder / "rows.jsonl"), **changes)
    results = world(2, "weights", {"config": str(config), "after": True})
    assert results[0][0]["step"] == 2
    return folder, results


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it that may be damaged."""
    shutil.copytree(saved[0] / "checkpoints", tmp_path / "checkpoints")
    config = json.loads((saved[0] / "job.yaml").read_text())
    config["checkpointing"]["checkpoint_dir"] = str(tmp_path / "checkpoints")
    config["logger"]["log_dir"] = str(tmp_path / "logs")
    (tmp_path / "job.yaml").write_text(json.dumps(config))
    return tmp_path


def go_on(world, folder, *overrides):
    payload = {"config": str(folder / "job.yaml"), "overrides": ["sft.max_num_steps=3", *overrides]}
    return world(2, "train", payload | {"overrides": [*payload["overrides"], LENGTH]})


LENGTH = f"{MEGATRON}.scheduler.lr_decay_iters=2"


def flipped(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_intact_checkpoint_can_be_resumed(world, folder):
    assert [found["step"] for found in go_on(world, folder)] == [3, 3]


def test_a_flipped_byte_in_any_file_is_found_before_anything_is_loaded(world, folder):
    newest = folder / "checkpoints" / "step_00000002"
    names = sorted(path.name for path in newest.iterdir())
    assert any(name.endswith(".distcp") for name in names)
    for name in names:
        path = newest / name
        whole = path.read_bytes()
        flipped(path, len(whole) // 2)
        for found in go_on(world, folder):
            assert found["kind"] == "CheckpointRefused", (name, found)
            assert name in found["refused"]
            assert "step_00000002" in found["refused"]
            assert "the checkpoint before it" in found["refused"]
        path.write_bytes(whole)


@pytest.mark.parametrize("ranks", range(1, 8))
def test_any_number_of_ranks_reads_every_file_between_them(saved, tmp_path, monkeypatch, ranks):
    """Also a number that does not divide the number of files, and more ranks than files."""
    whole = tmp_path / "step_00000002"
    shutil.copytree(saved[0] / "checkpoints" / whole.name, whole)
    names = [*manifest.read_manifest(whole).files]
    seen = []

    def gathered(everyone, fault):
        everyone[:] = [fault] * len(everyone)

    def read(path):
        seen.append(path.name)
        return digest(path)

    def verified_by_all():
        for rank in range(ranks):
            stand_in = SimpleNamespace(
                get_rank=lambda rank=rank: rank, get_world_size=lambda: ranks, all_gather_object=gathered
            )
            monkeypatch.setattr(manifest, "distributed", stand_in)
            manifest.verify(whole)

    digest = manifest.digest
    monkeypatch.setattr(manifest, "digest", read)
    verified_by_all()
    assert sorted(seen) == sorted(names)
    flipped(whole / names[-1], 0)
    with pytest.raises(manifest.CheckpointRefused, match="changed after it was written"):
        verified_by_all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["weight", "buffer", "main weight", "first moment", "second moment"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_that_is_not_finite_is_saved(where, bad, dtype):
    """One of each kind in the last place of a tensor, and the name of what holds it."""
    model = torch.nn.Linear(3, 2).to(dtype)
    model.register_buffer("extra", torch.zeros(4, dtype=dtype))
    model.sharded_state_dict = None  # as megatron-core's modules have one
    parameters = [torch.nn.Parameter(each.detach().clone()) for each in model.parameters()]
    adam = torch.optim.Adam(parameters)
    for each in parameters:
        each.grad = torch.ones_like(each)
    adam.step()
    engine = SimpleNamespace(model=model, optimizer=SimpleNamespace(optimizer=adam))
    assert not_finite(engine) is None
    moments = adam.state[parameters[-1]]
    places = {
        "weight": (model.bias, "weight bias"),
        "buffer": (model.extra, "buffer extra"),
        "main weight": (parameters[-1], "the optimizer's weight 1"),
        "first moment": (moments["exp_avg"], "the optimizer's exp_avg of weight 1"),
        "second moment": (moments["exp_avg_sq"], "the optimizer's exp_avg_sq of weight 1"),
    }
    tensor, name = places[where]
    with torch.no_grad():
        tensor.view(-1)[-1] = bad
    assert not_finite(engine) == f"{name} is not finite"


def test_a_missing_file_is_refused_and_the_checkpoint_before_serves_once_it_is_moved_away(world, folder):
    newest = folder / "checkpoints" / "step_00000002"
    (newest / ".metadata").unlink()
    for found in go_on(world, folder):
        assert ".metadata is missing" in found["refused"]
    newest.rename(folder / "away")
    for found in go_on(world, folder):
        assert list(found["losses"]) == [2, 3]


def test_a_folder_without_its_manifest_is_passed_over(world, folder):
    (folder / "checkpoints" / "step_00000002" / "packproof.json").unlink()
    for found in go_on(world, folder):
        assert list(found["losses"]) == [2, 3]


def test_a_checkpoint_without_optimizer_is_refused_for_a_resume(world, tmp_path):
    rows = jobs.write_rows(tmp_path / "rows.jsonl")
    config = jobs.write_job(tmp_path / "bare", rows, **{"checkpointing.save_optimizer": False, "sft.max_num_steps": 1})
    first, again = world(1, "train_in_turn", [{"config": str(config)}] * 2)[0]
    assert first["step"] == 1
    assert "without the optimizer's state" in again["refused"]


@pytest.mark.parametrize(("better", "kept"), [("false", ["2", "5"]), ("true", ["3", "5"])])
def test_the_best_and_the_newest_stay(world, tmp_path, better, kept):
    rows = jobs.write_rows(tmp_path / "rows.jsonl")
    changes = {
        "sft.max_num_steps": 5,
        "checkpointing.save_period": 1,
        "checkpointing.keep_top_k": 2,
        "checkpointing.metric_name": "train:loss",
        "checkpointing.higher_is_better": better == "true",
    }
    config = jobs.write_job(tmp_path, rows, **changes)
    losses = {1: 3.0, 2: 1.0, 3: 9.0, 4: float("nan"), 5: 2.0}
    (found,) = world(1, "train_measured", {"config": str(config), "losses": losses})
    assert found["step"] == 5
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == kept


def test_the_newest_checkpoints_stay_without_a_metric(world, tmp_path):
    rows = jobs.write_rows(tmp_path / "rows.jsonl")
    config = jobs.write_job(tmp_path, rows, **{"checkpointing.save_period": 1, "checkpointing.keep_top_k": 2})
    world(1, "train", {"config": str(config)})
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


def test_a_metric_that_no_run_has_is_refused(world, tmp_path):
    rows = jobs.write_rows(tmp_path / "rows.jsonl")
    config = jobs.write_job(tmp_path, rows, **{"checkpointing.metric_name": "train:accuracy"})
    (found,) = world(1, "train", {"config": str(config)})
    assert "must be one of train:loss, val:val_loss, got 'train:accuracy'" in found["refused"]


def test_exported_weights_are_those_of_the_unsharded_model(saved, tmp_path):
    folder, results = saved
    out = tmp_path / "weights.safetensors"
    command = [sys.executable, "-m", "production.training.export"]
    done = subprocess.run(
        [*command, str(folder / "checkpoints" / "step_00000002"), str(out)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    with safe_open(out, "pt") as file:
        found = {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118 - safetensors is no dict
        assert file.metadata()["step"] == "2"
    # Checkpoints name norms as Transformer Engine's fused layers have them, whichever layers wrote them, and a depth's layer of old.
    stored = {
        ".mtp_model_layer.": ".transformer_layer.",
        ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
        ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
    }
    expected = {}
    for name, values in jobs.together(results).items():
        renamed = name
        for own, other in stored.items():
            if renamed not in found:
                renamed = renamed.replace(own, other)
        expected[renamed] = values
    assert any(".local_experts.1." in name for name in found)
    assert sorted(found) == sorted(expected)
    assert found == expected


def test_a_hugging_face_checkpoint_without_megatron_bridge_is_refused_by_name(world, tmp_path):
    rows = jobs.write_rows(tmp_path / "rows.jsonl")
    config = jobs.write_job(tmp_path, rows, **{"model.initial": "huggingface", "model.initial_path": "some/model"})
    (found,) = world(1, "train", {"config": str(config)})
    assert "model.initial" in found["refused"]
    assert "Megatron-Bridge is not installed" in found["refused"]
    assert "megatron-bridge" in found["refused"]


def test_an_export_to_hugging_face_without_megatron_bridge_is_refused_by_name(saved, tmp_path, capsys):
    from production.training.export import main

    checkpoint = str(saved[0] / "checkpoints" / "step_00000002")
    assert main([checkpoint, str(tmp_path / "out"), "--huggingface", "some/model"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("failed: export --huggingface: Megatron-Bridge cannot be imported")
    assert "without --huggingface" in printed
    assert not (tmp_path / "out").exists()


def test_an_export_to_hugging_face_hands_megatron_bridge_the_whole_model(world, saved, tmp_path):
    """Megatron-Bridge itself cannot be installed here: what stands in for it keeps what it is called with."""
    folder, results = saved
    payload = {"checkpoint": str(folder / "checkpoints" / "step_00000002"), "out": str(tmp_path / "out")}
    (kept,) = world(1, "exported_to_hugging_face", payload)
    assert (kept["name"], kept["folder"]) == ("some/model", str(tmp_path / "out"))
    weights = {name: tensor.numpy().tobytes() for name, tensor in kept["weights"].items()}
    assert any(".local_experts.1." in name for name in weights)
    assert weights == jobs.together(results)


def test_an_export_to_hugging_face_writes_over_nothing(saved, tmp_path, monkeypatch, capsys):
    from production.training.export import main

    (tmp_path / "file").write_text("")
    monkeypatch.setattr("production.training.checkpoint.huggingface.check_bridge", lambda where: where)
    checkpoint = str(saved[0] / "checkpoints" / "step_00000002")
    assert main([checkpoint, str(tmp_path), "--huggingface", "some/model"]) == 2
    assert f"{tmp_path}: it cannot be written: it is there already" in capsys.readouterr().err


def test_megatron_lm_loads_the_exported_folder_with_its_own_code_and_one_flag(world, saved, tmp_path):
    checkpoint, out = saved[0] / "checkpoints" / "step_00000002", tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "production.training.export", str(checkpoint), str(out), "--megatron-lm"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--load {out} --finetune" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "2"
    payload = {"folder": str(out), "checkpoint": str(checkpoint), "flags": ["--finetune"]}
    (found,) = world(1, "loaded_by_megatron_lm", payload)
    assert found["equal"]
    assert found["weights"] > 10
    assert found["iteration"] == 0, "a new run begins"
    # --use-checkpoint-args takes the shape of the model from it.
    config = json.loads((saved[0] / "job.yaml").read_text())
    model, arguments = config["model"], found["arguments"]
    for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "moe_ffn_hidden_size"):
        assert arguments[name] == model[name], name
    assert (arguments["num_experts"], arguments["swiglu"], arguments["normalization"]) == (2, True, "RMSNorm")
    assert (arguments["mtp_num_layers"], arguments["moe_layer_freq"]) == (1, [0, 1])
    assert (arguments["add_bias_linear"], arguments["untie_embeddings_and_output_weights"]) == (False, True)
    assert (found["stored"]["iteration"], found["stored"]["no_save_optim"], found["stored"]["no_save_rng"]) == (
        2,
        True,
        True,
    )
    assert found["stored"]["consumed_train_samples"] > 0


def test_every_argument_in_an_exported_folder_is_one_of_megatron_lm(saved):
    from production.training.checkpoint.manifest import read_manifest
    from production.training.checkpoint.megatron_lm import model_arguments
    from production.training.export import _settings
    from tools.from_megatron_lm.arguments import DERIVED
    from tools.from_megatron_lm.reading import defaults

    manifest = read_manifest(saved[0] / "checkpoints" / "step_00000002")
    found = vars(model_arguments(_settings(manifest), iteration=2, consumed_samples=8))
    assert found.keys() - defaults().keys() - DERIVED == {"iteration"}


def test_an_export_to_megatron_lm_writes_over_nothing_and_takes_no_damaged_checkpoint(folder, tmp_path, capsys):
    from production.training.export import main

    checkpoint = folder / "checkpoints" / "step_00000002"
    assert main([str(checkpoint), str(tmp_path), "--megatron-lm"]) == 2
    assert f"{tmp_path}: it cannot be written: it is there already" in capsys.readouterr().err
    flipped(next(checkpoint.glob("*.distcp")), 100)
    out = tmp_path / "out"
    assert main([str(checkpoint), str(out), "--megatron-lm"]) == 2
    assert not out.exists()
    with pytest.raises(SystemExit):
        main([str(checkpoint), str(out), "--megatron-lm", "--huggingface", "x"])


STARTS = {
    "Megatron-LM's, without a manifest": ("iter_0000002", [], None),
    "one whose manifest is not there": ("step_00000009", [], "the folder must be a whole checkpoint"),
    "the folder above it": (".", [], "step_00000002"),
    "a tied model": (
        "step_00000002",
        ["model.tie_embeddings=true"],
        "weights that the model does not have: output_layer.weight",
    ),
    "a larger vocabulary": (
        "step_00000002",
        ["model.vocab_size=4608"],
        "rows, got 4608 (embedding.word_embeddings.weight): rows would be left zero. To fix it: set model.vocab_size to 4096",
    ),
    "another number of experts": (
        "step_00000002",
        ["model.num_moe_experts=4"],
        "megatron-core cannot load the checkpoint",
    ),
    "no multi-token depth": ("step_00000002", [f"{MEGATRON}.mtp_num_layers=0"], None),
}


def test_weights_start_a_run_where_all_of_them_have_a_place(world, saved, folder):
    checkpoints = folder / "checkpoints"
    for name in ("iter_0000002", "step_00000009"):
        shutil.copytree(checkpoints / "step_00000002", checkpoints / name)
        (checkpoints / name / "packproof.json").unlink()
    payload = [
        {
            "config": str(folder / "job.yaml"),
            "overrides": [
                "model.initial=megatron",
                f"model.initial_path={checkpoints / name}",
                "sft.max_num_steps=1",
                "checkpointing.enabled=false",
                f"{MEGATRON}.scheduler.lr_decay_iters=1",
                *overrides,
            ],
        }
        for name, overrides, _ in STARTS.values()
    ]
    for each in world(2, "train_in_turn", payload):
        for found, (case, (_, _, refused)) in zip(each, STARTS.items(), strict=True):
            if refused is None:
                assert found.get("step") == 1, (case, found)
            else:
                assert refused in found["refused"], (case, found)
    start = [f"model.initial_path={checkpoints / 'iter_0000002'}", "model.initial=megatron", "sft.max_num_steps=1"]
    begun = world(2, "weights", payload[0] | {"overrides": [*payload[0]["overrides"], *start]})
    assert jobs.together(begun) == jobs.together(saved[1])


def test_a_validation_loss_belongs_to_the_step_it_was_made_at(world, tmp_path):
    rows = jobs.write_rows(tmp_path / "rows.jsonl")
    changes = {
        "sft.max_num_steps": 5,
        "sft.val_period": 2,
        "data.validation.dataset_name": "megatron_sft_packed",
        "data.validation.data_path": str(rows),
        "checkpointing.save_period": 1,
        "checkpointing.keep_top_k": 2,
        "checkpointing.metric_name": "val:val_loss",
    }
    config = jobs.write_job(tmp_path, rows, **changes)
    world(1, "train", {"config": str(config)})
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name[-1] for path in kept] == ["4", "5"], "the best that was measured, and the newest"
    has = ["val:val_loss" in json.loads((path / "packproof.json").read_text())["metrics"] for path in kept]
    assert has == [True, False]


def test_a_run_whose_rate_does_not_decay_may_be_made_longer(world, tmp_path):
    rows = jobs.write_rows(tmp_path / "rows.jsonl")
    changes = {f"{MEGATRON}.scheduler.lr_decay_style": "constant", f"{MEGATRON}.optimizer.min_lr": None}
    config = str(jobs.write_job(tmp_path, rows, **changes, **{"checkpointing.save_period": 2}))
    steps = [{"config": config, "overrides": [f"sft.max_num_steps={last}"]} for last in (2, 3)]
    first, longer = world(1, "train_in_turn", steps)[0]
    assert (first["step"], longer.get("step"), longer.get("refused")) == (2, 3, None)
