"""R-SETUP-8, 12 and 18: a set-up is refused here where the installed Megatron-LM's own argument parser refuses its command line."""

import contextlib
import io

import pytest
import training_job_worlds as jobs

from production.training.config import load, refusals

MEGATRON, WORLD = "policy.megatron_cfg", 8
OVERLAP, OPTIMIZER = f"{MEGATRON}.distributed_data_parallel_config", f"{MEGATRON}.optimizer"
COMMAND = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 128 --transformer-impl local --use-cpu-initialization --distributed-backend gloo --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-gradient-accumulation-fusion"
)
"""A command line that Megatron-LM takes, for the job that `SHAPE` describes."""
SHAPE = {
    "model.num_layers": 4, "model.hidden_size": 64, "model.num_attention_heads": 4, "model.num_query_groups": 2,
    "model.kv_channels": 16, "policy.train_global_batch_size": 8,
    f"{MEGATRON}.tensor_model_parallel_size": 1, f"{MEGATRON}.sequence_parallel": False,
}  # fmt: skip
SET_UPS = {
    "as it is": ({}, ""),
    "tp divides no world": ({f"{MEGATRON}.tensor_model_parallel_size": 3}, "--tensor-model-parallel-size 3"),
    "cp divides no world": ({f"{MEGATRON}.context_parallel_size": 3}, "--context-parallel-size 3"),
    "cp divides the world": ({f"{MEGATRON}.context_parallel_size": 4}, "--context-parallel-size 4"),
    "pp divides no world": ({f"{MEGATRON}.pipeline_model_parallel_size": 3}, "--pipeline-model-parallel-size 3"),
    "pp divides the layers": ({f"{MEGATRON}.pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size 2"),
    "pp divides no layers": (
        {f"{MEGATRON}.pipeline_model_parallel_size": 2, "model.num_layers": 5},
        "--pipeline-model-parallel-size 2 --num-layers 5",
    ),
    "ep divides the experts": (
        {f"{MEGATRON}.expert_model_parallel_size": 4, "model.num_moe_experts": 8},
        "--expert-model-parallel-size 4 --num-experts 8",
    ),
    "ep divides no experts": (
        {f"{MEGATRON}.expert_model_parallel_size": 4, "model.num_moe_experts": 6},
        "--expert-model-parallel-size 4 --num-experts 6",
    ),
    "heads divide no width": (
        {"model.num_attention_heads": 5, "model.num_query_groups": 5, "model.kv_channels": None},
        "--num-attention-heads 5 --num-query-groups 5",
    ),
    "a gather is overlapped alone": ({f"{OVERLAP}.overlap_param_gather": True}, "--overlap-param-gather"),
    "a gather is overlapped without the reduction": (
        {f"{OVERLAP}.overlap_param_gather": True, f"{OPTIMIZER}.use_distributed_optimizer": True},
        "--overlap-param-gather --use-distributed-optimizer",
    ),
    "both are overlapped": (
        {
            f"{OVERLAP}.overlap_param_gather": True,
            f"{OVERLAP}.overlap_grad_reduce": True,
            f"{OPTIMIZER}.use_distributed_optimizer": True,
        },
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
    ),
    "dp divides no global batch": ({"policy.train_global_batch_size": 7}, "--global-batch-size 7"),
}
"""By what it is: the job's keys and Megatron-LM's arguments, both beside those above."""


def refused_by_megatron_lm(monkeypatch, arguments):
    """Return the message of the installed `validate_args`, or None."""
    from megatron.training.arguments import parse_args, validate_args

    # The parser asks a CUDA device for its architecture; what it asks for decides no case here.
    monkeypatch.setattr("megatron.training.arguments.get_device_arch_version", lambda: 10)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *COMMAND.split(), *arguments.split()])
    for name, value in (("WORLD_SIZE", WORLD), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            validate_args(parse_args())
        except AssertionError as error:
            return str(error) or "an assertion without words"
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SET_UPS)
def test_r_setup_8_12_and_18_a_set_up_is_refused_where_megatron_lms_own_parser_refuses_it(name, tmp_path, monkeypatch):
    keys, arguments = SET_UPS[name]
    job = load(jobs.write_job(tmp_path, tmp_path / "none", **SHAPE | keys))
    ours = [error for error in refusals(job, WORLD, device="cpu") if error.kind not in ("no_file", "heads")]
    theirs = refused_by_megatron_lm(monkeypatch, arguments)
    assert bool(ours) == (theirs is not None), (theirs, [str(error) for error in ours])


def test_the_set_ups_hold_both_outcomes(monkeypatch):
    outcomes = {refused_by_megatron_lm(monkeypatch, arguments) is None for _, arguments in SET_UPS.values()}
    assert outcomes == {True, False}
