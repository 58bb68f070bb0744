"""`compare_runs live --megatron-source`: a job becomes the driver's command line and comes back the same, and both programs train the same.

The real `pretrain_gpt.py` is not here: a script of the suite's own runs the installed `pretrain` in its place (`driver_script.py`).
"""

import itertools
import json
import math
import random
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from equivalence.errors import InputError
from production.errors import PackproofError
from production.training.config import load, sizes
from tools.compare_runs import live
from tools.compare_runs.__main__ import main
from tools.compare_runs.driver.arguments import (
    ON_CPU,
    REPORTED,
    command_line,
    round_trip_differences,
    what_is_trained,
    words,
)
from tools.compare_runs.driver.source import check_source
from tools.compare_runs.driver.stand_ins import STAND_INS
from tools.from_megatron_lm.__main__ import main as from_megatron_lm
from tools.from_megatron_lm.reading import read_words

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "examples" / "jobs" / "small-cpu.yaml"
MEGATRON = "policy.megatron_cfg"
NO_DEPTHS = (f"{MEGATRON}.mtp_num_layers=null", f"{MEGATRON}.mtp_use_repeated_layer=false")


def job(*overrides, steps=5):
    return load([str(SMALL)], [*live.ALIKE, f"sft.max_num_steps={steps}", *overrides])


def line(of, save="end"):
    return command_line(of, vocab_size=of.model.vocab_size, save=Path(save))


def unlike(of, arguments):
    layout = sizes(of)
    ranks = math.lcm(layout.of_a_replica, layout.expert * layout.expert_tensor * layout.pipeline)
    return round_trip_differences(of, arguments, vocab_size=of.model.vocab_size, world_size=ranks)


CHOICES = {
    "layout": [
        (),
        (f"{MEGATRON}.tensor_model_parallel_size=2",),
        (f"{MEGATRON}.context_parallel_size=2",),
        (f"{MEGATRON}.pipeline_model_parallel_size=3", f"{MEGATRON}.optimizer.use_distributed_optimizer=false"),
        (f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.transformer.num_layers_in_first_pipeline_stage=1"),
    ],
    "depths": [
        (),
        NO_DEPTHS,
        (f"{MEGATRON}.mtp_num_layers=1", f"{MEGATRON}.mtp_loss_scaling_factor=0.3"),
        (f"{MEGATRON}.mtp_num_layers=3", f"{MEGATRON}.mtp_use_repeated_layer=false"),
    ],
    "experts": [
        (),
        ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=64"),
        ("model.num_moe_experts=2", "model.moe_ffn_hidden_size=32", f"{MEGATRON}.transformer.moe_layer_freq=[0,1,1]"),
        ("model.num_moe_experts=8", "model.moe_router_topk=3", f"{MEGATRON}.transformer.moe_aux_loss_coeff=0.01"),
        ("model.num_moe_experts=4", f"{MEGATRON}.expert_model_parallel_size=2", f"{MEGATRON}.transformer.moe_z_loss_coeff=0.001"),
    ],
    "shape": [
        (),
        ("model.tie_embeddings=true", "model.kv_channels=16"),
        ("model.num_query_groups=2", f"{MEGATRON}.transformer.qk_layernorm=true"),
        ("model.num_query_groups=1", "model.rotary_base=500000", "model.rotary_percent=0.5"),
        ("model.activation=gelu", "model.gated_linear_unit=false", "model.ffn_hidden_size=null"),
        ("model.activation=squared_relu", "model.gated_linear_unit=false", "model.add_bias_linear=true"),
        ("model.ffn_hidden_size=null", f"{MEGATRON}.transformer.layernorm_epsilon=1e-6"),
        (f"{MEGATRON}.transformer.bias_activation_fusion=true", f"{MEGATRON}.transformer.attention_softmax_in_fp32=false"),
    ],
    "schedule": [
        (),
        (f"{MEGATRON}.scheduler.lr_decay_style=linear", f"{MEGATRON}.scheduler.lr_warmup_init=1e-5"),
        (f"{MEGATRON}.scheduler.lr_decay_style=constant", f"{MEGATRON}.scheduler.lr_warmup_iters=0"),
        (f"{MEGATRON}.scheduler.lr_decay_style=inverse-square-root",),
        (
            f"{MEGATRON}.scheduler.lr_decay_style=WSD", f"{MEGATRON}.scheduler.lr_wsd_decay_style=minus_sqrt",
            f"{MEGATRON}.scheduler.lr_wsd_decay_iters=2", f"{MEGATRON}.scheduler.start_weight_decay=0.01",
            f"{MEGATRON}.scheduler.end_weight_decay=0.1", f"{MEGATRON}.scheduler.weight_decay_incr_style=cosine",
        ),
    ],
    "optimizer": [
        (),
        (f"{MEGATRON}.optimizer.adam_beta2=0.95", f"{MEGATRON}.optimizer.adam_eps=1e-6"),
        (f"{MEGATRON}.optimizer.clip_grad=0.0", f"{MEGATRON}.optimizer.weight_decay=0.0"),
        (f"{MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce=true", f"{MEGATRON}.distributed_data_parallel_config.bucket_size=4000000"),
        (f"{MEGATRON}.distributed_data_parallel_config.average_in_collective=true", f"{MEGATRON}.optimizer.sgd_momentum=0.5", f"{MEGATRON}.optimizer.optimizer=sgd"),
        (f"{MEGATRON}.activation_checkpointing=true",),
    ],
    "data": [
        (),
        ("loss.normalization=mean_of_means", "policy.train_global_batch_size=8"),
        ("data.order=megatron-cyclic", "sft.seed=7"),
        ("data.order=megatron-cyclic-sharded", "policy.max_total_sequence_length=512"),
        ("data.default.megatron_sft_prompt_format=nemotron-h-aligned",),
    ],
}  # fmt: skip
BLEND = 'data.train={"dataset_name": "megatron_sft_packed", "data_path": [{"path": "a.jsonl", "weight": 0.7}, {"path": "b.jsonl", "weight": 0.3}]}'


def drawn(count):
    """Jobs in which each choice of each kind stands at least once, together with choices of the other kinds."""
    draw = random.Random(3)
    for number in range(count):
        yield [
            each
            for choices in CHOICES.values()
            for each in choices[(number + draw.randrange(len(choices)) * (number >= 8)) % len(choices)]
        ]


@pytest.mark.parametrize("overrides", list(drawn(24)), ids=itertools.count())
def test_a_job_becomes_a_command_line_that_is_the_same_job_again(overrides):
    of = job(*overrides)
    assert unlike(of, line(of)) == []


def test_a_blend_and_files_end_to_end_come_back():
    for of in (job(BLEND), job('data.train={"dataset_name": "megatron_sft_packed", "data_path": "only.jsonl"}')):
        assert unlike(of, line(of)) == []


def test_the_command_line_is_parsed_to_what_it_was_made_of():
    values = {
        "lr": 0.1,
        "bias_swiglu_fusion": False,
        "moe_layer_freq": [1, 0],
        "sft": True,
        "clip_grad": 1.0,
        **ON_CPU,
        **REPORTED,
    }
    parsed = read_words(["x.py", *words(values)], name="x").values
    assert {name: parsed[name] for name in values} == values


def test_every_changed_argument_is_noticed_on_the_way_back():
    of = job(
        f"{MEGATRON}.transformer.moe_aux_loss_coeff=0.01", "model.num_moe_experts=4", "model.moe_ffn_hidden_size=64"
    )
    arguments = line(of)
    changes = {
        "--lr": "0.003", "--hidden-size": "256", "--seed": "43", "--global-batch-size": "8", "--moe-router-topk": "3", "--mtp-num-layers": "1",
        "--moe-aux-loss-coeff": "0.02", "--lr-warmup-iters": "3", "--sft-tokenizer-prompt-format": "identity", "--train-data-path": "other",
    }  # fmt: skip
    for flag, value in changes.items():
        changed = [value if before == flag else word for before, word in zip(["", *arguments], arguments, strict=False)]
        if flag == "--moe-router-topk":
            changed = [*arguments, flag, value]
        assert unlike(of, changed), flag
    for flag in ("--calculate-per-token-loss", "--swiglu", "--disable-bias-linear", "--use-distributed-optimizer"):
        assert unlike(of, [word for word in arguments if word != flag]), flag


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("model.hidden_dropout=0.1",), "dropout"),
        (("policy.precision=float64",), "float64"),
        (("data.order=shuffle", "data.shuffle=true"), "the order shuffle"),
        (("model.initial=huggingface", "model.initial_path=x"), "Hugging Face"),
        (("sft.seed=0",), "a seed below 1"),
        (("data.default.chat_key=turns",), "the key turns"),
        (
            ("model.architecture=hybrid", "model.hybrid_layer_pattern='*-*-'", "model.num_layers=null", *NO_DEPTHS),
            "HybridModel",
        ),
    ],
)
def test_a_job_that_the_driver_cannot_run_is_refused_by_key(overrides, what):
    with pytest.raises(PackproofError, match=what):
        line(job(*overrides))


def test_a_setting_without_an_argument_is_named():
    of = job(
        "loss.normalization=global_valid_tokens",
        "data.default.semantics=strict",
        f"{MEGATRON}.transformer.deterministic_mode=true",
    )
    found = " ".join(unlike(of, line(of)))
    for name in (
        "loss.normalization is 'global_valid_tokens'",
        "data.train is",
        "transformer.deterministic_mode is True",
    ):
        assert name in found


def test_what_is_trained_holds_every_section_that_decides_a_number():
    found = what_is_trained(job(), vocab_size=4096, data_parallel_size=1)
    assert {
        "loss.normalization",
        "the layout of ranks",
        f"{MEGATRON}.optimizer.lr",
        f"{MEGATRON}.transformer.num_layers",
    } <= found.keys()


def source_tree(folder, *, minor=None):
    """A source tree of the installed version, with the suite's own script in place of Megatron-LM's."""
    numbers = version("megatron-core").split(".")
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text(
        f"MAJOR = {numbers[0]}\nMINOR = {minor or numbers[1]}\nPATCH = 0\n"
    )
    (folder / "megatron" / "only_in_the_tree.py").write_text("")
    shutil.copy(Path(__file__).parent / "driver_script.py", folder / "pretrain_gpt.py")
    (folder / "gpt_builders.py").write_text("")
    (folder / "model_provider.py").write_text("IS_A_NEIGHBOUR = True\n")
    return folder


def test_a_folder_without_the_driver_or_of_another_version_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"a folder without pretrain_gpt\.py, gpt_builders\.py"):
        check_source(tmp_path)
    other = source_tree(tmp_path / "other", minor=18)
    with pytest.raises(InputError, match=r"got 0\.18\.0: check out the branch core_r0\.19\.0"):
        check_source(other)
    (other / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\n")
    with pytest.raises(InputError, match="must set MAJOR, MINOR and PATCH"):
        check_source(other)
    (other / "megatron" / "core" / "package_info.py").unlink()
    with pytest.raises(InputError, match="which says the tree's version"):
        check_source(other)
    assert check_source(source_tree(tmp_path / "right")).startswith("0.19.")


TINY = (
    "policy.max_total_sequence_length=256", "model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=32", "policy.train_global_batch_size=2",
)  # fmt: skip


def command(tree, *more, steps=3):
    base = [
        "live",
        "--config",
        str(SMALL),
        "--steps",
        str(steps),
        "--window",
        f"1-{steps}",
        "--megatron-source",
        str(tree),
    ]
    return main([*base, *more, *TINY])


def test_the_command_refuses_before_anything_runs(tmp_path, capsys):
    assert command(tmp_path) == 2
    assert "must be a source tree of Megatron-LM" in capsys.readouterr().err
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "something").touch()
    tree = source_tree(tmp_path / "tree")
    assert command(tree, "--keep", str(kept)) == 2
    assert "must be an empty folder" in capsys.readouterr().err
    assert command(tree, "data.default.semantics=strict") == 2
    assert "would not train this job: data.train is" in capsys.readouterr().err
    assert list(kept.iterdir()) == [kept / "something"]


@pytest.mark.worlds
def test_the_driver_and_the_job_train_the_same_from_what_either_wrote(tmp_path, capsys):
    tree, kept, numbers = source_tree(tmp_path / "tree"), tmp_path / "kept", tmp_path / "live.json"
    assert command(tree, "--keep", str(kept), "--json", str(numbers), "--layout", "cp2") == 0
    screen = capsys.readouterr().out
    assert [part for part in STAND_INS if f"stand-in for {part}" not in screen] == []
    found = json.loads(numbers.read_text())
    assert (found["broken_limits"], found["live"]["unequal_weights"]) == ([], [])
    assert {"loss", "gradient_norm", "learning_rate", "mtp_1_loss", "mtp_2_loss", "mtp_2_acceptance_rate"} <= set(
        found["live"]["series"]["Megatron-LM's driver"]
    )
    assert all(len(values) == 3 for values in found["live"]["series"]["Megatron-LM's driver"].values())
    log = (kept / "driver.log").read_text()
    assert "end of arguments" in log
    # The argument dump at the log's head, which Megatron-LM completed and printed, is the job, too.
    of_log = tmp_path / "of_log.yaml"
    assert from_megatron_lm([str(kept / "driver.log"), "-o", str(of_log)]) == 0
    first, second = (
        what_is_trained(each, vocab_size=4096, data_parallel_size=1)
        for each in (load([str(of_log)], []), load([str(kept / "job.yaml")], []))
    )
    assert first == second
    # And back: both go on from the last weights of either, which are the same.
    losses = []
    for last in (kept / "packproof" / "step_00000003", kept / "driver" / "iter_0000003"):
        initial = ["model.initial=megatron", f"model.initial_path={last}"]
        assert command(tree, "--json", str(numbers), *initial, steps=2) == 0
        losses.append(json.loads(numbers.read_text())["live"]["series"]["packproof"]["loss"])
    assert losses[0] == losses[1]
    assert losses[0][0] != found["live"]["series"]["packproof"]["loss"][0], "it started from other weights"


@pytest.mark.worlds
def test_a_driver_that_fails_is_named_with_the_end_of_its_log(tmp_path, capsys):
    tree = source_tree(tmp_path / "tree")
    (tree / "pretrain_gpt.py").write_text("print('as far as this')\nraise RuntimeError('out of luck')\n")
    assert command(tree) == 2
    told = capsys.readouterr().err
    assert "out of luck" in told
    assert "the driver's log ends:\nas far as this" in told


@pytest.mark.worlds
def test_weights_that_differ_are_a_broken_limit(tmp_path, capsys):
    tree = source_tree(tmp_path / "tree")
    script = (tree / "pretrain_gpt.py").read_text()
    (tree / "pretrain_gpt.py").write_text(
        script.replace("length=get_args().seq_length", "length=get_args().seq_length").replace(
            "    numbered = iter([(0, next(rows))])\n",
            "    row = next(rows)\n    row['labels'] = row['labels'].flip(1)\n    numbered = iter([(0, row)])\n",
        )
    )
    assert command(tree, steps=2) == 1
    printed = capsys.readouterr().out
    assert "loss differs at 2 of 2 steps" in printed
    assert "weights differ after the last step" in printed
