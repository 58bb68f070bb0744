"""A start from a Hugging Face checkpoint: refused at set-up without Megatron-Bridge, and with it handed each rank's part of the model.

Megatron-Bridge itself wants CUDA and cannot be installed here: what stands in for it has the signatures of its `AutoBridge`.
"""

import math

import pytest
import torch
import training_job_worlds as jobs
from torch import nn

from production.errors import PackproofError
from production.training.checkpoint import huggingface

NAME = "owner/a-model"
MEGATRON = "policy.megatron_cfg"


class AutoBridge:
    """Of releases 0.6 and 0.7, as far as it is called. `fresh` gives one that records what it is called with, and refuses what it is told to."""

    @classmethod
    def from_hf_pretrained(cls, path, **kwargs):
        cls._note("from_hf_pretrained", path, kwargs)
        return cls()

    def load_hf_weights(self, model, hf_path=None, allowed_mismatched_params=None):
        self._note("load_hf_weights", model, hf_path, allowed_mismatched_params)
        self.fill(model)
        return model

    def save_hf_pretrained(self, model, path, show_progress=True, source_path=None, strict=True):  # noqa: FBT002 - its own
        self._note("save_hf_pretrained", model, path, show_progress, source_path, strict)

    def fill(self, model):
        """What the checkpoint holds."""

    @classmethod
    def _note(cls, name, *given):
        cls.called.append((name, *given, torch.is_grad_enabled()))
        if name in cls.refuses:
            raise cls.refuses[name]


def fresh(kind):
    return type(kind.__name__, (kind,), {"called": [], "refuses": {}})


def stand_in(monkeypatch, kind):
    """Megatron-Bridge with this AutoBridge, importable and found as an installed one is."""
    import importlib.machinery
    import sys
    import types

    package = types.ModuleType("megatron.bridge")
    package.AutoBridge = kind
    package.__spec__ = importlib.machinery.ModuleSpec("megatron.bridge", None)
    monkeypatch.setitem(sys.modules, "megatron.bridge", package)


@pytest.fixture
def asked(monkeypatch):
    """The calls of a fresh stand-in."""
    kind = fresh(AutoBridge)
    stand_in(monkeypatch, kind)
    return kind


class Model(nn.Linear):
    """What megatron-core's models are told by."""

    def __init__(self):
        super().__init__(2, 2)

    def sharded_state_dict(self):
        """Not asked for here."""


class Wrapped(nn.Module):
    """As megatron-core's DDP and Float16Module wrap a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_it_is_asked_for_the_name_and_given_the_bare_model_as_a_list_without_gradients(asked):
    model = Model()
    huggingface.load_huggingface(Wrapped(Wrapped(model)), NAME)
    assert asked.called == [
        ("from_hf_pretrained", NAME, {}, True),
        ("load_hf_weights", [model], None, None, False),
    ]
    assert asked.called[1][1][0] is model
    assert torch.is_grad_enabled()


def test_a_model_is_written_as_a_list_to_the_folder(asked, tmp_path):
    model = Model()
    huggingface.save_huggingface(Wrapped(model), NAME, tmp_path)
    assert asked.called == [
        ("from_hf_pretrained", NAME, {}, True),
        ("save_hf_pretrained", [model], str(tmp_path), True, None, True, False),
    ]


@pytest.mark.parametrize("refusal", [ValueError, KeyError, OSError, NotImplementedError, RuntimeError])
@pytest.mark.parametrize("call", ["from_hf_pretrained", "load_hf_weights"])
def test_megatron_bridges_refusal_is_reported_with_checkpoint_and_fix(asked, call, refusal):
    asked.refuses[call] = refusal("of a shape that it does not know")
    with pytest.raises(PackproofError) as caught:
        huggingface.load_huggingface(Model(), NAME)
    assert caught.value.what.startswith("Megatron-Bridge refuses the checkpoint: ")
    assert "of a shape that it does not know" in caught.value.what
    assert caught.value.where == NAME
    assert "set section `model` to the shape in the checkpoint's config.json" in caught.value.fix
    assert caught.value.__cause__ is asked.refuses[call]
    assert torch.is_grad_enabled()


def test_an_error_inside_megatron_bridge_is_not_reported_as_a_refusal(asked):
    asked.refuses["load_hf_weights"] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        huggingface.load_huggingface(Model(), NAME)


def test_a_missing_name_is_refused_before_megatron_bridge_is_called(asked):
    with pytest.raises(PackproofError, match="the name of the weights must not be empty") as caught:
        huggingface.load_huggingface(Model(), "")
    assert caught.value.where == "model.initial_path"
    assert not asked.called


def test_without_the_package_the_key_and_the_extra_are_named():
    with pytest.raises(PackproofError, match="Megatron-Bridge cannot be imported") as caught:
        huggingface.load_huggingface(Model(), NAME)
    assert caught.value.where == "model.initial: huggingface"
    assert "`bridge`" in caught.value.fix


def whole(name, shape):
    """A weight of the checkpoint: no two values of it are alike, and none is what a model begins with."""
    count = math.prod(shape)
    return ((torch.arange(count, dtype=torch.float64).view(shape) / count - 0.5) / 10 + len(name) / 1000).float()


class Filling(AutoBridge):
    """A checkpoint of `whole` weights, of which each rank's part is loaded in place, as Megatron-Bridge does."""

    def fill(self, model):
        from megatron.core import parallel_state

        from production.model.weights import fill

        (chunk,) = model
        fill(chunk, whole)
        config = chunk.config
        self.called[-1] = {
            "class": type(chunk).__name__,
            "layout": (config.tensor_model_parallel_size, config.context_parallel_size, config.pipeline_model_parallel_size),
            "groups": (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_context_parallel_world_size(),
                parallel_state.get_pipeline_model_parallel_world_size(),
            ),
            "rank": parallel_state.get_tensor_model_parallel_rank(),
            "with gradients": torch.is_grad_enabled(),
        }  # fmt: skip


def started(payload, worker):
    """On a rank: a job that begins with the stand-in's checkpoint, the weights that it begins with, and what was done when."""
    from production.training import engine

    kind, make = fresh(Filling), engine.get_megatron_optimizer

    def made(*args, **options):
        kind.called.append("the optimizer is made")
        return make(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, kind)
        patch.setattr(engine, "get_megatron_optimizer", made)
        found, parts = jobs.weights(payload, worker)
    return found, parts, kind.called


def without_a_model(payload, worker):
    """`train` on a rank that can build no model."""
    from unittest import mock

    with mock.patch("production.training.engine.build_model", side_effect=AssertionError("a model is built")):
        return jobs.train(payload, worker)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    return jobs.write_job(
        folder,
        jobs.write_rows(folder / "rows.jsonl"),
        **{
            "model.initial": "huggingface",
            "model.initial_path": NAME,
            "model.hidden_dropout": 0.0,
            "sft.max_num_steps": 2,
            "checkpointing.enabled": False,
        },
    )


@pytest.mark.worlds
def test_every_rank_of_a_layout_begins_with_its_part_of_the_checkpoint(world_of, config):
    losses = {}
    for size, layout in ((1, (1, 1, 1)), (2, (2, 1, 1)), (2, (1, 1, 2))):
        sizes = dict(zip(("tensor_model", "context", "pipeline_model"), layout, strict=True))
        overrides = [f"{MEGATRON}.{name}_parallel_size={ranks}" for name, ranks in sizes.items()]
        results = world_of(size, "started", {"config": str(config), "overrides": overrides})
        for rank, (outcome, _, called) in enumerate(results):
            assert outcome.get("step") == 2, outcome
            assert called == [
                ("from_hf_pretrained", NAME, {}, True),
                {
                    "class": "GPTModel",
                    "layout": layout,
                    "groups": layout,
                    "rank": rank % layout[0],
                    "with gradients": False,
                },
                "the optimizer is made",  # which in half precision copies the weights
            ]
        weights = together([(outcome, parts) for outcome, parts, _ in results])
        assert weights
        for name, tensor in weights.items():
            assert torch.equal(tensor, whole(name, tuple(tensor.shape))), name
        losses[layout] = [each[0] for each in results[-1][0]["losses"].values()]
    for other in losses.values():
        assert other == pytest.approx(losses[1, 1, 1], rel=1e-5)
    assert losses[1, 1, 1][0] != losses[1, 1, 1][1]


def together(results):
    from production.model.weights import assemble

    found = {}
    for _, parts in results:
        for name, shape, part, held in parts:
            found.setdefault(name, []).append((shape, tuple(slice(*each) for each in part), held))
    return assemble(found)


@pytest.fixture(scope="module")
def world_of():
    """Runs a target of this file in a new world of so many ranks."""
    from equivalence.workers import open_world, preload

    preload(*jobs.MODULES)

    def run(size, target, payload):
        with open_world(size) as opened:
            return opened.run(f"{__name__}:{target}", payload)

    return run


@pytest.mark.worlds
def test_a_start_without_the_package_ends_before_a_model_is_built(world_of, config):
    (found,) = world_of(1, "without_a_model", {"config": str(config)})
    assert found["refused"].startswith("model.initial (")
    assert "Megatron-Bridge is not installed" in found["refused"]
    assert "install the extra `bridge`" in found["refused"]


def test_the_command_refuses_it_with_status_2(config, monkeypatch, capsys):
    from production.training.__main__ import main

    monkeypatch.setattr("production.training.trainer.run", lambda _job: pytest.fail("the job is run"))
    assert main(["--config", str(config)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("refused: model.initial (")
    assert told.endswith("1 reason against this job\n")
