"""FLOPs by hand and against Megatron-LM's own count; peaks by device name."""

from types import SimpleNamespace

import pytest
import torch

from production.errors import PackproofError
from production.training.metrics.flops import ModelWork, peak_of, peak_tflops, segment_squares, work_of


def config(**changes):
    """The fields of a resolved TransformerConfig that are read."""
    given = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 2,
        "ffn_hidden_size": 32,
        "gated_linear_unit": False,
        "num_moe_experts": None,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_latent_size": None,
        "mtp_num_layers": None,
        "attention_output_gate": False,
    }
    return SimpleNamespace(**given | changes)


def megatron(shape, *, vocab_size, segments):
    """What the installed Megatron-LM counts for one row of these segments."""
    from megatron.training.training import num_floating_point_operations

    arguments = SimpleNamespace(
        **vars(shape),
        group_query_attention=shape.num_query_groups != shape.num_attention_heads,
        num_experts=shape.num_moe_experts,
        swiglu=shape.gated_linear_unit,
        padded_vocab_size=vocab_size,
        seq_length=sum(segments),
        hybrid_layer_pattern=None,
        hybrid_override_pattern=None,
        is_hybrid_model=False,
        multi_latent_attention=False,
        experimental_attention_variant=None,
    )
    return num_floating_point_operations(
        arguments,
        1,
        seqlen_squared_sum_in_batch=None if len(segments) == 1 else sum(length**2 for length in segments),
    )


def test_r_work_1_a_dense_model_worked_by_hand():
    # Two layers, h 8, 4 heads of 2: q, k, v and output are 8·8 each, feed-forward 8·32 and 32·8, output layer 8·100.
    per_token = 6 * (2 * (4 * 64 + 2 * 256) + 800)
    # Scores and their product with V: 2 · L·L·8 multiplications forward, half of them masked, so 6·8 a layer and square.
    per_square = 2 * 6 * 8
    work = work_of(config(), vocab_size=100)
    assert (work.per_token, work.per_square) == (per_token, per_square) == (14016, 96)
    assert work(10, 100) == 10 * 14016 + 100 * 96


def test_grouped_queries_swiglu_experts_and_depths_worked_by_hand():
    shape = config(
        num_query_groups=1,
        gated_linear_unit=True,
        num_moe_experts=8,
        moe_layer_freq=[0, 1],
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=24,
        mtp_num_layers=1,
    )
    attention = 8 * (8 + 2 + 2) + 8 * 8  # one group of keys: 2 columns each for K and V
    dense = 3 * 32 * 8
    experts = 3 * 16 * 2 * 8 + 3 * 24 * 8
    depth = 2 * 64 + 3 * 8
    # The depth's layer has experts, as the last one has.
    assert work_of(shape, vocab_size=100).per_token == 6 * (3 * attention + dense + 2 * experts + depth + 2 * 800)


SHAPES = {
    "dense": config(),
    "grouped queries": config(num_query_groups=2, gated_linear_unit=True),
    "wide heads": config(kv_channels=6, attention_output_gate=True),
    "depths": config(mtp_num_layers=2),
    "experts": config(num_moe_experts=8, moe_ffn_hidden_size=16, gated_linear_unit=True),
    "experts in places": config(
        num_layers=5, num_moe_experts=8, moe_layer_freq=2, moe_shared_expert_intermediate_size=24, mtp_num_layers=2
    ),
    "experts in a list": config(num_layers=3, num_moe_experts=4, moe_layer_freq=[0, 1, 0], mtp_num_layers=1),
    "latent experts": config(num_moe_experts=8, moe_ffn_hidden_size=16, moe_latent_size=4),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("segments", [(64,), (40, 8, 16)])
def test_r_work_1_and_2_megatron_lm_counts_the_same(name, segments):
    work = work_of(SHAPES[name], vocab_size=96)
    counted = work(sum(segments), sum(length**2 for length in segments))
    assert counted == megatron(SHAPES[name], vocab_size=96, segments=segments)


def test_the_real_config_of_megatron_core_is_understood():
    from megatron.core.transformer.transformer_config import TransformerConfig

    real = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=4)
    assert work_of(real, vocab_size=100) == work_of(config(), vocab_size=100)


def test_a_hybrid_pattern_counts_its_letters():
    found = work_of(config(num_moe_experts=4, moe_ffn_hidden_size=16), vocab_size=96, hybrid_layer_pattern="*-|*E/*-")
    assert (found.attention_layers, found.dense_layers, found.expert_layers, found.depths) == (3, 2, 1, 1)
    assert found.per_square == 6 * 3 * 8


def test_a_model_that_the_formula_does_not_cover_is_refused():
    with pytest.raises(PackproofError, match="TFLOP/s"):
        work_of(config(), vocab_size=96, hybrid_layer_pattern="*-M-")


def test_r_work_2_attention_counts_segments_and_not_the_row():
    row = torch.tensor([0, 8, 12, 32], dtype=torch.int32)
    assert segment_squares(row, 0) == 64 + 16 + 400
    assert segment_squares(row, 5) == 64 + 16 + 225  # padding belongs to the last segment
    assert segment_squares(row, 21) == 64 + 9
    assert segment_squares(row, 32) == 0
    assert segment_squares(torch.tensor([0, 32]), 0) == 32 * 32


def test_work_of_segments_is_less_than_of_one():
    work = ModelWork(
        hidden_size=8,
        vocab_size=1,
        attention_layers=1,
        dense_layers=0,
        query_size=8,
        key_value_size=8,
        ffn_hidden_size=1,
    )
    one, four = work(1024, 1024**2), work(1024, 4 * 256**2)
    assert one - four == 6 * 8 * (1024**2 - 4 * 256**2)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A10G", None),
        ("NVIDIA B200 PCIe", None),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_r_work_3_a_peak_goes_by_the_name_and_an_unknown_device_has_none(name, peak):
    assert peak_of(name) == peak


def test_a_cpu_has_no_peak():
    assert peak_tflops("cpu") is None
