"""A Megatron-LM run's arguments become a job: each is translated, refused by name, or listed as without effect."""

import json
import logging
import re
from pathlib import Path

import pytest

from production.errors import PackproofError
from production.training.config import load, multi_token_depths, refusals, sizes
from tools.from_megatron_lm.__main__ import main
from tools.from_megatron_lm.arguments import DERIVED, PASSED_ON, REFUSED, TRANSLATED, WITHOUT_EFFECT
from tools.from_megatron_lm.reading import defaults, parser, read_text, read_words

RECORDED = Path(__file__).parent / "data" / "recorded"
COMMON = [
    "--sft",
    "--global-batch-size",
    "4",
    "--micro-batch-size",
    "1",
    "--seq-length",
    "2048",
    "--max-position-embeddings",
    "2048",
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--vocab-size",
    "4096",
    "--tokenizer-type",
    "SFTTokenizer",
    "--tokenizer-model",
    "examples/tokenizers/nemotron-mini",
    "--sft-tokenizer-prompt-format",
    "nemotron-nano-v2",
    "--train-data-path",
    "examples/packed/sample.jsonl.packed",
    "--position-embedding-type",
    "rope",
    "--normalization",
    "RMSNorm",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
    "--calculate-per-token-loss",
    "--lr",
    "2e-3",
    "--min-lr",
    "2e-4",
    "--lr-decay-style",
    "cosine",
    "--lr-warmup-iters",
    "4",
    "--log-interval",
    "1",
    "--distributed-backend",
    "gloo",
    "--transformer-impl",
    "local",
]
RUNS = {
    "one": ["--train-iters", "5"],
    "one-mtp": ["--train-iters", "8", "--mtp-num-layers", "2"],
    "cp2-mtp": ["--train-iters", "8", "--mtp-num-layers", "2", "--context-parallel-size", "2"],
    "one-li4": ["--train-iters", "8", "--log-interval", "4"],
    "one-gb1-seq256-steps12": ["--train-iters", "12", "--global-batch-size", "1", "--seq-length", "256"],
    "dp2-ep2-moe-dist": [
        "--train-iters", "8", "--num-experts", "4", "--expert-model-parallel-size", "2", "--use-distributed-optimizer",
        "--moe-token-dispatcher-type", "alltoall",
    ],
    "one-val-wsd-wdcos": [
        "--train-iters", "8", "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "5", "--lr-wsd-decay-style", "linear",
        "--start-weight-decay", "0.01", "--end-weight-decay", "0.1", "--weight-decay-incr-style", "cosine",
    ],
}  # fmt: skip
"""Arguments of the recorded runs, whose logs begin behind the dump: what each is told by its name and its numbers."""


def job_of(words, tmp_path, overrides=()):
    path = tmp_path / "job.yaml"
    assert main(["-o", str(path), "--", *words]) == 0
    return load(path, overrides)


def dump_of(words):
    """What Megatron-LM prints at the head of a log."""
    values = vars(parser().parse_args(list(words)))
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    head, tail = f"{'-' * 24} arguments {'-' * 24}", f"{'-' * 20} end of arguments {'-' * 21}"
    return "\n".join(
        [
            "using world size: 1",
            head,
            *lines,
            "  world_size ..................................... 1",
            tail,
            "training ...",
        ]
    )


def test_every_argument_of_the_installed_megatron_lm_is_in_exactly_one_class():
    classes = [TRANSLATED, *PASSED_ON.values(), REFUSED, WITHOUT_EFFECT]
    names = set(defaults())
    in_none = sorted(name for name in names if not any(name in each for each in classes))
    in_several = sorted(name for name in names if sum(name in each for each in classes) > 1)
    assert (in_none, in_several) == ([], [])
    assert sorted(set().union(*classes) - names) == []
    assert not DERIVED & names


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_runs_arguments_give_the_job_of_the_equal_run(name, tmp_path):
    job = job_of([*COMMON, *RUNS[name]], tmp_path)
    lines = [json.loads(line) for line in (RECORDED / f"{name}.metrics.jsonl").read_text().splitlines()]
    run, steps = lines[0], [line for line in lines if line["kind"] == "step"]
    layout, world = sizes(job), run["world_size"]
    # The recorded run's final decay began inside its warm-up, which a job has been refused for since (R-SETUP-16).
    overlapping = ["policy.megatron_cfg.scheduler.lr_wsd_decay_iters"] if "wsd" in name else []
    assert [each.key for each in refusals(job, world)] == overlapping
    assert (layout.tensor, layout.context, layout.pipeline, layout.expert, layout.data(world)) == tuple(
        run[f"{each}_parallel_size"] for each in ("tensor", "context", "pipeline", "expert", "data")
    )
    assert job.loss.normalization == run["normalization"]
    assert job.sft.max_num_steps == len(steps)
    assert multi_token_depths(job) == sum(key.startswith("mtp_") for key in steps[0])
    assert job.policy.train_global_batch_size == steps[0]["consumed_samples"]
    assert job.policy.train_global_batch_size * job.policy.max_total_sequence_length == steps[0]["tokens"]
    assert rates_of(job) == pytest.approx([line["learning_rate"] for line in steps], rel=1e-12)
    # The driver prints the rate of the next step.
    text = (RECORDED / f"{name}.log").read_text()
    printed = re.findall(r"iteration +(\d+)/ +(\d+) .*?learning rate: (\S+)", text)
    assert {int(total) for _, total, _ in printed} == {len(steps)}
    rates = rates_of(job, more=1)
    assert [float(rate) for _, _, rate in printed] == pytest.approx(
        [rates[int(step)] for step, _, _ in printed], rel=1e-6
    )


def rates_of(job, more=0):
    """The learning rates of the job's steps, by the installed megatron-core's scheduler."""
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    schedule, options, batch = job.megatron.scheduler, job.megatron.optimizer, job.policy.train_global_batch_size
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=schedule.lr_warmup_init, max_lr=options["lr"], min_lr=options["min_lr"],
        lr_warmup_steps=schedule.lr_warmup_iters * batch, lr_decay_steps=schedule.lr_decay_iters * batch,
        lr_decay_style=schedule.lr_decay_style, start_wd=schedule.start_weight_decay, end_wd=schedule.end_weight_decay,
        wd_incr_steps=job.sft.max_num_steps * batch, wd_incr_style=schedule.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=False,
        wsd_decay_steps=(schedule.lr_wsd_decay_iters or 0) * batch or None, lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )  # fmt: skip
    found = []
    for _ in range(job.sft.max_num_steps + more):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(batch)
    return found


@pytest.mark.parametrize("name", ["one-mtp", "dp2-ep2-moe-dist"])
def test_a_dump_says_what_the_command_line_says(name, tmp_path):
    words = [*COMMON, *RUNS[name]]
    log = tmp_path / "run.log"
    log.write_text(dump_of(words))
    assert main([str(log), "-o", str(tmp_path / "of_log.yaml")]) == 0
    of_log = load(tmp_path / "of_log.yaml")
    assert of_log.describe() == job_of(words, tmp_path).describe()


def test_defaults_that_train_something_else_are_written_out_with_a_comment(tmp_path):
    left_out = {"--calculate-per-token-loss", "--disable-bias-linear", "--untie-embeddings-and-output-weights"}
    words = [word for word in [*COMMON, "--train-iters", "8"] if word not in left_out]
    for flag in (
        "--hidden-dropout",
        "--attention-dropout",
        "--normalization",
        "--sft-tokenizer-prompt-format",
        "--lr-decay-style",
    ):
        at = words.index(flag)
        del words[at : at + 2]
    job = job_of(words, tmp_path)
    assert (job.model.hidden_dropout, job.model.attention_dropout) == (0.1, 0.1)
    assert (job.model.normalization, job.model.add_bias_linear, job.model.tie_embeddings) == ("LayerNorm", True, True)
    assert job.loss.normalization == "mean_of_means"
    assert job.megatron.scheduler.lr_decay_style == "linear"
    assert job.data.train[0].megatron_sft_prompt_format == "nemotron-h-aligned"
    assert job.megatron.transformer["bias_activation_fusion"] is True
    assert (job.data.order, job.data.last_batch, job.sft.seed) == ("sequential", "wrap", 1234)
    optimizer = job.megatron.optimizer
    assert [optimizer[name] for name in ("weight_decay", "adam_eps", "adam_beta2", "clip_grad")] == [
        0.01,
        1e-8,
        0.999,
        1.0,
    ]
    text = (tmp_path / "job.yaml").read_text()
    assert re.search(r"hidden_dropout: 0\.1 +# --hidden-dropout left out", text)
    assert re.search(r"lr: 0\.002 +# --lr$", text, re.MULTILINE)


TRANSLATIONS = [
    (["--swiglu"], "model.ffn_hidden_size", 128),
    (["--bf16"], "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32", True),
    (["--bf16", "--grad-reduce-in-bf16"], "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32", False),
    (["--dataloader-type", "cyclic"], "data.order", "megatron-cyclic-sharded"),
    (["--dataloader-type", "cyclic", "--no-data-sharding"], "data.order", "megatron-cyclic"),
    (["--group-query-attention", "--num-query-groups", "2"], "model.num_query_groups", 2),
    (["--num-query-groups", "2"], "model.num_query_groups", None),
    (["--lr-warmup-fraction", "0.25", "--lr-warmup-iters", "0"], "policy.megatron_cfg.scheduler.lr_warmup_iters", 2),
    (["--vocab-size", "4000", "--tensor-model-parallel-size", "2", "--sequence-parallel"], "model.vocab_size", 4096),
    (["--norm-epsilon", "1e-6"], "policy.megatron_cfg.transformer.layernorm_epsilon", 1e-6),
    (["--finetune", "--load", "w"], "model.initial_path", "w"),
    (["--save", "c", "--save-interval", "4"], "checkpointing.save_period", 4),
    (["--valid-data-path", "v", "--eval-interval", "4"], "sft.val_batches", 100),
    (["--recompute-activations"], "policy.megatron_cfg.transformer.recompute_granularity", "selective"),
    (["--num-experts", "4", "--tensor-model-parallel-size", "2"], "policy.megatron_cfg.expert_tensor_parallel_size", 2),
]  # fmt: skip


@pytest.mark.parametrize(("words", "key", "value"), TRANSLATIONS)
def test_an_argument_is_translated_with_what_megatron_lm_derives_from_it(words, key, value, tmp_path):
    found = job_of([*COMMON, "--train-iters", "8", *words], tmp_path)
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value


REFUSALS = [
    (["--micro-batch-size", "2"], "--micro-batch-size 2", "set it to 1"),
    (["--fp16"], "--fp16", "bf16"),
    (["--rampup-batch-size", "1", "1", "8"], "--rampup-batch-size", "one size"),
    (["--train-samples", "8"], "--train-samples", "iterations"),
    (["--use-rope-scaling"], "--use-rope-scaling", "take it out"),
    (["--position-embedding-type", "learned_absolute"], "--position-embedding-type", "rope"),
    (["--exit-interval", "5"], "--exit-interval", "--train-iters"),
    (["--no-such-argument", "5"], "--no-such-argument", "no such argument"),
    (["--load", "elsewhere"], "--load", "--finetune"),
    (["--lr-warmup-fraction", "0.3"], "--lr-warmup-fraction", "whole number"),
]


@pytest.mark.parametrize(("words", "argument", "fix"), REFUSALS)
def test_arguments_that_a_job_lacks_are_refused_by_name_and_no_yaml_is_written(words, argument, fix, tmp_path, capsys):
    path = tmp_path / "job.yaml"
    assert main(["-o", str(path), "--", *COMMON, "--train-iters", "8", *words]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith(f"refused: {argument}")]
    assert fix in line
    assert not path.exists()


def test_the_split_that_megatron_lm_takes_by_itself_is_refused(capsys):
    words = ["--data-path" if word == "--train-data-path" else word for word in COMMON]
    assert main(["--", *words, "--train-iters", "8"]) == 2
    assert "--split 969, 30, 1 (left out)" in capsys.readouterr().err
    assert main(["--", *words, "--train-iters", "8", "--split", "100,0,0"]) == 0


def test_arguments_without_effect_are_listed_with_the_reason(capsys):
    assert main(["--", *COMMON, "--train-iters", "8", "--manual-gc", "--profile"]) == 0
    screen = capsys.readouterr().out
    assert "# accepted without effect: --manual-gc: it says how ranks meet" in screen
    assert "# accepted without effect: --profile: it checks, records or restarts" in screen
    assert "yarn" not in screen


def test_a_script_with_comments_and_broken_lines_is_a_command_line():
    text = "#!/bin/bash\ntorchrun --nproc-per-node 2 pretrain_gpt.py \\\n  --sft \\\n  --lr 1e-3  # the rate\n"
    found = read_text(text, name="run.sh")
    assert found.given == {"sft", "lr"}
    assert found.values["lr"] == 1e-3


REALISTIC = {
    "overlap": [
        "torchrun", "--nproc_per_node", "8", "--nnodes", "2", "pretrain_gpt.py", "--bf16", "--use-distributed-optimizer",
        "--overlap-param-gather", "--overlap-grad-reduce", "--use-mcore-models", "--tensor-model-parallel-size", "2",
        "--sequence-parallel", "--context-parallel-size", "2", "--global-batch-size", "16", "--swiglu",
        "--group-query-attention", "--num-query-groups", "2", "--ffn-hidden-size", "256",
    ],
    "moe": [
        "torchrun", "--nproc-per-node=4", "pretrain_gpt.py", "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce",
        "--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall",
        "--use-dist-ckpt", "--ckpt-fully-parallel-save", "--dist-ckpt-format", "torch_dist", "--disable-msc",
    ],
    "stages": [
        "torchrun", "--nproc-per-node", "2", "--nnodes", "1", "pretrain_gpt.py", "--pipeline-model-parallel-size", "2",
        "--save", "kept", "--save-interval", "4", "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1",
    ],
    "checkpointed": [
        "torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce",
        "--overlap-param-gather", "--lr-warmup-fraction", "0.25", "--lr-warmup-iters", "0", "--no-load-rng", "--log-throughput",
        "--manual-gc", "--attention-softmax-in-fp32",
    ],
}  # fmt: skip
RANKS = {"overlap": (8, 2), "moe": (4, 1), "stages": (2, 1), "checkpointed": (2, 1)}


@pytest.mark.parametrize("name", REALISTIC)
def test_the_job_of_a_realistic_command_line_is_not_refused_at_its_world_size(name, tmp_path):
    at = REALISTIC[name].index("pretrain_gpt.py") + 1
    launcher, words = REALISTIC[name][:at], REALISTIC[name][at:]
    batch = ["--distributed-backend", "nccl"] if "--bf16" in words else []
    job = job_of([*launcher, *COMMON, "--train-iters", "8", *batch, *words], tmp_path)
    assert (job.cluster.gpus_per_node, job.cluster.num_nodes) == RANKS[name]
    assert [str(each) for each in refusals(job, job.cluster.ranks)] == []
    overlaps = "--overlap-param-gather" in words
    for section in (job.megatron.optimizer, job.megatron.distributed_data_parallel_config):
        assert section.get("overlap_param_gather", False) is overlaps


def test_nothing_that_is_given_goes_unmentioned(capsys):
    given = [
        *COMMON, "--train-iters", "8", "--transformer-impl", "transformer_engine", "--use-mcore-models", "--muon-momentum", "0.9",
        "--use-dist-ckpt", "--ckpt-fully-parallel-save", "--dist-ckpt-format", "torch_dist", "--disable-msc", "--tensorboard-queue-size",
        "1000", "--wandb-exp-name", "x", "--moe-router-topk", "2", "--tensor-model-parallel-size", "1", "--cuda-graph-scope", "attn",
    ]  # fmt: skip
    assert main(["--", *given]) == 0
    screen = capsys.readouterr().out
    named = set(re.findall(r"--[\w-]+", screen))
    assert {word for word in given if word.startswith("--")} <= named
    assert "# needs no key: --position-embedding-type rope: the job's models have rope and no other" in screen
    assert "# needs no key: --micro-batch-size 1: a row is a microbatch of a job" in screen
    assert "# needs no key: --transformer-impl transformer_engine: it is the default" in screen
    assert "# needs no key: --muon-momentum 0.9: the run has another optimizer" in screen
    assert "# accepted without effect: --use-mcore-models: Megatron-LM itself ignores it" in screen


def test_an_older_name_that_megatron_lm_still_takes_is_taken(tmp_path, capsys):
    job = job_of([*COMMON, "--train-iters", "8", "--hybrid-override-pattern", "M*"], tmp_path)
    assert (job.model.architecture, job.model.hybrid_layer_pattern) == ("hybrid", "M*")
    both = ["--hybrid-override-pattern", "M*", "--hybrid-layer-pattern", "M*"]
    assert main(["--", *COMMON, "--train-iters", "8", *both]) == 2
    assert "give only that" in capsys.readouterr().err
    assert main(["--", *COMMON, "--train-iters", "8", "--batch-size", "4"]) == 2
    assert "Megatron-LM itself refuses" in capsys.readouterr().err


def test_a_number_of_ranks_that_only_the_machine_knows_is_no_key(capsys):
    assert main(["--", "torchrun", "--nproc-per-node", "gpu", "pretrain_gpt.py", *COMMON, "--train-iters", "8"]) == 0
    screen = capsys.readouterr().out
    assert "# needs no key: torchrun --nproc-per-node gpu: the number is known only where the run starts" in screen
    assert re.search(r"num_nodes: 1 +# torchrun --nnodes left out", screen)
    assert "gpus_per_node" not in screen


def without_vocabulary(tokenizer):
    at, path = COMMON.index("--vocab-size"), COMMON.index("--tokenizer-model") + 1
    words = [*COMMON[:path], tokenizer, *COMMON[path + 1 :]]
    return [*words[:at], *words[at + 2 :], "--train-iters", "8"]


def test_the_vocabulary_is_read_from_a_tokenizer_folder_that_exists(tmp_path, capsys):
    from transformers import AutoTokenizer

    folder = "examples/tokenizers/nemotron-mini"
    job = job_of(without_vocabulary(folder), tmp_path)
    needed = len(AutoTokenizer.from_pretrained(folder))
    assert job.model.vocab_size == -(-needed // 128) * 128
    assert re.search(r"vocab_size: \d+ +# --tokenizer-model --make", (tmp_path / "job.yaml").read_text())
    assert main(["--", *without_vocabulary(str(tmp_path / "elsewhere"))]) == 2
    assert "elsewhere is not a folder on this machine" in capsys.readouterr().err
    assert main(["--", *without_vocabulary(str(tmp_path))]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_torchs_note_on_its_compiler_does_not_precede_the_answer():
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.setLevel(logging.NOTSET)
    assert main([]) == 2
    assert not logger.isEnabledFor(logging.WARNING)


def test_one_refusal_is_counted_as_one(capsys):
    assert main(["--", *COMMON, "--train-iters", "8", "--exit-interval", "5"]) == 2
    assert "1 argument has no place in a job" in capsys.readouterr().err


BAD = [
    ("", "no argument"),
    ("--lr $LR", "variable"),
    (f"{'-' * 24} arguments {'-' * 24}\n  lr ... 1", "no end"),
    ("--lr abc", "invalid float"),
]


@pytest.mark.parametrize(("text", "what"), BAD)
def test_a_file_that_is_not_a_run_of_megatron_lm_is_refused(text, what):
    with pytest.raises(PackproofError, match=what):
        read_text(text, name="x")


def test_a_name_that_no_argument_has_is_refused_in_a_dump_too():
    text = dump_of([*COMMON, "--train-iters", "8"]).replace("  world_size ", "  new_magic ........ 3\n  world_size ")
    assert read_text(text, name="log").unknown == ("new_magic",)


def test_what_megatron_lm_fills_in_is_taken_in_a_dump_and_refused_where_it_was_given(tmp_path, capsys):
    """A dump has `eval_micro_batch_size 1`, sizes of a layout that is not asked for, and more that no command line has."""
    filled = {
        "eval_micro_batch_size": 1,
        "tensor_parallel_num_weight_shards": 1,
        "expert_tensor_parallel_num_weight_shards": 1,
    }
    log, whole = tmp_path / "run.log", dump_of([*COMMON, "--train-iters", "8", "--expert-tensor-parallel-size", "1"])
    for name, value in filled.items():
        whole = re.sub(rf"( {name} \.+) None", rf"\1 {value}", whole)
    derived = ["gtp_weight_remat_size", "expert_gtp_weight_remat_size", "use_dist_ckpt"]
    more = "".join(f"  {name} ........ {'True' if name == 'use_dist_ckpt' else 1}\n" for name in derived)
    log.write_text(whole.replace("  world_size ", f"{more}  world_size "))
    assert main([str(log), "-o", str(tmp_path / "job.yaml")]) == 0
    assert "num_weight_shards" not in (tmp_path / "job.yaml").read_text()
    log.write_text(log.read_text().replace("  gtp_weight_remat_size ........ 1", "  gtp_weight_remat_size ........ 2"))
    assert main([str(log), "-o", str(tmp_path / "job.yaml")]) == 2
    assert "refused: gtp_weight_remat_size 2" in capsys.readouterr().err
    assert main(["--", *COMMON, "--train-iters", "8", "--eval-micro-batch-size", "1"]) == 2
    assert "refused: --eval-micro-batch-size 1" in capsys.readouterr().err


def test_words_of_an_argument_dump_are_read_as_the_parser_stores_them():
    text = dump_of([*COMMON, "--train-iters", "8", "--attention-backend", "unfused"])
    text = re.sub(r"(main_grads_dtype \.+) fp32", r"\1 torch.float32", text)
    values = read_text(text, name="log").values
    assert (values["attention_backend"], values["main_grads_dtype"]) == ("unfused", "float32")


def test_two_sources_of_arguments_or_no_source_are_bad_input():
    assert main([]) == 2
    assert main(["file", "--", "--lr", "1"]) == 2
    assert read_words(["a.py", "--lr", "1"], name="x").given == {"lr"}
