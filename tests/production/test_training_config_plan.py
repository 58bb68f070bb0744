"""A dry run says what a job would do with no machine (SPEC R-SETUP-19); a printed configuration says where each value came from and loads again."""

import json
import multiprocessing
import os
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import yaml

from production.training.__main__ import main
from production.training.config import load, model_settings, plan, print_config, refusals, sizes
from production.training.config.sizing import memory_of_a_rank
from production.training.config.yaml_reader import read_text

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "examples" / "jobs"
BASE = Path(__file__).parent / "jobs" / "base.yaml"
PUBLISHED = JOBS / "published-comparison.yaml"
SMALL = JOBS / "small-cpu.yaml"


def test_r_setup_19_the_published_comparison_is_planned_at_512_ranks_with_no_machine(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["--config", str(PUBLISHED), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for line in ("ranks               512", "tp                8", "cp                16", "dp                4", "ep                32",
                 "edp               16", "microbatches/step   16 on each", "tokens/step         16,777,216", "tokens/row/rank     16,384",
                 "multi-token depths  2", "cp                0 8 16 24 32 40 48 56 … 120 (16 ranks), one of 32",
                 "dp                0 128 256 384, one of 128", "edp               0 32 64", "note: /path/to/train.jsonl.packed is not"):  # fmt: skip
        assert line in said.out


@pytest.mark.parametrize("ranks", [128, 256, 512, 1024, 8192])
def test_the_published_comparison_as_it_stands_is_planned_at_any_world_size_that_its_layout_divides(ranks, capsys):
    assert main(["--config", str(PUBLISHED), "--dry-run", "--world-size", str(ranks)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"ranks               {ranks}\n")
    assert f"\n  dp                {ranks // 128}\n" in said
    told = "in place of       cluster.num_nodes 64 x cluster.gpus_per_node 8 = 512\n"
    assert (told in said) == (ranks != 512)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (500, "must be a multiple of tp 8 x cp 16 x pp 1 = 128, got 500"),
        (64, "must be a multiple of tp 8 x cp 16 x pp 1 = 128, got 64"),
        (384, "must be a multiple of the 3 data-parallel ranks and at least 1, got 64"),
        (0, "must be a multiple of tp 8 x cp 16 x pp 1 = 128, got 0"),
    ],
)
def test_a_world_that_the_published_layout_does_not_divide_is_refused_with_the_numbers(ranks, told, capsys):
    assert main(["--config", str(PUBLISHED), "--dry-run", "--world-size", str(ranks)]) == 2
    assert told in capsys.readouterr().err


def test_a_run_and_a_dry_run_of_its_own_world_hold_the_nodes_of_the_configuration_against_it(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "256")
    told = "64 nodes x 8 processes = 512 ranks, got 256"
    assert main(["--config", str(PUBLISHED), "--dry-run"]) == 2
    assert told in capsys.readouterr().err
    assert main(["--config", str(PUBLISHED), "cluster.device=cpu", "policy.precision=float32"]) == 2
    assert told in capsys.readouterr().err
    assert main(["--config", str(PUBLISHED), "--dry-run", "--world-size", "256", "cluster.num_nodes=0"]) == 2
    assert "cluster.num_nodes (override" in capsys.readouterr().err


def test_the_published_comparisons_settings_are_those_that_were_published():
    job = load(PUBLISHED)
    given = job.megatron.transformer
    assert (given["recompute_granularity"], given["recompute_modules"], given["batch_p2p_comm"]) == (
        "selective",
        ["moe"],
        True,
    )
    assert job.megatron.env_vars == {"NCCL_NVLS_ENABLE": "0"}
    assert (job.megatron.mtp_num_layers, job.megatron.mtp_use_repeated_layer) == (2, True)
    ddp = job.megatron.distributed_data_parallel_config
    assert ddp["overlap_grad_reduce"] is ddp["overlap_param_gather"] is True
    assert (job.policy.train_global_batch_size, job.policy.train_micro_batch_size) == (64, 1)
    # Without its nodes, any other world that holds whole replicas and divides the batch is accepted, none else.
    accepted = {size for size in range(64, 1025, 64) if not refusals(load(PUBLISHED, ["cluster.num_nodes=null"]), size)}
    assert accepted == {128, 256, 512, 1024}


def test_ranks_are_grouped_as_megatron_core_groups_them():
    job = load(BASE, ["policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.context_parallel_size=2",
                      "policy.megatron_cfg.pipeline_model_parallel_size=2", "checkpointing.enabled=false"])  # fmt: skip
    groups = plan(job, 16).groups
    # tp fastest, then cp, then dp, pp slowest.
    assert groups["tp"] == ((0, 1), 8)
    assert groups["cp"] == ((0, 2), 8)
    assert groups["dp"] == ((0, 4), 8)
    assert groups["dp x cp"] == ((0, 2, 4, 6), 4)
    assert groups["pp"] == ((0, 8), 8)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid_or_is_a_manifest(path):
    if "kubernetes" in path.name:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
        assert [each["kind"] for each in documents] == ["Service", "Job"]
        command = documents[1]["spec"]["template"]["spec"]["containers"][0]["command"]
        config = command[command.index("--config") + 1]
        job = load(ROOT / config, [each for each in command if "=" in each and not each.startswith("--")])
        assert documents[1]["spec"]["completions"] == job.cluster.num_nodes
        assert refusals(job, job.cluster.num_nodes * job.cluster.gpus_per_node) == []
    else:
        job = load(path)
        nodes = (job.cluster.num_nodes or 1) * (job.cluster.gpus_per_node or 2)
        assert refusals(job, nodes) == []


def torchrun(arguments):
    """What the installed torchrun reads of a command: refused where it has no such option."""
    from torch.distributed.run import config_from_args, get_args_parser

    options = get_args_parser().parse_args(arguments)
    return config_from_args(options)[0]


def test_the_batch_script_leaves_ranks_the_time_to_save_between_its_signal_and_its_end():
    text = (JOBS / "published-comparison.sbatch").read_text(encoding="utf-8")
    (lead,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, flags=re.MULTILINE)
    command = shlex.split(text[text.index("torchrun \\") :].split("\n\n")[0].replace("\\\n", " "))[1:]
    given = [{"$SLURM_NNODES": "64", "$HEAD_NODE:29500": "head:29500"}.get(each, each) for each in command]
    # The ranks must be killed by nobody before the job's time is up, and torchrun needs some of it to end itself.
    assert int(lead) - 60 <= torchrun(given).shutdown_timeout <= int(lead) - 15


def test_the_pods_leave_ranks_the_time_to_save_before_they_are_killed():
    text = (JOBS / "published-comparison.kubernetes.yaml").read_text(encoding="utf-8")
    pod = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]
    (program, *arguments) = pod["containers"][0]["command"]
    assert program == "torchrun"
    given = torchrun([each.replace("$(JOB_COMPLETION_INDEX)", "0") for each in arguments])
    grace = pod["terminationGracePeriodSeconds"]
    assert grace - 60 <= given.shutdown_timeout <= grace - 15


def test_the_batch_script_starts_as_many_ranks_as_its_configuration_asks_for():
    text = (JOBS / "published-comparison.sbatch").read_text(encoding="utf-8")
    job = load(PUBLISHED)
    assert f"#SBATCH --nodes={job.cluster.num_nodes}\n" in text
    assert f"#SBATCH --gpus-per-node={job.cluster.gpus_per_node}\n" in text
    assert f"--nproc-per-node {job.cluster.gpus_per_node} " in text


@pytest.mark.parametrize("path", [BASE, SMALL, PUBLISHED], ids=lambda path: path.name)
def test_a_printed_configuration_loads_to_the_same_job(path, tmp_path):
    job = load(
        path,
        ["policy.tokenizer.chat_template=\"{% for 'm' in: # no %}\\n\"", 'policy.megatron_cfg.env_vars={A: "yes"}'],
    )
    printed = print_config(job)
    (tmp_path / "printed.yaml").write_text(printed, encoding="utf-8")
    again = load(tmp_path / "printed.yaml")
    assert json.loads(json.dumps(job.describe())) == job.describe()
    assert again.describe() == job.describe()
    assert again.policy.tokenizer.chat_template == "{% for 'm' in: # no %}\n"


def test_a_printed_configuration_says_the_source_of_each_value(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("policy:\n  megatron_cfg:\n    context_parallel_size: 2\ndata:\n  default:\n"
                    "    megatron_sft_context_parallel_size: ${policy.megatron_cfg.context_parallel_size}\n", encoding="utf-8")  # fmt: skip
    printed = print_config(load([BASE, path], ["sft.seed=3"]))
    said = {}
    for line in printed.splitlines():
        name, _, comment = line.strip().removeprefix("- ").partition("  #")
        said.setdefault(name.strip(), []).append(comment.strip())
    assert said["seed: 3"] == ["override 'sft.seed=3'", "derived from sft.seed"]
    assert said["context_parallel_size: 2"] == [f"{path}:3"]
    assert (
        said["megatron_sft_context_parallel_size: 2"]
        == [f"{path}:6, from ${{policy.megatron_cfg.context_parallel_size}}"] * 2
    )
    assert said["sequence_parallel: false"] == ["derived from policy.megatron_cfg.tensor_model_parallel_size"]
    assert said["train_micro_batch_size: 1"] == ["default"]
    assert all(comments[0] for name, comments in said.items() if not name.endswith(":")), "a value without a source"
    assert read_text(printed, name="printed").values["sft"]["seed"] == 3


def test_the_command_line_refuses_with_all_reasons_and_exit_status_2(capsys):
    assert (
        main(
            [
                "--config",
                str(BASE),
                "--dry-run",
                "--world-size",
                "3",
                "policy.train_micro_batch_size=2",
                "sft.val_period=1",
            ]
        )
        == 2
    )
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("refused: ") == 3  # micro batch size, the global batch size on 3 ranks, no validation
    assert "3 reasons against this job on 3 ranks" in said.err
    assert main(["--config", str(BASE), "policy.precison=float32"]) == 2
    assert "the nearest is policy.precision" in capsys.readouterr().err


def test_a_run_refuses_files_that_are_not_there_and_a_device_that_is_not_before_anything_starts(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--config", str(BASE), "data.train.data_path=[not-here.a, not-here.b]"]) == 2
    err = capsys.readouterr().err
    assert "not-here.a is not on this machine" in err
    assert "2 reasons against this job" in err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--config", str(BASE), "cluster.device=cuda"]) == 2
    assert "must be cpu or auto without a CUDA device, got cuda" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["--config", str(BASE), "sft.max_num_steps=0"]) == 2
    assert capsys.readouterr().err == ""


def test_a_run_hands_the_job_to_the_loop_with_its_environment(monkeypatch):
    ran = []
    loop = types.ModuleType("production.training.trainer")
    loop.run = ran.append
    monkeypatch.setitem(sys.modules, "production.training.trainer", loop)
    monkeypatch.setenv("PACKPROOF_TEST", "before")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    arguments = ["--config", str(BASE), f"data.train.data_path={ROOT / 'examples/packed/sample.jsonl.packed'}",
                 "--dump-batch", "3", "--dump-batch", "1", 'policy.megatron_cfg.env_vars={PACKPROOF_TEST: "set"}']  # fmt: skip
    assert main(arguments) == 0
    assert ran[0].logger.dump_batch_steps == (1, 3)
    assert os.environ["PACKPROOF_TEST"] == "set"


def test_overrides_may_stand_before_and_after_options(capsys):
    assert main(["sft.seed=5", "--print-config", "--config", str(BASE), "data.seed=6"]) == 0
    out = capsys.readouterr().out
    assert "seed: 5" in out
    assert "seed: 6" in out


def test_a_dry_run_takes_the_world_that_torchrun_started(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["--config", str(SMALL), "--dry-run"]) == 0
    assert "ranks               4\n" in capsys.readouterr().out


SHAPES = [
    [],
    ["policy.megatron_cfg.mtp_num_layers=2", "model.tie_embeddings=true", "model.num_query_groups=2"],
    [
        "policy.megatron_cfg.mtp_num_layers=2",
        "policy.megatron_cfg.mtp_use_repeated_layer=true",
        "model.add_bias_linear=true",
    ],
    [
        "model.num_moe_experts=4",
        "model.moe_ffn_hidden_size=48",
        "model.gated_linear_unit=true",
        "model.activation=silu",
    ],
    ["model.architecture=hybrid", 'model.hybrid_layer_pattern="*-*-/*-/*-"', "model.num_layers=null"],
]


def _count(path, send):
    from torch import distributed

    from production.model.device.shim import cpu_shim
    from production.model.model import build_model
    from production.parallel.sizes import parallel

    distributed.init_process_group("gloo", store=distributed.FileStore(path, 1), rank=0, world_size=1)
    for overrides in SHAPES:
        job = load(BASE, overrides)
        with cpu_shim(), parallel(sizes(job)):
            model = build_model(model_settings(job, 4096), sizes(job))
            send.send(sum(parameter.numel() for parameter in model.parameters()))
    send.close()
    os._exit(0)


@pytest.mark.worlds
def test_the_estimated_parameters_are_those_of_the_model_that_is_built(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_count, args=(str(tmp_path / "store"), send))
    child.start()
    send.close()
    counted = []
    try:
        while len(counted) < len(SHAPES) and receive.poll(60):
            counted.append(receive.recv())
    except EOFError:
        pass
    child.join(10)
    estimated = [
        memory_of_a_rank(load(BASE, shape), data_parallel_size=1, expert_data_parallel_size=1) for shape in SHAPES
    ]
    assert counted == [each.parameters for each in estimated]
    assert len(set(counted)) == len(SHAPES)


def test_memory_is_shared_by_the_distributed_optimizer_only():
    shared = plan(load(BASE), 8).memory
    plain = plan(load(BASE, ["policy.megatron_cfg.optimizer.use_distributed_optimizer=false"]), 8).memory
    assert plain.optimizer == 8 * plain.parameters
    assert shared.optimizer == -(-shared.parameters // 8) * 8
    assert plan(load(BASE, ["model.vocab_size=null"]), 8).memory is None


@pytest.mark.parametrize("said", ["", "abc", "-2"])
@pytest.mark.parametrize("options", [["--dry-run"], []], ids=["dry run", "run"])
def test_a_world_size_of_the_environment_that_is_not_a_number_is_refused(monkeypatch, capsys, said, options):
    monkeypatch.setenv("WORLD_SIZE", said)
    assert main(["--config", str(PUBLISHED), *options]) == 2
    assert f"WORLD_SIZE (environment): must be a number of ranks from 1, got {said!r}" in capsys.readouterr().err
