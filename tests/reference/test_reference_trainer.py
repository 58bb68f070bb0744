"""The reference's training loop: its schedule is the installed scheduler's to the bit, its AdamW torch's and one worked by hand, its clipping megatron-core's (R-TRAIN)."""

import dataclasses
import itertools
import math

import pytest
import torch

from reference.batches import Batch
from reference.loss import NORMALIZATIONS
from reference.model import Model, Shape
from reference.multi_token import shift
from reference.trainer import AdamW, Schedule, Settings, Trainer, clip, decays, global_norm, global_objective, rows_of
from reference.trainer_bounds import train
from reference.trainer_schedule import LAST_STYLES, STYLES, WEIGHT_DECAY_STYLES

COSINE = Schedule(max_lr=3e-4, min_lr=1e-5, init_lr=1e-6, warmup_steps=4, decay_steps=20, style="cosine")


def schedules():
    for style, warmup, decay in itertools.product(STYLES, (0, 1, 5), WEIGHT_DECAY_STYLES):
        for last in LAST_STYLES if style == "WSD" else (None,):
            yield Schedule(
                max_lr=3e-4,
                min_lr=1.3e-5,
                init_lr=7e-7,
                warmup_steps=warmup,
                decay_steps=17,
                style=style,
                last_style=last,
                last_steps=6 if last else None,
                weight_decay=0.03,
                end_weight_decay=0.03 if decay == "constant" else 0.11,
                weight_decay_style=decay,
                weight_decay_steps=20,
            )


class Groups:
    """All that the scheduler asks of an optimizer."""

    def __init__(self):
        self.param_groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]


def test_r_train_1_to_3_rates_and_decays_are_the_installed_schedulers_to_the_bit_in_every_style_also_past_the_end():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    compared = 0
    for each in schedules():
        groups = Groups()
        scheduler = OptimizerParamScheduler(
            groups,
            init_lr=each.init_lr,
            max_lr=each.max_lr,
            min_lr=each.min_lr,
            lr_warmup_steps=each.warmup_steps,
            lr_decay_steps=each.decay_steps,
            lr_decay_style=each.style,
            start_wd=each.weight_decay,
            end_wd=each.end_weight_decay,
            wd_incr_steps=each.weight_decay_steps,
            wd_incr_style=each.weight_decay_style,
            wsd_decay_steps=each.last_steps,
            lr_wsd_decay_style=each.last_style,
        )
        for step in range(22):
            decayed, spared = groups.param_groups
            assert decayed["lr"] == spared["lr"] == each.learning_rate_at(step), (each, step)
            assert (decayed["weight_decay"], spared["weight_decay"]) == (each.weight_decay_at(step), 0.0), (each, step)
            scheduler.step(increment=1)
            compared += 1
    assert compared == 22 * 3 * 3 * (4 + 4)


def test_r_train_1_and_2_rates_worked_by_hand():
    assert [COSINE.learning_rate_at(step) for step in (0, 4, 21)] == [1e-6, 3e-4, 1e-5]
    assert COSINE.learning_rate_at(2) == pytest.approx((1e-6 + 3e-4) / 2)
    assert COSINE.learning_rate_at(12) == pytest.approx((3e-4 + 1e-5) / 2)  # half of the way: cos(pi/2)
    root = dataclasses.replace(COSINE, style="inverse-square-root")
    assert root.learning_rate_at(16) == pytest.approx(3e-4 * 2 / 4)
    last = dataclasses.replace(COSINE, style="WSD", last_style="exponential", last_steps=10)
    assert last.learning_rate_at(10) == 3e-4
    assert last.learning_rate_at(15) == pytest.approx(1e-5 + (math.sqrt(2) - 1) * 2.9e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"style": "polynomial"},
        {"warmup_steps": 20},
        {"style": "WSD", "last_style": "linear"},
        {"last_style": "linear"},
        {"end_weight_decay": 0.1},
        {"weight_decay_style": "sine"},
        {"weight_decay_steps": 0},
    ],
)
def test_a_schedule_without_a_rule_is_refused(wrong):
    with pytest.raises(
        ValueError, match=r"the schedule|warmup_steps must|last_steps must|constant|weight_decay_steps must"
    ):
        dataclasses.replace(COSINE, **wrong)


def test_r_train_3_a_weight_decay_that_grows_needs_the_length_of_the_run():
    grows = dataclasses.replace(COSINE, weight_decay=0.1, end_weight_decay=0.3, weight_decay_style="linear")
    with pytest.raises(ValueError, match="weight_decay_steps must be given"):
        grows.weight_decay_at(3)
    assert dataclasses.replace(grows, weight_decay_steps=10).weight_decay_at(5) == pytest.approx(0.2)
    assert COSINE.weight_decay_at(3) == 0.0


def test_r_train_5_two_updates_worked_by_hand():
    """Weight 2, gradients 0.5 then -1, rate 0.1, decay 0.2, betas 0.9 and 0.99, epsilon 0."""
    settings = Settings(schedule=COSINE, beta1=0.9, beta2=0.99, epsilon=0.0)
    moments = AdamW(first=torch.zeros(1, dtype=torch.float64), second=torch.zeros(1, dtype=torch.float64))
    weight = torch.tensor([2.0], dtype=torch.float64)
    weight = moments.update(
        weight, torch.tensor([0.5]).double(), learning_rate=0.1, weight_decay=0.2, settings=settings
    )
    # Both moments, divided by what is missing of 1, are the gradient and its square: a step of the whole rate.
    assert float(weight) == pytest.approx(2 * 0.98 - 0.1, abs=1e-15)
    weight = moments.update(
        weight, torch.tensor([-1.0]).double(), learning_rate=0.1, weight_decay=0.2, settings=settings
    )
    first, second = 0.9 * 0.05 - 0.1, 0.99 * 0.0025 + 0.01
    step = 0.1 * (first / 0.19) / math.sqrt(second / 0.0199)
    assert float(weight) == pytest.approx(1.86 * 0.98 - step, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_r_train_5_updates_are_torchs_adamw(dtype):
    settings = Settings(schedule=COSINE, beta1=0.9, beta2=0.95, epsilon=1e-8)
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(7, 3, generator=generator, dtype=dtype)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ours = start.clone()
    moments = AdamW(first=torch.zeros_like(ours), second=torch.zeros_like(ours))
    for _ in range(30):
        gradient = torch.randn(7, 3, generator=generator, dtype=dtype)
        theirs.grad = gradient
        optimizer.step()
        ours = moments.update(ours, gradient, learning_rate=1e-2, weight_decay=0.1, settings=settings)
    # Each of 30 updates rounds a handful of times at the size of a weight or of a rate's step.
    assert float((ours - theirs.detach()).abs().max()) <= 30 * 4 * torch.finfo(dtype).eps * float(start.abs().max())
    assert float((ours - start).norm()) > 0.1


def test_r_train_4_biases_and_one_dimensional_parameters_do_not_decay_as_in_megatron_core():
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    (key,) = get_standard_config_overrides(OptimizerConfig(optimizer="adam", lr=1.0))
    shapes = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.0.input_layernorm.weight": (4,),
        "decoder.layers.0.mlp.linear_fc1.bias": (8,),
        "decoder.layers.0.mlp.linear_fc1.weight": (8, 4),
        "decoder.layers.0.mlp.stacked.bias": (2, 4),
        "decoder.layers.0.mlp.experts.linear_fc1.bias0": (4,),
        "decoder.layers.0.mlp.router.weight": (2, 4),
        "decoder.final_layernorm.weight": (4,),
    }
    spared = {name for name, shape in shapes.items() if not decays(name, torch.zeros(shape))}
    assert spared == {name for name, shape in shapes.items() if key.matches(torch.zeros(shape), name)}
    assert len(spared) == 5


def test_r_train_6_clipping_is_megatron_cores():
    from megatron.core.utils import local_multi_tensor_scale

    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert global_norm(gradients) == 5.0
    clipped = clip(gradients, 5.0, 1.0)
    assert clipped["a"].tolist() == pytest.approx([3 / 5.000001, 0.0])
    assert clipped["b"].tolist() == [[pytest.approx(4 / 5.000001)]]
    theirs = [each.clone() for each in gradients.values()]
    local_multi_tensor_scale(0, None, [theirs, theirs], 1.0 / (5.0 + 1e-6))
    assert all(torch.equal(ours, other) for ours, other in zip(clipped.values(), theirs, strict=True))
    for enough in (5.000001, 7.0):  # at a factor of 1 nothing is touched
        assert all(clip(gradients, 5.0, enough)[name] is gradients[name] for name in gradients)


SHAPE = Shape(
    num_layers=1, num_attention_heads=2, num_query_groups=2, kv_channels=4, mtp_num_layers=1, activation="silu"
)


def named(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab, layer = 8, 12, {}
    for name in ("decoder.layers.0", "mtp.layers.0.mtp_model_layer"):
        layer |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.self_attention.linear_qkv.weight": (3 * hidden, hidden),
            f"{name}.self_attention.linear_proj.weight": (hidden, hidden),
            f"{name}.pre_mlp_layernorm.weight": (hidden,),
            f"{name}.mlp.linear_fc1.weight": (hidden, hidden),
            f"{name}.mlp.linear_fc2.weight": (hidden, hidden),
        }
    shapes = {
        "embedding.word_embeddings.weight": (vocab, hidden),
        "output_layer.weight": (vocab, hidden),
        "decoder.final_layernorm.weight": (hidden,),
        "mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden),
        **{f"mtp.layers.0.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "final_layernorm")},
        **layer,
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


def batch(seed=0, mask=None):
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(0, 12, (2, 2, 8), generator=generator)
    drawn = (torch.rand(2, 8, generator=generator) < torch.tensor([[0.9], [0.5]])).float()
    return Batch(
        input_ids=ids,
        target_ids=targets,
        token_mask=drawn if mask is None else torch.full((2, 8), float(mask)),
        position_ids=torch.arange(8).expand(2, 8),
        packed_cu_seqlens=torch.tensor([[0, 4, 8], [0, 8, -1]], dtype=torch.int32),
        packed_cu_seqlens_lengths=torch.tensor([3, 2]),
        packed_max_seqlen=torch.tensor([4, 8]),
        input_lengths=torch.full((2,), 8),
        sample_mask=torch.ones(2),
    )


def gradient(**settings):
    model = Model.from_tensors(SHAPE, named())
    objective = global_objective(model, batch(), Settings(schedule=COSINE, **settings))
    return global_norm({"all": torch.cat([each.flatten() for each in model.gradients(objective.value).values()])})


def test_r_train_8_a_steps_gradient_depends_on_the_layout_only_as_predicted():
    plain = gradient(mtp_weights="rows")
    for data, context in ((2, 1), (1, 2), (2, 2)):
        sizes = {"data_parallel_size": data, "context_parallel_size": context}
        assert gradient(mtp_weights="rows", **sizes) == pytest.approx(plain, rel=1e-7)
        if context > 1:
            assert gradient(normalization="mean_of_means", **sizes) != pytest.approx(plain, rel=1e-3)
            assert gradient(**sizes) != pytest.approx(plain, rel=1e-5)  # depths are weighed by the rank's own tokens
    assert len({round(gradient(normalization=each), 9) for each in NORMALIZATIONS}) >= 2


def test_r_loss_10_each_depth_is_reported_as_a_mean_over_ranks_of_its_own_means():
    model, given = Model.from_tensors(SHAPE, named()), batch()
    rows = rows_of(given)
    tokens = [model.losses(row.input_ids, row.target_ids, row.boundaries).tokens for row in rows]
    for depth in range(1, SHAPE.mtp_num_layers + 1):
        masks = [shift(row.mask, row.boundaries, depth) for row in rows]
        pairs = zip(tokens, masks, strict=True)
        means = [float((of_row[depth].detach() * mask).sum() / mask.sum().clamp(min=1)) for of_row, mask in pairs]
        for sizes in ({}, {"data_parallel_size": 2}, {"context_parallel_size": 2, "mtp_weights": "rows"}):
            found = global_objective(model, given, Settings(schedule=COSINE, **sizes)).depths
            assert len(found) == SHAPE.mtp_num_layers
            assert found[depth - 1].loss == pytest.approx(sum(means) / len(means), rel=1e-6)
            targets = float(sum(mask.sum() for mask in masks))
            by_token = sum(mean * float(mask.sum()) for mean, mask in zip(means, masks, strict=True)) / targets
            assert found[depth - 1].token_loss == pytest.approx(by_token, rel=1e-6)
            assert found[depth - 1].empty_shares == sum(not mask.any() for mask in masks) / len(masks)
    by_rank = global_objective(model, given, Settings(schedule=COSINE, context_parallel_size=2)).depths
    assert [each.loss for each in by_rank] != pytest.approx([each.loss for each in found], rel=1e-4)
    assert [each.token_loss for each in by_rank] == pytest.approx([each.token_loss for each in found], rel=1e-6)


def test_a_validation_weighs_tokens_and_moves_nothing():
    trainer = Trainer(Model.from_tensors(SHAPE, named()), Settings(schedule=COSINE))
    before = trainer.weights()
    expected = global_objective(trainer.model, batch(), trainer.settings).reported
    assert trainer.validate([batch()]) == pytest.approx(expected, rel=1e-6)
    assert trainer.validate([batch(), batch()]) == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(before[name], each) for name, each in trainer.weights().items())


def test_the_online_path_adds_an_epsilon_and_refuses_another_normalization():
    direct = gradient(normalization="global_valid_tokens", data_parallel_size=2)
    online = gradient(normalization="global_valid_tokens", data_parallel_size=2, is_online=True)
    assert online == pytest.approx(direct, rel=1e-7)
    with pytest.raises(ValueError, match="must be global_valid_tokens on the online path, got per_token"):
        Settings(schedule=COSINE, is_online=True)


def test_r_train_7_training_follows_a_loop_written_with_torchs_own_optimizer():
    schedule = dataclasses.replace(COSINE, max_lr=1e-2, init_lr=1e-3, min_lr=1e-3, weight_decay=0.2)
    settings = Settings(schedule=schedule, clip_gradient=0.4, beta2=0.95)
    trainer = Trainer(Model.from_tensors(SHAPE, named()), settings)
    taken = trainer.train([batch(step) for step in range(6)])
    other = Model.from_tensors(SHAPE, named())
    leaves = other.weights.named
    groups = [
        {"params": [leaf for leaf in leaves.values() if leaf.ndim > 1], "weight_decay": 0.2},
        {"params": [leaf for leaf in leaves.values() if leaf.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    for step, found in enumerate(taken):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate_at(step)
        objective = global_objective(other, batch(step), settings)
        optimizer.zero_grad()
        objective.value.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(leaves.values(), 0.4))  # also clip / (norm + 1e-6)
        optimizer.step()
        assert found.loss == pytest.approx(objective.reported, rel=1e-6)
        assert found.gradient_norm == pytest.approx(norm, rel=1e-12)
        assert norm > 0.4
    for name, ours in trainer.weights().items():
        assert float((ours - leaves[name].detach()).norm()) <= 1e-9 * float((ours - named()[name]).norm()), name


def test_a_step_with_nothing_to_train_moves_weights_by_their_decay_alone():
    schedule = Schedule(max_lr=0.1, decay_steps=9, weight_decay=0.5)
    trainer = Trainer(Model.from_tensors(SHAPE, named()), Settings(schedule=schedule))
    taken = trainer.step(batch(mask=0))
    assert (taken.loss, taken.gradient_norm) == (0.0, 0.0)
    for name, weight in trainer.weights().items():
        assert torch.equal(weight, named()[name] * (0.95 if weight.ndim > 1 else 1.0)), name


def test_r_train_9_bounds_are_narrow_and_accept_other_rounding_but_not_another_beta():
    schedule = Schedule(max_lr=1e-2, decay_steps=9, weight_decay=0.1)
    settings, batches = Settings(schedule=schedule), [batch(step) for step in range(4)]
    for dtype, narrow in ((torch.float64, 1e-5), (torch.float32, 1e-3)):
        found = train(SHAPE, named(), settings, batches, dtype=dtype)
        for name, bound in found.weight_bounds.items():
            assert 0 < bound <= narrow * found.moved[name], name
        wrong = Trainer(
            Model.from_tensors(SHAPE, {name: each.to(dtype) for name, each in named().items()}),
            dataclasses.replace(settings, beta1=0.905),
        )
        wrong.train(batches)
        beyond = [
            name
            for name, each in wrong.weights().items()
            if float((each - found.weights[name]).norm()) > found.weight_bounds[name]
        ]
        assert len(beyond) == len(found.weights)
    with pytest.raises(ValueError, match="must be float32 or float64"):
        train(SHAPE, named(), settings, batches, dtype=torch.bfloat16)
    balanced = Model(dataclasses.replace(SHAPE, moe_aux_loss_coeff=0.1), {}, None)
    with pytest.raises(ValueError, match="moe_aux_loss_coeff must be 0"):
        Trainer(balanced, dataclasses.replace(settings, normalization="mean_of_means"))
