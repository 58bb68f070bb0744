"""The reference's transformer (docs/SPEC.md#model) against values worked out by hand, and what must hold between its runs; no megatron-core here."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

from reference.model import EXACT, FLOAT32, Model, Shape
from reference.model_bounds import UNIT, bounds
from reference.model_layers import CrossEntropy, Row, Weights, attention, balance, experts, mlp, norm, rotate, route
from reference.multi_token import shift

CU = [0, 7, 16, 24]
VOCABULARY, HIDDEN = 40, 16
DENSE = {"num_layers": 2, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4}


def tensors(shape, experts=0, *, bias=False, seed=0):
    """Random float64 weights for a shape, by megatron-core's names."""
    generator = torch.Generator().manual_seed(seed)
    named = {}

    def linear(name, out, into):
        named[f"{name}.weight"] = torch.randn(out, into, dtype=torch.float64, generator=generator) * 0.3
        if bias:
            named[f"{name}.bias"] = torch.randn(out, dtype=torch.float64, generator=generator) * 0.1

    def gain(name, width=HIDDEN):
        named[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, dtype=torch.float64, generator=generator)

    def feed(name):
        linear(f"{name}.linear_fc1", 48 if shape.gated_linear_unit else 24, HIDDEN)
        linear(f"{name}.linear_fc2", HIDDEN, 24)

    def layer(name, symbols="*-"):
        if "*" in symbols:
            gain(f"{name}.input_layernorm")
            heads = shape.num_attention_heads + 2 * shape.num_query_groups
            linear(f"{name}.self_attention.linear_qkv", heads * shape.kv_channels, HIDDEN)
            linear(f"{name}.self_attention.linear_proj", HIDDEN, shape.num_attention_heads * shape.kv_channels)
        if "-" in symbols or "E" in symbols:
            gain(f"{name}.pre_mlp_layernorm")
            if "E" in symbols or (experts and shape.hybrid_layer_pattern is None):
                linear(f"{name}.mlp.router", experts, HIDDEN)
                for expert in range(experts):
                    feed(f"{name}.mlp.experts.local_experts.{expert}")
            else:
                feed(f"{name}.mlp")

    def layers(name, pattern):
        for number, symbol in enumerate(pattern):
            layer(f"{name}.layers.{number}", symbol)

    named["embedding.word_embeddings.weight"] = torch.randn(
        VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator
    )
    if shape.hybrid_layer_pattern is None:
        for number in range(shape.num_layers):
            layer(f"decoder.layers.{number}")
        gain("decoder.final_layernorm")
    else:
        layers("decoder", shape.main_pattern)
        gain("decoder.final_norm")
    for depth in range(1 if shape.mtp_use_repeated_layer else shape.mtp_num_layers):
        name = f"mtp.layers.{depth}"
        for each in ("enorm", "hnorm", "final_layernorm"):
            gain(f"{name}.{each}")
        named[f"{name}.eh_proj.weight"] = (
            torch.randn(HIDDEN, 2 * HIDDEN, dtype=torch.float64, generator=generator) * 0.3
        )
        if shape.hybrid_layer_pattern is None:
            layer(f"{name}.mtp_model_layer")
        else:
            layers(f"{name}.mtp_model_layer", shape.depth_pattern)
    if not shape.share_embeddings_and_output_weights:
        named["output_layer.weight"] = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator) * 0.3
    return named


def row(seed=0, length=24):
    """Ids without 0 and labels, the last label of each segment -100."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
    labels = torch.randint(0, VOCABULARY, (length,), generator=generator)
    for end in CU[1:]:
        if end <= length:
            labels[end - 1] = -100
    return ids, labels


def shapes():
    gpt = Shape(**DENSE, mtp_num_layers=2)
    gated = Shape(**DENSE, mtp_num_layers=1, gated_linear_unit=True, activation="silu", moe_router_dtype="fp32")
    pattern = Shape(**{**DENSE, "num_layers": 3}, hybrid_layer_pattern="*E-/*E", mtp_num_layers=1)
    return [(gpt, 0, True), (gated, 4, False), (pattern, 4, True)]


@pytest.mark.parametrize(("shape", "count", "bias"), shapes())
def test_r_model_4_another_token_changes_nothing_in_another_segment_nor_before_it(shape, count, bias):
    model = Model.from_tensors(shape, tensors(shape, count, bias=bias))
    ids, labels = row()
    changed_at = 10  # in the second segment, [7, 16)
    other = ids.clone()
    other[changed_at] = ids[changed_at] % (VOCABULARY - 1) + 1
    before, after = model.losses(ids, labels, CU), model.losses(other, labels, CU)
    for depth, (one, two) in enumerate(zip(before.tokens, after.tokens, strict=True)):
        seen = (one != two).nonzero()[:, 0].tolist()
        assert seen, "the change must show somewhere"
        assert min(seen) == changed_at - depth, "depth k reads the token k further on, and no later one"
        assert max(seen) < CU[2]


@pytest.mark.parametrize(("shape", "count", "bias"), shapes())
def test_r_model_4_the_loss_of_a_segment_has_no_gradient_in_tokens_of_another(shape, count, bias):
    model = Model.from_tensors(shape, tensors(shape, count, bias=bias))
    ids, labels = torch.arange(1, 25), row()[1]
    loss = sum(tokens[CU[1] : CU[2]].sum() for tokens in model.losses(ids, labels, CU).tokens)
    gradient = model.gradients(loss)["embedding.word_embeddings.weight"].abs().sum(-1)
    inside = set(ids[CU[1] : CU[2]].tolist()) | {0}  # 0 is read behind the segment's end by MTP
    assert {int(token) for token in gradient.nonzero()} == inside


@pytest.mark.parametrize(("shape", "count", "bias"), shapes())
def test_a_packed_row_is_its_conversations_one_at_a_time(shape, count, bias):
    named = tensors(shape, count, bias=bias)
    model = Model.from_tensors(shape, named)
    ids, labels = row()
    packed = model.losses(ids, labels, CU)
    logits = model.logits(ids, CU)
    total = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    for start, end in itertools.pairwise(CU):
        own, own_labels = ids[start:end], labels[start:end]
        for depth, alone in enumerate(model.logits(own, [0, end - start])):
            assert torch.allclose(alone, logits[depth][start:end], rtol=0, atol=1e-12)
        losses = model.losses(own, own_labels, [0, end - start]).tokens
        for depth, alone in enumerate(losses):
            ulp = 2 * UNIT * packed.tokens[depth].max()
            assert (alone - packed.tokens[depth][start:end]).abs().max() <= 2 * ulp
        for name, gradient in model.gradients(sum(each.double().sum() for each in losses)).items():
            total[name] += gradient
    whole = model.gradients(sum(each.double().sum() for each in packed.tokens))
    for name, gradient in whole.items():
        assert (gradient - total[name]).norm() <= 1e-6 * gradient.norm(), name


def test_r_model_3_positions_restart_and_rotation_by_hand():
    shape = Shape(
        num_layers=1, num_attention_heads=1, num_query_groups=1, kv_channels=6, rotary_percent=0.7, rotary_base=100
    )
    assert shape.rotary_channels == 4
    heads = torch.arange(1.0, 7, dtype=torch.float64).expand(5, 1, 6)
    turned = rotate(heads, [0, 3, 3, 5], shape)
    assert turned[0].equal(heads[0])
    assert turned[3:].equal(turned[:2]), "the second segment begins at position 0 again"
    assert turned[:, :, 4:].equal(heads[:, :, 4:]), "what percent leaves is not turned"
    slow, fast = torch.tensor([0.1, 1.0]), torch.tensor(2.0)  # base ** (-2/4), and position 2
    angles = [float(fast), float(slow[0] * 2)]
    expected = [
        math.cos(angles[0]) - 3 * math.sin(angles[0]),  # channel 0 with channel 2
        2 * math.cos(angles[1]) - 4 * math.sin(angles[1]),  # channel 1 with channel 3
        3 * math.cos(angles[0]) + math.sin(angles[0]),
        4 * math.cos(angles[1]) + 2 * math.sin(angles[1]),
    ]
    assert turned[2, 0, :4].tolist() == pytest.approx(expected, abs=1e-6)
    assert turned[2, 0, :4].tolist() != expected, "cosine and sine are float32"
    neighbors = rotate(heads, [0, 5], Shape(**{**shape.__dict__, "rotary_interleaved": True}))
    expected = [
        math.cos(angles[0]) - 2 * math.sin(angles[0]),
        2 * math.cos(angles[0]) + math.sin(angles[0]),
        3 * math.cos(angles[1]) - 4 * math.sin(angles[1]),
        4 * math.cos(angles[1]) + 3 * math.sin(angles[1]),
    ]
    assert neighbors[2, 0, :4].tolist() == pytest.approx(expected, abs=1e-6)


def test_r_model_4_a_lone_token_passes_on_its_groups_value():
    shape = Shape(num_layers=1, num_attention_heads=4, num_query_groups=2, kv_channels=2)
    qkv = torch.zeros(16, 1, dtype=torch.float64)
    qkv[6:8, 0], qkv[14:16, 0] = (
        torch.tensor([5.0, 6.0]),
        torch.tensor([7.0, 8.0]),
    )  # [q q k v | q q k v], two rows each
    weights = Weights({"a.linear_qkv.weight": qkv, "a.linear_proj.weight": torch.eye(8, dtype=torch.float64)})
    out = attention(
        weights, "a", torch.ones(1, 1, dtype=torch.float64), shape, Row(cu_seqlens=[0, 1], rounding=FLOAT32)
    )
    assert out.tolist() == [[5, 6, 5, 6, 7, 8, 7, 8]]


def test_r_model_2_norms_by_hand():
    hidden = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    weights = Weights({"n.weight": torch.tensor([1.0, 2.0]).double(), "n.bias": torch.tensor([0.5, 0.0]).double()})
    size = math.sqrt(12.5 + 0.01)
    base = {**DENSE, "layernorm_epsilon": 0.01}
    assert norm(weights, ["n."], hidden, Shape(**base)).tolist()[0] == pytest.approx([3 / size, 8 / size])
    centered = norm(weights, ["n."], hidden, Shape(**base, layernorm_zero_centered_gamma=True))
    assert centered.tolist()[0] == pytest.approx([6 / size, 12 / size])
    layer = norm(weights, ["other.", "n."], hidden, Shape(**base, normalization="LayerNorm"))
    size = math.sqrt(0.25 + 0.01)
    assert layer.tolist()[0] == pytest.approx([0.5 - 0.5 / size, 1 / size])
    half = norm(weights, ["n."], hidden.bfloat16(), Shape(**base))
    assert half.dtype == torch.bfloat16


def test_r_model_5_the_first_half_is_the_gate():
    named = {
        "m.linear_fc1.weight": torch.tensor([[2.0], [3.0]]).double(),
        "m.linear_fc2.weight": torch.ones(1, 1).double(),
    }
    one = torch.ones(1, 1, dtype=torch.float64)
    gated = mlp(Weights(named), "m", one, Shape(**DENSE, gated_linear_unit=True, activation="silu"))
    assert float(gated) == pytest.approx(2 / (1 + math.exp(-2)) * 3)
    named["m.linear_fc2.weight"] = torch.ones(1, 2).double()
    plain = mlp(Weights(named), "m", one, Shape(**DENSE))
    assert float(plain) == pytest.approx(sum(x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in (2, 3)))
    assert float(mlp(Weights(named), "m", -one, Shape(**DENSE, activation="squared_relu"))) == 0


def routed(**options):
    """Logits 2, 0, 1 on three experts: the shares of one token."""
    shape = Shape(**DENSE, **options)
    named = {"r.weight": torch.tensor([[2.0], [0.0], [1.0]]).double()}
    if options.get("moe_router_score_function") == "sigmoid":
        named["r.expert_bias"] = torch.tensor([0.0, 0.6, 0.0])
    place = Row(cu_seqlens=[0, 1], rounding=FLOAT32)
    logits, share = route(Weights(named), "r", torch.ones(1, 1, dtype=torch.float64), shape, place)
    return logits, share[0].tolist(), place.gaps


def test_r_model_6_top_k_by_hand():
    e = math.e
    logits, share, gaps = routed()
    assert logits.tolist() == [[2, 0, 1]]
    assert share == pytest.approx([e / (e + 1), 0, 1 / (e + 1)])
    assert gaps == [1.0], "the last chosen logit is 1, the first that was not 0"
    assert share[0] == torch.tensor([2.0, 1.0]).softmax(-1)[0].item(), "rounded to float32"
    all_of_it = e**2 + e + 1
    assert routed(moe_router_pre_softmax=True, moe_router_topk_scaling_factor=2.0)[1] == pytest.approx(
        [2 * e**2 / all_of_it, 0, 2 * e / all_of_it]
    )
    one = routed(moe_router_pre_softmax=True, moe_router_topk=1)[1]
    assert one == pytest.approx([e**2 / all_of_it, 0, 0])
    first, second = 1 / (1 + math.exp(-2)), 0.5  # the bias lets expert 1 in, and its own score counts
    assert routed(moe_router_score_function="sigmoid")[1] == pytest.approx(
        [first / (first + second), second / (first + second), 0]
    )
    assert routed(moe_router_dtype="fp32")[0].dtype == torch.float32
    assert routed(moe_router_topk=3)[2] == [], "where all are chosen there is no gap"


def test_r_model_6_weights_multiply_before_the_second_linear_and_its_bias():
    named = {"m.router.weight": torch.tensor([[2.0], [0.0], [1.0]]).double()}
    for expert in range(3):
        name = f"m.experts.local_experts.{expert}"
        named |= {
            f"{name}.linear_fc1.weight": torch.ones(1, 1).double(),
            f"{name}.linear_fc2.weight": torch.full((1, 1), 10.0**expert).double(),
        }
        named |= {
            f"{name}.linear_fc1.bias": torch.zeros(1).double(),
            f"{name}.linear_fc2.bias": torch.full((1,), 5.0).double(),
        }
    shape = Shape(**DENSE, activation="squared_relu")
    place = Row(cu_seqlens=[0, 1], rounding=FLOAT32)
    first, last = math.e / (math.e + 1), 1 / (math.e + 1)
    out = experts(Weights(named), "m", torch.ones(1, 1).double(), shape, place)
    assert float(out) == pytest.approx(first * 1 + last * 100 + 5)
    grouped = {"m.router.weight": named["m.router.weight"]}
    for expert in range(3):
        for part in ("linear_fc1", "linear_fc2"):
            for kind in ("weight", "bias"):
                grouped[f"m.experts.{part}.{kind}{expert}"] = named[f"m.experts.local_experts.{expert}.{part}.{kind}"]
    assert experts(Weights(grouped), "m", torch.ones(1, 1).double(), shape, place).equal(out)
    for part in ("linear_fc1", "linear_fc2"):
        named[f"m.shared_experts.{part}.weight"] = torch.full((1, 1), 2.0).double()
    assert experts(Weights(named), "m", torch.ones(1, 1).double(), shape, place).item() == pytest.approx(float(out) + 8)
    named["m.shared_experts.gate_weight"] = torch.zeros(1, 1).double()
    assert experts(Weights(named), "m", torch.ones(1, 1).double(), shape, place).item() == pytest.approx(float(out) + 4)


def test_r_model_7_the_balancing_loss_by_hand_and_where_a_repeated_layer_divides_it():
    shape = Shape(**DENSE, moe_router_topk=1, moe_router_pre_softmax=True, moe_aux_loss_coeff=0.5)
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [math.log(3), 0.0]], dtype=torch.float64)
    loss = balance(logits, shape, Row(cu_seqlens=[0, 3], rounding=FLOAT32))
    assert float(loss) == pytest.approx(0.5 * 2 / (1 * 9) * ((0.25 + 0.25 + 0.75) * 1 + (0.75 + 0.75 + 0.25) * 2))
    assert loss.dtype == torch.float32
    ids, labels = row()
    parts = {"mtp_num_layers": 2, "moe_aux_loss_coeff": 0.1}
    for pattern in (None, "*E/*E/*E"):
        one = Shape(**DENSE, **parts, hybrid_layer_pattern=pattern, mtp_use_repeated_layer=True)
        named = tensors(one, 4)
        both = dict(named)
        for name in named:
            if name.startswith("mtp.layers.0."):
                both[name.replace("layers.0", "layers.1", 1)] = named[name]
        repeated = Model.from_tensors(one, named).losses(ids, labels, CU).auxiliary
        apart = Shape(**DENSE, **parts, hybrid_layer_pattern=pattern)
        separate = Model.from_tensors(apart, both).losses(ids, labels, CU).auxiliary
        assert len(repeated) == len(separate) == (4 if pattern is None else 3)
        for depth in (-2, -1):
            assert repeated[depth].equal(separate[depth] / (2 if pattern is None else 1))
        assert repeated[0].equal(separate[0])


def test_r_model_8_cross_entropy_its_gradient_and_labels_outside_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.tensor([0, 8, -100, 3, 9, 5])
    losses = CrossEntropy.apply(logits, target)
    inside = (target >= 0) & (target < 9)
    assert torch.allclose(
        losses[inside], functional.cross_entropy(logits, target.where(inside, 0), reduction="none")[inside]
    )
    outside = (logits - logits.max(-1, keepdim=True).values).exp().sum(-1).log()
    assert torch.allclose(losses[~inside], outside[~inside])
    (gradient,) = torch.autograd.grad(losses[2], logits, retain_graph=True)
    assert torch.allclose(gradient[2], logits[2].softmax(-1)), "only the mask removes such a label"
    known = torch.tensor([0, 8, 1, 3, 2, 5])
    assert torch.autograd.gradcheck(lambda given: CrossEntropy.apply(given, known), (logits,))


@pytest.mark.parametrize("repeated", [False, True])
def test_r_model_9_each_depth_reads_and_predicts_later_tokens(repeated):
    shape = Shape(**DENSE, mtp_num_layers=2, mtp_use_repeated_layer=repeated)
    model = Model.from_tensors(shape, tensors(shape))
    ids, labels = row()
    losses, logits = model.losses(ids, labels, CU), model.logits(ids, CU)
    assert len(losses.tokens) == len(logits) == 3
    for depth, tokens in enumerate(losses.tokens):
        assert tokens.dtype == torch.float32
        target = shift(labels, CU, depth)
        known = target >= 0
        expected = functional.cross_entropy(logits[depth], target.where(known, 0), reduction="none")
        assert torch.allclose(tokens[known].double(), expected[known], rtol=0, atol=1e-5)
    assert 0 not in ids
    ends = {CU[1] - 1: (1, 2), CU[1] - 2: (2,)}
    for position, depths in ends.items():
        for depth in (1, 2):
            gradient = model.gradients(model.losses(ids, labels, CU).tokens[depth][position])
            # Position k from the end reads id 0 at depth k, and so does every depth after it by attention or state.
            assert bool(gradient["embedding.word_embeddings.weight"][0].any()) == (depth in depths)


def test_r_model_9_a_repeated_layer_is_two_equal_ones_and_its_gradient_their_sum():
    one = Shape(**DENSE, mtp_num_layers=2, mtp_use_repeated_layer=True)
    named = tensors(one)
    both = dict(named)
    for name in named:
        if name.startswith("mtp.layers.0."):
            both[name.replace("layers.0", "layers.1", 1)] = named[name]
    ids, labels = row()
    found = []
    for shape, weights in ((one, named), (Shape(**DENSE, mtp_num_layers=2), both)):
        model = Model.from_tensors(shape, weights)
        losses = model.losses(ids, labels, CU).tokens
        found.append((losses, model.gradients(sum(each.sum() for each in losses))))
    for repeated, separate in zip(found[0][0], found[1][0], strict=True):
        assert repeated.equal(separate)
    for name, gradient in found[0][1].items():
        parts = found[1][1][name]
        if name.startswith("mtp.layers.0."):
            parts = parts + found[1][1][name.replace("layers.0", "layers.1", 1)]
        assert torch.allclose(gradient, parts, rtol=1e-10, atol=1e-12), name


def test_r_model_9_a_tied_embedding_has_the_gradient_of_both_its_uses():
    tied = Shape(**DENSE, mtp_num_layers=1, share_embeddings_and_output_weights=True)
    apart = Shape(**DENSE, mtp_num_layers=1)
    named = tensors(tied)
    ids, labels = row()
    found = []
    for shape, weights in (
        (tied, named),
        (apart, {**named, "output_layer.weight": named["embedding.word_embeddings.weight"]}),
    ):
        model = Model.from_tensors(shape, weights)
        losses = model.losses(ids, labels, CU).tokens
        found.append((losses, model.gradients(sum(each.sum() for each in losses))))
    assert all(one.equal(two) for one, two in zip(found[0][0], found[1][0], strict=True))
    once, twice = found[1][1]["embedding.word_embeddings.weight"], found[1][1]["output_layer.weight"]
    assert once.norm() > 0
    assert twice.norm() > 0
    assert torch.allclose(found[0][1]["embedding.word_embeddings.weight"], once + twice, rtol=1e-10, atol=1e-12)


def test_r_model_1_fused_norm_names_are_read_and_missing_or_unknown_names_refused():
    shape = Shape(**DENSE)
    named = tensors(shape)
    ids, labels = row()
    losses = Model.from_tensors(shape, named).losses(ids, labels, CU).tokens[0]
    fused = {
        name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        ): tensor
        for name, tensor in named.items()
    }
    assert set(fused) != set(named)
    assert Model.from_tensors(shape, fused).losses(ids, labels, CU).tokens[0].equal(losses)
    for name in named:
        with pytest.raises(ValueError, match="lack"):
            Model.from_tensors(shape, {other: tensor for other, tensor in named.items() if other != name})
    with pytest.raises(ValueError, match=r"does not use mtp\.norm, output\.weight"):
        Model.from_tensors(
            shape, {**named, "output.weight": torch.ones(1).double(), "mtp.norm": torch.ones(1).double()}
        )
    model = Model.from_tensors(shape, named)
    for boundaries in ([0, 20], [1, 24], [0, 9, 8, 24]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            model.losses(ids, labels, boundaries)
    assert model.losses(ids, labels, [0, 0, 7, 7, 16, 24, 24]).tokens[0].equal(losses), "an empty segment has no token"


@pytest.mark.parametrize(
    "wrong",
    [
        {"normalization": "L2Norm"},
        {"activation": "tanh"},
        {"moe_router_score_function": "sinkhorn"},
        {"moe_router_dtype": "bf16"},
        {"num_query_groups": 3},
        {"rotary_percent": 0.3},
        {"hybrid_layer_pattern": "*M"},
        {"hybrid_layer_pattern": "*-*"},
        {"hybrid_layer_pattern": "*-/*-"},
        {"hybrid_layer_pattern": "*-/*-/*E", "mtp_num_layers": 2},
    ],
)
def test_r_model_1_a_shape_without_a_rule_is_refused(wrong):
    with pytest.raises(ValueError, match=r"normalization|activation|moe_router|groups|rotary|hybrid_layer_pattern"):
        Shape(**{**DENSE, **wrong})
    assert Shape(**DENSE, hybrid_layer_pattern="*|-").main_pattern == "*-"


def test_r_model_10_and_11_rounding_follows_the_rules_and_its_bounds_are_tight():
    shape = Shape(**DENSE, mtp_num_layers=1)
    named = tensors(shape, 4)
    ids, labels = row()

    def run(model):
        losses = model.losses(ids, labels, CU)
        assert losses.router_gap > 1e-5, "a tie may fall either way"
        return losses.tokens, sum(each.sum() for each in losses.tokens)

    found = bounds(shape, named, run)
    exact, rounded = (Model.from_tensors(shape, named, rounding=rounding) for rounding in (EXACT, FLOAT32))
    (exact_losses, exact_loss), (losses, loss) = run(exact), run(rounded)
    assert exact_losses[0].dtype == torch.float64
    for bound, one, two in zip(found.tokens, losses, exact_losses, strict=True):
        assert 0 < (one - two).abs().max().item() < bound < 40 * UNIT * two.max().item()
    gradients, exact_gradients = rounded.gradients(loss), exact.gradients(exact_loss)
    assert set(found.gradients) == set(gradients) == set(named)
    for name, gradient in gradients.items():
        assert 0 < float((gradient - exact_gradients[name]).norm()) < found.gradients[name], name
    norm_of_all = sum(float(each.square().sum()) for each in gradients.values()) ** 0.5
    assert found.gradient_norm < 1e-6 * norm_of_all
    # A fault in the fourth place of one weight of thousands is beyond every bound that it can reach.
    wrong = {
        **named,
        "decoder.layers.1.self_attention.linear_proj.weight": named[
            "decoder.layers.1.self_attention.linear_proj.weight"
        ].clone(),
    }
    wrong["decoder.layers.1.self_attention.linear_proj.weight"][0, 0] *= 1.001
    faulty = Model.from_tensors(shape, wrong)
    faulty_losses, faulty_loss = run(faulty)
    for bound, one, two in zip(found.tokens, faulty_losses, losses, strict=True):
        assert (one - two).abs().max().item() > bound
    beyond = [
        name
        for name, each in faulty.gradients(faulty_loss).items()
        if float((each - gradients[name]).norm()) > found.gradients[name]
    ]
    assert len(beyond) > 0.9 * len(named)


def test_r_model_10_it_runs_in_the_dtype_of_its_weights():
    shape = Shape(**DENSE, mtp_num_layers=1, moe_router_dtype="fp32")
    named = tensors(shape, 4)
    ids, labels = row()
    full = Model.from_tensors(shape, named).losses(ids, labels, CU).tokens
    for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 0.5)):
        model = Model.from_tensors(shape, {name: tensor.to(dtype) for name, tensor in named.items()})
        losses = model.losses(ids, labels, CU).tokens
        for one, two in zip(losses, full, strict=True):
            assert one.dtype == torch.float32
            assert 0 < (one - two).abs().mean().item() < near
        assert {gradient.dtype for gradient in model.gradients(sum(each.sum() for each in losses)).values()} == {dtype}
    with pytest.raises(ValueError, match="must have one dtype"):
        Model.from_tensors(shape, {**named, "output_layer.weight": named["output_layer.weight"].float()})
    with pytest.raises(ValueError, match="float64"):
        bounds(shape, {name: tensor.float() for name, tensor in named.items()}, lambda _: ([], torch.zeros(())))
