"""The reference's transformer against megatron-core's own models on one rank: token losses and every gradient, within R-MODEL-11."""

import pytest
import torch

from equivalence.workers import open_world, preload
from reference.model import Model, Shape
from reference.model_bounds import bounds
from reference.multi_token import shift

CU = [0, 8, 21, 32]
SCALE = 0.1
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
}
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.02}
SWIGLU = {"gated_linear_unit": True, "activation_func": "silu"}
TRANSFORMER = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "params_dtype": torch.float64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "init_method_std": 0.3,
    "add_bias_linear": False,
    "calculate_per_token_loss": True,
    "mtp_loss_scaling_factor": SCALE,
}
CASES = {
    "gpt, tied, two depths": (
        {"tie_embeddings": True, "rotary_base": 500, "rotary_percent": 0.5},
        {"num_layers": 2, "mtp_num_layers": 2, "rotary_interleaved": True, **SWIGLU},
    ),
    "gpt, biases and norms of q and k": ({}, {"num_layers": 2, "add_bias_linear": True, "qk_layernorm": True}),
    "gpt, balanced experts, a repeated depth": (
        {},
        {"num_layers": 1, "mtp_num_layers": 2, "mtp_use_repeated_layer": True, **EXPERTS, **BALANCED},
    ),
    "hybrid, all kinds of layers, a repeated depth": (
        {"architecture": "hybrid", "hybrid_layer_pattern": "*-*E/*E/*E"},
        {
            "mtp_use_repeated_layer": True,
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": 1.5,
            "moe_shared_expert_intermediate_size": 20,
            "moe_shared_expert_gate": True,
            **EXPERTS,
            **BALANCED,
            **SWIGLU,
        },
    ),
}


def case(number, settings, transformer):
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 64, (32,), generator=generator)
    labels[[7, 12, 20]] = -100
    return {
        "seed": number,
        "settings": {
            "vocab_size": 64,
            "max_sequence_length": 32,
            **settings,
            "transformer": {**TRANSFORMER, **transformer},
        },
        "input_ids": torch.randint(0, 64, (32,), generator=generator),
        "target_ids": labels,
        "token_mask": torch.randint(0, 2, (32,), generator=generator).float(),
        "cu_seqlens": torch.tensor(CU, dtype=torch.int32),
    }


def shape(settings, transformer):
    pattern = settings.get("hybrid_layer_pattern")
    own = {name: value for name, value in {**TRANSFORMER, **transformer}.items() if name in Shape.__dataclass_fields__}
    own |= {"activation": transformer.get("activation_func", "gelu"), "kv_channels": 4}
    own |= {name: settings[name] for name in ("rotary_base", "rotary_percent") if name in settings}
    if pattern:
        own |= {"num_layers": len(pattern.split("/")[0]), "mtp_num_layers": pattern.count("/")}
    return Shape(
        **own, hybrid_layer_pattern=pattern, share_embeddings_and_output_weights=settings.get("tie_embeddings", False)
    )


def training_loss(given, losses):
    """What megatron-core's backward pass starts from: the masked sum, MTP's weights (docs/SPEC.md#multi-token-prediction), the balancing losses."""
    masks = [shift(given["token_mask"], CU, depth) for depth in range(len(losses.tokens))]
    total = (losses.tokens[0] * masks[0]).sum() + sum(losses.auxiliary) * len(masks[0])
    for tokens, mask in zip(losses.tokens[1:], masks[1:], strict=True):
        total = total + (tokens * mask).sum() * SCALE / (len(masks) - 1) * masks[0].sum() / mask.sum().clamp(min=1)
    return total


@pytest.fixture(scope="module")
def given_and_found():
    preload("megatron_model_world")
    given = [case(number, *parts) for number, parts in enumerate(CASES.values())]
    with open_world(1) as world:
        (found,) = world.run("megatron_model_world:run_all", given)
    return dict(zip(CASES, zip(given, found, strict=True), strict=True))


@pytest.mark.worlds
@pytest.mark.parametrize("name", CASES)
def test_r_model_11_losses_and_gradients_are_megatron_cores(name, given_and_found):
    given, found = given_and_found[name]
    own = shape(*CASES[name])

    def run(model):
        losses = model.losses(given["input_ids"], given["target_ids"], CU)
        assert losses.router_gap > 1e-6, "a tie may fall either way"
        return losses.tokens, training_loss(given, losses)

    model = Model.from_tensors(own, found["weights"])
    tokens, loss = run(model)
    allowed = bounds(own, found["weights"], run)
    assert len(found["tokens"]) == len(tokens) == own.mtp_num_layers + 1
    for depth, theirs in enumerate(found["tokens"]):
        assert theirs.dtype == tokens[depth].dtype == torch.float32
        assert float((theirs - tokens[depth].detach()).abs().max()) <= allowed.tokens[depth]
    gradients = model.gradients(loss)
    assert set(gradients) == set(found["gradients"])
    for parameter, gradient in gradients.items():
        theirs = found["gradients"][parameter]
        assert float((theirs - gradient).norm()) <= allowed.gradients[parameter], parameter
